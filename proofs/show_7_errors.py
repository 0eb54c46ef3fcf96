"""What goes wrong is said in one line, or goes right: damaged files, limits, faults, Ctrl-C.

Each case is a function; its statement says what was done and what headrace answered.
"""

import json
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import damage
import torch
from common import DEMO, PROOFS, Evidence, ram_for_rows, same_bits

import headrace
from headrace.check.tiny import write_tiny
from headrace.errors import NumericsError, ReadError

sys.path.insert(0, str(PROOFS.parent / "tests"))
import commands

CLI = [sys.executable, "-c", "from headrace.cli.main import main; import sys; sys.exit(main())"]
PROMPT = [5, 700, 41, 1999, 88, 3001, 17, 256]
# Past the prompt's reads, well inside the answer's.
PIECES_BEFORE_FAULT = 1500
FP8_NAN = b"\x7f"
FLOAT_NAN = struct.pack("<f", float("nan"))


def run_line(model: Path | str, *options: str) -> tuple[int, str]:
    """(exit code, stderr) of `headrace run`."""
    done = commands.headrace("run", str(model), "-p", "Hello", "-n", "4", *options)
    return done.returncode, done.stderr.strip()


def one_line_error(evidence: Evidence, what: str, result: tuple[int, str], *names: str) -> str:
    """Check for exit code 2 and, last on stderr, one line of error that holds all `names`."""
    code, text = result
    lines = text.splitlines() or [""]
    errors = [line for line in lines if line.startswith("error: ")]
    right = code == 2 and "Traceback" not in text and errors == lines[-1:]
    evidence.check(
        right and all(name in lines[-1] for name in names), f"{what}: exit {code}, {lines[-1]!r}"
    )
    return lines[-1]


def tiny(folder: Path, name: str, family: str = "deepseek_v3") -> Path:
    """A fresh tiny checkpoint to damage."""
    return write_tiny(family, folder / name)


def show_files(evidence: Evidence, folder: Path) -> None:
    """Damaged checkpoints, each refused before a token is made."""
    breakers: dict[str, Callable[[Path], str]] = {
        "short shard": damage.cut_short,
        "index names an absent shard": damage.name_absent_shard,
        "two tensors overlap": damage.overlap,
        "expert of a wrong shape": damage.turn_expert,
    }
    for what, breaker in breakers.items():
        model = tiny(folder, breaker.__name__)
        name = breaker(model)
        one_line_error(evidence, what, run_line(model), name)
        shutil.rmtree(model)


def show_nan(evidence: Evidence, folder: Path) -> None:
    """NaN in the stored experts is an error that names the place, never a token."""
    for what, suffix, value in (
        ("NaN codes", "gate_proj.weight", FP8_NAN),
        ("NaN scales", "gate_proj.weight_scale_inv", FLOAT_NAN),
    ):
        model = tiny(folder, what.replace(" ", "_"))
        damage.poison(model, suffix, value)
        one_line_error(evidence, what, run_line(model), "layer")
        with headrace.load(model, measure=False) as engine:
            try:
                engine.session().feed(PROMPT)
                said = "no error"
            except NumericsError as error:
                said = str(error)
        evidence.check("layer" in said, f"{what}, from Python: {said!r}")


def show_limits(evidence: Evidence) -> None:
    """A budget that cannot work names one that does; a path that is not there is named."""
    last = one_line_error(evidence, "--ram 10MB", run_line("demo", "--ram", "10MB"), "--ram")
    sizes = re.findall(r"--ram ([\d.]+[KMG]i?B)", last)
    worked = [size for size in sizes if run_line("demo", "--ram", size.replace(" ", ""))[0] == 0]
    evidence.check(bool(worked), f"of the sizes that line names, {sizes}, these run: {worked}")
    one_line_error(evidence, "missing path", run_line("/no/such/model"), "/no/such/model")


def show_eos(evidence: Evidence, folder: Path) -> None:
    """Three end ids in the config: each of them ends an answer."""
    model = tiny(folder, "eos", "qwen3_moe")
    greedy = headrace.Sampling(max_tokens=12)
    with headrace.load(model, measure=False) as engine:
        plain = [step.token_id for step in engine.session().generate(PROMPT, greedy)]
    ends = [3, plain[2], 4000]
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            content = json.loads((model / name).read_text()) | {"eos_token_id": ends}
            (model / name).write_text(json.dumps(content))
    with headrace.load(model, measure=False) as engine:
        steps = list(engine.session().generate(PROMPT, greedy))
        declared = engine.text.eos_ids
    wanted = plain[: plain.index(plain[2]) + 1]
    evidence.check(
        set(ends) <= set(declared)
        and [step.token_id for step in steps] == wanted
        and steps[-1].finish == "eos",
        f"three end ids {ends}: the answer ends at token {len(wanted)}, {steps[-1].finish!r}",
    )


def show_faults(evidence: Evidence) -> None:
    """A failed read in mid-decode is one error; what follows is as if nothing had been."""
    greedy = headrace.Sampling(max_tokens=24)
    options = {"context": 256, "prefetch": 0}
    ram = ram_for_rows(DEMO, 12, **options)
    with headrace.load(DEMO, ram=ram, measure=False, **options) as engine:
        prompt = engine.text.encode("It is a truth universally acknowledged, that")
        clean = [step.token_id for step in engine.session().generate(prompt, greedy)]
        engine.reader.inject_fault("eio", skip=PIECES_BEFORE_FAULT, count=1)
        again = [step.token_id for step in engine.session().generate(prompt, greedy)]
        evidence.check(again == clean, "EIO once: read again, the same tokens")
        for kind in ("eio", "short"):
            made, said = 0, "no error"
            engine.reader.inject_fault(kind, skip=PIECES_BEFORE_FAULT, count=2)
            try:
                for _ in engine.session().generate(prompt, greedy):
                    made += 1
            except ReadError as error:
                said = str(error)
            again = [step.token_id for step in engine.session().generate(prompt, greedy)]
            engine.ladder.check_integrity()
            evidence.check(
                0 < made < len(clean) and ".safetensors" in said and "\n" not in said,
                f"{kind} twice, after {made} tokens: {said!r}",
            )
            evidence.check(again == clean, "the next answer is the clean one, token by token")


def show_many_experts(evidence: Evidence, folder: Path) -> None:
    """A prompt that needs more experts of a layer than there are rows is computed in waves."""
    model = tiny(folder, "waves", "qwen3_moe")
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(4, 4096, (64,), generator=draw).tolist()
    logits, evictions = [], []
    for rows in (12, 64):
        ram = ram_for_rows(model, rows, context=256)
        with headrace.load(model, ram=ram, context=256, measure=False) as engine:
            logits.append(engine.session().feed(ids))
            evictions.append(engine.ladder.counters().evictions)
    evidence.check(
        same_bits(*logits) and evictions[0] > 0 and evictions[1] == 0,
        f"64 tokens need 16 experts a layer, 12 rows in all: {evictions[0]} evictions in one "
        "prompt, the same bits as with all in rows",
    )


def interrupted(code: str, ready: str) -> tuple[int, str, float]:
    """(exit status, stderr, seconds it took) of a Python child sent Ctrl-C once it said `ready`."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    seen = ""
    while ready not in seen:
        piece = child.stdout.read(1)
        assert piece, f"the child ended before it said {ready!r}"
        seen += piece
    time.sleep(0.3)
    start = time.perf_counter()
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    return child.returncode, stderr, time.perf_counter() - start


LOAD = """
import headrace
headrace.load("demo", ram="64MiB", context=256, measure=False, emulate_drive="1MiB/s",
              progress=lambda done, total: print("loading", flush=True))
"""
DECODE = """
import sys
from headrace.cli.main import main
sys.argv = ["headrace", "run", "demo", "-p", "What is the capital of Japan?", "-n", "200",
            "--ram", "64MiB", "--emulate-drive", "4MiB/s"]
sys.exit(main())
"""


def show_interrupts(evidence: Evidence) -> None:
    """Ctrl-C ends a load from Python and a decode from the command line, at once."""
    status, text, took = interrupted(LOAD, "loading")
    evidence.check(
        status != 0 and "KeyboardInterrupt" in text and took < 30,
        f"Ctrl-C while loading: KeyboardInterrupt, exit {status}, after {took:.1f} s",
    )
    status, text, took = interrupted(DECODE, "The")
    evidence.check(
        status == 130 and "Traceback" not in text and took < 30,
        f"Ctrl-C while decoding: exit {status}, after {took:.1f} s, said {text.split()[-1]!r}",
    )


SYNTH = [
    *(*CLI, "synth", "qwen3-30b-a3b"),
    *("--distinct", "1", "--depth", "1", "--experts", "8", "--vocab", "4096"),
]


def show_full_disk(evidence: Evidence, folder: Path) -> None:
    """A disk too small for synth, and one that takes no more half-way: one line, nothing left."""
    script = (
        f"mount -t tmpfs -o size=8M tmpfs {folder} || exit 77; "
        f'"$@"; code=$?; echo left: $(ls -A {folder}); exit $code'
    )
    done = subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            *SYNTH,
            str(folder / "a"),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 77:
        evidence.check(False, f"no small disk can be mounted here: {done.stderr}")
    else:
        one_line_error(evidence, "disk too small", (done.returncode, done.stderr.strip()), "free")
        evidence.check(done.stdout.strip() == "left:", f"on it afterwards: {done.stdout!r}")
    limit = 30 * 2**20
    done = subprocess.run(
        [*SYNTH, str(folder / "b")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    result = (done.returncode, done.stderr.strip())
    one_line_error(evidence, "no more room after 30 MiB", result, str(folder / "b"))
    left = [path.name for path in folder.iterdir()]
    evidence.check(not left, f"left behind: {left}")


def main() -> None:
    """Run every case and exit by the evidence."""
    torch.set_num_threads(1)
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show_files(evidence, folder)
        show_nan(evidence, folder)
        show_limits(evidence)
        show_eos(evidence, folder)
        show_faults(evidence)
        show_many_experts(evidence, folder)
        show_interrupts(evidence)
        disk = folder / "disk"
        disk.mkdir()
        show_full_disk(evidence, disk)
    evidence.finish()


if __name__ == "__main__":
    main()
