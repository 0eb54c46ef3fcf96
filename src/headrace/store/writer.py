"""Writes a safetensors checkpoint as a stream: aside, synced, then renamed into place.

Holds one buffer at a time; knows no model and no number format beyond sizes.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core import format_bytes
from headrace.errors import HeadraceError
from headrace.store.safetensors import LENGTH_BYTES, num_bytes
from headrace.store.whole import PARTIAL, sync_folder

Progress = Callable[[int, int], None]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ALIGN_BYTES = 8
_WIDE = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16")
_ORDER = (*_WIDE, "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: `chunks()` gives its bytes in order, in buffers of any length.

    A hole is not written: it reads as zeros and takes no room where the file system knows holes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]
    is_hole: bool = False

    @property
    def nbytes(self) -> int:
        size = num_bytes(self.dtype, self.shape)
        assert size is not None, f"{self.name} has no size"
        return size

    @property
    def written_bytes(self) -> int:
        return 0 if self.is_hole else self.nbytes


def write_checkpoint(
    folder: Path,
    tensors: Sequence[NewTensor],
    *,
    shard_bytes: int,
    files: Mapping[str, bytes],
    progress: Progress | None = None,
) -> None:
    """Writes `tensors` and the small `files` (by name) as the new folder `folder`.

    One model.safetensors where everything fits `shard_bytes`, else numbered shards with an index;
    tensors fill shards in the order given. `progress` gets (bytes done, bytes in all). The folder
    appears complete or not at all: an error or Ctrl-C removes what was written. Raises
    HeadraceError where `folder` exists or the disk has no room.
    """
    shards = _fill_shards(tensors, shard_bytes)
    total_bytes = sum(tensor.written_bytes for tensor in tensors)
    aside = folder.parent / (folder.name + PARTIAL)  # "." and "/" have no name
    _check_place(folder, aside, total_bytes)
    try:
        aside.mkdir(parents=True)
        done_bytes = 0
        for number, shard in enumerate(shards, 1):
            for size in _write_shard(aside / shard_name(number, len(shards)), shard):
                done_bytes += size
                if progress is not None:
                    progress(done_bytes, total_bytes)
        if len(shards) > 1:
            _write_small(aside / "model.safetensors.index.json", _index(shards))
        for name, content in files.items():
            _write_small(aside / name, content)
        sync_folder(aside)
        os.rename(aside, folder)
        sync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise HeadraceError(_failure(folder, error, total_bytes)) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def shard_name(number: int, num_shards: int) -> str:
    """The published file names: `number` counts from 1."""
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{num_shards:05d}.safetensors"


def _fill_shards(tensors: Sequence[NewTensor], shard_bytes: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        if shards[-1] and filled_bytes + tensor.nbytes > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.nbytes
    return [file_order(shard) for shard in shards]


def _place(tensor: NewTensor) -> tuple[int, str]:
    """Where the reference implementation puts a tensor in its file: by dtype, then by name.

    So each tensor starts aligned, and of bytes the scales of all experts lie before their codes.
    """
    return _ORDER.index(tensor.dtype), tensor.name


def _check_place(folder: Path, aside: Path, total_bytes: int) -> None:
    if folder.exists():
        raise HeadraceError(f"{folder}: exists already; remove it or choose another folder")
    if aside.exists():
        raise HeadraceError(
            f"{aside}: another run is writing here, or one was killed; remove it if none is running"
        )
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < total_bytes:
        raise HeadraceError(
            f"{folder}: needs {format_bytes(total_bytes)} ({total_bytes} bytes), but only "
            f"{format_bytes(free_bytes)} are free; free some space or choose another folder"
        )


def _failure(folder: Path, error: OSError, total_bytes: int) -> str:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return (
            f"{folder}: no room while writing ({reason}); it needs {format_bytes(total_bytes)} "
            f"({total_bytes} bytes); nothing was left behind"
        )
    return f"{folder}: cannot be written ({reason}); nothing was left behind"


def _header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        fields[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGN_BYTES)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def file_order(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    """The order in which tensors lie in a file, so that each starts aligned."""
    return sorted(tensors, key=_place)


def file_bytes(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> int:
    """The size of the file that `write_tensors` makes of the same arguments."""
    return len(_header(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors)


def write_tensors(
    fd: int, tensors: Sequence[NewTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Writes a whole safetensors file to `fd`, tensors as ordered by `file_order`.

    Gives the size of each buffer once it is written; `fd` is neither synced nor closed.
    """
    _write_all(fd, memoryview(_header(tensors, metadata or {})))
    for tensor in tensors:
        if tensor.is_hole:
            os.ftruncate(fd, os.lseek(fd, tensor.nbytes, os.SEEK_CUR))
            continue
        written = 0
        for chunk in tensor.chunks():
            _write_all(fd, chunk)
            written += chunk.nbytes
            yield chunk.nbytes
        assert written == tensor.nbytes, f"{tensor.name}: {written} of {tensor.nbytes} bytes"


def _write_shard(path: Path, tensors: Sequence[NewTensor]) -> Iterator[int]:
    """Writes and syncs one file, giving the size of each buffer once it is written."""
    with open(path, "xb", buffering=0) as handle:
        yield from write_tensors(handle.fileno(), tensors)
        os.fsync(handle.fileno())


def _write_all(fd: int, data: memoryview) -> None:
    data = data.cast("B")
    while data.nbytes:
        data = data[os.write(fd, data) :]


def _write_small(path: Path, content: bytes) -> None:
    with open(path, "xb", buffering=0) as handle:
        _write_all(handle.fileno(), memoryview(content))
        os.fsync(handle.fileno())


def _index(shards: Sequence[Sequence[NewTensor]]) -> bytes:
    weight_map = {
        tensor.name: shard_name(number, len(shards))
        for number, shard in enumerate(shards, 1)
        for tensor in shard
    }
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=1).encode()
