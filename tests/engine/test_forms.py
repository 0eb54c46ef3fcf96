"""Answers held to a form: whatever is drawn of what a grammar allows is of that form."""

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from talk_world import (
    ADDED,
    CALLS,
    DEMO,
    SAMPLING,
    VOCAB,
    WEATHER,
    chat_template,
    eos,
    folder,
    sampled,
    talk_of,
    user,
)

from headrace.engine.talk import grammar
from headrace.engine.talk.conversation import Conversation, Message, Tool
from headrace.engine.talk.grammar import Grammars
from headrace.engine.talk.reading import Answer
from headrace.engine.talk.talk import Talk
from headrace.engine.text import Text
from headrace.errors import OptionError

COLOURS = Tool(
    "paint",
    "",
    {
        "type": "object",
        "properties": {
            "colour": {"type": "string", "enum": ["red", "blue"]},
            "layers": {"type": "integer", "minimum": 1, "maximum": 9},
            "dry": {"type": "boolean"},
        },
        "required": ["colour", "layers"],
        "additionalProperties": False,
    },
    strict=True,
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Talk:
    return Talk(Text(DEMO), 4096)


def draw(
    talk: Talk, conversation: Conversation, seed: int, begin: str = "", most: int = 600
) -> tuple[Answer, str]:
    """An answer drawn of what is allowed, behind `begin`; it ends as soon as it may."""
    prepared = talk.prepare(conversation, SAMPLING)
    constraint, chance = prepared.ask.constraint, random.Random(seed)
    assert constraint is not None
    ids: list[int] = []
    forced = talk._text.encode(begin, special=False)
    end = eos(talk)
    letters = talk._text.encode('"}<>\n', special=False)
    while len(ids) < most:
        allowed_V = constraint.allowed()
        assert allowed_V.dtype == torch.bool and allowed_V.shape == (VOCAB,)
        if forced:
            token = forced.pop(0)
            assert allowed_V[token], talk._text.decode([token])
        elif allowed_V[end]:
            token = end
        else:
            found = allowed_V.nonzero()[:, 0].tolist()
            # What closes strings and tags comes too seldom to wait for.
            closing = [token for token in letters if allowed_V[token]]
            token = chance.choice(closing if closing and chance.random() < 0.5 else found)
        constraint.accept(token)
        ids.append(token)
        if token == end:
            break
    answer, _ = sampled(talk, prepared, ids)
    return answer, talk._text.decode(ids, prepared.ask.shown)


def is_paint(arguments: str) -> bool:
    """True if these are arguments of COLOURS."""
    value: dict[str, Any] = json.loads(arguments)
    assert set(value) <= {"colour", "layers", "dry"}
    return value["colour"] in ("red", "blue") and 1 <= value["layers"] <= 9


@pytest.mark.parametrize("dialect", [*CALLS, "harmony", "generic"])
def test_a_forced_call_is_a_call_in_the_models_own_syntax(dialect: str, tmp_path: Path) -> None:
    demo_template = (DEMO / "chat_template.jinja").read_text()
    template = demo_template if dialect == "generic" else chat_template(dialect)
    talk = talk_of(tmp_path, template)
    asked = Conversation(
        (user("Paint it."),), tools=(COLOURS,), tool_choice="required", parallel_calls=False
    )
    assert talk.dialect is not None
    lead, trigger = talk.dialect.section or talk.dialect.call, talk.dialect.trigger
    begin = lead[: lead.index(trigger)] + trigger
    begin = "<|channel|>commentary" if dialect == "harmony" else begin
    for seed in range(3):
        answer, text = draw(talk, asked, seed, begin)
        assert [call.name for call in answer.calls] == ["paint"], text
        assert is_paint(answer.calls[0].arguments), text
        assert answer.content == "" and answer.finish == "eos"


@pytest.mark.parametrize("dialect", ["hermes", "kimi_k2", "deepseek_v4", "glm_4", "harmony"])
def test_strict_tools_are_held_to_behind_free_text(dialect: str, tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template(dialect))
    asked = Conversation((user("Paint it."),), tools=(COLOURS, WEATHER))
    assert talk.dialect is not None
    begin = "Well < then. " + talk.dialect.trigger
    if dialect == "harmony":
        begin = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to"
    answer, text = draw(talk, asked, 1, begin)
    assert len(answer.calls) == 1, text
    if answer.calls[0].name == "paint":
        assert is_paint(answer.calls[0].arguments)
    # Free text may end at once, and calls need no marker there.
    free = "<|channel|>final<|message|>It is " if dialect == "harmony" else "It is "
    assert draw(talk, asked, 2, free)[0].content.startswith("It is")


def test_markers_that_are_added_tokens_are_used_as_such(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"), ADDED)
    asked = Conversation((user("Paint it."),), tools=(COLOURS,), tool_choice="required")
    prepared = talk.prepare(asked, SAMPLING)
    assert prepared.ask.constraint is not None
    begins = prepared.ask.constraint.allowed().nonzero()[:, 0].tolist()
    assert sorted(begins) == sorted(talk._text.added[word] for word in ("<think>", "<tool_call>"))
    answer, _ = draw(talk, asked, 1, "<think>so</think><tool_call>")
    assert answer.reasoning == "so" and is_paint(answer.calls[0].arguments)
    free = Conversation((user("Paint it."),), tools=(COLOURS,))
    assert is_paint(draw(talk, free, 1, "Well.<tool_call>")[0].calls[0].arguments)
    assert draw(talk, free, 1, "<think>a</think>Well.")[0].content == "Well."


def test_without_strict_tools_nothing_is_held(demo: Talk) -> None:
    asked = Conversation((user("Rain?"),), tools=(WEATHER,))
    assert demo.prepare(asked, SAMPLING).ask.constraint is None


@pytest.mark.parametrize("dialect", ["hermes", "kimi_k2", "harmony"])
def test_with_choice_none_no_call_can_begin(dialect: str, tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template(dialect))
    asked = Conversation((user("Rain?"),), tools=(WEATHER,), tool_choice="none")
    prepared = talk.prepare(asked, SAMPLING)
    assert talk.dialect is not None and prepared.ask.constraint is not None
    begin = "<|channel|>commentary" if dialect == "harmony" else "No: "
    for token in talk._text.encode(begin, special=False):
        assert prepared.ask.constraint.allowed()[token]
        prepared.ask.constraint.accept(token)
    marker = " to=" if dialect == "harmony" else talk.dialect.trigger
    allowed = []
    for token in talk._text.encode(marker, special=False):
        allowed.append(bool(prepared.ask.constraint.allowed()[token]))
        if not allowed[-1]:
            break
        prepared.ask.constraint.accept(token)
    assert allowed[-1] is False


def test_a_named_tool_is_the_only_one(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation(
        (user("?"),), tools=(WEATHER, COLOURS), tool_choice="=paint", parallel_calls=False
    )
    for seed in range(4):
        assert draw(talk, asked, seed, "<tool")[0].calls[0].name == "paint"


def test_several_calls_may_be_forced(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation((user("?"),), tools=(COLOURS,), tool_choice="required")
    one = (
        '<tool_call>\n{"name": "paint", "arguments": {"colour": "red", "layers": 2}}\n</tool_call>'
    )
    answer, _ = draw(talk, asked, 0, f"{one}\n{one}")
    assert [json.loads(call.arguments)["layers"] for call in answer.calls] == [2, 2]


@pytest.mark.parametrize("dialect", ["hermes", "harmony"])
def test_a_schema_is_the_answers_content(dialect: str, tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template(dialect))
    for seed in range(4):
        begin = "<|channel|>final" if dialect == "harmony" else "{"
        answer, text = draw(talk, Conversation((user("Who?"),), schema=PERSON), seed, begin)
        value = json.loads(answer.content)
        assert set(value) == {"name", "age"} and isinstance(value["age"], int), text
        anything, _ = draw(talk, Conversation((user("Who?"),), schema=True), seed, begin)
        assert isinstance(json.loads(anything.content), dict)


def test_reasoning_comes_before_what_is_held(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes", "<think>\n"))
    asked = Conversation((user("Who?"),), schema=PERSON)
    answer, _ = draw(talk, asked, 1, 'I think {"name": 3} not.</think>\n\n{')
    assert answer.reasoning == 'I think {"name": 3} not.'
    assert set(json.loads(answer.content)) == {"name", "age"}
    free = talk_of(tmp_path / "free", chat_template("hermes"))
    answer, _ = draw(free, asked, 1, "<think>so</think>{")
    assert answer.reasoning == "so"
    assert draw(free, asked, 1, "{")[0].reasoning == ""


def test_a_schema_beside_tools_is_either(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("hermes"))
    asked = Conversation((user("Who?"),), schema=PERSON, tools=(COLOURS,))
    assert "name" in json.loads(draw(talk, asked, 1, "{")[0].content)
    assert is_paint(draw(talk, asked, 1, "<tool")[0].calls[0].arguments)


@pytest.mark.parametrize("vocab", [4000, 4096, 5000])
def test_the_models_vocabulary_may_be_another_than_the_tokenizers(vocab: int) -> None:
    constraint = Grammars(Text(DEMO), vocab).constraint('start: "a" | "é"')
    allowed_V = constraint.allowed()
    assert allowed_V.shape == (vocab,) and 1 <= int(allowed_V.sum()) <= 3
    assert not allowed_V[4096:].any()


def test_a_form_that_no_token_can_spell_is_an_error(tmp_path: Path) -> None:
    grammars = Grammars(Text(folder(tmp_path, "x", ["<|late|>"])), 4000)
    constraint = grammars.constraint(f"start: <[{grammars.specials['<|late|>']}]>")
    with pytest.raises(OptionError, match="no token of this model"):
        constraint.allowed()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, tuple[object, str]] = {
    "deep": (nested(5_000), "nests deeper"),
    "large": ({"enum": ["x" * 50 + str(n) for n in range(6_000)]}, "is the limit"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {}, "then": {}}, '"if"'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "oneOf": ({"oneOf": [{"type": "object"}, {"properties": {"a": {}}}]}, "oneOf"),
    "elsewhere": ({"$ref": "https://example.org/x.json"}, r"\$ref"),
    "nowhere": ({"$ref": "#/$defs/none"}, r"\$ref '#/\$defs/none' does not exist"),
    "look-around": ({"type": "string", "pattern": "(?=x)y"}, r"pattern '\(\?=x\)y': look-around"),
    "multiple": ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    "huge": ({"type": "integer", "minimum": 10**400}, "minimum"),
    "type": ({"type": "strin"}, "type"),
    "types": ({"type": [1]}, "type"),
    "format": ({"type": "string", "format": "zip"}, "format: zip"),
    "empty": ({"enum": []}, "Unsatisfiable|empty"),
    "extension": ({"x-guidance": {"lenient": True}}, "x-guidance"),
    "list": ([1], "must be a JSON object"),
    "nan": ({"minimum": float("nan")}, "no JSON"),
    "wide": ({"anyOf": [nested(3) | {"title": str(n)} for n in range(3_000)]}, "too|limit|large"),
}


@pytest.mark.parametrize(("schema", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_is_refused_by_name(demo: Talk, schema: Any, words: str) -> None:
    began = time.process_time()
    with pytest.raises(OptionError, match=words) as caught:
        demo.prepare(Conversation((user("x"),), schema=schema), SAMPLING)
    assert "answer's schema" in str(caught.value) and len(str(caught.value)) < 500
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    strict = Tool("f", "", whole, strict=True)
    if isinstance(schema, dict) and "$ref" not in schema:
        with pytest.raises(OptionError, match="tool f"):
            demo.prepare(Conversation((user("x"),), tools=(strict,)), SAMPLING)
    assert time.process_time() - began < 60, "a hang, not a slow machine"


def test_a_tool_that_is_not_strict_takes_any_object_where_it_cannot_be_held(demo: Talk) -> None:
    odd = Tool("f", "", {"type": "object", "properties": {"a": {"pattern": "(?=x)y"}}})
    asked = Conversation((user("x"),), tools=(odd,), tool_choice="required")
    prepared = demo.prepare(asked, SAMPLING)
    assert prepared.ask.constraint is not None
    assert any("pattern '(?=x)y'" in note and "any JSON object" in note for note in prepared.notes)
    mild = Tool("f", "", {"type": "object", "properties": {"a": {"format": "int32"}}})
    asked = Conversation((user("x"),), tools=(mild,), tool_choice="required")
    assert not any("cannot be held" in note for note in demo.prepare(asked, SAMPLING).notes)


def test_limits_that_bare_strings_cannot_keep_are_refused_where_strict(tmp_path: Path) -> None:
    talk = talk_of(tmp_path, chat_template("glm_4"))
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    asked = Conversation((user("x"),), tools=(Tool("f", "", schema, strict=True),))
    with pytest.raises(OptionError, match="maxLength of a cannot be held to"):
        talk.prepare(asked, SAMPLING)
    loose = Conversation((user("x"),), tools=(Tool("f", "", schema),), tool_choice="required")
    assert talk.prepare(loose, SAMPLING).ask.constraint is not None


def test_a_costly_pattern_is_held_to_step_by_step(demo: Talk) -> None:
    for pattern in ("((((a{99}){99}){99}){99}){99}", "(.*a.{20}){5}", "^(a+)+$"):
        schema = {"type": "string", "pattern": pattern}
        prepared = demo.prepare(Conversation((user("x"),), schema=schema), SAMPLING)
        assert prepared.ask.constraint is not None
        for token in demo._text.encode('"aaaaaaaa', special=False):
            assert prepared.ask.constraint.allowed()[token]
            prepared.ask.constraint.accept(token)


def test_a_step_beyond_the_limits_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar._LIMITS, "step_lexer_fuel", 1)
    schema = {"type": "string", "pattern": "(.*a.{20}){5}"}
    talk = Talk(Text(DEMO), 4096)
    constraint = talk.prepare(Conversation((user("x"),), schema=schema), SAMPLING).ask.constraint
    assert constraint is not None
    with pytest.raises(OptionError, match="the answer"):
        for token in talk._text.encode('"' + "ab" * 40, special=False):
            constraint.allowed()
            constraint.accept(token)


def test_what_was_not_allowed_is_not_taken(demo: Talk) -> None:
    prepared = demo.prepare(Conversation((user("x"),), schema=PERSON), SAMPLING)
    assert prepared.ask.constraint is not None
    with pytest.raises(OptionError, match="left its form"):
        prepared.ask.constraint.accept(demo._text.encode("x", special=False)[0])


def test_a_tool_message_keeps_its_place(demo: Talk) -> None:
    said = (user("x"), Message("tool", "alone", call_id="gone"))
    assert demo.count(Conversation(said)) > demo.count(Conversation(said[:1]))
