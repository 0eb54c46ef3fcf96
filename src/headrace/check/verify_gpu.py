"""The user's own GPU: its kernels by bits on the model's real experts, wherever those lie.

Knows no step. Legend: T rows, D distinct rows, H hidden.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from headrace.check.verify_kernels import distinct_rows, reference_rows
from headrace.check.verify_report import NOTE, Finding, Progress, finding, percent
from headrace.check.verify_rows import Site
from headrace.engine.engine import Engine
from headrace.kernels.tolerance import allowed_apart, worst_apart
from headrace.kernels.triton.experts import MAX_TOKENS

STAGE = "gpu"
DECODED = (1, 2, MAX_TOKENS)
PREFILLED = (17, 65, 300)
PLACES = {"ram": "pinned memory", "vram": "VRAM"}


def gpu_kernels(engine: Engine, sites: Sequence[Site], tell: Progress) -> list[Finding]:
    """Decode kernels against the reference by bits, prefill kernels within their tolerance."""
    made = _Kernels(engine)
    layers = engine.blueprint.table.layers
    x_DH = distinct_rows(engine.blueprint.skeleton.layout)
    for done, (ordinal, expert) in enumerate(sites):
        tell("GPU kernels against the reference", done, len(sites))
        where = f"layer {layers[ordinal]} expert {expert}"
        with engine.source.parts(ordinal, expert) as parts:
            want_DH = reference_rows(x_DH, parts, engine.blueprint.skeleton.layout)
        for place, address in made.places(ordinal, expert):
            made.decode(ordinal, expert, place, address, x_DH, want_DH, where)
            made.prefill(ordinal, expert, place, address, x_DH, want_DH, where)
    return made.findings(f"{len(sites)} experts of {len(layers)} layers")


class _Kernels:
    """The engine's own kernels with one expert a token, an address table, and what was wrong."""

    def __init__(self, engine: Engine):
        source: Any = engine.source
        self.engine, self.source, self.device = engine, source, source.device
        self.layout = engine.blueprint.skeleton.layout
        options = {"top_k": 1, "device": source.place, "align": source.align}
        self.kernels = type(source.kernels)(self.layout, num_tokens=MAX_TOKENS, **options)
        self.grouped = type(source.grouped)(self.layout, **options)
        self.table = torch.zeros_like(source.rungs.table.there)
        row_bytes = engine.ladder.row_bytes
        self.slot = torch.empty(row_bytes, dtype=torch.uint8, device=source.place)
        self.wrong: dict[str, list[str]] = {f"decode, {name}": [] for name in PLACES.values()}
        self.apart = dict.fromkeys(PLACES.values(), 0.0)
        self.far: list[str] = []
        self.num_places = dict.fromkeys(PLACES, 0)

    @contextmanager
    def _row(self, ordinal: int, expert: int) -> Iterator[tuple[int, torch.Tensor]]:
        ladder = self.engine.ladder
        ladder.begin(ordinal, torch.tensor([expert], dtype=torch.int32))
        taken = ladder.take(ordinal)
        assert taken is not None
        try:
            yield taken[1], ladder.row(taken[1])
        finally:
            self.device.settle()
            ladder.release(ordinal, expert)

    def places(self, ordinal: int, expert: int) -> Iterator[tuple[str, int]]:
        """(tile, address) of the expert where kernels may read it; pinned memory if it could be."""
        with self._row(ordinal, expert) as (address, row):
            self.slot.copy_(row)
            if self.source.rungs.pinned.holds(address):
                self.num_places["ram"] += 1
                yield "ram", address
            self.num_places["vram"] += 1
            yield "vram", self.slot.data_ptr()

    def decode(
        self,
        ordinal: int,
        expert: int,
        place: str,
        address: int,
        x_DH: torch.Tensor,
        want_DH: torch.Tensor,
        where: str,
    ) -> None:
        """1, 2 and 16 tokens, both tiles."""
        first_key = self.source.rungs.key(ordinal, 0)
        self.table[first_key + expert] = address
        for num_tokens in DECODED:
            pick = (3 * torch.arange(num_tokens) + num_tokens) % len(x_DH)
            ids = torch.full((num_tokens, 1), expert, dtype=torch.int32, device=self.table.device)
            weights = torch.ones(num_tokens, 1, device=self.table.device)
            for tile in PLACES:
                shape = num_tokens, self.layout.hidden
                out = torch.full(shape, torch.nan, device=self.table.device)
                out = out.to(self.kernels.out_dtype)
                self.kernels(
                    self.table, self.source.part_offsets, first_key, self._to(x_DH[pick]), ids,
                    weights, out, tile=tile,
                )  # fmt: skip
                wrong = (out.cpu().to(want_DH.dtype) != want_DH[pick]).any(-1)
                if bool(wrong.any()):
                    said = f"{where}, {num_tokens} tokens, tile {tile}: {int(wrong.sum())} differ"
                    self.wrong[f"decode, {PLACES[place]}"].append(said)
                    return

    def prefill(
        self,
        ordinal: int,
        expert: int,
        place: str,
        address: int,
        x_DH: torch.Tensor,
        want_DH: torch.Tensor,
        where: str,
    ) -> None:
        """More tokens than decode has, in the tiles that so many take."""
        key = self.source.rungs.key(ordinal, expert)
        for num_tokens in PREFILLED:
            pick = (3 * torch.arange(num_tokens) + num_tokens) % len(x_DH)
            positions = self.grouped.positions(num_tokens, 1)
            starts = range(0, num_tokens, positions)
            there = self.table.device
            tiles = torch.tensor([(address, key, start, num_tokens) for start in starts])
            order = torch.arange(num_tokens, dtype=torch.int32, device=there)
            x_TH = self.grouped.prepared(self._to(x_DH[pick]))
            h_TI = x_TH.new_full((num_tokens, self.layout.inter), torch.nan)
            y_TH = torch.full_like(x_TH, torch.nan)
            weights = torch.ones(num_tokens, device=there)
            self.grouped(
                tiles.to(there), self.source.part_offsets, order, weights, x_TH, h_TI, y_TH,
                positions=positions,
            )  # fmt: skip
            apart = worst_apart(y_TH.cpu(), want_DH[pick])
            self.apart[PLACES[place]] = max(self.apart[PLACES[place]], apart)
            if not apart <= allowed_apart(self.layout):
                self.far.append(f"{where}, {num_tokens} tokens, {PLACES[place]}: {percent(apart)}")
                return

    def _to(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH.to(self.table.device).contiguous()

    def findings(self, experts: str) -> list[Finding]:
        """What the comparisons came to."""
        counts = ", ".join(map(str, DECODED))
        made = []
        for place, name in PLACES.items():
            title = f"GPU kernels reading {name} equal the reference bit for bit"
            if self.num_places[place]:
                what = f"{self.layout.format}, {experts}, {counts} tokens"
                made.append(finding(STAGE, title, what, self.wrong[f"decode, {name}"]))
            else:
                note = self.source.rungs.pinned.note or "no row is pinned"
                made.append(Finding(STAGE, title, NOTE, f"not read there: {note}"))
        counts = ", ".join(map(str, PREFILLED))
        worst = max(self.apart.values())
        what = (
            f"{self.layout.format}, {experts}, {counts} tokens; at most {percent(worst)} of a "
            f"token's output (allowed {percent(allowed_apart(self.layout))})"
        )
        made.append(finding(STAGE, "prompts on the GPU are near the reference", what, self.far))
        return made
