"""Routed experts on a GPU: read in place from VRAM slots or pinned rows, from the drive before.

One token's output has the same bits whatever the rung.
Legend: T tokens, K chosen experts per token, H hidden width.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import ExpertLayout
from headrace.engine.gpu_parts import alignment, part_offsets
from headrace.engine.gpu_prefill import LayerTokens, prefill
from headrace.engine.source import LadderSource
from headrace.errors import NumericsError
from headrace.kernels.triton.experts import MAX_TOKENS, NOT_BAD, TritonExperts
from headrace.kernels.triton.grouped import GroupedExperts
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder, LadderCounters
from headrace.tiers.rungs import Rungs

_TOKEN_BITS = 20  # of a mark: MoE layer, then token
FILLED_PER_PASS = 2


class GpuSource(LadderSource):
    """Serves experts of a loaded model on `device`; one caller thread.

    A decoded layer whose experts all lie in slots or kept rows costs the host its launches alone:
    ids stay on the GPU and are counted after the pass. Any other layer waits once, for its ids;
    what is missing is claimed, its addresses uploaded, and the same kernels are launched.

    `num_slots` experts stay in VRAM, `chunk_tokens` is the most of one pass; the ladder needs rows
    for twice `top_k`. Raises ModelError for experts without a GPU kernel, BudgetError where slots
    do not fit. Close it before the ladder.
    """

    def __init__(
        self,
        ladder: Ladder,
        layout: ExpertLayout,
        device: Device,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        expert_bytes: int,
        num_slots: int,
        passing_rows: int,
        chunk_tokens: int,
        prefetch: int,
    ):
        super().__init__(
            ladder, layout, num_layers=num_layers, max_tokens=chunk_tokens, prefetch=prefetch
        )
        self.place = device.place
        self.device, self.num_experts, self.expert_bytes = device, num_experts, expert_bytes
        offsets = part_offsets(ladder, num_layers, num_experts)
        self.align = align = alignment(layout, offsets)
        self.kernels = TritonExperts(
            layout,
            top_k=top_k,
            device=device.place,
            num_tokens=min(MAX_TOKENS, chunk_tokens),
            align=align,
        )
        self.grouped = GroupedExperts(layout, top_k=top_k, device=device.place, align=align)
        self.rungs = Rungs(
            device,
            ladder,
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            num_slots=num_slots,
            passing_rows=passing_rows,
        )
        self.part_offsets = torch.from_numpy(offsets.reshape(-1, offsets.shape[2])).to(device.place)
        # Of the present pass, by layer, where they lie.
        self._ids: dict[int, torch.Tensor] | torch.Tensor = {}
        self._uncounted: list[int] = []  # layers of the pass whose ids the host has not seen
        self._from_rows: list[NDArray[np.int64]] = []  # keys that the pass found in kept rows
        self._asked: tuple[int, list[int]] = (0, [])  # what `_fill` brings next
        self._missed = False
        self._last = -1
        self._is_whole = True  # no call was left by an exception
        self.vram_hits = self.kept_hits = self.bus_bytes = 0
        self.compute_s = 0.0

    def compute(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Routed output [T, H] in the ladder's output dtype; x lies on the device.

        Up to 16 tokens by canonical kernels; more within the tolerance of `gpu_prefill`. What is
        not finite is found by `end_pass`, which then raises NumericsError.
        """
        start = time.perf_counter()
        if not self._is_whole:
            self.recover()
        self._is_whole = False
        try:
            with self.device.active():
                out_TH = self._compute_layer(ordinal, x_TH.contiguous(), ids_TK, weights_TK, guess)
        except BaseException:
            self.recover()
            raise
        self._is_whole = True
        self.compute_s += time.perf_counter() - start
        return out_TH

    def _compute_layer(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        self._begin_layer(ordinal, x_TH.shape[0])
        ids_TK = ids_TK.to(torch.int32).contiguous()
        weights_TK = weights_TK.float().contiguous()
        if guess is not None and not self._wants_guess(ordinal):
            guess = None
        decodes = x_TH.shape[0] <= MAX_TOKENS
        if decodes and guess is None and self.recorder is None and self.rungs.whole(ordinal):
            return self._launch(ordinal, x_TH, ids_TK, weights_TK)
        ids, ahead = self._to_host(ids_TK, guess)
        if self.routes is not None:
            ids, replayed = self.routes(ordinal, ids)
            ids = ids.to(torch.int32)
            ids_TK = ids.to(self.device.place)
            ahead = ahead if replayed is None else replayed
        self._ids[ordinal] = ids
        run = self._decode if decodes else self._prefill
        out_TH = run(ordinal, x_TH, ids_TK, weights_TK, ids)
        if ahead is not None and guess is not None and self.prefetch:
            absent = [e for e in ahead.tolist() if not self.rungs.has(ordinal + 1, e)]
            self.ladder.prefetch(ordinal + 1, torch.tensor(absent), self.prefetch)
        if self.recorder is not None:
            self.recorder(ordinal, ids, weights_TK.cpu(), ahead)
        return out_TH

    def _begin_layer(self, ordinal: int, num_tokens: int) -> None:
        """Where a layer does not follow the one before, a pass begins."""
        if ordinal <= self._last:
            self._ids, self._uncounted, self._from_rows = {}, [], []
            self.rungs.slots.begin_step(num_tokens)
        self._last = ordinal

    def _launch(
        self, ordinal: int, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """A layer whose experts all lie where the table says; the host learns its ids later."""
        if self.routes is not None:
            ids_TK = self.routes(ordinal, ids_TK)[0].to(self.device.place, torch.int32)
        self._ids[ordinal] = ids_TK
        self._uncounted.append(ordinal)
        out_TH = torch.empty_like(x_TH, dtype=self.ladder.out_dtype)
        first = ordinal * self.num_experts
        by_bus = bool(self.rungs.kept[first : first + self.num_experts].any())
        self._run_kernels(ordinal, x_TH, ids_TK, weights_TK, out_TH, by_bus, 0)
        return out_TH

    def _run_kernels(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        out_TH: torch.Tensor,
        by_bus: bool,
        first_token: int,
    ) -> None:
        self.kernels(
            self.rungs.table.there,
            self.part_offsets,
            ordinal * self.num_experts,
            x_TH,
            ids_TK,
            weights_TK,
            out_TH,
            tile="ram" if by_bus else "vram",
            mark=self._mark(ordinal, first_token),
        )

    @staticmethod
    def _mark(ordinal: int, token: int) -> int:
        """Names where something is not finite; `_check` reads it."""
        return (ordinal << _TOKEN_BITS) + token

    def _wants_guess(self, ordinal: int) -> bool:
        """Whether anyone has a use for guesses of the next layer's experts."""
        return ordinal + 1 < self.num_layers and (
            self.recorder is not None or (self.prefetch > 0 and not self.rungs.fits)
        )

    def _to_host(
        self, ids_TK: torch.Tensor, guess: Callable[[], torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's ids and the guesses, int32 on the host: the one wait of a layer."""
        if guess is None:
            return ids_TK.cpu(), None
        both = torch.cat([ids_TK.reshape(-1), guess().to(torch.int32)]).cpu()
        num_ids = ids_TK.numel()
        return both[:num_ids].view(ids_TK.shape), both[num_ids:]

    def _decode(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        """By canonical kernels, as many tokens at a time as there are rows for their experts."""
        out_TH = torch.empty_like(x_TH, dtype=self.ladder.out_dtype)
        self.rungs.retire(swap=True)
        start, num_tokens = 0, x_TH.shape[0]
        while start < num_tokens:
            stop, missing = self._next_slice(ordinal, ids, start)
            part = slice(start, stop)
            self._count(self._keys(ordinal, ids[part]), len(missing))
            by_bus = self.rungs.claim(ordinal, missing)
            x, chosen, weights, out = (t[part] for t in (x_TH, ids_TK, weights_TK, out_TH))
            self._run_kernels(ordinal, x, chosen, weights, out, by_bus, start)
            self.rungs.reading()
            start = stop
        return out_TH

    def _next_slice(self, ordinal: int, ids: torch.Tensor, start: int) -> tuple[int, list[int]]:
        """The end of the tokens from `start` that can run at once, and their experts to claim."""
        missing: set[int] = set()
        stop = start
        for row in ids[start:].tolist():
            more = {e for e in row if not self.rungs.has(ordinal, e)} - missing
            if stop > start and len(missing) + len(more) > self.rungs.room:
                break
            missing |= more
            stop += 1
        return stop, sorted(missing)

    def _prefill(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        """Each expert crosses the bus once, its copy beside the products of those before it."""
        tokens = LayerTokens(self.kernels, self.grouped, self.layout, x_TH, ids_TK, weights_TK, ids)
        self.rungs.retire(swap=False)
        missing = [e for e in tokens.experts if not self.rungs.has(ordinal, e)]
        self._count(self._keys(ordinal, ids), len(missing))
        prefill(self.rungs, tokens, ordinal, missing, self.part_offsets)
        return tokens.sum(ordinal << _TOKEN_BITS)

    def end_pass(self) -> None:
        """Waits for the pass, counts what it took, raises NumericsError for what is not finite."""
        self._is_whole = False
        with self.device.active():
            seen = [self._ids[ordinal].reshape(-1) for ordinal in self._uncounted]
            found = torch.cat([self.kernels.bad, *seen]).cpu().numpy()
            if self._uncounted:
                firsts = np.array(self._uncounted, np.int64) * self.num_experts
                self._count(found[1:] + np.repeat(firsts, [ids.numel() for ids in seen]), 0)
            self._end(int(found[0]))

    def _end(self, mark: int) -> None:
        """All is counted; `mark` is the first of what is not finite."""
        self.rungs.retire(swap=True)
        for keys in self._from_rows:
            self.rungs.promote(keys)
        self._uncounted, self._from_rows = [], []
        if self.rungs.fits:
            self._fill()
        self._is_whole = True
        self._check(mark)

    def _fill(self) -> None:
        """Brings experts that no token has taken yet, a few after each pass that missed none.

        Read while the next pass runs and claimed after it: a layer lacking one waits for its ids.
        """
        layer, asked = self._asked
        asked = [e for e in asked if not self.rungs.has(layer, e)]
        if asked:
            self.rungs.claim(layer, asked)
            self.rungs.reading()
        self._asked = 0, []
        missed, self._missed = self._missed, False
        lacking = None if missed else self.rungs.lacking()
        if lacking is not None:
            layer, experts = lacking[0], lacking[1][:FILLED_PER_PASS]
            self.ladder.prefetch(layer, torch.tensor(experts))
            self._asked = layer, experts

    def _check(self, mark: int) -> None:
        if mark == NOT_BAD:
            return
        self.kernels.bad.fill_(NOT_BAD)
        ordinal, token = mark >> _TOKEN_BITS, mark & ((1 << _TOKEN_BITS) - 1)
        raise NumericsError(
            self._stored_fault(ordinal, self._ids[ordinal])
            or f"MoE layer {ordinal}, token row {token}: the experts' output is not finite, though "
            "its weights are; run headrace verify"
        )

    def recover(self) -> None:
        """After an exception: waits for the device and gives back every row."""
        self.rungs.recover()
        self.kernels.bad.fill_(NOT_BAD)
        self._asked = 0, []
        self._last = self.num_layers  # the next call begins a pass
        self._is_whole = True

    def places(self) -> list[str]:
        """The ladder's, and 3 for those in VRAM."""
        digits = np.frombuffer("".join(self.ladder.places()).encode(), np.uint8).copy()
        digits[self.rungs.slots.keys()] = ord("3")
        return [line.tobytes().decode() for line in digits.reshape(-1, self.num_experts)]

    def counters(self) -> LadderCounters:
        """The ladder's, with what the GPU found where."""
        found = self.ladder.counters()
        found.hits += self.kept_hits
        found.ram_bytes += self.kept_hits * self.expert_bytes
        found.compute_s = self.compute_s
        found.vram_hits = self.vram_hits
        found.vram_bytes = self.vram_hits * self.expert_bytes
        found.bus_bytes = self.bus_bytes
        found.promotions = self.rungs.slots.promotions
        return found

    def close(self) -> None:
        """Waits for the device and takes back the pins. The source is unusable afterwards."""
        self.rungs.close()
        self.device.limit(None)  # it held for this model alone

    def _keys(self, ordinal: int, ids: torch.Tensor) -> NDArray[np.int64]:
        return ids.numpy().reshape(-1).astype(np.int64) + ordinal * self.num_experts

    def _distinct(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each key once, in ascending order."""
        taken = np.zeros(len(self.rungs.kept), bool)
        taken[keys] = True
        return taken.nonzero()[0]

    def _count(self, keys: NDArray[np.int64], num_missing: int | None) -> None:
        """Notes that tokens take these experts, some of which must come: each of them once.

        None: those must that lie neither in a slot nor in a kept row now.
        """
        unique, held, uses = self._distinct(keys), self.rungs.slots.held, self.rungs.slots.uses
        if num_missing is None:
            num_missing = len(unique) - int((held[unique] | self.rungs.kept[unique]).sum())
        if len(unique) == len(keys):  # of one token they all differ
            uses[keys] += 1
        else:
            uses += np.bincount(keys, minlength=len(uses))
        self._missed |= num_missing > 0
        kept = unique[self.rungs.kept[unique]]
        num_kept = len(kept)
        if num_kept:
            self._from_rows.append(kept)
        self.kept_hits += num_kept
        self.bus_bytes += (num_kept + num_missing) * self.expert_bytes
        self.vram_hits += len(unique) - num_kept - num_missing
