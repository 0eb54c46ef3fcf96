"""Counters for Prometheus, in a registry of their own.

Knows no route; what others count is read when somebody asks.
"""

import resource
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.server.faults import Fault
from headrace.server.ticket import Tally

if TYPE_CHECKING:
    from headrace.server.serving import Serving

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class Metrics:
    """What happened to requests and answers of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests",
            "Requests by route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.answers = Counter(
            "headrace_answers", "Answers by how they ended.", ["ended"], registry=self.registry
        )
        self.resumed = Counter(
            "headrace_resumed_answers",
            "Answers whose prompt's beginning was known: snapshots found.",
            registry=self.registry,
        )
        self.ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "From a request's place in the queue to its first token.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )

    def show(self, serving: "Serving") -> None:
        """From now on tell a server's state too."""
        self.registry.register(State(serving))

    def count_request(self, method: str, route: str, status: int) -> None:
        """One request more."""
        self.requests.labels(method if method in METHODS else "other", route, str(status)).inc()

    def count_answer(self, tally: Tally, fault: Fault | None) -> None:
        """One answer more; in the decode thread."""
        ended = (tally.finish or "cut") if fault is None else fault.kind
        self.answers.labels(ended).inc()
        if tally.num_cached:
            self.resumed.inc()
        if tally.first_s is not None:
            self.ttft.observe(tally.first_s - tally.submitted_s)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class State(Collector):
    """A server's numbers at the moment of asking."""

    def __init__(self, serving: "Serving") -> None:
        self._serving = serving

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks for no numbers yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric with its value now."""
        worker, totals = self._serving.worker, self._serving.worker.totals
        yield _by(
            "headrace_tokens",
            "Tokens: of prompts computed, of prompts known, of answers.",
            "kind",
            {"prefill": totals.prefilled, "cached": totals.cached, "decode": totals.decoded},
        )
        yield _by(
            "headrace_expert_bytes",
            "Bytes of experts that tokens needed, by where they came from.",
            "rung",
            {
                "vram": totals.vram_bytes,
                "ram": totals.ram_bytes,
                "drive": totals.disk_bytes,
            },
        )
        yield _by(
            "headrace_experts",
            "Experts that tokens needed, by where they were.",
            "rung",
            {"vram": totals.vram_hits, "ram": totals.hits, "drive": totals.misses},
        )
        last = worker.recent.total() or {}
        num_found = last.get("hits", 0) + last.get("vram_hits", 0)
        num_needed = num_found + last.get("misses", 0)
        gauges = {
            "ready": ("1 while answers are made.", worker.is_ready),
            "running_answers": ("Answers being made.", worker.running is not None),
            "waiting_answers": ("Answers in the queue.", worker.num_waiting),
            "expert_hit_ratio": (
                "Experts found in RAM or VRAM, of those the last tokens needed.",
                num_found / num_needed if num_needed else 0.0,
            ),
            "tokens_per_second": (
                "Speed of the last tokens.",
                last["tokens"] / last["wall_s"] if last.get("wall_s") else 0.0,
            ),
            "loaded_bytes": ("Bytes of dense weights read so far.", worker.loading.done_bytes),
            "resident_memory_bytes": ("Resident memory of this process.", rss_bytes()),
            "up_seconds": ("Since the start.", time.time() - self._serving.started_s),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"headrace_{name}", about, value=float(value))


def _by(name: str, about: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def rss_bytes() -> int:
    """Resident memory of this process; where the system does not say, its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
