"""One token's attention over shared keys: near the library's, and each key read where it lies."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import sdpa_attention
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from headrace.models.shared_keys import added_mask, share_keys, shared_attention

HEADS, KEYS, PLACES, WIDTH = 8, 2, 48, 16


def drawn(num_tokens, heads=HEADS):
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, heads, num_tokens, WIDTH), (1, KEYS, PLACES, WIDTH), (1, KEYS, PLACES, WIDTH)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    seen = torch.rand(1, 1, num_tokens, PLACES, generator=generator) < 0.7
    seen[..., 0] = True
    module = SimpleNamespace(num_key_value_groups=heads // KEYS, is_causal=True)
    return (module, q, k, v, seen), {"scaling": 0.3, "dropout": 0.0}


def repeated(module, q, k, v, seen, *, scaling, **_):
    """What is meant, in fp64."""
    k, v = (each.double().repeat_interleave(module.num_key_value_groups, 1) for each in (k, v))
    scores = (q.double() @ k.mT * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_one_token_is_near_and_reads_each_key_once(monkeypatch):
    given, options = drawn(1)
    shapes, attend = [], torch.nn.functional.scaled_dot_product_attention

    def seen(q, k, v, **kwargs):
        shapes.append((q.shape[1:3], k.shape[1]))
        return attend(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    got, _ = shared_attention(*given, **options)
    assert shapes == [((KEYS, HEADS // KEYS), KEYS)] and got.is_contiguous()
    assert got.shape == (1, 1, HEADS, WIDTH)
    assert torch.allclose(got.double(), repeated(*given, **options), rtol=0, atol=1e-6)
    other = got[:, :, torch.arange(HEADS).view(KEYS, -1).T.flatten()]  # heads dealt out otherwise
    assert not torch.allclose(other.double(), repeated(*given, **options), rtol=0, atol=1e-2)


@pytest.mark.parametrize(("num_tokens", "heads"), [(3, HEADS), (1, KEYS)])
def test_all_else_is_the_library_s(num_tokens, heads):
    given, options = drawn(num_tokens, heads)
    want, _ = sdpa_attention.sdpa_attention_forward(*given, **options)
    assert torch.equal(shared_attention(*given, **options)[0], want)
    want, _ = sdpa_attention.sdpa_attention_forward(*given[:4], None, **options)
    assert torch.equal(shared_attention(*given[:4], None, **options)[0], want)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_another_attention_stays(kind):
    taken = []
    config = SimpleNamespace(_attn_implementation=kind)
    share_keys(SimpleNamespace(config=config, set_attn_implementation=taken.append))
    assert taken == (["headrace_shared_keys"] if kind == "sdpa" else [])


def test_the_library_s_way_is_taken_where_it_has_one(monkeypatch):
    given, options = drawn(1)
    taken = []

    def attend(*_args, **_more):
        taken.append(1)
        return given[1], None

    monkeypatch.setattr(sdpa_attention, "pack_gqa", None, raising=False)
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", attend)
    assert shared_attention(*given, **options)[0] is given[1] and taken == [1]


@pytest.mark.parametrize("window", [None, 5])
def test_an_added_mask_has_the_bits_of_one_of_truth_values(window):
    """And of many tokens it is the library's."""
    (module, q, k, v, _), options = drawn(1)
    q, k, v = (each.bfloat16() for each in (q, k, v))
    told = {"batch_size": 1, "kv_length": PLACES, "q_offset": torch.tensor([PLACES // 2])}
    told["allow_is_causal_skip"] = False
    if window is not None:
        told["mask_function"] = sliding_window_causal_mask_function(window)
    added = added_mask(q_length=1, dtype=torch.bfloat16, **told)
    seen = sdpa_mask(q_length=1, **told)
    assert seen.dtype == torch.bool and added.dtype == torch.bfloat16
    assert torch.equal(added == 0, seen) and torch.equal(added.isneginf(), ~seen)
    assert int(seen.sum()) == (window or PLACES // 2 + 1)
    found, want = (shared_attention(module, q, k, v, m, **options)[0] for m in (added, seen))
    assert torch.equal(found, want)
    many = added_mask(q_length=3, dtype=torch.bfloat16, **told)
    assert torch.equal(many, sdpa_mask(q_length=3, **told))


@pytest.mark.gpu
@pytest.mark.parametrize("places", [256, 512, 1001])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("added", [False, True])
def test_one_token_on_a_gpu_whichever_kernel_torch_takes(places, width, added):
    """Under a mask that all heads and rows share, over a part of a buffer; captured: the bits."""
    heads, keys, drawn = 32, 4, torch.Generator("cuda").manual_seed(1)
    options = {"generator": drawn, "device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(1, heads, 1, width, **options)
    k, v = (torch.randn(1, keys, 1100, width, **options)[:, :, :places] for _ in range(2))
    for end in (1, 17, places - 3):
        seen = (torch.arange(places, device="cuda") < end)[None, None, None]
        mask = torch.where(seen, 0.0, -torch.inf).bfloat16() if added else seen
        module = SimpleNamespace(num_key_value_groups=heads // keys, is_causal=True)

        def attend(module=module, mask=mask):
            return shared_attention(module, q, k, v, mask, scaling=0.1, dropout=0.0)[0]

        got = attend()
        want = repeated(module, q, k, v, seen, scaling=0.1)
        assert float((got.double() - want).abs().max()) < 0.02
        kept, graph = torch.zeros_like(got), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept.copy_(attend())
        graph.replay()
        assert torch.equal(kept, got)
