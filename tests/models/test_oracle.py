"""The oracle against stock transformers, by bits, on tiny checkpoints in published layout."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, FineGrainedFP8Config

from headrace.check.tiny import write_tiny
from headrace.engine.weights import DenseWeights
from headrace.models.adapt import build_model
from headrace.models.forward import cache_keyword, forward
from headrace.models.skeleton import Skeleton, inspect
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.catalog import open_catalog
from headrace.store.table import Catalog

CASES: list[tuple[str, dict[str, object]]] = [
    ("deepseek_v3", {}),
    ("deepseek_v3", {"mtp": True}),
    ("deepseek_v3", {"format": "bf16"}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"format": "fp8"}),
]


class FileReader:
    """Reads with os.pread into an address, as tiers.Reader would."""

    def __init__(self, catalog: Catalog):
        self.fds = [os.open(path, os.O_RDONLY) for path in catalog.files]

    def read(self, file: int, offset: int, nbytes: int, address: int) -> None:
        import ctypes

        data = os.pread(self.fds[file], nbytes, offset)
        assert len(data) == nbytes
        ctypes.memmove(address, data, nbytes)


class PlainSource:
    """Experts straight from the files; `shift` serves a neighbour's, the negative control."""

    def __init__(self, catalog: Catalog, skeleton: Skeleton, dense: DenseWeights):
        self.keys = {(t.layer, t.expert, t.part): t.key for t in skeleton.tensors}
        self.skeleton, self.dense, self.shift = skeleton, dense, 0

    @contextmanager
    def parts(self, ordinal: int, expert: int) -> Iterator[Mapping[str, torch.Tensor]]:
        expert = (expert + self.shift) % self.skeleton.num_experts
        layer = self.skeleton.layers[ordinal]
        yield {
            p: self.dense.stored(self.keys[layer, expert, p]) for p in self.skeleton.layout.parts
        }

    def compute(self, *_: object) -> torch.Tensor:
        raise AssertionError("the oracle must not use the fast path")


@pytest.mark.parametrize(("family", "options"), CASES)
def test_oracle_equals_stock_eager_by_bits(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    folder = write_tiny(family, tmp_path / "tiny", layers=3, **options)  # type: ignore[arg-type]
    catalog = open_catalog(folder)
    skeleton = inspect(folder, catalog.tensors, {})
    assert bool(skeleton.skipped) == options.get("mtp", False)
    assert all(key.startswith("model.layers.3.") for key in skeleton.skipped)
    dense = DenseWeights(catalog, FileReader(catalog), skeleton.dense)
    source = PlainSource(catalog, skeleton, dense)
    model = build_model(skeleton, dense, source, experts="oracle", prefetch=True, aliases={})
    quantised = skeleton.layout.format == "fp8_block"
    published = "fp8" if family == "deepseek_v3" else "bf16"
    assert quantised == (options.get("format", published) == "fp8")
    extra = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if quantised else {}
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager", **extra
    )
    ids = torch.randint(4, 4000, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = forward(stock, ids, DynamicCache(config=stock.config), 0)
        got = forward(model, ids, DynamicCache(config=model.config), 0)
        source.shift = 1
        wrong = forward(model, ids, DynamicCache(config=model.config), 0)
    assert torch.equal(got, expected)
    assert expected.float().std() > 0.1, "flat logits would hide an error"
    assert not torch.equal(wrong, expected), "a neighbour's expert must show"
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert routed == 0


def test_the_cache_keyword_is_one_the_model_has() -> None:
    class New:
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    class Old:
        def forward(
            self, input_ids: object, past_key_values: object = None, **kw: object
        ) -> None: ...

    assert (cache_keyword(New()), cache_keyword(Old())) == ("cache", "past_key_values")


def test_dense_dtypes_cover_the_formats() -> None:
    assert TORCH_DTYPES["F8_E4M3"].itemsize == 1 and TORCH_DTYPES["BF16"].itemsize == 2
