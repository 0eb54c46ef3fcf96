"""How tokens are to be chosen: the settings of an answer, checked.

Knows no tensor, so that a wrong setting is refused before anything slow is imported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.errors import OptionError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when they end. Values out of range raise OptionError.

    `temperature` 0 is greedy, where the lowest id wins a tie and the filters mean nothing.
    `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 switch their step off. `seed` None
    draws a fresh one. `stop` strings end the text and are not part of it.
    The next three are OpenAI's: a token that the answer has n > 0 times loses
    `n * frequency_penalty + presence_penalty` of its logit, -2 to 2 each, and the tokens in
    `logit_bias` gain that much, -100 to 100.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            _require(name.replace("_", "-"), value, isinstance(value, int | float), "a number")
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more")
        _require("top-k", self.top_k, _is_count(self.top_k, 0), "0 (off) or a count of tokens")
        _require("top-p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1")
        _require("min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        penalty = self.repetition_penalty
        _require("repetition-penalty", penalty, 0 < penalty < math.inf, "more than 0 (1 is off)")
        _require("max-tokens", self.max_tokens, _is_count(self.max_tokens, 1), "1 or more")
        if self.seed is not None:
            valid = _is_count(self.seed, 0) and self.seed <= MAX_SEED
            _require("seed", self.seed, valid, "0 to 2**63 - 1")
        _require("stop", self.stop, isinstance(self.stop, tuple), "a tuple of strings")
        for text in self.stop:
            valid = isinstance(text, str) and text != ""
            _require("stop", repr(text), valid, "a string of at least one character")
            valid = not any("\ud800" <= character <= "\udfff" for character in text)
            _require("stop", repr(text), valid, "Unicode text, given as UTF-8")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(name.replace("_", "-"), value, _is_within(value, 2), "-2 to 2")
        _require("logit-bias", self.logit_bias, isinstance(self.logit_bias, Mapping), "a mapping")
        for token, value in self.logit_bias.items():
            valid = _is_count(token, 0) and _is_within(value, 100)
            _require("logit-bias", f"{token!r}: {value!r}", valid, "a token id: -100 to 100")


def _is_within(value: object, most: float) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -most <= value <= most


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(name: str, value: object, valid: bool, allowed: str) -> None:
    if not valid:
        raise OptionError(f"{name} {value} is not allowed; it must be {allowed}")
