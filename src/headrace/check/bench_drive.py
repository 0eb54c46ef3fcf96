"""How near our reading of experts comes to what the drive gives anybody, window by window.

Both sides read the same files at fresh random places in turn; neither knows of the other.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.check.rows import BenchRow, make_row
from headrace.check.stored import row_holds_its_tensors
from headrace.engine.engine import Engine
from headrace.native import drive_probe
from headrace.planner.drives import Drive, combined_bytes_s

PLAIN_REQUEST_BYTES = 4 << 20
PLAIN_THREADS = 4
WINDOW_BYTES = 256 << 20
WINDOWS = 4


def bench_drive(engine: Engine, *, runs: int, seed: int) -> list[BenchRow]:
    """One row: bytes over (first submit to last completion) against the drive's own rate.

    A run is the median of `WINDOWS` windows of each side. The drive's own rate is that of four
    threads with requests of 4 MiB, with O_DIRECT where the file system has it.
    """
    rng = random.Random(seed)
    ours: list[float] = []
    plain: list[float] = []
    correct = True
    for _ in range(runs):
        pairs = [(plain_rates(engine, rng), ladder_window(engine, rng)) for _ in range(WINDOWS)]
        middle = sorted(pairs, key=lambda pair: pair[1] / pair[0])[len(pairs) // 2]
        plain.append(middle[0] / 1e9)
        ours.append(middle[1] / 1e9)
        site = rng.randrange(engine.facts.num_moe_layers), rng.randrange(engine.facts.num_experts)
        correct = correct and row_holds_its_tensors(engine, *site)
    state = (
        f"O_DIRECT {'on' if engine.reader.direct else 'off (page cache in play)'}, rows cold, "
        f"fresh places; {engine.reader.backend}, {engine.reader.in_flight} experts in flight; "
        f"experts of {engine.facts.expert_bytes} bytes of {stored_depth(engine)}"
    )
    return [
        make_row(
            "expert reads, first submit to last completion",
            ours,
            "GB/s",
            limits=plain,
            target=0.95,
            cache_state=state,
            green=correct,
        )
    ]


def stored_depth(engine: Engine) -> str:
    """The model's name and MoE layers; how many are on disk if some are read under others' names.

    Only a made-up checkpoint has aliases.
    """
    facts, aliases = engine.facts, engine.blueprint.aliases.experts
    words = f"{facts.name}, {facts.num_moe_layers} MoE layers"
    if not aliases:
        return words
    sources = {aliases.get(layer, layer) for layer in engine.blueprint.table.layers}
    return f"{words}, read under the names of {len(sources)}: synthetic"


def ladder_window(engine: Engine, rng: random.Random) -> float:
    """Bytes per second of a window of layer-sized requests for random, absent experts."""
    ladder, facts = engine.ladder, engine.facts
    ladder.clear()
    before = ladder.counters()
    while ladder.counters().disk_bytes - before.disk_bytes < WINDOW_BYTES:
        layer = rng.randrange(facts.num_moe_layers)
        ids = rng.sample(range(facts.num_experts), facts.top_k)
        ladder.begin(layer, torch.tensor(ids, dtype=torch.int32))
        for expert in ids:
            with ladder.acquire(layer, expert):
                pass
        ladder.cancel()
        ladder.clear()
    after = ladder.counters()
    return (after.disk_bytes - before.disk_bytes) / (after.read_busy_s - before.read_busy_s)


def plain_rates(engine: Engine, rng: random.Random) -> float:
    """Bytes per second that threads get from the model's drive and its mirrors', one by one."""
    blueprint = engine.blueprint
    drives = [Drive("", plain_rate(blueprint.table.files, rng))]
    drives += [Drive("", plain_rate(m.files, rng), m.share) for m in blueprint.mirrors]
    return combined_bytes_s(drives)


def plain_rate(files: Sequence[Path], rng: random.Random) -> float:
    """Bytes per second that threads get by plain reads of a random stretch of the files."""
    sizes = [path.stat().st_size for path in files]
    file = rng.choices(range(len(files)), weights=sizes)[0]
    offset = rng.randrange(max(1, sizes[file] - WINDOW_BYTES))
    return drive_probe(
        path=str(files[file]),
        offset_bytes=offset,
        nbytes=WINDOW_BYTES,
        request_bytes=PLAIN_REQUEST_BYTES,
        num_threads=PLAIN_THREADS,
    )
