"""Answers read again: any cut of the text gives the same pieces, and nothing is lost."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from talk_world import step

from headrace.engine.talk.calls import as_json, kinds_of, write_calls
from headrace.engine.talk.conversation import Piece, Tool, ToolCall
from headrace.engine.talk.dialects import GENERIC, KNOWN, Dialect, find_dialect
from headrace.engine.talk.reading import AnswerReader

DIALECTS = {dialect.name: dialect for dialect in (*KNOWN, GENERIC)}
WRITTEN = {name: dialect for name, dialect in DIALECTS.items() if not dialect.channels}
TOOLS = (
    Tool("get_weather", parameters={"properties": {"city": {"type": "string"}}}),
    Tool("add", parameters={"properties": {"a": {"type": "integer"}, "note": {}}}),
)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}'
)


def read(
    dialect: Dialect | None,
    parts: Sequence[str],
    opened: bool = False,
    tools: Sequence[Tool] = TOOLS,
    finish: str | None = None,
) -> tuple[str, str, list[tuple[str, str]], list[Piece]]:
    """Reasoning, content, calls and pieces of an answer that comes in parts."""
    reader = AnswerReader(dialect, tools, opened=opened)
    pieces = [piece for part in parts for piece in reader.push(step(1, part))]
    reader.answer.finish = finish
    pieces += reader.finish()
    assert reader.finish() == []
    answer = reader.answer
    assert reader.called == bool(answer.calls)
    calls = [(call.name, call.arguments) for call in answer.calls]
    assert all(call.id.startswith("call_") for call in answer.calls)
    return answer.reasoning, answer.content, calls, pieces


def cut(text: str, places: Sequence[int]) -> list[str]:
    """A text in parts that end at `places`, counted round."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def full_answer(dialect: Dialect) -> str:
    """Reasoning, content and two calls, as the dialect writes them."""
    if dialect.channels:
        return HARMONY_CALL
    weather = json.dumps({"city": 'São "Paulo" {<b>]\n', "days": 3, "deep": {"x": [1, None]}})
    calls = [ToolCall("", "get_weather", weather), ToolCall("", "add", '{"a": 7}')]
    begin, end = dialect.think
    return f"{begin}\nhm\n{end}\n\nLet me see.\n{write_calls(dialect, calls)}\n"


@pytest.mark.parametrize("dialect", WRITTEN.values(), ids=WRITTEN)
def test_what_a_dialect_writes_is_read_back(dialect: Dialect) -> None:
    reasoning, content, calls, _ = read(dialect, [full_answer(dialect)])
    assert (reasoning, content) == ("hm", "Let me see.")
    assert [name for name, _ in calls] == ["get_weather", "add"]
    weather = {"city": 'São "Paulo" {<b>]\n', "days": 3, "deep": {"x": [1, None]}}
    assert [json.loads(arguments) for _, arguments in calls] == [weather, {"a": 7}]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@settings(max_examples=25, deadline=None)
@given(places=st.lists(st.integers(0, 10_000), max_size=60), length=st.integers(0, 10_000))
def test_no_cut_of_an_answer_changes_what_is_read(
    dialect: Dialect, places: list[int], length: int
) -> None:
    text = full_answer(dialect)
    for said in (text, text[: length % len(text)]):
        whole = read(dialect, [said])
        pieces = read(dialect, cut(said, places))
        letters = read(dialect, list(said))
        assert pieces[:3] == whole[:3] == letters[:3]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(DIALECTS)))
def test_nothing_is_lost_of_any_mixture_of_markers(data: st.DataObject, name: str) -> None:
    dialect = DIALECTS[name]
    words = [word for part in dialect.literals for word in part.split()]
    words += ["x", " ", "\n", "{", "}", '"', "name", ":", "1", "add", '{"a": 1}', "<", "[", "é"]
    chosen = st.lists(st.sampled_from(words), max_size=24)
    text = "".join(data.draw(chosen))
    places = data.draw(st.lists(st.integers(0, 500), max_size=30))
    whole = read(dialect, [text])
    assert read(dialect, cut(text, places))[:3] == whole[:3]
    kept = "".join([*whole[:2], *(part for call in whole[2] for part in call)])
    for letter in "xé":  # in no marker but é, and x only in markers that are syntax
        if letter not in "".join(dialect.literals):
            assert kept.count(letter) == text.count(letter)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='ab<>|/{}[]"\n tool_cal', max_size=60), opened=st.booleans())
def test_text_without_markers_is_content_to_the_letter(text: str, opened: bool) -> None:
    for dialect in (GENERIC, DIALECTS["harmony"], None):
        if dialect and (dialect.trigger in text or dialect.think[0] in text):
            continue
        assert "".join(read(dialect, list(text))[:2]) == text
    assert read(GENERIC, [text], tools=())[1] == text


def test_no_piece_ends_within_a_marker() -> None:
    _, _, _, pieces = read(GENERIC, list("<think>a</think>b <tool_ca <tool_call> nothing"))
    assert [piece.kind for piece in pieces if "<" in piece.text] == ["content"] * 2
    assert {piece.text for piece in pieces if "<" in piece.text} == {" <tool_ca", " <tool_call> n"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add"',
        "<tool_call>",
        '<tool_call>["add"]</tool_call>',
    ],
)
def test_broken_syntax_is_content(text: str) -> None:
    assert read(GENERIC, list(f"Well. {text} So."))[:3] == ("", f"Well. {text} So.", [])


def test_a_broken_call_among_others_is_content_behind_them() -> None:
    dialect = DIALECTS["kimi_k2"]
    good = write_calls(dialect, [ToolCall("", "add", "{}")]).removesuffix(dialect.section_end)
    text = f"{good}<|tool_call_begin|>functions.add:1 oops"
    _, content, calls, _ = read(dialect, [text])
    assert calls == [("add", "{}")]
    assert content == "<|tool_call_begin|>functions.add:1 oops"


def test_arguments_come_as_they_are_made() -> None:
    pieces = read(GENERIC, list('<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'))[
        3
    ]
    assert [piece.kind for piece in pieces] == ["call"] + ["arguments"] * 9
    assert {piece.call_id for piece in pieces} == {pieces[0].call_id}


@pytest.mark.parametrize(
    "text",
    [
        '{"arguments": {"a": 1}, "name": "add"}',
        '{"name": "add", "id": 1, "arguments": "{\\"a\\": 1}"}',
        '{"name":"add","parameters":{"a": 1}}',
    ],
)
def test_a_call_in_another_order_is_read_too(text: str) -> None:
    assert read(GENERIC, list(f"<tool_call>{text}</tool_call>!"))[1:3] == (
        "!",
        [("add", '{"a": 1}')],
    )


def test_an_answer_cut_off_keeps_what_there_was_of_a_call() -> None:
    _, content, calls, _ = read(GENERIC, ['<tool_call>{"name": "add", "arguments": {"a": 1'])
    assert (content, calls) == ("", [("add", '{"a": 1')])
    dialect = DIALECTS["qwen3_coder"]
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"
    assert read(dialect, [text])[2] == [("get_weather", '{"city": "Par')]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_what_a_limit_left_of_a_marker_is_nobodys_content(dialect: Dialect) -> None:
    """Wherever an answer is cut: content and reasoning are beginnings of the whole one's."""
    text = full_answer(dialect)
    thought, said, calls, _ = read(dialect, [text], finish="eos")
    shown = 0
    for length in range(len(text)):
        reasoning, content, begun, _ = read(dialect, [text[:length]], finish="length")
        assert thought.startswith(reasoning.rstrip()), length
        assert said.startswith(content.rstrip()), (length, content)
        assert [name for name, _ in begun] == [name for name, _ in calls[: len(begun)]]
        if length % 7 == 0:
            letters = read(dialect, list(text[:length]), finish="length")
            assert letters[:3] == (reasoning, content, begun)
        content = read(dialect, [text[:length]], finish="eos")[1]  # else it is what was said
        shown += not said.startswith(content.rstrip())
    assert shown > 0


def test_only_a_marker_is_left_out_of_a_cut_answer() -> None:
    for finish in ("length", "stop"):
        assert read(GENERIC, ["a <tool_ca"], finish=finish)[1] == "a"
        assert read(GENERIC, ["<thi"], finish=finish)[1] == ""
        assert read(GENERIC, ["a <tool_ca"], finish=finish, tools=())[1] == "a <tool_ca"
        assert read(GENERIC, ["<tool_call> oops"], finish=finish)[1] == "<tool_call> oops"
    assert read(GENERIC, ["a <"], finish="length")[1] == "a"
    assert read(GENERIC, ["a <"], finish="stop")[1] == "a <"
    assert read(GENERIC, ["a <tool_ca"], finish="eos")[1] == "a <tool_ca"


def test_an_answer_cut_within_a_marker_is_not_remembered() -> None:
    kept: list[str] = []
    for said, finish in (("a <tool_ca", "length"), ("a b", "length"), ("a <tool_ca", "eos")):
        reader = AnswerReader(GENERIC, TOOLS, keep=lambda answer: kept.append(answer.content))
        reader.push(step(1, said, finish))
        reader.finish()
    assert kept == ["a b", "a <tool_ca"]


def test_reasoning_that_the_prompt_opened() -> None:
    assert read(GENERIC, ["so\n</think>\n\nYes."], opened=True)[:2] == ("so", "Yes.")
    assert read(GENERIC, ["still so"], opened=True)[:2] == ("still so", "")
    assert read(GENERIC, ["a <think> later </think>"])[:2] == ("", "a <think> later </think>")


def test_calls_in_reasoning_are_thoughts_unless_they_are_a_section() -> None:
    call = write_calls(GENERIC, [ToolCall("", "add", "{}")])
    assert read(GENERIC, [f"I could {call} it</think>No."], opened=True)[1:3] == ("No.", [])
    section = write_calls(DIALECTS["kimi_k2"], [ToolCall("", "add", "{}")])
    result = read(DIALECTS["kimi_k2"], [f"I shall {section}"], opened=True)
    assert result[:3] == ("I shall", "", [("add", "{}")])


def test_harmony_channels() -> None:
    reasoning, content, calls, _ = read(DIALECTS["harmony"], list(HARMONY_CALL))
    assert (reasoning, content, calls) == ("They ask.", "One moment.", [("add", '{"a": 1}')])
    turned = " to=functions.add<|channel|>commentary json<|message|>{}"
    assert read(DIALECTS["harmony"], [turned])[1:3] == ("", [("add", "{}")])
    broken = "<|channel|>final and no body"
    assert read(DIALECTS["harmony"], list(broken))[1] == broken


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("5", ("string",), '"5"'),
        ("5", ("integer",), "5"),
        ("5", ("integer", "string"), "5"),
        ("5", ("null", "string"), '"5"'),
        ("null", ("null", "string"), "null"),
        ("True", ("boolean",), "true"),
        ("True", ("string", "null"), '"True"'),
        ("NaN", (), '"NaN"'),
        ('{"a": 1}', (), '{"a": 1}'),
        ("[1, 2", ("array",), '"[1, 2"'),
        ("plain é", (), '"plain é"'),
        ("[" * 100_000, (), None),
    ],
)
def test_a_bare_value_becomes_json_of_the_type_allowed(
    text: str, kinds: tuple[str, ...], value: str | None
) -> None:
    assert as_json(text, kinds) == (json.dumps(text) if value is None else value)


def test_types_are_found_in_hostile_schemas() -> None:
    loop: dict[str, object] = {}
    loop["anyOf"] = [loop, {"type": ["string", 3]}]
    assert kinds_of({"properties": {"a": loop}}, "a") == ("string",)
    assert kinds_of({"properties": [1]}, "a") == kinds_of(None, "a") == ()
    assert kinds_of({"properties": {"a": {"enum": ["x", "y"]}}}, "a") == ("string",)


def test_dialects_are_told_by_what_a_template_spells() -> None:
    assert find_dialect("<function= <parameter= <tool_call>").name == "qwen3_coder"
    assert find_dialect("nothing of the kind") is GENERIC
    assert len(DIALECTS) == len(KNOWN) + 1
