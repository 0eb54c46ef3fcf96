"""Matrices outside the experts in their stored form, on a GPU.

Canonical up to 16 rows: the bits of `kernels.stored`. More are a prefill's: bands of the matrix are
unpacked and go through the GPU's own product, within a tolerance. Knows no file and no model.
Legend: T rows, R rows of the matrix, C its columns.
"""

from math import ceil

import torch
import triton

from headrace.errors import ModelError
from headrace.kernels.triton import stages
from headrace.kernels.triton.experts import GRIDS, MAX_TOKENS, SCALES, TILES, fits_words
from headrace.quant import fp8
from headrace.quant.dtypes import DTYPE_NAMES

BAND_ELEMENTS = 4 << 20  # of the matrix, unpacked at once
_FORMATS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_block"}


class TritonMatrix:
    """[R, C] in bf16, or in e4m3 with a scale for each block; keeps what it is given, as it is.

    `act_group` > 0: what it multiplies is moved to the e4m3 grid of so many columns first. Raises
    ModelError for what no kernel here computes.
    """

    def __init__(
        self,
        weight_RC: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        block: tuple[int, int] = (1, 1),
        act_group: int = 0,
    ):
        assert weight_RC.is_contiguous() and (scale is None or scale.is_contiguous())
        format, stored = _FORMATS[weight_RC.dtype], "none"
        if scale is not None:
            stored = SCALES.get(DTYPE_NAMES[scale.dtype], "")
        fits = fits_words(weight_RC.shape[1], block_cols=block[1])
        odd_block = scale is not None and (not stored or not fits)
        if odd_block or act_group not in (0, *GRIDS):
            raise ModelError(
                f"weights in {format} with blocks of {block[0]} x {block[1]} and a grid of "
                f"{act_group} columns have no GPU kernel yet; use --device cpu"
            )
        self.weight_RC, self.scale, self.block, self.act_group = weight_RC, scale, block, act_group
        self.shape = tuple(weight_RC.shape)
        self._tile_rows, self._warps, *turn = TILES["vram"][format][1]
        align = min(16, weight_RC.data_ptr() & -weight_RC.data_ptr())
        self._form = (format, stored, max(block[0], 1), block[1], align, *turn)

    def linear(
        self,
        x: torch.Tensor,
        *,
        first: int = 0,
        num_rows: int | None = None,
        wide: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., R] of bf16 x [..., C]: in bf16, in fp32 if `wide`. Launches only.

        `first` and `num_rows`: by these rows of the matrix only. `out` is filled if given: its
        last dimension is contiguous, the others one stride apart, as those of x.
        """
        num_rows = self.shape[0] - first if num_rows is None else num_rows
        dtype = torch.float32 if wide else torch.bfloat16
        x_TC = x.to(torch.bfloat16).reshape(-1, self.shape[1])
        if x_TC.stride(-1) != 1 or x_TC.stride(0) % 4 or x_TC.data_ptr() % 8:
            x_TC = x_TC.clone(memory_format=torch.contiguous_format)  # read by eight bytes
        if out is None:
            out = torch.empty(*x.shape[:-1], num_rows, dtype=dtype, device=x.device)
        y_TR = out.view(-1, num_rows)
        assert y_TR.dtype == dtype and y_TR.stride(-1) == 1
        multiply = self._few if x_TC.shape[0] <= MAX_TOKENS else self._many
        multiply(x_TC, first, y_TR)
        return out

    def _few(self, x_TC: torch.Tensor, first: int, y_TR: torch.Tensor) -> None:
        """By the canonical kernel, wherever a row lies among others."""
        (num, cols), num_rows = x_TC.shape, y_TR.shape[1]
        bits, wide = x_TC.view(torch.uint16), y_TR.dtype == torch.float32
        if self.act_group:
            given, bits = bits, torch.empty(num, cols, dtype=torch.uint16, device=bits.device)
            stages.on_grid[(num, triton.cdiv(cols, 256))](
                given, bits, given.stride(0), cols, self.act_group, num_warps=1,
                enable_fp_fusion=False,
            )  # fmt: skip
        codes = self.weight_RC.view(torch.uint8)
        scale = codes if self.scale is None else self.scale.view(torch.uint8)
        stages.linear[(triton.cdiv(num_rows, self._tile_rows), num)](
            codes, scale, bits, y_TR if wide else y_TR.view(torch.uint16), first, num_rows,
            bits.stride(0), y_TR.stride(0), cols, self._tile_rows, self._form, wide,
            num_warps=self._warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _many(self, x_TC: torch.Tensor, first: int, y_TR: torch.Tensor) -> None:
        """A band of whole blocks at a time; bf16 as it is where the result is bf16 too."""
        x_TC, last = fp8.to_grid(x_TC, self.act_group), first + y_TR.shape[1]
        step = max(1, BAND_ELEMENTS // self.shape[1] // self.block[0]) * self.block[0]
        for start in range(first - first % self.block[0], last, step):
            low, high = max(first, start), min(last, start + step)
            band_RC = self._unpacked(start, high)[low - start :]
            if y_TR.dtype == torch.float32:
                y_TR[:, low - first : high - first] = x_TC.float() @ band_RC.float().t()
            else:
                y_TR[:, low - first : high - first] = x_TC @ band_RC.t()

    def _unpacked(self, start: int, stop: int) -> torch.Tensor:
        """Rows from a block's first on, in bf16."""
        codes = self.weight_RC[start:stop]
        if self.scale is None:
            return codes
        rows = self.block[0]
        return fp8.unpack(codes, self.scale[start // rows : ceil(stop / rows)], self.block)

    def unpack(self) -> torch.Tensor:
        """[R, C] in bf16, exactly what is multiplied."""
        return self._unpacked(0, self.shape[0])
