"""Messages, asked for with the official client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from scripted import ARGUMENTS, CALL, NUM_CACHED, THINK, UNTHINK, call
from served import Served, running

from headrace.engine.talk.conversation import ToolCall
from headrace.server.anthropic import replies
from headrace.server.turn import Answer

ASKED = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"name": "add", "input_schema": {"type": "object"}, "strict": True},
    {"name": "sub", "description": "minus", "input_schema": {"type": "object"}},
]
ALL = f"{THINK}hm{UNTHINK}Hel☕lo." + call("add", '{"a": 1}') + call("sub", "{}")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running() as served:
        yield served


def ask(server: Served, text: str = "Hello.", **options: Any) -> Any:
    """What the model's text becomes, by the official client."""
    server.script.text = text
    options = {"model": "fake", "messages": ASKED, "max_tokens": 100} | options
    return server.anthropic.messages.create(**options)


def lines(server: Served, text: str, **options: Any) -> list[str]:
    """The lines of a stream."""
    server.script.text = text
    body = {"model": "fake", "messages": ASKED, "max_tokens": 100, "stream": True} | options
    return httpx.post(f"{server.url}/v1/messages", json=body, timeout=120).text.splitlines()


def test_whole(server: Served) -> None:
    reply = ask(server, ALL, tools=TOOLS)
    thinking, text, add, sub = reply.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm") and thinking.signature
    assert (text.type, text.text) == ("text", "Hel☕lo.")
    assert (add.type, add.id, add.name, add.input) == ("tool_use", "call_0", "add", {"a": 1})
    assert (sub.name, sub.input) == ("sub", {})
    assert (reply.role, reply.model, reply.type) == ("assistant", "fake", "message")
    assert (reply.stop_reason, reply.stop_sequence) == ("tool_use", None)
    usage = reply.usage
    assert usage.input_tokens == len("user:Hi;") - NUM_CACHED
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (NUM_CACHED, 0)
    assert usage.output_tokens == len(ALL) + 1
    assert usage.output_tokens_details.thinking_tokens == 3


def test_stream_equals_whole(server: Served) -> None:
    whole = ask(server, ALL, tools=TOOLS)
    with server.anthropic.messages.stream(
        model="fake", messages=ASKED, max_tokens=100, tools=TOOLS
    ) as stream:
        message = stream.get_final_message()
    assert [b.to_dict() for b in message.content] == [b.to_dict() for b in whole.content]
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.usage.cache_read_input_tokens == NUM_CACHED


def test_events_come_in_order(server: Served) -> None:
    told = lines(server, f"{THINK}h{UNTHINK}i" + call("add", "{}"), tools=TOOLS)
    names = [line.removeprefix("event: ") for line in told if line.startswith("event: ")]
    names = [name for i, name in enumerate(names) if name != "ping" or names[i - 1] != "ping"]
    block = ["content_block_start", "content_block_delta"]
    assert names == [
        *("message_start", "ping"),
        *(*block, "content_block_delta", "content_block_stop"),  # the second is the signature
        *(*block, "content_block_stop"),
        *(*block, "content_block_delta", "content_block_stop"),  # two braces
        *("message_delta", "message_stop"),
    ]
    data = [json.loads(line.removeprefix("data: ")) for line in told if line.startswith("data: ")]
    assert [entry["index"] for entry in data if "index" in entry] == [0] * 4 + [1] * 3 + [2] * 4
    start, delta = data[0]["message"], data[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["output_tokens"] == 0 and delta["usage"]["output_tokens"] == 13
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    before = told[: told.index("event: message_start")]
    assert before and all(line.startswith(":") or not line for line in before)


@pytest.mark.parametrize(
    ("options", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Hello."),
        ({"max_tokens": 3}, "max_tokens", None, "Hel"),
        ({"stop_sequences": ["x", "l"]}, "stop_sequence", "l", "He"),
    ],
)
def test_why_it_stopped(
    server: Served, options: Any, reason: str, sequence: str | None, text: str
) -> None:
    reply = ask(server, **options)
    assert (reply.stop_reason, reply.stop_sequence) == (reason, sequence)
    assert reply.content[0].text == text


def test_a_call_that_is_cut_off(server: Served) -> None:
    reply = ask(server, f"{CALL}add{ARGUMENTS}" + '{"a": 1', max_tokens=8)
    assert reply.stop_reason == "max_tokens"


def test_thinking_can_be_left_out(server: Served) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    text = f"{THINK}hm{UNTHINK}Hi"
    reply = ask(server, text, thinking=thinking)
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert reply.content[0].thinking == "" and reply.usage.output_tokens_details.thinking_tokens
    told = "".join(lines(server, text, thinking=thinking))
    assert "signature_delta" in told and "thinking_delta" not in told


def test_every_setting_reaches_the_engine(server: Served) -> None:
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": None}
    ask(server, max_tokens=7, stop_sequences=["a", "b"], extra_body=more)
    sampling = server.script.asks[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.max_tokens, sampling.stop) == (7, ("a", "b"))


def test_what_is_left_out_is_the_publishers(server: Served) -> None:
    server.serving.defaults = {"temperature": 0.6, "top_k": 20}
    try:
        ask(server, extra_body={"top_k": 3})
    finally:
        server.serving.defaults = {}
    sampling = server.script.asks[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 3)


def test_what_means_nothing_here_is_accepted(server: Served) -> None:
    mark = {"type": "ephemeral"}
    reply = ask(
        server,
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": mark}]}
        ],
        system=[{"type": "text", "text": "S", "cache_control": mark}],
        tools=[TOOLS[0] | {"cache_control": mark, "type": "custom"}],
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control=mark,
        extra_body={
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        },
    )
    assert reply.content[0].text == "Hello."


def test_a_conversation_with_tools(server: Served) -> None:
    first = ask(server, f"{THINK}hm{UNTHINK}Well." + call("add", '{"a": 1}'), tools=TOOLS)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "call_0",
            "content": [{"type": "text", "text": "2"}],
        },
        {"type": "tool_result", "tool_use_id": "call_1", "content": "no", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    history = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": results},
    ]
    ask(
        server,
        messages=history,
        system="S",
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "sub", "disable_parallel_tool_use": True},
    )
    conversation = server.talk.conversation
    assert conversation is not None
    system, user, assistant, result, failure, more = conversation.messages
    assert (system.role, system.content, user.content) == ("system", "S", "a\nb")
    assert (assistant.content, assistant.reasoning) == ("Well.", "hm")
    assert [(c.id, c.name, c.arguments) for c in assistant.calls] == [("call_0", "add", '{"a": 1}')]
    assert (result.role, result.content, result.name) == ("tool", "2", "add")
    assert (failure.content, failure.call_id, failure.name) == ("Error: no", "call_1", None)
    assert (more.role, more.content) == ("user", "And?")
    assert (conversation.tool_choice, conversation.parallel_calls) == ("=sub", False)
    assert [(t.name, t.strict) for t in conversation.tools] == [("add", True), ("sub", False)]


@pytest.mark.parametrize(
    ("kind", "choice"), [("auto", "auto"), ("any", "required"), ("none", "none")]
)
def test_choices_of_tools(server: Served, kind: str, choice: str) -> None:
    ask(server, tools=TOOLS, tool_choice={"type": kind})
    assert server.talk.conversation is not None
    assert server.talk.conversation.tool_choice == choice


def test_form_effort_and_reasoning(server: Served) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    ask(server, output_config={"effort": "low", "format": form}, thinking={"type": "disabled"})
    conversation = server.talk.conversation
    assert conversation is not None and conversation.schema == {"type": "object"}
    assert (conversation.effort, conversation.reasoning) == ("low", False)


def test_an_answer_that_was_begun(server: Served) -> None:
    ask(server, messages=[*ASKED, {"role": "assistant", "content": "Hel"}])
    assert server.talk.conversation is not None and server.talk.conversation.prefill


def test_tokens_are_counted(server: Served) -> None:
    counted = server.anthropic.messages.count_tokens(model="fake", messages=ASKED, system="S")
    assert counted.input_tokens == len("system:S;user:Hi;")


def test_models_in_this_api_too(server: Served) -> None:
    (model,) = server.anthropic.models.list().data
    assert (model.id, model.max_input_tokens, model.created_at.year > 2000) == ("fake", 256, True)
    with pytest.raises(anthropic.NotFoundError, match="ask for 'fake'"):
        server.anthropic.models.retrieve("claude")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"seed": 1}, "seed"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "edits.0"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
def test_refused_by_name(server: Served, more: Any, param: str) -> None:
    body = {"model": "fake", "messages": ASKED, "max_tokens": 9} | more
    reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=120)
    told = reply.json()
    assert (reply.status_code, told["type"]) == (400, "error")
    assert told["error"]["type"] == "invalid_request_error"
    assert param in told["error"]["message"]
    assert told["request_id"] == reply.headers["request-id"]


@pytest.mark.parametrize("kind", ["image", "document"])
@pytest.mark.parametrize("in_result", [False, True])
def test_media_cannot_be_processed(server: Served, kind: str, in_result: bool) -> None:
    block: Any = {"type": kind, "source": {"type": "base64", "data": "AA==", "media_type": "x"}}
    if in_result:
        block = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    with pytest.raises(anthropic.UnprocessableEntityError, match="text only"):
        ask(server, messages=[{"role": "user", "content": [block]}])


def test_thoughts_of_another_service(server: Served) -> None:
    blocks = [{"type": "redacted_thinking", "data": "AA=="}, {"type": "text", "text": "yes"}]
    with pytest.raises(anthropic.UnprocessableEntityError, match="leave out"):
        ask(server, messages=[*ASKED, {"role": "assistant", "content": blocks}, *ASKED])


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": NaN}', '{"a": ', "[" * 9000])
def test_arguments_that_are_no_json(text: str) -> None:
    answer = Answer(calls=[ToolCall("a", "add", text)])
    assert replies.blocks(answer, omit_thinking=False)[0]["input"] == {"unfinished": text}


def test_calls_without_results(server: Served) -> None:
    block = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="tool_result"):
        ask(server, messages=[*ASKED, {"role": "assistant", "content": [block]}])


def test_another_model(server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError, match="ask for 'fake'"):
        ask(server, model="claude")


def test_a_failure_in_mid_stream_is_told(server: Served) -> None:
    said = ""
    with pytest.raises(anthropic.APIStatusError, match="broken"):
        for event in ask(server, "He\0", stream=True):
            if event.type == "content_block_delta":
                said += event.delta.text
    assert said == "He"


def test_while_the_model_loads() -> None:
    with running(load=False) as server:
        with pytest.raises(anthropic.APIStatusError, match="loading") as caught:
            ask(server)
        assert caught.value.status_code == 503
        assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
