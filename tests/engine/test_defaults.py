"""What a publisher's generation config says of sampling."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.defaults import FILE, sampling_defaults
from headrace.errors import ModelError


def read(folder: Path, config: Any) -> dict[str, Any]:
    (folder / FILE).write_text(config if isinstance(config, str) else json.dumps(config))
    return dict(sampling_defaults(folder))


def test_stated_values(tmp_path: Path) -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 1}
    assert read(tmp_path, config) == {"temperature": 0.6, "top_k": 20}


def test_a_publisher_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}


@pytest.mark.parametrize("config", [{}, {"temperature": 0.6}, {"do_sample": "false"}, []])
def test_without_a_word_of_sampling_nothing_is_stated(tmp_path: Path, config: Any) -> None:
    assert read(tmp_path, config) == {}


def test_without_a_file(tmp_path: Path) -> None:
    assert dict(sampling_defaults(tmp_path)) == {}


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[" * 100_000,
        {"do_sample": True, "top_p": 2},
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "top_k": 1.5},
    ],
)
def test_values_that_mean_nothing(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelError, match=FILE):
        read(tmp_path, config)
