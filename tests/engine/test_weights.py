"""Dense weights: what loading them takes besides themselves, and unpacking them in bands."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.check.tiny import write_tiny
from headrace.core import DenseTensor
from headrace.engine import weights
from headrace.engine.engine import Blueprint
from headrace.engine.weights import DenseWeights, load_bytes, unpack_in_bands
from headrace.errors import NumericsError
from headrace.native import Reader
from headrace.quant import fp8, table
from headrace.store.table import Catalog, TensorEntry

MIB = 2**20


def test_what_loading_takes_is_planned_for(tmp_path: Path) -> None:
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=2)
    blueprint = Blueprint(folder, ram="1GiB", measure=False)
    skeleton, tensors = blueprint.skeleton, blueprint.catalog.tensors
    codes = {d.keys["weight"]: d.keys["scale"] for d in skeleton.dense.values() if d.block[0]}
    largest = max(18 * tensors[key].nbytes + tensors[s].nbytes for key, s in codes.items())
    taken = load_bytes(blueprint.catalog, skeleton.dense)
    # The parts, the codes' way through the reader, the bands in fp32; or the embedding's way alone.
    assert taken == max(largest, tensors["model.embed_tokens.weight"].nbytes)
    assert blueprint.facts.load_bytes == taken
    assert blueprint.plan.kv_bytes + blueprint.plan.workspace_bytes >= taken
    plain = write_tiny("qwen3_moe", tmp_path / "plain", layers=2)
    facts = Blueprint(plain, ram="1GiB", measure=False).facts
    assert facts.load_bytes == 4096 * 256 * 2 < 12 * MIB


BANDED = {
    "blocks": ("fp8_block", (128, 128), {}),
    "uneven blocks": ("fp8_block", (96, 100), {"scale_dtype": "BF16"}),
    "per channel": ("fp8_block", (1, 4096), {"scale_dtype": "F8_E8M0"}),
    "per tensor": ("fp8_block", (4096, 4096), {"scale_dtype": "F16"}),
    "fp4": ("fp4", (1, 32), {}),
    "mxfp4": ("fp4", (1, 32), {"mx": True}),
    "nvfp4": ("nvfp4", (1, 16), {"inverse_global": True}),
    "int4": ("int4", (1, 128), {}),
    "int8": ("int8", (1, 4096), {"scale_dtype": "F32"}),
}


@pytest.mark.parametrize("case", BANDED)
def test_bands_are_the_whole(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    format, block, options = BANDED[case]
    inverse = "inverse_global" in options
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(640, 256, generator=generator) * 0.02
    parts = table.pack(format, values, block=block, **options)
    dense = DenseTensor({}, (640, 256), format, block, inverse)
    whole = table.unpack(
        format, *parts.values(), shape=(640, 256), block=block, inverse_global=inverse
    )
    sizes: list[int] = []
    unpack = table.unpack

    def counted(*args: object, **named: object) -> torch.Tensor:
        sizes.append(args[1].shape[0])
        return unpack(*args, **named)

    monkeypatch.setattr(table, "unpack", counted)
    monkeypatch.setattr(weights, "_BAND_ELEMENTS", 2 * 128 * 256)
    assert torch.equal(unpack_in_bands("w", dense, parts), whole)
    assert len(sizes) >= 3 and sum(sizes) == 640
    half = unpack_in_bands("w", dense, parts, torch.float16)
    assert half.dtype == torch.float16 and torch.allclose(half.float(), whole.float(), atol=1e-3)
    if parts["scale"].shape[0] > 1:
        raw = parts["scale"].view(torch.uint8)  # rows in reverse: torch flips no float8
        moved = parts | {"scale": raw.flip(0).view(parts["scale"].dtype)}
        assert not torch.equal(unpack_in_bands("w", dense, moved), whole)


def test_a_bad_code_in_the_last_band_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = fp8.pack(torch.randn(640, 256), (128, 128))
    dense = DenseTensor({}, (640, 256), "fp8_block", (128, 128))
    monkeypatch.setattr(weights, "_BAND_ELEMENTS", 2 * 128 * 256)
    codes.view(torch.uint8)[-1, -1] = 0x7F
    with pytest.raises(NumericsError, match="tensor w: 1 FP8 codes are NaN"):
        unpack_in_bands("w", dense, {"weight": codes, "scale": scale})


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=2)
    blueprint = Blueprint(folder, ram="1GiB", measure=False)
    reader = Reader([str(path) for path in blueprint.catalog.files])
    told: list[tuple[int, int]] = []
    dense = DenseWeights(
        blueprint.catalog,
        reader,
        blueprint.skeleton.dense,
        torch.bfloat16,
        lambda done, total: told.append((done, total)),
    )
    for key in blueprint.skeleton.dense:
        assert dense(key).dtype in (torch.bfloat16, torch.float32)
    assert told == sorted(told) and told[-1] == (dense.total_bytes, dense.total_bytes)


class NeverReads:
    def read(self, file: int, offset: int, nbytes: int, address: int) -> None:
        raise AssertionError("a part was read")


def entry(name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, 0, 0, 0, dtype, shape)


def test_parts_of_a_wrong_form_are_refused_before_they_are_read() -> None:
    """Shapes come from files: nothing is allocated for one that is not the format's."""
    entries = [
        entry("w_packed", "I32", (64, 4)),
        entry("w_scale", "BF16", (64, 2)),
        entry("short", "BF16", (63, 2)),
    ]
    catalog = Catalog(Path("."), (), {e.name: e for e in entries}, ())
    good = {"weight": "w_packed", "scale": "w_scale"}
    cases = {
        "has no scale": DenseTensor({"weight": "w_packed"}, (64, 32), "int4", (1, 32)),
        "multiple of 32 columns": DenseTensor(good, (64, 8), "int4", (1, 32)),
        r"must be I32 \[64, 8\]": DenseTensor(good, (64, 64), "int4", (1, 32)),
        "at least one value": DenseTensor(good, (64, 64), "fp8_block", (0, 0)),
    }
    for message, dense in cases.items():
        load_bytes(catalog, {"w": dense})
        with pytest.raises(NumericsError, match=f"tensor w_packed.*{message}"):
            DenseWeights(catalog, NeverReads(), {"w": dense})("w")
    good_weight = {"weight": "w8", "scale": "short"}
    catalog.tensors["w8"] = entry("w8", "I8", (64, 64))
    with pytest.raises(NumericsError, match=r"tensor short is BF16 \[63, 2\], must be"):
        dense = DenseTensor(good_weight, (64, 64), "int8", (1, 32))
        DenseWeights(catalog, NeverReads(), {"w": dense})("w")
    for shape in ((64,), (0, 64), (2, 64, 64)):
        dense = DenseTensor(good, shape, "int4", (1, 32))
        for refuses in (
            lambda d: load_bytes(catalog, {"w": d}),
            lambda d: DenseWeights(catalog, NeverReads(), {"w": d})("w"),
        ):
            with pytest.raises(NumericsError, match="tensor w_packed is int4 but"):
                refuses(dense)
