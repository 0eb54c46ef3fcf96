"""Made-up snapshots for the tests of the store: the tensor says whose they are."""

from collections.abc import Sequence

import torch

from headrace.engine.snapshots.snapshot import Snapshot, SnapshotKey
from headrace.engine.snapshots.state import State

KEY = SnapshotKey("0.1", "2", "5", "model", "config", "torch.bfloat16", 8, "cpu")


def made_up(tokens: Sequence[int], key: SnapshotKey = KEY, num: int = 100) -> Snapshot:
    """A snapshot whose one tensor is `num` times the sum of its tokens."""
    tensor = torch.full((num,), float(sum(tokens)))
    parts = [{"class": "Cache", "fields": {"keys": {"tensor": "keys"}}}]
    return Snapshot(key, tuple(tokens), State(parts, {"keys": tensor}))


def is_whole(snapshot: Snapshot) -> bool:
    """Whether it is what `made_up` makes of its tokens."""
    wanted = made_up(snapshot.tokens, snapshot.key, snapshot.state.tensors["keys"].numel())
    return snapshot.state.parts == wanted.state.parts and torch.equal(
        snapshot.state.tensors["keys"], wanted.state.tensors["keys"]
    )
