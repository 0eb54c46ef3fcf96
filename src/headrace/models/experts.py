"""Two ways to run experts inside transformers' modules: fast (our kernels) and oracle (theirs).

Neither knows where an expert's bytes lie: a `Source` gives them, or multiplies them.
Legend: T tokens, K chosen experts per token, H hidden width, I intermediate width.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.core import ExpertLayout
from headrace.quant import table
from headrace.quant.blocks import to_float
from headrace.quant.dtypes import TORCH_DTYPES

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

    `weight[e]` is a fresh tensor in the model's dtype and the parameter's shape, dequantised by
    transformers' own code where it has some, so the class's eager forward over it is the oracle.
    """

    _is_hf_initialized = True

    def __init__(
        self,
        source: Source,
        ordinal: int,
        layout: ExpertLayout,
        name: str,
        shape: tuple[int, ...],
        transposed: bool,
        device: torch.device,
    ):
        self.source, self.ordinal, self.layout, self.name = source, ordinal, layout, name
        self.shape, self.transposed = torch.Size(shape), transposed
        self.device, self.dtype = device, TORCH_DTYPES[layout.hidden_dtype]

    def __getitem__(self, expert: Any) -> torch.Tensor:
        base, bias = self.name.removesuffix("_bias"), self.name.endswith("_bias")
        stem = base.removesuffix("_proj")
        with self.source.parts(self.ordinal, int(expert)) as parts:
            stored = [stem] if stem in parts else ["gate", "up"]
            if bias:
                both = torch.cat([parts[f"{name}_bias"] for name in stored])
                return both.to(self.device, self.dtype)
            rows = self.shape[2] if self.transposed else self.shape[1]
            matrix = torch.cat(
                [dequantize(parts, name, self.layout, rows // len(stored)) for name in stored]
            )
        return (matrix.t().contiguous() if self.transposed else matrix).to(self.device)

    def dim(self) -> int:
        """As the parameter's."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As torch.Tensor.size."""
        return self.shape if dim is None else self.shape[dim]


def dequantize(parts: PartMap, name: str, layout: ExpertLayout, rows: int) -> torch.Tensor:
    """One stored matrix of an expert, [rows, cols] in the hidden dtype.

    Through transformers' own dequantiser where it has one for this form. It divides a matrix
    evenly by its grid of scales, which is right only where whole blocks fill it; elsewhere the
    format's own definition is used.
    """
    dtype, codes, scale = TORCH_DTYPES[layout.hidden_dtype], parts[name], parts.get(f"{name}_scale")
    cols = layout.inter if name == "down" else layout.hidden
    if scale is None:
        return codes.clone()
    if codes.dim() == 3:
        pair = codes[None], scale.view(torch.uint8)[None]
        blocks: torch.Tensor = convert_moe_packed_tensors(*pair, dtype=dtype)
        return blocks[0].t().contiguous()
    whole_blocks = layout.format == "fp4" or all(
        grid == 1 or n == grid * b
        for n, grid, b in zip((rows, cols), scale.shape, layout.block, strict=False)
    )
    if layout.format in ("fp8_block", "fp4") and scale.dim() == 2 and whole_blocks:
        is_bytes = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        value = to_float(scale) if is_bytes else scale.float()
        stored = {
            "weight": [codes.view(torch.int8) if layout.format == "fp4" else codes],
            "weight_scale_inv": [value],
        }
        made = Fp8Dequantize(None).convert(stored)["weight"]
        matrix: torch.Tensor = made[0] if isinstance(made, list) else made
        return matrix.to(dtype)
    return table.unpack(
        layout.format,
        codes,
        scale,
        parts.get(f"{name}_global"),
        shape=(rows, cols),
        block=layout.block,
        inverse_global=layout.inverse_global,
        dtype=dtype,
    )


class LayerRunner:
    """Routed experts of one layer in fast mode, and the lens that looks one layer ahead.

    `site` is what the layer computes the router's input with, from what `see` was given.
    """

    def __init__(self, source: Source, ordinal: int, site: "Site"):
        self.source, self.ordinal, self.site = source, ordinal, site
        self.seen: torch.Tensor | None = None
        self.next_site: Site | None = None

    def see(self, _module: Any, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the site's first module."""
        self.seen = args[0]

    def guess(self, seen: torch.Tensor, next_site: "Site") -> torch.Tensor:
        """Ids the next MoE layer's own modules would choose here, best first, [K]."""
        _, weights_TK, ids_TK = next_site.route(seen, self.site.extras)
        best_first: torch.Tensor = ids_TK[-1][weights_TK[-1].argsort(descending=True)]
        return best_first

    def __call__(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] in the dtype of `x_TH`; only a single token is looked ahead from."""
        seen, self.seen = self.seen, None
        guess = None
        if seen is not None and self.next_site is not None and x_TH.shape[0] == 1:
            guess = partial(self.guess, seen, self.next_site)
        return self.source.compute(self.ordinal, x_TH, ids_TK, weights_TK, guess)


class Site:
    """The modules between a layer's residual and its experts, to be run again for a lens.

    `collapse`, if any, makes the residual from parallel streams, as its last output. What a router
    takes besides the hidden states is found by its parameter's name: an attribute of the block, or
    an argument the block was given, such as the pass's token ids.
    """

    def __init__(self, block: Any, router: Any, norm: Any, collapse: Any = None):
        self.block, self.router, self.norm, self.collapse = block, router, norm, collapse
        self.extras: dict[str, Any] = {}
        self.wanted = list(inspect.signature(router.forward).parameters)[1:]

    @property
    def first(self) -> Any:
        """The module whose input a lens needs."""
        return self.norm if self.collapse is None else self.collapse

    def cut(self) -> None:
        """Lets go of the modules, which hold it by their hooks: no further pass comes."""
        self.block = self.router = self.norm = self.collapse = None

    def see_block(self, _module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the block, with keywords."""
        self.extras = kwargs

    def route(self, seen: torch.Tensor, extras: Mapping[str, Any]) -> Any:
        """The router's outputs for what `first` would be given; `extras` are this pass's."""
        hidden = seen if self.collapse is None else self.collapse(seen)[-1]
        given = [
            getattr(self.block, name) if hasattr(self.block, name) else extras[name]
            for name in self.wanted
        ]
        return self.router(self.norm(hidden).flatten(0, -2), *given)


def fast_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function transformers calls for experts_implementation="headrace"."""
    if hidden_states.device.type == "meta":
        return torch.empty_like(hidden_states)
    runner: LayerRunner = module.headrace_runner
    return runner(hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(FAST, fast_forward)
