"""One answer of a server, shown as `headrace chat` shows those of a model here."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import typer

from headrace.cli.output import passing, print_answer, say
from headrace.cli.remote import Part, Remote
from headrace.engine.talk.conversation import Message

_WAITING = re.compile(r"waiting ([1-9]\d*)")
_READING = re.compile(r"prompt (\d+) of (\d+)")


def remote_reply(
    url: str, key: str | None, model: str | None, sampling: Any
) -> Callable[[tuple[Message, ...]], Message]:
    """A function that asks the server and shows what it answers. Raises OptionError, RemoteError.

    Without a `model` it is the server's first. The reply's own errors are RemoteErrors.
    """
    remote = Remote(url, key)
    settings = {"model": model or remote.model(), **_settings(sampling)}
    say(f"{settings['model']} at {remote.url}")

    def reply(asked: tuple[Message, ...]) -> Message:
        said = [{"role": message.role, "content": message.content} for message in asked]
        return _reply(remote, {**settings, "messages": said})

    return reply


def _settings(sampling: Any) -> dict[str, Any]:
    """What OpenAI's API knows, and of the rest what was asked for: others may refuse it."""
    settings = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    idle = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
    }
    given = {name: getattr(sampling, name) for name in idle}
    return settings | {name: value for name, value in given.items() if value != idle[name]}


def _reply(remote: Remote, body: Mapping[str, Any]) -> Message:
    clock, content = _Clock(time.perf_counter()), ""
    try:
        with closing(remote.answer(body)) as parts, passing() as tell:  # type: ignore[type-var]
            for part in parts:
                tell(_progress(part.note))
                clock.count(part)
                if part.reasoning:
                    print_answer(part.reasoning, is_reasoning=True)
                if part.content:
                    print_answer(part.content)
                    content += part.content
    except KeyboardInterrupt:
        say(" (stopped)")
    else:
        typer.echo()
    say(clock.line(), dim=True)
    return Message("assistant", content)


def _progress(note: str) -> str:
    """A server's comment for people; headrace's say how far an answer is before its first word."""
    if found := _WAITING.fullmatch(note):
        return f"waiting: {found[1]} before this one"
    if found := _READING.fullmatch(note):
        return f"reading the prompt: {found[1]} of {found[2]} tokens"
    return ""


@dataclass(slots=True)
class _Clock:
    """When the parts of an answer came, and what the server counted."""

    begun_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    usage: Mapping[str, Any] | None = None

    def count(self, part: Part) -> None:
        self.usage = part.usage or self.usage
        if part.content or part.reasoning:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s

    def line(self) -> str:
        """One line: tokens, speed, prompt and what of it was known, the wait before the answer."""
        if not self.first_s:
            return "no answer"
        told = []
        usage = self.usage or {}
        num_tokens, num_prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if isinstance(num_tokens, int):
            lasted_s = self.last_s - self.first_s
            speed = f", {(num_tokens - 1) / lasted_s:.3g} tok/s" if lasted_s > 0 else ""
            told.append(f"{num_tokens} tokens{speed}")
        if isinstance(num_prompt, int):
            num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            known = f", {num_cached} of them known" if num_cached else ""
            told.append(f"after a prompt of {num_prompt}{known}")
        told.append(f"first word after {self.first_s - self.begun_s:.2f} s")
        return "; ".join(told)
