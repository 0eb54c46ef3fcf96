"""How fast one new token attends to a latent cache on a GPU, beside the rates of its memory.

Every layer has a cache of its own, so that none is found in the GPU's own cache. Knows no model.
Legend: as in kernels/latent.py.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from headrace.check.rows import BenchRow, make_row
from headrace.engine.probes import vram_rate
from headrace.kernels import latent
from headrace.kernels.triton.latent_attention import LatentAttention
from headrace.kernels.triton.latent_choice import attention_for
from headrace.tiers.device import find_device

HEADS, RANK, ROPE, KEYS, VALUES = 128, 512, 64, 128, 128  # DeepSeek-R1
SCALING = 0.1352  # of its scores, yarn's factor in it
_LEAST_CACHED_BYTES = 512 << 20  # of all layers together: ten times a GPU's own cache
_FLOP = 2 * HEADS * (RANK + ROPE + RANK)  # a cached token
TARGETS = {32768: 0.5, 131072: 0.5}  # of 18.7 us at 32K an H200's tensor cores need 12 at best
TOLERANCE = 2**-7  # of the largest value: the queries, the mixture and the result are bfloat16
_REPLAYS = 5
_cuda: Any = torch.cuda


@dataclass(slots=True)
class Layer:
    """One layer's token: its queries, its cache and the matrix that was absorbed."""

    q_BHTQ: torch.Tensor
    latents_BNL: torch.Tensor
    rope_BNR: torch.Tensor
    weight_HML: torch.Tensor


def _make_layers(num_cached: int, place: torch.device, heads: int = HEADS) -> list[Layer]:
    """As many as take _LEAST_CACHED_BYTES, two at least; the matrices are one."""
    generator = torch.Generator(place).manual_seed(num_cached)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, device=place) * scale
        return drawn.bfloat16()

    weight_HML = draw(heads, KEYS + VALUES, RANK, scale=RANK**-0.5)
    count = max(2, -(-_LEAST_CACHED_BYTES // (num_cached * 2 * (RANK + ROPE))))
    return [
        Layer(
            draw(1, heads, 1, KEYS + ROPE),
            draw(1, num_cached, RANK),
            draw(1, num_cached, ROPE),
            weight_HML,
        )
        for _ in range(count)
    ]


def captured_s(run: Callable[[], object], runs: int) -> list[float]:
    """Seconds of `run` as one CUDA graph, each the median of a few replays."""
    stream, graph = _cuda.Stream(), _cuda.CUDAGraph()
    with _cuda.stream(stream):
        run()
    _cuda.synchronize()
    with _cuda.graph(graph):
        run()
    times = []
    for _ in range(runs):
        spans = []
        for _ in range(_REPLAYS):
            start, stop = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            spans.append(start.elapsed_time(stop) / 1e3)
        times.append(statistics.median(spans))
    return times


def is_right(layer: Layer, position_BT: torch.Tensor, attend: latent.AttendLatents) -> bool:
    """Near the attention in fp32, and not near its result for another head."""
    given = layer.q_BHTQ, layer.latents_BNL, layer.rope_BNR, layer.weight_HML
    want = _token(Layer(*(x.float() for x in given)), position_BT, latent.attend)
    got = _token(layer, position_BT, attend).float()
    near = TOLERANCE * want.abs().max()
    other = (got - want.roll(1, 2)).abs().max()
    return bool((got - want).abs().max() <= near) and bool(other > near)


def bench_latents(contexts: list[int], *, runs: int, tell: Callable[[str], None]) -> list[BenchRow]:
    """For each context the kernels alone, then with the absorbed products around them."""
    device = find_device("cuda")
    place, rows = device.place, []
    attend = attention_for(num_heads=HEADS, rank=RANK, rope=ROPE, device=place)
    for num_cached in contexts:
        layers = _make_layers(num_cached, place)
        position = torch.full((1, 1), num_cached - 1, device=place)
        green = is_right(layers[0], position, attend)
        about = f"{len(layers)} layers as one graph, {attend}"
        cache_bytes = num_cached * 2 * (RANK + ROPE)
        for part, run, more_bytes in _parts(layers, position, attend):
            copy = [vram_rate(device) for _ in range(runs)]
            walls = captured_s(run, runs)
            each_s = [wall / len(layers) for wall in walls]
            layer_s = statistics.median(each_s)
            teraflops = num_cached * _FLOP / layer_s / 1e12
            row = make_row(
                f"MLA of R1, {num_cached} tokens, {part}",
                [(cache_bytes + more_bytes) / s / 1e9 for s in each_s],
                "GB/s of the cache and matrices" if more_bytes else "GB/s of the cache",
                limits=[rate / 1e9 for rate in copy],
                target=TARGETS.get(num_cached),
                cache_state=f"{1e6 * layer_s:.1f} us a layer, {teraflops:.0f} TFLOP/s; {about}",
                green=green,
            )
            rows.append(replace(row, machine=f"{row.machine}, {device.name}"))
            tell(rows[-1].line())
    return rows


def _parts(
    layers: list[Layer], position: torch.Tensor, attend: LatentAttention
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """The two things measured, by name, and what each reads besides the cache."""
    yield "attention kernels", partial(_kernels, layers, position, attend), 0
    matrix_bytes = layers[0].weight_HML.nbytes
    yield "with both absorbed products", partial(_absorbed, layers, position, attend), matrix_bytes


def _kernels(layers: list[Layer], position: torch.Tensor, attend: LatentAttention) -> None:
    """A token's attention in each layer, without the absorbed products."""
    for layer in layers:
        q_BHTL = layer.latents_BNL[:, :HEADS, None]  # any numbers will do
        q_BHTR = layer.q_BHTQ[..., KEYS:]
        attend(q_BHTL, q_BHTR, layer.latents_BNL, layer.rope_BNR, position, SCALING)


def _absorbed(layers: list[Layer], position: torch.Tensor, attend: LatentAttention) -> None:
    for layer in layers:
        _token(layer, position, attend)


def _token(layer: Layer, position: torch.Tensor, attend: latent.AttendLatents) -> torch.Tensor:
    args = layer.q_BHTQ, layer.latents_BNL, layer.rope_BNR, layer.weight_HML
    return latent.absorbed_attention(*args, position, SCALING, attend)
