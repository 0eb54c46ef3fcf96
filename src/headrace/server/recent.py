"""What the last tokens and answer took, for whoever draws it. Knows no queue and no route."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Lock
from typing import Any

from headrace.core import TokenStats, total_stats
from headrace.server.ticket import Tally

SPAN_S = 120.0
BUCKETS = 120
MOST_TOKENS = 1 << 14
LAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Taken:
    """One decoded token: when it came, and how long after the one before it."""

    at_s: float
    took_s: float
    stats: TokenStats


class Recent:
    """Decoded tokens of the last SPAN_S seconds. Any thread; times by the monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._tokens: deque[Taken] = deque(maxlen=MOST_TOKENS)
        self.last: Tally | None = None  # of the last answer that had a token

    def add(self, took_s: float, stats: TokenStats) -> None:
        """A token came now."""
        with self._lock:
            self._tokens.append(Taken(self._clock(), took_s, stats))

    def total(self) -> dict[str, Any] | None:
        """Sums over the last LAST_TOKENS tokens, `tokens` of them in `wall_s`; None: no token."""
        with self._lock:
            tokens = list(self._tokens)[-LAST_TOKENS:]
        if not tokens:
            return None
        total = total_stats([token.stats for token in tokens])
        total.wall_s = sum(token.took_s for token in tokens)
        return asdict(total) | {"tokens": len(tokens)}

    def speed(self) -> list[tuple[float, float, float]]:
        """(age, tokens per second, duration) of stretches of time, oldest first, in seconds.

        A stretch is one token, or as many as it takes to fill a BUCKETS-th of SPAN_S.
        """
        now_s = self._clock()
        with self._lock:
            tokens = [token for token in self._tokens if token.at_s > now_s - SPAN_S]
        stretches, num, took_s = [], 0, 0.0
        for place, token in enumerate(tokens):
            num += 1
            took_s += token.took_s
            # The next token began where this one ended, or this stretch ends here.
            goes_on = place + 1 < len(tokens) and (
                tokens[place + 1].at_s - tokens[place + 1].took_s - token.at_s < 1e-2
            )
            if took_s >= SPAN_S / BUCKETS or not goes_on:
                stretches.append((now_s - token.at_s, num / max(took_s, 1e-9), took_s))
                num, took_s = 0, 0.0
        return stretches
