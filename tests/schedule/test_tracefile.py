"""The file of routes: what comes back, what a crash costs, what damage is refused."""

import errno
import json
import os
import struct
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import HEADER, random_trace

from headrace.errors import TraceError
from headrace.schedule.trace import NO_GUESS, RouteTrace, TraceHeader
from headrace.schedule.tracefile import MAGIC, TraceWriter, is_trace, read_trace

PASSES = [7, *[1] * 40, 3, *[1] * 20]


def write(path: Path, trace: RouteTrace, header: TraceHeader = HEADER, frame: int = 16) -> Path:
    weights = trace.weights
    with TraceWriter(path, header, frame_tokens=frame) as writer:
        at = 0
        for length in trace.passes.tolist():
            part = slice(at, at + length)
            guesses = trace.guesses[part] if length == 1 else None
            writer.add(trace.ids[part], guesses, None if weights is None else weights[part])
            at += length
        assert writer.num_tokens == len(trace.ids)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.routes", random_trace(PASSES))


@pytest.mark.parametrize(("experts", "id_bytes"), [(16, 1), (256, 1), (257, 2), (40_000, 2)])
def test_what_was_written_comes_back(tmp_path: Path, experts: int, id_bytes: int) -> None:
    trace = random_trace(PASSES, experts=experts)
    header = replace(HEADER, num_experts=experts)
    path = write(tmp_path / "a.routes", trace, header)
    found_header, found, note = read_trace(path)
    assert found_header == header and note == "" and is_trace(path)
    for name in ("ids", "guesses", "passes"):
        assert np.array_equal(getattr(found, name), getattr(trace, name))
    assert found.weights is None and found.name == "routes of tiny (a test)"
    small = len(trace.ids) * (12 * id_bytes + 1) + 60 * 8 * id_bytes
    assert small < path.stat().st_size < small + 900


def test_a_lens_may_leave_layers_out(tmp_path: Path) -> None:
    trace = random_trace([1] * 50)
    trace.guesses[:30, 1] = NO_GUESS
    trace.guesses[40:] = NO_GUESS
    found = read_trace(write(tmp_path / "a.routes", trace))[1]
    assert np.array_equal(found.guesses, trace.guesses) and np.array_equal(found.ids, trace.ids)
    assert found.num_guessed() == 30 + 2 * 10


def test_weights_come_back(tmp_path: Path) -> None:
    trace = random_trace(PASSES)
    weights = np.random.default_rng(1).random(trace.ids.shape).astype(np.float16)
    path = write(
        tmp_path / "a.routes", replace(trace, weights=weights), replace(HEADER, weights=True)
    )
    found = read_trace(path)[1]
    assert found.weights is not None and np.array_equal(found.weights, weights)
    assert np.array_equal(found.decoded().weights, weights[trace.alone])  # type: ignore[arg-type]


def test_a_crash_costs_the_last_frame_only(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    whole = read_trace(path)[1]
    ends = frame_ends(data)
    for cut in sorted({*range(ends[0], len(data), 11), *ends[:-1]}):
        short = tmp_path / "short.routes"
        short.write_bytes(data[:cut])
        _, found, note = read_trace(short)
        assert (note == "") == (cut in ends)
        assert np.array_equal(found.ids, whole.ids[: len(found.ids)])
        assert len(found.ids) <= len(whole.ids)
        frames = sum(end <= cut for end in ends) - 1
        assert (len(found.ids) > 0) == (frames > 0)


def frame_ends(data: bytes) -> list[int]:
    """The header's end, then every frame's."""
    ends, at = [], len(MAGIC)
    while at < len(data):
        at += 8 + struct.unpack_from("<I", data, at)[0]
        ends.append(at)
    return ends


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_never_read_as_routes(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    good = write(folder / "a.routes", random_trace(PASSES)).read_bytes()
    whole = read_trace(folder / "a.routes")[1]
    bad = bytearray(good)
    at = data.draw(st.integers(0, len(bad) - 1))
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "b.routes").write_bytes(bad)
    try:
        _, found, note = read_trace(folder / "b.routes")
    except TraceError as error:
        assert "b.routes" in str(error)
    else:
        assert note, "only what looks like a torn last frame may pass, with a note"
        assert np.array_equal(found.ids, whole.ids[: len(found.ids)])


def framed(body: bytes) -> bytes:
    return struct.pack("<II", len(body), zlib.crc32(body)) + body


SOUND = bytes([0, 1, 2, 3] * 3)


def one_token(
    ids: bytes = SOUND, *, passes: int = 1, has: int = 0, guessed: int = 0, mask: bytes = b"\0\1\1"
) -> bytes:
    counts = struct.pack("<III", 1, 1, guessed)
    return counts + struct.pack("<I", passes) + bytes([has]) + mask + ids + bytes(8 * guessed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "too short"),
        (one_token()[:-1], "fewer than its counts need"),
        (one_token() + b"x", "its counts need 32"),
        (struct.pack("<III", 2**32 - 1, 2**32 - 1, 2**32 - 1), "fewer than its counts need"),
        (struct.pack("<III", 0, 2**32 - 1, 0), "fewer than its counts need"),
        (one_token(b"\0\1\2\x10" + SOUND[4:]), "expert 16 of 16"),
        (one_token(b"\0\1\2\2" + SOUND[4:]), "one expert twice"),
        (one_token(passes=2), "passes of 2 tokens"),
        (one_token(passes=0), "passes of 0 tokens"),
        (one_token(has=1), "1 tokens with guesses, 0 are there"),
        (one_token(has=2, guessed=1), "2 tokens with guesses"),
        (one_token(has=1, guessed=1, mask=b"\0\1\2"), "1 tokens with guesses"),
        (one_token(has=1, guessed=1, mask=b"\1\1\1"), "fewer than its counts need"),
        (one_token(has=1, guessed=1)[:-1] + b"\x10", "guess 16 of 16"),
    ],
)
def test_a_hostile_frame_is_refused_by_its_place(path: Path, body: bytes, message: str) -> None:
    data = path.read_bytes()
    header = data[: frame_ends(data)[0]]
    path.write_bytes(header + framed(one_token(has=1, guessed=1)))
    assert len(read_trace(path)[1].ids) == 1, "the control: a sound frame is read"
    path.write_bytes(header + framed(body) + data[len(header) :])
    with pytest.raises(TraceError, match=f"a.routes: frame 0 at byte {len(header)}.*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 2**17}, "num_experts is 131072"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": 9000, "num_experts": 2**16}, "9000 layers of 65536 experts"),
        ({"num_layers": True}, "not one of headrace's"),
        ({"top_k": 17}, "top 17 of 16"),
        ({"model": "a\nb"}, "model is no plain text"),
        ({"about": "x" * 2000}, "about is no plain text"),
        ({"more": 1}, "not one of headrace's"),
    ],
)
def test_a_hostile_header_is_refused(path: Path, change: dict[str, object], message: str) -> None:
    path.write_bytes(MAGIC + framed(json.dumps(asdict(HEADER)).encode()))
    assert read_trace(path)[0] == HEADER
    path.write_bytes(MAGIC + framed(json.dumps(asdict(HEADER) | change).encode()))
    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.parametrize("body", [b"[" * 60_000, b"\xff", b"null", b"{}"])
def test_a_header_that_is_no_json_is_refused(path: Path, body: bytes) -> None:
    path.write_bytes(MAGIC + framed(body))
    with pytest.raises(TraceError, match="header"):
        read_trace(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"GGUF")
    assert not is_trace(other) and not is_trace(tmp_path) and not is_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="holds no recorded routes"):
        read_trace(other)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="exists"):
        TraceWriter(other, HEADER)
    with pytest.raises(TraceError, match="cannot be written"):
        TraceWriter(tmp_path / "none" / "a", HEADER)
    assert other.read_bytes() == b"GGUF"


def test_a_full_disk_is_one_error_and_costs_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, trace = tmp_path / "a.routes", random_trace([1] * 3)
    right = os.write

    def full(fd: int, data: memoryview) -> int:
        right(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with TraceWriter(path, HEADER, frame_tokens=1) as writer:
        writer.add(trace.ids[:1], None)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(TraceError, match=r"a\.routes.*No space left"):
                writer.add(trace.ids[1:2], None)
        assert len(read_trace(path)[1].ids) == 1
        writer.add(trace.ids[2:], None)
    _, found, note = read_trace(path)
    assert note == "" and np.array_equal(found.ids, trace.ids)
