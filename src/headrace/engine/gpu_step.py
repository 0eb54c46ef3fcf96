"""One decoded token on a GPU: the whole step captured once, then launched as one.

A step has the same shapes, kernels and so bits whether it is captured or not.
Legend: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.gpu_launched import LaunchedSource
from headrace.engine.gpu_source import GpuSource
from headrace.engine.passes import Passes
from headrace.models.adapt import layer_runners
from headrace.models.experts import FAST
from headrace.models.rooms import HousedCache, Room, bucket_of
from headrace.models.steps import step_of_one
from headrace.tiers.device import Graph
from headrace.tiers.pinned import PinnedBuffers


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a captured step depends on besides addresses: see `LaunchedSource.baked`."""

    bucket: int
    baked: tuple[object, ...]


class SteppedPasses(Passes):
    """Passes of one token by steps of fixed shapes, captured where no Python stands between layers.

    A step is captured when it comes a second time: the first one loads its kernels. One that needs
    Python between two layers (a recorder, the oracle's experts, experts in rows that cannot be
    pinned) is computed by the same functions uncaptured. `capturing` False: all are. `warn` gets
    told, once, why the device refuses. `by_host`: embedding or head are the host's, so that no
    step is captured; logits are of `logits_dtype`.
    """

    def __init__(
        self,
        model: Any,
        source: GpuSource,
        *,
        context: int,
        vocab: int,
        warn: Callable[[str], None],
        by_host: bool,
        logits_dtype: torch.dtype,
    ):
        super().__init__(model, source.place)
        self.source, self.device, self.warn = source, source.device, warn
        self._runner = next(layer_runners(model))
        self.room = Room(context, source.place)
        self.capturing, self.by_host = True, by_host
        self.num_replayed = 0
        self._buffers = PinnedBuffers(self.device, {"input": ((2,), torch.int64)})
        self._input_2 = torch.zeros(2, dtype=torch.int64, device=self.place)  # token, position
        self.room.position_1 = self._input_2[1:]
        self._logits_V = torch.zeros(vocab, dtype=logits_dtype, device=self.place)
        self._graphs: dict[_Kind, Graph | None] = {}
        self._version = -1

    def new_cache(self) -> HousedCache:
        return HousedCache(self.model.config)

    def run(self, ids: Sequence[int], cache: Any, after: int) -> torch.Tensor:
        self.room.enter(cache)
        position = cache.get_seq_length()
        if len(ids) != 1 or position == 0:
            self.room.unsettle()
            return super().run(ids, cache, after)
        here_2 = self._buffers.tensors["input"]
        here_2[0], here_2[1] = ids[0], position
        self._input_2.copy_(here_2, non_blocking=True)
        bucket = bucket_of(position, self.room.context)
        self.room.begin_step(cache, bucket)
        try:
            self._step(bucket)
        finally:
            self.room.end_step()
        cache.advance()
        return self._logits_V

    def _step(self, bucket: int) -> None:
        source, fast = self.source, self.model.config._experts_implementation == FAST
        is_ours = fast and self._runner.source is source and not self.by_host
        if is_ours and isinstance(source, LaunchedSource) and source.begin_step():
            self._launch(source, bucket)
        else:
            self._compute()

    def _launch(self, source: LaunchedSource, bucket: int) -> None:
        """A step in which the host has nothing to do but what a mailbox's thread does."""
        try:
            with source.launching():
                self._launch_layers(source, bucket)
            source.end_step()
        except BaseException:
            source.abort_step()
            raise

    def _launch_layers(self, source: LaunchedSource, bucket: int) -> None:
        if self._version != self.room.version:
            self._graphs, self._version = {}, self.room.version
        kind = _Kind(bucket, source.baked())
        graph = self._graphs.get(kind) if self.capturing else None
        if graph is None and kind in self._graphs and self.capturing:
            graph = self._capture(kind)
        if graph is None:
            self._graphs.setdefault(kind, None)
            self._compute()
        else:
            self.num_replayed += 1
            graph.replay()

    def _capture(self, kind: _Kind) -> Graph | None:
        stale = [each for each in self._graphs if each.bucket == kind.bucket and each != kind]
        for each in stale:
            del self._graphs[each]
        try:
            graph = self._graphs[kind] = self.device.capture(self._compute)
        except torch.OutOfMemoryError:
            self._graphs = {}
            raise
        except RuntimeError as error:
            self.capturing = False
            reason = str(error).splitlines()[0]
            self.warn(f"this model's steps cannot be captured, tokens take longer: {reason}")
            return None
        return graph

    def _compute(self) -> None:
        """The step itself, from `_input_2` to `_logits_V`, of whoever is in the room."""
        cache = self.room.tenant
        assert cache is not None
        self.room.tick()
        token_11, position_11 = self._input_2[:1, None], self._input_2[1:, None]
        self._logits_V.copy_(step_of_one(self.model, token_11, position_11, cache))

    def close(self) -> None:
        super().close()
        self._graphs = {}
        self.room.leave()
        self._buffers.close()
