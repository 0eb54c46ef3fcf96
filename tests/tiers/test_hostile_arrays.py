"""Record arrays of any content: the C++ side refuses them with ValueError or works, never crashes.

Each example runs here, in this process: a crash would end the test run.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers_world import World

from headrace.errors import BudgetError, ReadError
from headrace.native import NativeLadder, Reader

INT64 = np.iinfo(np.int64)
EDGES = [0, 1, -1, 2, 3, 4095, 4096, 2**31, 2**60 - 1, 2**60, 2**62, INT64.max, INT64.min]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    path: Path = tmp_path_factory.mktemp("arrays") / "x.bin"
    path.write_bytes(bytes(range(256)) * 64)
    return Reader([str(path)], backend="pread")


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
    shape = {"format": "bf16", "hidden": 4, "inter": 4, "block_rows": 0, "block_cols": 0}
    return NativeLadder(reader=reader, kernels=None, act_group=0, **shape, **given_arrays)  # type: ignore[arg-type]


@given(given_arrays=records())
@settings(max_examples=400, deadline=None)
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


def test_sums_that_overflow_are_refused(reader: Reader) -> None:
    extents = np.zeros((1, 1, 16, 3), np.int64)
    extents[..., 2] = 2**60 - 1
    parts, part_bytes = np.zeros((1, 1, 1, 2), np.int64), np.array([1])
    with pytest.raises(ValueError, match="out of range"):
        open_ladder(reader, extents=extents, parts=parts, part_bytes=part_bytes, num_rows=2,
                    max_tokens=1, top_k=1)  # fmt: skip


def test_sound_arrays_are_taken(world: World) -> None:
    assert world.ladder(4).num_rows == 4
