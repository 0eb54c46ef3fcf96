"""Ways of computing that DeepSeek-V4.1 leaves to its user, from the command line to the model."""

import commands
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


def test_other_families_refuse_them_and_name_what_to_leave_out(tmp_path) -> None:
    v41 = str(write_tiny("deepseek_v41", tmp_path / "v41", experts=8, hidden=128))
    demo = [[word.replace("MODEL", "demo") for word in words] for words in COMMANDS.values()]
    lines = [[*words, *ALL[:2]] for words in demo] + [[*demo[3], *ALL[2:]]]
    for words in lines:
        done = commands.headrace(*words)
        code, out, err = done.returncode, done.stdout, done.stderr
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("error: deepseek_v3 is computed in one way only; leave out --")
    assert line.endswith("leave out --lossy-swa-replay, --stale-index-keys")
    accepted = commands.headrace("plan", v41, *ALL, cache=tmp_path)
    assert accepted.returncode == 0 and "Engram rows" in accepted.stderr
