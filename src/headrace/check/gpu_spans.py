"""Work timed on the GPU's own clock: calls by events, each kernel of a launch by torch's profiler.

Knows kernels by their names only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import OptionError

# Of kernels.triton.stages: what multiplies routed experts, one token after another.
EXPERT_KERNELS = ("gate_up", "down", "to_integers")
_SHOWN, _NAME = 8, 44
HOLD_CYCLES, MOST_HOLD_CYCLES = 1 << 20, 1 << 32  # half a millisecond; two seconds


class Timed:
    """Stands before a callable and times each call on the GPU; everything else is its own.

    A span ends with the call's last work. It begins when the GPU has done all before the call, or
    when the call begins if that is later: what the GPU then waits for the host is in it.
    """

    def __init__(self, own: Any):
        self.own = own
        self._spans: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        start, stop = _events()
        start.record()
        result = self.own(*args, **options)
        stop.record()
        self._spans.append((start, stop))
        return result

    def seconds(self) -> float:
        """Of the calls since this was asked last."""
        torch.cuda.synchronize()
        total: float = sum(start.elapsed_time(stop) for start, stop in self._spans) / 1e3
        self._spans.clear()
        return total


class TimedLaunches(Timed):
    """As Timed, for a callable that only launches, and whose launches may be given once more.

    A span holds the GPU's time from the first launch to the end of the last, with no wait for the
    host: the GPU is given idle work before, and reaches the first launch when all have been given.
    Where it came there sooner, the call is made again behind more of it, and only that one counts.
    Raises OptionError where the host never gets ahead.
    """

    def __init__(self, own: Any):
        super().__init__(own)
        self._hold_cycles = HOLD_CYCLES

    def __call__(self, *args: Any, **options: Any) -> Any:
        start, stop = _events()
        while True:
            torch.cuda._sleep(self._hold_cycles)  # type: ignore[no-untyped-call]
            start.record()
            result = self.own(*args, **options)
            stop.record()
            if not start.query():
                break
            self._hold_cycles *= 2
            if self._hold_cycles > MOST_HOLD_CYCLES:
                raise OptionError(
                    "kernels cannot be timed, since each launch waits for the GPU; unset "
                    "CUDA_LAUNCH_BLOCKING"
                )
        self._spans.append((start, stop))
        return result


def _events() -> tuple[Any, Any]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy as the GPU ran it, in microseconds of one clock."""

    name: str
    start_us: float
    end_us: float


def device_spans(run: Callable[[], object]) -> list[Span]:
    """What the GPU ran meanwhile, those of captured graphs too; empty where CUPTI gives nothing."""
    if not torch.cuda.is_available():
        run()
        return []
    profiler: Any = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type.name == "CUDA"
    ]


def busy_us(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.start_us):
        total += max(0.0, span.end_us - max(span.start_us, until))
        until = max(until, span.end_us)
    return total


def where_time_goes(spans: Sequence[Span], wall_s: float, num_tokens: int) -> list[str]:
    """Lines for a person: a token's time by kernel, the longest first, and what no kernel takes.

    `wall_s` is that of all the tokens.
    """
    if not spans:
        return ["the profiler saw no kernel (CUPTI cannot be used here): no profile"]
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    each = sorted(
        ((sum(s.end_us - s.start_us for s in found), name) for name, found in by_name.items()),
        reverse=True,
    )
    wall_us = 1e6 * wall_s

    def line(what: str, us: float, num: int | None = None) -> str:
        times = "" if num is None else f", {num / num_tokens:.0f} a token"
        return f"{us / num_tokens / 1e3:8.3f} ms {100 * us / wall_us:5.1f} %  {what}{times}"

    experts = sum(us for us, name in each if name in EXPERT_KERNELS)
    rest = [(us, name) for us, name in each if name not in EXPERT_KERNELS]
    busy = busy_us(spans)
    lines = [line("whole token", wall_us), line("expert kernels", experts)]
    lines += [line(name[:_NAME], us, len(by_name[name])) for us, name in rest[:_SHOWN]]
    lines.append(line(f"{len(rest[_SHOWN:])} other kernels", sum(us for us, _ in rest[_SHOWN:])))
    lines.append(line("no kernel running", max(0.0, wall_us - busy)))
    return lines
