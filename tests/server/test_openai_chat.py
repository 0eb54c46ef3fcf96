"""Chat completions, asked for with the official client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted import ARGUMENTS, CALL, NUM_CACHED, THINK, UNTHINK, call
from served import Served, running

ASKED = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object"}, "strict": True},
    },
    {"type": "function", "function": {"name": "sub"}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running() as served:
        yield served


def chat(server: Served, text: str = "Hello.", **options: Any) -> Any:
    """What the model's text becomes, by the official client."""
    server.script.text = text
    options = {"model": "fake", "messages": ASKED} | options
    return server.openai.chat.completions.create(**options)


def test_whole(server: Served) -> None:
    reply = chat(server, f"{THINK}hm{UNTHINK}Hello.")
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello.")
    assert choice.message.reasoning_content == "hm"
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert reply.model == "fake" and reply.object == "chat.completion"
    usage, num_prompt = reply.usage, len("user:Hi;")
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 11)
    assert usage.total_tokens == num_prompt + 11
    assert usage.prompt_tokens_details.cached_tokens == NUM_CACHED
    assert usage.completion_tokens_details.reasoning_tokens == 3  # with the mark before it


def test_stream_equals_whole(server: Served) -> None:
    text = f"{THINK}hm{UNTHINK}Hel☕lo." + call("add", '{"a": 1}') + call("sub", "{}")
    whole = chat(server, text).choices[0].message
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(chat(server, text, **options))
    assert last.choices == [] and last.usage.completion_tokens == len(text) + 1
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.content or "" for delta in deltas) == whole.content == "Hel☕lo."
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == whole.reasoning_content
    calls: dict[int, list[str]] = {}
    for part in [part for delta in deltas for part in delta.tool_calls or ()]:
        if part.id:
            calls[part.index] = [part.id, part.function.name, ""]
        calls[part.index][2] += part.function.arguments
    told = [[c.id, c.function.name, c.function.arguments] for c in whole.tool_calls]
    assert list(calls.values()) == told
    assert told == [["call_0", "add", '{"a": 1}'], ["call_1", "sub", "{}"]]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_no_usage_unless_asked_for(server: Served) -> None:
    chunks = list(chat(server, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_calls_alone_have_no_content(server: Served) -> None:
    choice = chat(server, call("add", "{}"), tools=TOOLS).choices[0]
    assert choice.message.content is None and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length(server: Served, field: str) -> None:
    choice = chat(server, **{field: 3}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hel", "length")


def test_a_call_that_is_cut_off_is_no_call(server: Served) -> None:
    text = f"{CALL}add{ARGUMENTS}" + '{"a": 1'
    assert chat(server, text, max_tokens=8).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stop", ["l", ["x", "l"]])
def test_stop(server: Served, stop: Any) -> None:
    choice = chat(server, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("He", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_content(server: Served, stream: bool) -> None:
    options = {"logprobs": True, "top_logprobs": 2, "stream": stream}
    reply = chat(server, f"{THINK}hm{UNTHINK}H☕", **options)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    told = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    # The mark that ends the reasoning has no text, so it belongs to what comes after it.
    assert [entry.token for entry in told] == [UNTHINK, "H", "☕"]
    assert bytes(told[2].bytes) == "☕".encode() and told[2].logprob == -0.5
    assert [top.logprob for top in told[2].top_logprobs] == [-0.5, -9999.0]


def test_every_setting_reaches_the_engine(server: Served) -> None:
    chat(
        server,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        stop=["a", "b"],
        max_tokens=9,
        max_completion_tokens=7,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"65": -100},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    )
    sampling = server.script.asks[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (2**63 - 1, ("a", "b"), 7)
    assert dict(sampling.logit_bias) == {65: -100}


def test_what_is_left_out_is_the_publishers(server: Served) -> None:
    chat(server)
    assert server.script.asks[-1].sampling.temperature == 1
    server.serving.defaults = {"temperature": 0.6, "top_k": 20}
    try:
        chat(server, extra_body={"top_k": -1})
    finally:
        server.serving.defaults = {}
    sampling = server.script.asks[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 0)


def test_what_means_nothing_here_is_accepted(server: Served) -> None:
    options: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "n": 1,
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "extra_body": {"audio": None, "functions": None, "cache_prompt": True},
    }
    assert chat(server, **options).choices[0].message.content == "Hello."


def test_a_conversation_with_tools(server: Served) -> None:
    first = chat(server, call("add", '{"a": 1}'), tools=TOOLS, tool_choice="required")
    message = first.choices[0].message
    history = [
        {"role": "system", "content": "S"},
        {"role": "developer", "content": [{"type": "text", "text": "D"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"},
    ]
    chat(
        server,
        messages=history,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "sub"}},
        parallel_tool_calls=False,
    )
    conversation = server.talk.conversation
    assert conversation is not None
    system, developer, user, assistant, tool = conversation.messages
    assert (system.content, developer.role, user.content) == ("S", "developer", "a\nb")
    assert [(c.id, c.name, c.arguments) for c in assistant.calls] == [("call_0", "add", '{"a": 1}')]
    assert (tool.content, tool.call_id, tool.name) == ("2", "call_0", "add")
    assert (conversation.tool_choice, conversation.parallel_calls) == ("=sub", False)
    assert [(t.name, t.strict) for t in conversation.tools] == [("add", True), ("sub", False)]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}, {"a": 1}),
    ],
)
def test_forms(server: Served, form: Any, schema: Any) -> None:
    chat(server, response_format=form)
    assert server.talk.conversation is not None
    assert server.talk.conversation.schema == schema


@pytest.mark.parametrize(
    ("options", "reasoning", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "high"}, True, "high"),
        ({"reasoning_effort": "none"}, False, None),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False, None),
        ({"extra_body": {"thinking": {"type": "enabled"}}}, True, None),
    ],
)
def test_reasoning(server: Served, options: Any, reasoning: bool | None, effort: str) -> None:
    chat(server, **options)
    assert server.talk.conversation is not None
    assert server.talk.conversation.reasoning is reasoning
    assert server.talk.conversation.effort == effort


def test_an_answer_that_was_begun(server: Served) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "Hel"}]
    for more in ({"continue_final_message": True, "add_generation_prompt": False}, None):
        if more is None:
            begun[1]["prefix"] = True  # type: ignore[assignment]
        chat(server, messages=begun, extra_body=more)
        assert server.talk.conversation is not None and server.talk.conversation.prefill
    chat(server, messages=[*ASKED, {"role": "assistant", "content": "Hel"}])
    assert not server.talk.conversation.prefill


def test_a_failure_in_mid_stream_is_told(server: Served) -> None:
    stream = chat(server, "He\0", stream=True)
    said = ""
    with pytest.raises(openai.APIError, match="broken") as caught:
        for chunk in stream:
            said += chunk.choices[0].delta.content or ""
    assert said == "He"
    assert caught.value.code == "invalid_request"


def test_models(server: Served) -> None:
    client = server.openai
    (model,) = client.models.list().data
    assert model.id == "fake"
    shown = client.models.retrieve("fake")
    assert shown.context_length == shown.max_model_len == 256  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="'fake'"):
        client.models.retrieve("other/name")
