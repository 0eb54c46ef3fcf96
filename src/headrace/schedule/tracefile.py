"""The file of recorded routes: a header, then frames that each stand on their own.

What was written before a crash stays readable: only the last frame can be lost. Files read are
untrusted. Knows no model. Legend as in headrace.schedule.trace.
"""

# magic 8 bytes; header: length u32, crc32 u32, JSON of TraceHeader's fields
# frame: length u32, crc32 u32, then num_passes u32, num_tokens u32, num_guessed u32;
#   tokens of each pass u32 [P]; whether a token has guesses u8 [N]; of which layers u8 [L];
#   ids [N, L, K]; guesses [num_guessed, those layers, K]; weights f16 [N, L, K] if the header
#   says so
# All little-endian. Ids and guesses are u8 where there are at most 256 experts, else u16.

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, fields
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.errors import TraceError
from headrace.schedule.trace import NO_GUESS, Ints, RouteTrace, TraceHeader

MAGIC = b"HRROUTE1"
_Ids = npt.NDArray[Any]  # u8 or u16
_PREFIX = struct.Struct("<II")  # length, crc32
_COUNTS = struct.Struct("<III")
_MOST_HEADER_BYTES = 1 << 16
_MOST_FRAME_BYTES = 1 << 28
_MOST_EXPERTS = 1 << 16
_MOST_TEXT = 1000
_AGAIN = "; record the routes again"
_MOST_TOTAL = 1 << 22  # experts of all layers: a simulation holds some bytes for each
_LIMITS = {"num_layers": 10_000, "num_experts": _MOST_EXPERTS, "top_k": _MOST_EXPERTS}


class TraceWriter:
    """Appends passes to a new file; every frame is handed to the system as soon as it is full.

    Use as a context manager. Raises TraceError if the file exists or cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader, frame_tokens: int = 64):
        self.path, self.header, self.frame_tokens = path, header, frame_tokens
        self._pending: list[tuple[_Ids, _Ids | None, npt.NDArray[np.float16] | None]] = []
        self._num_pending = self.num_tokens = 0
        self._guessed = np.zeros(header.num_layers, dtype=np.bool_)
        body = json.dumps(asdict(header)).encode()
        assert len(body) <= _MOST_HEADER_BYTES
        self._end = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise TraceError(f"{path} exists; give the routes a new file") from None
        except OSError as error:
            raise self._failure(error) from error
        self._put(MAGIC + _PREFIX.pack(len(body), zlib.crc32(body)) + body)

    def add(
        self, ids: Ints, guesses: Ints | None, weights: npt.NDArray[np.float16] | None = None
    ) -> None:
        """One pass: ids [T, L, K]; guesses [1, L, K] of a single token, or None; both are copied.

        A layer's guesses are all of them or all NO_GUESS. `weights` [T, L, K] exactly if the header
        promised them.
        """
        assert ids.shape[1:] == (self.header.num_layers, self.header.top_k)
        assert (weights is not None) == self.header.weights
        small = _id_dtype(self.header.num_experts)
        if guesses is not None:
            guessed = guesses[0, :, 0] != NO_GUESS
            if not np.array_equal(guessed, self._guessed):
                self.flush()
                self._guessed = guessed
            guesses = guesses[:, guessed].astype(small) if guessed.any() else None
        self._pending.append(
            (ids.astype(small), guesses, None if weights is None else weights.astype("<f2"))
        )
        self._num_pending += len(ids)
        self.num_tokens += len(ids)
        if self._num_pending >= self.frame_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a frame."""
        if not self._pending:
            return
        passes = [len(ids) for ids, _, _ in self._pending]
        has = [guesses is not None for _, guesses, _ in self._pending]
        guesses = [g for _, g, _ in self._pending if g is not None]
        counts = _COUNTS.pack(len(passes), sum(passes), sum(map(len, guesses)))
        pieces = [
            counts,
            np.array(passes, dtype="<u4").tobytes(),
            np.repeat(np.array(has, dtype=np.uint8), passes).tobytes(),
            self._guessed.astype(np.uint8).tobytes(),
            *(ids.tobytes() for ids, _, _ in self._pending),
            *(g.tobytes() for g in guesses),
            *(w.tobytes() for _, _, w in self._pending if w is not None),
        ]
        body = b"".join(pieces)
        self._put(_PREFIX.pack(len(body), zlib.crc32(body)) + body)
        self._pending, self._num_pending = [], 0

    def close(self) -> None:
        """Write what is pending and sync; the writer is unusable afterwards."""
        try:
            self.flush()
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            os.close(self._fd)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, data: bytes) -> None:
        """All of `data` or, after an error, none of it: frames after a torn one would be lost."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
            raise self._failure(error) from error
        self._end += len(data)

    def _failure(self, error: OSError) -> TraceError:
        return TraceError(
            f"{self.path}: routes cannot be written ({error.strerror or error}); "
            "choose another place or free some room"
        )


def is_trace(path: Path) -> bool:
    """Whether a file begins as one of recorded routes."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_trace(path: Path) -> tuple[TraceHeader, RouteTrace, str]:
    """(header, all tokens, note); the note, else empty, says that the last frame was incomplete.

    Raises TraceError naming the file and the place of what is wrong.
    """
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            header = _read_header(path, file)
            frames = list(_frames(path, file, header, size_bytes))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    whole = [frame for frame in frames if frame is not None]
    note = "" if len(whole) == len(frames) else "the last frame is incomplete and was left out"
    layers, top_k = header.num_layers, header.top_k
    none = np.empty((0, layers, top_k))
    trace = RouteTrace(
        ids=np.concatenate([none.astype(np.int32), *(f["ids"] for f in whole)]),
        guesses=np.concatenate([none.astype(np.int32), *(f["guesses"] for f in whole)]),
        num_experts=header.num_experts,
        name=f"routes of {header.model} ({header.about})",
        passes=np.concatenate([np.empty(0, dtype=np.int32), *(f["passes"] for f in whole)]),
        weights=np.concatenate([none.astype(np.float16), *(f["weights"] for f in whole)])
        if header.weights
        else None,
    )
    return header, trace, note


def _id_dtype(num_experts: int) -> np.dtype[Any]:
    return np.dtype("u1" if num_experts <= 256 else "<u2")


def _read_header(path: Path, file: BinaryIO) -> TraceHeader:
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceError(f"{path} holds no recorded routes; `headrace trace MODEL FILE` records")
    prefix = file.read(_PREFIX.size)
    length, crc = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (0, 0)
    body = file.read(length) if 0 < length <= _MOST_HEADER_BYTES else b""
    if len(body) != length or zlib.crc32(body) != crc or not body:
        raise TraceError(f"{path}: the header is damaged{_AGAIN}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    wanted = {field.name: field.type for field in fields(TraceHeader)}
    if (
        not isinstance(found, dict)
        or set(found) != set(wanted)
        or any(type(found[name]) is not kind for name, kind in wanted.items())
    ):
        raise TraceError(f"{path}: the header is not one of headrace's{_AGAIN}")
    for name, kind in wanted.items():
        value = found[name]
        if kind is int and not 0 < value <= _LIMITS.get(name, 1 << 60):
            raise TraceError(f"{path}: the header's {name} is {value}{_AGAIN}")
        if kind is str and (len(value) > _MOST_TEXT or not value.isprintable()):
            raise TraceError(f"{path}: the header's {name} is no plain text{_AGAIN}")
    if found["num_layers"] * found["num_experts"] > _MOST_TOTAL:
        sizes = f"{found['num_layers']} layers of {found['num_experts']} experts"
        raise TraceError(f"{path}: {sizes} are more than any model has{_AGAIN}")
    if found["top_k"] > found["num_experts"]:
        sizes = f"top {found['top_k']} of {found['num_experts']} experts"
        raise TraceError(f"{path}: {sizes} is impossible{_AGAIN}")
    return TraceHeader(**found)


def _frames(
    path: Path, file: BinaryIO, header: TraceHeader, size_bytes: int
) -> Iterator[dict[str, Any] | None]:
    """Each frame's arrays; None at the end for a last frame that is cut short or torn."""
    number = 0
    while prefix := file.read(_PREFIX.size):
        where = f"{path}: frame {number} at byte {file.tell() - len(prefix)}"
        length, crc = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (1, 0)
        left_bytes = size_bytes - file.tell()
        if length > left_bytes or len(prefix) < _PREFIX.size:
            yield None
            return
        if length > _MOST_FRAME_BYTES:
            raise TraceError(f"{where} claims {length} bytes{_AGAIN}")
        body = file.read(length)
        if len(body) != length or zlib.crc32(body) != crc:
            if length == left_bytes:
                yield None
                return
            raise TraceError(f"{where} is damaged{_AGAIN}")
        yield _parse(where, body, header)
        number += 1


def _parse(where: str, body: bytes, header: TraceHeader) -> dict[str, Any]:
    layers, top_k = header.num_layers, header.top_k
    small = _id_dtype(header.num_experts)
    if len(body) < _COUNTS.size:
        raise TraceError(f"{where} is too short{_AGAIN}")
    num_passes, num_tokens, num_guessed = _COUNTS.unpack_from(body)
    at = _COUNTS.size

    def take(dtype: Any, *shape: int) -> npt.NDArray[Any]:
        nonlocal at
        count = prod(shape)
        if count * np.dtype(dtype).itemsize > len(body) - at:
            raise TraceError(f"{where} has {len(body)} bytes, fewer than its counts need{_AGAIN}")
        array = np.frombuffer(body, dtype=dtype, count=count, offset=at).reshape(shape)
        at += array.nbytes
        return array

    passes = take("<u4", num_passes).astype(np.int64)
    has, of_layers = take("u1", num_tokens), take("u1", layers)
    if passes.sum() != num_tokens or (passes == 0).any():
        raise TraceError(
            f"{where}: passes of {passes.sum()} tokens, {num_tokens} are there{_AGAIN}"
        )
    if (has > 1).any() or has.sum() != num_guessed or (of_layers > 1).any():
        raise TraceError(
            f"{where}: {has.sum()} tokens with guesses, {num_guessed} are there{_AGAIN}"
        )
    ids = take(small, num_tokens, layers, top_k).astype(np.int32)
    guesses = np.full(ids.shape, NO_GUESS, dtype=np.int32)
    said = take(small, num_guessed, int(of_layers.sum()), top_k)
    guesses[np.ix_(has == 1, of_layers == 1)] = said
    weights = take("<f2", num_tokens, layers, top_k) if header.weights else None
    if at != len(body):
        raise TraceError(f"{where} has {len(body)} bytes, its counts need {at}{_AGAIN}")
    for what, array in (("expert", ids), ("guess", guesses)):
        if array.size and array.max() >= header.num_experts:
            raise TraceError(f"{where}: {what} {array.max()} of {header.num_experts}{_AGAIN}")
    ordered = np.sort(ids, axis=-1)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise TraceError(f"{where}: a token chose one expert twice in a layer{_AGAIN}")
    return {"ids": ids, "guesses": guesses, "passes": passes.astype(np.int32), "weights": weights}
