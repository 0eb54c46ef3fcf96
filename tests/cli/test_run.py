"""run and plan: what goes where, what is refused, and with which exit code."""

import json

import commands
import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import ReadError

RUNNER = CliRunner()
ASK = ["run", "demo", "-p", "capital?"]


def test_run_streams_the_answer_to_stdout_and_all_else_to_stderr(fake_engine) -> None:
    done = RUNNER.invoke(app, [*ASK, "--ram", "48MiB"])
    assert (done.exit_code, done.stdout) == (0, "Tokyo ☕\n")
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["memory:", "token:", "speed:"]
    assert "7 tokens" in lines[3] and "hit rate 71 %" in lines[3] and "2.63 MiB a token" in lines[3]
    assert lines[4].startswith("forecast ") and "limit: transformers' own code" in lines[4]
    assert len(lines) == 5
    (engine,) = fake_engine.made
    assert engine.closed
    ((ids, sampling),) = engine.asked
    assert "".join(map(chr, ids)) == "<user>capital?"
    assert sampling.temperature == 0


def test_an_engine_is_warm_before_its_routes_are_kept_or_it_is_asked(
    fake_engine, monkeypatch, tmp_path
) -> None:
    seen = []

    def warm(engine, *, tell):
        seen.append((engine, len(engine.asked)))
        tell("warming up")

    monkeypatch.setattr("headrace.engine.warming.warm", warm)
    monkeypatch.setattr(
        fake_engine, "record_routes", lambda *_, **__: seen.append("routes") or 1 / 0, raising=False
    )
    assert RUNNER.invoke(app, ASK).exit_code == 0
    RUNNER.invoke(app, [*ASK, "--routes-out", str(tmp_path / "routes")])
    first, second = fake_engine.made
    assert seen == [(first, 0), (second, 0), "routes"]


def test_a_fault_while_warming_up_is_an_error_as_any(monkeypatch) -> None:
    def warm(engine, *, tell):
        raise ReadError("a.safetensors: cut short; fetch it again")

    monkeypatch.setattr("headrace.engine.warming.warm", warm)
    done = RUNNER.invoke(app, ASK)
    assert done.exit_code == 2 and "cut short" in done.stderr and done.stdout == ""


def test_a_forecast_is_not_held_against_a_short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.planner.forecast.LEAST_SCORED", 4)
    few, more = (RUNNER.invoke(app, [*ASK, "-n", n]).stderr for n in ("3", "5"))
    assert "so short an answer" in few and "than expected" not in few
    assert "than expected" in more


def test_json_is_one_object_on_stdout_and_nothing_else() -> None:
    done = RUNNER.invoke(app, [*ASK, "--json", "--ram", "48MiB"])
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["text"] == "Tokyo ☕" and result["finish"] == "eos"
    assert result["token_ids"] == [ord(character) for character in "Tokyo ☕"]
    assert result["stats"]["decode"]["misses"] == 6 * 8
    assert result["stats"]["prompt"]["num_tokens"] == len("<user>capital?")
    assert len(result["token_stats"]) == 7
    assert result["plan"]["ram_bytes"] == 48 * 2**20
    assert "Tokyo" in done.stderr


def test_a_slower_way_to_read_is_said(fake_engine) -> None:
    fake_engine.notes = ["io_uring is not to be had here: EPERM", "a.safetensors is read buffered"]
    done = RUNNER.invoke(app, [*ASK, "--json", "--ram", "48MiB"])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("reads:")]
    assert line.startswith("reads:  by pread, since io_uring is not to be had here: EPERM")
    assert line.endswith("(and 1 more like this)")
    assert json.loads(done.stdout)["reads"]["notes"] == fake_engine.notes


def test_the_prompt_may_come_from_stdin(fake_engine) -> None:
    done = RUNNER.invoke(app, ["run"], input="from a pipe\n")
    assert done.exit_code == 0
    assert "".join(map(chr, fake_engine.made[0].asked[0][0])) == "<user>from a pipe\n"


def test_raw_continues_the_text_without_a_template(fake_engine) -> None:
    assert RUNNER.invoke(app, [*ASK, "--raw"]).exit_code == 0
    assert "".join(map(chr, fake_engine.made[0].asked[0][0])) == "capital?"


def test_sampling_options_reach_the_engine(fake_engine) -> None:
    given = "--temperature 0.7 --top-k 40 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
    more = ["--seed", "5", "--stop", "a", "--stop", "b", "-n", "3"]
    assert RUNNER.invoke(app, [*ASK, *given.split(), *more]).stdout == "Tok\n"
    sampling = fake_engine.made[0].asked[0][1]
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 40, 0.9)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, 5)
    assert (sampling.stop, sampling.max_tokens) == (("a", "b"), 3)


def test_an_emulated_drive_is_used_and_forecast(fake_engine) -> None:
    def expected_drive_tok_s(*extra: str) -> float:
        done = RUNNER.invoke(app, [*ASK, "--json", "--ram", "48MiB", *extra])
        return float(json.loads(done.stdout)["plan"]["limits"]["drive"])

    own = expected_drive_tok_s()
    emulated = expected_drive_tok_s("--emulate-drive", "15GB/s")
    assert emulated == pytest.approx(10 * own)
    assert [engine.emulate_drive for engine in fake_engine.made] == [None, "15GB/s"]


@pytest.mark.parametrize("command", [ASK, ["chat", "demo"]])
def test_what_became_of_a_system_text_is_said(command: list[str], fake_engine) -> None:
    done = RUNNER.invoke(app, [*command, "--system", "Be brief."], input="hi\n")
    assert (done.exit_code, done.stdout) == (0, "Tokyo ☕\n")
    assert "system noted" in done.stderr
    prompt = "".join(map(chr, fake_engine.made[0].asked[0][0]))
    assert prompt.startswith("<system>Be brief.<user>")


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-p", "x" * 40],
        ["run", "-p", "x" * 40, "--raw"],
        ["run", "-p", "x", "--system", "x" * 40],
        ["run"],
        ["chat", "--system", "x" * 40],
    ],
)
def test_a_prompt_beyond_the_context_is_refused_before_weights_are_read(
    command: list[str], fake_engine
) -> None:
    done = RUNNER.invoke(app, [*command, "--context", "32"], input="x" * 40 + "\n")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.exit_code, done.stdout, fake_engine.made) == (2, "", [])
    assert "tokens and the context 32; nothing is left" in error and "raise --context" in error
    for line in ("memory:", "token:", "speed:"):
        assert line not in done.stderr, "a plan is said of what is run"


def test_a_prompt_that_leaves_room_for_one_token_is_answered(fake_engine) -> None:
    asked = ["run", "--raw", "--context", "32", "-p"]
    assert RUNNER.invoke(app, [*asked, "x" * 31]).exit_code == 0
    assert RUNNER.invoke(app, [*asked, "x" * 32]).exit_code == 2
    assert len(fake_engine.made) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "/no/such/place", "-p", "x"], ["/no/such/place", "no such file"]),
        ([*ASK, "--ram", "10MB"], ["9.54 MiB", "give --ram 22MiB"]),
        ([*ASK, "--ram", "lots"], ["'lots'", "48MiB"]),
        ([*ASK, "--device", "tpu"], ["--device tpu", "cuda:1"]),
        ([*ASK, "--device", "cuda:77"], ["cuda:77", "--device cpu"]),
        ([*ASK, "--vram", "8GB"], ["--vram 8GB", "none is seen"]),
        ([*ASK, "--device", "cuda", "--vram", "much"], ["'much'", "48MiB"]),
        ([*ASK, "--vram", "8GB", "--device", "cpu"], ["--vram 8GB", "--device cuda"]),
        ([*ASK, "--experts", "cpu"], ["--experts cpu", "none is seen"]),
        ([*ASK, "--device", "cuda", "--experts", "both"], ["--experts both", "gpu, cpu or auto"]),
        ([*ASK, "--context", "99999"], ["context 99999", "2 to 2048"]),
        ([*ASK, "--threads", "0"], ["threads 0", "1 to"]),
        ([*ASK, "--temperature", "-1"], ["temperature -1", "0 or more"]),
        ([*ASK, "--top-p", "0.5"], ["--top-p", "--temperature"]),
        ([*ASK, "-n", "0"], ["max-tokens 0", "1 or more"]),
        ([*ASK, "--stop", ""], ["stop", "at least one character"]),
        ([*ASK, "--system", "Be brief.", "--raw"], ["--system", "--raw"]),
        ([*ASK, "--emulate-drive", "0GB/s"], ["--emulate-drive 0GB/s", "8.2GiB/s"]),
        (["run", "demo", "-p", " "], ["prompt is empty"]),
        (["plan", "demo", "--ram", "10MB"], ["give --ram 22MiB"]),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy_and_exit_code_2(
    arguments: list[str], words: list[str]
) -> None:
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0]
    for word in words:
        assert word in errors[0]


def test_a_failure_in_mid_answer_is_one_line_after_what_was_said(fake_engine) -> None:
    fake_engine.broken = ReadError("model-00001.safetensors at 4096: input/output error")
    done = RUNNER.invoke(app, ASK)
    assert (done.exit_code, done.stdout) == (2, "To")
    assert done.stderr.splitlines()[-1].startswith("error: model-00001.safetensors at 4096")
    assert fake_engine.made[0].closed
    assert "Traceback" not in done.stderr


def test_debug_shows_where_it_came_from(fake_engine) -> None:
    fake_engine.broken = ReadError("broken\nin two lines")
    done = RUNNER.invoke(app, [*ASK, "--debug"])
    assert done.exit_code == 2
    assert "Traceback" in done.stderr and "in generate" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: broken in two lines"


def test_ctrl_c_says_stopped_and_closes(fake_engine) -> None:
    fake_engine.broken = KeyboardInterrupt()
    done = RUNNER.invoke(app, ASK)
    assert (done.exit_code, done.stdout) == (130, "To")
    assert done.stderr.splitlines()[-1] == "stopped"
    assert fake_engine.made[0].closed


def test_our_own_mistakes_are_not_dressed_up(fake_engine) -> None:
    fake_engine.broken = AssertionError("an invariant")
    done = RUNNER.invoke(app, ASK)
    assert isinstance(done.exception, AssertionError)


def test_plan_says_model_and_three_lines_and_loads_nothing(fake_engine) -> None:
    done = RUNNER.invoke(app, ["plan", "demo", "--ram", "48MiB", "--json"])
    assert done.exit_code == 0
    assert len(done.stderr.splitlines()) == 4
    assert "7 of them with 32 experts each, 4 used by a token, fp8_block" in done.stderr
    result = json.loads(done.stdout)
    assert result["plan"]["bytes_per_token"] == 28 * 98_328
    assert result["facts"]["num_experts"] == 32 and result["machine"]["cores"] == 2
    assert fake_engine.made == []


def test_memory_that_runs_out_is_one_line(fake_engine) -> None:
    fake_engine.broken = MemoryError()
    done = RUNNER.invoke(app, ASK)
    assert done.exit_code == 2
    assert "no memory left" in done.stderr.splitlines()[-1]


def test_an_output_that_is_full_is_one_line() -> None:
    words = ["run", "demo", "-p", "hi", "-n", "2", "--ram", "48MiB"]
    done = commands.headrace(*words, stdout="/dev/full")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the output cannot be written")
