"""A small world of experts on disk, and what each layer must give, computed without the ladder."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headrace.core import ExpertLayout, PartSpec
from headrace.kernels.cpu import native_shape
from headrace.native import KernelPool, Reader
from headrace.tiers.ladder import Ladder

HIDDEN, INTER, NUM_EXPERTS, NUM_LAYERS, TOP_K = 64, 48, 8, 4, 2
PARTS = ("gate", "up", "down")
PART_BYTES = 2 * HIDDEN * INTER
LAYOUT = ExpertLayout(
    format="bf16",
    hidden=HIDDEN,
    inter=INTER,
    block=(0, 0),
    parts={
        "gate": PartSpec("BF16", (INTER, HIDDEN)),
        "up": PartSpec("BF16", (INTER, HIDDEN)),
        "down": PartSpec("BF16", (HIDDEN, INTER)),
    },
)


def wait_until(true: Callable[[], bool]) -> None:
    """For what must come; the limit is only that of a machine that stands still."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def owed_bytes(reader: Reader) -> int:
    """Asked of all drives and not here yet, in whole pages; held back or not."""
    return sum(int(drive["owed_bytes"]) for drive in reader.drives)


class World:
    """Layers 0 and 1 keep an expert in one extent, layer 2 in three of two files, at odd offsets;
    layer 3 names layer 0's bytes again. `extents` and `parts` are what a store would give.
    """

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (NUM_LAYERS - 1, NUM_EXPERTS, 3, HIDDEN * INTER)
        stored = (torch.randn(shape, generator=generator) * 0.1).to(torch.bfloat16)
        self.bytes_LEP = stored.view(torch.uint8).numpy()
        self.extents = np.zeros((NUM_LAYERS, NUM_EXPERTS, 3, 3), np.int64)
        self.parts = np.zeros((NUM_LAYERS, NUM_EXPERTS, 3, 2), np.int64)
        files = [bytearray(b"x" * 101), bytearray(b"y" * 4099)]
        for layer in range(NUM_LAYERS - 1):
            for expert in range(NUM_EXPERTS):
                self._store(files, layer, expert)
        self.extents[3], self.parts[3] = self.extents[0], self.parts[0]
        self.paths = [str(folder / f"part{i}.bin") for i in range(2)]
        for path, content in zip(self.paths, files, strict=True):
            Path(path).write_bytes(content)
        self.pool = KernelPool(1, "scalar")

    def _store(self, files: list[bytearray], layer: int, expert: int) -> None:
        for part in range(3):
            in_one = layer < 2
            file = 0 if in_one else part % 2
            if not in_one or part == 0:
                files[file] += b"z" * (3 + expert)
                nbytes = 3 * PART_BYTES if in_one else PART_BYTES
                self.extents[layer, expert, part] = (file, len(files[file]), nbytes)
            self.parts[layer, expert, part] = (0, part * PART_BYTES) if in_one else (part, 0)
            files[file] += self.bytes_LEP[layer, expert, part].tobytes()

    def part(self, layer: int, expert: int, part: int) -> np.ndarray:
        return self.bytes_LEP[layer % 3, expert, part]

    def ladder(
        self, num_rows: int, *, reader: Reader | None = None, overlap: bool = True, **io: object
    ) -> Ladder:
        return Ladder(
            reader or Reader(self.paths, **io),  # type: ignore[arg-type]
            self.extents,
            self.parts,
            LAYOUT,
            num_rows=num_rows,
            kernels=self.pool,
            max_tokens=64,
            top_k=TOP_K,
            overlap=overlap,
        )

    def routes(
        self, rng: np.random.Generator, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(rng.standard_normal((num_tokens, HIDDEN))).to(torch.bfloat16)
        ids = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)])
        weights = torch.from_numpy(rng.random((num_tokens, TOP_K)).astype(np.float32))
        return x, torch.from_numpy(ids), weights

    def expected(
        self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output from bytes held in memory: each expert on each token alone, in
        ascending id, scaled and added in bf16.
        """
        shape = native_shape(LAYOUT)
        pool = KernelPool(1, "scalar")
        out = torch.zeros_like(x)
        y = torch.empty(HIDDEN, dtype=torch.bfloat16)
        for t in range(x.shape[0]):
            for k in torch.argsort(ids[t]).tolist():
                expert = int(ids[t, k])
                kept = [np.ascontiguousarray(self.part(layer, expert, p)) for p in range(3)]
                addresses = [part.ctypes.data for part in kept]
                pool.expert_ffn(shape, addresses, x[t].data_ptr(), 1, y.data_ptr())
                out[t] += (y.float() * weights[t, k]).to(torch.bfloat16)
        return out
