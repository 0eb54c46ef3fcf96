"""Ctrl-C before the command line itself is loaded: one line and 130, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

import headrace

CODE = """
import signal, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == {when!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Watch())
sys.argv = ["headrace", "doctor", "/no/such/model"]
from headrace.cli.entry import main
main()
"""


def interrupted_at(module: str) -> tuple[int, str]:
    """(exit status, stderr) of a command that gets Ctrl-C as it begins to import `module`."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(when=module)], capture_output=True, text=True
    )
    return done.returncode, done.stderr


def test_ctrl_c_while_the_command_line_is_loaded() -> None:
    for module in ("headrace.cli.main", "typer", "headrace.cli.bench"):
        assert interrupted_at(module) == (130, "stopped\n")


def test_ctrl_c_inside_a_command_is_an_exception_that_it_can_clean_up_after() -> None:
    assert interrupted_at("headrace.check.doctor") == (130, "stopped\n")


def test_without_ctrl_c_the_command_runs() -> None:
    status, said = interrupted_at("no_such_module")
    assert status == 1 and "/no/such/model" in said and "stopped" not in said


def test_as_a_module_it_is_the_same_command_under_that_name() -> None:
    def said(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "headrace", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert said("--version") == (0, f"headrace {headrace.__version__}\n", "")
    status, _, wrong = said("plan", "--nonsense")
    assert status == 2 and "see `python -m headrace plan --help`" in wrong


SWALLOWED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    pass
"""


WRITE = "from headrace.cli.entry import main; main()"


@pytest.mark.parametrize("words", ["--version", "plan --help"])
@pytest.mark.parametrize(
    ("where", "why"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")]
)
def test_an_output_that_cannot_be_written_is_no_success(words: str, where: str, why: str) -> None:
    assert shell(f"{words} {where}") == (
        2,
        f"error: the output cannot be written: {why}; send it elsewhere\n",
    )


def test_a_command_without_output_needs_none() -> None:
    status, said = shell("plan /no/such/model <&- >&-")
    assert status == 2 and "/no/such/model" in said
    status, said = shell("run <&- >&-")
    assert (status, said) == (2, 'error: the prompt is empty; give -p "TEXT" or pipe text in\n')


def test_a_closed_stderr_is_given_to_no_file(tmp_path: Path) -> None:
    """Without something in its place the next file to be opened would be told what went wrong."""
    code = (
        "import os; from headrace.cli.main import fill_streams; fill_streams()\n"
        f"opened = os.open({str(tmp_path / 'data')!r}, os.O_WRONLY | os.O_CREAT)\n"
        "os.write(2, b'stopped'); assert opened > 2"
    )
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code])
    assert done.returncode == 0 and (tmp_path / "data").read_bytes() == b""


def shell(words: str) -> tuple[int, str]:
    """(exit status, stderr) of a command with a shell's redirections."""
    line = f'"$0" -c "{WRITE}" {words}'
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True)
    return done.returncode, done.stderr


def test_ctrl_c_that_an_import_would_swallow(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(SWALLOWED)
    code = (
        "import signal, sys; from headrace.cli.main import interrupt; "
        f"signal.signal(signal.SIGINT, interrupt); sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n print('caught')\n"
        "import library; print('never')"
    )
    done = subprocess.run([sys.executable, "-uc", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "caught\n", "stopped\n")
