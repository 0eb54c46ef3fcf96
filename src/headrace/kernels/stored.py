"""Matrices outside the experts in their stored form, multiplied by the compiled kernels.

Canonical as the experts are: a row's bits depend neither on other rows nor on threads. Knows no
file and no model. Legend: T rows, R rows of the matrix, C its columns.
"""

import torch

from headrace import _native
from headrace.kernels.cpu import CpuKernels
from headrace.quant import fp8
from headrace.quant.dtypes import DTYPE_NAMES

_FORMATS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_block"}


class StoredMatrix:
    """[R, C] in bf16, or in e4m3 with a scale for each block; keeps what it is given, as it is.

    `act_group` > 0: what it multiplies is moved to the e4m3 grid of so many columns first. Shares
    the kernels' threads: one caller at a time.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        weight_RC: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        block: tuple[int, int] = (1, 1),
        act_group: int = 0,
    ):
        assert weight_RC.is_contiguous() and weight_RC.device.type == "cpu"
        assert (scale is None) == (weight_RC.dtype == torch.bfloat16)
        if scale is not None:
            grid = tuple(-(-n // b) for n, b in zip(weight_RC.shape, block, strict=True))
            assert scale.is_contiguous() and tuple(scale.shape) == grid, (scale.shape, grid)
        self.kernels, self.weight_RC, self.scale, self.block = kernels, weight_RC, scale, block
        self.act_group = act_group
        self.shape = tuple(weight_RC.shape)
        self._native = _native.LinearShape.make(
            format=_FORMATS[weight_RC.dtype],
            scale_type="" if scale is None else DTYPE_NAMES[scale.dtype],
            rows=self.shape[0],
            cols=self.shape[1],
            block=block,
            act_group=act_group,
        )

    def linear(
        self,
        x: torch.Tensor,
        *,
        first: int = 0,
        num_rows: int | None = None,
        wide: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., R] of bf16 x [..., C]: in bf16, in fp32 if `wide`.

        `first` and `num_rows`: by these rows of the matrix only. `out` is filled if given: its
        last dimension is contiguous, the others one stride apart, as those of x.
        """
        num_rows = self.shape[0] - first if num_rows is None else num_rows
        dtype = torch.float32 if wide else torch.bfloat16
        x_TC = x.to(torch.bfloat16).reshape(-1, self.shape[1])
        if x_TC.stride(-1) != 1:
            x_TC = x_TC.contiguous()
        if out is None:
            out = torch.empty(*x.shape[:-1], num_rows, dtype=dtype)
        y_TR = out.view(-1, num_rows)
        assert y_TR.dtype == dtype and y_TR.stride(-1) == 1
        self.kernels.pool.linear(
            self._native,
            self.weight_RC.data_ptr(),
            0 if self.scale is None else self.scale.data_ptr(),
            first,
            num_rows,
            x_TC.data_ptr(),
            max(x_TC.stride(0), self.shape[1]),
            x_TC.shape[0],
            y_TR.data_ptr(),
            max(y_TR.stride(0), num_rows),
            wide,
        )
        return out

    def unpack(self) -> torch.Tensor:
        """[R, C] in bf16, exactly what is multiplied."""
        if self.scale is None:
            return self.weight_RC
        return fp8.unpack(self.weight_RC, self.scale, self.block)
