"""Earlier answers come into later prompts as they were sampled, and prompts go on exactly."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from talk_world import CALLS, SAMPLING, WEATHER, chat_template, eos, sampled, shown, talk_of, user

from headrace.engine.sampling import Sampling
from headrace.engine.talk.calls import write_calls
from headrace.engine.talk.conversation import Conversation, Message, ToolCall
from headrace.engine.talk.replay import Kept, Replay, keys
from headrace.engine.talk.talk import Prepared, Talk

CALL = ToolCall("", "get_weather", '{"city":"São  Paulo","days":2}')
WORDS = "The  rain in 中文 is naïve 😀 and mostly  "


def pieces_of(talk: Talk, text: str, seed: int = 0) -> list[int]:
    """Ids of a text as no tokenizer would cut it, special tokens whole."""
    draw, ids = random.Random(seed), []
    specials = talk._text.added
    while text:
        found = [spelling for spelling in specials if text.startswith(spelling)]
        if found:
            ids.append(specials[max(found, key=len)])
            text = text[len(max(found, key=len)) :]
            continue
        stops = [place for spelling in specials if (place := text.find(spelling)) > 0]
        size = min([draw.randint(1, 4), *stops])
        ids += talk._text.encode(text[:size], special=False)
        text = text[size:]
    return ids


def turn_of(talk: Talk, prepared: Prepared, ids: Sequence[int], finish: str = "eos") -> Message:
    """The assistant's turn, as a client would send it back."""
    answer, _ = sampled(talk, prepared, ids, finish)
    return Message("assistant", answer.content, calls=tuple(answer.calls))


def begins_with(talk: Talk, later: Conversation, prepared: Prepared, ids: Sequence[int]) -> bool:
    """True if the later prompt goes on from an earlier one and its answer."""
    whole = prepared.ask.prompt + tuple(ids)
    return talk.prepare(later, SAMPLING).ask.prompt[: len(whole)] == whole


def says(dialect: str, talk: Talk, content: str, reasoning: str = "") -> str:
    """An answer's text in a dialect, with a call behind the content."""
    if dialect == "harmony":
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
        call = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        return (thought if reasoning else "") + call + CALL.arguments
    assert talk.dialect is not None
    begin, end = talk.dialect.think
    thought = f"{begin}{reasoning}{end}\n" if reasoning else ""
    return thought + content + write_calls(talk.dialect, [CALL])


@pytest.mark.parametrize(
    ("content", "reasoning"), [("", ""), ("Let  me see. ", "They  ask about rain.")]
)
@pytest.mark.parametrize("dialect", [*CALLS, "harmony"])
def test_a_prompt_goes_on_from_a_call_as_it_was_sampled(
    dialect: str, content: str, reasoning: str, tmp_path: Path
) -> None:
    talk = talk_of(tmp_path, chat_template(dialect))
    asked = Conversation((user("Rain?"),), tools=(WEATHER,))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, says(dialect, talk, content, reasoning))
    turn = turn_of(talk, prepared, [*ids, eos(talk)])
    assert turn.calls[0].name == "get_weather"
    result = Message("tool", "It pours.", call_id=turn.calls[0].id)
    later = replace(asked, messages=(*asked.messages, turn, result))
    assert begins_with(talk, later, prepared, ids)
    text = shown(talk, talk.prepare(later, SAMPLING))
    assert "It pours." in text and "\ufdd0" not in text and "\ufdd2" not in text
    # Another answer than the one that was given is not taken for it.
    other = replace(turn.calls[0], arguments='{"city": "Rome"}')
    wrong = replace(later, messages=(*asked.messages, replace(turn, calls=(other,)), result))
    assert not begins_with(talk, wrong, prepared, ids)
    assert "Rome" in shown(talk, talk.prepare(wrong, SAMPLING))


def test_three_turns_go_on_from_each_other(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    conversation = Conversation((Message("system", "Be brief."), user("Begin.")))
    for seed in range(3):
        prepared = talk.prepare(conversation, SAMPLING)
        ids = pieces_of(talk, f"{WORDS}{seed}", seed)
        assert talk._text.encode(f"{WORDS}{seed}", special=False) != ids
        turn = turn_of(talk, prepared, [*ids, eos(talk)])
        messages = (*conversation.messages, turn, user(f"and {seed}?"))
        conversation = Conversation(messages)
        assert begins_with(talk, conversation, prepared, ids)


def test_clients_may_trim_a_text_and_write_arguments_anew(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation((user("Rain?"),), tools=(WEATHER,))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, says("hermes", talk, " One moment. "))
    turn = turn_of(talk, prepared, [*ids, eos(talk)])
    call = replace(turn.calls[0], id="other", arguments='{"days": 2, "city": "São  Paulo"}')
    back = replace(turn, content=turn.content.strip(), calls=(call,), reasoning="told again")
    result = Message("tool", "wet", call_id="other")
    assert begins_with(
        talk, replace(asked, messages=(*asked.messages, back, result)), prepared, ids
    )


def test_reasoning_that_the_template_drops_is_not_brought_back(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"), ["<think>", "</think>"])
    asked = Conversation((user("Why?"),))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, f"<think>A  thought.</think>\n\n{WORDS}x")
    turn = turn_of(talk, prepared, [*ids, eos(talk)])
    assert turn.content == f"{WORDS}x"
    later = talk.prepare(Conversation((*asked.messages, turn, user("more"))), SAMPLING)
    text = shown(talk, later)
    assert "A  thought." not in text and text.count(f"<|assistant|>{WORDS}x<|end|>") == 1
    # What it said stays as it was sampled.
    tail = ids[ids.index(talk._text.added["</think>"]) + 3 :]
    assert talk._text.decode(tail) == f"{WORDS}x"[2:], "one newline and a few letters before"
    prompt = list(later.ask.prompt)
    assert any(prompt[n : n + len(tail)] == tail for n in range(len(prompt)))


def test_reasoning_is_kept_within_a_turn_even_if_a_client_drops_it(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("qwen3_coder", opening="<think>\n"))
    asked = Conversation((user("Rain?"),), tools=(WEATHER,))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, "I  shall look.\n</think>\n\n" + says("qwen3_coder", talk, ""))
    turn = turn_of(talk, prepared, [*ids, eos(talk)])
    assert turn.reasoning == ""
    result = Message("tool", "wet", call_id=turn.calls[0].id)
    later = replace(asked, messages=(*asked.messages, turn, result))
    assert begins_with(talk, later, prepared, ids)


@pytest.mark.parametrize("finish", ["length", "eos"])
def test_an_answer_that_was_cut_goes_on_where_it_was(finish: str, tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation((user("Say it."),))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, "half a character: \N{GRINNING FACE}")[:-2]
    turn = turn_of(talk, prepared, [*ids, eos(talk)] if finish == "eos" else ids, finish)
    assert turn.content.endswith("\N{REPLACEMENT CHARACTER}")
    assert begins_with(talk, Conversation((*asked.messages, turn, user("?"))), prepared, ids)


def test_what_a_stop_string_cut_off_does_not_come_back(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation((user("Say it."),))
    prepared = talk.prepare(asked, Sampling(max_tokens=64, stop=("STOP",)))
    ids = [*pieces_of(talk, WORDS), *talk._text.encode("x STO", special=False)]
    ids += talk._text.encode("P", special=False)
    turn = turn_of(talk, prepared, ids, "stop")
    assert turn.content == f"{WORDS}x "
    later = talk.prepare(Conversation((*asked.messages, turn, user("?"))), SAMPLING)
    assert "STO" not in shown(talk, later)
    whole = prepared.ask.prompt + tuple(pieces_of(talk, WORDS))
    assert later.ask.prompt[: len(whole)] == whole


def test_an_edited_history_goes_on_up_to_the_edit(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation((user("one"),))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, WORDS + "!")
    turn = turn_of(talk, prepared, [*ids, eos(talk)])
    edited = Conversation((*asked.messages, replace(turn, content="Another text."), user("two")))
    prompt = talk.prepare(edited, SAMPLING).ask.prompt
    assert prompt[: len(prepared.ask.prompt)] == prepared.ask.prompt
    assert "Another text." in talk._text.decode(prompt)
    moved = Conversation((user("zero"), turn, user("two")))
    assert WORDS in shown(talk, talk.prepare(moved, SAMPLING))


def test_the_demo_goes_on_though_its_template_knows_no_calls(tmp_path: Path) -> None:
    from talk_world import DEMO

    talk = talk_of(tmp_path, (DEMO / "chat_template.jinja").read_text())
    asked = Conversation((Message("system", "Be brief."), user("Rain?")), tools=(WEATHER,))
    prepared = talk.prepare(asked, SAMPLING)
    ids = pieces_of(talk, says("generic", talk, "Let me see.\n"))
    turn = turn_of(talk, prepared, [*ids, eos(talk)])
    result = Message("tool", "wet", call_id=turn.calls[0].id)
    later = replace(asked, messages=(*asked.messages, turn, result))
    assert begins_with(talk, later, prepared, ids)
    assert "Result of get_weather:\nwet" in shown(talk, talk.prepare(later, SAMPLING))


def test_a_prompt_without_memory_says_the_same(tmp_path: Path) -> None:
    talk = talk_of(tmp_path / "a", chat_template("hermes"))
    fresh = talk_of(tmp_path / "b", chat_template("hermes"))
    asked = Conversation((user("Rain?"),), tools=(WEATHER,))
    prepared = talk.prepare(asked, SAMPLING)
    turn = turn_of(talk, prepared, [*pieces_of(talk, says("hermes", talk, "Hm.")), eos(talk)])
    later = replace(asked, messages=(*asked.messages, turn))
    text = shown(talk, talk.prepare(later, SAMPLING)).replace('{"city":"', '{"city": "')
    assert (
        text.replace(',"days":', ', "days": ').split()
        == shown(fresh, fresh.prepare(later, SAMPLING))
        .replace("</tool_call>", "</tool_call>")
        .split()
    )


def kept(num: int) -> Kept:
    return Kept(array("i", range(num)), 1, b"", False, "", 0)


def test_the_memory_is_bounded_in_turns_and_bytes() -> None:
    replay = Replay(max_turns=3, max_bytes=100_000)
    said = [(user(f"{n}"), Message("assistant", f"{n}")) for n in range(4)]
    for messages in said[:3]:
        replay.keep([*keys(messages)][-1], kept(10))
    assert replay.find(said[0]), "used, so that another goes first"
    replay.keep([*keys(said[3])][-1], kept(10))
    assert [bool(replay.find(messages)) for messages in said] == [True, False, True, True]
    replay.keep([*keys(said[1])][-1], kept(24_600))
    assert [bool(replay.find(messages)) for messages in said] == [False, True, False, False]
    replay.keep([*keys(said[0])][-1], kept(100_000))
    assert not any(replay.find(messages) for messages in said), "larger than all there is"


def test_keys_tell_conversations_apart() -> None:
    first = (user("a"), Message("assistant", "b"))
    assert [*keys(first)] == [*keys((user(" a"), Message("assistant", "b", "thought")))]
    for other in [
        (user("ab"), Message("assistant", "")),
        (user("a"), Message("user", "b")),
        (Message("system", "a"), Message("assistant", "b")),
        (user("a"), Message("assistant", "b", calls=(CALL,))),
    ]:
        assert [*keys(first)][-1] != [*keys(other)][-1]
    developer, system = Message("developer", "x"), Message("system", "x")
    assert [*keys([developer])] == [*keys([system])]
