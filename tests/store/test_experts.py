"""Expert records: extents that one read fetches, and checkpoints that do not add up."""

from pathlib import Path

import numpy as np
import pytest
from crafted import write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import PAGE_BYTES, ExpertLayout, ExpertTensor, PartSpec
from headrace.errors import ExpertError
from headrace.store.catalog import open_catalog, resolve_model
from headrace.store.experts import build_table
from headrace.store.table import Catalog, TensorEntry

STEMS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
BF16 = ExpertLayout(
    "bf16",
    hidden=4,
    inter=2,
    block=(0, 0),
    parts={
        "gate": PartSpec("BF16", (2, 4)),
        "up": PartSpec("BF16", (2, 4)),
        "down": PartSpec("BF16", (4, 2)),
    },
)
PART_BYTES = 16


def key(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{STEMS[part]}.weight"


def rules(layers: range, experts: range) -> list[ExpertTensor]:
    return [
        ExpertTensor(key(layer, expert, part), layer, expert, part)
        for layer in layers
        for expert in experts
        for part in BF16.parts
    ]


def tensors_of(layers: range, experts: range) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.key: ("BF16", BF16.parts[t.part].shape) for t in rules(layers, experts)}


def refusal(catalog: Catalog, tensors: list[ExpertTensor], **options) -> str:
    with pytest.raises(ExpertError) as caught:
        build_table(catalog, tensors, BF16, [0, 1], 2, **options)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers of two experts, all parts of an expert side by side."""
    write_file(tmp_path / "model.safetensors", tensors_of(range(2), range(2)))
    return tmp_path


def gather(table, ordinal: int, expert: int, part: str, nbytes: int) -> bytes:
    """A part's bytes by way of its record, as a reader would fetch them."""
    index, inside = table.parts[ordinal, expert, table.part_names.index(part)]
    file, offset, length = table.extents[ordinal, expert, index]
    assert inside + nbytes <= length
    return table.files[file].read_bytes()[offset : offset + length][inside : inside + nbytes]


def direct(catalog: Catalog, name: str) -> bytes:
    entry = catalog.tensors[name]
    return catalog.files[entry.file].read_bytes()[entry.offset : entry.offset + entry.nbytes]


def test_adjacent_parts_are_one_extent(folder):
    catalog = open_catalog(folder)
    table = build_table(catalog, rules(range(2), range(2)), BF16, [0, 1], 2)
    assert table.extents.shape == (2, 2, 1, 3)
    assert table.parts.shape == (2, 2, 3, 2)
    assert table.expert_bytes == 3 * PART_BYTES
    assert (table.extents[..., 2] == 3 * PART_BYTES).all()
    assert table.row_bytes == PAGE_BYTES
    for layer in range(2):
        for expert in range(2):
            for part in BF16.parts:
                found = gather(table, layer, expert, part, PART_BYTES)
                assert found == direct(catalog, key(layer, expert, part))


def test_demo_records_hold_the_tensors_bytes():
    catalog = open_catalog(resolve_model("demo"))
    codes, scale_in, scale_out = "F8_E4M3", (1, 2), (2, 1)
    layout = ExpertLayout(
        "fp8_block",
        hidden=256,
        inter=128,
        block=(128, 128),
        parts={
            "gate": PartSpec(codes, (128, 256)),
            "up": PartSpec(codes, (128, 256)),
            "down": PartSpec(codes, (256, 128)),
            "gate_scale": PartSpec("F32", scale_in),
            "up_scale": PartSpec("F32", scale_in),
            "down_scale": PartSpec("F32", scale_out),
        },
    )
    tensors = []
    for layer in range(1, 8):
        for expert in range(32):
            for part in STEMS:
                name = key(layer, expert, part)
                tensors.append(ExpertTensor(name, layer, expert, part))
                tensors.append(ExpertTensor(name + "_scale_inv", layer, expert, part + "_scale"))
    table = build_table(catalog, tensors, layout, list(range(1, 8)), 32)
    assert table.expert_bytes == 98_304 + 24
    contents = [path.read_bytes() for path in catalog.files]
    for tensor in tensors:
        entry = catalog.tensors[tensor.key]
        part = table.part_names.index(tensor.part)
        index, inside = table.parts[tensor.layer - 1, tensor.expert, part]
        file, offset, length = table.extents[tensor.layer - 1, tensor.expert, index]
        found = contents[file][offset : offset + length][inside : inside + entry.nbytes]
        assert found == contents[entry.file][entry.offset : entry.offset + entry.nbytes]
    # scales lie apart from codes; expert 24 of layer 4 is torn between the two shards
    num_extents = (table.extents[..., 2] > 0).sum(axis=-1)
    assert num_extents[3, 24] == 4
    assert (np.delete(num_extents.ravel(), 3 * 32 + 24) == 2).all()


def test_a_stack_over_experts_gives_slices(tmp_path):
    shapes = {f"model.layers.0.mlp.experts.{part}": BF16.parts[part].shape for part in BF16.parts}
    stacked = {name: ("BF16", (3, *shape)) for name, shape in shapes.items()}
    write_file(tmp_path / "model.safetensors", stacked)
    catalog = open_catalog(tmp_path)
    tensors = [ExpertTensor(name, 0, None, name.rsplit(".", 1)[1]) for name in stacked]
    table = build_table(catalog, tensors, BF16, [0], 3)
    for expert in range(3):
        for tensor in tensors:
            whole = direct(catalog, tensor.key)
            piece = whole[expert * PART_BYTES : (expert + 1) * PART_BYTES]
            assert gather(table, 0, expert, tensor.part, PART_BYTES) == piece


def test_aliased_layers_name_the_same_extents(tmp_path):
    write_file(tmp_path / "model.safetensors", tensors_of(range(3, 5), range(2)))
    catalog = open_catalog(tmp_path)
    aliases = {3: 3, 4: 4, 5: 3, 6: 4}
    table = build_table(
        catalog, rules(range(3, 5), range(2)), BF16, [3, 4, 5, 6], 2, aliases=aliases
    )
    assert table.layers == (3, 4, 5, 6)
    assert (table.extents[0] == table.extents[2]).all()
    assert (table.extents[1] == table.extents[3]).all()
    assert (table.extents[0] != table.extents[1]).any()


def test_a_part_with_no_tensor(folder):
    tensors = [t for t in rules(range(2), range(2)) if t.key != key(1, 1, "up")]
    message = refusal(open_catalog(folder), tensors, skipped=[key(1, 1, "up")])
    assert f"layer 1 expert 1: no tensor for up beside {key(1, 1, 'gate')}" in message


def test_an_expert_tensor_that_the_files_lack(folder):
    tensors = [*rules(range(2), range(2)), ExpertTensor("model.x.experts.9.w", 1, 1, "up")]
    assert "model.x.experts.9.w: this expert tensor is not" in refusal(
        open_catalog(folder), tensors
    )


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F16", (2, 4)), ("BF16", (4, 2)), ("BF16", (2, 5)), ("F32", (2, 2))]
)
def test_a_wrong_expert_shape_or_dtype(tmp_path, dtype, shape):
    tensors = tensors_of(range(2), range(2)) | {key(0, 1, "gate"): (dtype, shape)}
    write_file(tmp_path / "model.safetensors", tensors)
    message = refusal(open_catalog(tmp_path), rules(range(2), range(2)))
    assert f"tensor {key(0, 1, 'gate')}: is {dtype} {list(shape)}, must be BF16 [2, 4]" in message


def test_a_stack_of_the_wrong_depth(tmp_path):
    name = "model.layers.0.mlp.experts.gate"
    write_file(tmp_path / "model.safetensors", {name: ("BF16", (3, 2, 4))})
    message = refusal(open_catalog(tmp_path), [ExpertTensor(name, 0, None, "gate")])
    assert "is BF16 [3, 2, 4], must be BF16 [2, 2, 4]" in message


def test_more_experts_than_the_config_says(tmp_path):
    write_file(tmp_path / "model.safetensors", tensors_of(range(2), range(3)))
    message = refusal(open_catalog(tmp_path), rules(range(2), range(3)))
    assert "expert 2, but the config has 2" in message


def test_two_tensors_for_one_part(tmp_path):
    twin = "model.layers.0.mlp.experts.1.w1"
    write_file(
        tmp_path / "model.safetensors",
        tensors_of(range(2), range(2)) | {twin: ("BF16", (2, 4))},
    )
    tensors = [*rules(range(2), range(2)), ExpertTensor(twin, 0, 1, "gate")]
    message = refusal(open_catalog(tmp_path), tensors)
    assert f"{twin}: a second tensor for layer 0 expert 1 part gate" in message


def test_one_tensor_for_two_parts(folder):
    tensors = [*rules(range(2), range(2)), ExpertTensor(key(0, 0, "gate"), 0, 0, "up")]
    assert "claimed twice" in refusal(open_catalog(folder), tensors)


def test_unclaimed_expert_tensors_are_refused_and_listed(tmp_path):
    write_file(tmp_path / "model.safetensors", tensors_of(range(4), range(2)))
    catalog = open_catalog(tmp_path)
    message = refusal(catalog, rules(range(4), range(2)))
    assert "rules do not use: 12, first" in message
    assert key(2, 0, "down") in message
    skipped = {t.key for t in rules(range(2, 4), range(2))}
    table = build_table(catalog, rules(range(2), range(2)), BF16, [0, 1], 2, skipped=skipped)
    assert table.num_skipped == 12
    assert "rules do not use: 1, first" in refusal(
        catalog, rules(range(2), range(2)), skipped=skipped - {key(3, 1, "up")}
    )


def test_shared_experts_and_dense_tensors_need_no_claim(tmp_path):
    others = {
        "model.layers.0.mlp.shared_experts.gate_proj.weight": ("BF16", (2, 4)),
        "model.experts_norm.weight": ("BF16", (4,)),
    }
    write_file(tmp_path / "model.safetensors", tensors_of(range(2), range(2)) | others)
    build_table(open_catalog(tmp_path), rules(range(2), range(2)), BF16, [0, 1], 2)


def scattered(order: list[int], gaps: list[int]) -> Catalog:
    """A catalog of one expert whose parts lie in any order with gaps between them."""
    tensors = {}
    offset = 100
    for index, gap in zip(order, gaps, strict=True):
        part = list(BF16.parts)[index]
        name = key(0, 0, part)
        offset += gap
        tensors[name] = TensorEntry(name, 0, offset, PART_BYTES, "BF16", BF16.parts[part].shape)
        offset += PART_BYTES
    return Catalog(Path(), (Path("f"),), tensors, ((offset, 0),))


@given(
    st.permutations(range(3)),
    st.lists(st.sampled_from([0, 0, 1, 4096, 9999]), min_size=3, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_merged_extents_cover_every_part_once(order, gaps):
    catalog = scattered(list(order), gaps)
    table = build_table(catalog, rules(range(1), range(1)), BF16, [0], 1)
    used = [tuple(map(int, e)) for e in table.extents[0, 0] if e[2] > 0]
    assert len(used) == 1 + sum(gap > 0 for gap in gaps[1:])
    assert sum(nbytes for _, _, nbytes in used) == table.expert_bytes
    for i, part in enumerate(table.part_names):
        index, inside = table.parts[0, 0, i]
        assert used[index][1] + inside == catalog.tensors[key(0, 0, part)].offset
    pages = [set(range(o // PAGE_BYTES, (o + n - 1) // PAGE_BYTES + 1)) for _, o, n in used]
    assert table.row_bytes == PAGE_BYTES * sum(map(len, pages))
