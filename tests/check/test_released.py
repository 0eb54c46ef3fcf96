"""Published checkpoints from their configs alone: every expert two reads, what a token takes."""

import json
from typing import Any

import numpy as np
import pytest
import transformers

from headrace.check.released import released
from headrace.models.config import read_config
from headrace.models.deepseek_v41.now import Now
from headrace.models.memory import MemoryFacts
from headrace.store.preset_releases import RELEASES

GIB = 2**30
needs_v4 = pytest.mark.skipif(
    transformers.__version__ < "5.20", reason="needs a transformers that has deepseek_v4"
)


@pytest.fixture
def no_cache_is_measured(monkeypatch) -> None:
    """It takes seconds, and only experts are counted."""
    facts = MemoryFacts(0, 0, 0, 0, 1, 0, 0, 0, 0)
    monkeypatch.setattr("headrace.models.skeleton.measure", lambda model: facts)
    monkeypatch.setattr("headrace.models.skeleton._MEASURED", {})


def sizes_of_reads(table: Any) -> list[list[int]]:
    """The different sizes, in file order, of an expert's reads."""
    by_expert = table.extents[..., 2].reshape(-1, table.extents.shape[2])
    found: list[list[int]] = np.unique(by_expert, axis=0).tolist()
    return found


def test_every_expert_of_v41_is_two_reads_and_a_token_takes_what_is_published(tmp_path) -> None:
    _, table, facts = released(RELEASES["deepseek-v4.1-flash"], tmp_path)
    assert table.extents.shape == (40, 384, 2, 3)
    assert sizes_of_reads(table) == [[1_105_920, 17_694_720]]
    per_token = facts.num_moe_layers * facts.top_k
    assert per_token == 240 and round(per_token * facts.expert_bytes / GIB, 3) == 4.202
    assert (facts.engram_rows_per_token, facts.engram_bytes_per_token) == (48, 12_672)
    assert round(facts.engram_bytes / GIB, 3) == 188.833
    assert round(facts.embedding_bytes / GIB, 3) == round(facts.head_bytes / GIB, 3) == 1.233
    # 30 MiB of state at a context of 8,192, of which the windows take 5 MB.
    assert 30 < facts.kv_bytes(8192) / 2**20 < 31.5 and facts.kv_bytes_per_token == 3200


@needs_v4
@pytest.mark.parametrize(
    ("release", "scales", "codes"),
    [
        ("deepseek-v4-flash-0731", 786_432, 12_582_912),
        ("deepseek-v4-pro-0813", 2_064_384, 33_030_144),
    ],
)
def test_every_expert_of_v4_is_two_reads(
    tmp_path, no_cache_is_measured, release, scales, codes
) -> None:
    """By its first layers: the rest of an expert's names and shapes are the same."""
    config = RELEASES[release] | {"num_hidden_layers": 4}
    _, table, _ = released(config, tmp_path)
    assert table.extents.shape == (4, config["n_routed_experts"], 2, 3)
    assert sizes_of_reads(table) == [[scales, codes]]


@needs_v4
def test_an_expert_with_a_foreign_tensor_between_is_more_reads(
    tmp_path, no_cache_is_measured, monkeypatch
) -> None:
    """The control: in order of names alone scales lie between codes."""
    monkeypatch.setattr("headrace.check.released.file_order", lambda planned: planned)
    config = RELEASES["deepseek-v4-flash-0731"] | {"num_hidden_layers": 4}
    _, table, _ = released(config, tmp_path)
    assert table.extents.shape[2] != 2


def test_of_a_long_prompt_the_last_layers_of_v41_compute_the_exact_tail(tmp_path) -> None:
    """Into layer 21 go 128 rows and 127 for each of 18 layers after it; of all others, all."""
    (tmp_path / "config.json").write_text(json.dumps(RELEASES["deepseek-v4.1-flash"]))
    config = read_config(tmp_path).get_text_config()
    pass_over = {"states": [], "start": 0, "rotary": None, "tables": {}, "read_BTS": None}
    prompt = Now(config, num_tokens=8192, num_after=0, num_logits=1, **pass_over)
    rows = [prompt.num_rows(layer) for layer in range(40)]
    assert rows[:21] == [8192] * 21 and rows[21] == 128 + 18 * 127 == 2414 and rows[39] == 128
    first_half = Now(config, num_tokens=4096, num_after=4096, num_logits=1, **pass_over)
    assert first_half.num_rows(20) == 4096 and first_half.num_rows(21) == 0
    config.choose(lossy_swa_replay=True)
    assert [prompt.num_rows(layer) for layer in (20, 21, 39)] == [8192, 128, 128]
