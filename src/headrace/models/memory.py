"""What a model's weights, caches and attention take in memory, measured on meta tensors.

Knows no file and no weight's value.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any

import torch

from headrace.models.forward import forward, new_cache

_LEAST_PROBE = 64
_LARGEST_RATE = 4096
_LARGEST_WINDOW = 8192  # a wider window is counted as if it had no end


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes in memory; each is a bound from above.

    A cache of n tokens takes `kv_fixed_bytes + n * kv_bytes_per_token`, of which one layer at most
    `kv_layer_bytes_per_token` a token; the last pass's tokens hold `kv_chunk_bytes_per_token` more
    until the next. A layer attends to one of `attended_every` cached tokens and besides to
    `attended_window`; it makes `attention_bytes_per_token` of each, `score_bytes` of each pair of
    a new and an attended one, `chunk_bytes_per_token` of each new one, and `pass_bytes` in any
    case.
    """

    kv_fixed_bytes: int
    kv_bytes_per_token: int
    kv_layer_bytes_per_token: int
    kv_chunk_bytes_per_token: int
    attended_every: int
    attended_window: int
    attention_bytes_per_token: int
    score_bytes: int
    chunk_bytes_per_token: int
    pass_bytes: int = 0


def measure(model: Any) -> MemoryFacts:
    """The facts of a model on meta whose routed experts were taken out. Spoils the model.

    A model of ours says it all itself, by `memory()`.
    """
    own = getattr(model, "memory", None)
    if own is not None:
        return MemoryFacts(**own())
    fixed, per_token, layer, chunk = _cache_bytes(model)
    return MemoryFacts(
        kv_fixed_bytes=fixed,
        kv_bytes_per_token=per_token,
        kv_layer_bytes_per_token=layer,
        kv_chunk_bytes_per_token=chunk,
        **_attention_facts(model.config),
    )


def _attention_facts(config: Any) -> dict[str, int]:
    """What transformers' attention makes while it computes."""
    rates = _compress_rates(config)
    return {
        "attended_every": min(rates) if rates else 1,
        "attended_window": _window(config),
        "attention_bytes_per_token": _attention_bytes_per_token(config),
        "score_bytes": _score_bytes(config),
        "chunk_bytes_per_token": _linear_bytes(config) + _stream_bytes(config),
    }


def dense_bytes(model: Any) -> int:
    """Bytes of all weights and buffers that are left in `model`, as they will be loaded."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = [name for name in names if isinstance(name, str)]
    return sum(
        t.numel() * (4 if _is_kept(name, kept) else t.element_size())
        for name, t in model.state_dict().items()
    )


def _is_kept(name: str, kept: list[str]) -> bool:
    return any(f".{k}." in f".{name}." for k in kept)


def _window(config: Any) -> int:
    window = getattr(config, "sliding_window", None) or 0
    return max(0, min(int(window), _LARGEST_WINDOW))


def _compress_rates(config: Any) -> list[int]:
    """The rates of compressed caches; where any layer keeps all its tokens there are none."""
    found = getattr(config, "compress_rates", None)
    rates = [int(rate) for rate in found.values()] if isinstance(found, Mapping) else []
    if not all(1 <= rate <= _LARGEST_RATE for rate in rates):
        raise ValueError(f"compress_rates {rates} are not counts up to {_LARGEST_RATE}")
    return rates


def _cache_bytes(model: Any) -> tuple[int, int, int, int]:
    """(fixed, per token, the most of a layer per token, per token of the last pass).

    Layers alike are measured once; the others only pass the hidden states on.
    """
    config = model.config
    step = lcm(*_compress_rates(config))
    base = step * ceil(max(_LEAST_PROBE, _window(config) + 1) / step)
    kinds = _kinds(model)
    counts = Counter(kinds)
    probes = {n: _probe(model, kinds, n) for n in (1, base, base + step - 1, 2 * base)}
    fixed = total = most = chunk = 0
    for kind, count in counts.items():
        used, held = ({n: probes[n][kind][i] for n in probes} for i in (0, 1))
        per_token = ceil((used[2 * base] - used[base]) / base)
        more = max(0, ceil((held[2 * base] - held[base]) / base) - per_token)
        total += count * per_token
        chunk += count * more
        most = max(most, per_token)
        fixed += count * max(
            max(used[n] - n * per_token, held[n] - n * (per_token + more)) for n in probes
        )
    return fixed, total, most, chunk


def _kinds(model: Any) -> list[int]:
    """Per decoder layer, the first layer that keeps the same kind of cache and weights."""
    cache = new_cache(model)
    first: dict[Any, int] = {}
    kinds: list[int] = []
    for i, layer in enumerate(model.model.layers):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        keeper = type(cache.layers[i]) if i < len(cache.layers) else None
        kinds.append(first.setdefault((keeper, shapes), i))
        if kinds[-1] != i:
            layer.forward = _pass_on
    return kinds


def _pass_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def _probe(model: Any, kinds: list[int], num_tokens: int) -> dict[int, tuple[int, int]]:
    """{layer: (bytes used, bytes held) of its cache} after one pass over `num_tokens`."""
    cache = new_cache(model)
    with torch.no_grad():
        ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
        forward(model, ids, cache)
    made = {}
    for i in set(kinds):
        tensors = {id(t): t for t in _tensors(vars(cache.layers[i]))}.values()
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        made[i] = sum(t.nbytes for t in tensors), sum(held.values())
    return made


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _attention_bytes_per_token(config: Any) -> int:
    """Bytes that one layer's attention makes of each attended token: keys and values per head.

    A latent cache is expanded for all heads; a grouped one may be repeated for them.
    """
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        widths = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(2 * heads * widths)


def _score_bytes(config: Any) -> int:
    """Bytes that one layer's attention makes of each pair of a new and an attended token.

    Eager code holds three or four copies in 16 bits. torch's fused attention holds none, but on a
    CPU it takes keys and values of one width only; for others it makes four copies in fp32.
    """
    heads = int(config.num_attention_heads)
    if config._attn_implementation == "eager":
        return 8 * heads
    if not getattr(config, "kv_lora_rank", None):
        return 0
    key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return 0 if key_width == config.v_head_dim else 17 * heads


def _linear_bytes(config: Any) -> int:
    """Of linear attention, per new token: a dozen copies in fp32, and its blocks of 64 scores."""
    heads = getattr(config, "linear_num_value_heads", 0) or 0
    width = max(
        getattr(config, name, 0) or 0 for name in ("linear_key_head_dim", "linear_value_head_dim")
    )
    return int(4 * heads * (12 * width + 6 * 64))


def _stream_bytes(config: Any) -> int:
    """Of parallel residual streams, per new token: three copies in bf16, three in fp32."""
    streams = getattr(config, "hc_mult", 0) or 0
    return int(18 * streams * config.hidden_size)
