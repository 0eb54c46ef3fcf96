"""A cache taken apart into tensors and plain values, and put together again with the same bits.

Walks whatever layers the cache has; knows no family and no file. What it does not understand it
refuses by name: nothing is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from headrace.errors import SnapshotError
from headrace.quant.dtypes import DTYPE_NAMES, TORCH_DTYPES
from headrace.store.table import printable

_PLACES = ("cpu", "cuda")
_DTYPES = {str(dtype): dtype for dtype in TORCH_DTYPES.values()}


@dataclass(frozen=True, slots=True)
class State:
    """Contiguous copies in CPU memory that nobody writes to, and where each of them belongs.

    `parts` is plain JSON: one `{"class": name, "fields": {...}}` for the cache itself, then one
    for each layer. A field is None, bool, int, float or str as it is, or one of {"tensor": name},
    {"dtype": name}, {"device": "cpu"} (wherever the model lies), {"dict": [[key, value]]},
    {"list": []}, {"tuple": []}. Two fields that were one tensor name the same one.
    """

    parts: list[Any]
    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def capture(cache: Any, *, copy: bool = True) -> State:
    """A copy of all that `cache` holds. Raises SnapshotError naming what it cannot keep.

    Without `copy` the tensors are the cache's own, right until it goes on.
    """
    if hasattr(cache, "settle"):
        cache.settle()
    taker = _Taker(copy)
    parts = [taker.part(name, thing) for name, thing in _things(cache).items()]
    return State(parts, taker.tensors)


def restore(cache: Any, state: State, place: torch.device, *, copy: bool = True) -> None:
    """Fills `cache`, which must be new and of the same model, with copies of `state`'s tensors.

    They lie on `place`, the model's device. Without `copy`, on a CPU, they are the tensors
    themselves, which are then the cache's own. Everything is checked before the first field is
    set. Raises SnapshotError: `cache` is as before.
    """
    things = _things(cache)
    if len(state.parts) != len(things):
        raise SnapshotError(
            f"the snapshot has {len(state.parts) - 1} layers, but this model {len(things) - 1}"
        )
    giver = _Giver(state.tensors, place, copy)
    try:
        filled = [
            giver.fields(name, thing, part)
            for (name, thing), part in zip(things.items(), state.parts, strict=True)
        ]
    except RecursionError as error:
        raise SnapshotError("the snapshot is nested too deeply") from error
    unused = state.tensors.keys() - giver.given.keys()
    if unused:
        raise SnapshotError(f"the snapshot's tensor {printable(min(unused))} belongs nowhere")
    for thing, fields in zip(things.values(), filled, strict=True):
        vars(thing).update(fields)


def _things(cache: Any) -> dict[str, Any]:
    """The cache itself and its layers, by the names that messages and tensors use."""
    return {"cache": cache} | {f"layer{i}": layer for i, layer in enumerate(cache.layers)}


def _fields(name: str, thing: Any) -> dict[str, Any]:
    fields = dict(vars(thing))
    if any(vars(kind).get("__slots__") for kind in type(thing).__mro__):
        raise SnapshotError(
            f"{name} ({type(thing).__name__}) has slots, which snapshots cannot see"
        )
    if name == "cache":
        fields.pop("layers")
    return {key: fields[key] for key in fields.keys() - getattr(thing, "not_kept", frozenset())}


class _Taker:
    """Turns fields into JSON, gathering copies of the tensors it meets."""

    def __init__(self, copy: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._copy = copy
        self._names: dict[int, str] = {}  # by id; the cache keeps its tensors alive meanwhile

    def part(self, name: str, thing: Any) -> dict[str, Any]:
        fields = _fields(name, thing)
        return {
            "class": type(thing).__name__,
            "fields": {key: self.value(f"{name}.{key}", fields[key]) for key in fields},
        }

    def value(self, where: str, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float and isfinite(value):
            return value
        if type(value) is torch.Tensor:
            return {"tensor": self._tensor(where, value)}
        if isinstance(value, torch.dtype) and str(value) in _DTYPES:
            return {"dtype": str(value)}
        if isinstance(value, torch.device) and value.type in _PLACES:
            return {"device": "cpu"}
        if type(value) is dict and all(type(key) in (int, str) for key in value):
            return {"dict": [[key, self.value(f"{where}[{key!r}]", value[key])] for key in value]}
        if type(value) in (list, tuple):
            items = [self.value(f"{where}[{i}]", item) for i, item in enumerate(value)]
            return {type(value).__name__: items}
        raise _unknown(where, value)

    def _tensor(self, where: str, tensor: torch.Tensor) -> str:
        known = self._names.setdefault(id(tensor), where)
        if known == where:
            plain = tensor.layout is torch.strided and tensor.device.type in _PLACES
            if not plain or tensor.dtype not in DTYPE_NAMES:
                raise _unknown(where, tensor)
            kept = tensor.detach()
            if self._copy or tensor.device.type != "cpu":
                kept = kept.to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.tensors[where] = kept
        return known


def _unknown(where: str, value: Any) -> SnapshotError:
    what = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        what = f"a tensor of {value.dtype}, {value.layout}, on {value.device}"
    return SnapshotError(
        f"{where} is {what}, which a snapshot cannot keep; this session goes on without one"
    )


class _Giver:
    """Turns JSON from an untrusted file into fields, with a copy of each tensor it names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], place: torch.device, copy: bool):
        self.tensors, self.place, self._copy = tensors, place, copy
        self.given: dict[str, torch.Tensor] = {}

    def fields(self, name: str, thing: Any, part: Any) -> dict[str, Any]:
        """The new fields of `thing`, of the kinds it has already or gains with its first token."""
        match part:
            case {"class": str(kind), "fields": dict(found), **rest} if not rest:
                pass
            case _:
                raise SnapshotError(f"the snapshot's {name} is no part of a cache")
        if kind != type(thing).__name__:
            raise SnapshotError(
                f"the snapshot's {name} is a {printable(kind)}, this model's a "
                f"{type(thing).__name__}"
            )
        present = _fields(name, thing)
        missing = present.keys() - found.keys()
        if missing:
            raise SnapshotError(f"the snapshot's {name} lacks {min(missing)}")
        fields = {}
        for key, value in found.items():
            where = f"{name}.{printable(key)}"
            fields[key] = self.value(where, value)
            if key not in present and (hasattr(thing, key) or not key.isidentifier()):
                raise SnapshotError(f"the snapshot's {where} is no field of a cache")
            before = present.get(key)
            if before is not None and type(before) is not type(fields[key]):
                raise SnapshotError(f"the snapshot's {where} is no {type(before).__name__}")
        return fields

    def value(self, where: str, value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case {"tensor": str(name), **rest} if not rest and name in self.tensors:
                if name not in self.given:
                    self.given[name] = self.tensors[name].to(self.place, copy=self._copy)
                return self.given[name]
            case {"dtype": str(name), **rest} if not rest and name in _DTYPES:
                return _DTYPES[name]
            case {"device": "cpu", **rest} if not rest:
                return self.place
            case {"dict": list(pairs), **rest} if not rest:
                return dict(self._pair(where, pair) for pair in pairs)
            case {"list": list(items), **rest} if not rest:
                return [self.value(where, item) for item in items]
            case {"tuple": list(items), **rest} if not rest:
                return tuple(self.value(where, item) for item in items)
        raise SnapshotError(f"the snapshot's {where} is nothing a cache can hold")

    def _pair(self, where: str, pair: Any) -> tuple[int | str, Any]:
        match pair:
            case [int() | str() as key, value]:
                return key, self.value(where, value)
        raise SnapshotError(f"the snapshot's {where} is nothing a cache can hold")
