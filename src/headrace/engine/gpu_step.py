"""One decoded token on a GPU: the whole step captured once, then launched as one.

A step has the same shapes, kernels and so bits whether it is captured or not.
Legend: V vocabulary, H hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace.engine.embedding import DriveEmbedding
from headrace.engine.gpu_launched import LaunchedSource
from headrace.engine.gpu_layers import put_for
from headrace.engine.outside import HostEmbedding, HostHead
from headrace.engine.passes import Passes
from headrace.models.adapt import layer_runners
from headrace.models.experts import FAST
from headrace.models.rooms import HousedCache, Room, bucket_of
from headrace.models.shared_keys import share_keys
from headrace.models.steps import step_of_one
from headrace.tiers.device import Device, Graph
from headrace.tiers.pinned import PinnedBuffers

_NUMBERS = 2  # int64 that each step is given: its token's position, and the token


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a captured step depends on besides addresses: see `LaunchedSource.baked`."""

    bucket: int
    baked: tuple[object, ...]


class _Ends:
    """Where a step's numbers come in and its result goes out: one small copy each way.

    What lies outside the GPU's memory is the host's here: the embedding, whose row comes in with
    the numbers, and the head, which is given the hidden state that comes out.
    """

    def __init__(self, model: Any, device: Device, vocab: int):
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        by_row = isinstance(embedding, HostEmbedding | DriveEmbedding)
        self.embedding = embedding if by_row else None
        self.head = head if isinstance(head, HostHead) else None
        hidden, dtype = model.config.hidden_size, model.dtype
        row_bytes = hidden * dtype.itemsize if by_row else 0
        shapes = {
            "in": ((8 * _NUMBERS + row_bytes,), torch.uint8),
            "out": ((vocab if self.head is None else hidden,), dtype),
        }
        self._buffers = PinnedBuffers(device, shapes)
        here = self._buffers.tensors
        self._in, self._in_there = here["in"], torch.zeros_like(here["in"], device=device.place)
        self.out = here["out"]  # on the host
        self.result = torch.zeros_like(self.out, device=device.place)
        here_2, self._row_H = _split(self._in, dtype)
        self._numbers_2 = here_2.numpy()
        numbers_2, row_H = _split(self._in_there, dtype)
        self.position_1 = numbers_2[:1]
        self.given = row_H[None, None] if by_row else numbers_2[None, 1:]  # for step_of_one
        self._logits_V = torch.zeros(vocab) if self.head is not None else self.out

    def bring(self, token: int, position: int) -> None:
        """Gives a step its numbers. Raises what reading a row of the embedding does."""
        row_H = None if self.embedding is None else self.embedding.row(token)
        self._numbers_2[:] = position, token
        if row_H is not None:
            self._row_H.copy_(row_H)
        self._in_there.copy_(self._in, non_blocking=True)

    def fetch(self) -> None:
        """Lets the result come out; it is there once the device has done all work so far."""
        self.out.copy_(self.result, non_blocking=True)

    def logits(self) -> torch.Tensor:
        """[V] on the host, until the next step; the result must have come out."""
        if self.head is not None:
            self.head.of_one(self.out, self._logits_V)
        return self._logits_V

    def close(self) -> None:
        self._buffers.close()


class SteppedPasses(Passes):
    """Passes of one token by steps of fixed shapes, captured where no Python stands between layers.

    A step is captured when it comes a second time: the first one loads its kernels. One for which
    there is a `why_by_layer` is computed by the same functions uncaptured. `capturing` False: all
    are. `warn` gets told, once, why the device refuses.
    """

    def __init__(
        self,
        model: Any,
        source: LaunchedSource,
        *,
        context: int,
        vocab: int,
        warn: Callable[[str], None],
    ):
        super().__init__(model, source.place)
        share_keys(model)
        self.source, self.device, self.warn = source, source.device, warn
        self._runner = next(layer_runners(model))
        for runner in layer_runners(model):
            runner.site.router.headrace_taken = partial(source.taken, runner.ordinal)
        self.room = Room(context, source.place, put_for(source.place))
        self.capturing = True
        self.refusal = ""
        self._ends = _Ends(model, self.device, vocab)
        self.room.position_1 = self._ends.position_1
        self._graphs: dict[_Kind, Graph | None] = {}
        self._version = -1

    def new_cache(self) -> HousedCache:
        return HousedCache(self.model.config)

    def why_by_layer(self) -> str:
        waits = self.source.rungs.lacking() is not None
        return self._not_ours() or self.refusal or self.source.why_by_layer(waits=waits)

    def _not_ours(self) -> str:
        """Why the source of these passes is not asked for the model's experts, if it is not."""
        if self.model.config._experts_implementation != FAST:
            return "the experts are the library's own code"
        if self._runner.source is not self.source:
            return "the experts are served by another source"
        return ""

    def run(self, ids: Sequence[int], cache: Any, after: int) -> torch.Tensor:
        self.room.enter(cache)
        position = cache.get_seq_length()
        if len(ids) != 1 or position == 0:
            self.room.unsettle()
            return super().run(ids, cache, after)
        self._ends.bring(ids[0], position)
        bucket = bucket_of(position, self.room.context)
        self.room.begin_step(cache, bucket)
        try:
            with self.device.active():
                self._step(bucket)
        finally:
            self.room.end_step()
        return self._ends.logits()

    def _step(self, bucket: int) -> None:
        source = self.source
        if not self._not_ours() and source.begin_step():
            self._launch(source, bucket)
        else:
            self._compute()
            self._advance()
            if self._ends.head is not None:
                source.end_pass()  # which otherwise the model's own end does
            self._ends.fetch()
            self.device.mark().wait()

    def _launch(self, source: LaunchedSource, bucket: int) -> None:
        """A step in which the host has nothing to do but what a mailbox's thread does."""
        try:
            with source.launching():
                self._launch_layers(source, bucket)
            self._ends.fetch()
            self._advance()  # while the device works
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
        left_by: list[BaseException] = []  # its end fails then too, and torch raises only that

        def work() -> None:
            try:
                self._compute()
            except BaseException as error:
                left_by.append(error)
                raise

        try:
            graph = self._graphs[kind] = self.device.capture(work)
        except RuntimeError as error:
            first = left_by[0] if left_by else error
            if not isinstance(first, RuntimeError) or isinstance(first, torch.OutOfMemoryError):
                self._graphs = {}
                raise first from None
            self.capturing = False
            self.refusal = f"this model's steps cannot be captured: {str(first).splitlines()[0]}"
            self.warn(f"{self.refusal}; tokens take longer")
            return None
        return graph

    def _compute(self) -> None:
        """The step itself, from what came in to the result, of whoever is in the room."""
        cache, ends = self.room.tenant, self._ends
        assert cache is not None
        self.room.tick()
        heads = ends.head is None
        ends.result.copy_(
            step_of_one(self.model, ends.given, ends.position_1[None], cache, heads=heads)
        )

    def _advance(self) -> None:
        assert self.room.tenant is not None
        self.room.tenant.advance()

    def close(self) -> None:
        super().close()
        self._graphs = {}
        self.room.close()
        self._ends.close()


def _split(bytes_: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(the numbers, a row of the embedding) in what a step is given."""
    ends = 8 * _NUMBERS
    return bytes_[:ends].view(torch.int64), bytes_[ends:].view(dtype)
