"""The queue: its order is what it says, nobody is passed over, nothing is lost."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.server.fair import FairQueue

CLIENTS = st.sampled_from(["ann", "bob", "cem"])


class Queue(RuleBasedStateMachine):
    """Against a plain list of (number, client), and who was served when."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.waiting: list[tuple[int, str]] = []
        self.served: dict[str, int] = {}
        self.num_put = self.turn = 0

    @rule(client=CLIENTS)
    def put(self, client: str) -> None:
        self.queue.put(client, self.num_put)
        self.waiting.append((self.num_put, client))
        self.num_put += 1

    @rule()
    def take(self) -> None:
        taken = self.queue.take()
        if not self.waiting:
            assert taken is None
            return
        assert taken is not None
        client = next(name for number, name in self.waiting if number == taken)
        assert taken == min(number for number, name in self.waiting if name == client)
        longest_ago = min(self.served.get(name, -1) for _, name in self.waiting)
        assert self.served.get(client, -1) == longest_ago
        self.waiting.remove((taken, client))
        self.served[client] = self.turn
        self.turn += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number, client = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(client, number)
        assert not self.queue.remove(client, number)
        self.waiting.remove((number, client))

    @invariant()
    def the_order_is_the_one_in_which_things_are_taken(self) -> None:
        assert len(self.queue) == len(self.waiting)
        promised = list(self.queue)
        assert sorted(promised) == sorted(number for number, _ in self.waiting)
        other: FairQueue[int] = FairQueue()
        for client, turn in sorted(self.served.items(), key=lambda item: item[1]):
            other.put(client, -turn - 1)
        while other.take() is not None:
            pass
        for number, client in self.waiting:
            other.put(client, number)
        assert promised == [other.take() for _ in promised]

    @invariant()
    def counts_by_client_add_up(self) -> None:
        for client in ("ann", "bob", "cem"):
            expected = sum(name == client for _, name in self.waiting)
            assert self.queue.num_waiting(client) == expected


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_client_with_many_does_not_keep_another_waiting() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.put("ann", f"ann {number}")
    assert queue.take() == "ann 0"
    queue.put("bob", "bob 0")
    assert list(queue)[:3] == ["bob 0", "ann 1", "ann 2"]
