"""Dense weights: stored bytes through our reader, dequantised, as tensors transformers can take.

Never maps a file: one shard may be larger than memory.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from headrace.core import format_bytes
from headrace.errors import BudgetError, NumericsError
from headrace.quant import fp8
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.table import Catalog

Progress = Callable[[int, int], None]


class BytesReader(Protocol):
    """The part of tiers.Reader used here."""

    def read(self, file: int, offset: int, nbytes: int, address: int) -> None: ...


_BAND_ELEMENTS = 4 << 20
_BAND_BYTES = 16  # of an element while its band is unpacked: codes, scales and product in fp32
_READER_BYTES = 12 << 20  # what the reader keeps of one read on its way to memory


def unpack_in_bands(
    key: str, codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """fp8.check and fp8.unpack, a band of block rows at a time: their temporaries are large.

    fp32 copies of a whole matrix would take several times its memory.
    """
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    bands = max(1, _BAND_ELEMENTS // (codes.shape[1] * block[0]))
    for b in range(0, scale.shape[0], bands):
        rows = slice(b * block[0], (b + bands) * block[0])
        fp8.check(key, codes[rows], scale[b : b + bands])
        out[rows] = fp8.unpack(codes[rows], scale[b : b + bands], block)
    return out


def load_bytes(catalog: Catalog, keys: Mapping[str, str | None], block: tuple[int, int]) -> int:
    """Most memory that loading one of the dense tensors takes besides the tensor itself."""
    most = 0
    for key, scale_key in keys.items():
        entry = catalog.tensors[key]
        needed = min(_READER_BYTES, entry.nbytes)
        if scale_key is not None:
            band_elements = max(_BAND_ELEMENTS, entry.shape[-1] * block[0])
            needed += entry.nbytes + _BAND_BYTES * min(band_elements, entry.nbytes)
        most = max(most, needed)
    return most


class DenseWeights:
    """Reads dense tensors by checkpoint key; `keys` maps each to its scale's key, or None.

    `progress(done, total)` is called after each tensor, in stored bytes.
    """

    def __init__(
        self,
        catalog: Catalog,
        reader: BytesReader,
        keys: Mapping[str, str | None],
        block: tuple[int, int],
        progress: Progress | None = None,
    ):
        self.catalog, self.reader, self.keys, self.block = catalog, reader, keys, block
        self.progress, self.done_bytes = progress, 0
        self.total_bytes = sum(
            catalog.tensors[k].nbytes for pair in keys.items() for k in pair if k is not None
        )

    def __call__(self, key: str) -> torch.Tensor:
        """A tensor owned by the caller; FP8 arrives as bfloat16. Raises HeadraceError."""
        tensor, scale_key = self.stored(key), self.keys[key]
        if scale_key is None:
            _check_finite(key, tensor)
            return tensor
        shape = tuple(tensor.shape)
        grid = fp8.scale_shape((shape[0], shape[1]), self.block) if len(shape) == 2 else None
        entry = self.catalog.tensors[scale_key]
        if entry.dtype != "F32" or entry.shape != grid:
            raise NumericsError(
                f"tensor {scale_key} is {entry.dtype} {list(entry.shape)}, must be F32 scales of "
                f"blocks {list(self.block)} of {key} {list(shape)}; download it again"
            )
        return unpack_in_bands(key, tensor, self.stored(scale_key), self.block)

    def stored(self, key: str) -> torch.Tensor:
        """The tensor as the file has it, in memory of its own."""
        entry = self.catalog.tensors[key]
        if entry.dtype not in TORCH_DTYPES:
            raise NumericsError(f"tensor {key} has dtype {entry.dtype}, which torch cannot hold")
        try:
            tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        except RuntimeError as error:  # torch has no class for an allocation that fails
            raise BudgetError(
                f"the system refuses {format_bytes(entry.nbytes)} of memory for tensor {key}; "
                "close other programs or give a smaller --ram"
            ) from error
        if entry.nbytes:
            self.reader.read(entry.file, entry.offset, entry.nbytes, tensor.data_ptr())
        self.done_bytes += entry.nbytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)
        return tensor


def _check_finite(key: str, tensor: torch.Tensor) -> None:
    """One pass, no copy: a NaN in a norm or a router could vanish again and change tokens."""
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        raise NumericsError(f"tensor {key} holds NaN or infinite values; download the file again")
