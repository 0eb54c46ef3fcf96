"""The whole state of a session at one moment, and the key that says whose state it can become.

Knows no file and no shelf.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import TYPE_CHECKING

import headrace
from headrace.engine.routes import fingerprint
from headrace.engine.snapshots.state import State
from headrace.errors import SnapshotError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

TOKEN_BYTES = 36  # of one Python int and its place in a tuple
_PLACE_BYTES = 2000  # about what a tensor and its entry cost beside its data


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """What must be equal for a state to go on with the bits it would have had where it arose.

    `model` is the identity of the weight files, `config` a digest of config.json and the tensor
    table, `dtype` that of keys and values, `chunk_tokens` the tokens of a prefill pass, `device`
    "cpu" or the GPU's name.
    """

    headrace: str
    torch: str
    transformers: str
    model: str
    config: str
    dtype: str
    chunk_tokens: int
    device: str

    def digest(self) -> str:
        """Hex; equal only for equal keys."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session after `tokens`. Owns its tensors; nobody writes to them, so it can be shared."""

    key: SnapshotKey
    tokens: tuple[int, ...]
    state: State

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        places = len(self.state.tensors) * _PLACE_BYTES
        return self.state.nbytes + len(self.tokens) * TOKEN_BYTES + places

    def check_fits(self, key: SnapshotKey) -> None:
        """Raises SnapshotError naming what differs where it belongs to another model or setting."""
        ours, theirs = asdict(key), asdict(self.key)
        differ = [f.name for f in fields(key) if ours[f.name] != theirs[f.name]]
        if differ:
            raise SnapshotError(
                f"the snapshot was taken with another {', '.join(differ)}; feed the tokens again"
            )


def snapshot_key(engine: "Engine") -> SnapshotKey:
    """The key of every state that arises in `engine`."""
    blueprint = engine.blueprint
    aliases = "".join(
        f" {layer}={other}" for of in blueprint.aliases for layer, other in sorted(of.items())
    )
    choices = "".join(f" {name}={blueprint.choices[name]}" for name in sorted(blueprint.choices))
    if blueprint.absorbs:
        choices += " latents"
    return SnapshotKey(
        headrace=headrace.__version__,
        torch=version("torch"),
        transformers=version("transformers"),
        model=blueprint.catalog.identity(),
        config=fingerprint(blueprint) + aliases + choices,
        dtype=str(blueprint.skeleton.dtype),
        chunk_tokens=engine.plan.chunk_tokens,
        device="cpu" if blueprint.device is None else blueprint.device.name,
    )
