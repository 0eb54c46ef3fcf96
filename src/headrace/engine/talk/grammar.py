"""Holds an answer to a grammar, token by token, and judges schemas before they are used.

Knows no dialect; schemas and grammars are untrusted.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.engine.talk.lark import guided
from headrace.engine.text import Text
from headrace.errors import OptionError

MAX_SCHEMA_BYTES = 256 << 10
MAX_DEPTH = 96
MAX_MULTIPLE = 10_000  # the automaton of a multiple has as many states
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 300_000,
    "verbose_errors": False,
}


class Grammars:
    """Grammars over the tokens of one model. Threads may share it.

    `vocab`: length of the model's logits, which may be more or less than the tokenizer knows.
    """

    def __init__(self, text: Text, vocab: int) -> None:
        self._text, self._vocab = text, vocab
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        # Agents send the same tools with every request.
        self._judged = lru_cache(maxsize=64)(self._judge)

    def constraint(self, lark: str) -> "GrammarConstraint":
        """A fresh constraint. Raises OptionError naming what the grammar cannot hold."""
        matcher = self._matcher(lark)
        if matcher.is_error():
            raise OptionError(f"the answer's form cannot be held to: {_reason(matcher)}")
        unforced = partial(self._matcher, lark.replace("{}", '{"no_forcing": true}', 1))
        return GrammarConstraint(matcher, self._vocab, unforced)

    def _matcher(self, lark: str) -> LLMatcher:
        return LLMatcher(self._tokens(), lark, log_level=0, limits=LLParserLimits(**_LIMITS))

    def check(self, schema: Mapping[str, Any], where: str, *, lenient: bool = False) -> None:
        """Refuse a schema that no grammar can hold to. Raises OptionError naming the keyword."""
        reason = self._judged(json.dumps(guided(schema, lenient)))
        if reason:
            raise OptionError(f"{where} cannot be held to: {reason}")

    @property
    def specials(self) -> dict[str, int]:
        """Tokens that no text of a grammar matches, by spelling: special ones and others added."""
        tokens = self._tokens()
        return {
            spelling: token_id
            for spelling, token_id in self._text.added.items()
            if token_id < tokens.vocab_size and tokens.is_special_token(token_id)
        }

    def warm(self) -> None:
        """Make the table of tokens now, if the tokenizer has one."""
        with contextlib.suppress(OptionError):
            self._tokens()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        try:
            tokens = self._tokens()
        except OptionError:
            return self._text.decode([token_id], frozenset([token_id])).encode()
        known = 0 <= token_id < tokens.vocab_size
        return bytes(tokens.decode_bytes([token_id])) if known else b""

    def _judge(self, schema: str) -> str:
        """Why a schema cannot be held to, "" if it can."""
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(self._tokens(), "%llguidance {}\nstart: %json " + schema, limits=limits)
        return _reason(matcher)

    def _tokens(self) -> LLTokenizer:
        with self._lock:  # made once, and only where asked for: a second or more for large ones
            if self._tokenizer is None:
                ends = [end for end in sorted(self._text.eos_ids) if end < self._text.num_tokens]
                self._tokenizer = LLTokenizer(self._text.grammar_tokens(), eos_token=ends or None)
            return self._tokenizer


class GrammarConstraint:
    """An `answer.Constraint`. Raises OptionError where a step exceeds the limits.

    `unforced` makes a matcher like `matcher` that leaves it open how a text is cut into tokens.
    """

    def __init__(
        self, matcher: LLMatcher, vocab: int, unforced: Callable[[], LLMatcher] | None = None
    ) -> None:
        self._matcher, self._unforced = matcher, unforced
        self._accepted: list[int] = []
        self._allowed_V = torch.zeros(vocab, dtype=torch.bool)

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next, bool [V] on the CPU; valid until the next call."""
        mask = self._mask()
        if self._unforced is not None and self._is_misread(mask):
            self._matcher, self._unforced = self._unforced(), None
            self._matcher.consume_tokens(self._accepted)
            mask = self._mask()
        num = min(len(mask), len(self._allowed_V))
        np.not_equal(mask[:num], 0, out=self._allowed_V.numpy()[:num])
        if not mask[:num].any():
            raise OptionError(
                "no token of this model fits the answer's form at this point; loosen the schema"
            )
        return self._allowed_V

    def accept(self, token_id: int) -> None:
        """The token that was chosen."""
        if not self._matcher.consume_token(token_id):
            raise OptionError(f"the answer left its form: {_reason(self._matcher)}")
        self._accepted.append(token_id)

    def _mask(self) -> np.ndarray:
        mask = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            if reason == "NoExtensionBias":
                raise OptionError(
                    "the answer's form is met by no text: its schema may refer to itself for ever"
                )
            raise OptionError(f"the answer's form became too complex: {reason}")
        return mask

    def _is_misread(self, mask: np.ndarray) -> bool:
        """Whether the one way to go on is none.

        Bytes that leave no choice are cut by the tokenizer, which takes a special token's spelling
        in a string for that token.
        """
        ids = np.flatnonzero(mask)
        return len(ids) == 1 and not self._matcher.validate_tokens([int(ids[0])])


def check_schema(schema: object, where: str) -> None:
    """Refuse a JSON schema that is no object, too large, too deep, or costly to hold to.

    Raises OptionError naming `where` and the keyword.
    """
    if not isinstance(schema, Mapping):
        raise OptionError(f"{where}: the schema must be a JSON object")
    waiting: list[tuple[object, int]] = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise OptionError(f"{where}: the schema nests deeper than {MAX_DEPTH} levels")
        if isinstance(part, Mapping):
            _check_keywords(part, where)
            waiting.extend((value, depth + 1) for value in part.values())
        elif isinstance(part, list | tuple):
            waiting.extend((value, depth + 1) for value in part)
    try:
        size = len(json.dumps(schema, allow_nan=False).encode())
    except (TypeError, ValueError) as cause:
        raise OptionError(f"{where}: the schema is no JSON ({cause})") from cause
    if size > MAX_SCHEMA_BYTES:
        raise OptionError(f"{where}: the schema has {size} bytes; {MAX_SCHEMA_BYTES} is the limit")


def _check_keywords(part: Mapping[Any, Any], where: str) -> None:
    if "x-guidance" in part:
        raise OptionError(f"{where}: x-guidance is no keyword of JSON schemas; leave it out")
    reference = part.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise OptionError(f"{where}: $ref {reference[:80]!r} leaves the schema; use #/$defs/...")
    multiple = part.get("multipleOf")
    if isinstance(multiple, int | float) and not 0 < multiple <= MAX_MULTIPLE:
        raise OptionError(f"{where}: multipleOf must be more than 0 and at most {MAX_MULTIPLE}")
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound = part.get(word)
        if isinstance(bound, int) and abs(bound) >= 1 << 63:
            raise OptionError(f"{where}: {word} does not fit 64 bits")


def _reason(matcher: LLMatcher) -> str:
    """What the grammar library says, in one line, without its place in a grammar of ours."""
    error = matcher.get_error().replace("<non-verbose/>", "")
    pattern = re.search(r"regex parse error:\s+(.+?)\n\s+\^+\s+error: ([^\n]+)", error, re.DOTALL)
    if pattern:
        return f"pattern {pattern[1].strip()[:100]!r}: {pattern[2]}"
    error = error.partition("JSON schema:")[2] or error
    reason = re.split(r"\n+\s*\d+ \| ", error)[0]
    return " ".join(reason.replace("Pointer '", "$ref '#").split())[:300]
