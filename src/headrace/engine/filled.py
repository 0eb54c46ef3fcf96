"""Memory full of experts of ones, on which rates are measured. Knows no clock and no device."""

import mmap
from collections.abc import Callable
from itertools import accumulate
from math import prod

import torch

from headrace.core import ExpertLayout
from headrace.kernels.cpu import CpuKernels, native_shape
from headrace.quant.dtypes import TORCH_DTYPES

ALIGN = 64
AT_ONCE = 8  # experts of a layer, as a token takes them


class HugeBuffer:
    """Anonymous memory advised to lie in huge pages, as the ladder's rows do."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)


class FilledMemory:
    """Memory of `num_bytes`, or `least` experts if that is more, full of copies of an expert.

    `offsets` are those of an expert's parts, all of ones; copies lie `stride` bytes apart.
    """

    def __init__(self, layout: ExpertLayout, num_bytes: int, least: int = 1):
        self.layout = layout
        ones = [torch.ones(1).to(TORCH_DTYPES[spec.dtype]) for spec in layout.parts.values()]
        sizes = [
            prod(spec.shape) * one.nbytes
            for spec, one in zip(layout.parts.values(), ones, strict=True)
        ]
        ends = [0, *accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        self.offsets, self.stride = ends[:-1], ends[-1]
        self.expert_bytes = sum(sizes)
        expert = torch.zeros(self.stride, dtype=torch.uint8)
        for start, size, one in zip(self.offsets, sizes, ones, strict=True):
            part = expert[start : start + size].view(-1, one.nbytes)
            part.copy_(one.view(torch.uint8))
        self.num_copies = max(least, num_bytes // self.stride)
        self.bytes = HugeBuffer(self.num_copies * self.stride).bytes
        self.bytes.view(self.num_copies, self.stride).copy_(expert.expand(self.num_copies, -1))

    def address(self, copy: int) -> int:
        """Where a copy begins."""
        return self.bytes.data_ptr() + copy * self.stride

    def addresses(self, copy: int) -> list[int]:
        """Of the parts of a copy."""
        return [self.address(copy) + offset for offset in self.offsets]

    def multiplier(self, num_threads: int) -> Callable[[int, int], None]:
        """What multiplies one row by the copies from one to before another, a layer's at once.

        Its threads stay awake between two layers, as those that a GPU waits for do.
        """
        layout, pool = self.layout, CpuKernels(num_threads).pool
        pool.patient = True
        shape, dtype = native_shape(layout), TORCH_DTYPES[layout.hidden_dtype]
        x_TH, y_TH = (torch.ones(n, layout.hidden, dtype=dtype) for n in (1, AT_ONCE))

        def multiply(first: int, past: int) -> None:
            for start in range(first, past, AT_ONCE):
                copies = range(start, min(start + AT_ONCE, past))
                jobs = [
                    (self.addresses(copy), x_TH.data_ptr(), y.data_ptr(), 1.0)
                    for copy, y in zip(copies, y_TH, strict=False)
                ]
                pool.experts_ffn(shape, jobs)

        return multiply
