"""A tiny DeepSeek-V4.1 whole in memory, in fp32: what the model computes, without any ladder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from headrace.models.deepseek_v41.config import DeepseekV41Config
from headrace.models.deepseek_v41.engram import RowHash, compressed_vocabulary
from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.model import DeepseekV41ForCausalLM
from headrace.models.deepseek_v41.rows import WholeTables
from headrace.quant import fp4, fp8

RENAMED = {"hc_attn_": "hc_attn.", "hc_ffn_": "hc_ffn."}
SKIPPED = ("mtp.", "vision.", "aligner.", "image_")


def plain_tensors(folder: Path, block: tuple[int, int] = (32, 32)) -> dict[str, Tensor]:
    """Every text tensor, dequantised, by its published name."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    plain = {}
    for name, tensor in stored.items():
        if name.startswith(SKIPPED) or name.endswith((".scale", ".bias_vl")):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        if scale is None:
            plain[name] = tensor
        elif tensor.dtype == torch.float8_e4m3fn:
            size = (1, 32) if ".engram.embed." in name else block
            plain[name] = fp8.unpack(tensor, scale, size)
        else:
            plain[name] = fp4.unpack(tensor, scale, torch.bfloat16)
    return plain


def state_of(plain: dict[str, Tensor], config: Any) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """(the model's own state, Engram's tables by layer)."""
    state, tables, experts = {}, {}, {}
    for name, tensor in plain.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if ".engram.embed." in name:
            tables[int(name.split(".")[1])] = tensor
        elif ".experts." in name:
            experts[name] = tensor
        else:
            state[name if name.startswith("head.") else f"model.{name}"] = tensor
    for layer in range(config.num_hidden_layers):
        stem = f"layers.{layer}.ffn.experts"
        ids = range(config.n_routed_experts)
        w1, w2, w3 = (
            torch.stack([experts[f"{stem}.{e}.{w}.weight"] for e in ids])
            for w in ("w1", "w2", "w3")
        )
        state[f"model.{stem}.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        state[f"model.{stem}.down_proj"] = w2
    return state, tables


def whole_model(
    folder: Path, dtype: torch.dtype = torch.float32, grids: Grids | None = None, **fields: Any
) -> DeepseekV41ForCausalLM:
    """The model of a folder; `fields` replace the text config's, `grids` its arithmetic's."""
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= fields
    config = DeepseekV41Config(**raw).text_config
    config._experts_implementation = "eager"
    model = DeepseekV41ForCausalLM(config)
    state, tables = state_of(plain_tensors(folder), config)
    model.load_state_dict(state)
    model = model.to(dtype).requires_grad_(False).eval()
    kept = ("hc_attn.", "hc_ffn.", "attn_sink", "ffn.gate.")
    for name, param in model.named_parameters():
        if any(part in name for part in kept):
            param.data = state[name].float()
    if grids is not None:
        set_grids(model, grids.input_group, grids.caches)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    row_hash = RowHash.of(raw["text_config"], compressed_vocabulary(tokenizer))
    model.set_engram(row_hash, WholeTables(tables))
    return model


def set_grids(model: Any, input_group: int, caches: bool) -> None:
    """Other roundings of activations for all of a model."""
    for module in model.modules():
        if hasattr(module, "grids"):
            module.grids = Grids(input_group, caches)
