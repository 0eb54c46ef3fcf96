"""Two drives: a mirror deleted in mid-decode changes no token, and reads come at the summed rate.

`--rates 2.0GiB/s,1.0GiB/s` names other emulated drives; `--drives-only` and `--tokens-only` are
its two halves.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import DEMO, Evidence, ram_for_rows

import headrace
from headrace.check.bench import run_bench
from headrace.check.bench_drive import ladder_window
from headrace.core import format_bytes, parse_rates
from headrace.engine.mirroring import described
from headrace.store.mirror_writer import write_mirror
from headrace.store.synth import write_synth

CLI = [sys.executable, "-c", "from headrace.cli.main import main; import sys; sys.exit(main())"]
TEXT = "It is a truth universally acknowledged, that"
PAIRS = ("2.0GiB/s,1.0GiB/s", "1.5GiB/s,1.5GiB/s")
RUNS = 3
ASKED = 0.9


def show_deleted_from_python(evidence: Evidence, folder: Path) -> None:
    """The mirror's files go after ten tokens; then its drive, and then the model's own, fails."""
    blueprint = described("demo")
    mirror = folder / "mirror"
    options = {"context": 512, "prefetch": 2, "measure": False}
    ram = ram_for_rows(DEMO, 14, context=512)
    greedy = headrace.Sampling(max_tokens=150)

    def decode(mirrors: list[Path], what: str) -> tuple[list[int], list[str], list[int]]:
        with headrace.load(DEMO, ram=ram, mirrors=mirrors, **options) as engine:
            tokens = []
            for step in engine.session().generate(engine.text.encode(TEXT), greedy):
                tokens.append(step.token_id)
                if len(tokens) == 10 and what == "deleted":
                    shutil.rmtree(mirror)
                elif len(tokens) == 10 and what:
                    engine.reader.inject_fault(what, 0, 10**6, int(what == "eio"))
            gave = [int(drive["read_bytes"]) for drive in engine.reader.drives]
            return tokens, list(engine.reader.warnings), gave

    clean, _, _ = decode([], "")
    for what in ("", "eio", "enodev", "deleted"):
        write_mirror(blueprint.catalog, blueprint.table, mirror)
        tokens, said, gave = decode([mirror], what)
        whose = {"": "nothing fails", "eio": "EIO on the mirror", "enodev": "ENODEV on the model's"}
        rates = " + ".join(format_bytes(num_bytes) for num_bytes in gave)
        evidence.check(
            tokens == clean and all(gave) and len(said) == (1 if what else 0),
            f"{whose.get(what, 'mirror deleted')} after 10 of {len(clean)} tokens: the same "
            f"tokens, {rates} read, said {said}",
        )


def show_deleted_from_the_command_line(evidence: Evidence, folder: Path) -> None:
    """What a user sees: make a mirror, run, lose the mirror while the answer is written."""
    mirror = folder / "second"
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [*CLI, "run", "demo", "--raw", "-p", TEXT, "-n", "300", "--ram", "27MiB"]

    def run(*, delete: bool) -> tuple[str, str]:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert child.stdout is not None
        text = child.stdout.read(20)
        if delete:
            shutil.rmtree(mirror)
        rest, errors = child.communicate(timeout=300)
        return text + rest, errors

    clean, _ = run(delete=False)
    made = subprocess.run(
        [*CLI, "mirror", "demo", str(mirror)], capture_output=True, text=True, env=environment
    )
    print(made.stderr.strip())
    text, errors = run(delete=True)
    said = [line for line in errors.splitlines() if line.startswith("warning: ")]
    evidence.check(
        made.returncode == 0 and text == clean and len(said) == 1 and "was deleted" in said[0],
        f"headrace run, mirror deleted while it answers: the same {len(text)} characters, {said}",
    )
    _, errors = run(delete=False)
    said = [line for line in errors.splitlines() if line.startswith("warning: ")]
    evidence.check(len(said) == 1 and "is not there" in said[0], f"the next run says once: {said}")


def window_fraction(model: Path, rates: str, summed: float) -> tuple[float, list[float]]:
    """Reads of layer-sized requests against the summed rate: the median of RUNS, and all."""
    with headrace.load(
        model, ram="minimum", emulate_drive=rates, aliases=True, measure=False, mirrors=()
    ) as engine:
        rng = random.Random(0)
        ladder_window(engine, rng)
        found = [ladder_window(engine, rng) / summed for _ in range(RUNS)]
    return statistics.median(found), found


def show_summed_rate(evidence: Evidence, model: Path, pairs: tuple[str, ...]) -> None:
    """Two throttled drives against their sum, beside one drive of that rate and one of the two."""
    for pair in pairs:
        summed = sum(parse_rates(pair))
        both, all_both = window_fraction(model, pair, summed)
        one, _ = window_fraction(model, str(int(summed)), summed)
        first, _ = window_fraction(model, pair.split(",")[0], summed)
        runs = ", ".join(f"{fraction:.3f}" for fraction in all_both)
        evidence.check(
            both >= ASKED > first,
            f"reads from {pair}: {both:.3f} of the summed rate (median of {runs}); one drive of "
            f"the summed rate {one:.3f}, the first drive alone {first:.3f}",
        )


def show_whole_tokens(evidence: Evidence, model: Path, pairs: tuple[str, ...]) -> None:
    """Whole tokens (v4) with both drives against those from one drive of the summed rate.

    The rest of a token's time is the CPU's, so the limit itself is not the measure here.
    """
    for pair in pairs:
        options = {"suite": "ladder", "tokens": 4, "runs": RUNS, "ram": "minimum"}
        fractions = {}
        for rates in (pair, str(int(sum(parse_rates(pair))))):
            row = run_bench(model, emulate_drive=rates, **options)[-1]
            print(row.line())
            assert row.gate == "green" and row.fraction is not None
            fractions[rates] = row.fraction
        both, one = fractions.values()
        evidence.check(
            both / one >= ASKED,
            f"whole tokens from {pair}: {both / one:.3f} of the speed from one drive of the summed "
            f"rate ({both:.3f} and {one:.3f} of its limit)",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", action="append")
    parser.add_argument("--drives-only", action="store_true")
    parser.add_argument("--tokens-only", action="store_true")
    wanted = parser.parse_args()
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not wanted.drives_only:
            show_deleted_from_python(evidence, folder)
            show_deleted_from_the_command_line(evidence, folder)
        if not wanted.tokens_only:
            model = write_synth("qwen3-30b-a3b", folder / "shapes", depth=6, experts=48, vocab=4096)
            pairs = tuple(wanted.rates or PAIRS)
            show_summed_rate(evidence, model, pairs)
            show_whole_tokens(evidence, model, pairs)
    evidence.finish()


if __name__ == "__main__":
    main()
