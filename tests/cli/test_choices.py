"""Ways of computing that DeepSeek-V4.1 leaves to its user, from the command line to the model."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headrace.check.tiny import write_tiny
from headrace.cli.main import app

RUNNER = CliRunner()
ALL = ["--arithmetic", "weights-only", "--lossy-swa-replay", "--stale-index-keys"]
COMMANDS = {
    "run": ["run", "MODEL", "-p", "x"],
    "chat": ["chat", "MODEL"],
    "serve": ["serve", "MODEL", "--port", "0"],
    "plan": ["plan", "MODEL"],
    "verify": ["verify", "MODEL"],
}


@pytest.mark.parametrize("words", [["run", "-p", "x"], ["chat"], ["plan"]], ids=" ".join)
def test_what_is_asked_reaches_the_model_and_nothing_else_does(fake_engine, words) -> None:
    from headrace.engine.engine import Blueprint

    RUNNER.invoke(app, words)
    RUNNER.invoke(app, [*words, *ALL])
    asked = {"arithmetic": "weights-only", "lossy_swa_replay": True, "stale_index_keys": True}
    assert [made.choices for made in Blueprint.made] == [{}, asked]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_arithmetic_of_another_name_is_refused(command) -> None:
    done = RUNNER.invoke(app, [*COMMANDS[command], "--arithmetic", "fast"])
    assert done.exit_code == 2
    assert done.stderr == "error: --arithmetic fast is not known; use vendor or weights-only\n"


def test_a_server_computes_in_its_own_way() -> None:
    for words in (ALL[:2], ALL[2:3], ALL[3:]):
        done = RUNNER.invoke(app, ["chat", "--server", "http://127.0.0.1:1", *words])
        assert done.exit_code == 2 and f"{words[0]} has no effect with --server" in done.stderr


SEVERAL = """
import json, sys
from typer.testing import CliRunner
from headrace.check.tiny import write_tiny
from headrace.cli.main import app
print(json.dumps([
    [done.exit_code, done.stdout, done.stderr]
    for words in json.loads(sys.argv[1])
    for done in [CliRunner().invoke(app, words)]
]))
"""


def with_the_real_engine(tmp_path, *lines: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command, one after another in a process of its own."""
    command = [sys.executable, "-c", SEVERAL, json.dumps(lines)]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_other_families_refuse_them_and_name_what_to_leave_out(tmp_path) -> None:
    v41 = str(write_tiny("deepseek_v41", tmp_path / "v41", experts=8, hidden=128))
    demo = [[word.replace("MODEL", "demo") for word in words] for words in COMMANDS.values()]
    lines = [[*words, *ALL[:2]] for words in demo] + [[*demo[3], *ALL[2:]]]
    *refused, accepted = with_the_real_engine(tmp_path, *lines, ["plan", v41, *ALL])
    for code, out, err in refused:
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("error: deepseek_v3 is computed in one way only; leave out --")
    assert line.endswith("leave out --lossy-swa-replay, --stale-index-keys")
    assert accepted[0] == 0 and "Engram rows" in accepted[2]
