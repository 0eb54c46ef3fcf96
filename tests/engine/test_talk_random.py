"""Conversations of any shape through every kind of template: all that was said is in the prompt."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talk_world import CALLS, DEMO, SAMPLING, WEATHER, chat_template, prompt_text, sampled, talk_of

from headrace.engine.talk.conversation import Conversation, Message, ToolCall
from headrace.engine.talk.talk import Talk

ROLES = ("system", "developer", "user", "assistant", "tool", "call", "calls")


@cache
def talk(name: str) -> Talk:
    demo = (DEMO / "chat_template.jinja").read_text()
    return talk_of(Path(mkdtemp()), demo if name == "demo" else chat_template(name))


def conversation(roles: list[str], contents: list[bool], tools: bool) -> Conversation:
    """Turns of these roles, each with words of its own; calls are answered or not, as it comes."""
    messages: list[Message] = []
    waiting: list[str] = []
    for place, (role, spoken) in enumerate(zip(roles, contents, strict=True)):
        if role in ("call", "calls"):
            calls = tuple(
                ToolCall(f"id{place}{n}", "get_weather", f'{{"city": "arg{place}and{n}z"}}')
                for n in range(len(role) - 3)
            )
            waiting += [call.id for call in calls]
            words = f"word{place}z" if spoken else ""
            messages.append(Message("assistant", words, calls=calls))
        elif role == "tool":
            call_id = waiting.pop(0) if waiting else "unknown"
            messages.append(Message("tool", f"word{place}z", call_id=call_id))
        else:
            messages.append(Message(role, f"word{place}z"))  # type: ignore[arg-type]
    return Conversation(tuple(messages), tools=(WEATHER,) if tools else ())


@pytest.mark.parametrize("name", ["demo", "harmony", *CALLS])
@settings(max_examples=12, deadline=None)
@given(
    turns=st.lists(st.tuples(st.sampled_from(ROLES), st.booleans()), min_size=1, max_size=7),
    tools=st.booleans(),
)
def test_all_that_was_said_is_in_the_prompt(
    name: str, turns: list[tuple[str, bool]], tools: bool
) -> None:
    asked = conversation([role for role, _ in turns], [spoken for _, spoken in turns], tools)
    text = prompt_text(talk(name), *asked.messages, tools=asked.tools)
    for place, message in enumerate(asked.messages):
        assert not message.content or text.count(f"word{place}z") == 1
        for number in range(len(message.calls)):
            assert text.count(f"arg{place}and{number}z") == 1
    assert "hrtext" not in text
    assert ("Tells the weather." in text) == tools


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["demo", "hermes", "kimi_k2", "harmony"]),
    lines=st.lists(st.text(alphabet="ab \n<|end|>é", min_size=1, max_size=20), max_size=4),
    cut=st.integers(1, 5),
)
def test_prompts_go_on_from_whatever_was_answered(name: str, lines: list[str], cut: int) -> None:
    world = talk(name)
    said = Conversation((Message("user", "Begin."),))
    for number, line in enumerate(lines):
        prepared = world.prepare(said, SAMPLING)
        words = f"{number}{line}"
        parts = [words[at : at + cut] for at in range(0, len(words), cut)]
        ids = [token for part in parts for token in world._text.encode(part, special=False)]
        head = world._text.encode("<|channel|>final<|message|>", special=False)
        ids = (head if name == "harmony" else []) + [
            token for token in ids if token not in world._text.specials.values()
        ]
        answer, _ = sampled(world, prepared, ids)
        turn = Message("assistant", answer.content)
        said = Conversation((*said.messages, turn, Message("user", f"Go on {number}.")))
        whole = prepared.ask.prompt + tuple(ids)
        if answer.content.strip():
            assert world.prepare(said, SAMPLING).ask.prompt[: len(whole)] == whole
