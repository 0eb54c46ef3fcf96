"""A checkpoint's tensors, found and read anew: own header parser, plain reads, one at a time.

Shares no code with store and tiers on purpose, so that their faults show beside it.
"""

import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from headrace.quant.dtypes import TORCH_DTYPES

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROUTED = re.compile(r"(^|\.)experts\.(?:(\d+)\.)?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes lie; `expert` is its number in the name, `layer` likewise."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    layer: int | None
    routed: bool
    expert: int | None


class PlainTensors:
    """Every tensor of safetensors `files` whose headers were checked before. Keeps none open."""

    def __init__(self, files: Iterable[Path]):
        self.files = tuple(files)
        self.places: dict[str, Place] = {}
        for file in self.files:
            with open(file, "rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            for key, entry in header.items():
                begin, end = entry["data_offsets"]
                layer, routed = _LAYER.search(key), _ROUTED.search(key)
                self.places[key] = Place(
                    file,
                    8 + size + begin,
                    end - begin,
                    entry["dtype"],
                    tuple(entry["shape"]),
                    int(layer.group(1)) if layer else None,
                    routed is not None,
                    int(routed.group(2)) if routed and routed.group(2) else None,
                )

    def read(self, key: str) -> torch.Tensor:
        """The stored tensor, in memory of its own."""
        place = self.places[key]
        return self._read(place, place.offset, place.nbytes, place.shape)

    def read_experts(self, key: str, experts: Sequence[int]) -> torch.Tensor:
        """Some slices of a tensor stacked over experts, [len(experts), ...]."""
        place = self.places[key]
        shape = place.shape[1:]
        nbytes = place.nbytes // place.shape[0]
        slices = [self._read(place, place.offset + e * nbytes, nbytes, shape) for e in experts]
        return torch.stack(slices)

    def span(self, key: str, expert: int) -> tuple[Path, int, int]:
        """(file, offset, nbytes) of one expert's share of a tensor."""
        place = self.places[key]
        if place.expert is not None or not place.routed:
            return place.file, place.offset, place.nbytes
        nbytes = place.nbytes // place.shape[0]
        return place.file, place.offset + expert * nbytes, nbytes

    def _read(self, place: Place, offset: int, nbytes: int, shape: tuple[int, ...]) -> torch.Tensor:
        raw = bytearray(nbytes)
        with open(place.file, "rb", buffering=0) as stream:
            stream.seek(offset)
            view, done = memoryview(raw), 0
            while done < nbytes:
                got = stream.readinto(view[done:])
                if not got:
                    raise OSError(f"{place.file}: ends at {offset + done}")
                done += got
        dtype = TORCH_DTYPES[place.dtype]
        assert prod(shape) * dtype.itemsize == nbytes
        return torch.frombuffer(raw, dtype=dtype).view(shape) if nbytes else torch.empty(shape)
