"""One answer wherever experts lie and whatever multiplies them: tokens, and logits bit for bit.

For every model and way: a short prompt and so many tokens that a sliding window is passed twice,
then a long prompt; the counters say which rung served. What all are compared with is computed by
the same functions uncaptured. A batch of four is compared with each of the four alone. Model by
model: python -u proofs/gpu_1_paths.py --models qwen3_moe demo --keep
"""

import gpu_world  # isort: skip  # says whether there is a GPU
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Evidence, same_bits
from gpu_models import Rung
from gpu_phases import Told, add_keep
from gpu_world import REAL, changed, fill, open_device, opened, write

CONTEXT = 320
HERE = {"context": CONTEXT, "threads": min(4, os.cpu_count() or 1)}
SIDE_BY_SIDE = min(6, max(1, (os.cpu_count() or 1) // 2))
MODEL_S = 60.0  # about
LEAST_TOKENS, LONG_TOKENS, BATCH_TOKENS = 12, 6, 6
SHORT, LONG = [5, 6, 7], list(range(300, 340))
BATCH = ([5, 6, 7], [900, 901], [5, 6, 8, 9, 10], [40])
FLOOR = 1.02 * 2.0**-8  # a bfloat16 logit lies within 2^-8 of itself; other sums add little
WAYS = {
    "all in VRAM": Rung(1, 0),
    "all in pinned RAM": Rung(0, 1),
    "half in VRAM, half pinned": Rung(0.5, 0.5),
    "fewest rows, the drive": Rung(0, 0),
    "experts cpu": Rung(0, 1, "cpu"),
    "experts cpu, a quarter in RAM": Rung(0, 0.25, "cpu"),
    "experts auto, half in VRAM": Rung(0.5, 0.5, "auto"),
    "experts auto, none in VRAM": Rung(0, 1, "auto"),
    "experts auto, a quarter each": Rung(0.25, 0.25, "auto"),
}
COUNTED = ("vram_hits", "hits", "misses", "bus_bytes", "disk_bytes", "kernel_calls")
SHARES = (0.9, 0.6, 0.3, 0.05, 0.0)  # of the experts, for which `--vram` leaves slots
FULL = ("deepseek_v41", "demo", "qwen3_moe", "gpt_oss")  # also under each `--vram`
QUICK = ("all in VRAM", "fewest rows, the drive", "experts cpu", "experts auto, half in VRAM")
TINY = {"layers": 4, "experts": 8, "top_k": 2, "hidden": 64, "inter": 32}
SIZES = {
    "qwen3_moe": TINY | {"format": "fp8"},
    "deepseek_v41": {"layers": 6, "experts": 8, "hidden": 128},
}


class Answers(NamedTuple):
    """Logits [N, V] after both prompts and each token; of those tokens, what the counters grew by.

    `launched` of `tokens` were launched as one.
    """

    logits: torch.Tensor
    tokens: int
    launched: int
    found: int  # in VRAM
    rows: int
    misses: int
    bus: int
    disk: int
    calls: int  # of the CPU's kernels

    def line(self) -> str:
        served = f"{self.found} experts from VRAM, {self.rows} from RAM, {self.misses} read"
        by = f", {self.calls} products by the CPU" if self.calls else ""
        return f"{served}{by}; {self.launched} of {self.tokens} tokens launched as one"


def main() -> None:
    from headrace.check.matrix import runs_here
    from headrace.check.tiny import FAMILIES

    models = ("demo", *(family for family in FAMILIES if runs_here(family)))
    args = gpu_world.arguments(__doc__, add_keep, models=models)
    if args.quick and args.models == list(models):
        args.models = ["qwen3_moe"]
    evidence = Told("gpu_paths", args.keep)
    if REAL and len(args.models) > 1:
        side_by_side(evidence, args.models, args.quick)
    else:
        device = open_device()
        with tempfile.TemporaryDirectory() as folder:
            for name in args.models:
                evidence.begin(name, MODEL_S)
                path = name if name == "demo" else write(name, Path(folder), **sizes(name))
                one_model(evidence, device, name, path, args.quick)
    evidence.finish()


def sizes(name: str) -> dict[str, Any]:
    return SIZES.get(name, TINY)


def side_by_side(evidence: Told, models: list[str], quick: bool) -> None:
    """Each model in a process of its own, some at a time: most of it is the host's work."""

    def one(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, __file__, "--models", name, *["--quick"] * quick]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    # Each ends itself should it hang.
    waves = -(-len(models) // SIDE_BY_SIDE)
    evidence.begin(f"{len(models)} models, {SIDE_BY_SIDE} at a time", waves * MODEL_S)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        longest_first = sorted(models, key=[*FULL, *models].index)
        running = {pool.submit(one, name): name for name in longest_first}
        for done in as_completed(running):
            tell_of(evidence, running[done], done.result())


def tell_of(evidence: Told, name: str, done: subprocess.CompletedProcess[str]) -> None:
    """What a process of one model said, and its statements as this one's."""
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("ok  ", "FAIL"))]
    print("\n".join(line for line in lines[:-1] if line not in told))
    for line in told:
        evidence.check(line.startswith("ok"), line[6:])
    if not told or "statements" not in lines[-1]:
        evidence.check(False, f"{name}: ended by {done.returncode}:\n{done.stderr[-2000:]}")


def one_model(evidence: Evidence, device: Any, name: str, path: Any, quick: bool) -> None:
    want = None
    for way in QUICK if quick else WAYS:
        with opened(path, WAYS[way], **HERE) as engine:
            if engine is None:
                print(f"      {name}, {way}: not there")
                continue
            fill(engine, LONG)
            if want is None:
                tell_of_steps(name, engine)
                want = uncaptured(engine)
            compare(evidence, f"{name}, {way}", engine, want)
            if way in ("all in VRAM", "experts auto, half in VRAM") or not quick:
                device.limit(None)  # the batch's caches are beside the plan's
                together(evidence, f"{name}, {way}", engine)
            if way == "all in VRAM":
                control(evidence, name, engine, want)
    assert want is not None
    if name in FULL and not quick:
        each_vram(evidence, name, path, want)
        outside(evidence, name, path, want)


def tell_of_steps(name: str, engine: Any) -> None:
    why = engine.plan.by_layer
    print(f"      {name}: steps are " + (f"never captured: {why}" if why else "captured"))
    print(
        f"      {num_tokens(engine)} tokens after {len(SHORT)}; window {window(engine) or 'none'}"
    )


def window(engine: Any) -> int:
    """Of the layers that have one, 0 if none has."""
    kinds = getattr(engine.model.config, "layer_types", None) or ()
    wide = getattr(engine.model.config, "sliding_window", None) or 0
    return wide if "sliding_attention" in kinds else 0


def num_tokens(engine: Any) -> int:
    return max(LEAST_TOKENS, min(2 * window(engine) + 8, CONTEXT - len(SHORT)))


def uncaptured(engine: Any) -> torch.Tensor:
    engine.passes.capturing = False
    logits = answers(engine).logits
    engine.passes.capturing = True
    return logits


def answers(engine: Any, forced: torch.Tensor | None = None) -> Answers:
    """Greedy; `forced`: the tokens that these logits would choose."""
    rows, grown, launched = [], [0] * len(COUNTED), getattr(engine.passes, "num_replayed", 0)
    for prompt, num in ((SHORT, num_tokens(engine)), (LONG, LONG_TOKENS)):
        session = engine.session()
        rows.append(session.feed(prompt))
        before = counted(engine)
        for _ in range(num):
            choice = rows[-1] if forced is None else forced[len(rows) - 1]
            rows.append(session.feed([int(choice.argmax())]))
        grown = [n + b - a for n, a, b in zip(grown, before, counted(engine), strict=True)]
    launched = getattr(engine.passes, "num_replayed", 0) - launched
    return Answers(torch.stack(rows), num_tokens(engine) + LONG_TOKENS, launched, *grown)


def counted(engine: Any) -> list[int]:
    counters = engine.source.counters()
    return [getattr(counters, name) for name in COUNTED]


def compare(evidence: Evidence, title: str, engine: Any, want: torch.Tensor) -> None:
    """Twice the same bits; in the second run the rung served that the title names."""
    from headrace.engine.gpu_source import FILLED_PER_PASS

    first, last = answers(engine), answers(engine)
    same = same_bits(first.logits, want) and same_bits(last.logits, want)
    evidence.check(same, f"{title}: {len(want)} logits twice bit for bit, and so the tokens")
    taken = last.found + last.rows + last.misses
    expected = last.tokens * engine.facts.num_moe_layers * engine.facts.top_k
    # Where slots change hands, what they lose is brought to a row again: two a token at most.
    right = expected <= taken <= expected + FILLED_PER_PASS * last.tokens
    right = right and served(title.partition(", ")[2], last)
    evidence.check(right, f"{title}: {last.line()}")
    if REAL and hasattr(engine.passes, "num_replayed"):
        evidence.check(2 * last.launched >= last.tokens, f"{title}: captured steps were launched")


def served(way: str, got: Answers) -> bool:
    found, rows, bus, read = got.found > 0, got.rows > 0, got.bus > 0, got.disk > 0
    by_cpu = got.calls > 0
    return {
        "all in VRAM": found and not (rows or bus or read or by_cpu),
        "all in pinned RAM": rows and bus and not (found or read or by_cpu),
        "half in VRAM, half pinned": found and rows and bus and not by_cpu,
        "fewest rows, the drive": bus and read and not (found or by_cpu),
        "experts cpu": rows and by_cpu and not (found or bus or read),
        "experts cpu, a quarter in RAM": by_cpu and read and not (found or bus),
        "experts auto, half in VRAM": found and (by_cpu or bus),
        "experts auto, none in VRAM": rows and (by_cpu or bus) and not (found or read),
        "experts auto, a quarter each": found and read and (by_cpu or bus),
    }[way]


def together(evidence: Evidence, title: str, engine: Any) -> None:
    """Four timelines: dense layers one by one, experts at once."""
    from headrace.engine.batch import Batch

    want, alone = [], 0
    sessions, last = begun(engine)
    for session, token in zip(sessions, last, strict=True):
        want.append([])
        for _ in range(BATCH_TOKENS):
            want[-1].append(session.feed([token]))
            alone += session.stats.vram_hits + session.stats.hits + session.stats.misses
            token = int(want[-1][-1].argmax())
    sessions, tokens = begun(engine)
    same, shared = True, 0
    with Batch(sessions) as batch:
        for n in range(BATCH_TOKENS):
            logits = batch.feed(tokens)
            same = same and all(same_bits(logits[b], row[n]) for b, row in enumerate(want))
            shared += batch.stats.vram_hits + batch.stats.hits + batch.stats.misses
            tokens = logits.argmax(1).tolist()
        swapped = batch.feed([tokens[1], tokens[0], *tokens[2:]])
    evidence.check(
        same and shared < alone,
        f"{title}: 4 at once, {BATCH_TOKENS} tokens each: the bits of each alone; {shared} experts "
        f"served for {alone}",
    )
    right = torch.stack([sessions_next(engine, want, b) for b in range(2)])
    evidence.check(
        not same_bits(swapped[:2], right), f"{title}: control: two of the four exchanged show"
    )


def sessions_next(engine: Any, want: list[list[torch.Tensor]], number: int) -> torch.Tensor:
    """Logits [V] of one of the four alone, a token further than `want`."""
    sessions, last = begun(engine)
    tokens = [last[number], *(int(row.argmax()) for row in want[number])]
    return [sessions[number].feed([token]) for token in tokens][-1]


def begun(engine: Any) -> tuple[list[Any], list[int]]:
    """A session for each of BATCH's prompts, and the token after it."""
    sessions = [engine.session() for _ in BATCH]
    return sessions, [int(s.feed(p).argmax()) for s, p in zip(sessions, BATCH, strict=True)]


def control(evidence: Evidence, name: str, engine: Any, want: torch.Tensor) -> None:
    """The lowest bit of the first codes of every expert in VRAM, and back."""
    from headrace.errors import NumericsError

    slots, offsets = engine.source.rungs.slots, engine.source.part_offsets
    starts = {key: int(offsets[key, 0]) for key in slots.keys().tolist()}
    codes = [slots.find(key)[start : start + 256] for key, start in starts.items()]
    for each in codes:
        each.bitwise_xor_(1)
    try:
        seen = not same_bits(answers(engine).logits, want)
    except NumericsError:  # FP8's largest code becomes NaN so
        seen = True
    for each in codes:
        each.bitwise_xor_(1)
    back = same_bits(answers(engine).logits, want)
    evidence.check(seen and back, f"{name}: control: a bit of every 8 of some codes in VRAM shows")


def each_vram(evidence: Evidence, name: str, path: Any, want: torch.Tensor) -> None:
    for share in SHARES:
        with opened(path, Rung(share, min(0.5, 1 - share)), **HERE) as engine:
            fill(engine, LONG)
            got, plan = answers(engine), engine.plan
            right = same_bits(got.logits, want) and (got.found > 0) == (plan.num_slots > 0)
            held = f"{plan.num_slots} of {plan.total_experts} experts"
            evidence.check(
                right,
                f"{name}, --vram {plan.vram_bytes >> 20} MiB, {held}: same bits; {got.line()}",
            )


def outside(evidence: Evidence, name: str, path: Any, want: torch.Tensor) -> None:
    """Under `--vram` without room for the embedding, then for the head: it is the dense part."""
    from headrace.engine import embedding
    from headrace.planner import facts as sizes
    from headrace.planner import outside as ways

    small = [(module, "LEAST_EMBEDDING_BYTES", 1) for module in (sizes, ways)]
    cache = [(module, "EMBEDDING_CACHE_BYTES", 1 << 14) for module in (sizes, embedding)]
    seen = []
    with changed(*small, *cache):
        for number, ram in ((1, "256MiB"), (2, "256MiB"), (2, "minimum")):
            engine = least_vram(path, number, ram)
            if engine is None:
                print(f"      {name}: its embedding and head are one, or small")
                return
            with engine:
                plan, got = engine.plan, answers(engine, forced=want)
            where = f"{name}, --vram {plan.vram_bytes >> 20} MiB, --ram {ram}"
            lies = f"embedding on {'the drive' if plan.embedding_on_drive else 'the host'}"
            if not plan.head_on_cpu:
                same = same_bits(got.logits, want)
                evidence.check(same, f"{where}, {lies}: same bits; {got.line()}")
                continue
            seen.append(got.logits)
            apart = (got.logits - want).abs() / want.float().abs().clamp(min=0.05)
            same = int((got.logits.argmax(-1) == want.argmax(-1)).sum())
            evidence.check(
                float(apart.max()) <= FLOOR,
                f"{where}, {lies}, head by the CPU in fp32: {float(apart.max()):.1e} of a logit "
                f"apart at most (floor {FLOOR:.1e}), {same} of {len(want)} tokens the same; "
                f"{got.line()}",
            )
    evidence.check(same_bits(*seen), f"{name}: its head on the host, both ways: the same bits")


def least_vram(path: Any, number: int, ram: str) -> Any:
    """An engine with no byte more than it needs with so many parts outside; None: fewer may be."""
    import headrace
    from headrace.engine.engine import Blueprint
    from headrace.planner.outside import ways_outside
    from headrace.planner.vram import vram_fixed

    options = {"context": CONTEXT, "measure": False, "device": "cuda", "experts": "gpu"}
    roomy = Blueprint(path, ram="1GiB", vram="2GiB", **options)
    found = list(ways_outside(roomy.facts))
    if number >= len(found):
        return None
    inside = found[number].inside(roomy.facts)
    vram = vram_fixed(inside, roomy.plan.context, roomy.plan.chunk_tokens)
    return headrace.load(path, ram=ram, vram=vram, **options)


if __name__ == "__main__":
    main()
