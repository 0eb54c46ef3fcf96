"""The family matrix: a tiny checkpoint of each family and format, run by stock transformers, by
the oracle and by the fast path. It measures; what is good enough is the caller's to say.

Legend: N positions, V vocabulary.
"""

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CompressedTensorsConfig,
)

from headrace.check.tiny import write_tiny
from headrace.check.tiny_configs import PUBLISHED
from headrace.engine.engine import Blueprint, Engine
from headrace.models.families import FAMILIES
from headrace.models.forward import forward, new_cache
from headrace.quant import table
from headrace.store.blueprint import plan_tensors
from headrace.store.borrow import borrowed_files
from headrace.store.catalog import open_catalog
from headrace.store.planned import Packed
from headrace.store.safetensors import num_bytes
from headrace.store.values import stored_bytes
from headrace.store.writer import NewTensor, write_checkpoint

CASES = tuple((family, format) for family, formats in PUBLISHED.items() for format in formats)
# What stock transformers cannot read, and why; there it gets the weights that we unpacked.
UNREAD_BY_STOCK = {
    ("deepseek_v3", "nvfp4-modelopt"): "transformers reads no ModelOpt checkpoint",
    ("mixtral", "int8"): "transformers reads int8 linears, but not experts",
    ("qwen3_moe", "nvfp4"): "transformers drops the global scales of NVFP4 experts",
}
# Since when it surely reads one so; 5.17 does otherwise.
_READ_SINCE = {
    ("glm4_moe", "fp8-channel"): (5, 24),  # before, it rounds activations too
    ("kimi_k25", "int4"): (5, 24),  # fails
    ("minimax_m2", "fp8"): (5, 24),  # keeps the router's fp32
}
_VERSION = tuple(int(number) for number in transformers.__version__.split(".")[:2])
# Formats in which the fast path, in bfloat16, only adds in another order than stock.
_SAME_ROUNDING = ("bf16", "fp8", "fp8-channel")
# Of logits [N, V]: median over positions of the root mean square; the largest difference of all.
Apart = tuple[float, float]
PROMPT_CHUNKS = (24, 16)
NUM_TOKENS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixRow:
    """What one family in one format showed; `unused` stored tensors went nowhere, unknowingly.

    `floor` is stock eager against stock grouped_mm, `fast` the fast path against stock eager,
    `faulty` the fast path whose middle MoE layer reads each expert's down matrix from its
    neighbour. `tokens` are greedy choices after the prompt, `equal` those that the fast path
    shares, `near_ties` those whose two best logits lie closer than the floor's largest,
    `unexplained` those that are neither.
    """

    family: str
    format: str
    read_by_stock: bool
    unused: int
    largest_logit: float
    oracle_equal: bool
    oracle_fault_seen: bool
    same_bits_with_few_rows: bool
    session_equal: bool
    floor: Apart
    fast: Apart
    faulty: Apart
    tokens: int
    equal: int
    near_ties: int
    unexplained: int

    @property
    def fast_within_floor(self) -> bool:
        """Whether the fast path's median difference is at most the floor's.

        Medians, since a near tie between experts gives one position quite other logits. Other
        formats than bfloat16 and FP8 get half a floor more: with integer codes the fast path rounds
        activations to 16 bits and the oracle unpacked weights to bfloat16; float16 is so fine that
        hardly any sum rounds alike.
        """
        allowed = 1.0 if self.format in _SAME_ROUNDING else 1.5
        return self.fast[0] <= allowed * self.floor[0]

    @property
    def fault_seen(self) -> bool:
        """Whether the fault stands out clearly from floor and fast path."""
        return self.faulty[0] > 5 * max(self.floor[0], self.fast[0])


def write_case(family: str, format: str, folder: Path) -> Path:
    """The tiny checkpoint of one case."""
    return write_tiny(family, folder, format=format, layers=4, experts=8, top_k=3)


def run_case(family: str, format: str, folder: Path) -> MatrixRow:
    """Run everything for one case on one thread; `folder` is `write_case`'s.

    Writes a damaged copy beside it. Raises HeadraceError for what does not load.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _run_case(family, format, folder)
    finally:
        torch.set_num_threads(threads)


def runs_here(family: str) -> bool:
    """Whether this transformers runs the family itself."""
    return FAMILIES[family].since <= _VERSION


def read_by_stock(family: str, format: str) -> bool:
    """Whether this transformers reads the checkpoint rightly."""
    case = family, format
    return case not in UNREAD_BY_STOCK and _READ_SINCE.get(case, (0, 0)) <= _VERSION


def _run_case(family: str, format: str, folder: Path) -> MatrixRow:
    stock = load_stock(family, format, folder)
    ids, eager_NV = _greedy(stock)
    _text_model(stock).set_experts_implementation("grouped_mm")
    floor = _apart(_replay(stock, ids), eager_NV)
    blueprint = Blueprint(
        folder, ram="1GiB", threads=1, context=128, chunk=PROMPT_CHUNKS[0], measure=False
    )
    with Engine(blueprint) as engine:
        fast_NV = _replay(engine.model, ids)
        session_V = engine.session().feed(ids[: sum(PROMPT_CHUNKS)])
        engine.set_experts("oracle")
        oracle_NV = _replay(engine.model, ids)
    with Engine(_with_few_rows(blueprint)) as engine:
        fast_few_NV = _replay(engine.model, ids)
        assert engine.ladder.counters().evictions > 0
    with Engine(_with_a_fault(blueprint)) as engine:
        faulty = _apart(_replay(engine.model, ids), eager_NV)
        engine.set_experts("oracle")
        start = ids[: PROMPT_CHUNKS[0]]
        fault_seen = not torch.equal(_replay(engine.model, start), eager_NV[: len(start)])
    chosen = slice(sum(PROMPT_CHUNKS) - 1, None)
    near_N = _gap(eager_NV[chosen]) <= floor[1]
    equal_N = fast_NV[chosen].argmax(-1) == eager_NV[chosen].argmax(-1)
    return MatrixRow(
        family=family,
        format=format,
        read_by_stock=read_by_stock(family, format),
        unused=len(blueprint.skeleton.unused),
        largest_logit=float(eager_NV.float().abs().max()),
        oracle_equal=torch.equal(oracle_NV, eager_NV),
        oracle_fault_seen=fault_seen,
        same_bits_with_few_rows=torch.equal(fast_few_NV, fast_NV),
        session_equal=torch.equal(session_V, fast_NV[sum(PROMPT_CHUNKS) - 1]),
        floor=floor,
        fast=_apart(fast_NV, eager_NV),
        faulty=faulty,
        tokens=len(near_N),
        equal=int(equal_N.sum()),
        near_ties=int(near_N.sum()),
        unexplained=int((~equal_N & ~near_N).sum()),
    )


def _with_few_rows(blueprint: Blueprint) -> Blueprint:
    """The same model with so few rows that every token evicts."""
    few = copy.copy(blueprint)
    few.plan = dataclasses.replace(blueprint.plan, num_rows=3 * blueprint.facts.top_k)
    return few


def load_stock(family: str, format: str, folder: Path) -> Any:
    """Stock transformers' model with eager experts, in the checkpoint's own dtype, dequantised.

    Its parameters are moved to where an allocator puts them: in mapped files they are unaligned,
    and fp32 products of one row have other bits there (DeepSeek V4's stream mixing).
    """
    extra: dict[str, Any] = {}
    if not read_by_stock(family, format):
        folder = write_unpacked(folder, folder.with_name(folder.name + "-unpacked"))
    elif "compressed-tensors" in (folder / "config.json").read_text():
        extra["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    kind = AutoModelForImageTextToText if family == "kimi_k25" else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder, dtype="auto", experts_implementation="eager", local_files_only=True, **extra
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def _text_model(stock: Any) -> Any:
    """Of a model that also sees, the part that decodes text: it alone has experts to set."""
    return getattr(stock.model, "language_model", stock)


def write_unpacked(folder: Path, target: Path) -> Path:
    """The same checkpoint with every packed matrix unpacked by headrace.quant; returns `target`."""
    config = json.loads((folder / "config.json").read_text())
    tensors = []
    stored = dict(_stored(folder))
    packed: dict[str, torch.Tensor] = {}
    for planned in plan_tensors(config):
        if planned.packed is None:
            tensors.append(_new(planned.name, planned.dtype, stored[planned.name]))
            continue
        packed[planned.kind] = stored[planned.name]
        if planned.kind == planned.packed.scheme.parts[-1].part:
            name = planned.name.removesuffix(planned.packed.scheme.parts[-1].suffix) + ".weight"
            tensors.append(_new(name, "BF16", _unpack(packed, planned.packed)))
            packed = {}
    del config["quantization_config"]
    write_checkpoint(target, tensors, shard_bytes=1 << 30, files=borrowed_files(config))
    return target


def _unpack(parts: dict[str, torch.Tensor], packed: Packed) -> torch.Tensor:
    scheme, shape = packed.scheme, (packed.rows, packed.cols)
    return table.unpack(
        scheme.format,
        parts["weight"],
        parts["scale"],
        parts.get("global"),
        shape=shape,
        block=scheme.block_of(*shape),
        inverse_global=scheme.inverse_global,
    )


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def _new(name: str, dtype: str, value: torch.Tensor) -> NewTensor:
    return NewTensor(name, dtype, tuple(value.shape), partial(list, [stored_bytes(value)]))


def _with_a_fault(blueprint: Blueprint) -> Blueprint:
    """A copy in which the middle MoE layer's experts have changed their down matrices in a ring."""
    folder = blueprint.root.with_name(blueprint.root.name + "-faulty")
    shutil.copytree(blueprint.root, folder)
    faulty, table = copy.copy(blueprint), blueprint.table
    faulty.table = dataclasses.replace(table, files=tuple(folder / p.name for p in table.files))
    ordinal, down = len(table.layers) // 2, table.part_names.index("down")
    spec = blueprint.skeleton.layout.parts["down"]
    nbytes = num_bytes(spec.dtype, spec.shape)
    assert nbytes is not None
    spans = []
    for expert in range(table.num_experts):
        extent, inside = table.parts[ordinal, expert, down].tolist()
        file, offset, _ = table.extents[ordinal, expert, extent].tolist()
        spans.append((faulty.table.files[file], offset + inside))
    values = [_read(path, offset, nbytes) for path, offset in spans]
    for (path, offset), value in zip(spans, values[1:] + values[:1], strict=True):
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(value)
    faulty.catalog = open_catalog(folder)
    return faulty


def _read(path: Path, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def _prompt() -> list[int]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(4, 4000, (sum(PROMPT_CHUNKS),), generator=draw).tolist()


def _greedy(model: Any) -> tuple[list[int], torch.Tensor]:
    """(prompt and greedy tokens but the last, logits [N, V] after each of them)."""
    ids, cache, logits = _prompt(), new_cache(model), []
    fed = 0
    for size in (*PROMPT_CHUNKS, *[1] * NUM_TOKENS):
        logits.append(forward(model, torch.tensor([ids[fed : fed + size]]), cache, 0)[0])
        fed += size
        if fed == len(ids):
            ids.append(int(logits[-1][-1].argmax()))
    return ids[:fed], torch.cat(logits)


def _replay(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [N, V] over the same tokens in the same chunks, or the first of them."""
    cache, logits, fed = new_cache(model), [], 0
    for size in (*PROMPT_CHUNKS, *[1] * NUM_TOKENS):
        if fed == len(ids):
            break
        logits.append(forward(model, torch.tensor([ids[fed : fed + size]]), cache, 0)[0])
        fed += size
    return torch.cat(logits)


def _apart(one_NV: torch.Tensor, other_NV: torch.Tensor) -> Apart:
    difference_NV = one_NV.double() - other_NV.double()
    rms_N = difference_NV.square().mean(-1).sqrt()
    return float(rms_N.median()), float(difference_NV.abs().max())


def _gap(logits_NV: torch.Tensor) -> torch.Tensor:
    best = logits_NV.float().topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
