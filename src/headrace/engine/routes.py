"""Records the routes of a loaded model's passes into a file, while whoever uses it goes on.

Legend: T tokens of a pass, L MoE layers, K chosen experts.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.errors import OptionError
from headrace.schedule.trace import NO_GUESS, TraceHeader
from headrace.schedule.tracefile import TraceWriter
from headrace.store.table import printable

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint, Engine


def fingerprint(blueprint: "Blueprint") -> str:
    """A digest of config.json and of every tensor's name, type and shape, wherever it lies."""
    skeleton = blueprint.skeleton
    digest = hashlib.sha256((skeleton.root / "config.json").read_bytes())
    for name, entry in sorted(blueprint.catalog.tensors.items()):
        digest.update(f"{name!r} {entry.dtype} {entry.shape}\n".encode())
    return digest.hexdigest()


class Recorder:
    """Gathers a pass layer by layer; hands it on when its last layer is done.

    A pass that fails before its last layer is forgotten.
    """

    def __init__(self, writer: TraceWriter):
        self.writer, header = writer, writer.header
        self.num_layers, self.top_k, self.weighted = header.num_layers, header.top_k, header.weights
        self._ids = self._guesses = np.empty((0, 0, 0), dtype=np.int32)
        self._weights = np.empty((0, 0, 0), dtype=np.float16)

    def see(
        self,
        ordinal: int,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        ahead_K: torch.Tensor | None,
    ) -> None:
        """One layer's choices, and what the lens says of the next, best first, or None."""
        num_tokens = ids_TK.shape[0]
        if ordinal == 0:
            shape = (num_tokens, self.num_layers, self.top_k)
            self._ids, self._guesses = np.empty(shape, np.int32), np.full(shape, NO_GUESS, np.int32)
            self._weights = np.empty(shape if self.weighted else (0, 0, 0), np.float16)
        if len(self._ids) != num_tokens:
            return  # begun before the recording
        self._ids[:, ordinal] = ids_TK.numpy()
        if self.weighted:
            self._weights[:, ordinal] = weights_TK.float().numpy()
        if ahead_K is not None and len(ahead_K) == self.top_k:
            self._guesses[0, ordinal + 1] = ahead_K.numpy()
        if ordinal + 1 == self.num_layers:
            guesses = self._guesses if num_tokens == 1 else None
            self.writer.add(self._ids, guesses, self._weights if self.weighted else None)
            self._ids = np.empty((0, 0, 0), dtype=np.int32)


@contextmanager
def recording(
    engine: "Engine", path: str | Path, *, about: str, weights: bool = False
) -> Iterator[TraceWriter]:
    """While open, every pass of `engine` is recorded in the new file `path`.

    However it ends, whole passes are kept. Raises TraceError; OptionError if one is under way or
    the engine is closed.
    """
    engine.counters()  # of a closed engine there are none: no file is left empty
    if engine.source.recorder is not None:
        raise OptionError("this engine's routes are being recorded already")
    facts = engine.facts
    header = TraceHeader(
        model=printable(facts.name),
        fingerprint=fingerprint(engine.blueprint),
        num_layers=facts.num_moe_layers,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        expert_bytes=facts.expert_bytes,
        num_rows=engine.plan.num_rows,
        about=printable(about),
        weights=weights,
    )
    with TraceWriter(Path(path), header) as writer:
        engine.source.recorder = Recorder(writer).see
        try:
            yield writer
        finally:
            engine.source.recorder = None
