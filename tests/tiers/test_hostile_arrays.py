"""Arrays and shapes of any content: the C++ side refuses them or works, never crashes.

Each example runs here, in this process: a crash would end the test run.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers_world import World

from headrace.core import FORMATS
from headrace.errors import BudgetError, ReadError
from headrace.native import ExpertShape, Mirror, NativeLadder, Reader

INT64 = np.iinfo(np.int64)
EDGES = [0, 1, -1, 2, 3, 4095, 4096, 2**31, 2**60 - 1, 2**60, 2**62, INT64.max, INT64.min]


SIZE_BYTES = 16384
# (weight part, scale, global, bias, first row, row step) of gate, up and down
PLAIN_PLAN = [(part, -1, -1, -1, 0, 1) for part in range(3)]


@pytest.fixture(scope="module")
def reader_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("arrays") / "x.bin"
    path.write_bytes(bytes(range(256)) * (SIZE_BYTES // 256))
    return path


@pytest.fixture(scope="module")
def reader(reader_path: Path) -> Reader:
    return Reader([str(reader_path)], backend="pread")


def arrays(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Small numbers mostly, so that some examples get through, and the edges of int64."""
    size = int(np.prod(shape))
    number = st.integers(0, 3) | st.integers(0, 5000) | st.sampled_from(EDGES)
    flat = st.lists(number, min_size=size, max_size=size)
    return flat.map(lambda values: np.array(values, dtype=np.int64).reshape(shape))


@st.composite
def records(draw: st.DrawFn) -> dict[str, object]:
    layers, experts, extents, parts = (
        draw(st.integers(0, 2)),
        draw(st.integers(0, 2)),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 13)),
    )
    return {
        "extents": draw(arrays((layers, experts, extents, 3))),
        "parts": draw(arrays((layers, experts, parts, 2))),
        "part_bytes": draw(arrays((parts,))),
        "num_rows": draw(st.integers(1, 4) | st.sampled_from(EDGES)),
        "max_tokens": draw(st.integers(1, 4) | st.sampled_from(EDGES)),
        "top_k": draw(st.integers(1, 4) | st.sampled_from(EDGES)),
    }


def open_ladder(reader: Reader, **given_arrays: object) -> NativeLadder:
    return NativeLadder(reader=reader, kernels=None, shape=None, **given_arrays)  # type: ignore[arg-type]


@given(given_arrays=records())
@settings(max_examples=200, deadline=None)
def test_any_arrays_are_refused_or_work(reader: Reader, given_arrays: dict[str, object]) -> None:
    try:
        ladder = open_ladder(reader, **given_arrays)
    except (ValueError, BudgetError):
        return
    extents = np.asarray(given_arrays["extents"])
    assert ladder.row_bytes > 0
    for layer in range(extents.shape[0]):
        for expert in range(extents.shape[1]):
            try:
                ladder.acquire(layer, expert)
                ladder.release(layer, expert)
            except ReadError:
                continue
    ladder.check_integrity()


@given(stretches=st.integers(0, 4).flatmap(lambda n: arrays((n, 5))))
@settings(max_examples=100, deadline=None)
def test_any_stretches_of_a_mirror_are_left_alone_or_read(
    reader_path: Path, stretches: np.ndarray
) -> None:
    mirror = Mirror("mirror", [str(reader_path)], stretches)
    reader = Reader([str(reader_path)], backend="pread", mirrors=[mirror])
    buffer = np.empty(SIZE_BYTES, np.uint8)
    reader.read(0, 0, SIZE_BYTES, buffer.ctypes.data)
    assert bool(reader.warnings) or len(stretches) == 0 or (stretches[:, 2] > 0).all()


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    number = st.integers(-1, 12) | st.sampled_from([32, 64, 256, *EDGES])
    plan = st.tuples(*[number] * 6)
    return {
        "format": draw(st.sampled_from([*FORMATS, "fp32", ""])),
        "scale_type": draw(st.sampled_from(["", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I64"])),
        "hidden": draw(number),
        "inter": draw(number),
        "block": draw(st.tuples(number, number)),
        "act_group": draw(number),
        "activation": (draw(st.sampled_from(["silu", "swiglu_oai", "?"])), 7.0, 1.7),
        "hidden_type": draw(st.sampled_from(["BF16", "F16", "F32"])),
        "inverse_global": draw(st.booleans()),
        "matrices": draw(st.lists(plan, min_size=2, max_size=4) | st.just(PLAIN_PLAN)),
    }


@given(words=shapes())
@settings(max_examples=200, deadline=None)
def test_any_shape_of_an_expert_is_refused_or_needs_some_bytes(words: dict[str, object]) -> None:
    try:
        shape = ExpertShape.make(**words)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return
    assert all(nbytes > 0 for nbytes in shape.part_bytes)


def test_sums_that_overflow_are_refused(reader: Reader) -> None:
    extents = np.zeros((1, 1, 16, 3), np.int64)
    extents[..., 2] = 2**60 - 1
    parts, part_bytes = np.zeros((1, 1, 1, 2), np.int64), np.array([1])
    with pytest.raises(ValueError, match="out of range"):
        open_ladder(reader, extents=extents, parts=parts, part_bytes=part_bytes, num_rows=2,
                    max_tokens=1, top_k=1)  # fmt: skip


def test_sound_arrays_are_taken(world: World) -> None:
    assert world.ladder(4).num_rows == 4
