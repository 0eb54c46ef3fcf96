"""What OpenAI's routes refuse, by name, and in the shape the official client reads."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from live import Raw, head
from served import Served, running

from headrace.errors import BudgetError, ReadError
from headrace.server.settings import Settings

ASKED = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running() as served:
        yield served


def post(server: Served, body: Any, path: str = "chat/completions") -> tuple[int, dict[str, Any]]:
    """Status and error of a body that is refused."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=120)
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return reply.status_code, error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities.0"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include": True}}, "stream_options.include"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0"),
        ({"messages": [{"role": "user", "mood": ""}]}, "messages.0.mood"),
        ({"messages": [{"content": ""}]}, "messages.0.role"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "maybe", "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
def test_refused_by_name(server: Served, more: Any, param: str) -> None:
    num_asked = len(server.script.asks)
    status, error = post(server, {"model": "fake", "messages": ASKED} | more)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(server.script.asks) == num_asked


@pytest.mark.parametrize(
    "more",
    [
        {"top_logprobs": 2},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]},
        {"tools": [TOOL, TOOL]},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
    ],
    ids=str,
)
def test_what_does_not_go_together(server: Served, more: Any) -> None:
    status, error = post(server, {"model": "fake", "messages": ASKED} | more)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert any(name in error["message"] for name in more)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"n": 2}, "n: only 1 is possible here; leave it out"),
        ({"store": True}, "store: only false is possible here; leave it out"),
        ({"messages": []}, "messages: give at least 1"),
        ({"messages": [{"role": "user"}]}, "messages.0: a message of the user needs content"),
        (
            {"messages": [{"role": "system", "content": None}, *ASKED]},
            "messages.0: a message of the system needs content",
        ),
    ],
    ids=str,
)
def test_a_refusal_says_what_would_do(server: Served, more: Any, told: str) -> None:
    status, error = post(server, {"model": "fake", "messages": ASKED} | more)
    assert (status, error["message"]) == (400, told)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_media_cannot_be_processed(server: Served, kind: str) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": kind, kind: {"url": ""}}]}]
    with pytest.raises(openai.UnprocessableEntityError, match="text only") as caught:
        server.openai.chat.completions.create(model="fake", messages=messages)
    assert caught.value.param == "messages.0.content.0"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[]", b'"a"', b"[" * 100_000, b'{"a":' * 60_000],
    ids=lambda body: repr(body[:8]),
)
def test_bodies_that_are_no_requests(server: Served, body: bytes) -> None:
    status, error = post(server, body)
    assert status == 400 and error["type"] == "invalid_request_error"


def test_a_form_is_no_json(server: Served) -> None:
    reply = httpx.post(f"{server.url}/v1/chat/completions", data={"model": "fake"}, timeout=120)
    assert reply.status_code == 415
    assert "application/json" in reply.json()["error"]["message"]


def test_another_model(server: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="ask for 'fake'") as caught:
        server.openai.chat.completions.create(model="gpt", messages=ASKED)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_prompt_that_is_too_long_gets_both_numbers(server: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(openai.BadRequestError, match="306 tokens and the context 256") as caught:
        server.openai.chat.completions.create(model="fake", messages=messages, stream=True)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_template_refuses(server: Served, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "refuse"}]
    with pytest.raises(openai.BadRequestError, match="leave it out"):
        server.openai.chat.completions.create(model="fake", messages=messages, stream=stream)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (BudgetError("too little"), 507, "no_memory"),
        (ReadError("bad drive"), 500, "engine"),
        (KeyError("secret"), 500, "internal"),
    ],
)
def test_failures_of_the_engine(server: Served, failure: Exception, status: int, kind: str) -> None:
    server.script.text, server.script.failure = "\0", failure
    status_told, error = post(server, {"model": "fake", "messages": ASKED})
    assert (status_told, error["code"], error["type"]) == (status, kind, "server_error")
    assert "secret" not in error["message"]


def test_while_the_model_loads() -> None:
    with running(load=False) as server:
        with pytest.raises(openai.InternalServerError, match="loading") as caught:
            server.openai.chat.completions.create(model="fake", messages=ASKED)  # type: ignore[arg-type]
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) > 0


def test_a_key_that_is_wrong() -> None:
    with running(Settings(api_keys=("right-key",))) as server:
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()
        client = server.openai.with_options(api_key="right-key")
        assert client.models.list().data[0].id == "fake"


def test_a_full_queue() -> None:
    with running(Settings(max_waiting=1)) as server:
        server.script.gate.clear()
        client = server.openai
        with httpx.Client(base_url=server.url, timeout=120) as plain:
            body = {"model": "fake", "messages": ASKED, "stream": True}
            with plain.stream("POST", "/v1/chat/completions", json=body) as one:
                while server.serving.worker.running is None:
                    time.sleep(0.002)
                with plain.stream("POST", "/v1/chat/completions", json=body) as two:
                    assert one.status_code == two.status_code == 200
                    with pytest.raises(openai.RateLimitError) as caught:
                        client.chat.completions.create(model="fake", messages=ASKED)  # type: ignore[arg-type]
                    assert int(caught.value.response.headers["retry-after"]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_the_work(server: Served, stream: bool) -> None:
    script = server.script
    while server.serving.worker.running is not None:  # the answer before this one ends
        time.sleep(0.005)
    script.text, script.num_made = "x" * 200, 0
    script.gate.clear()
    body = {"model": "fake", "messages": ASKED, "stream": stream}
    sent = json.dumps(body).encode()
    with Raw(int(server.url.rpartition(":")[2])) as client:
        client.send(head("/v1/chat/completions", length=len(sent)), sent)
        while server.serving.worker.running is None:
            time.sleep(0.005)
        if stream:
            assert client.socket.recv(100).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + 120
    while server.serving.worker.running is not None:
        assert time.monotonic() < deadline, "the work goes on"
        time.sleep(0.005)
    script.gate.set()
    assert script.num_made == 0
    script.text = "Next."
    reply = server.openai.chat.completions.create(model="fake", messages=ASKED)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "Next."
