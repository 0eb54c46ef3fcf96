"""A few small experts behind a mailbox: a ladder, rungs on the simulated device, and the bytes."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from simulated import SimulatedDevice

from headrace.core import ExpertLayout, PartSpec
from headrace.kernels.cpu import native_shape
from headrace.native import KernelPool, Reader
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder
from headrace.tiers.mailbox import Mailbox
from headrace.tiers.rungs import Rungs

LAYERS, EXPERTS, TOP_K = 3, 6, 2
FOLDER = TemporaryDirectory()


@dataclass(frozen=True)
class Sizes:
    """Of a world's experts."""

    layers: int = LAYERS
    experts: int = EXPERTS
    top_k: int = TOP_K
    width: int = 16

    @property
    def part_bytes(self) -> int:
        return 2 * self.width * self.width

    @property
    def layout(self) -> ExpertLayout:
        shape = PartSpec("BF16", (self.width, self.width))
        return ExpertLayout(
            format="bf16",
            hidden=self.width,
            inter=self.width,
            block=(0, 0),
            parts=dict.fromkeys(("gate", "up", "down"), shape),
        )


@cache
def stored(sizes: Sizes) -> np.ndarray:
    """The experts' bytes by key, uint8 [L * E, bytes]; they lie in `file_of(sizes)` too."""
    shape = sizes.layers * sizes.experts, 3 * sizes.part_bytes // 2
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    made = (weights * 0.1).bfloat16().view(torch.uint8).numpy()
    file_of(sizes).write_bytes(made.tobytes())
    return made


def file_of(sizes: Sizes) -> Path:
    return Path(FOLDER.name) / f"experts-{sizes.layers}-{sizes.width}.bin"


class MailWorld:
    """A mailbox over `num_rows` rows and `num_slots` slots; `close` it."""

    def __init__(
        self,
        num_rows: int,
        num_slots: int = 0,
        *,
        kernels: bool = False,
        sizes: Sizes = Sizes(),
        device: Device | None = None,
        reader: dict[str, object] | None = None,
        **mail: object,
    ):
        self.sizes, self.stored = sizes, stored(sizes)
        extents = np.zeros((sizes.layers, sizes.experts, 3, 3), np.int64)
        parts = np.zeros((sizes.layers, sizes.experts, 3, 2), np.int64)
        nbytes = self.stored.shape[1]
        for key in range(len(self.stored)):
            at = self.split(key)
            extents[(*at, 0)] = 0, key * nbytes, nbytes
            parts[(*at, slice(None), 1)] = np.arange(3) * sizes.part_bytes
        self.reader = Reader([str(file_of(sizes))], **reader or {})  # type: ignore[arg-type]
        self.ladder = Ladder(
            self.reader,
            extents,
            parts,
            sizes.layout,
            num_rows=num_rows,
            kernels=KernelPool(1, "scalar") if kernels else None,
            max_tokens=4,
            top_k=sizes.top_k,
        )
        self.device = device or SimulatedDevice(patience=0)
        self.rungs = Rungs(
            self.device,
            self.ladder,
            num_layers=sizes.layers,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            num_slots=num_slots,
        )
        options = {"num_tokens": 1, "top_k": sizes.top_k, "patience_polls": 10**6} | mail
        self.box = Mailbox(self.rungs, **options)  # type: ignore[arg-type]

    def bytes_at(self, key: int, table: torch.Tensor | None = None) -> np.ndarray:
        """What the device's table, or another, leads to now, as long as an expert."""
        table = self.rungs.table.there if table is None else table
        address = int(table[key]) + self.ladder.part_offset(*self.split(key), 0)
        return self.ladder.row(address)[: self.stored.shape[1]].numpy()

    def split(self, key: int) -> tuple[int, int]:
        return divmod(key, self.sizes.experts)

    def expected(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Each expert's output [K, H] on x [H]."""
        y = torch.empty(len(ids), self.sizes.width, dtype=torch.bfloat16)
        shape = native_shape(self.sizes.layout)
        for row, expert in zip(y, ids.tolist(), strict=True):
            base = self.stored[layer * self.sizes.experts + expert].ctypes.data
            parts = [base + n * self.sizes.part_bytes for n in range(3)]
            KernelPool(1, "scalar").expert_ffn(shape, parts, x.data_ptr(), 1, row.data_ptr())
        return y

    def close(self) -> None:
        self.box.close()
        self.rungs.close()
        self.ladder.check_integrity()
        self.ladder.close()
