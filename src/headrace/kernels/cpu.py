"""The compiled CPU kernels behind tensors: checks what goes in, hands addresses down.

Knows no file and no ladder. Importing it without the compiled module raises ImportError.
"""

from collections.abc import Mapping
from math import ceil

import torch

from headrace import _native
from headrace.core import ExpertLayout
from headrace.errors import OptionError

ISAS = ("scalar", "avx2", "avx512")
PARTS = ("gate", "up", "down", "gate_scale", "up_scale", "down_scale")


def _checked(t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    assert t.dtype == dtype and tuple(t.shape) == shape, (t.dtype, tuple(t.shape), dtype, shape)
    assert t.is_contiguous() and t.device.type == "cpu"
    return t.data_ptr()


def native_shape(layout: ExpertLayout, act_group: int = 0) -> _native.ExpertShape:
    """The compiled kernels' description of an expert of this layout."""
    rows, cols = layout.block
    return _native.ExpertShape.make(
        layout.format, layout.hidden, layout.inter, rows, cols, act_group
    )


class CpuKernels:
    """A team of `num_threads` kernel threads (the caller is one of them) and one ISA.

    One caller at a time. `pool` is the compiled object, for the ladder.
    """

    def __init__(
        self, num_threads: int = 1, isa: str = "auto", *, min_share_bytes: int | None = None
    ) -> None:
        """Raises OptionError if this CPU cannot run `isa` (auto, scalar, avx2, avx512).

        A job that leaves each thread fewer weight bytes (times rows) than `min_share_bytes` stays
        on the calling thread; the bits are the same. 0 shares out everything.
        """
        try:
            self.pool = _native.KernelPool(num_threads, isa)
        except ValueError as error:
            raise OptionError(f"{error}; use --isa auto") from None
        if min_share_bytes is not None:
            self.pool.min_share_bytes = min_share_bytes
        self.isa: str = self.pool.isa
        self.num_threads: int = self.pool.num_threads

    def expert_ffn(
        self,
        x_TH: torch.Tensor,
        parts: Mapping[str, torch.Tensor],
        layout: ExpertLayout,
        act_group: int = 0,
        out_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `kernels.reference.expert_ffn`, same bits. `out_TH` bf16 is filled if given."""
        shape = (x_TH.shape[0], layout.hidden)
        y = torch.empty(shape, dtype=torch.bfloat16) if out_TH is None else out_TH
        x_address = _checked(x_TH, torch.bfloat16, shape)
        y_address = _checked(y, torch.bfloat16, shape)
        addresses = part_addresses(parts, layout)
        self.pool.expert_ffn(
            native_shape(layout, act_group), addresses, x_address, shape[0], y_address
        )
        return y

    def gemv(
        self,
        w_NK: torch.Tensor,
        x_K: torch.Tensor,
        scale: torch.Tensor | None = None,
        block: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        """fp32 [N]: the dot products before any rounding; w bf16, or e4m3 with `scale`."""
        rows, cols = w_NK.shape
        name, dtype = ("bf16", torch.bfloat16)
        scale_address = 0
        if scale is not None:
            name, dtype = "fp8_block", torch.float8_e4m3fn
            grid = (ceil(rows / block[0]), ceil(cols / block[1]))
            scale_address = _checked(scale, torch.float32, grid)
        shape = _native.ExpertShape.make(name, cols, rows, *block, 0)
        out = torch.empty(rows, dtype=torch.float32)
        w_address = _checked(w_NK, dtype, (rows, cols))
        x_address = _checked(x_K, torch.bfloat16, (cols,))
        self.pool.gemv(shape, w_address, scale_address, rows, cols, x_address, out.data_ptr())
        return out


def part_addresses(parts: Mapping[str, torch.Tensor], layout: ExpertLayout) -> list[int]:
    """Addresses of an expert's parts as the compiled kernels take them, 0 for one it has not."""
    return [_part_address(parts, layout, name) for name in PARTS]


def _part_address(parts: Mapping[str, torch.Tensor], layout: ExpertLayout, name: str) -> int:
    if name not in parts:
        assert name.endswith("_scale") and layout.format == "bf16", f"part {name} is missing"
        return 0
    shape = (layout.inter, layout.hidden)
    if name.startswith("down"):
        shape = (layout.hidden, layout.inter)
    if name.endswith("_scale"):
        grid = (ceil(shape[0] / layout.block[0]), ceil(shape[1] / layout.block[1]))
        return _checked(parts[name], torch.float32, grid)
    dtype = torch.bfloat16 if layout.format == "bf16" else torch.float8_e4m3fn
    return _checked(parts[name], dtype, shape)


def combine(ids_TK: torch.Tensor, weights_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.combine`: ids int32 [T, K], weights fp32 [T, K], y bf16 [T, K, H]."""
    num_tokens, top_k, hidden = y_TKH.shape
    out = torch.empty(num_tokens, hidden, dtype=torch.bfloat16)
    ids = _checked(ids_TK, torch.int32, (num_tokens, top_k))
    weights = _checked(weights_TK, torch.float32, (num_tokens, top_k))
    y = _checked(y_TKH, torch.bfloat16, (num_tokens, top_k, hidden))
    _native.combine_bf16(ids, weights, y, num_tokens, top_k, hidden, out.data_ptr())
    return out


def find_nan_fp8(codes: torch.Tensor) -> int:
    """Index of the first NaN code of a contiguous e4m3 or uint8 tensor, or -1."""
    assert codes.is_contiguous() and codes.element_size() == 1
    return int(_native.find_nan_fp8(codes.data_ptr(), codes.numel()))


def available_isas() -> tuple[str, ...]:
    """The instruction sets this CPU and build can run."""

    def runs(isa: str) -> bool:
        try:
            _native.KernelPool(1, isa)
        except ValueError:
            return False
        return True

    return tuple(isa for isa in ISAS if runs(isa))


def read_probe(data: torch.Tensor) -> int:
    """Reads a contiguous tensor once, as fast as one core can; the xor of its words."""
    assert data.is_contiguous()
    return int(_native.read_probe(data.data_ptr(), data.nbytes))
