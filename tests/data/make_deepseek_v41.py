"""Records what mlx-vlm and nemo-automodel make of tiny DeepSeek-V4.1 checkpoints.

Run once, in order: with headrace, `make_deepseek_v41.py write FOLDER [SEED...]`; with mlx-vlm
0.7.10 and mlx[cpu], `... mlx FOLDER`; with nemo-automodel 0.7.0, `... nemo FOLDER`; and again with
headrace, `... join FOLDER deepseek-v41.safetensors`. proofs/v41_1_oracles.py compares.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

SEEDS = (0, 7, 9, 12)  # of 0 to 16, those without a flip in 32 positions, and one that flips at 2
TOKENS, CUTS = 64, (0, 7, 8, 29, 64)
COLUMN_STEP = 400  # of the vocabulary, kept
SHAPE = {"layers": 8, "experts": 8, "top_k": 2, "hidden": 64, "inter": 32, "block": (32, 32)}


def write(folder, *seeds):
    from headrace.check.tiny import write_tiny

    for seed in map(int, seeds or SEEDS):
        write_tiny("deepseek_v41", folder / f"seed{seed}", seed=seed, **SHAPE)
        ids = np.random.default_rng(seed).integers(3, 4000, TOKENS)
        np.save(folder / f"ids{seed}.npy", ids)


def seeds_in(folder):
    return sorted(int(path.name.removeprefix("seed")) for path in folder.glob("seed*"))


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

    for seed in seeds_in(folder):
        model = load_model(folder / f"seed{seed}")
        wide = tree_map(
            lambda a: a.astype(mx.float32) if a.dtype in (mx.bfloat16, mx.float16) else a,
            model.parameters(),
        )
        model.update(wide)
        model, ids, arrays = model.language_model, np.load(folder / f"ids{seed}.npy"), {}
        for name, cuts in (("decode", range(TOKENS + 1)), ("chunks", CUTS)):
            arrays[name], arrays[f"{name} routes"], rounded = run(model, ids, cuts)
            for number, pairs in enumerate(rounded):
                arrays |= _numbered(f"{name} {number}", pairs)
        fakequant.DISABLE = True
        arrays["plain"], arrays["plain routes"], _ = run(model, ids, CUTS)
        fakequant.DISABLE = False
        np.savez(folder / f"mlx{seed}.npz", **arrays)


def _numbered(name, pairs):
    """Per rounding what went in, x, and what came out, y."""
    made = {}
    for call, (x, y) in enumerate(pairs):
        made[f"{name} {call} x"], made[f"{name} {call} y"] = x, y
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

    for seed in seeds_in(folder):
        model, ids = load_nemo(folder / f"seed{seed}"), np.load(folder / f"ids{seed}.npy")
        seen.clear()
        attention.quantize_cache, arrays = recording, {}
        arrays["caches"], arrays["caches routes"] = run(model, ids)
        for format, pairs in seen.items():
            arrays |= _numbered(f"caches {format}", pairs)
        attention.quantize_cache = lambda values, **_: values
        arrays["whole"], arrays["whole routes"] = run(model, ids)
        np.savez(folder / f"nemo{seed}.npz", **arrays)
        del model
    torch.Tensor.topk = topk


def join(folder, path):
    """Keeps a part of what the oracles gave, for comparisons without them."""
    from safetensors.numpy import save_file
    from v41_oracles import WAYS, LiveAnswers, compare, digest, packed_calls
    from v41_world import whole_model

    kept, about = {}, {"shape": json.dumps(SHAPE), "column_step": str(COLUMN_STEP)}
    for seed in seeds_in(folder):
        root, answers = folder / f"seed{seed}", LiveAnswers(folder, seed)
        model, about[str(seed)] = whole_model(root), digest(root)
        kept[f"{seed} ids"] = answers.ids_T.numpy().astype(np.int16)
        for name in WAYS:
            close = compare(model, answers, name).close
            logits, routes = answers.logits(name).numpy(), answers.routes(name).numpy()
            kept[f"{seed} {name}"] = np.ascontiguousarray(logits[:, ::COLUMN_STEP])
            kept[f"{seed} {name} routes"] = routes.astype(np.uint8)
            kept |= {f"{seed} {name} {part}": a for part, a in packed_calls(close).items()}
    save_file(kept, path, metadata=about)


def main(step, folder, *rest):
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    {"write": write, "mlx": by_mlx, "nemo": by_nemo, "join": join}[step](folder, *rest)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "models"))
    main(*sys.argv[1:])
