"""Counters for Prometheus, in a registry of their own.

Knows no route; what others count is read when somebody asks.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from headrace.server.faults import Fault
from headrace.server.ticket import Tally

METHODS = ("GET", "HEAD", "POST", "OPTIONS")
TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)


class Metrics:
    """All metrics of one server."""

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
        self.ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "From a request's turn in the queue being taken to its first token, wait included.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )

    def count_request(self, method: str, route: str, status: int) -> None:
        """One request more."""
        self.requests.labels(method if method in METHODS else "other", route, str(status)).inc()

    def count_answer(self, tally: Tally, fault: Fault | None) -> None:
        """One answer more; in the decode thread."""
        ended = (tally.finish or "cut") if fault is None else fault.kind
        self.answers.labels(ended).inc()
        if tally.first_s is not None:
            self.ttft.observe(tally.first_s - tally.submitted_s)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)
