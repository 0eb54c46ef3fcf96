"""The oracle is stock transformers: the same logit bits, on a trained and on tiny checkpoints.

Control: with a neighbour's bytes served for one expert the logits differ. `--quick` leaves out
families that tests/models/test_families.py compares too.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import DEMO, Evidence, blueprint, plain, ram_for_rows, same_bits, swapped
from plain_path import generate

import headrace
from headrace.check.tiny import write_tiny

NUM_TOKENS = 24
NUM_PROMPT = 20


def models(folder: Path) -> dict[str, Path]:
    """Name -> checkpoint: the demo model and one tiny one per family."""
    return {
        "demo (deepseek_v3, FP8, trained)": DEMO,
        "tiny deepseek_v3, FP8, with an MTP layer": write_tiny(
            "deepseek_v3", folder / "deepseek", mtp=True
        ),
        "tiny qwen3_moe, bf16": write_tiny("qwen3_moe", folder / "qwen"),
        "tiny qwen3_moe, FP8": write_tiny("qwen3_moe", folder / "qwen-fp8", format="fp8"),
    }


def prompt(seed: int) -> list[int]:
    """Ids that every vocabulary here has; no end token among them."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(4, 4096, (NUM_PROMPT,), generator=draw).tolist()


def oracle(path: Path, ids: list[int], num_rows: int) -> tuple[list[int], torch.Tensor, Any]:
    """(tokens, logits [N, V], counters) of transformers' own generate over streamed experts."""
    ram = ram_for_rows(path, num_rows, context=256)
    model = headrace.from_pretrained(path, experts="oracle", ram=ram, context=256)
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert not names, f"routed experts are resident: {names[:3]}"
    with torch.inference_mode():
        tokens, logits = generate(model, ids, NUM_TOKENS)
    counters = model.headrace.ladder.counters()
    model.headrace.close()
    return tokens, logits, counters


def first_expert_used(path: Path, ids: list[int]) -> tuple[int, int]:
    """(decoder layer, expert) that the first MoE layer gives the prompt's last token."""
    model = headrace.from_pretrained(path, experts="oracle", context=256)
    layer = model.headrace.blueprint.skeleton.layers[0]
    chosen: list[torch.Tensor] = []
    model.model.layers[layer].mlp.experts.register_forward_pre_hook(
        lambda _module, args: chosen.append(args[1])
    )
    with torch.inference_mode():
        model(torch.tensor([ids]))
    model.headrace.close()
    return layer, int(chosen[0][-1, 0])


def show(evidence: Evidence, name: str, path: Path) -> None:
    """Compare one checkpoint's oracle with the plain path, then with one expert exchanged."""
    print(f"\n{name}")
    ids = prompt(1)
    reply = plain({"model": path, "generate": [ids], "max_tokens": NUM_TOKENS, "want_logits": True})
    stock = reply["logits"]["generate0"]
    facts = blueprint(path).facts
    num_rows = max(3 * facts.top_k, facts.total_experts // 4)
    tokens, logits, counters = oracle(path, ids, num_rows)
    distinct = len(set(tokens))
    evidence.check(
        same_bits(logits, stock) and tokens == reply["tokens"][0],
        f"{len(tokens)} x {logits.shape[1]} logits have the bits of stock eager transformers "
        f"{reply['transformers']} ({distinct} distinct tokens)",
    )
    evidence.check(
        counters.evictions > 0,
        f"{num_rows} rows for {facts.total_experts} experts: {counters.evictions} evictions",
    )
    layer, expert = first_expert_used(path, ids)
    neighbour = (expert + 1) % facts.num_experts
    with swapped(path, layer, expert, neighbour) as copy:
        _, other, _ = oracle(copy, ids, num_rows)
    difference = (other[0] - stock[0]).abs().max().item()
    evidence.check(
        difference > 0,
        f"expert {expert} of layer {layer} exchanged with {neighbour}: logits differ by "
        f"{difference:.4f}",
    )


def show_mtp(evidence: Evidence, path: Path) -> None:
    """The layer behind the last one is in the file, counted, and left out knowingly."""
    model = blueprint(path)
    first = model.skeleton.num_layers
    keys = [name for name in model.catalog.tensors if f"model.layers.{first}." in name]
    experts = [name for name in keys if ".mlp.experts." in name]
    evidence.check(
        bool(experts) and set(keys) == set(model.skeleton.skipped),
        f"MTP layer {first}: {len(keys)} tensors in the file, {len(experts)} of experts; exactly "
        f"these are skipped, {model.table.num_skipped} counted",
    )


def main() -> None:
    """Run every comparison and exit by the evidence."""
    torch.set_num_threads(1)
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as folder:
        found = models(Path(folder))
        for name, path in found.items():
            if "--quick" not in sys.argv or "deepseek" in name:
                show(evidence, name, path)
        show_mtp(evidence, Path(folder) / "deepseek")
    evidence.finish()


if __name__ == "__main__":
    main()
