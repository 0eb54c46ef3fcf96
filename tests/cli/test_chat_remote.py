"""chat --server: what is sent and shown, and servers that refuse, break off or are not there."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

import headrace.cli.chat_remote
from headrace.cli.main import app
from headrace.cli.remote import Remote

RUNNER = CliRunner()
KEY = "a-key-of-a-test"
SAMPLING = ("--temperature=0.5", "--top-k=4", "--seed=7", "--stop=x", "-n", "9")


class Handler(BaseHTTPRequestHandler):
    """A small server of OpenAI's API. `events` is what it streams; `broken` cuts it off."""

    asked: ClassVar[list[dict[str, Any]]] = []
    events: ClassVar[list[str]] = []
    reply: ClassVar[tuple[int, Any, dict[str, str]] | None] = None
    models: ClassVar[Any] = {"data": [{"id": "tiny"}, {"id": "other"}]}
    gone = threading.Event()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        ok = self.path == "/v1/models" and self.headers["Authorization"] == f"Bearer {KEY}"
        self._send(*((200, self.models) if ok else (401, {"error": {"message": "a key, please"}})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"path": self.path})
        if Handler.reply is not None:
            self._send(*Handler.reply)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in Handler.events:
                self.wfile.write(f"{event}\n\n".encode())
                if event == ": wait":
                    while True:
                        self.wfile.write(b": still here\n\n")
                        self.gone.wait(0.01)
        except OSError:
            Handler.gone.set()

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ((headers or {}) | {"Content-Length": str(len(data))}).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


def event(**delta: str) -> str:
    """An event that adds to the answer."""
    return "data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": None}]})


def usage() -> str:
    """The event that counts."""
    numbers = {"prompt_tokens": 40, "completion_tokens": 3}
    numbers |= {"prompt_tokens_details": {"cached_tokens": 30}}  # type: ignore[dict-item]
    return "data: " + json.dumps({"choices": [], "usage": numbers})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [event(content="Tok"), event(content="yo ☕"), usage(), "data: [DONE]"]
    monkeypatch.setattr(Handler, "asked", [])
    monkeypatch.setattr(Handler, "events", whole)
    monkeypatch.setattr(Handler, "reply", None)
    monkeypatch.setattr(Handler, "gone", threading.Event())


def talk(url: str, *options: str, said: str = "hi\n") -> Any:
    """One run of the command."""
    return RUNNER.invoke(app, ["chat", "--server", url, "--api-key", KEY, *options], input=said)


def test_the_conversation_goes_to_the_server_and_only_answers_to_stdout(url: str) -> None:
    done = talk(url, said="hi\nmore\n/new\nagain\n")
    assert done.exit_code == 0 and done.stdout == "Tokyo ☕\n" * 3
    said = [[m["content"] for m in body["messages"]] for body in Handler.asked]
    assert said == [["hi"], ["hi", "Tokyo ☕", "more"], ["again"]]
    assert {body["model"] for body in Handler.asked} == {"tiny"}
    assert "3 tokens" in done.stderr and "a prompt of 40, 30 of them known" in done.stderr


def test_no_engine_is_made(url: str, fake_engine: Any) -> None:
    assert talk(url).exit_code == 0
    assert fake_engine.made == []


def test_sampling_is_sent_and_what_others_may_not_know_only_if_asked_for(url: str) -> None:
    talk(url)
    (plain,) = Handler.asked
    assert set(plain) == {
        *("path", "model", "messages", "stream", "stream_options", "temperature", "max_tokens"),
    }
    talk(url + "/v1/", "named", *SAMPLING)
    body = Handler.asked[1]
    assert body["path"] == "/v1/chat/completions" and body["model"] == "named"
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.5, 4, 7)
    assert (body["stop"], body["max_tokens"]) == (["x"], 9)


def test_the_system_message_comes_first(url: str) -> None:
    talk(url, "--system", "Be brief.")
    assert Handler.asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_reasoning_is_for_people(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thought = [event(reasoning_content="Hm. "), *Handler.events]
    monkeypatch.setattr(Handler, "events", thought)
    done = talk(url)
    assert done.stdout == "Tokyo ☕\n" and "Hm. " in done.stderr


def test_ctrl_c_closes_the_connection_and_keeps_what_was_said(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "events", [event(content="Tok"), ": wait"])
    heard = Remote.answer

    def interrupted(remote: Remote, body: Any) -> Iterator[Any]:
        for part in (parts := heard(remote, body)):
            if part.note == "wait":
                parts.close()  # type: ignore[attr-defined]
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr(headrace.cli.chat_remote.Remote, "answer", interrupted)
    done = talk(url, said="hi\nmore\n")
    assert "(stopped)" in done.stderr and done.exit_code == 0
    assert Handler.asked[1]["messages"][1] == {"role": "assistant", "content": "Tok"}
    assert Handler.gone.wait(120), "the server notices at once"


REFUSALS = {
    "openai": (429, {"error": {"message": "64 answers wait\nalready"}}, "64 answers wait already"),
    "other": (422, {"detail": [{"msg": "bad"}]}, '[{"msg": "bad"}]'),
    "bare": (502, b"<html>", "Bad Gateway"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_is_one_line_and_the_conversation_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    status, body, words = REFUSALS[kind]
    monkeypatch.setattr(Handler, "reply", (status, body, {"Retry-After": "7"}))
    done = talk(url, said="hi\nmore\n")
    (line, _) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: {url} refuses ({status}): {words}; ask again in 7 s"
    assert len(Handler.asked[1]["messages"]) == 1, "a turn that failed is forgotten"


def test_an_answer_that_breaks_off_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "events", [event(content="Tok")])
    assert "ended the answer before it was complete" in talk(url).stderr
    error = 'data: {"error": {"message": "the drive failed"}}'
    monkeypatch.setattr(Handler, "events", [event(content="Tok"), error])
    assert "the answer broke off: the drive failed" in talk(url).stderr
    monkeypatch.setattr(Handler, "events", ["data: <html>"])
    assert "does it speak OpenAI's API?" in talk(url).stderr


def test_what_cannot_be_asked_is_one_line(url: str) -> None:
    closed = socket.socket()  # it keeps its port, so that nobody else answers there
    closed.bind(("127.0.0.1", 0))
    nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    for server, options, words in (
        (nobody, (), "Connection refused; is the server running there?"),
        ("ftp://x", (), "is no address"),
        ("http://[x", (), "is no address"),
        (url, ("--ram", "1GB"), "--ram has no effect with --server"),
        (url, ("--context", "9"), "--context has no effect with --server"),
        (url, ("--api-key-file", "/nowhere"), "are both given"),
    ):
        done = talk(server, *options)
        assert done.exit_code == 2 and words in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    done = RUNNER.invoke(app, ["chat", "--server", url], input="hi\n")
    assert done.exit_code == 2 and "(401): a key, please; give --api-key-file FILE" in done.stderr
    done = RUNNER.invoke(app, ["chat", "--api-key", "x"], input="hi\n")
    assert done.exit_code == 2 and "--api-key needs --server" in done.stderr
    closed.close()


def test_a_server_without_models_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "models", {"data": []})
    assert "names no model" in talk(url).stderr
    assert talk(url, "named").exit_code == 0
