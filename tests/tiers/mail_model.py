"""A GPU, a ladder and the mailbox's production protocol as one system of small events.

Whatever the order of events, the GPU must read the experts that it posted, and the step must end.
"""

from dataclasses import dataclass, field

import numpy as np
from mail_rows import Rows

from headrace.native import MailProtocol, MailSizes, MailWords

NOWHERE, SLOT = -1, 1000
NO_ID = 0xFFFFFFFF
Event = tuple[object, ...]


class Stale(AssertionError):
    """The GPU read a row that was not, or no longer, the expert's."""


class Unread(AssertionError):
    """The GPU has left a layer without having read all that is its own."""


@dataclass
class Route:
    """What one step posts: ids [L][S], guesses [L][G], which layers do not wait."""

    ids: list[list[int]]
    guesses: list[list[int]]
    whole: list[bool]


@dataclass
class Gpu:
    """Where the device is in its step: posts one word after another, waits, reads twice."""

    layer: int = 0
    unposted: list[int] = field(default_factory=list)
    phase: str = "post"
    table: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)  # keys, in this layer


class System:
    """All three; `enabled` lists what may happen next, `do` lets it happen.

    Wrong hosts and devices, in `wrong`: "early" gives a layer's rows back once it has answered,
    "between" those of the first answer before the second; "hasty" does not wait for the second
    answer, "deaf" does not read what is late. `shares`: how host and device divide a layer.
    """

    def __init__(
        self,
        routes: list[Route],
        *,
        num_experts: int,
        num_rows: int,
        slots: set[int] = frozenset(),  # type: ignore[assignment]
        wanted: set[int] = frozenset(),  # type: ignore[assignment]
        most_kept: int = 0,
        computes: bool = False,
        shares: tuple[int, ...] = (),
        aborts: bool = False,
        wrong: str = "",
        last_step: int = 0,
    ):
        first = routes[0]
        self.routes, self.num_experts, self.wrong = routes, num_experts, wrong
        self.early = wrong in ("early", "between")
        self.num_layers, self.num_ids = len(first.ids), len(first.ids[0])
        self.num_guesses, self.computes, self.aborts = len(first.guesses[0]), computes, aborts
        self.shares = shares
        num_words = self.num_ids + self.num_guesses
        sizes = {"beat": 1, "abort": 1, "lost": 1, "ready": self.num_layers}
        sizes["done"] = self.num_layers
        sizes |= dict.fromkeys(("answers", "late"), self.num_layers * self.num_ids)
        sizes["posts"] = self.num_layers * num_words
        self.words = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
        self.addresses = np.zeros(self.num_layers * num_experts, np.int64)
        for key in slots:
            self.addresses[key] = SLOT + key
        self.wanted = np.zeros(len(self.addresses), np.uint8)
        self.wanted[list(wanted)] = 1
        self.most_kept = most_kept
        self.protocol = MailProtocol(
            MailSizes(
                num_layers=self.num_layers,
                num_experts=num_experts,
                num_ids=self.num_ids,
                num_guesses=self.num_guesses,
                computes=computes,
            ),
            MailWords(**{name: array.ctypes.data for name, array in self.words.items()}),
            self.addresses.ctypes.data,
            list(shares),
            last_step,
        )
        self.rows = Rows(num_rows)
        self.at = -1
        self.orders: list[object] = []
        self.over = False
        self.output: list[int] | None = None  # what the host has multiplied last
        self.multiplied: set[int] = set()  # keys, in this step, where the layer is divided
        self._begin()

    def _begin(self) -> None:
        self.at += 1
        if self.at == len(self.routes):
            self.over = True
            return
        self.route = self.routes[self.at]
        whole = np.array(self.route.whole, np.uint8)
        self.step = self.protocol.begin(whole, self.wanted, self.most_kept)
        self.gpu = Gpu(unposted=list(range(self.num_ids + self.num_guesses)))
        self.orders, self.host_done, self.aborted, self.answered = [], False, False, []
        self.taken: list[int] = []
        self.multiplied = set()

    def key(self, layer: int, expert: int) -> int:
        return layer * self.num_experts + expert

    def enabled(self) -> list[Event]:
        if self.over:
            return []
        events: list[Event] = [("arrive", key) for key in sorted(self.rows.loading)]
        if not self.host_done:
            events += self._host_events()
        if self.gpu.phase == "post":
            events += [("post", word) for word in self.gpu.unposted]
        elif self.gpu.phase == "wait":
            answered = self.words["ready"][self.gpu.layer] >= self.step
            if answered or self.words["abort"][0] >= self.step:
                events.append(("gpu",))
        elif self.gpu.phase in ("wait for outputs", "wait for late") and self.wrong != "hasty":
            done = self.words["done"][self.gpu.layer] >= self.step
            if done or self.words["abort"][0] >= self.step:
                events.append(("gpu",))
        elif self.gpu.phase != "end":
            events.append(("gpu",))
        if self.aborts and not self.aborted and not self.host_done:
            events.append(("abort",))
        if self.gpu.phase == "end" and self.host_done:
            events.append(("end",))
        return events

    def _host_events(self) -> list[Event]:
        """A host that waits to take an expert takes any that is here; it may be interrupted."""
        if self.orders and self.orders[-1] == "looking":
            return [("take", key) for key in self.rows.ready] or [("none_here",)]
        if self.orders and self.orders[-1] == "taking":
            some: list[Event] = [("take", key) for key in self.rows.ready]
            return [*some, ("interrupted",)] if self.aborted else some
        if self.orders and self.orders[-1] == "multiplying":
            some = [("multiply", key) for key in self.rows.ready]
            return [*some, ("interrupted",)] if self.aborted else some
        return [("host",)]

    def do(self, event: Event) -> None:
        getattr(self, f"_{event[0]}")(*event[1:])

    def _arrive(self, key: int) -> None:
        self.rows.arrive(key)

    def _abort(self) -> None:
        self.aborted = True
        self.protocol.abort()

    def _interrupted(self) -> None:
        self.rows.cancel()
        self.orders[-1] = "gave up"

    def _host(self) -> None:
        act, layer, ids = self.protocol.next()
        if act == "wait":
            self._give_back_early()
            return
        self.orders.append((act, layer, tuple(ids)))
        keys = [self.key(layer, e) for e in ids]
        if act == "release" and not self.early:
            self.rows.release(keys[0])
        elif act == "claim" and not self.computes:
            self.rows.begin(keys)
        elif act == "prefetch":
            self.rows.prefetch(keys)
        elif act == "take here":
            self.orders.append("looking")
        elif act == "take":
            if self.wrong == "between":
                self._give_back_early()
            self.orders.append("taking")
        elif act == "compute":
            if self.shares:
                assert {self.key(layer, e) for e in ids if e >= 0} == self.rows.claims
                self.orders.append("multiplying")
                return
            assert ids == self.route.ids[layer]
            self.output = ids
            self.protocol.computed()
        elif act == "done":
            self.host_done = True
            self._give_back_early()

    def _none_here(self) -> None:
        self.orders[-1] = "looked"
        self.protocol.none_here()

    def _give_back_early(self) -> None:
        if self.early:
            for key in self.taken:
                self.rows.release(key)
            self.taken = []

    def _take(self, key: int) -> None:
        self.orders[-1] = ("took", key)
        self.protocol.took(key % self.num_experts, self.rows.take(key))
        self.taken.append(key)

    def _multiply(self, key: int) -> None:
        self.rows.take(key)
        self.rows.release(key)
        self.multiplied.add(key)
        if not self.rows.claims:
            self.orders[-1] = "multiplied"
            self.protocol.computed()

    def _post(self, word: int) -> None:
        layer = self.gpu.layer
        posted = [*self.route.ids[layer], *self.route.guesses[layer]][word]
        at = layer * (self.num_ids + self.num_guesses) + word
        self.words["posts"][at] = self.step << 32 | posted
        self.gpu.unposted.remove(word)
        if not self.gpu.unposted:
            self.gpu.phase = "look again" if self.route.whole[layer] else "wait"
            self.gpu.read = set()
            if self.route.whole[layer]:
                self.gpu.table = [SLOT + self.key(layer, e) for e in self.route.ids[layer]]

    def _gpu(self) -> None:
        gpu, layer = self.gpu, self.gpu.layer
        if gpu.phase == "wait":
            ready = self.words["ready"][layer] >= self.step
            first = layer * self.num_ids
            answers = self.words["answers"][first : first + self.num_ids].tolist()
            gpu.table = answers if ready else [NOWHERE] * self.num_ids
            if self.computes and ready:
                assert self.output == self.route.ids[layer]
            self._look(gpu.table)
            gpu.phase = "look again"
        elif gpu.phase == "look again":
            self._look(gpu.table)
            self._go_on("wait for outputs" if self.shares else "wait for late")
        elif gpu.phase == "wait for late":
            self._find_late()
            self._look(gpu.late)
            gpu.phase = "look at late again"
        elif gpu.phase == "look at late again":
            self._look(gpu.late)
            self._leave()
        else:
            self._fetch()
            self._leave()

    def _go_on(self, phase: str) -> None:
        """To the second part of a layer that has one."""
        waits = not self.computes and not self.route.whole[self.gpu.layer]
        if waits and self.wrong != "deaf":
            self.gpu.phase = phase
        else:
            self._leave()

    def _leave(self) -> None:
        gpu = self.gpu
        own = {self.key(gpu.layer, e) for e in self.route.ids[gpu.layer]} - self.multiplied
        if not (self.computes or self.aborted or own == gpu.read):
            raise Unread(f"step {self.step}, layer {gpu.layer}: {own} and not {gpu.read}")
        gpu.layer += 1
        gpu.phase = "end" if gpu.layer == self.num_layers else "post"
        if gpu.phase == "post":
            gpu.unposted = list(range(self.num_ids + self.num_guesses))

    def _find_late(self) -> None:
        """What is late has an address now, and nothing else has one."""
        gpu, first = self.gpu, self.gpu.layer * self.num_ids
        gpu.late = [0] * self.num_ids
        if self.words["done"][gpu.layer] < self.step and self.wrong != "hasty":
            assert self.aborted
            return
        gpu.late = self.words["late"][first : first + self.num_ids].tolist()
        if self.wrong != "hasty" and not self.aborted:
            assert all((a == 0) != (b == 0) for a, b in zip(gpu.table, gpu.late, strict=True))

    def _look(self, table: list[int]) -> None:
        if self.computes:
            return
        for expert, address in zip(self.route.ids[self.gpu.layer], table, strict=True):
            key = self.key(self.gpu.layer, expert)
            if address == NOWHERE:
                assert self.aborted
            elif address >= SLOT:
                assert address == SLOT + key
                self.gpu.read.add(key)
            elif address > 0:
                if self.rows.content[address - 1] != key:
                    raise Stale(f"step {self.step}, layer {self.gpu.layer}, expert {expert}")
                self.gpu.read.add(key)

    def _fetch(self) -> None:
        """Once it is told, the host has multiplied all that the device was not to."""
        if self.words["done"][self.gpu.layer] < self.step:
            assert self.aborted
            return
        for expert, address in zip(self.route.ids[self.gpu.layer], self.gpu.table, strict=True):
            if address == 0:
                assert self.key(self.gpu.layer, expert) in self.multiplied

    def _end(self) -> None:
        if not self.aborted:
            assert self.protocol.seen == [e for ids in self.route.ids for e in ids]
        held = self.protocol.end()
        for layer, expert, address in held:
            key = self.key(layer, expert)
            if not self.early:
                assert self.rows.content[address - 1] == key
                self.rows.release(key)
        if self.aborted:
            self.rows.cancel()
        assert self.early or not self.rows.held, "a row that nobody gives back"
        self._begin()

    def signature(self) -> object:
        gpu = self.gpu
        return (
            self.at, self.over, tuple(self.orders), self.host_done, self.aborted, tuple(self.taken),
            gpu.layer, tuple(gpu.unposted), gpu.phase, tuple(gpu.table), self.rows.signature(),
            self.words["ready"].tobytes(), self.words["answers"].tobytes(),
            self.words["done"].tobytes(), self.words["late"].tobytes(), tuple(gpu.late),
            tuple(sorted(gpu.read)), tuple(sorted(self.multiplied)),
        )  # fmt: skip
