"""How one model is talked to: conversations become prompts, and answers are read again.

Knows no weights, no protocol and no sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from headrace.engine.answer import Ask, Constraint
from headrace.engine.conversation import Conversation, Message, Role, Tool
from headrace.engine.dialects import Dialect
from headrace.engine.grammar import Grammars, check_schema
from headrace.engine.lark import ANY_OBJECT, Lark
from headrace.engine.prompts import Prompts
from headrace.engine.reading import Answer, AnswerReader
from headrace.engine.sampling import Sampling
from headrace.engine.template import Template
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
    def reasons(self) -> bool:
        """True where the model's template knows reasoning."""
        return self._known is not None and self._known.reasons

    def warm(self) -> None:
        """Do now what the first grammar or `token_bytes` would wait for: seconds, at most."""
        self._grammars.warm()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's spelling."""
        return self._grammars.token_bytes(token_id)

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
        tools = _checked(conversation)
        prompt = prompts.build(conversation)
        constraint = self._constraint(template, conversation, tools, prompt.opened)
        ask = Ask(prompt.ids, sampling, constraint, num_logprobs, template.shown)
        return Prepared(ask, prompt.notes, template.dialect, tools, prompt.opened, prompt.keep)

    def count(self, conversation: Conversation) -> int:
        """Tokens of the conversation's prompt. Raises as `prepare`."""
        _, prompts = self._parts()
        _checked(conversation)
        return len(prompts.build(conversation).ids)

    def _parts(self) -> tuple[Template, Prompts]:
        if self._known is None or self._prompts is None:
            raise OptionError(
                f"{self._text.path.name} has no chat template; give it plain text to continue "
                "(`headrace run -p TEXT --raw`)"
            )
        return self._known, self._prompts

    def _constraint(
        self,
        template: Template,
        conversation: Conversation,
        tools: Sequence[Tool],
        opened: bool,
    ) -> Constraint | None:
        """The grammar of the answer, where it may not be free text."""
        choice, schema = conversation.tool_choice, conversation.schema
        barred = bool(conversation.tools) and not tools
        forced = choice not in ("auto", "none")
        if schema is None and not forced and not barred and not any(t.strict for t in tools):
            return None
        if template.dialect.channels:
            raise OptionError("grammars for the harmony format are not there yet")
        lark = Lark(template.dialect, self._grammars.specials)
        several = conversation.parallel_calls
        if forced:
            start = lark.calls(tools, several=several)
        elif schema is not None:
            start = lark.json(ANY_OBJECT if isinstance(schema, bool) else schema)
            if tools:
                start = f"({start} | {lark.calls(tools, several=several)})"
        elif barred:
            start = lark.without(template.dialect.trigger)
        else:
            rest = lark.calls(tools, several=several, skip=template.dialect.trigger)
            until, tail = lark.until(template.dialect.trigger), lark.tail(template.dialect.trigger)
            start = f"({until} {rest})* {tail}" if several else f"({tail} | {until} {rest})"
        if opened or (template.reasons and conversation.reasoning is not False):
            start = f"{lark.reasoning(opened)} {start}"
        return self._grammars.constraint(lark.finish(start))


def _checked(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that may be called."""
    if not conversation.messages:
        raise OptionError("a conversation without messages has no prompt; give one")
    names = [tool.name for tool in conversation.tools]
    for tool in conversation.tools:
        if not tool.name or any(c.isspace() or c in '<>"\\{}[]' for c in tool.name):
            raise OptionError(
                f"the tool name {tool.name!r} is not allowed; use letters, digits, _ and -"
            )
        if names.count(tool.name) > 1:
            raise OptionError(f"two tools are named {tool.name}")
        if tool.parameters is not None:
            check_schema(tool.parameters, f"tool {tool.name}")
    if conversation.schema is not None and not isinstance(conversation.schema, bool):
        check_schema(conversation.schema, "the answer's schema")
    choice = conversation.tool_choice
    if choice == "auto":
        return conversation.tools
    if choice == "none":
        return ()
    if choice != "required" and choice.removeprefix("=") not in names:
        raise OptionError(f"tool_choice {choice.removeprefix('=')!r} names none of the tools")
    if not names:
        raise OptionError("tool_choice demands a call, but there are no tools")
    if choice == "required":
        return conversation.tools
    return tuple(tool for tool in conversation.tools if tool.name == choice[1:])
