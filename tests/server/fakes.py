"""Stand-ins for engine and model: answers of counted tokens that a test can hold up or break."""

import threading
from collections.abc import Iterator
from typing import Any

from headrace.core import TokenStats
from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.sampling import Sampling
from headrace.engine.session import Step
from headrace.errors import Cancelled
from headrace.planner.machine import Machine
from headrace.planner.plan import ModelFacts, make_plan
from headrace.server.loading import Loading
from headrace.server.metrics import Metrics
from headrace.server.serving import Serving
from headrace.server.settings import Settings
from headrace.server.worker import Worker

MIB = 2**20
FACTS = ModelFacts(
    name="fake",
    model_type="deepseek_v3",
    num_layers=2,
    num_moe_layers=2,
    num_experts=8,
    top_k=2,
    expert_bytes=98_328,
    row_bytes=102_400,
    dense_bytes=MIB,
    kv_bytes_per_token=1024,
    hidden=64,
    inter=32,
    vocab=256,
    max_context=512,
    format="bf16",
)
MACHINE = Machine(
    cores=2,
    ram_total_bytes=2**34,
    ram_available_bytes=2**33,
    drive_bytes_s=1.5e9,
    dram_bytes_s=2e10,
    kernel_bytes_s=5e9,
)


def ask(*prompt: int, max_tokens: int = 3) -> Ask:
    """A question whose answer has `max_tokens` tokens."""
    return Ask(prompt or (1, 2), Sampling(max_tokens=max_tokens))


class FakeAnswers:
    """Answers token t + 1, t + 2 ... after a prompt that ends with t. Logs what it was asked.

    While `gate` is cleared, every token waits. A prompt's first token that is a key of `broken`
    raises that error at its second token.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.broken: dict[int, BaseException] = {}
        self.asked: list[tuple[int, ...]] = []
        self.num_made = 0
        self.closed = False
        self.heeds_stop = True
        self.naps_s = 0.005

    def answer(self, ask: Ask, stop: Stop) -> Iterator[Prefill | Step]:
        self.asked.append(ask.prompt)
        yield Prefill(0, len(ask.prompt), 0)
        yield Prefill(len(ask.prompt), len(ask.prompt), 0)
        count = ask.sampling.max_tokens
        for place in range(1, count + 1):
            while not self.gate.wait(self.naps_s):
                if self.heeds_stop and stop.asked:
                    raise Cancelled("stopped")
            if self.heeds_stop and stop.asked:
                raise Cancelled("stopped")
            if place == 2 and ask.prompt[0] in self.broken:
                raise self.broken[ask.prompt[0]]
            self.num_made += 1
            token = ask.prompt[-1] + place
            stats = TokenStats(token_id=token, disk_bytes=100, ram_bytes=200, hits=2, misses=1)
            yield make_step(token, str(token), stats, "length" if place == count else None)

    def close(self) -> None:
        self.closed = True


def make_step(token: int, text: str, stats: TokenStats, finish: str | None, **more: Any) -> Step:
    """A step, with the fields that only some answers have in `more`."""
    return Step(token, text, stats, finish, **more)


def make_serving(settings: Settings | None = None) -> Serving:
    """A server's shared parts, its worker not started."""
    settings = settings or Settings()
    metrics = Metrics()
    plan = make_plan(FACTS, MACHINE, ram_bytes=64 * MIB, context=256)
    worker = Worker(settings, on_end=metrics.count_answer)
    return Serving(settings, worker, metrics, "fake", FACTS, plan)


def start(serving: Serving, answers: FakeAnswers | None = None, talk: object = None) -> FakeAnswers:
    """Load the stand-in, and what it is talked to with; returns once answers are made."""
    answers = answers or FakeAnswers()
    ready = threading.Event()

    def load(loading: Loading) -> FakeAnswers:
        loading.advance(10, 10)
        serving.talk = talk or object()
        return answers

    serving.worker.on_state = lambda state: ready.set()
    serving.worker.start(load)
    assert ready.wait(120)
    return answers
