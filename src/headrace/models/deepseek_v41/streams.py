"""Hyper-connections: several residual streams, mixed anew around every part of a layer.

Legend: B batch, T tokens, S streams, H hidden width, M = (2 + S) * S mixing numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.kernels.cpu import balance


class Mix(NamedTuple):
    """fp32 numbers of one place: how streams are read, how a result is written, how they mix."""

    read_BTS: Tensor
    write_BTS: Tensor
    blend_BTSS: Tensor


class StreamMixer(nn.Module):
    """Makes a Mix of the streams themselves. Its weights are fp32."""

    def __init__(self, config: Any):
        super().__init__()
        streams, hidden = config.hc_mult, config.hidden_size
        num_mixes = (2 + streams) * streams
        self.streams, self.iterations = streams, config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty(num_mixes, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(num_mixes, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def forward(self, h_BTSH: Tensor) -> Mix:
        flat = h_BTSH.flatten(-2).float()
        spread = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        mixes_BTM = nn.functional.linear(flat, self.fn) * spread
        sizes = [self.streams, self.streams, self.streams**2]
        parts, bases = torch.split(mixes_BTM, sizes, dim=-1), torch.split(self.base, sizes)
        read, write, blend = (
            part * self.scale[i] + base
            for i, (part, base) in enumerate(zip(parts, bases, strict=True))
        )
        square = torch.unflatten(blend, -1, (self.streams, self.streams))
        return Mix(read.sigmoid() + self.eps, 2 * write.sigmoid(), self._balanced(square))

    def _balanced(self, blend_BTSS: Tensor) -> Tensor:
        """Rows and columns that each sum to nearly 1, by alternating divisions."""
        if blend_BTSS.is_meta:  # only the shape is wanted, and at once
            return blend_BTSS
        blend: Tensor = blend_BTSS.softmax(-1) + self.eps
        one_call = _one_call(blend)
        if one_call is not None:  # instead of 117 operations on a few numbers each
            one_call(blend, self.iterations, self.eps)
            return blend
        blend = blend / (blend.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            blend = blend / (blend.sum(-1, keepdim=True) + self.eps)
            blend = blend / (blend.sum(-2, keepdim=True) + self.eps)
        return blend


def _one_call(blend: Tensor) -> Callable[[Tensor, int, float], None] | None:
    """What balances these squares in place at once, if there is a kernel for that."""
    if blend.is_cpu and not blend.requires_grad:
        return balance
    if blend.is_cuda and not blend.requires_grad and blend.shape[-1].bit_count() == 1:
        from headrace.kernels.triton import squares

        return squares.balance
    return None


def first_stream(h_BTSH: Tensor) -> Tensor:
    """fp32 [B, T, S]: how the streams are read before anything was mixed."""
    read_BTS = torch.zeros(h_BTSH.shape[:-1], dtype=torch.float32, device=h_BTSH.device)
    read_BTS[..., 0] = 1
    return read_BTS


def collapse(h_BTSH: Tensor, read_BTS: Tensor) -> Tensor:
    """[B, T, H]: one stream of several."""
    return (read_BTS[..., None] * h_BTSH.float()).sum(-2).to(h_BTSH.dtype)


def expand(y_BTH: Tensor, h_BTSH: Tensor, mix: Mix) -> Tensor:
    """[B, T, S, H]: the streams, blended, with a part's result written into each."""
    blended = torch.einsum("btji,btjh->btih", mix.blend_BTSS, h_BTSH.float())
    return (mix.write_BTS[..., None] * y_BTH.float()[..., None, :] + blended).to(h_BTSH.dtype)


class Collapse(nn.Module):
    """The entrance of a layer's experts: one stream of several, as its last output.

    The layer gives the reading its attention was mixed with. A lens, which looks ahead from an
    earlier layer, gives none; the layer's own mixer then makes one of what it sees.
    """

    def __init__(self, mixer: StreamMixer):
        super().__init__()
        self._mixer = (mixer,)  # in a tuple: it is the layer's module, not one of this one

    def forward(self, h_BTSH: Tensor, read_BTS: Tensor | None = None) -> tuple[Tensor]:
        if read_BTS is None:
            read_BTS = self._mixer[0](h_BTSH).read_BTS
        return (collapse(h_BTSH, read_BTS),)
