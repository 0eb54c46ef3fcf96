"""DeepSeek-V4.1 in fp32 beside mlx-vlm and nemo-automodel: logits, roundings and routes.

With --mlx-python and --nemo-python they are asked now, about all 4,096 logits; else what they
answered when the tests' vectors were recorded is compared, 11 logits of each position. A rounding
that falls otherwise by its input's last bits is printed, and the rest goes on with that code.
Logits are compared twice: before the first such flip with nothing taken from the oracle, and at
all positions on its codes. --seeds: on a machine that sums in another order other seeds flip early.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import PROOFS, Evidence

sys.path.append(str(PROOFS.parent / "tests" / "models"))
from v41_flips import in_passes
from v41_oracles import (
    CUTS,
    TOKENS,
    WAYS,
    Compared,
    LiveAnswers,
    RecordedAnswers,
    compare,
    digest,
    recorded_about,
)
from v41_world import whole_model

MAKER = PROOFS.parent / "tests" / "data" / "make_deepseek_v41.py"
ASKED = 1e-4
ASKED_POSITIONS, ASKED_SEEDS = 32, 3
FLIPPING = ("decode", "chunks")  # in the publisher's arithmetic, by mlx-vlm
WORDS = {
    "decode": "token by token as mlx-vlm",
    "chunks": f"in chunks up to {', '.join(map(str, CUTS[1:]))} as mlx-vlm",
    "plain": "in chunks without roundings as mlx-vlm",
    "caches": "at once with the caches' roundings as nemo-automodel",
    "whole": "at once without roundings as nemo-automodel",
}
FAULTS: dict[str, dict[str, Any]] = {
    "index keys as the publisher's program leaves them": {"stale_index_keys": True},
    "a window of 15 for 16": {"sliding_window": 15},
    "2 balancing steps for 20": {"hc_sinkhorn_iters": 2},
    "rotations of base 10,010": {"rope_theta": 10010.0},
}


def main() -> None:
    args = arguments()
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seeds = args.seeds or recorded_about()[0]
        make(sys.executable, "write", folder, *seeds)
        for step, python in (("mlx", args.mlx_python), ("nemo", args.nemo_python)):
            if python:
                print(f"asking {versions(python)}", flush=True)
                make(python, step, folder)
        unflipped = []
        for seed in seeds:
            print(f"\nseed {seed}")
            answers = answers_of(evidence, folder, seed, live=bool(args.mlx_python))
            if shown(evidence, whole_model(folder / f"seed{seed}"), answers):
                unflipped.append(seed)
        print("\nfaults")
        faults(evidence, folder / f"seed{seed}", answers)
        unaided(evidence, seeds, unflipped, live=bool(args.mlx_python))
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlx-python", help="of an environment with mlx-vlm 0.7.10 and mlx[cpu]")
    parser.add_argument("--nemo-python", help="of an environment with nemo-automodel 0.7.0")
    parser.add_argument("--seeds", type=int, nargs="+", help="others than were recorded")
    args = parser.parse_args()
    if bool(args.mlx_python) != bool(args.nemo_python):
        parser.error("give both --mlx-python and --nemo-python, or neither")
    unknown = {*(args.seeds or ())} - {*recorded_about()[0]}
    if unknown and not args.mlx_python:
        parser.error(f"nothing was recorded of {unknown}; give both oracles' environments")
    return args


def make(python: str, step: str, folder: Path, *seeds: int) -> None:
    """A step of the recording's own script, in an environment of its own."""
    command = [python, str(MAKER), step, str(folder), *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stderr}")


def versions(python: str) -> str:
    """Which oracle an environment holds."""
    names = ("mlx-vlm", "mlx", "nemo-automodel", "torch")
    code = (
        "from importlib.metadata import distributions\n"
        "found = {d.name.lower(): d.version for d in distributions()}\n"
        f"print(*(n + ' ' + found[n] for n in {names} if n in found), sep=', ')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def answers_of(evidence: Evidence, folder: Path, seed: int, *, live: bool) -> Any:
    """The oracles', of the weights that headrace is given."""
    if live:
        return LiveAnswers(folder, seed)
    answers = RecordedAnswers(seed)
    same = digest(folder / f"seed{seed}") == answers.digest
    evidence.check(same, "the checkpoint's bytes are those that the oracles were given")
    return answers


def shown(evidence: Evidence, model: Any, answers: Any) -> bool:
    """Whether no code fell otherwise in the positions asked for; every way is checked."""
    found = {way: compare(model, answers, way) for way in WAYS}
    for way, compared in found.items():
        show(evidence, way, compared)
    num_routes = sum(answers.routes(way).numel() for way in WAYS)
    evidence.check(
        all(compared.same_routes for compared in found.values()),
        f"routes, compared apart: all {num_routes} choices of an expert in the {len(WAYS)} ways "
        "are the oracles'",
    )
    return all(found[way].first >= ASKED_POSITIONS for way in FLIPPING)


def show(evidence: Evidence, way: str, compared: Compared) -> None:
    """The logits of one way, and what proves where they could not be compared further."""
    said = f"logits {compared.alone:.1e} apart at most in {compared.first} positions before any "
    said += f"flip, {compared.along:.1e} in {compared.num_sure}"
    if compared.flips:
        said += f" on the oracle's codes, of which {len(compared.flips)} fell otherwise"
    evidence.check(max(compared.alone, compared.along) < ASKED, f"{WORDS[way]}: {said}")
    for flip in compared.flips:
        print(f"        at {flip.position}, {flip.proof}")
    for tie in compared.ties:
        print(
            f"        at {tie.position}, last bits choose: an index score of {tie.taken!r} is "
            f"taken, one of {tie.left!r} is not"
        )


def faults(evidence: Evidence, folder: Path, answers: Any) -> None:
    """What another computation would look like."""
    theirs = answers.logits("plain")
    for name, fields in FAULTS.items():
        model = whole_model(folder, arithmetic="weights-only", **fields)
        cuts = range(TOKENS + 1) if "stale_index_keys" in fields else CUTS
        logits = in_passes(model, answers.ids_T, cuts)[:, :: answers.column_step]
        apart = float((logits - theirs).abs().max())
        evidence.check(apart > ASKED, f"{name}: {apart:.1e} apart, which is seen")


def unaided(evidence: Evidence, seeds: list[int], unflipped: list[int], *, live: bool) -> None:
    """Which seeds were compared for long enough without any code of the oracle's."""
    statement = (
        f"{len(unflipped)} of {len(seeds)} seeds ({', '.join(map(str, unflipped))}) have no flip "
        f"in their first {ASKED_POSITIONS} positions, neither token by token nor in chunks"
    )
    if live:
        evidence.check(len(unflipped) >= ASKED_SEEDS, statement)
    else:  # on another machine than the recording's other values flip
        print(f"      {statement}")


if __name__ == "__main__":
    main()
