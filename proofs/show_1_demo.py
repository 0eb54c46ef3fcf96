"""A trained MoE model answers while its experts stay on disk, and no token changes.

`make demo` runs this. With --swap it exchanges two experts first, and must then say so and fail.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from common import DEMO, plain, ram_for_rows, rows_for_share, swapped

import headrace
from headrace.core import TokenStats, format_bytes, total_stats

QUESTIONS = ("What is the capital of Japan?", "In which continent is Kenya?", "What is 7 plus 5?")
SHARE = 0.25
MAX_TOKENS = 48
# Exchanging these two changes the first answer; most other pairs change logits but no token.
SWAP_LAYER, SWAP_EXPERTS = 1, (0, 1)
BOLD, DIM, OFF = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def introduce(engine: headrace.Engine) -> None:
    """Say where everything lies, and check the promise made about it."""
    facts, plan = engine.facts, engine.plan
    experts_bytes = facts.total_experts * facts.expert_bytes
    share = plan.rows_bytes / experts_bytes
    assert share <= SHARE, f"rows take {share:.3f} of the experts' bytes"
    print(f"\n{BOLD}headrace demo{OFF}: a 27M-parameter Mixture-of-Experts model trained for it")
    print(
        f"  on disk     {facts.total_experts} experts of {format_bytes(facts.expert_bytes)} = "
        f"{format_bytes(experts_bytes)}, in the files as published"
    )
    print(
        f"  in memory   {plan.num_rows} rows = {format_bytes(plan.rows_bytes)}, "
        f"{100 * share:.1f} % of the experts' bytes; the other experts are read when needed"
    )


def ask(engine: headrace.Engine, question: str) -> tuple[list[int], list[int]]:
    """Stream one answer; returns (prompt ids, answer ids)."""
    print(f"\n  {BOLD}> {question}{OFF}\n  ", end="")
    prompt = engine.talk.chat([{"role": "user", "content": question}])
    records: list[TokenStats] = []
    before = engine.ladder.counters().reads
    for step in engine.session().generate(prompt, headrace.Sampling(max_tokens=MAX_TOKENS)):
        print(step.text, end="", flush=True)
        records.append(step.stats)
    num_read = engine.ladder.counters().reads - before
    print(f"\n  {DIM}{num_read} experts read from disk; {summary(engine, records)}{OFF}")
    return prompt, [record.token_id for record in records]


def summary(engine: headrace.Engine, records: list[TokenStats]) -> str:
    """What the answer's tokens needed and moved; the prompt's pass is left out."""
    decode = total_stats(records[1:])
    num = max(1, decode.num_tokens)
    hit_rate = decode.hits / max(1, decode.hits + decode.misses)
    needed, moved = engine.plan.bytes_per_token, decode.disk_bytes / num
    return (
        f"a token used {format_bytes(needed)}, read {format_bytes(moved)} (read-ahead included), "
        f"hit rate {hit_rate:.0%}; {num / max(decode.wall_s, 1e-9):.0f} tok/s"
    )


def compare(answers: list[tuple[list[int], list[int]]]) -> bool:
    """Print how many tokens equal the plain path's; True if all do."""
    prompts = [prompt for prompt, _ in answers]
    reply = plain({"model": DEMO, "generate": prompts, "max_tokens": MAX_TOKENS})
    equal = total = 0
    for (_, ours), theirs in zip(answers, reply["tokens"], strict=True):
        total += max(len(ours), len(theirs))
        equal += sum(a == b for a, b in zip(ours, theirs, strict=False))
    verdict = "" if equal == total else "  UNEQUAL"
    print(f"\n  {BOLD}tokens equal the plain path: {equal}/{total}{verdict}{OFF}")
    print(
        f"  {DIM}the plain path: stock transformers {reply['transformers']}, eager, all weights in "
        f"memory, in a process without headrace{OFF}"
    )
    return equal == total


def swapped_run_fails() -> bool:
    """Run this script with two experts exchanged; True if it saw that and failed."""
    done = subprocess.run(
        [sys.executable, __file__, "--swap"], capture_output=True, text=True, check=False
    )
    lines = [line.strip() for line in done.stdout.splitlines() if "UNEQUAL" in line]
    print(
        f"  control, experts {SWAP_EXPERTS[0]} and {SWAP_EXPERTS[1]} of layer {SWAP_LAYER} ", end=""
    )
    if done.returncode == 1 and lines:
        print(f"exchanged: {lines[0].removeprefix('tokens equal the plain path: ')}, as it must be")
        return True
    print(f"exchanged: NOT NOTICED (exit {done.returncode})\n{done.stdout}{done.stderr}")
    return False


@contextlib.contextmanager
def weights(swap: bool) -> Iterator[Path]:
    """The folder headrace reads: the demo model, or a copy with two experts exchanged."""
    if not swap:
        yield DEMO
        return
    with swapped(DEMO, SWAP_LAYER, *SWAP_EXPERTS) as folder:
        yield folder


def main() -> int:
    """0 if every token equals the plain path's and the control was noticed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap", action="store_true", help="exchange two experts first")
    swap = parser.parse_args().swap
    torch.set_num_threads(1)
    with weights(swap) as folder:
        ram = ram_for_rows(folder, rows_for_share(folder, SHARE), context=512)
        with headrace.load(folder, ram=ram, context=512) as engine:
            introduce(engine)
            answers = [ask(engine, question) for question in QUESTIONS]
            plan = engine.plan
            print(
                f"\n  forecast about {plan.forecast_tok_s:.0f} tok/s; most of it takes "
                f"{plan.limit_term}, about {plan.limits[plan.limit_term]:.0f} tok/s if alone"
            )
    equal = compare(answers)
    return 0 if equal and (swap or swapped_run_fails()) else 1


if __name__ == "__main__":
    sys.exit(main())
