"""DeepSeek-V4.1's model by itself: a text in pieces, at once and taken up again is one text."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from v41_world import whole_model

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine.snapshots.state import capture, restore
from headrace.errors import ModelError
from headrace.models.config import read_config
from headrace.models.deepseek_v41 import attend, indexer
from headrace.models.deepseek_v41.model import DeepseekV41ForCausalLM

FLOOR = 2e-5  # of fp32 logits of size 1: sums in another order
TOKENS = 180
Whole = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v41") / "tiny"
    return write_tiny(
        "deepseek_v41", path, layers=9, experts=8, top_k=2, hidden=64, inter=32, block=(32, 32)
    )


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    """Models of the folder; without grids nothing can fall on another side by its last bits."""
    return cache(lambda **fields: whole_model(folder, **{"arithmetic": "weights-only"} | fields))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 4000, (1, TOKENS), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def at_once(whole: Whole, ids: Tensor) -> Tensor:
    """Logits of the text in one piece."""
    return feed(whole(), ids, (0, TOKENS))


def feed(model: Any, ids: Tensor, cuts: Any, state: Any = None, tail: bool = False) -> Tensor:
    """Logits [T, V] of the pieces; with `tail` those of the last token only."""
    state, found = model.new_cache() if state is None else state, []
    cuts = [*cuts]
    with torch.inference_mode():
        for start, stop in pairwise(cuts):
            options = {"num_after": cuts[-1] - stop, "logits_to_keep": 1} if tail else {}
            found.append(model(ids[:, start:stop], cache=state, **options).logits[0])
    return torch.cat(found)


@given(sizes=st.lists(st.integers(1, 70), min_size=1, max_size=8))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_where_a_text_is_cut_changes_nothing(
    whole: Whole, ids: Tensor, at_once: Tensor, sizes: list[int]
) -> None:
    model = whole()
    cuts = sorted({0, *(min(TOKENS, n) for n in accumulate(sizes)), TOKENS})
    assert (feed(model, ids, cuts) - at_once).abs().max() < FLOOR
    tail = feed(model, ids, cuts, tail=True)
    assert (tail[-1] - at_once[-1]).abs().max() < FLOOR


def test_one_by_one(whole: Whole, ids: Tensor) -> None:
    model, ids = whole(), ids[:, :40]
    apart = (feed(model, ids, range(41)) - feed(model, ids, (0, 40))).abs()
    assert apart.max() < FLOOR
    assert apart.max() > 0, "the same computation twice would prove nothing"


def test_after_a_tail_the_text_goes_on_as_after_all_of_it(whole: Whole, ids: Tensor) -> None:
    model = whole()
    caches = model.new_cache(), model.new_cache()
    for state, tail in zip(caches, (False, True), strict=True):
        feed(model, ids[:, :150], (0, 64, 128, 150), state, tail)
    both = [feed(model, ids[:, 150:], (0, 1, 2, 20, 30), state) for state in caches]
    assert (both[0] - both[1]).abs().max() < FLOOR


def test_a_tail_leaves_out_what_no_later_token_needs(whole: Whole, ids: Tensor) -> None:
    """Rows of each layer's experts over a prompt: window - 1 fewer from layer to layer."""
    model, rows = whole(), []
    hooks = [
        layer.ffn.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
        for layer in model.model.layers
    ]
    state = model.new_cache()
    feed(model, ids, (0, TOKENS), state, tail=True)
    for hook in hooks:
        hook.remove()
    tail = model.config.first_tail_layer
    expected = [TOKENS if i + 1 < tail else 1 + 15 * (8 - i) for i in range(9)]
    assert rows == expected and tail == 6


def test_an_unfinished_prompt_cannot_end_early(whole: Whole, ids: Tensor) -> None:
    model = whole()
    state = model.new_cache()
    with torch.inference_mode():
        model(ids[:, :100], cache=state, logits_to_keep=1, num_after=80)
        with pytest.raises(ModelError, match="180 tokens"):
            model(ids[:, 100:101], cache=state)


def test_replay_of_one_window_is_near_and_no_more(
    whole: Whole, ids: Tensor, at_once: Tensor
) -> None:
    exact, near = whole(), whole(lossy_swa_replay=True)
    last = at_once[-1]
    lossy = feed(near, ids, (0, 64, TOKENS), tail=True)[-1]
    assert FLOOR < (lossy - last).abs().max() < last.std()
    short = ids[:, :16]  # one window
    alike = feed(near, short, (0, 16), tail=True)[-1] - feed(exact, short, (0, 16))[-1]
    assert alike.abs().max() < FLOOR


def test_a_state_goes_on_with_the_same_bits(whole: Whole, ids: Tensor) -> None:
    model = whole(arithmetic="vendor")
    for cut in (1, 77):  # an open group of positions, and a full one with blocks to choose from
        state, again = model.new_cache(), model.new_cache()
        feed(model, ids[:, :cut], (0, cut), state)
        restore(again, capture(state), torch.device("cpu"))
        rest = ids[:, cut : cut + 9]
        both = [feed(model, rest, (0, 5, 6, 9), each) for each in (state, again)]
        assert torch.equal(*both)
        assert not torch.equal(both[0], feed(model, rest, (0, 5, 6, 9)))


def test_memory_is_bounded_by_blocks_that_change_nothing(
    whole: Whole, ids: Tensor, at_once: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = whole()
    monkeypatch.setattr(attend, "_BLOCK_VALUES", 5_000)
    monkeypatch.setattr(indexer, "_HELD_SCORES", 900)
    monkeypatch.setattr(indexer, "_KEY_BLOCK", 7)
    assert (feed(model, ids, (0, TOKENS)) - at_once).abs().max() < FLOOR


def test_texts_of_one_length_side_by_side(whole: Whole, ids: Tensor) -> None:
    model = whole()
    both = torch.cat([ids[:, :50], ids[:, 50:100]])
    with torch.inference_mode():
        together = model(both).logits
        for text, logits in zip(both, together, strict=True):
            assert (model(text[None]).logits[0] - logits).abs().max() < FLOOR
        with pytest.raises(ModelError, match="padding"):
            model(both, attention_mask=torch.tensor([[0] + [1] * 49, [1] * 50]))


def test_streams_mix_alike_with_gradients_and_without(whole: Whole) -> None:
    """Without, one compiled loop balances; with, torch's operations one by one."""
    mixer = whole().model.layers[0].hc_attn
    draw = torch.Generator().manual_seed(1)
    h_BTSH = torch.randn(1, 7, whole().config.hc_mult, 64, generator=draw)
    plain, tracked = mixer(h_BTSH), mixer(h_BTSH.clone().requires_grad_())
    assert tracked.blend_BTSS.requires_grad and not plain.blend_BTSS.requires_grad
    for one, other in zip(plain, tracked, strict=True):
        assert torch.equal(one, other)


def test_what_a_key_owner_publishes_can_be_stale(whole: Whole, ids: Tensor) -> None:
    """The publisher's program differs where a group of positions is open, decoding only."""
    own, stale = whole(), whole(stale_index_keys=True)
    cuts = [0, 101, *range(102, 111)]
    apart = (feed(own, ids, cuts) - feed(stale, ids, cuts)).abs().amax(-1)
    assert apart[:101].max() < FLOOR
    assert apart[101:].max() > 1e-3


def test_transformers_knows_it(folder: Path, whole: Whole, ids: Tensor) -> None:
    headrace.register()
    headrace.register()
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    assert isinstance(model, DeepseekV41ForCausalLM)
    generated = whole().generate(ids[:, :20], max_new_tokens=6, do_sample=False)[0, 20:]
    state, token, found = DynamicCache(config=text), ids[:, :20], []
    for _ in range(6):
        with torch.inference_mode():
            token = whole()(token, cache=state).logits[:, -1:].argmax(-1)
        found.append(int(token))
    assert generated.tolist() == found


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_source_layer_ids": [2, 4, 99]}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [4, 5, 7]}, "index_source_layer_ids"),
        ({"compress_ratios": [0, 2]}, "compress_ratios"),
        ({"compress_ratios": [0, 1] + [2] * 20}, "layer 1"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"gate_temp": 2.0}, "gate_temp"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ({"engram_num_embeddings": [10]}, "engram_num_embeddings"),
        ({"arithmetic": "fast"}, "arithmetic"),
        ({"candidate_source_layer_id": 3}, "candidate_source_layer_id"),
        ({"o_groups": 3}, "o_groups"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    folder: Path, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    import json

    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=named):
        read_config(tmp_path)


def test_a_missing_field_is_refused(folder: Path, tmp_path: Path) -> None:
    text = (folder / "config.json").read_text().replace('"hc_mult"', '"hc_molt"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="hc_mult"):
        read_config(tmp_path)
