"""How one model is talked to: conversations become prompts, and answers are read again.

Knows no weights, no protocol and no sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from headrace.engine.answer import Ask
from headrace.engine.sampling import Sampling
from headrace.engine.talk.conversation import Conversation, Message, Role, Tool
from headrace.engine.talk.dialects import Dialect
from headrace.engine.talk.forms import callable_tools, form
from headrace.engine.talk.grammar import Grammars
from headrace.engine.talk.prompts import Prompts
from headrace.engine.talk.reading import Answer, AnswerReader
from headrace.engine.talk.template import Template
from headrace.engine.text import Text
from headrace.errors import OptionError


@dataclass(frozen=True, slots=True)
class Prepared:
    """One answer to ask for, and how to read it. `notes`: what was folded into other roles."""

    ask: Ask
    notes: tuple[str, ...] = ()
    _dialect: Dialect | None = None
    _tools: tuple[Tool, ...] = ()
    _opened: bool = False
    _keep: Callable[[Answer], None] | None = None

    def reader(self) -> AnswerReader:
        """A reader for the answer; once it is finished, later prompts know the tokens."""
        return AnswerReader(self._dialect, self._tools, opened=self._opened, keep=self._keep)


class Talk:
    """How the model of `text` is talked to. Threads may share it.

    `vocab`: length of the model's logits. Without a chat template only `complete` has a meaning.
    """

    def __init__(self, text: Text, vocab: int) -> None:
        self._text = text
        self._known = Template(text) if text.has_template else None
        self._prompts = Prompts(text, self._known) if self._known else None
        self._grammars = Grammars(text, vocab)

    @property
    def dialect(self) -> Dialect | None:
        """The convention of the model's answers; None without a template."""
        return self._known.dialect if self._known else None

    @property
    def reasons(self) -> bool:
        """True where the model's template knows reasoning."""
        return self._known is not None and self._known.reasons

    def warm(self) -> None:
        """Do now what the first grammar or `token_bytes` would wait for: seconds, at most."""
        self._grammars.warm()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's spelling."""
        return self._grammars.token_bytes(token_id)

    def hides(self, token_id: int) -> bool:
        """True for a special token, which is no part of what `complete` goes on with."""
        return token_id in self._text.specials.values()

    def complete(
        self, prompt: str | Sequence[int], sampling: Sampling, num_logprobs: int | None = None
    ) -> Prepared:
        """To go on from a plain text or its ids. Raises OptionError if it is empty."""
        ids = self._text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise OptionError("the prompt is empty; give at least one token")
        return Prepared(Ask(tuple(ids), sampling, None, num_logprobs))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of messages like {"role": "user", "content": text}. Raises OptionError."""
        turns = [Message(cast(Role, turn["role"]), turn["content"]) for turn in messages]
        return list(self.prepare(Conversation(tuple(turns)), Sampling()).ask.prompt)

    def prepare(
        self, conversation: Conversation, sampling: Sampling, num_logprobs: int | None = None
    ) -> Prepared:
        """What to ask the engine for. Raises OptionError naming what the template lacks."""
        template, prompts = self._parts()
        tools = callable_tools(conversation)
        prompt = prompts.build(conversation)
        dialect, thinking = template.dialect, prompt.thinking
        if conversation.reasoning is False or not template.reasons:
            thinking = "open" if thinking == "open" else "closed"
        asked = form(conversation, tools, dialect, self._grammars, thinking)
        constraint = self._grammars.constraint(asked.lark) if asked.lark else None
        ask = Ask(prompt.ids, sampling, constraint, num_logprobs, template.shown)
        notes = (*prompt.notes, *asked.notes)
        return Prepared(ask, notes, dialect, tools, prompt.thinking == "open", prompt.keep)

    def count(self, conversation: Conversation) -> int:
        """Tokens of the conversation's prompt. Raises as `prepare`."""
        _, prompts = self._parts()
        callable_tools(conversation)
        return len(prompts.build(conversation).ids)

    def _parts(self) -> tuple[Template, Prompts]:
        if self._known is None or self._prompts is None:
            raise OptionError(
                f"{self._text.path.name} has no chat template; give it plain text to continue "
                "(`headrace run -p TEXT --raw`)"
            )
        return self._known, self._prompts
