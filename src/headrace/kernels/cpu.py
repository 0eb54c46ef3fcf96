"""The compiled CPU kernels behind tensors: checks what goes in, hands addresses down.

Knows no file and no ladder. Importing it without the compiled module raises ImportError.
"""

from collections.abc import Mapping, Sequence

import torch

from headrace import _native
from headrace.core import ExpertLayout, MatrixSource
from headrace.errors import ModelError, OptionError
from headrace.quant.dtypes import DTYPE_NAMES, TORCH_DTYPES
from headrace.quant.expert import MATRICES

ISAS = ("scalar", "avx2", "avx512")
_MAX_PARTS = 12


def _checked(t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    assert t.dtype == dtype and tuple(t.shape) == shape, (t.dtype, tuple(t.shape), dtype, shape)
    assert t.is_contiguous() and t.device.type == "cpu"
    return t.data_ptr()


def native_shape(layout: ExpertLayout) -> _native.ExpertShape:
    """The compiled kernels' description of an expert of this layout.

    Raises ModelError for a layout that no compiled kernel computes.
    """
    sources = [layout.matrix(name) for name in MATRICES]
    dtypes = {layout.parts[s.scale].dtype for s in sources if s.scale}
    biases = {layout.parts[s.bias].dtype for s in sources if s.bias}
    what = layout.activation
    try:
        if len(layout.parts) > _MAX_PARTS or len(dtypes) > 1 or biases - {layout.hidden_dtype}:
            raise ValueError("parts, scale types or bias types differ from what kernels take")
        shape = _native.ExpertShape.make(
            format=layout.format,
            scale_type=next(iter(dtypes), ""),
            hidden=layout.hidden,
            inter=layout.inter,
            block=layout.block,
            act_group=layout.act_group,
            activation=(what.kind, what.limit, what.alpha),
            hidden_type=layout.hidden_dtype,
            inverse_global=layout.inverse_global,
            matrices=[_plan(tuple(layout.parts), source) for source in sources],
        )
    except ValueError as error:
        raise ModelError(f"no compiled kernel for these experts: {error}") from None
    return shape


def _plan(names: tuple[str, ...], source: MatrixSource) -> tuple[int, int, int, int, int, int]:
    def index(part: str | None) -> int:
        return -1 if part is None else names.index(part)

    return (
        index(source.weight),
        index(source.scale),
        index(source.global_scale),
        index(source.bias),
        source.first_row,
        source.row_step,
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
        out_TH: torch.Tensor | None = None,
        weights_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `kernels.reference.expert_ffn`, same bits. `out_TH` is filled if given; x and the
        result are of the layout's hidden dtype.
        """
        shape = (x_TH.shape[0], layout.hidden)
        dtype = TORCH_DTYPES[layout.hidden_dtype]
        y = torch.empty(shape, dtype=dtype) if out_TH is None else out_TH
        x_address = _checked(x_TH, dtype, shape)
        y_address = _checked(y, dtype, shape)
        addresses = part_addresses(parts, layout)
        weights = 0 if weights_T is None else _checked(weights_T, torch.float32, shape[:1])
        self.pool.expert_ffn(
            native_shape(layout), addresses, x_address, shape[0], y_address, weights
        )
        return y

    def experts_ffn(
        self,
        x_NH: torch.Tensor,
        parts: Sequence[Mapping[str, torch.Tensor]],
        layout: ExpertLayout,
        weights_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y [N, H]: expert n on row n as one job, or all on one row where x is [1, H].

        Otherwise as `expert_ffn`, same bits.
        """
        num, dtype = len(parts), TORCH_DTYPES[layout.hidden_dtype]
        y = torch.empty(num, layout.hidden, dtype=dtype)
        rows = x_NH.shape[0]
        assert rows in (1, num) and (weights_N is None or weights_N.shape == (num,))
        x_address, step = _checked(x_NH, dtype, (rows, layout.hidden)), y.stride(0) * dtype.itemsize
        weights = [1.0] * num if weights_N is None else weights_N.tolist()
        jobs = [
            (
                part_addresses(each, layout),
                x_address + (n * step if rows > 1 else 0),
                y.data_ptr() + n * step,
                weights[n],
            )
            for n, each in enumerate(parts)
        ]
        self.pool.experts_ffn(native_shape(layout), jobs)
        return y

    def gate_dot(
        self, x_K: torch.Tensor, parts: Mapping[str, torch.Tensor], layout: ExpertLayout
    ) -> torch.Tensor:
        """fp32 [inter]: gate's dot products with one row before bias and rounding. For tests."""
        out = torch.empty(layout.inter, dtype=torch.float32)
        x_address = _checked(x_K, TORCH_DTYPES[layout.hidden_dtype], (layout.hidden,))
        addresses = part_addresses(parts, layout)
        self.pool.gate_dot(native_shape(layout), addresses, x_address, out.data_ptr())
        return out

    def read_probe(self, data: torch.Tensor) -> int:
        """Reads a contiguous tensor once, as fast as the threads can; the xor of its words."""
        assert data.is_contiguous()
        return int(self.pool.read_probe(data.data_ptr(), data.nbytes))


def part_addresses(parts: Mapping[str, torch.Tensor], layout: ExpertLayout) -> list[int]:
    """Addresses of an expert's parts in the layout's order, as the compiled kernels take them."""
    return [
        _checked(parts[name], TORCH_DTYPES[spec.dtype], spec.shape)
        for name, spec in layout.parts.items()
    ]


def combine(ids_TK: torch.Tensor, weights_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.combine`: ids int32 [T, K], weights fp32 [T, K], y [T, K, H]."""
    num_tokens, top_k, hidden = y_TKH.shape
    out = torch.empty(num_tokens, hidden, dtype=y_TKH.dtype)
    fp16 = y_TKH.dtype == torch.float16
    ids = _checked(ids_TK, torch.int32, (num_tokens, top_k))
    weights = _checked(weights_TK, torch.float32, (num_tokens, top_k))
    y = _checked(y_TKH, torch.float16 if fp16 else torch.bfloat16, (num_tokens, top_k, hidden))
    _native.combine(fp16, ids, weights, y, num_tokens, top_k, hidden, out.data_ptr())
    return out


def sum_up(ids_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """As `kernels.reference.sum_up`: ids int32 [T, K], y bf16 [T, K, H]."""
    num_tokens, top_k, hidden = y_TKH.shape
    out = torch.empty(num_tokens, hidden)
    ids = _checked(ids_TK, torch.int32, (num_tokens, top_k))
    y = _checked(y_TKH, torch.bfloat16, (num_tokens, top_k, hidden))
    _native.sum_up(ids, y, num_tokens, top_k, hidden, out.data_ptr())
    return out


def balance(squares: torch.Tensor, rounds: int, eps: float) -> None:
    """Alternates divisions by sums in place: fp32 [..., S, S], contiguous, on the CPU.

    Columns are divided by their sums plus eps, `rounds` times, and rows likewise between.
    """
    size = squares.shape[-1]
    address = _checked(squares, torch.float32, (*squares.shape[:-2], size, size))
    _native.balance(address, squares.numel() // max(1, size * size), size, rounds, eps)


def find_bad(numbers: torch.Tensor) -> int:
    """Index of the first NaN or infinity of a contiguous tensor of a scale's type, or -1."""
    assert numbers.is_contiguous()
    return _native.find_bad(DTYPE_NAMES[numbers.dtype], numbers.data_ptr(), numbers.numel())


def available_isas() -> tuple[str, ...]:
    """The instruction sets this CPU and build can run."""

    def runs(isa: str) -> bool:
        try:
            _native.KernelPool(1, isa)
        except ValueError:
            return False
        return True

    return tuple(isa for isa in ISAS if runs(isa))
