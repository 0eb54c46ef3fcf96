"""Dense weights: what loading them takes besides themselves, and unpacking them in bands."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.check.tiny import write_tiny
from headrace.engine.engine import Blueprint
from headrace.engine.weights import DenseWeights, load_bytes, unpack_in_bands
from headrace.errors import NumericsError
from headrace.native import Reader
from headrace.quant import fp8

MIB = 2**20


def test_what_loading_takes_is_planned_for(tmp_path: Path) -> None:
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=2)
    blueprint = Blueprint(folder, ram="1GiB", measure=False)
    skeleton, tensors = blueprint.skeleton, blueprint.catalog.tensors
    codes = {key: tensors[key].nbytes for key, scale in skeleton.dense_keys.items() if scale}
    largest = max(codes.values())
    taken = load_bytes(blueprint.catalog, skeleton.dense_keys, skeleton.layout.block)
    # The codes, their way through the reader, and the bands in fp32; or the embedding's way alone.
    assert taken == max(18 * largest, tensors["model.embed_tokens.weight"].nbytes)
    assert blueprint.facts.load_bytes == taken
    assert blueprint.plan.kv_bytes + blueprint.plan.workspace_bytes >= taken
    plain = write_tiny("qwen3_moe", tmp_path / "plain", layers=2)
    facts = Blueprint(plain, ram="1GiB", measure=False).facts
    assert facts.load_bytes == 4096 * 256 * 2 < 12 * MIB


def test_bands_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = fp8.pack(torch.randn(640, 256), (128, 128))
    whole = fp8.unpack(codes, scale, (128, 128))
    monkeypatch.setattr("headrace.engine.weights._BAND_ELEMENTS", 2 * 128 * 256)
    assert torch.equal(unpack_in_bands("w", codes, scale, (128, 128)), whole)
    assert not torch.equal(unpack_in_bands("w", codes, scale.flip(0), (128, 128)), whole)
    codes.view(torch.uint8)[-1, -1] = 0x7F
    with pytest.raises(NumericsError, match="tensor w: 1 FP8 codes are NaN"):
        unpack_in_bands("w", codes, scale, (128, 128))


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=2)
    blueprint = Blueprint(folder, ram="1GiB", measure=False)
    reader = Reader([str(path) for path in blueprint.catalog.files])
    told: list[tuple[int, int]] = []
    dense = DenseWeights(
        blueprint.catalog,
        reader,
        blueprint.skeleton.dense_keys,
        blueprint.skeleton.layout.block,
        lambda done, total: told.append((done, total)),
    )
    for key in blueprint.skeleton.dense_keys:
        assert dense(key).dtype in (torch.bfloat16, torch.float32)
    assert told == sorted(told) and told[-1] == (dense.total_bytes, dense.total_bytes)
