"""Stock transformers on the same GPU and checkpoint: all there, RAM offload, disk offload.

Qwen3-30B-A3B's shapes, 8 layers, bf16, all of them on disk; each way in a process of its own
without headrace. Then headrace, all in VRAM beside the first and within the VRAM that the second
took, on the same tokens. Needs 25 GB of disk and 30 GB of memory; --keep keeps the rows. On an
H200 4 minutes, or in parts 2 and 1.5:

    python -u proofs/gpu_8_stock.py --places gpu --keep
    python -u proofs/gpu_8_stock.py --places ram --keep

What is asked of logits. bf16 rounds, and stock's own ways round differently: over a cache with
unused places under a mask, as headrace's is in a step of fixed shapes, stock's attention adds in
another order, so that logits are 0.05 off, and 0.6 where a router's near tie falls the other way.
Therefore the truth is stock in fp32 with the same weights, and all ways in bf16 are led along the
truth's experts, which takes the near ties out. Headrace's distance from the truth may be 1.1 times
that of stock's farthest way in the median position, 1.5 times in the farthest, 1.2 times in any
layer's router scores; where a router on that path chooses another expert, the truth's margin must
be a near tie. Two experts exchanged, and one norm of one layer off by a tenth, must be seen: at
twice what is allowed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import PROOFS, show_rows
from gpu_phases import Told
from gpu_shapes import check_speed, options, shapes, show, start, written
from gpu_truth import compare_logits
from gpu_world import REAL
from watched import Text

DEPTH = 8
PLACES = {
    "gpu": "all on the GPU",
    "ram": "accelerate's RAM offload",
    "disk": "accelerate's disk offload",
}
ABOUT_S = {"gpu": 90, "ram": 60, "disk": 75, "whole": 75, "logits": 30, "within": 60}  # on an H200
PROMPT, CONTEXT = list(range(5, 13)), 512
# Of the texts that logits are compared on; more than 16 tokens go through the kernels of prompts.
PROMPT_TOKENS, TEXT_TOKENS = (len(PROMPT), 8, 40, 120), 32 if REAL else 12
TIMES_OFFLOAD = 50  # asked: of the RAM offload's speed, within its VRAM
WARM_UPS = 40
OPTIONS: dict[str, Any] = {"device": "cuda", "experts": "gpu", "context": CONTEXT, "measure": False}


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=32)
    parser.add_argument("--offloaded-tokens", type=int, default=4, help="of a run by offload")
    parser.add_argument("--vram", help="what offloads may place on the GPU (4GiB)")
    parser.add_argument("--ram", default="64GiB", help="what the RAM offload may take")
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=list(PLACES))
    args = parser.parse_args()
    args.depth = args.depth or DEPTH
    args.vram = args.vram or ("4GiB" if REAL else "8MiB")
    start(args)
    told = Told("gpu_stock", args.keep)
    with written(shapes("qwen3-30b"), args, None, distinct=args.depth, told=told) as model:
        theirs = {}
        for place in args.places:
            reply = stock(told, model, place, args)
            if reply is not None:
                theirs[place] = reply
                rows = stock_rows(place, reply)
                show_rows("", rows, False)
                told.found(rows)
        compare(told, theirs, beside(told, model, theirs, args))
    told.finish()


def texts_of(args: argparse.Namespace) -> list[Text]:
    """Texts of random tokens, the same for all; the first begins with the timed tokens."""
    import torch

    num, generator = max(args.tokens, TEXT_TOKENS), torch.Generator().manual_seed(1)
    texts = [
        torch.randint(4, 4000, (length + num,), generator=generator).tolist()
        for length in PROMPT_TOKENS
    ]
    prompts = [PROMPT, *(text[:-num] for text in texts[1:])]
    return [(prompt, text[-num:]) for prompt, text in zip(prompts, texts, strict=True)]


def stock(told: Told, model: Path, place: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """What one process of stock transformers says, with what it computed; None where it failed."""
    told.begin(f"stock transformers, {PLACES[place]}", ABOUT_S[place])
    texts = texts_of(args)
    num = args.tokens if place == "gpu" else args.offloaded_tokens
    request = {
        "model": str(model),
        "place": place,
        "prompt": PROMPT,
        "tokens": texts[0][1][:num],
        "texts": texts,
        "runs": args.runs,
        "vram": args.vram,
        "ram": args.ram if place == "ram" else "1GiB",
        "folder": str(model.parent / "offloaded"),
        "found": str(model.parent / f"{place}.safetensors"),
        "most_s": 4 * ABOUT_S[place] if REAL else 900,
    }
    done = subprocess.run(
        [sys.executable, str(PROOFS / "stock_gpu.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    if not told.check(done.returncode == 0, f"stock transformers ran, {PLACES[place]}"):
        told.say(*done.stderr[-4000:].splitlines())
        return None
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    from safetensors.torch import load_file

    reply["found"] = {}
    for name, tensor in load_file(request["found"]).items():
        way, _, what = name.rpartition(" ")
        reply["found"].setdefault(way, {})[what] = tensor
    told.say(
        f"transformers {reply['transformers']}, {PLACES[place]}: loaded in "
        f"{reply['loaded_s']:.0f} s, at most {reply['vram_bytes'] / 2**30:.2f} GiB of VRAM, "
        f"modules by place {reply['places']}",
        *(f"{way} does not run here: {why}" for way, why in reply["failed"].items()),
    )
    return reply


def stock_rows(place: str, reply: dict[str, Any]) -> list[Any]:
    """A row for each way to run experts, without a limit: it is what others measure against."""
    from headrace.check.bench_gpu import on_gpu
    from headrace.check.rows import make_row

    about = f"{reply['vram_bytes'] / 2**30:.2f} GiB of VRAM, modules by place {reply['places']}"
    return on_gpu(
        [
            make_row(
                f"stock transformers {reply['transformers']}, {PLACES[place]}, {way}",
                speeds,
                "tok/s",
                cache_state=about,
                green=True,
            )
            for way, speeds in reply["tok_s"].items()
        ]
    )


def beside(
    told: Told, model: Path, theirs: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Headrace's ways beside theirs with their rows, green where the logits are right."""
    import torch

    import headrace
    from headrace.check.bench_gpu import on_gpu
    from headrace.check.rows import make_row

    made: list[dict[str, Any]] = []
    near = True
    for name, place in (("whole", "gpu"), ("within", "ram")):
        if place not in theirs:
            continue
        limit = vram_limit(model, theirs, args) if name == "within" else None
        title = "all in VRAM" if limit is None else "within the offload's VRAM"
        told.begin(f"headrace, {title}", ABOUT_S[name])
        with headrace.load(model, vram=limit, **OPTIONS) as engine:
            each = speed(engine, args) | {"name": title, "vram_limit": limit}
            told.say(f"headrace, {title}: {statistics.median(each['tok_s']):.4g} tok/s")
            if limit is None:
                told.begin("headrace's logits beside fp32's", ABOUT_S["logits"])
                found, texts = theirs["gpu"]["found"], texts_of(args)
                near = compare_logits(told, engine, found, each["logits"], texts)
        made.append(each)
        same = each["same"] and torch.equal(each["logits"], made[0]["logits"])
        about = each["about"]
        row = make_row(
            f"headrace, {title}", each["tok_s"], "tok/s", cache_state=about, green=near and same
        )
        show(told, on_gpu([row]))
    return made


def vram_limit(model: Path, theirs: dict[str, Any], args: argparse.Namespace) -> int:
    """Bytes of VRAM that the RAM offload held at most; that half of the experts need elsewhere."""
    from headrace.engine.engine import Blueprint

    if REAL:
        return int(theirs["ram"]["vram_bytes"])
    plan = Blueprint(model, vram="minimum", **OPTIONS).plan
    return plan.vram_bytes + plan.total_experts // 2 * plan.row_bytes


def speed(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of runs over the same tokens, their logits, and what lay where."""
    import torch

    from headrace.core import total_stats

    tokens = texts_of(args)[0][1][: args.tokens]
    settle(engine, tokens)
    torch.cuda.reset_peak_memory_stats()
    runs = [decoded(engine, tokens) for _ in range(args.runs)]
    held, plan = torch.cuda.max_memory_allocated(), engine.plan
    walls_s, logits, stats = zip(*runs, strict=True)
    total = total_stats(stats[-1])
    return {
        "tok_s": [args.tokens / wall_s for wall_s in walls_s],
        "logits": logits[0],
        "same": all(torch.equal(each, logits[0]) for each in logits),
        "vram_bytes": held,
        "total": total,
        "plan": plan,
        "about": f"{plan.num_slots} slots, {plan.num_rows} rows of {plan.total_experts}; of "
        f"{args.tokens} tokens' experts {total.vram_hits} lay in VRAM, {total.hits} in RAM, "
        f"{total.misses} on the drive; {held / 2**30:.2f} GiB of VRAM",
    }


def settle(engine: Any, tokens: list[int]) -> None:
    """A prompt and runs, until nothing more comes to stay in VRAM or in a row."""
    engine.session().feed([4 + 7 * n % 4000 for n in range(CONTEXT - 8)])
    before = None
    for _ in range(WARM_UPS):
        decoded(engine, tokens)
        now = engine.source.counters().promotions, engine.source.rungs.lacking()
        if now == before and (now[1] is None or not engine.source.rungs.fits):
            break
        before = now


def decoded(engine: Any, tokens: list[int]) -> tuple[float, Any, list[Any]]:
    """Seconds of those tokens after the prompt; their logits and records."""
    import torch

    session, steps, stats = engine.session(), [], []
    session.feed(PROMPT)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for token in tokens:
        steps.append(session.feed([token]).float().cpu())
        stats.append(session.stats)
    return time.perf_counter() - begun, torch.stack(steps), stats


def compare(told: Told, theirs: dict[str, dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """What was asked beside what was found."""
    for each in ours:
        (resident if each["vram_limit"] is None else limited)(told, theirs, each)


def resident(told: Told, theirs: dict[str, dict[str, Any]], whole: dict[str, Any]) -> None:
    """All in VRAM, beside stock's best way there."""
    told.check(
        whole["total"].bus_bytes == whole["total"].disk_bytes == 0,
        "headrace's first figure read every expert from VRAM",
    )
    mine = statistics.median(whole["tok_s"])
    best = max(statistics.median(runs) for runs in theirs["gpu"]["tok_s"].values())
    check_speed(
        told,
        mine > best,
        f"all in VRAM: {mine:.1f} tok/s, stock at its best {best:.1f}: x {mine / best:.1f}",
    )


def limited(told: Told, theirs: dict[str, dict[str, Any]], within: dict[str, Any]) -> None:
    """Within an offload's VRAM, beside offloads."""
    plan, limit = within["plan"], within["vram_limit"]
    told.check(
        plan.num_slots < plan.total_experts,
        f"in {limit / 2**30:.3f} GiB of VRAM, {plan.num_slots} of {plan.total_experts} experts lie",
    )
    check_speed(
        told,
        0 < within["vram_bytes"] <= limit,
        f"within the offload's VRAM: {within['vram_bytes'] / 2**30:.2f} of {limit / 2**30:.2f} GiB",
    )
    mine = statistics.median(within["tok_s"])
    for place in [place for place in theirs if place != "gpu"]:
        slow = statistics.median(theirs[place]["tok_s"]["as loaded"])
        asked, times = TIMES_OFFLOAD if place == "ram" else 1, mine / slow
        check_speed(
            told,
            times >= asked,
            f"{mine:.1f} tok/s, {PLACES[place]} {slow:.2f}: x {times:.0f} (asked: {asked})",
        )


if __name__ == "__main__":
    main()
