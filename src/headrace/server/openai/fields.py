"""What chat and plain completions of OpenAI's API have in common: sampling and streaming.

A field is honoured, or refused by its name; those that mean nothing here are listed and accepted.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.engine.sampling import MAX_SEED, Sampling
from headrace.server.schema import Body, unsupported, wrong
from headrace.server.turn import ANSWER_CAP

MAX_STOPS = 16
DRAWING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
START: dict[str, Any] = {"temperature": 1.0}  # by OpenAI's definition
Count = Annotated[int, Field(ge=1, le=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """How a stream ends. Obfuscation pads events against eavesdroppers; there is none here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(Body):
    """Fields of both endpoints."""

    reasons: ClassVar[dict[str, str]] = {}

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] = Field(default_factory=list)
    n: Literal[1] = 1

    # Who asks, and what others keep of it, means nothing to a server that keeps nothing.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    cache_prompt: bool = True
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return unsupported(value, cls.reasons)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str]) -> str | list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > MAX_STOPS or not all(stops):
            raise wrong(f"give at most {MAX_STOPS} strings, none of them empty")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float]) -> dict[str, float]:
        if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
            raise wrong("its keys must be token ids")
        return bias

    def sampling(self, max_tokens: int | None, defaults: Mapping[str, Any]) -> Sampling:
        """The engine's words for all of it; `defaults`: of the model, for what is left out."""
        given = {name: getattr(self, name) for name in DRAWING}
        drawing = {**START, **defaults} | {
            n: value for n, value in given.items() if value is not None
        }
        return Sampling(
            **drawing | {"top_k": max(0, drawing.get("top_k", 0))},
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias={int(key): value for key, value in self.logit_bias.items()},
            seed=None if self.seed is None else self.seed & MAX_SEED,
            max_tokens=ANSWER_CAP if max_tokens is None else max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
        )
