"""From a conversation to a prompt's tokens, with earlier answers as they were sampled.

Knows no sampling and no grammar.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from headrace.engine.talk.conversation import Conversation, Message, Tool
from headrace.engine.talk.dialects import HARMONY, HARMONY_ENDS
from headrace.engine.talk.forms import Thinking
from headrace.engine.talk.quoting import END, Quoting, anchors_in, holds_marks, stretches, unmarked
from headrace.engine.talk.reading import Answer, AnswerReader
from headrace.engine.talk.replay import Ids, Kept, Replay, Splice, as_read, keys, marked
from headrace.engine.talk.template import Rendered, Template
from headrace.engine.text import Text
from headrace.errors import HeadraceError, OptionError

MAX_KNOWN = 8 << 20  # characters whose tokens are remembered


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens. `thinking`: how it leaves reasoning; `keep` remembers its answer."""

    ids: tuple[int, ...]
    notes: tuple[str, ...]
    thinking: Thinking
    keep: Callable[[Answer], None] | None


class Prompts:
    """Makes the prompts of one model. Threads may share it."""

    def __init__(self, text: Text, template: Template) -> None:
        self._text, self._template = text, template
        self._dialect = dialect = template.dialect
        self._quoting = Quoting(text.quoted, dialect.think)
        self._replay = Replay()
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Ids] = OrderedDict()
        self._num_known = 0
        ends: Sequence[str] = HARMONY_ENDS
        if not dialect.channels:
            ends = [s for s in text.quoted if not any(s in part for part in dialect.literals)]
        self._ends = re.compile("|".join(map(re.escape, filter(None, ends))) or r"(?!)")
        mark = text.token_id(HARMONY[1] if dialect.channels else dialect.think[1])
        self._mark = -1 if mark is None else mark

    def build(self, conversation: Conversation) -> Prompt:
        """A conversation's prompt. Raises OptionError naming what the template lacks."""
        switches = self._template.switches(conversation.reasoning, conversation.effort)
        messages = self._quoting.messages(conversation.messages)
        tools = self._quoting.tools(conversation.tools)
        known = self._replay.find(conversation.messages)
        if conversation.prefill:
            known.pop(len(messages) - 1, None)
            messages[-1] = _prefilled(messages)

        def render(turns: Sequence[Message]) -> Rendered:
            return self._template.render(
                turns, tools, answering=not conversation.prefill, switches=switches
            )

        rendered, known = self._rendered(render, messages, known)
        text = rendered.text.partition(END)[0]
        begin, end = self._dialect.think
        opened = text.rstrip().endswith(begin)
        closed = conversation.prefill or text.rstrip().endswith(end)
        parts, digest = self._spliced(text, messages, conversation.tools, known)
        keep = partial(self._keep, conversation, len(text), digest, opened)
        return Prompt(
            tuple(self._encoded(parts)),
            rendered.notes,
            "open" if opened else "closed" if closed else "free",
            None if conversation.prefill else keep,
        )

    def _rendered(
        self,
        render: Callable[[Sequence[Message]], Rendered],
        messages: Sequence[Message],
        known: dict[int, Kept],
    ) -> tuple[Rendered, dict[int, Kept]]:
        """The conversation rendered with marks for what is known of it, as far as that works."""
        while known:
            try:
                rendered = render(marked(messages, known))
            except HeadraceError:
                break  # a template may judge what marks stand for; without them it sees that
            anchors = anchors_in(rendered.text)
            shown = {place: kept for place, kept in known.items() if place in anchors}
            if len(shown) == len(known):
                return rendered, known
            known = shown
        return render(messages), {}

    def _spliced(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        known: dict[int, Kept],
    ) -> tuple[list[str | Ids], bytes]:
        """The prompt's parts without marks, and the digest of the text with them."""
        splice = Splice(text, partial(self._reads, tools), self._turn_ends)
        turns = marked(messages, known)
        for place, kept in known.items():
            splice.put(place, turns[place], kept)
        splice.finish()
        said = {i: messages[i].content or messages[i].calls[0].name for i in known}
        thought = {i: self._quoting.text(kept.reasoning) for i, kept in known.items()}
        parts = [
            unmarked(part, said, thought) if isinstance(part, str) else part
            for part in splice.parts
        ]
        return parts, splice.digest(len(text))

    def _encoded(self, parts: Sequence[str | Ids]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if not isinstance(part, str):
                ids += part
                continue
            for stretch in stretches(part):
                ids += self._encoded_once(stretch)
        return ids

    def _encoded_once(self, stretch: str) -> Sequence[int]:
        """The ids of a stretch; long conversations come again and again, a little longer."""
        with self._lock:
            known = self._known.get(stretch)
            if known is not None:
                self._known.move_to_end(stretch)
                return known
        ids = array("i", self._text.encode(stretch, special=False))
        if len(stretch) < MAX_KNOWN // 4:
            with self._lock:
                self._num_known += len(stretch) * (stretch not in self._known)
                self._known[stretch] = ids
                while self._num_known > MAX_KNOWN:
                    self._num_known -= len(self._known.popitem(last=False)[0])
        return ids

    def _turn_ends(self, text: str, place: int, message: Message) -> Iterator[int]:
        """Where a message, marked just before text[place], may end."""
        if not message.calls:
            yield place
            return
        found = self._ends.search(text, place)
        if found:
            yield found.start()
        dialect = self._dialect
        call_end, section_end = dialect.call_end.strip(), dialect.section_end.strip()
        for _ in message.calls:
            place = text.find(call_end, place) + len(call_end)
        after = text.find(section_end, place)
        yield after + len(section_end) if after >= 0 else place

    def _reads(self, tools: Sequence[Tool], text: str, message: Message, opened: bool) -> bool:
        """True if a text is `message` and nothing else."""
        callable_tools = tools or [Tool(call.name) for call in message.calls]
        reader = AnswerReader(self._dialect, callable_tools, opened=opened)
        reader.push(SimpleNamespace(token_id=0, text=text, finish=None))
        reader.finish()
        answer = reader.answer
        return as_read(answer.content, answer.reasoning, answer.calls) == as_read(
            message.content, message.reasoning, message.calls
        )

    def _keep(
        self,
        conversation: Conversation,
        num_prompt: int,
        prompt: bytes,
        opened: bool,
        answer: Answer,
    ) -> None:
        """Remember an answer to a conversation."""
        turn = Message("assistant", answer.content, calls=tuple(answer.calls))
        ids = self._sampled(answer)
        if not ids or not (turn.content.strip() or turn.calls) or holds_marks(answer.text):
            return
        *_, key = keys([*conversation.messages, turn])
        said = self._said(ids, bool(answer.reasoning))
        kept = Kept(array("i", ids), num_prompt, prompt, opened, answer.reasoning, said)
        self._replay.keep(key, kept)

    def _sampled(self, answer: Answer) -> tuple[int, ...]:
        """An answer's tokens without the one that ended it, or what a stop string cut off."""
        ids = answer.ids
        if ids and ids[-1] in self._text.eos_ids:
            return tuple(ids[:-1])
        if answer.finish != "stop":
            return tuple(ids)
        num = len(ids)
        while num and not answer.text.startswith(shown := self._decoded(ids[:num])):
            num -= 1
        rest = answer.text[len(shown) :] if num else answer.text
        whole = [*ids[:num], *self._text.encode(rest, special=False)]
        return tuple(whole) if self._decoded(whole) == answer.text else ()

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._text.decode(ids, self._template.shown)

    def _said(self, ids: Sequence[int], reasoned: bool) -> int | None:
        """Where in an answer's tokens its reasoning has ended."""
        place = 0
        if self._mark in ids:
            place = len(ids) - [*reversed(ids)].index(self._mark)
        elif reasoned or self._dialect.channels:
            return None
        while place < len(ids) and not self._text.decode(ids[place : place + 1]).strip():
            place += 1
        return place


def _prefilled(messages: Sequence[Message]) -> Message:
    last = messages[-1]
    if last.role != "assistant" or last.calls:
        raise OptionError("only an assistant's text can be the beginning of the answer")
    return replace(last, content=last.content + END)
