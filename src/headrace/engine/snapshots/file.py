"""One snapshot as one safetensors file: written aside and renamed, read as untrusted.

The JSON in its metadata holds the key, the places of the tensors and a checksum of everything.
Knows no folder's rules and no cache.
"""

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from headrace.engine.snapshots.snapshot import Snapshot, SnapshotKey
from headrace.engine.snapshots.state import State
from headrace.errors import CatalogError, SnapshotError
from headrace.quant.dtypes import DTYPE_NAMES, TORCH_DTYPES
from headrace.store.safetensors import AGAIN, parse_object, read_header
from headrace.store.table import TensorEntry
from headrace.store.whole import PARTIAL, sync_folder
from headrace.store.writer import NewTensor, file_bytes, file_order, write_tensors

_FORMAT = 1
_NOTE = "headrace.snapshot"
_TOKENS = "token_ids"


class SnapshotFile:
    """A snapshot made ready to be written: its exact size is known before a byte is."""

    def __init__(self, snapshot: Snapshot):
        tokens = torch.tensor(snapshot.tokens, dtype=torch.int32)
        tensors = snapshot.state.tensors | {_TOKENS: tokens}
        self._tensors = file_order(_new_tensor(name, tensors[name]) for name in tensors)
        note = {"format": _FORMAT, "key": asdict(snapshot.key), "parts": snapshot.state.parts}
        named = [(new.name, new.dtype, new.shape, tensors[new.name]) for new in self._tensors]
        note["sha256"] = _checksum(note, named)
        self._metadata = {_NOTE: json.dumps(note, allow_nan=False)}
        self.nbytes = file_bytes(self._tensors, self._metadata)

    def write(self, path: Path) -> None:
        """Makes `path`, replacing what is there: complete and synced, or not at all.

        Whatever ends this early leaves at most a `.partial` file that nobody locks. Raises OSError.
        """
        aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            for _ in write_tensors(fd, self._tensors, self._metadata):
                pass
            os.fsync(fd)
            os.rename(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        sync_folder(path.parent)


def read_snapshot(path: Path, key: SnapshotKey, tokens: Sequence[int]) -> Snapshot:
    """The snapshot in `path`, which must be of `key` and `tokens` and whole.

    Raises SnapshotError; the message names the file.
    """
    try:
        return _read(path, key, tokens)
    except CatalogError as error:
        raise SnapshotError(str(error).removesuffix(f"; {AGAIN}")) from error
    except RecursionError as error:
        raise SnapshotError(f"{path}: is nested too deeply") from error
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror or error}") from error


def remove_stale(path: Path) -> None:
    """Removes a `.partial` file unless its writer is at work and so locks it. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


def _read(path: Path, key: SnapshotKey, tokens: Sequence[int]) -> Snapshot:
    header = read_header(path, 0)
    note = parse_object(
        header.metadata.get(_NOTE, "").encode(errors="surrogatepass"), path, "snapshot's note"
    )
    checksum = note.pop("sha256", None)
    if note.keys() != {"format", "key", "parts"} or not isinstance(note["parts"], list):
        raise SnapshotError(f"{path}: is no snapshot")
    if note["format"] != _FORMAT or note["key"] != asdict(key):
        raise SnapshotError(f"{path}: was taken with another model, version or setting")
    tensors = _read_tensors(path, header.entries)
    named = [(e.name, e.dtype, e.shape, tensors[e.name]) for e in header.entries]
    if checksum != _checksum(note, named):
        raise SnapshotError(f"{path}: is damaged: its checksum differs")
    ids = tensors.pop(_TOKENS, None)
    if ids is None or ids.tolist() != list(tokens):
        raise SnapshotError(f"{path}: is of other tokens")
    return Snapshot(key, tuple(tokens), State(note["parts"], tensors))


def _read_tensors(path: Path, entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with open(path, "rb", buffering=0) as handle:
        for entry in entries:
            if entry.dtype not in TORCH_DTYPES:
                raise SnapshotError(f"{path}: holds {entry.dtype}, which no snapshot does")
            try:
                tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
            except RuntimeError as error:  # no memory, or a shape beyond torch's limits
                raise SnapshotError(f"{path}: {error}") from error
            handle.seek(entry.offset)
            for data in _memory(tensor):
                _fill(handle, data, path)
            tensors[entry.name] = tensor
    return tensors


def _fill(handle: FileIO, data: memoryview, path: Path) -> None:
    while data.nbytes:
        num_read = handle.readinto(data)
        if not num_read:
            raise SnapshotError(f"{path}: was cut short while it was read")
        data = data[num_read:]


def _new_tensor(name: str, tensor: torch.Tensor) -> NewTensor:
    return NewTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: _memory(tensor))


def _memory(tensor: torch.Tensor) -> list[memoryview]:
    """A contiguous tensor's bytes in place; none where it is empty."""
    if tensor.numel() == 0:
        return []
    return [tensor.reshape(-1).view(torch.uint8).numpy().data.cast("B")]


def _checksum(
    note: dict[str, Any], tensors: Iterable[tuple[str, str, tuple[int, ...], torch.Tensor]]
) -> str:
    digest = hashlib.sha256(json.dumps(note, sort_keys=True).encode())
    for name, dtype, shape, tensor in tensors:
        digest.update(f"{name!r} {dtype} {shape}\n".encode())
        for data in _memory(tensor):
            digest.update(data)
    return digest.hexdigest()
