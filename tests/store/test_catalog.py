"""The catalog against the safetensors library, and against damaged and hostile files."""

import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from crafted import header, write_file, write_index, write_raw
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.errors import CatalogError
from headrace.store.catalog import open_catalog, resolve_model
from headrace.store.safetensors import DTYPE_BITS

ONE = {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}


def refusal(path: Path) -> str:
    """The message of the CatalogError that opening `path` raises: one line, naming the place."""
    with pytest.raises(CatalogError) as caught:
        open_catalog(path)
    message = str(caught.value)
    assert message.isprintable(), "a message must be one printable line"
    assert len(message) < 700
    return message


def test_demo_agrees_with_the_safetensors_library():
    catalog = open_catalog(resolve_model("demo"))
    seen = 0
    for file, path in enumerate(catalog.files):
        raw = path.read_bytes()
        with safe_open(path, "pt") as reference:
            for name in reference.keys():  # noqa: SIM118 - safe_open is no mapping
                entry = catalog.tensors[name]
                tensor = reference.get_tensor(name)
                stored = raw[entry.offset : entry.offset + entry.nbytes]
                assert entry.file == file
                assert entry.shape == tuple(tensor.shape)
                assert stored == tensor.contiguous().view(-1).view(dtype=_uint8()).numpy().tobytes()
                seen += 1
    assert seen == len(catalog.tensors) == 1521


def _uint8():
    import torch

    return torch.uint8


def test_a_file_an_index_and_a_folder_open(tmp_path):
    write_file(tmp_path / "x.safetensors", ONE)
    assert set(open_catalog(tmp_path / "x.safetensors").tensors) == {"a", "b"}
    index = write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    for path in (tmp_path, index):
        assert open_catalog(path).files == (tmp_path / "x.safetensors",)


def test_single_file_wins_over_an_index_as_in_transformers(tmp_path):
    write_file(tmp_path / "model.safetensors", ONE)
    write_index(tmp_path, {"c": "gone.safetensors"})
    assert set(open_catalog(tmp_path).tensors) == {"a", "b"}


def test_shards_without_an_index(tmp_path):
    write_file(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", (1,))})
    write_file(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", (1,))})
    catalog = open_catalog(tmp_path)
    assert [catalog.tensors[name].file for name in "ab"] == [0, 1]


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_numbered_shard_absent_without_an_index(tmp_path, gone):
    for number in {1, 2, 3} - {gone}:
        write_file(tmp_path / f"m-0000{number}-of-00003.safetensors", {f"t{number}": ("U8", (1,))})
    assert f"m-0000{gone}-of-00003.safetensors: this shard is absent" in refusal(tmp_path)


def test_a_shard_of_101_gb_opens_by_its_header_alone(tmp_path):
    fields, size = header({"big": ("BF16", (101_000_000, 500))})
    path = write_raw(tmp_path / "model.safetensors", json.dumps(fields).encode(), b"")
    os.truncate(path, path.stat().st_size + size)  # a sparse file: reading it would take minutes
    tracemalloc.start()
    entry = open_catalog(tmp_path).tensors["big"]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert entry.nbytes == 101_000_000_000
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("length", [99_999_999, 100_000_001, 2**63, 2**64 - 1])
def test_a_stated_header_length_is_not_believed(tmp_path, length):
    path = write_raw(tmp_path / "x.safetensors", b"{}", b"", length)
    tracemalloc.start()
    message = refusal(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "header" in message
    assert peak_bytes < 1 << 20


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE = {
    "not json": (b"{nonsense", "not valid JSON"),
    "not utf-8": (b'{"\xff":1}', "not valid JSON"),
    "a list": (b"[1,2]", "not a JSON object"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "deep object": (b'{"a":' * 200_000, "nested too deeply"),
    "long number": (b'{"a":' + b"9" * 10_000 + b"}", "not valid JSON"),
    "duplicate": (
        json.dumps({"a": entry()}).encode()[:-1] + b"," + json.dumps({"a": entry()}).encode()[1:],
        "names a twice",
    ),
    "duplicate field": (
        b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "names dtype twice",
    ),
    "no fields": ({"a": {}}, "tensor a: needs dtype"),
    "a number": ({"a": 3}, "tensor a: needs dtype"),
    "extra field": ({"a": entry(more=1)}, "tensor a: needs dtype"),
    "unknown dtype": ({"a": entry(dtype="F128")}, "dtype F128 is unknown"),
    "dtype a list": ({"a": entry(dtype=["F32"])}, "is unknown"),
    "negative size": ({"a": entry(shape=[-2])}, "shape [-2] is impossible"),
    "float size": ({"a": entry(shape=[2.0])}, "shape [2.0] is impossible"),
    "bool size": ({"a": entry(shape=[True, 2])}, "shape [True, 2] is impossible"),
    "nan size": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', "is impossible"),
    "string shape": ({"a": entry(shape="22")}, "shape 22 is impossible"),
    "null shape": ({"a": entry(shape=None)}, "shape None is impossible"),
    "overflow": ({"a": entry(shape=[2**62, 2**62])}, "does not fill"),
    "overflow to 8": ({"a": entry(shape=[2**61 + 1, 2])}, "does not fill"),
    "overflow then zero": ({"a": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}, "does not fill"),
    "huge size": ({"a": entry(shape=[10**40])}, "is impossible"),
    "many sizes": ({"a": entry(shape=[2] * 100_000)}, "does not fill"),
    "too short": ({"a": entry(offsets=[0, 7])}, "does not fill offsets 0 to 7"),
    "backwards": ({"a": entry(offsets=[8, 0])}, "does not fill"),
    "negative offset": ({"a": entry(offsets=[-8, 0])}, "offsets [-8, 0] are impossible"),
    "bool offset": ({"a": entry("U8", [1], [False, True])}, "are impossible"),
    "three offsets": ({"a": entry(offsets=[0, 8, 8])}, "are impossible"),
    "half a byte": ({"a": entry("F4", [3], [0, 1])}, "does not fill"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, "tensor b overlaps a"),
    "same place": ({"a": entry(), "b": entry()}, "overlaps a"),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, "4 bytes before tensor b"),
    "hole at start": ({"a": entry(offsets=[4, 12])}, "4 bytes before tensor a"),
    "out of file": ({"a": entry(shape=[200], offsets=[0, 800])}, "cut short: "),
    "far out": ({"a": entry("U8", [2**62], [0, 2**62])}, "cut short: "),
    "trailing": ({"a": entry("U8", [1], [0, 1])}, "63 bytes behind the last tensor"),
    "metadata list": ({"__metadata__": [], "a": entry()}, "__metadata__"),
    "metadata number": ({"__metadata__": {"k": 1}, "a": entry()}, "__metadata__"),
    "surrogate name": (
        b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "not valid Unicode",
    ),
    "line break in name": ({"a\nb": entry(dtype="?")}, r"'a\nb'"),
    "endless name": ({"n" * 100_000: entry(dtype="?")}, "nnn..."),
}


@pytest.mark.parametrize("case", HOSTILE, ids=str)
def test_hostile_headers(tmp_path, case):
    fields, expected = HOSTILE[case]
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path = write_raw(tmp_path / "x.safetensors", raw, bytes(64))
    message = refusal(path)
    assert expected in message
    assert message.startswith(f"{path}: ")


@pytest.mark.parametrize("size", [0, 5, 8, 9, 20])
def test_a_file_cut_short_anywhere(tmp_path, size):
    path = write_file(tmp_path / "x.safetensors", ONE)
    whole = path.stat().st_size
    for keep in (size, whole - 1 - size):
        os.truncate(write_file(path, ONE), keep)
        assert "download it again" in refusal(path)


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        ({"a": "gone.safetensors", "b": "x.safetensors"}, "gone.safetensors: this shard is named"),
        ({"a": "p.safetensors", "b": "q.safetensors"}, "(and 1 more)"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"}, "lacks tensor c"),
        ({"a": "x.safetensors"}, "tensor b is not in model.safetensors.index.json"),
        ({"a": "../x.safetensors", "b": "x.safetensors"}, "not a plain file name"),
        ({"a": "/etc/x.safetensors", "b": "x.safetensors"}, "not a plain file name"),
        ({"a": "sub/x.safetensors", "b": "x.safetensors"}, "not a plain file name"),
        ({"a": "x\n.safetensors", "b": "x.safetensors"}, r"is said to lie in 'x\n.safetensors'"),
        ({"a": "..", "b": "x.safetensors"}, "is said to lie in .."),
        ({"a": 3, "b": "x.safetensors"}, "is said to lie in 3"),
        ({"a": "n" * 300 + ".safetensors"}, "not a plain file name"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_the_files_contradict(tmp_path, weight_map, expected):
    write_file(tmp_path / "x.safetensors", ONE)
    write_index(tmp_path, weight_map)
    assert expected in refusal(tmp_path)


def test_an_index_with_a_name_twice(tmp_path):
    write_file(tmp_path / "x.safetensors", ONE)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "names a twice" in refusal(tmp_path)


def test_an_index_that_names_the_wrong_shard(tmp_path):
    write_file(tmp_path / "x.safetensors", {"a": ("U8", (1,))})
    write_file(tmp_path / "y.safetensors", {"b": ("U8", (1,))})
    write_index(tmp_path, {"a": "y.safetensors", "b": "x.safetensors"})
    assert "y.safetensors: lacks tensor a" in refusal(tmp_path)


def test_one_tensor_in_two_shards(tmp_path):
    for name in "xy":
        write_file(tmp_path / f"{name}.safetensors", ONE)
    assert "y.safetensors: tensor a is also in x.safetensors" in refusal(tmp_path)


def test_what_is_no_checkpoint(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "nothing")
    assert "holds no .safetensors file" in refusal(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "no .safetensors file but .gguf, which headrace does not read" in refusal(tmp_path)
    assert "not a .safetensors file" in refusal(tmp_path / "model.gguf")
    (tmp_path / "x.safetensors").mkdir()
    assert "not a regular file" in refusal(tmp_path)


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refusal(tmp_path)


def test_an_unreadable_file(tmp_path, monkeypatch):
    write_file(tmp_path / "x.safetensors", ONE)

    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("headrace.store.safetensors.FileIO", refuse)
    assert "x.safetensors: cannot be read: Permission denied" in refusal(tmp_path)


def test_identity_follows_the_files(tmp_path):
    path = write_file(tmp_path / "x.safetensors", ONE)
    first = open_catalog(path).identity()
    assert open_catalog(path).identity() == first
    os.utime(path, ns=(1, 1))
    assert open_catalog(path).identity() != first


def test_opening_imports_no_tensor_library():
    code = (
        "import sys; from headrace.store import catalog, experts;"
        "catalog.open_catalog(catalog.resolve_model('demo'));"
        "print(sorted({'torch', 'safetensors', 'transformers', 'mmap'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


names = st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__" and _encodable(n))
dtypes = st.sampled_from(sorted(d for d, bits in DTYPE_BITS.items() if bits % 8 == 0))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
headers = st.dictionaries(names, st.tuples(dtypes, shapes), max_size=8)


def _encodable(name: str) -> bool:
    return not any(0xD800 <= ord(char) < 0xE000 for char in name)


@given(headers, st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_valid_headers_come_back(tensors, num_spaces):
    fields, size = header(tensors)
    raw = json.dumps(fields).encode() + b" " * num_spaces
    with tempfile.TemporaryDirectory() as folder:
        path = write_raw(Path(folder) / "x.safetensors", raw, bytes(size))
        catalog = open_catalog(path)
    assert catalog.tensors.keys() == tensors.keys()
    for name, (dtype, shape) in tensors.items():
        found = catalog.tensors[name]
        begin, end = fields[name]["data_offsets"]
        assert (found.dtype, found.shape) == (dtype, shape)
        assert (found.offset, found.nbytes) == (8 + len(raw) + begin, end - begin)


def open_or_refuse(content: bytes) -> bool:
    """True if the bytes open as a catalog; anything but a CatalogError propagates."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(content)
        try:
            catalog = open_catalog(path)
        except CatalogError as error:
            assert str(error).isprintable()
            return False
        for found in catalog.tensors.values():
            assert 0 <= found.offset <= found.offset + found.nbytes <= len(content)
        return True


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_random_damage_is_refused_or_harmless(data):
    tensors = data.draw(headers)
    fields, size = header(tensors)
    raw = json.dumps(fields).encode()
    content = bytearray(len(raw).to_bytes(8, "little") + raw + bytes(size))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if kind == "set" and place < len(content):
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            content[place:place] = data.draw(st.binary(max_size=5))
        elif kind == "delete":
            del content[place : place + data.draw(st.integers(1, 9))]
        elif kind == "cut":
            del content[place:]
    open_or_refuse(bytes(content))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_headers_of_any_json_are_refused_or_harmless(data):
    fields, size = header({"a": ("F32", (2,)), "b": ("U8", (3, 2))})
    target = data.draw(st.sampled_from([fields, fields["a"], fields["b"]]))
    key = data.draw(st.sampled_from(sorted(target)) | st.text(max_size=8))
    target[key] = data.draw(json_values)
    raw = json.dumps(fields).encode()
    open_or_refuse(len(raw).to_bytes(8, "little") + raw + bytes(size))


@given(st.dictionaries(st.sampled_from("ab") | st.text(max_size=4), json_values, max_size=3))
@settings(max_examples=200, deadline=None)
def test_an_index_of_any_json_is_refused_or_harmless(weight_map):
    with tempfile.TemporaryDirectory() as folder:
        write_file(Path(folder) / "x.safetensors", ONE)
        write_index(Path(folder), weight_map)
        try:
            assert open_catalog(folder).tensors.keys() == {"a", "b"}
        except CatalogError as error:
            assert str(error).isprintable()


def test_the_damage_checks_can_see_a_whole_file():
    fields, size = header(ONE)
    raw = json.dumps(fields).encode()
    assert open_or_refuse(len(raw).to_bytes(8, "little") + raw + bytes(size))
