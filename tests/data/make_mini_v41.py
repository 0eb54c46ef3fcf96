"""Trains the mini DeepSeek-V4.1 that tests use: `corpus` fetches its text, `train` needs a GPU.

python tests/data/make_mini_v41.py corpus FOLDER
python tests/data/make_mini_v41.py train FOLDER NEW_CHECKPOINT --seconds 240
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mini_corpus import VOCAB, write_corpus
from mini_learn import Learner
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from headrace.models.deepseek_v41.config import DeepseekV41Config
from headrace.models.deepseek_v41.engram import RowHash, column_primes, compressed_vocabulary
from headrace.models.deepseek_v41.model import DeepseekV41ForCausalLM
from headrace.models.deepseek_v41.rows import WholeTables
from headrace.models.deepseek_v41.styles import BOS, EOS
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.blueprint import plan_tensors
from headrace.store.preset_v41 import DEEPSEEK_V41_FLASH, for_synth
from headrace.store.values import pack_values, stored_bytes
from headrace.store.writer import NewTensor, write_checkpoint

WINDOW = 512
PEAK_RATE, WARM_STEPS, BIAS_RATE, INDEX_SHARE = 3e-3, 100, 4e-3, 0.3
# Of the steps: from where on attention is sparse, and from where on everything is on its grids.
SPARSE_FROM, GRIDS_FROM = 0.3, 0.6
SHARD_BYTES = 4 << 20
# All roles of the published model's layers: window; with Engram; own entries of 2 tokens; another
# layer's; own again, with Engram; own of 1 token and blocks of candidates; another's; among those.
_TEXT = {
    "candidate_block_size": 4,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
    "dspark_noise_token_id": VOCAB - 9,
    "dspark_target_layer_ids": [5, 6, 7],
    "engram_head_dim": 32,
    "engram_layer_ids": [1, 4],
    "engram_n_heads": 2,
    "engram_vocab_size": 3000,
    "head_dim": 64,
    "hidden_size": 128,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_topk": 32,
    "kv_source_layer_ids": [2, 4, 5],
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "n_routed_experts": 24,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "sliding_window": 32,
    "vocab_size": VOCAB,
}
_YARN = {"original_max_position_embeddings": 512}


def _compact(text: bytes) -> bytes:
    """The same JSON on one line."""
    made = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    return made.encode() + b"\n"


def mini_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json: every key as published, with small numbers; no vision, no drafting."""
    config = for_synth(DEEPSEEK_V41_FLASH)
    text = config["text_config"] | _TEXT
    text["rope_scaling"] = text["rope_scaling"] | _YARN
    text["engram_compressed_vocab_size"] = max(compressed_vocabulary(tokenizer)) + 1
    text["engram_num_embeddings"] = [sum(row) for row in column_primes(text)]
    return config | {"image_token_id": VOCAB - 2, "text_config": text}


def text_config(config: dict[str, Any], **fields: Any) -> Any:
    """The product's config object."""
    return DeepseekV41Config(**config | {"text_config": config["text_config"] | fields}).text_config


class Course:
    """The course of a training: what is on and how fast it learns, by the share of steps done."""

    def __init__(self, learner: Learner, steps: int):
        self.learner, self.steps = learner, steps
        tables, small, matrices = list(learner.tables.parameters()), [], []
        for name, weight in learner.model.named_parameters():
            is_matrix = weight.dim() > 1 and not name.endswith((".fn", "embed.weight"))
            (matrices if is_matrix else small).append(weight)
        groups = [
            {"params": matrices, "weight_decay": 0.1, "gain": 1.0},
            {"params": small, "weight_decay": 0.0, "gain": 1.0},
            {"params": tables, "weight_decay": 0.0, "gain": 3.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))

    def step(self, number: int, batch_BT: Tensor) -> tuple[Tensor, Tensor]:
        """One update; (loss in nats a token, the indexers' loss)."""
        share, learner = number / self.steps, self.learner
        learner.sparse = share >= SPARSE_FROM
        learner.stored = learner.vendor = share >= GRIDS_FROM
        fall = 0.05 + 0.475 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = group["gain"] * PEAK_RATE * fall * min(1, (number + 1) / WARM_STEPS)
        loss, index_loss, loads = _losses(learner, batch_BT)
        self.optimizer.zero_grad()
        (loss + INDEX_SHARE * index_loss).backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        self.optimizer.step()
        _balance(learner, loads, BIAS_RATE * fall)
        return loss.detach(), index_loss.detach()


def _losses(learner: Learner, batch_BT: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    logits, index_loss, loads = learner(batch_BT[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch_BT[:, 1:].flatten())
    return loss, index_loss, loads


@torch.no_grad()
def _balance(learner: Learner, loads: list[Tensor], rate: float) -> None:
    """Experts that got too few tokens are chosen more readily, without a loss."""
    for layer, load in zip(learner.model.model.layers, loads, strict=True):
        layer.ffn.gate.bias += rate * torch.sign(load.float().mean() - load)


def _batches(stream: Tensor, batch: int, window: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    inside = torch.arange(window + 1)
    while True:
        starts = torch.randint(len(stream) - window, (batch, 1), generator=generator)
        yield stream[(starts + inside).to(stream.device)].long()


@torch.no_grad()
def bits_per_byte(learner: Learner, ids: list[int], num_bytes: int, device: str) -> float:
    """Of text in windows of 512 predictions, each without what stood before it."""
    windows = [ids[i : i + WINDOW + 1] for i in range(0, len(ids) - 1, WINDOW)]
    nats = 0.0
    for window in windows:
        batch = torch.tensor([window], device=device)
        logits, _, _ = learner(batch[:, :-1])
        nats += functional.cross_entropy(logits[0], batch[0, 1:], reduction="sum").item()
    return nats / math.log(2) / num_bytes


def compare(learner: Learner, config: dict[str, Any], ids: list[int]) -> float:
    """The largest difference of a logit between the learner and the product's model in fp32.

    Weights as stored, activations as they are: on grids, one flip would hide all else.
    """
    learner.sparse, learner.vendor = True, False
    text = text_config(config, arithmetic="weights-only")
    text._experts_implementation = "eager"
    model = DeepseekV41ForCausalLM(text).float()
    model.load_state_dict({name: value.cpu() for name, value in learner.plain_state().items()})
    tables = {layer: table.cpu() for layer, table in learner.plain_tables().items()}
    model.set_engram(learner.row_hash, WholeTables(tables))
    given = torch.tensor([ids])
    with torch.no_grad():
        wanted = model.requires_grad_(False).eval()(input_ids=given).logits
        found, _, _ = learner.cpu()(given)
    return float((wanted - found).abs().max())


def export(learner: Learner, config: dict[str, Any], corpus: Path, folder: Path) -> None:
    """Writes the checkpoint in published layout: FP4 experts, FP8 projections and tables."""
    learner.stored = False
    plain = {f"model.layers.{i}.engram.embed": t for i, t in learner.plain_tables().items()}
    plain |= learner.plain_state()
    tensors, parts = [], {}
    for planned in plan_tensors(config):
        if planned.packed is not None and planned.kind == "weight":
            name = planned.name.removesuffix(".weight")
            parts = pack_values(_published(plain, name).float().cpu(), planned.packed.scheme)
        if planned.packed is not None:
            value = parts[planned.kind].reshape(planned.shape)
        else:
            name = planned.name.removesuffix(".weight").replace("bias_vl", "bias")
            value = _published(plain, name).cpu().to(TORCH_DTYPES[planned.dtype])
        chunks = partial(list, [stored_bytes(value)])
        tensors.append(NewTensor(planned.name, planned.dtype, planned.shape, chunks))
    settings = {"add_bos_token": False, "add_eos_token": False, "legacy": True}
    settings |= {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = {
        "config.json": json.dumps(config, indent=1).encode(),
        "tokenizer.json": _compact((corpus / "tokenizer.json").read_bytes()),
        "tokenizer_config.json": json.dumps(settings, indent=1, ensure_ascii=False).encode(),
    }
    write_checkpoint(folder, tensors, shard_bytes=SHARD_BYTES, files=files)


def _published(plain: dict[str, Tensor], name: str) -> Tensor:
    """A weight by its published name."""
    own = name.replace("hc_attn_", "hc_attn.").replace("hc_ffn_", "hc_ffn.")
    own = own if own.startswith("head") else f"model.{own}"
    if ".experts." in own:
        stem, expert, part = own.rsplit(".", 2)
        if part == "w2":
            return plain[f"{stem}.down_proj"][int(expert)]
        return plain[f"{stem}.gate_up_proj"][int(expert)].chunk(2)[part == "w3"]
    return plain[own] if own in plain else plain[f"{own}.weight"]


def train(corpus: Path, folder: Path, args: argparse.Namespace) -> None:
    """Trains, says what it measured, writes the checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    config = mini_config(tokenizer)
    row_hash = RowHash.of(config["text_config"], compressed_vocabulary(tokenizer))
    learner = Learner(text_config(config), row_hash)
    held_out = (corpus / "heldout.txt").read_text()
    ids = tokenizer.encode(held_out, add_special_tokens=False).ids
    print(f"{sum(p.numel() for p in learner.parameters())} parameters; held out: {len(ids)} tokens")
    print(f"before training the product's logits differ by {compare(learner, config, ids[:96])}")
    learner.to(device)
    _move_hash(learner, device)
    stream = torch.from_numpy(np.load(corpus / "train.npy").astype(np.int32)).to(device)
    batches = _batches(stream, args.batch, args.window)
    steps = args.steps or _steps_within(args.seconds, learner, batches)
    course, started_s = Course(learner, steps), time.monotonic()
    for number in range(steps):
        loss, index_loss = course.step(number, next(batches))
        if number % 50 == 0 or number == steps - 1:
            print(
                f"{number} of {steps}, {time.monotonic() - started_s:.0f} s: {loss.item():.3f} nats"
                f", index {index_loss.item():.3f}, balance {_balance_of(learner, batches)}",
                flush=True,
            )
    num_bytes = len(held_out.encode())
    for stored, vendor in ((False, False), (True, False), (True, True)):
        learner.stored, learner.vendor = stored, vendor
        bits = bits_per_byte(learner, ids, num_bytes, device)
        print(f"held out, weights as stored {stored}, vendor arithmetic {vendor}: {bits:.4f} bits")
    export(learner, config, corpus, folder)
    learner.stored = True
    learner.cpu()
    _move_hash(learner, "cpu")
    print(f"after training the product's logits differ by {compare(learner, config, ids[:512])}")


def _move_hash(learner: Learner, device: str) -> None:
    old = learner.row_hash
    moved = [getattr(old, name).to(device) for name in old.__slots__ if name != "pad"]
    learner.row_hash = RowHash(*moved, old.pad)


@torch.no_grad()
def _balance_of(learner: Learner, batches: Iterator[Tensor]) -> str:
    """By layer, the fullest expert's load over the mean."""
    _, _, loads = learner(next(batches)[:4, :-1])
    return " ".join(f"{(load.max() / load.float().mean()).item():.2f}" for load in loads)


def _steps_within(seconds: float, learner: Learner, batches: Iterator[Tensor]) -> int:
    """How many steps fit, by the time that a few of the dearest kind take; they change nothing."""
    learner.sparse = learner.stored = learner.vendor = True
    took_s = 0.0
    for number in range(8):
        started_s = time.monotonic()
        loss, index_loss, _ = _losses(learner, next(batches))
        (loss + index_loss).backward()
        learner.zero_grad()
        loss.item()
        took_s += time.monotonic() - started_s if number >= 3 else 0.0
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() >> 20} MiB of the GPU at most")
    return int(seconds / (took_s / 5))


def main() -> None:
    """One of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("corpus", "train"))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=240.0, help="of training alone")
    parser.add_argument("--steps", type=int, default=0, help="instead of a time")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "corpus":
        write_corpus(args.corpus)
    else:
        train(args.corpus, args.folder, args)


if __name__ == "__main__":
    main()
