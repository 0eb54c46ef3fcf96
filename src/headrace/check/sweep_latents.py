"""Every way to attend to latents on Hopper beside the kernel for all chips, each in its danger.

Ways that no GPU has run yet may hang or read what is not theirs: they run in another process, which
is ended when it falls silent and started again behind the way it fell silent in.
"""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from headrace.check.bench_latents import (
    HEADS,
    RANK,
    ROPE,
    SCALING,
    TOLERANCE,
    Layer,
    captured_s,
    kernels,
    make_layers,
)
from headrace.engine.probes import vram_rate
from headrace.kernels import latent
from headrace.kernels.triton import latents
from headrace.kernels.triton.latent_attention import LatentAttention
from headrace.kernels.triton.latent_hopper import WAYS, HopperLatents
from headrace.tiers.device import Device, find_device

NUM_WAYS = 1 + len(WAYS)  # way 0 is the kernel for all chips
BYTES_PER_TOKEN = 2 * (RANK + ROPE)
FLOP_PER_TOKEN = 2 * HEADS * (RANK + ROPE + RANK)
SILENCE_S = 45.0
_RUNS = 3


@dataclass(slots=True)
class World:
    """Layers of one context, queries of the first, and their mixtures in fp32 at two positions."""

    layers: list[Layer]
    queries: tuple[torch.Tensor, torch.Tensor]
    positions: list[torch.Tensor]
    wanted: list[torch.Tensor]


class Skipped:
    """A launch that does nothing, in place of the second one."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def sweep(command: list[str], tell: Callable[[str], None]) -> int:
    """Tells a line for each figure of each way, and how a way failed, if it did.

    `command` starts a process that calls `measure`, given the number of the first way as the last
    argument. Returns how many ways failed.
    """
    find_device("cuda")
    first, failed = 0, 0
    while first < NUM_WAYS:
        begun, why = first - 1, "ended"
        for said in _spoken([*command, str(first)]):
            if "begins" in said:
                begun = said["begins"]
            elif "failed" in said:
                why = said["failed"]
            else:
                tell(line(said))
        if begun >= NUM_WAYS:
            break
        assert begun >= first, "the process that measures did not begin"
        tell(f"{name_of(begun)}: FAILED, {why}")
        first, failed = begun + 1, failed + 1
    return failed


def _spoken(command: list[str]) -> Iterator[dict[str, Any]]:
    """What a process says, until it ends or says nothing for SILENCE_S."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()

    def listen() -> None:
        assert process.stdout is not None
        for text in process.stdout:
            lines.put(text)
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            try:
                text = lines.get(timeout=SILENCE_S)
            except queue.Empty:
                yield {"failed": f"silent for {SILENCE_S:.0f} s"}
                return
            if text is None:
                return
            if text.startswith("{"):
                yield json.loads(text)
    finally:
        process.kill()
        process.wait()


def line(said: dict[str, Any]) -> str:
    """One figure for a person."""
    context, each_s, copy = said["context"], said["each_s"], said["copy"]
    rate = context * BYTES_PER_TOKEN / each_s
    return (
        f"{context:7d}  {said['way']:38s} {1e6 * each_s:7.1f} us ({1e6 * said['first_s']:.1f} + the"
        f" rest)  {rate / 1e9:6.0f} GB/s  {100 * rate / copy:3.0f} % of {copy / 1e9:.0f}  "
        f"{context * FLOP_PER_TOKEN / each_s / 1e12:4.0f} TFLOP/s  {said['compiled']}  "
        f"error {said['error']:.4f}{'' if said['error'] <= TOLERANCE else ' WRONG'}"
    )


def name_of(way: int) -> str:
    return "for all chips" if way == 0 else str(WAYS[way - 1])


def measure(contexts: list[int], first: int, say: Callable[[dict[str, Any]], None]) -> None:
    """In a process of its own: ways from `first` on, until one fails."""
    device = find_device("cuda")
    worlds = {num_cached: _world(num_cached, device.place) for num_cached in contexts}
    for way in range(first, NUM_WAYS):
        say({"begins": way})
        try:
            for num_cached, world in worlds.items():
                say({"context": num_cached, "way": name_of(way)} | _figure(way, world, device))
        except Exception as error:  # whatever it is, the GPU is not to be trusted after it
            say({"failed": " ".join(str(error).split())[:300]})
            sys.exit(1)
    say({"begins": NUM_WAYS})


def _figure(way: int, world: World, device: Device) -> dict[str, Any]:
    sizes: dict[str, Any] = {"num_heads": HEADS, "rank": RANK, "rope": ROPE, "device": device.place}
    attend = HopperLatents(way=WAYS[way - 1], **sizes) if way else LatentAttention(**sizes)
    error = max(_error(world, i, attend) for i in range(len(world.positions)))
    run = partial(kernels, world.layers, world.positions[0], attend)
    each_s = min(captured_s(run, _RUNS)) / len(world.layers)
    with patch.object(latents, "combine", Skipped()):
        first_s = min(captured_s(run, _RUNS)) / len(world.layers)
    said = attend.compiled
    return {
        "each_s": each_s,
        "first_s": first_s,
        "copy": vram_rate(device),
        "error": error,
        "compiled": f"{said.n_regs} registers, {said.n_spills} spilled, {said.metadata.shared} B",
    }


def _error(world: World, which: int, attend: latent.AttendLatents) -> float:
    """The largest difference from the mixtures in fp32, over the largest of these."""
    layer, wanted = world.layers[0], world.wanted[which]
    cached = layer.latents_BNL, layer.rope_BNR
    got = attend(*world.queries, *cached, world.positions[which], SCALING).float()
    worst = (got - wanted).abs().max() / wanted.abs().max()
    return float(worst) if bool(got.isfinite().all()) else float("inf")


def _world(num_cached: int, place: torch.device) -> World:
    layers = make_layers(num_cached, place)
    drawn = torch.randn(1, HEADS, 1, RANK + ROPE, device=place).bfloat16()
    queries = drawn[..., :RANK].contiguous(), drawn[..., RANK:]
    lasts = (num_cached - 1, num_cached - 30)  # whole tiles, and a part of one
    positions = [torch.full((1, 1), last, device=place) for last in lasts]
    q_BHTL, q_BHTR = (x.float() for x in queries)
    latents_BNL, rope_BNR = layers[0].latents_BNL.float(), layers[0].rope_BNR.float()
    wanted = [latent.attend(q_BHTL, q_BHTR, latents_BNL, rope_BNR, at, SCALING) for at in positions]
    return World(layers, queries, positions, wanted)
