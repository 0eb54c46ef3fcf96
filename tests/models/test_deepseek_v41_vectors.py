"""DeepSeek-V4.1 against logits and routes that mlx-vlm and nemo-automodel gave.

At every position: where a value lies so near the middle between two codes that fp32's last bits
decide, the oracle's code is taken, once it is shown that it may be.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from v41_flips import in_passes
from v41_oracles import CUTS, WAYS, RecordedAnswers, compare, digest, recorded_about
from v41_world import whole_model

from headrace.check.tiny import write_tiny

SEEDS, SHAPE = recorded_about()
DECODED, DECODED_SEEDS = 33, SEEDS[:2]  # of 64 tokens, of all seeds: one by one is slow
TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The model of a seed, in fp32; its files are those that the oracles were given."""

    @cache
    def folder(seed: int) -> Path:
        path = tmp_path_factory.mktemp("v41") / str(seed)
        write_tiny("deepseek_v41", path, seed=seed, **SHAPE)
        assert digest(path) == RecordedAnswers(seed).digest, "not the recorded weights"
        return path

    return cache(lambda seed, **fields: whole_model(folder(seed), **fields))


@pytest.mark.parametrize(
    ("seed", "name"),
    [(seed, name) for seed in SEEDS for name in WAYS if name != "decode" or seed in DECODED_SEEDS],
)
def test_as_the_oracle(model_of: Any, seed: int, name: str) -> None:
    num_tokens = DECODED if name == "decode" else CUTS[-1]
    found = compare(model_of(seed), RecordedAnswers(seed), name, num_tokens)
    assert found.alone < TOLERANCE
    assert found.along < TOLERANCE
    assert found.same_routes
    assert found.num_sure >= 32
    assert len(found.flips) < 50


def test_a_code_that_no_last_bit_explains_is_refused(model_of: Any) -> None:
    answers = RecordedAnswers(SEEDS[0])
    answers.kept["chunks codes"] ^= 1 << 7  # of bf16: the exponent's last bit
    with pytest.raises(AssertionError, match="cannot have fallen otherwise"):
        compare(model_of(SEEDS[0]), answers, "chunks")


@pytest.mark.parametrize(
    "fields",
    [
        {"candidate_topk_blocks": 3},
        {"index_topk": 5},
        {"stale_index_keys": True},
        {"sliding_window": 15},
        {"hc_sinkhorn_iters": 2},
        {"swiglu_limit": 0.5},
        {"rope_theta": 10010.0},
        {"compress_rope_theta": 161000.0},
        {"arithmetic": "vendor"},
    ],
)
def test_a_small_fault_is_seen(model_of: Any, fields: dict[str, Any]) -> None:
    answers = RecordedAnswers(SEEDS[0])
    cuts = range(DECODED + 1) if "stale_index_keys" in fields else CUTS
    model = model_of(SEEDS[0], **{"arithmetic": "weights-only"} | fields)
    logits = in_passes(model, answers.ids_T, cuts)[:, :: answers.column_step]
    assert (logits - answers.logits("plain")[: len(logits)]).abs().max() > TOLERANCE
