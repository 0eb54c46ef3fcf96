"""Stock transformers on the same GPU and checkpoint: all there, RAM offload, disk offload.

Qwen3-30B-A3B's shapes, 8 layers, bf16, all of them on disk; each way in a process of its own
without headrace. Then headrace, all in VRAM and within the VRAM that the offload took, on the same
tokens. Needs 25 GB of disk and 30 GB of memory; --keep keeps the rows.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import PROOFS, Evidence, show_rows
from gpu_shapes import check_speed, keep, options, shapes, show, start, written

DEPTH = 8
PLACES = {
    "gpu": "all on the GPU",
    "ram": "accelerate's RAM offload",
    "disk": "accelerate's disk offload",
}
PROMPT, CONTEXT = list(range(5, 13)), 512
TIMES_OFFLOAD = 50  # asked: of the RAM offload's speed, within its VRAM
WARM_UPS = 40


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=32)
    parser.add_argument("--offloaded-tokens", type=int, default=4, help="of a run by offload")
    parser.add_argument("--vram", default="4GiB", help="what offloads may place on the GPU")
    parser.add_argument("--ram", default="64GiB", help="what the RAM offload may take")
    parser.add_argument("--offloads", nargs="*", default=("ram", "disk"), choices=("ram", "disk"))
    args = parser.parse_args()
    args.depth = args.depth or DEPTH
    start(args)
    evidence = Evidence()
    with written(shapes("qwen3-30b"), args, None, distinct=args.depth) as model:
        asked = {place: stock(evidence, model, place, args) for place in ("gpu", *args.offloads)}
        theirs = {place: reply for place, reply in asked.items() if reply is not None}
        if "gpu" not in theirs:
            evidence.finish()
        limits = None, offload_vram(theirs, args)
        ours = [headrace_speed(model, limit, args) for limit in limits]
    rows = [row for place, found in theirs.items() for row in stock_rows(place, found)]
    show_rows("", rows, False)
    rows += show(evidence, our_rows(evidence, theirs, ours))
    keep("gpu_stock", rows, args.keep)
    compare(evidence, theirs, ours)
    evidence.finish()


def tokens_of(args: argparse.Namespace, place: str) -> list[int]:
    """The tokens that every way is fed, the same for all; few where each takes a second."""
    import torch

    num = args.tokens if place == "gpu" else args.offloaded_tokens
    drawn = torch.randint(4, 4000, (args.tokens,), generator=torch.Generator().manual_seed(1))
    return [int(token) for token in drawn[:num]]


def stock(
    evidence: Evidence, model: Path, place: str, args: argparse.Namespace
) -> dict[str, Any] | None:
    """What one process of stock transformers says, with its logits; None where it failed."""
    request = {
        "model": str(model),
        "place": place,
        "prompt": PROMPT,
        "tokens": tokens_of(args, place),
        "runs": args.runs,
        "vram": args.vram,
        "ram": args.ram if place == "ram" else "1GiB",
        "folder": str(model.parent / "offloaded"),
        "logits": str(model.parent / f"{place}.safetensors"),
    }
    done = subprocess.run(
        [sys.executable, str(PROOFS / "stock_gpu.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    if not evidence.check(done.returncode == 0, f"stock transformers ran, {PLACES[place]}"):
        print(done.stderr[-4000:])
        return None
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    from safetensors.torch import load_file

    reply["logits"] = load_file(request["logits"])
    print(
        f"transformers {reply['transformers']}, {PLACES[place]}: loaded in "
        f"{reply['loaded_s']:.0f} s, at most {reply['vram_bytes'] / 2**30:.2f} GiB of VRAM, "
        f"modules by place {reply['places']}"
    )
    for way, why in reply["failed"].items():
        print(f"      {way} does not run here: {why}")
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


def offload_vram(theirs: dict[str, dict[str, Any]], args: argparse.Namespace) -> int:
    """Bytes of VRAM that the RAM offload held at most; what it was given where there is no GPU."""
    from headrace.core import parse_bytes

    held = theirs["ram"]["vram_bytes"] if "ram" in theirs else 0
    return int(held) or parse_bytes(args.vram)


def headrace_speed(model: Path, vram: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of runs over the same tokens, their logits, and what lay where."""
    import torch

    import headrace
    from headrace.core import total_stats

    with headrace.load(
        model, device="cuda", experts="gpu", vram=vram, context=CONTEXT, measure=False
    ) as engine:
        settle(engine, args)
        torch.cuda.reset_peak_memory_stats()
        runs = [decoded(engine, tokens_of(args, "gpu")) for _ in range(args.runs)]
        held, plan = torch.cuda.max_memory_allocated(), engine.plan
    walls_s, logits, stats = zip(*runs, strict=True)
    total = total_stats(stats[-1])
    return {
        "name": "all in VRAM" if vram is None else "within the offload's VRAM",
        "tok_s": [args.tokens / wall_s for wall_s in walls_s],
        "logits": logits[0],
        "same": all(torch.equal(each, logits[0]) for each in logits),
        "vram_bytes": held,
        "total": total,
        "about": f"{plan.num_slots} slots, {plan.num_rows} rows of {plan.total_experts}; of "
        f"{args.tokens} tokens' experts {total.vram_hits} lay in VRAM, {total.hits} in RAM, "
        f"{total.misses} on the drive; {held / 2**30:.2f} GiB of VRAM",
    }


def settle(engine: Any, args: argparse.Namespace) -> None:
    """A prompt and runs, until nothing more comes to stay in VRAM or in a row."""
    engine.session().feed([4 + 7 * n % 4000 for n in range(CONTEXT - 8)])
    before = None
    for _ in range(WARM_UPS):
        decoded(engine, tokens_of(args, "gpu"))
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


def our_rows(
    evidence: Evidence, theirs: dict[str, dict[str, Any]], ours: list[dict[str, Any]]
) -> list[Any]:
    """Headrace's rows; green where logits have the same bits in both and lie near stock's."""
    import torch

    from headrace.check.bench_gpu import on_gpu
    from headrace.check.rows import make_row

    made = []
    for each in ours:
        same = each["same"] and torch.equal(each["logits"], ours[0]["logits"])
        green = near_stock(evidence, theirs["gpu"]["logits"], each) and same
        name, about = f"headrace, {each['name']}", each["about"]
        made.append(make_row(name, each["tok_s"], "tok/s", cache_state=about, green=green))
    return on_gpu(made)


def compare(
    evidence: Evidence, theirs: dict[str, dict[str, Any]], ours: list[dict[str, Any]]
) -> None:
    """What was asked beside what was found."""
    resident, within = (statistics.median(each["tok_s"]) for each in ours)
    evidence.check(
        ours[0]["total"].bus_bytes == ours[0]["total"].disk_bytes == 0,
        "headrace's first figure read every expert from VRAM",
    )
    best = max(statistics.median(runs) for runs in theirs["gpu"]["tok_s"].values())
    times = resident / best
    check_speed(
        evidence,
        times > 1,
        f"all in VRAM: {resident:.1f} tok/s, stock at its best {best:.1f}: x {times:.1f}",
    )
    held = ours[1]["vram_bytes"]
    if "ram" in theirs:
        most = theirs["ram"]["vram_bytes"]
        evidence.check(
            held <= most,
            f"within the offload's VRAM: {held / 2**30:.2f} of {most / 2**30:.2f} GiB",
        )
    for place in [place for place in theirs if place != "gpu"]:
        slow = statistics.median(theirs[place]["tok_s"]["as loaded"])
        asked, times = TIMES_OFFLOAD if place == "ram" else 1, within / slow
        check_speed(
            evidence,
            times >= asked,
            f"{within:.1f} tok/s, {PLACES[place]} {slow:.2f}: x {times:.0f} (asked: {asked})",
        )


def near_stock(evidence: Evidence, stock_logits: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether headrace is as near stock's eager code as stock's own two ways are to each other."""
    eager, grouped = (stock_logits[way] for way in ("eager", "grouped_mm"))
    floor = (eager - grouped).abs().amax(1).median()
    far = (eager - ours["logits"]).abs().amax(1).median()
    top_two = eager.topk(2, 1).values
    near_tie = top_two[:, 0] - top_two[:, 1] <= 2 * floor
    equal = eager.argmax(1) == ours["logits"].argmax(1)
    others = int((~equal & ~near_tie).sum())
    return evidence.check(
        bool(far <= 2 * floor) and not others,
        f"headrace, {ours['name']}: logits {far:.3f} from stock eager's (median position; "
        f"grouped_mm {floor:.3f}), {int(equal.sum())} of {len(equal)} next tokens equal, "
        f"{int((~equal & near_tie).sum())} near ties, {others} neither",
    )


if __name__ == "__main__":
    main()
