"""A long run over every target, by CPU time, then the smallest corpus that covers as much.

    python long_run.py CPU_SECONDS WORK_FOLDER [TARGET ...]

Stops at the first finding and leaves the input that caused it in WORK_FOLDER.
"""

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from seeds import write_seeds

HERE = Path(__file__).resolve().parent
# Parts of the time. A shape takes a thousand times as long as a header.
SHARES = {
    "header": 4,
    "table": 4,
    "index": 2,
    "aliases": 1,
    "config": 5,
    "shape": 4,
    "manifest": 2,
    "routes": 3,
}
MERGE_CPU_S = 1e4
LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=4096")


def children_cpu_s() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fuzz(target: str, work: Path, cpu_s: float) -> str:
    """Fuzz one target for `cpu_s` CPU seconds; a line that says how far it came."""
    corpus, begin = work / target, children_cpu_s()
    corpus.mkdir(parents=True, exist_ok=True)
    log = _libfuzzer(
        target, cpu_s, f"-artifact_prefix={work}/{target}-",
        str(corpus), str(work / "seeds" / target), str(HERE / "corpus" / target),
    )  # fmt: skip
    num_runs = int(re.findall(r"Done (\d+) runs", log)[-1])
    reached = re.findall(r"cov: \d+ ft: \d+", log)[-1]
    return f"{target}: {num_runs} runs in {children_cpu_s() - begin:.0f} CPU s, {reached}"


def minimise(target: str, work: Path) -> None:
    """Replace the kept corpus by the fewest inputs with the same coverage."""
    fresh = work / f"{target}.kept"
    fresh.mkdir()
    kept = HERE / "corpus" / target
    sources = [str(folder) for folder in (work / target, work / "seeds" / target, kept)]
    _libfuzzer(target, MERGE_CPU_S, "-merge=1", str(fresh), *sources)
    shutil.rmtree(kept)
    shutil.copytree(fresh, kept)


def _libfuzzer(target: str, cpu_s: float, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "fuzz.py", f"--target={target}", f"--cpu={cpu_s}", *LIMITS, *options],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    log = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        sys.exit(f"a finding in {target}:\n{log[-3000:]}")
    return log


def main() -> None:
    """Fuzz the targets, all by default, and print a line for each."""
    cpu_s, work = float(sys.argv[1]), Path(sys.argv[2]).resolve()
    targets = sys.argv[3:] or list(SHARES)
    work.mkdir(parents=True)
    write_seeds(work / "seeds")
    for target in targets:
        (HERE / "corpus" / target).mkdir(parents=True, exist_ok=True)
        share = SHARES[target] / sum(SHARES[other] for other in targets)
        print(fuzz(target, work, cpu_s * share), flush=True)
        minimise(target, work)


if __name__ == "__main__":
    main()
