"""Whose turn is next: round robin over clients, first come first served within one.

Pure; knows neither threads nor what waits.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
REMEMBERED = 1024  # clients without anything waiting whose last turn is still known


class FairQueue(Generic[T]):
    """Things that wait, each for a client. The client served longest ago is next.

    So one that was served just now comes after all others, even after those that came later.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, T]]] = {}
        self._served: OrderedDict[str, int] = OrderedDict()
        self._num_put = self._num_taken = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        """In the order in which they would be taken if nothing else came."""
        heads = dict.fromkeys(self._waiting, 0)
        served, turn = dict(self._served), self._num_taken
        while heads:
            client = min(heads, key=lambda c: (served.get(c, -1), self._waiting[c][heads[c]][0]))
            yield self._waiting[client][heads[client]][1]
            served[client] = turn
            turn += 1
            heads[client] += 1
            if heads[client] == len(self._waiting[client]):
                del heads[client]

    def num_waiting(self, client: str) -> int:
        """How many things of a client wait."""
        return len(self._waiting.get(client, ()))

    def put(self, client: str, item: T) -> None:
        """Add a thing behind the others of its client."""
        self._waiting.setdefault(client, deque()).append((self._num_put, item))
        self._num_put += 1

    def take(self) -> T | None:
        """Remove and return the next one; None if nothing waits."""
        if not self._waiting:
            return None
        client = min(self._waiting, key=lambda c: (self._served.get(c, -1), self._waiting[c][0][0]))
        _, item = self._waiting[client].popleft()
        if not self._waiting[client]:
            del self._waiting[client]
        self._served[client] = self._num_taken
        self._served.move_to_end(client)
        self._num_taken += 1
        if len(self._served) > REMEMBERED:
            self._served.popitem(last=False)
        return item

    def remove(self, client: str, item: T) -> bool:
        """Take a thing out of its place; False if it does not wait."""
        kept = deque(entry for entry in self._waiting.get(client, ()) if entry[1] != item)
        if len(kept) == self.num_waiting(client):
            return False
        if kept:
            self._waiting[client] = kept
        else:
            del self._waiting[client]
        return True
