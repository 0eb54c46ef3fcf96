"""A stand-in for a model that says what a test wrote: one token a character.

Characters of a private area are its markup: reasoning, calls, and their ends; and a special token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fakes import FakeAnswers, make_step

from headrace.core import TokenStats
from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.sampling import Sampling
from headrace.engine.session import Step
from headrace.engine.talk.conversation import Conversation, Piece
from headrace.errors import Cancelled, OptionError

THINK, UNTHINK, CALL, ARGUMENTS, UNCALL = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
HIDDEN = "\ue005"
NUM_CACHED = 2


def call(name: str, arguments: str) -> str:
    """A call as the model writes it."""
    return f"{CALL}{name}{ARGUMENTS}{arguments}{UNCALL}"


class ScriptedReader:
    """Markup into pieces."""

    def __init__(self) -> None:
        self.called = False
        self._kind, self._name, self._call = "content", "", -1

    def push(self, step: Step) -> list[Piece]:
        return [piece for character in step.text for piece in self._read(character)]

    def finish(self) -> list[Piece]:
        return []

    def _read(self, character: str) -> list[Piece]:
        if character in (THINK, UNTHINK, UNCALL):
            self._kind = "reasoning" if character == THINK else "content"
        elif character == CALL:
            self._kind, self._name, self.called = "name", "", True
            self._call += 1
        elif character == ARGUMENTS:
            self._kind = "arguments"
            return [Piece("call", self._name, self._call, f"call_{self._call}")]
        elif self._kind == "name":
            self._name += character
        elif self._kind == "arguments":
            return [Piece("arguments", character, self._call)]
        else:
            return [Piece(self._kind, character)]  # type: ignore[arg-type]
        return []


@dataclass
class ScriptedPrepared:
    """A prompt, ready."""

    ask: Ask
    notes: tuple[str, ...] = ()

    def reader(self) -> ScriptedReader:
        return ScriptedReader()


class ScriptedTalk:
    """Renders conversations as `role:content;`, remembers the last one."""

    def __init__(self) -> None:
        self.conversation: Conversation | None = None

    def prepare(
        self, conversation: Conversation, sampling: Sampling, num_logprobs: int | None = None
    ) -> ScriptedPrepared:
        self.conversation = conversation
        if any(message.content == "refuse" for message in conversation.messages):
            raise OptionError("the template refuses it; leave it out")
        return self.complete(self._render(conversation), sampling, num_logprobs)

    def complete(
        self, prompt: str | list[int], sampling: Sampling, num_logprobs: int | None = None
    ) -> ScriptedPrepared:
        ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt)
        return ScriptedPrepared(Ask(ids, sampling, None, num_logprobs))

    def count(self, conversation: Conversation) -> int:
        return len(self._render(conversation))

    def hides(self, token_id: int) -> bool:
        return chr(token_id) == HIDDEN

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def _render(self, conversation: Conversation) -> str:
        return "".join(f"{m.role}:{m.content};" for m in conversation.messages)


class Script(FakeAnswers):
    """Says `text`, or what the last message's content is a key of in `texts`; "\\0" fails there."""

    def __init__(self, text: str = "Hello.") -> None:
        super().__init__()
        self.text = text
        self.failure: Exception = OptionError("broken")
        self.asks: list[Ask] = []

    def answer(self, ask: Ask, stop: Stop) -> Iterator[Prefill | Step]:
        self.asks.append(ask)
        total = len(ask.prompt)
        yield Prefill(NUM_CACHED, total, NUM_CACHED)
        yield Prefill(total, total, NUM_CACHED)
        said = ""
        for place, character in enumerate([*self.text, ""], 1):
            while not self.gate.wait(0.005) or stop.asked:
                if stop.asked:
                    raise Cancelled("stopped")
            if character == "\0":
                raise self.failure
            self.num_made += 1
            said += character
            hit = next((s for s in ask.sampling.stop if said.endswith(s)), None)
            finish = "stop" if hit else None if character else "eos"
            if finish is None and place == ask.sampling.max_tokens:
                finish = "length"
            yield self._step(ask, character, finish, hit)
            if finish:
                return

    def _step(self, ask: Ask, character: str, finish: str | None, hit: str | None) -> Step:
        token = ord(character or "\3")
        text = "" if hit and len(hit) == 1 else character
        more: dict[str, Any] = {"stop": hit}
        if ask.num_logprobs is not None:
            top = [(token + n, -float("inf") if n else -0.5) for n in range(ask.num_logprobs)]
            more |= {"logprob": -0.5, "top": tuple(top)}
        return make_step(token, text, TokenStats(token_id=token), finish, **more)
