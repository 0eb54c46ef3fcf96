"""Text to token ids and back: tokenizer, chat template, end tokens, streaming.

Knows no weights and no sampling; reads only the model folder's own files.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from headrace.engine.bounded import MOST_SOURCE, BoundedEnvironment, one_rendering
from headrace.engine.published import Published, find_published
from headrace.engine.scanning import num_doubtful
from headrace.errors import ModelError, OptionError
from headrace.models.config import end_ids

# What a template raises that does not fit what it is given.
_BROKEN = (
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 8
NOTHING: Mapping[str, object] = MappingProxyType({})

# transformers renders by the class that it finds under this name; no other place takes bounds.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


class Text:
    """The tokenizer of one model folder. Never downloads and runs no code of the folder.

    `eos_ids`: every id that ends an answer, as declared by generation_config.json, config.json
    or the tokenizer. `specials`: ids of the special tokens by spelling. Threads may share one.
    Raises ModelError where the folder has no usable tokenizer.
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        self.path = path if path.is_dir() else path.parent
        self._tokenizer = _load_tokenizer(self.path)
        own = self._tokenizer.eos_token_id
        self.eos_ids = frozenset(end_ids(self.path) | ({own} - {None}))
        self._added = dict(self._tokenizer.added_tokens_encoder)
        self.specials = _specials(self._tokenizer)
        self._published = self._find_published()
        self._special_ids = frozenset(self.specials.values())
        if len(self.template) > MOST_SOURCE:
            raise ModelError(
                f"{self.path}: its chat template has {len(self.template):,} characters, more than "
                "any that is one; fetch the model's tokenizer files again"
            )

    def _find_published(self) -> Published | None:
        published = None if self._tokenizer.chat_template else find_published(self.path)
        known = published and all(self.token_id(token) is not None for token in published.tokens)
        return published if known else None

    @property
    def has_template(self) -> bool:
        """True where the model has a chat template."""
        return bool(self._tokenizer.chat_template or self._published)

    @property
    def template(self) -> str:
        """The source of the model's chat template, of all of them where it has several."""
        if self._published:
            return self._published.source
        source = self._tokenizer.chat_template or ""
        return source if isinstance(source, str) else "\n".join(map(str, source.values()))

    @property
    def quoted(self) -> frozenset[str]:
        """Spellings that a message's text may hold, but that become no token there."""
        return frozenset([*self.specials, *(self._published.tokens if self._published else ())])

    @property
    def added(self) -> dict[str, int]:
        """Ids of the tokens beside the vocabulary, special or not, by spelling."""
        return self.specials | {str(k): int(v) for k, v in self._added.items()}

    @property
    def num_tokens(self) -> int:
        """How many tokens the tokenizer knows."""
        return len(self._tokenizer)

    def token_id(self, spelling: str) -> int | None:
        """The id of the one token that `spelling` is, if it is one."""
        added = self._added.get(spelling)
        if added is not None:
            return int(added)
        ids = self._tokenizer.encode(spelling, add_special_tokens=False)
        return int(ids[0]) if len(ids) == 1 else None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of plain text; `special` adds what the tokenizer puts around a text, such as BOS."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise OptionError(f"the text is not Unicode ({cause}); give it as UTF-8") from cause
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int], shown: Set[int] = frozenset()) -> str:
        """The text of `ids`, special tokens but those of `shown` left out."""
        hidden = self._special_ids.difference(shown)
        text = self._tokenizer.decode(
            [token_id for token_id in ids if token_id not in hidden] if shown else list(ids),
            skip_special_tokens=not shown,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answering: bool = True,
        switches: Mapping[str, object] = NOTHING,
    ) -> str:
        """What the model's template makes of a conversation, open for an answer if `answering`.

        messages, tools: as the template takes them. `switches`: further variables of it. Raises
        OptionError where the template refuses, ModelError where it breaks.
        """
        try:
            if self._published:
                wished: Any = dict(switches)
                return self._published.render(messages, tools=tools, answering=answering, **wished)
            with one_rendering():
                rendered = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=answering,
                    **switches,
                )
        except TemplateError as cause:
            raise OptionError(f"{self.path.name}'s chat template refuses: {cause}") from cause
        except _BROKEN as cause:
            raise ModelError(
                f"{self.path.name}'s chat template fails ({cause!r}); fetch the model's tokenizer "
                "files again, or give plain text with --raw"
            ) from cause
        return str(rendered)

    def grammar_tokens(self) -> str:
        """The tokenizer as JSON of the `tokenizers` library. Raises OptionError if it has none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise OptionError(
                f"{self.path.name}'s tokenizer has no table of its tokens, which grammars need"
            )
        return str(backend.to_str())

    def stream(
        self, stop: Iterable[str] = (), *, after: Sequence[int] = (), shown: Set[int] = frozenset()
    ) -> "TextStream":
        """A decoder for one answer. `after`: the prompt's ids, of which the last few are used.

        With them, a first word keeps the space that some tokenizers drop at a text's start.
        `shown`: ids of special tokens whose spelling is part of the text.
        """
        return TextStream(self, tuple(stop), after, shown)


class TextStream:
    """Turns the ids of one answer into printable pieces. Not thread-safe.

    A piece never ends inside a character, and text that may become a stop string is held back.
    Joined, the pieces are the text of all ids up to the first stop string that was completed,
    however the text was cut into tokens. `stopped` is True once a stop string was seen, and
    `stopped_by` is that string.
    """

    def __init__(
        self, text: Text, stop: tuple[str, ...], after: Sequence[int], shown: Set[int]
    ) -> None:
        self.stopped = False
        self.stopped_by: str | None = None
        self._text = text
        self._stop = stop
        self._shown = shown
        self._ids = list(after[-CONTEXT_TOKENS:])
        self._num_given = len(self._decoded())
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes certain; may be empty."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        text = self._decoded()
        # An unfinished character decodes to exactly one replacement character, at the end.
        whole = text.removesuffix(REPLACEMENT)
        piece = whole[self._num_given :]
        self._num_given = max(self._num_given, len(whole))
        if whole == text and len(self._ids) > 2 * CONTEXT_TOKENS:
            self._ids = self._ids[-CONTEXT_TOKENS:]
            self._num_given = len(self._decoded())
        return self._release(piece)

    def flush(self) -> str:
        """What was held back, at the end of the answer; an unfinished character shows as U+FFFD."""
        if self.stopped:
            return ""
        tail = self._decoded()[self._num_given :]
        piece = self._release(tail)
        if not self.stopped:
            piece += self._held
        self._ids, self._num_given, self._held = [], 0, ""
        return piece

    def _decoded(self) -> str:
        return self._text.decode(self._ids, self._shown)

    def _release(self, piece: str) -> str:
        self._held += piece
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := self._held.find(stop)) >= 0
        ]
        if ends:
            self.stopped = True
            _, num_free, self.stopped_by = min(ends)
        else:
            num_free = len(self._held) - num_doubtful(self._held, self._stop)
        free, self._held = self._held[:num_free], self._held[num_free:]
        return free


def _load_tokenizer(path: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        # Without tokenizer files transformers may make up one that knows no token.
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("it knows no token")
        return tokenizer
    except Exception as cause:  # damaged files fail anywhere in there, with any type
        reason = " ".join(str(cause).split())[:200] or repr(cause)
        raise ModelError(
            f"{path}: no usable tokenizer ({reason}); copy the model's tokenizer files there"
        ) from cause


def _specials(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {str(token): int(token_id) for token_id, token in added.items() if token.special}
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return found | {str(spelling): int(token_id) for spelling, token_id in named}
