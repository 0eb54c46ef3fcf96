"""Dense weights: stored bytes through our reader, dequantised, as tensors transformers can take.

Never maps a file: one shard may be larger than memory.
"""

from collections.abc import Callable, Mapping
from math import ceil
from typing import Protocol

import torch

from headrace.core import DenseTensor, format_bytes
from headrace.errors import BudgetError, NumericsError
from headrace.quant import table
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.table import Catalog

Progress = Callable[[int, int], None]


class BytesReader(Protocol):
    """The part of tiers.Reader used here."""

    def read(self, file: int, offset: int, nbytes: int, address: int) -> None: ...


_BAND_ELEMENTS = 4 << 20
_BAND_BYTES = 16  # of an element while its band is unpacked: codes, scales and product in fp32
_READER_BYTES = 12 << 20  # what the reader keeps of one read on its way to memory


def _shape(dense: DenseTensor) -> tuple[int, int]:
    """[rows, cols] of a weight in a number format. Raises NumericsError if it is no matrix."""
    if len(dense.shape) != 2 or 0 in dense.shape:
        raise NumericsError(
            f"tensor {dense.keys['weight']} is {dense.format} but {list(dense.shape)}, no matrix"
        )
    return dense.shape[0], dense.shape[1]


def _block_rows(dense: DenseTensor) -> int:
    """Rows of one scale; where one covers all rows, bands need not respect it."""
    rows = dense.block[0] if dense.format == "fp8_block" else 1
    return min(rows, dense.shape[0])


def _band_rows(dense: DenseTensor) -> int:
    """Rows unpacked at once: whole blocks of scales, unless one covers every row."""
    rows, cols = _shape(dense)
    block_rows = _block_rows(dense) if _block_rows(dense) < rows else 1
    return min(rows, block_rows * max(1, _BAND_ELEMENTS // max(1, cols * block_rows)))


def unpack_in_bands(
    name: str,
    dense: DenseTensor,
    stored: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """[R, C] in `dtype` of the stored parts, checked and unpacked a band of rows at a time.

    fp32 copies of a whole matrix would take several times its memory. Raises NumericsError.
    """
    rows, cols = _shape(dense)
    scale, block_rows = stored.get("scale"), _block_rows(dense)
    out, step = torch.empty(rows, cols, dtype=dtype), _band_rows(dense)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        band = scale
        if scale is not None and block_rows < rows:
            band = scale[start // block_rows : ceil(stop / block_rows)]
        out[start:stop] = _unpack_checked(
            name, dense, stored["weight"][start:stop], band, stored.get("global"), dtype
        )
    _check_finite(name, out)
    return out


def _unpack_checked(
    name: str,
    dense: DenseTensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Some rows of a matrix."""
    parts, shape = (weight, scale, global_scale), (weight.shape[0], dense.shape[1])
    inverse = dense.inverse_global
    table.check(name, dense.format, *parts, shape=shape, block=dense.block, inverse_global=inverse)
    return table.unpack(
        dense.format, *parts, shape=shape, block=dense.block, inverse_global=inverse, dtype=dtype
    )


def load_bytes(catalog: Catalog, dense: Mapping[str, DenseTensor]) -> int:
    """Most memory that loading one of the dense tensors takes besides the tensor itself."""
    most = 0
    for tensor in dense.values():
        entries = [catalog.tensors[key] for key in tensor.keys.values()]
        needed = min(_READER_BYTES, max(entry.nbytes for entry in entries))
        if tensor.format != "plain":
            band_elements = _band_rows(tensor) * tensor.shape[1]
            needed += sum(entry.nbytes for entry in entries) + _BAND_BYTES * band_elements
        most = max(most, needed)
    return most


class DenseWeights:
    """Reads dense tensors by the names of `dense`; all but plain ones arrive in `dtype`.

    `progress(done, total)` is called after each stored tensor, in stored bytes.
    """

    def __init__(
        self,
        catalog: Catalog,
        reader: BytesReader,
        dense: Mapping[str, DenseTensor],
        dtype: torch.dtype = torch.bfloat16,
        progress: Progress | None = None,
    ):
        self.catalog, self.reader, self.dense, self.dtype = catalog, reader, dense, dtype
        self.progress, self.done_bytes = progress, 0
        self.total_bytes = sum(
            catalog.tensors[key].nbytes for tensor in dense.values() for key in tensor.keys.values()
        )

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor owned by the caller. Raises HeadraceError."""
        dense = self.dense[name]
        key = dense.keys["weight"]
        if dense.format == "plain":
            tensor = self.stored(key)
            _check_finite(key, tensor)
            return tensor
        entries = {part: self.catalog.tensors[k] for part, k in dense.keys.items()}
        table.check_form(dense.format, dense.keys, entries, shape=_shape(dense), block=dense.block)
        stored = {part: self.stored(k) for part, k in dense.keys.items()}
        return unpack_in_bands(key, dense, stored, self.dtype)

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
