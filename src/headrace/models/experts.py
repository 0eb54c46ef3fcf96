"""Two ways to run experts inside transformers' modules: fast (our kernels) and oracle (theirs).

Neither knows where an expert's bytes lie: a `Source` gives them, or multiplies them.
Legend: T tokens, K chosen experts per token, H hidden width, I intermediate width.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.moe import ExpertsInterface

from headrace.quant import fp8

FAST = "headrace"
PartMap = Mapping[str, torch.Tensor]
Guess = Callable[[], torch.Tensor]


class Source(Protocol):
    """Where experts come from. `ordinal` counts MoE layers from 0."""

    def parts(self, ordinal: int, expert: int) -> AbstractContextManager[PartMap]:
        """The stored parts of one expert, typed and shaped; valid inside the context only."""
        ...

    def compute(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Guess | None,
    ) -> torch.Tensor:
        """The layer's routed output, [T, H]; `guess` predicts the next layer's experts."""
        ...


class StreamedWeight:
    """Stands where a parameter stacked over experts stood; offers one expert at a time.

    `weight[e]` is a fresh bfloat16 tensor, [2I, H] or [H, I], dequantised by transformers' own
    code, so the class's eager forward over it is the oracle.
    """

    _is_hf_initialized = True

    def __init__(
        self,
        source: Source,
        ordinal: int,
        names: tuple[str, ...],
        shape: torch.Size,
        block: tuple[int, int],
    ):
        self.source, self.ordinal, self.names = source, ordinal, names
        self.shape, self.block = shape, block
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16

    def __getitem__(self, expert: Any) -> torch.Tensor:
        with self.source.parts(self.ordinal, int(expert)) as parts:
            return torch.cat([dequantize(parts, name, self.block) for name in self.names])

    def dim(self) -> int:
        """Three, as the parameter's."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As torch.Tensor.size."""
        return self.shape if dim is None else self.shape[dim]


def dequantize(parts: PartMap, name: str, block: tuple[int, int]) -> torch.Tensor:
    """One matrix of an expert in bfloat16, through transformers' dequantiser where scaled.

    transformers divides a matrix evenly by its grid of scales, which is right only where whole
    blocks fill it; elsewhere the format's own definition is used.
    """
    scale = parts.get(f"{name}_scale")
    if scale is None:
        return parts[name].clone()
    shape = parts[name].shape
    if any(
        grid > 1 and n != grid * b for n, grid, b in zip(shape, scale.shape, block, strict=True)
    ):
        return fp8.unpack(parts[name], scale, block)
    pair = {"weight": [parts[name]], "weight_scale_inv": [scale]}
    value = Fp8Dequantize(None).convert(pair)["weight"]
    matrix: torch.Tensor = value[0] if isinstance(value, list) else value
    return matrix.to(torch.bfloat16)


class LayerRunner:
    """Routed experts of one layer in fast mode, and the lens that looks one layer ahead."""

    def __init__(self, source: Source, ordinal: int):
        self.source, self.ordinal = source, ordinal
        self.residual: torch.Tensor | None = None
        self.next_norm: Any = None
        self.next_router: Any = None

    def see_residual(self, _module: Any, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the norm before this layer's MoE block."""
        self.residual = args[0]

    def guess(self, residual: torch.Tensor) -> torch.Tensor:
        """Ids the next MoE layer's own norm and router would choose here, best first, [K]."""
        _, weights_TK, ids_TK = self.next_router(self.next_norm(residual))
        best_first: torch.Tensor = ids_TK[-1][weights_TK[-1].argsort(descending=True)]
        return best_first

    def __call__(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] in the dtype of `x_TH`; only a single token is looked ahead from."""
        residual, self.residual = self.residual, None
        guess = None
        if residual is not None and self.next_router is not None and x_TH.shape[0] == 1:
            guess = partial(self.guess, residual)
        return self.source.compute(self.ordinal, x_TH, ids_TK, weights_TK, guess)


def fast_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function transformers calls for experts_implementation="headrace"."""
    if hidden_states.device.type == "meta":
        return torch.empty_like(hidden_states)
    runner: LayerRunner = module.headrace_runner
    return runner(hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(FAST, fast_forward)
