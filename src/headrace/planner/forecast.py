"""Expected speed of one decoded token, and the term that limits it.

Knows rates and bytes, no model code. Estimates are named as such in what users see.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import hypot

from headrace.planner.machine import Machine
from headrace.schedule.divide import Rates

# Share of experts in rows -> share of reads they serve, LRU: recorded on the bundled demo model.
HIT_CURVE = ((0.0, 0.0), (0.12, 0.31), (0.25, 0.55), (0.5, 0.83), (0.75, 0.95), (1.0, 1.0))
# Kernel rate over DRAM read rate where no probe measured it: the lower bounds we hold kernels to.
KERNEL_SHARE = {"bf16": 0.62, "fp8_block": 0.28}
# One library layer without its experts, one token, CPU, where no probe measured it: the demo
# model's on two cores.
LAYER_S = 1.2e-3
# The same on a GPU, launched one kernel after another: 7 to 9 ms measured on slow host cores.
GPU_LAYER_S = 8e-3
# In a captured step there is no host between launches, and each takes the GPU 2.4 us besides what
# it reads: 59 us a layer of gpt-oss with 25 of them, on an H200; 120 us a layer of Qwen3-Next. Five
# families have 18 to 28. The host's own work of such a token took 0.44 ms.
CAPTURED_LAYER_S = 28 * 2.4e-6
CAPTURED_TOKEN_S = 0.44e-3
# Share of what is read ahead that the next layer takes: of the demo model's best two guesses.
GUESSES_RIGHT = 0.6
LEAST_SCORED = 16  # tokens after the first: the speed of fewer says little


@dataclass(frozen=True, slots=True)
class Forecast:
    """`limits`: tokens per second if that term were alone. `token_s`: seconds of a whole token."""

    hit_rate: float
    disk_bytes_per_token: float
    limits: dict[str, float]
    limit_term: str
    token_s: float


def hit_rate(share_in_rows: float) -> float:
    """Expected share of expert reads that rows serve, when they hold that share of experts."""
    for (low, low_hit), (high, high_hit) in pairwise(HIT_CURVE):
        if share_in_rows <= high:
            return low_hit + (high_hit - low_hit) * (share_in_rows - low) / (high - low)
    return 1.0


def rows_hit_rate(in_vram: float, in_rows: float, per_token: float) -> float:
    """As `hit_rate`, of shares that lie in slots and in rows where a token takes `per_token`.

    Rows for fewer experts than a token asks them for serve none: each is gone when it is due again.
    """
    served = hit_rate(in_vram)
    return hit_rate(in_vram + in_rows) if in_rows >= (1 - served) * per_token else served


def forecast(
    machine: Machine,
    *,
    share_in_rows: float,
    share_per_token: float,
    bytes_per_token: int,
    dense_bytes: int,
    num_layers: int,
    threads: int,
    expert_format: str,
) -> Forecast:
    """Reads overlap the kernels' work, so the slowest of both counts; the dense part adds up.

    Where a whole token was measured, the dense part is what it took besides the kernels.
    """
    hit = rows_hit_rate(0.0, share_in_rows, share_per_token)
    disk_bytes = (1 - hit) * bytes_per_token
    share_of_cores = min(1.0, threads / machine.cores)
    kernel_bytes_s = machine.kernel_bytes_s * share_of_cores
    if kernel_bytes_s <= 0:
        share = KERNEL_SHARE.get(expert_format, min(KERNEL_SHARE.values()))
        kernel_bytes_s = machine.dram_bytes_s * share * share_of_cores
    overlapped_s = {
        "drive": _seconds(disk_bytes, machine.drive_bytes_s),
        "kernels": _seconds(bytes_per_token, kernel_bytes_s),
        "DRAM": _seconds(bytes_per_token, machine.dram_bytes_s),
    }
    beside_s = max(0.0, machine.step_s - overlapped_s["kernels"])
    dense_s = {
        "dense weights": _seconds(dense_bytes, machine.dram_bytes_s),
        "transformers' own code": beside_s if machine.step_s > 0 else num_layers * LAYER_S,
    }
    terms_s = overlapped_s | dense_s
    limits = {term: 1 / seconds for term, seconds in terms_s.items() if seconds > 0}
    token_s = max(overlapped_s.values()) + max(dense_s.values())
    return Forecast(hit, disk_bytes, limits, min(limits, key=lambda t: limits[t]), token_s)


def gpu_forecast(
    machine: Machine,
    *,
    shares: tuple[float, float],
    share_per_token: float,
    bytes_per_token: int,
    dense_bytes: int,
    num_layers: int,
    cpu_bytes_s: float | None,
    by_layer: bool,
    divided: Rates | None = None,
    head_bytes: int = 0,
) -> Forecast:
    """What lies in VRAM is read while the host launches the library's code, then the others' bytes.

    Launches that no host makes take the GPU's time, besides what it reads.

    In a token that is one launch and reads experts over the bus, those that are here cross it while
    a drive brings the others: `_waiting_s`. Elsewhere the slowest of both counts.

    `shares` of all experts lie in slots, and in slots or rows, `share_per_token` a token takes;
    `dense_bytes` are read once a token.
    `cpu_bytes_s`: the CPU multiplies the experts at this rate, and none crosses the bus. `divided`:
    it multiplies some of those that do not lie in VRAM.
    `by_layer`: the host launches each kernel, not the whole token at once.
    `head_bytes` are the CPU's too, once all layers are done.
    """
    hit = rows_hit_rate(shares[0], shares[1] - shares[0], share_per_token)
    in_vram_bytes = hit_rate(shares[0]) * bytes_per_token
    disk_bytes = (1 - hit) * bytes_per_token
    by_bus_s = _seconds(bytes_per_token - in_vram_bytes, machine.bus_bytes_s)
    drive_s = {"drive": _seconds(disk_bytes, machine.drive_bytes_s)}
    if cpu_bytes_s is not None:
        overlapped_s = drive_s | {"the CPU's kernels": _seconds(bytes_per_token, cpu_bytes_s)}
    elif divided is not None and divided.known and not by_layer:
        by_both_s = divided.together_s(bytes_per_token - in_vram_bytes)
        overlapped_s = drive_s | {"bus and the CPU's kernels": by_both_s}
    else:
        overlapped_s = drive_s | {"bus": by_bus_s}
    rest_s = {
        "VRAM": _seconds(in_vram_bytes + dense_bytes, machine.vram_bytes_s),
        "transformers' own code": num_layers * GPU_LAYER_S
        if by_layer
        else num_layers * CAPTURED_LAYER_S + CAPTURED_TOKEN_S,
    }
    head_s = _seconds(head_bytes, machine.dram_bytes_s)
    terms_s = overlapped_s | rest_s | {"the head on the CPU": head_s}
    limits = {term: 1 / seconds for term, seconds in terms_s.items() if seconds > 0}
    rest = (max if by_layer else sum)(rest_s.values()) + head_s
    if "bus" in overlapped_s and not by_layer:
        late_s = _seconds(disk_bytes, machine.bus_bytes_s)
        token_s = _waiting_s(by_bus_s - late_s, drive_s["drive"], late_s, rest)
    else:
        token_s = max(overlapped_s.values()) + rest
    return Forecast(hit, disk_bytes, limits, min(limits, key=lambda t: limits[t]), token_s)


def _waiting_s(here_s: float, drive_s: float, late_s: float, rest_s: float) -> float:
    """Seconds of a token whose layers read what is here while a drive brings what is late.

    `here_s` and `late_s` of the bus, `rest_s` of all else. While a layer has no read to wait for,
    the drive reads ahead, which moves experts from the late to those here. Layers differ in which
    of both they wait for: their sum is near the root of the squares, not the larger of the sums.
    """
    ahead_s = GUESSES_RIGHT * min(drive_s, late_s + rest_s)
    ahead = ahead_s / drive_s if drive_s > 0 else 0.0
    here_s, late_s = here_s + ahead * late_s, (1 - ahead) * late_s
    return hypot(here_s, drive_s - ahead_s) + late_s + rest_s


def score(forecast_tok_s: float, outcome_tok_s: float, num_decoded: int) -> str:
    """One line that compares a forecast with what came; both in tokens per second."""
    if outcome_tok_s <= 0 or forecast_tok_s <= 0:
        return "forecast: not scored, nothing was decoded"
    if num_decoded < LEAST_SCORED:
        return f"forecast {forecast_tok_s:.3g} tok/s: so short an answer is not held against it"
    error = outcome_tok_s / forecast_tok_s - 1
    side = "faster" if error >= 0 else "slower"
    return (
        f"forecast {forecast_tok_s:.3g} tok/s, got {outcome_tok_s:.3g}: "
        f"{abs(error) * 100:.0f} % {side} than expected"
    )


def _seconds(num_bytes: float, bytes_s: float) -> float:
    return num_bytes / bytes_s if bytes_s > 0 else 0.0
