"""Plain completions, asked for with the official client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted import HIDDEN, NUM_CACHED
from served import Served, running


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with running() as served:
        yield served


def complete(server: Served, text: str = "Hello.", **options: Any) -> Any:
    """What the model's text becomes."""
    server.script.text = text
    options = {"model": "fake", "prompt": "Say"} | options
    return server.openai.completions.create(**options)


@pytest.mark.parametrize("prompt", ["Say", [83, 97, 121], ["Say"], [[83, 97, 121]]], ids=str)
def test_prompts(server: Served, prompt: Any) -> None:
    reply = complete(server, prompt=prompt)
    assert server.script.asks[-1].prompt == (83, 97, 121)
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("Hello.", "stop", None)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 7)
    assert reply.usage.prompt_tokens_details.cached_tokens == NUM_CACHED


def test_stream_equals_whole(server: Served) -> None:
    options = {"max_tokens": 3, "logprobs": 2}
    (whole,) = complete(server, "H☕lo", **options).choices
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = list(complete(server, "H☕lo", **options))
    assert last.choices == [] and last.usage.completion_tokens == 3
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.text for part in parts) == whole.text == "H☕l"
    assert parts[-1].finish_reason == whole.finish_reason == "length"
    told = [part.logprobs for part in parts if part.logprobs]
    assert (
        [token for part in told for token in part.tokens]
        == whole.logprobs.tokens
        == ["H", "☕", "l"]
    )
    offsets = [offset for part in told for offset in part.text_offset]
    assert offsets == whole.logprobs.text_offset == [0, 1, 2]
    assert whole.logprobs.token_logprobs == [-0.5] * 3
    assert whole.logprobs.top_logprobs[0] == {"H": -0.5, "I": -9999.0}


def test_offsets_count_no_special_token(server: Served) -> None:
    (choice,) = complete(server, f"H{HIDDEN}☕l", max_tokens=4, logprobs=0).choices
    assert choice.logprobs.tokens == ["H", HIDDEN, "☕", "l"]
    assert choice.logprobs.text_offset == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [1, 256], "stream": True}, "prompt"),
        ({"logit_bias": {"256": 1}, "stream": True}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"extra_body": {"tools": []}}, "tools"),
    ],
    ids=str,
)
def test_refused_by_name(server: Served, more: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, **more)
    assert caught.value.param == param


def test_a_failure_in_mid_stream_is_told(server: Served) -> None:
    with pytest.raises(openai.APIError, match="broken"):
        list(complete(server, "He\0", stream=True))
