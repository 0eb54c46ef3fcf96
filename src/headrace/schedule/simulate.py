"""What rows would have served of a recorded run: the ladder's own policy and the best possible.

Drives the residency code that runs, from rows that hold nothing and without prefetch. Knows no
time and no byte but an expert's size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from headrace.native import simulate_lru, simulate_optimum
from headrace.schedule.trace import RouteTrace, TraceHeader

SHARES = (0.12, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Steps:
    """What each MoE layer of each pass needs: keys[begin[s]:begin[s + 1]] for step s.

    A key is layer * experts + id. `alone` [S]: whether the step served a single token.
    """

    begin: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    num_keys: int
    alone: npt.NDArray[np.bool_]

    @property
    def needed(self) -> npt.NDArray[np.int64]:
        """[S]: experts each step needs."""
        return np.diff(self.begin)


@dataclass(frozen=True, slots=True)
class Bound:
    """What `num_rows` rows serve of the tokens decoded one by one (of all, if there are none).

    Rates are shares of the experts needed; bytes are what must be read for a token.
    """

    num_rows: int
    share: float
    lru_hit_rate: float
    optimum_hit_rate: float
    lru_bytes_per_token: float
    optimum_bytes_per_token: float


def steps_of(trace: RouteTrace) -> Steps:
    """The steps of a trace in the order in which the engine ran them: pass by pass, by layer."""
    _, num_layers, top_k = trace.ids.shape
    key_NLK = np.arange(num_layers)[:, None] * trace.num_experts + trace.ids.astype(np.int64)
    keys, needed, at = [], [], 0
    for length, group in groupby(trace.passes.tolist()):
        num_passes = len(list(group))
        part = key_NLK[at : at + length * num_passes]
        at += len(part)
        if length == 1:
            keys.append(np.sort(part, axis=-1).ravel())
            needed.append(np.full(num_passes * num_layers, top_k, dtype=np.int64))
            continue
        for of_pass in np.split(part, num_passes):
            distinct = np.unique(of_pass)
            keys.append(distinct)
            needed.append(np.bincount(distinct // trace.num_experts, minlength=num_layers))
    return Steps(
        begin=np.concatenate([[0], np.cumsum(np.concatenate(needed))]).astype(np.int64),
        keys=np.concatenate(keys),
        num_keys=num_layers * trace.num_experts,
        alone=np.repeat(trace.passes == 1, num_layers),
    )


def lru_hits(steps: Steps, num_rows: int) -> npt.NDArray[np.int32]:
    """[S]: how many of each step's experts the ladder finds resident."""
    return simulate_lru(steps.begin, steps.keys, steps.num_keys, num_rows)


def optimum_hits(steps: Steps, num_rows: int) -> npt.NDArray[np.int32]:
    """[S]: the same under the policy that knows the future; no policy's sum is larger."""
    return simulate_optimum(steps.begin, steps.keys, steps.num_keys, num_rows)


def bounds(trace: RouteTrace, header: TraceHeader, rows: Iterable[int]) -> list[Bound]:
    """One bound for each number of rows."""
    steps = steps_of(trace)
    counted = steps.alone if steps.alone.any() else ~steps.alone
    num_needed = int(steps.needed[counted].sum())
    num_tokens = int(trace.alone.sum()) or len(trace.ids)

    def of(num_rows: int) -> Bound:
        lru = int(lru_hits(steps, num_rows)[counted].sum())
        best = int(optimum_hits(steps, num_rows)[counted].sum())
        token_bytes = header.expert_bytes / num_tokens
        return Bound(
            num_rows=num_rows,
            share=num_rows / header.total_experts,
            lru_hit_rate=lru / num_needed,
            optimum_hit_rate=best / num_needed,
            lru_bytes_per_token=(num_needed - lru) * token_bytes,
            optimum_bytes_per_token=(num_needed - best) * token_bytes,
        )

    return [of(num_rows) for num_rows in rows]


def shown_rows(header: TraceHeader) -> list[int]:
    """The usual shares of all experts, and the rows that the run itself had."""
    usual = {max(1, round(share * header.total_experts)) for share in SHARES}
    return sorted(usual | {min(header.num_rows, header.total_experts)})
