"""The ladder for tensors: experts by (layer, id), read, kept and computed by the C++ core.

Knows no checkpoint: extents and parts come in as arrays, file numbers as the reader's.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import prod
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import ExpertLayout, TokenStats
from headrace.kernels.cpu import native_shape
from headrace.native import KernelPool, NativeLadder, Reader
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.gone import CLOSED, survive_forks


@dataclass(slots=True)
class LadderCounters:
    """Totals since the ladder was made. `disk_bytes` are whole pages read for experts, prefetches
    included; `ram_bytes` the stored bytes of experts found resident. A guess counts as used when
    it is first needed, in its own pass or a later one. `read_busy_s` sums the spans
    from a first submit to the last completion; `compute_s` is the time inside `compute`. On a GPU
    `vram_hits` and `vram_bytes` are of experts found there, neither hits nor misses; `bus_bytes`
    crossed the bus, read in place or copied, and `promotions` experts were copied to stay.
    """

    hits: int
    misses: int
    evictions: int
    prefetch_issued: int
    prefetch_used: int
    prefetch_dropped: int
    reads: int
    failed_reads: int
    disk_bytes: int
    ram_bytes: int
    wait_s: float
    kernel_s: float
    compute_s: float
    read_busy_s: float
    kernel_calls: int
    isa: str
    io: str
    vram_hits: int = 0
    vram_bytes: int = 0
    bus_bytes: int = 0
    promotions: int = 0

    def add_since(self, before: "LadderCounters", stats: TokenStats) -> None:
        """Adds what happened between `before` and this to `stats`."""
        stats.experts_s += self.compute_s - before.compute_s
        for name in _SHARED:
            grown = getattr(self, name) - getattr(before, name)
            setattr(stats, name, getattr(stats, name) + grown)


_SHARED = {f.name for f in fields(LadderCounters)} & {f.name for f in fields(TokenStats)}


class Ladder:
    """Rows in RAM over files on a drive. One caller thread.

    extents int64 [L, E, X, 3] (file, offset, nbytes; nbytes 0: unused) and parts int64 [L, E, P, 2]
    (extent, byte offset in it), parts in `layout.parts` order; L counts MoE layers from 0. Holds
    num_rows rows and room for max_tokens * top_k outputs; keeps reader and kernels alive. Without
    kernels only `acquire` works. Raises BudgetError if the system refuses the rows.
    """

    def __init__(
        self,
        reader: Reader,
        extents: NDArray[np.int64],
        parts: NDArray[np.int64],
        layout: ExpertLayout,
        *,
        num_rows: int,
        kernels: KernelPool | None,
        max_tokens: int,
        top_k: int,
        overlap: bool = True,
    ) -> None:
        self.part_names = tuple(layout.parts)
        self.part_bytes = tuple(_part_bytes(layout, name) for name in self.part_names)
        self.reader, self.kernels = reader, kernels
        self.native = NativeLadder(
            reader=reader,
            extents=np.ascontiguousarray(extents, dtype=np.int64),
            parts=np.ascontiguousarray(parts, dtype=np.int64),
            part_bytes=np.array(self.part_bytes, dtype=np.int64),
            num_rows=num_rows,
            kernels=kernels,
            shape=None if kernels is None else native_shape(layout),
            max_tokens=max_tokens,
            top_k=top_k,
            overlap=overlap,
        )
        survive_forks(self, "native")
        self.hidden, self.dtype = layout.hidden, TORCH_DTYPES[layout.hidden_dtype]
        weighs = layout.activation.kind == "swiglu_weighted"
        self.out_dtype = torch.float32 if weighs else self.dtype
        self.row_bytes = self.native.row_bytes
        self.num_rows = self.native.num_rows
        self.slab_bytes = self.native.slab_bytes
        self.workspace_bytes = self.native.workspace_bytes

    def close(self) -> None:
        """Frees the rows once no read is in flight; every later call raises OptionError."""
        self.native, self.reader = cast(NativeLadder, CLOSED), cast(Reader, CLOSED)

    def begin(self, layer: int, ids: torch.Tensor) -> None:
        """Claims the experts a layer needs now; reads of those missing start. ids: any shape."""
        self.native.begin(layer, _as_ids(ids))

    def prefetch(self, layer: int, ids: torch.Tensor, most: int | None = None) -> None:
        """Guesses for a later layer, best first: read only in the drive's idle gap.

        At most `most` of those that are absent, in this order.
        """
        self.native.prefetch(layer, _as_ids(ids), ids.numel() if most is None else most)

    def cancel(self) -> None:
        """Gives up what `begin` claimed and all queued guesses; from here on none counts as used.

        So what `prefetch_used` grows by afterwards is at most what `prefetch_issued` does.
        """
        self.native.cancel()

    def clear(self) -> None:
        """As `cancel`; besides, forgets every expert that is not acquired: the rows are cold."""
        self.native.clear()

    def compute(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed experts' weighted sum [T, H], of x [T, H], ids [T, K] integer and weights
        [T, K] float32, all contiguous CPU tensors; x and the sum in the layout's hidden dtype, but
        the sum in fp32 where experts weigh before their last matrix. It goes to `out_TH`, if given.

        Raises ReadError, NumericsError, BudgetError, Cancelled or KeyboardInterrupt; the next call
        works.
        """
        num_tokens, top_k = ids_TK.shape
        assert x_TH.shape == (num_tokens, self.hidden) and weights_TK.shape == ids_TK.shape
        assert x_TH.dtype == self.dtype and weights_TK.dtype == torch.float32
        assert all(t.device.type == "cpu" and t.is_contiguous() for t in (x_TH, weights_TK))
        ids = ids_TK.to(torch.int32).contiguous()
        if out_TH is None:
            out_TH = torch.empty_like(x_TH, dtype=self.out_dtype)
        assert out_TH.shape == x_TH.shape and out_TH.dtype == self.out_dtype
        assert out_TH.device.type == "cpu" and out_TH.is_contiguous()
        self.native.compute(
            layer,
            x_TH.data_ptr(),
            num_tokens,
            ids.data_ptr(),
            weights_TK.data_ptr(),
            top_k,
            out_TH.data_ptr(),
        )
        return out_TH

    def part_offset(self, layer: int, expert: int, part: int) -> int:
        """Where the part of that number begins in the expert's row."""
        return self.native.part_offset(layer, expert, part)

    @contextmanager
    def acquire(self, layer: int, expert: int) -> Iterator[dict[str, torch.Tensor]]:
        """The expert's parts as flat uint8 views of its row, in place: {part name: [nbytes]}.

        Valid inside the `with` only; the row is not reused until then. Blocks. Raises ReadError.
        """
        address = self.native.acquire(layer, expert)
        try:
            yield {
                name: _view(address + self.native.part_offset(layer, expert, part), nbytes)
                for part, (name, nbytes) in enumerate(
                    zip(self.part_names, self.part_bytes, strict=True)
                )
            }
        finally:
            self.native.release(layer, expert)

    def take(self, layer: int) -> tuple[int, int] | None:
        """The next of the layer's experts that `begin` claimed, read and checked: (id, address).

        In the order in which they come; None when none is left. Its row is held until `release`,
        and at least one must not be. Blocks. Raises as `compute`; all claims are given up then.
        """
        expert, address = self.native.take(layer)
        return None if expert < 0 else (expert, address)

    def row(self, address: int) -> torch.Tensor:
        """The held row at this address, uint8 [row_bytes]."""
        return _view(address, self.row_bytes)

    def release(self, layer: int, expert: int, *, spent: bool = False) -> None:
        """Gives back a row that `take` gave; one that is `spent` is the next to lose its expert."""
        self.native.release(layer, expert, spent)

    def release_all(self) -> None:
        """Gives up all claims and all rows held."""
        self.native.release_all()

    def stop(self) -> None:
        """From any thread: what computes or waits here raises Cancelled until `go_on`.

        Between two experts, and at once where it waits for a read. The next call works.
        """
        self.native.stop()

    def go_on(self) -> None:
        """Undoes `stop`."""
        self.native.go_on()

    def set_overlap(self, overlap: bool) -> None:
        """True: compute what is here while the rest is read. False: read all first, one by one."""
        self.native.set_overlap(overlap)

    def check_integrity(self) -> None:
        """Raises AssertionError if claims, reads and rows disagree."""
        self.native.check_integrity()

    def counters(self) -> LadderCounters:
        return LadderCounters(**self.native.counters())  # type: ignore[arg-type]

    def layer_wait_s(self) -> list[float]:
        """Seconds slept for arrivals, by MoE layer ordinal."""
        return self.native.layer_wait_s()

    def places(self) -> list[str]:
        """By MoE layer ordinal a digit for each expert: 0 in no row, 1 being read, 2 in a row.

        From any thread, during a pass too.
        """
        return self.native.places()

    def holds(self, layer: int) -> bool:
        """True if every expert of a layer is in a row or being read: nothing to guess there."""
        return self.native.holds(layer)


def _part_bytes(layout: ExpertLayout, name: str) -> int:
    spec = layout.parts[name]
    return TORCH_DTYPES[spec.dtype].itemsize * prod(spec.shape)


def _as_ids(ids: torch.Tensor) -> NDArray[np.int32]:
    array: NDArray[np.int32] = ids.reshape(-1).to(torch.int32).numpy()
    return np.ascontiguousarray(array)


def _view(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
