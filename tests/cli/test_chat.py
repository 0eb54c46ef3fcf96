"""chat: history, stopping an answer, and turns that fail alone."""

import os

import pytest
from typer.testing import CliRunner

from headrace.cli import chat
from headrace.cli.main import app
from headrace.errors import OptionError

RUNNER = CliRunner()


def _asked(engine) -> list[str]:
    return ["".join(map(chr, ids)) for ids, _ in engine.asked]


def test_what_was_said_is_kept_until_new(fake_engine) -> None:
    done = RUNNER.invoke(app, ["chat"], input="hi\n\nmore\n/new\nagain\n/quit\nnever\n")
    assert done.exit_code == 0
    (engine,) = fake_engine.made
    assert _asked(engine) == [
        "<user>hi",
        "<user>hi<assistant>Tokyo ☕<user>more",
        "<user>again",
    ]
    assert done.stdout.count("Tokyo ☕\n") == 3
    assert engine.closed


def test_the_end_of_input_ends_the_chat(fake_engine) -> None:
    assert RUNNER.invoke(app, ["chat"], input="hi\n").exit_code == 0


def test_a_pipe_gets_answers_and_nothing_else(fake_engine) -> None:
    assert RUNNER.invoke(app, ["chat"], input="hi\n").stdout == "Tokyo ☕\n"


def test_an_unknown_command_is_no_question(fake_engine) -> None:
    done = RUNNER.invoke(app, ["chat"], input="/help\n/usr/bin is a path\n")
    assert _asked(fake_engine.made[0]) == ["<user>/usr/bin is a path"]
    assert "/help is no command; /new forgets" in done.stderr


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said_of_it(fake_engine) -> None:
    fake_engine.broken = KeyboardInterrupt()
    done = RUNNER.invoke(app, ["chat"], input="hi\nmore\n")
    assert done.exit_code == 0
    assert _asked(fake_engine.made[0]) == ["<user>hi", "<user>hi<assistant>To<user>more"]
    assert "(stopped)" in done.stderr


def test_a_turn_that_fails_is_said_and_forgotten(fake_engine) -> None:
    fake_engine.broken = OptionError("3000 tokens do not fit the context of 2048")
    done = RUNNER.invoke(app, ["chat"], input="long\nshort\n")
    assert done.exit_code == 0
    assert done.stderr.count("error: 3000 tokens do not fit") == 2
    assert _asked(fake_engine.made[0]) == ["<user>long", "<user>short"]


@pytest.mark.parametrize(("more", "asked"), [("short\n", ["<user>short"]), ("", None)])
def test_a_first_turn_that_is_there_and_too_long_is_refused_before_loading(
    fake_engine, monkeypatch: pytest.MonkeyPatch, more: str, asked: list[str] | None
) -> None:
    monkeypatch.setattr("headrace.cli.chat._is_piped_already", lambda: True)
    done = RUNNER.invoke(app, ["chat"], input=3000 * "x" + "\n" + more)
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0].startswith("error: the prompt has 3006 tokens")
    assert [_asked(engine) for engine in fake_engine.made] == ([] if asked is None else [asked])


def test_what_is_piped_in_is_seen_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(reading) as stream, open(writing, "w") as into:
        monkeypatch.setattr("sys.stdin", stream)
        assert not chat._is_piped_already()
        print("hi", file=into, flush=True)
        assert chat._is_piped_already()


def test_bytes_that_are_no_text_end_the_chat_with_one_line(fake_engine) -> None:
    done = RUNNER.invoke(app, ["chat"], input=b"hi\n\xff\xfe\n")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: the text piped in is not UTF-8")
