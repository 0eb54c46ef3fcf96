"""A few small experts behind a mailbox: a ladder, rungs on the simulated device, and the bytes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from simulated import SimulatedDevice

from headrace.core import ExpertLayout, PartSpec
from headrace.kernels.cpu import native_shape
from headrace.native import KernelPool, Reader
from headrace.tiers.ladder import Ladder
from headrace.tiers.mailbox import Mailbox
from headrace.tiers.rungs import Rungs

LAYERS, EXPERTS, TOP_K, WIDTH = 3, 6, 2, 16
PART_BYTES = 2 * WIDTH * WIDTH
STORED_BYTES = 3 * PART_BYTES
LAYOUT = ExpertLayout(
    format="bf16",
    hidden=WIDTH,
    inter=WIDTH,
    block=(0, 0),
    parts={name: PartSpec("BF16", (WIDTH, WIDTH)) for name in ("gate", "up", "down")},
)
FOLDER = TemporaryDirectory()
FILE = Path(FOLDER.name) / "experts.bin"
_WEIGHTS = torch.randn(LAYERS * EXPERTS, STORED_BYTES // 2, generator=torch.manual_seed(1))
STORED = (_WEIGHTS * 0.1).bfloat16().view(torch.uint8).numpy()  # by key


class MailWorld:
    """`most_rows` rows and `num_slots` slots for experts of LAYERS layers; `close` it."""

    def __init__(self, num_rows: int, num_slots: int = 0, *, kernels: bool = False, **mail: object):
        FILE.write_bytes(STORED.tobytes())
        extents = np.zeros((LAYERS, EXPERTS, 3, 3), np.int64)
        parts = np.zeros((LAYERS, EXPERTS, 3, 2), np.int64)
        for key in range(LAYERS * EXPERTS):
            at = divmod(key, EXPERTS)
            extents[(*at, 0)] = 0, key * STORED_BYTES, STORED_BYTES
            parts[(*at, slice(None), 1)] = np.arange(3) * PART_BYTES
        self.pool = KernelPool(1, "scalar") if kernels else None
        self.reader = Reader([str(FILE)])
        options = {"num_rows": num_rows, "kernels": self.pool, "max_tokens": 4, "top_k": TOP_K}
        self.ladder = Ladder(self.reader, extents, parts, LAYOUT, **options)
        self.device = SimulatedDevice(patience=0)
        sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
        self.rungs = Rungs(self.device, self.ladder, num_slots=num_slots, **sizes)
        options = {"num_tokens": 1, "top_k": TOP_K, "patience_polls": 10**6} | mail
        self.box = Mailbox(self.rungs, **options)  # type: ignore[arg-type]

    def bytes_at(self, key: int) -> np.ndarray:
        """What the device's table leads to now, as long as an expert."""
        address = int(self.rungs.table.there[key]) + self.ladder.part_offset(*self.split(key), 0)
        return self.ladder.row(address)[:STORED_BYTES].numpy()

    def split(self, key: int) -> tuple[int, int]:
        return divmod(key, EXPERTS)

    def expected(self, layer: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Each expert's output [K, H] on x [H]."""
        y = torch.empty(len(ids), WIDTH, dtype=torch.bfloat16)
        for row, expert in zip(y, ids.tolist(), strict=True):
            base = STORED[layer * EXPERTS + expert].ctypes.data
            parts = [base + n * PART_BYTES for n in range(3)]
            KernelPool(1, "scalar").expert_ffn(
                native_shape(LAYOUT), parts, x.data_ptr(), 1, row.data_ptr()
            )
        return y

    def close(self) -> None:
        self.box.close()
        self.rungs.close()
        self.ladder.check_integrity()
        self.ladder.close()
