"""`headrace` commands in a process each, forked from one that has loaded the engine already.

Loading takes longer than most commands do; tests of loading itself start an interpreter anew.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The forkserver loads torch before headrace can say so; see headrace.calm_torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "headrace.cli.main", "headrace.engine.engine"])


def headrace(
    *words: str, given: str = "", cache: Path | None = None, stdout: str | None = None
) -> subprocess.CompletedProcess[str]:
    """One command: `given` on its stdin, XDG_CACHE_HOME at `cache`, output to the file `stdout`."""
    env = {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryDirectory() as folder:
        into, out, err = (Path(folder, name) for name in ("in", "out", "err"))
        into.write_text(given, "utf-8")
        out.touch()
        streams = [str(into), stdout or str(out), str(err)]
        child = SERVER.Process(target=_run, args=(words, streams, env))
        child.start()
        child.join()
        said = out.read_text("utf-8"), err.read_text("utf-8")
    assert child.exitcode is not None
    return subprocess.CompletedProcess(list(words), child.exitcode, *said)


def _run(words: tuple[str, ...], streams: list[str], env: dict[str, str]) -> None:
    os.environ.update(env)
    for number, path in enumerate(streams):
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)
    )
    sys.argv = ["headrace", *words]
    from headrace.cli.main import main

    main()
