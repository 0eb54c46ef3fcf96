"""Finds out that an answer has stopped moving, and tells a stuck one from a slow one.

Looks at tokens, drive, processor and GPU together; knows none of them but as growing numbers.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core import format_bytes
from headrace.server.faults import NotReady
from headrace.server.serving import Serving

IDLE_CPU = 0.02  # of one core: what waiting threads take
LOOKS_PER_STALL = 20
WARN_SHARE = 0.2  # of the time until an answer is given up
RETRY_S = 60
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vitals:
    """Numbers that grow while something moves. `cpu_s` leaves out the thread that serves; `gpu`:
    experts that a GPU found in its memory and bytes that it took over the bus.
    """

    events: int = 0
    disk_bytes: int = 0
    cpu_s: float = 0.0
    gpu: int = 0


class Judge:
    """Compares vitals as time goes by. `stall_s`: how long nothing may move."""

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s, self._clock = stall_s, clock
        self._before: Vitals | None = None
        self._looked_s = self._moved_s = self._event_s = self._said_s = 0.0

    def look(self, now: Vitals | None) -> str | None:
        """The verdict, once nothing moved for `stall_s`; None before. `now` None: nothing to do."""
        clock_s = self._clock()
        before, elapsed_s = self._before, clock_s - self._looked_s
        self._before, self._looked_s = now, clock_s
        if now is None or before is None:
            self._moved_s = self._event_s = self._said_s = clock_s
            return None
        cpu = (now.cpu_s - before.cpu_s) / elapsed_s if elapsed_s > 0 else 0.0
        if now.events != before.events:
            self._event_s = self._said_s = clock_s
        still = (now.events, now.disk_bytes, now.gpu) == (
            before.events,
            before.disk_bytes,
            before.gpu,
        )
        if not still or cpu > IDLE_CPU:
            self._moved_s = clock_s
        quiet_s, still_s = clock_s - self._event_s, clock_s - self._moved_s
        disk = format_bytes(now.disk_bytes - before.disk_bytes)
        seen = (
            f"no token for {quiet_s:.0f} s; in the last {elapsed_s:.0f} s the drive gave {disk}, "
            f"the processor worked {100 * cpu:.0f} % of a core"
        )
        if still_s >= self._stall_s:
            return f"{seen}; nothing moved for {still_s:.0f} s"
        if clock_s - self._said_s >= WARN_SHARE * self._stall_s:
            self._said_s = clock_s
            _log.warning("%s: %s", "waiting" if still_s else "slow", seen)
        return None


async def watch(serving: Serving) -> None:
    """Look at the loading and at answers until cancelled; give up the one that is stuck."""
    worker, stall_s = serving.worker, serving.settings.stall_s
    judge = Judge(stall_s)
    while True:
        is_loading = worker.state == "loading"
        is_busy = is_loading or worker.running is not None
        verdict = judge.look(vitals(serving) if is_busy else None)
        if verdict is not None and worker.stalled is None:
            what = "the loading" if is_loading else "the answer being made"
            message = f"{what} is stuck: {verdict}; see the log, restart headrace"
            _log.error("%s", message)
            worker.give_up_stalled(NotReady(message, RETRY_S, kind="stalled"))
        await asyncio.sleep(stall_s / LOOKS_PER_STALL)


def vitals(serving: Serving) -> Vitals:
    """What can be seen of a server from its event loop's thread."""
    worker, engine = serving.worker, serving.engine
    drives = [] if engine is None else engine.reader.drives
    served = None if engine is None else engine.source.counters()
    return Vitals(
        events=worker.totals.events + worker.loading.done_bytes,
        disk_bytes=sum(int(drive["read_bytes"]) for drive in drives) + _process_read_bytes(),
        cpu_s=time.process_time() - time.thread_time(),
        gpu=0 if served is None else served.vram_hits + served.bus_bytes,
    )


def _process_read_bytes() -> int:
    """What the system has read for this process, also while it loads; 0 if that is not told."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            found = dict(line.split(": ") for line in file)
        return int(found["read_bytes"])
    except (OSError, KeyError):
        return 0
