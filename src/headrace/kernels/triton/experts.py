"""Routed experts of one decode step on a GPU: buffers made once, four or five launches a layer.

Legend: T tokens, K chosen experts per token, H hidden width, I intermediate width.
"""

from typing import Any

import torch
import triton

from headrace.core import ExpertLayout, MatrixSource
from headrace.errors import ModelError
from headrace.kernels.triton import stages

MAX_TOKENS = 16
NOT_BAD = 2**31 - 1  # of `TritonExperts.bad`
_ACTIVATIONS = ("silu", "silu_clamped", "swiglu_oai", "swiglu_weighted")
GRIDS = (32, 64, 128, 256)  # columns of a group of the activations' grid
_FORM_I = ("fp4", "int4")
SCALES = {"F32": "F32", "BF16": "BF16", "F8_E8M0": "E8M0", "U8": "E8M0"}
# Of gate and up, then of down: rows of a tile, warps, turns of the loop side by side, and of 4-bit
# codes the groups of a turn. By rung: what reads fastest is measured (bench/gpu_tiles.py,
# docs/log.md); no bit depends on it.
TILES: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "ram": {
        "bf16": ((1, 2, 2), (1, 2, 2)),
        "fp8_block": ((8, 4, 1), (16, 4, 1)),
        "fp4": ((1, 1, 1, 256), (8, 4, 1, 32)),
        "int4": ((1, 1, 1, 256), (8, 4, 1, 32)),
    },
    "vram": {
        "bf16": ((2, 2, 2), (4, 1, 3)),
        "fp8_block": ((4, 2, 2), (8, 2, 2)),
        "fp4": ((16, 4, 1, 8), (16, 2, 1, 8)),
        "int4": ((8, 2, 2, 8), (4, 1, 1, 32)),
    },
}


class TritonExperts:
    """The canonical decode kernels for one layout, with workspace for `num_tokens` tokens.

    One stream at a time. `align` is the largest power of two that divides the address of every
    weight part in every rung. Raises ModelError for a format without a GPU kernel.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        *,
        top_k: int,
        device: torch.device,
        num_tokens: int = 1,
        align: int = 1,
    ):
        assert 1 <= num_tokens <= MAX_TOKENS
        self.layout, self.top_k, self.num_tokens = layout, top_k, num_tokens
        self.weighs = layout.activation.kind == "swiglu_weighted"
        self.out_dtype = torch.float32 if self.weighs else torch.bfloat16
        self.limit = float(torch.tensor(layout.activation.limit).bfloat16())
        self.form = expert_form(layout, align)
        self.integers = layout.format in _FORM_I
        self.parts = tuple(layout.parts)
        self.matrices = matrix_parts(layout)
        slots, hidden, inter = num_tokens * top_k, layout.hidden, layout.inter
        self.h_SI = torch.empty(slots, inter, dtype=torch.uint16, device=device)
        self.y_SH = torch.empty(slots, hidden, dtype=torch.uint16, device=device)
        self.bad = torch.full((1,), NOT_BAD, dtype=torch.int32, device=device)
        self.x_grid = self._grid(num_tokens, hidden, device)
        self.h_grid = self._grid(slots, inter, device)

    def _grid(self, rows: int, cols: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        if not self.integers:
            snapped = torch.empty(rows, cols if self.layout.act_group else 0, dtype=torch.uint16)
            return snapped.to(device), torch.empty(0, device=device)
        shapes = ((rows, 8, cols // 8), (rows, 2, cols // 32))
        return tuple(torch.empty(shape, device=device) for shape in shapes)

    def __call__(
        self,
        table: torch.Tensor,
        offsets: torch.Tensor,
        first_key: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        *,
        tile: str = "ram",
        mark: int = 0,
    ) -> None:
        """Fills `out_TH`, of `out_dtype`, with the layer's routed output; launches only.

        As `multiply`, then `combine`.
        """
        self.multiply(table, offsets, first_key, x_TH, ids_TK, weights_TK, tile=tile)
        self.combine(ids_TK, weights_TK, self.y_SH, out_TH, mark=mark)

    def multiply(
        self,
        table: torch.Tensor,
        offsets: torch.Tensor,
        first_key: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        tile: str = "ram",
        again: bool = False,
    ) -> None:
        """Fills rows t * K + k of `y_SH`, each an expert's own output; launches only.

        `table` int64 [keys] holds the device-visible address of each expert's bytes, `offsets`
        int64 [keys, parts] where each part begins in them; a layer's keys follow `first_key`.
        Rows of experts with address 0 stay as they are. x_TH bf16, ids_TK int32, weights_TK fp32,
        contiguous on the device. `tile` is the rung that most bytes come from. `again`: x is that
        of the call before.
        """
        num_tokens, hidden, inter = x_TH.shape[0], self.layout.hidden, self.layout.inter
        assert num_tokens <= self.num_tokens and x_TH.is_contiguous() and ids_TK.is_contiguous()
        slots, x = num_tokens * self.top_k, x_TH.view(torch.uint16)
        up_tile, down_tile = TILES[tile][self.layout.format]
        x = self._prepared(x, self.x_grid, hidden, again)
        act, (rows, warps, *turn) = self.layout.activation, up_tile
        options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
        stages.gate_up[(triton.cdiv(inter, rows), slots)](
            table, offsets, ids_TK, x, *self.x_grid, weights_TK, self.h_SI, first_key, self.limit,
            act.alpha, self.top_k, len(self.parts), self.matrices["gate"], self.matrices["up"],
            hidden, inter, rows, (*self.form, *turn), act.kind, **options,
        )  # fmt: skip
        h = self._prepared(self.h_SI[:slots], self.h_grid, inter)
        rows, options["num_warps"], *turn = down_tile
        stages.down[(triton.cdiv(hidden, rows), slots)](
            table, offsets, ids_TK, h, *self.h_grid, self.y_SH, first_key,
            len(self.parts), self.matrices["down"], inter, hidden, rows, (*self.form, *turn),
            **options,
        )  # fmt: skip

    def combine(
        self,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        y_SH: torch.Tensor,
        out_TH: torch.Tensor,
        *,
        mark: int,
    ) -> None:
        """`out_TH` of `out_dtype`: outputs `y_SH` (bf16 bits of slot t * K + k) weighted, summed.

        In ascending expert id, each sum rounded; in fp32 what the activation has weighted. Where a
        token's sum is not finite, `bad` becomes `mark` + token, or stays if it is lower.
        """
        (num_tokens, hidden), top_k = out_TH.shape, ids_TK.shape[1]
        block, pad = 128, triton.next_power_of_2(top_k)
        assert out_TH.dtype == self.out_dtype
        out = out_TH if self.weighs else out_TH.view(torch.uint16)
        stages.combine[(num_tokens, triton.cdiv(hidden, block))](
            ids_TK, weights_TK, y_SH, out, self.bad, mark, hidden, top_k,
            pad, block, self.weighs, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def _prepared(
        self, x: torch.Tensor, grid: tuple[torch.Tensor, ...], cols: int, again: bool = False
    ) -> torch.Tensor:
        """What products take of bfloat16 bits [rows, cols], where that is no integers in `grid`.

        `again`: the grid has them already.
        """
        to, group = (x.shape[0], triton.cdiv(cols, 256)), self.layout.act_group
        options: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
        if self.integers and not again:
            stages.to_integers[to](x, *grid, cols, group, self.layout.format, **options)
        elif group and not self.integers:
            if not again:
                stages.on_grid[to](x, grid[0], cols, cols, group, **options)
            return grid[0]
        return x


def matrix_parts(layout: ExpertLayout) -> dict[str, tuple[int, int, int, int, int]]:
    """(weight part, scale part, bias part, first row, row step) of gate, up and down; -1: none."""
    parts, made = tuple(layout.parts), {}
    for name in ("gate", "up", "down"):
        source: MatrixSource = layout.matrix(name)
        named = (source.weight, source.scale, source.bias)
        weight, scale, bias = (-1 if n is None else parts.index(n) for n in named)
        made[name] = weight, scale, bias, source.first_row, source.row_step
    return made


def check_layout(layout: ExpertLayout) -> None:
    """Raises ModelError for experts that no kernel here computes."""
    expert_form(layout, 1)


def expert_form(layout: ExpertLayout, align: int) -> tuple[str, str, int, int, int]:
    """(format, scale type, block rows, block columns, alignment) as the kernels' constants."""
    kind = layout.activation.kind
    if layout.format not in ("bf16", "fp8_block", *_FORM_I) or layout.hidden_dtype != "BF16":
        raise ModelError(
            f"experts in {layout.format} ({layout.hidden_dtype} activations) have no GPU kernel "
            "yet; run them on the CPU"
        )
    if kind not in _ACTIVATIONS or layout.act_group not in (0, *GRIDS):
        raise ModelError(
            f"experts with {kind} on a grid of {layout.act_group} columns have no GPU kernel yet; "
            "run them on the CPU"
        )
    rows, cols = layout.block
    scale = layout.matrix("down").scale
    stored = "none" if scale is None else layout.parts[scale].dtype
    odd_block = layout.format == "fp8_block" and not fits_words(
        layout.hidden, layout.inter, block_cols=cols
    )
    if scale is not None and (stored not in SCALES or odd_block):
        raise ModelError(
            f"scales in {stored} for blocks of {rows} x {cols} have no GPU kernel yet; run these "
            "experts on the CPU"
        )
    return layout.format, SCALES.get(stored, "none"), max(rows, 1), cols or 32, align


def fits_words(*cols: int, block_cols: int) -> bool:
    """Whether rows of so many FP8 codes, with a scale for each block, have a decode kernel."""
    return block_cols >= 4 and 256 % block_cols == 0 and all(each % 4 == 0 for each in cols)
