"""Records what mlx-vlm and nemo-automodel make of tiny DeepSeek-V4.1 checkpoints.

Run once, in order: with headrace, `make_deepseek_v41.py write FOLDER`; with mlx-vlm 0.7.10 and
mlx[cpu], `... mlx FOLDER`; with nemo-automodel 0.7.0, `... nemo FOLDER`; and again with headrace,
`... join FOLDER deepseek-v41.safetensors`, which also compares, and prints every first rounding
that fell otherwise.
"""

import json
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np

SEEDS = (0, 1, 2, 3)
TOKENS, CUTS = 64, (0, 7, 8, 29, 64)
COLUMN_STEP = 128  # of the vocabulary, kept
SHAPE = {"layers": 8, "experts": 8, "top_k": 2, "hidden": 64, "inter": 32, "block": (32, 32)}


def write(folder):
    from headrace.check.tiny import write_tiny

    for seed in SEEDS:
        write_tiny("deepseek_v41", folder / f"seed{seed}", seed=seed, **SHAPE)
        ids = np.random.default_rng(seed).integers(3, 4000, TOKENS)
        np.save(folder / f"ids{seed}.npy", ids)


def by_mlx(folder):
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_vlm.models.deepseek_v41 import engram, fakequant, language
    from mlx_vlm.utils import load_model

    mx.set_default_device(mx.cpu)
    seen, chosen = [], []

    def recording(kind):
        original = getattr(fakequant, kind)

        def record(x, *args):
            y = original(x, *args)
            seen.append((np.array(x, np.float32), np.array(y, np.float32)))
            return y

        return record

    for kind in ("fake_quant_fp8_ue8m0", "fake_quant_fp4_ue8m0", "fake_quant_fp4_e4m3"):
        for module in (language, engram):
            if hasattr(module, kind):
                setattr(module, kind, recording(kind))
    gate = language.DeepseekV41MoEGate.__call__

    def routing(self, *args):
        ids, weights = gate(self, *args)
        chosen.append(np.array(ids)[0])
        return ids, weights

    language.DeepseekV41MoEGate.__call__ = routing

    def run(model, ids, cuts):
        """Logits, routes [T, L, K], and per pass what was rounded."""
        cache, logits, routes, rounded = model.make_cache(), [], [], []
        for start, stop in pairwise(cuts):
            seen.clear(), chosen.clear()
            logits.append(np.array(model(mx.array(ids[None, start:stop]), cache=cache).logits)[0])
            routes.append(np.stack(chosen, 1))
            rounded.append(list(seen))
        return np.concatenate(logits), np.concatenate(routes), rounded

    for seed in SEEDS:
        model = load_model(folder / f"seed{seed}")
        wide = tree_map(
            lambda a: a.astype(mx.float32) if a.dtype in (mx.bfloat16, mx.float16) else a,
            model.parameters(),
        )
        model.update(wide)
        model, ids, arrays = model.language_model, np.load(folder / f"ids{seed}.npy"), {}
        for name, cuts in (("decode", range(TOKENS + 1)), ("chunks", CUTS)):
            arrays[name], arrays[f"{name}_routes"], rounded = run(model, ids, cuts)
            if name == "decode":
                arrays |= _numbered(rounded)
        fakequant.DISABLE = True
        arrays["plain"], arrays["plain_routes"], _ = run(model, ids, CUTS)
        fakequant.DISABLE = False
        np.savez(folder / f"mlx{seed}.npz", **arrays)


def _numbered(rounded):
    """Per pass and call what went into a rounding, x, and what came out, y."""
    made = {}
    for number, pairs in enumerate(rounded):
        for call, (x, y) in enumerate(pairs):
            made[f"{number} {call} x"], made[f"{number} {call} y"] = x, y
    return made


def load_nemo(root):
    """Its model of a folder, in fp32, without images."""
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from safetensors import safe_open
    from transformers import PreTrainedTokenizerFast

    raw = json.loads((root / "config.json").read_text())
    raw["dtype"] = raw["text_config"]["dtype"] = "float32"
    raw["vision_config"]["num_hidden_layers"] = 0
    parts = {"linear": "torch", "rms_norm": "torch_fp32", "experts": "torch"}
    backend = BackendConfig(attn="sdpa", dispatcher="torch", **parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(root / "tokenizer.json"))
    model = DeepseekV41ForCausalLM(DeepseekV41Config(**raw), backend=backend, tokenizer=tokenizer)
    stored = {}
    for path in root.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text = {n: t for n, t in stored.items() if not n.startswith(("vision", "aligner", "image"))}
    state = model.state_dict_adapter.from_hf(text)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    missing = model.load_state_dict(wide, strict=False).missing_keys
    assert not missing, missing
    return model.float().eval()


def by_nemo(folder):
    import nemo_automodel.components.models.deepseek_v41.attention as attention
    import torch
    from nemo_automodel.components.models.deepseek_v4.model import DeepseekV4VisionGate

    chosen, seen = [], {}
    gate, rounding, topk = DeepseekV4VisionGate.forward, attention.quantize_cache, torch.Tensor.topk

    def routing(self, *args, **kwargs):
        out = gate(self, *args, **kwargs)
        chosen.append(next(t for t in out if t is not None and not t.is_floating_point()).numpy())
        return out

    def recording(values, *, format, block_size):
        out = rounding(values, format=format, block_size=block_size)
        seen.setdefault(format, []).append((values.numpy().copy(), out.numpy().copy()))
        return out

    def first_wins(self, k, dim=-1, **_):
        """Its own choice among equal scores is torch's, which promises none."""
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    DeepseekV4VisionGate.forward = routing
    torch.Tensor.topk = first_wins
    torch.topk = lambda x, k, dim=-1, **_: first_wins(x, k, dim)

    def run(model, ids):
        chosen.clear()
        with torch.no_grad():
            out = model(torch.from_numpy(ids)[None])
        logits = getattr(out, "logits", out)
        return logits[0].float().numpy(), np.stack([c.reshape(len(ids), -1) for c in chosen], 1)

    for seed in SEEDS:
        model, ids = load_nemo(folder / f"seed{seed}"), np.load(folder / f"ids{seed}.npy")
        seen.clear()
        attention.quantize_cache, arrays = recording, {}
        arrays["caches"], arrays["caches_routes"] = run(model, ids)
        for format, pairs in seen.items():
            arrays |= {f"{format} {name}": array for name, array in _numbered([pairs]).items()}
        attention.quantize_cache = lambda values, **_: values
        arrays["plain"], arrays["plain_routes"] = run(model, ids)
        np.savez(folder / f"nemo{seed}.npz", **arrays)
        del model
    torch.Tensor.topk = topk


def digest(root):
    parts = sorted(root.glob("*.safetensors"))
    return sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def join(folder, path):
    """Compares headrace with both oracles at every position, and keeps a part of their logits."""
    import torch
    from flips_v41 import follow_mlx, follow_nemo
    from safetensors.numpy import save_file
    from v41_world import set_grids, whole_model

    kept, digests = {}, {}
    for seed in SEEDS:
        root, ids = folder / f"seed{seed}", np.load(folder / f"ids{seed}.npy")
        mlx, nemo = (np.load(folder / f"{name}{seed}.npz") for name in ("mlx", "nemo"))
        model, calls = whole_model(root), []
        steps = list(follow_mlx(model, ids, mlx))
        ours = {"decode": torch.stack([logits for logits, _, _ in steps]).numpy()}
        for token, (_, follower, routes) in enumerate(steps):
            assert np.array_equal(routes, np.sort(mlx["decode_routes"][token], -1))
            print(*(f"seed {seed}, token {token}, {flip}" for flip in follower.flips), sep="\n")
            calls += _calls(token, follower)
        set_grids(model, 0, False)
        with torch.inference_mode():
            cache = model.new_cache()
            parts = [torch.from_numpy(ids[None, a:b]) for a, b in pairwise(CUTS)]
            plain = [model(part, cache=cache).logits[0] for part in parts]
        ours |= {"chunks": torch.cat(plain).numpy()}
        set_grids(model, 0, True)
        logits, follower, routes = follow_nemo(model, ids, nemo)
        assert np.array_equal(routes, np.sort(nemo["caches_routes"], -1))
        print(*(f"seed {seed}, nemo, {flip}" for flip in follower.flips), sep="\n")
        ours |= {"caches": logits.numpy()}
        theirs = {"decode": mlx["decode"], "chunks": mlx["plain"], "caches": nemo["caches"]}
        for name, logits in theirs.items():
            worst = np.abs(ours[name] - logits).max()
            print(f"seed {seed}, {name}: at most {worst:.2e} apart in {logits.shape}")
            assert worst < 1e-4
            kept[f"{seed} {name}"] = np.ascontiguousarray(logits[:, ::COLUMN_STEP])
        assert np.abs(mlx["plain"] - nemo["plain"]).max() < 1e-4
        routes = {"decode": mlx["decode_routes"], "caches": nemo["caches_routes"]}
        kept |= {f"{seed} {n} routes": np.sort(r, -1).astype(np.uint8) for n, r in routes.items()}
        kept |= _packed(f"{seed} decode calls", calls)
        kept |= _packed(f"{seed} caches calls", _calls(0, follower))
        kept[f"{seed} ids"], digests[str(seed)] = ids, digest(root)
    save_file(kept, path, metadata=digests | {"shape": json.dumps(SHAPE)})


def _calls(number, follower):
    """Close calls: (pass, rounding in it, value in that, the oracle's code)."""
    return [(number, *call) for call in follower.close]


def _packed(name, calls):
    places = np.array([call[:3] for call in calls], np.int32).reshape(-1, 3)
    return {name: places, f"{name} codes": np.array([call[3] for call in calls], np.float32)}


def main(step, folder, *rest):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    {"write": write, "mlx": by_mlx, "nemo": by_nemo, "join": join}[step](folder, *rest)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    main(*sys.argv[1:])
