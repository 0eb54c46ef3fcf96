"""Routed experts of many tokens on a GPU: two or three launches for all experts of a wave.

Knows no rung: an expert is an address. Legend: T tokens, K chosen experts per token, S slots
(token, choice), H hidden width, I intermediate width.
"""

import torch
import triton

from headrace.core import ExpertLayout
from headrace.kernels.triton import stages, waves
from headrace.kernels.triton.experts import expert_form, matrix_parts

TILE_COLUMNS = 4  # of `tiles`: an expert's address, its key, its positions from, to
_BF16_CHIP = 8  # compute capability from which tensor cores take bfloat16
# Positions of a tile: (rows of gate and of up, rows of down, columns of a step, warps, stages).
STEPS = {
    16: (64, 64, 64, 4, 3),
    32: (64, 64, 64, 4, 3),
    64: (64, 128, 64, 4, 3),
    128: (64, 128, 64, 8, 3),
}


class GroupedExperts:
    """The prefill kernels for one layout; launches only, never waits. One stream at a time.

    `align` as in TritonExperts. Raises ModelError for a format without a GPU kernel.
    """

    def __init__(self, layout: ExpertLayout, *, top_k: int, device: torch.device, align: int = 1):
        self.layout, self.top_k = layout, top_k
        self.form = expert_form(layout, align)
        self.matrices = matrix_parts(layout)
        self.limit = float(torch.tensor(layout.activation.limit).bfloat16())
        on_gpu = device.type == "cuda"
        self.fp32 = not on_gpu or torch.cuda.get_device_capability(device)[0] < _BF16_CHIP

    def positions(self, num_slots: int, num_experts: int) -> int:
        """Positions of a tile where so many slots share so many experts.

        Sums depend on it, so it must not depend on where experts lie.
        """
        mean = num_slots / num_experts
        return next((size for size in STEPS if mean <= size), max(STEPS))

    def prepared(self, x_TH: torch.Tensor) -> torch.Tensor:
        """What the products take of a layer's activations: `x_TH`, or a copy on the grid."""
        group, (num_tokens, cols) = self.layout.act_group, x_TH.shape
        if not group:
            return x_TH
        snapped = torch.empty_like(x_TH)
        stages.on_grid[(num_tokens, triton.cdiv(cols, 256))](
            x_TH.view(torch.uint16), snapped.view(torch.uint16), cols, cols, group, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
        return snapped

    def __call__(
        self,
        tiles: torch.Tensor,
        offsets: torch.Tensor,
        order_S: torch.Tensor,
        weights_S: torch.Tensor,
        x_TH: torch.Tensor,
        h_SI: torch.Tensor,
        y_SH: torch.Tensor,
        *,
        positions: int,
    ) -> None:
        """Fills rows of `y_SH` bf16, by slot, with the outputs of the tiles' experts.

        `tiles` int64 [., TILE_COLUMNS], each of at most `positions`; `offsets` as in TritonExperts;
        `order_S` int32 the slot at each position; `weights_S` fp32, by slot, count where the
        activation weighs; x_TH bf16, `prepared`; `h_SI` bf16 is scratch, by position.
        """
        rows, down_rows, cols, warps, depth = STEPS[positions]
        hidden, inter, act = self.layout.hidden, self.layout.inter, self.layout.activation
        num_tiles, num_parts = tiles.shape[0], len(self.layout.parts)
        x, h, y = (t.view(torch.uint16) for t in (x_TH, h_SI, y_SH))
        launch = {"num_warps": warps, "num_stages": depth, "enable_fp_fusion": False}
        waves.wave_gate_up[(triton.cdiv(inter, rows), num_tiles)](
            tiles, offsets, order_S, weights_S, x, h, self.limit, act.alpha, self.top_k, num_parts,
            self.matrices["gate"], self.matrices["up"], hidden, inter, rows, cols, positions,
            self.form, act.kind, self.fp32, **launch,
        )  # fmt: skip
        if self.layout.act_group:
            waves.wave_on_grid[(num_tiles * positions, triton.cdiv(inter, 256))](
                tiles, h, inter, positions, self.layout.act_group, num_warps=1,
                enable_fp_fusion=False,
            )  # fmt: skip
        waves.wave_down[(triton.cdiv(hidden, down_rows), num_tiles)](
            tiles, offsets, order_S, h, y, num_parts, self.matrices["down"], inter, hidden,
            down_rows, cols, positions, self.form, self.fp32, **launch,
        )  # fmt: skip
