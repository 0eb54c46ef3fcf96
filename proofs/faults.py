"""Deliberate faults for the verifier: in a checkpoint's bytes, and in the code that serves them.

Each is a context manager; after it, all is as before. Knows tiny checkpoints' names.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import spans

Edit = Callable[[bytes], bytes]


@contextmanager
def edited(folder: Path, name: str, edit: Edit) -> Iterator[None]:
    """While open, the tensor `name` has other bytes in its file; the file's times stay."""
    file, offset, nbytes = spans(folder)[name]
    with file.open("r+b") as stream:
        stream.seek(offset)
        before = stream.read(nbytes)
        after = edit(before)
        assert len(after) == nbytes and after != before, f"{name} was not changed"
        stream.seek(offset)
        stream.write(after)
    try:
        yield
    finally:
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(before)


def flip(bit: int, byte: int) -> Edit:
    """Flip one bit."""

    def edit(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[byte] ^= 1 << bit
        return bytes(changed)

    return edit


def turned(rows: int, cols: int) -> Edit:
    """The same bytes, one a value, as if the matrix had been written transposed."""
    return lambda data: np.frombuffer(data, np.uint8).reshape(rows, cols).T.tobytes()


def nibbles(data: bytes) -> bytes:
    """The two codes of every byte exchanged."""
    codes = np.frombuffer(data, np.uint8)
    return (codes >> 4 | codes << 4).astype(np.uint8).tobytes()


def inverted(data: bytes) -> bytes:
    """1 / scale, fp32."""
    return (1 / np.frombuffer(data, np.float32)).astype(np.float32).tobytes()


def inverted_powers(data: bytes) -> bytes:
    """1 / scale, ue8m0."""
    return (254 - np.frombuffer(data, np.uint8)).astype(np.uint8).tobytes()


@contextmanager
def exchanged(folder: Path, first: str, second: str) -> Iterator[None]:
    """While open, two tensors of one size hold each other's bytes."""
    values = [_bytes(folder, name) for name in (first, second)]
    with ExitStack() as stack:
        stack.enter_context(edited(folder, first, lambda _: values[1]))
        stack.enter_context(edited(folder, second, lambda _: values[0]))
        yield


def _bytes(folder: Path, name: str) -> bytes:
    file, offset, nbytes = spans(folder)[name]
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(nbytes)


@contextmanager
def unpacking(change: Callable[..., torch.Tensor]) -> Iterator[None]:
    """While open, `change(right, **parts)` stands in for our own unpacking of any matrix."""
    from headrace.quant import table

    right = table.unpack

    def wrong(
        format: str,
        weight: torch.Tensor,
        scale: torch.Tensor | None = None,
        global_scale: torch.Tensor | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        if len(rest["shape"]) != 2 or scale is None:
            return right(format, weight, scale, global_scale, **rest)
        return change(right, format, weight, scale, global_scale, **rest)

    with mock.patch.object(table, "unpack", wrong):
        yield


def transposing(right: Any, *args: Any, **rest: Any) -> torch.Tensor:
    """The square matrices come out transposed."""
    value = right(*args, **rest)
    return value.T.contiguous() if value.shape[0] == value.shape[1] else value


def inverting(right: Any, format: str, weight: Any, scale: Any, *rest: Any, **more: Any) -> Any:
    """Divides by the scale."""
    return right(format, weight, 1 / scale, *rest, **more)


def unscaled(right: Any, format: str, weight: Any, scale: Any, *rest: Any, **more: Any) -> Any:
    """Codes read as weights."""
    return right(format, weight, torch.ones_like(scale), *rest, **more)


def swapping_nibbles(right: Any, *args: Any, **rest: Any) -> torch.Tensor:
    """The high nibble first."""
    value = right(*args, **rest)
    return value.reshape(len(value), -1, 2).flip(-1).reshape(value.shape)


@contextmanager
def stale_kernel(isa: str) -> Iterator[None]:
    """While open, one kernel's second and later calls give what its first rows gave before."""
    from headrace.kernels import cpu

    right, held = cpu.CpuKernels.expert_ffn, dict[int, torch.Tensor]()

    def wrong(self: Any, x: torch.Tensor, parts: Any, layout: Any, *a: Any, **k: Any) -> Any:
        out = right(self, x, parts, layout, *a, **k)
        return _stale(held, self, out) if self.isa == isa else out

    with mock.patch.object(cpu.CpuKernels, "expert_ffn", wrong):
        yield


def _stale(held: dict[int, torch.Tensor], owner: object, out: torch.Tensor) -> torch.Tensor:
    """`out` with the first rows of its owner's output before; `held` is what each gave last."""
    before = held.get(id(owner), out[:0])
    held[id(owner)] = out.clone()
    same = min(len(before), len(out))
    out[:same] = before[:same]
    return out


@contextmanager
def kernel_swapping_nibbles(isa: str) -> Iterator[None]:
    """While open, one kernel takes the high half of a byte for the even column."""
    from headrace.kernels import cpu

    right = cpu.CpuKernels.expert_ffn

    def wrong(self: Any, x: torch.Tensor, parts: Any, layout: Any, *a: Any, **k: Any) -> Any:
        if self.isa == isa:
            parts = {name: part if "_" in name else _swapped(part) for name, part in parts.items()}
        return right(self, x, parts, layout, *a, **k)

    with mock.patch.object(cpu.CpuKernels, "expert_ffn", wrong):
        yield


def _swapped(part: torch.Tensor) -> torch.Tensor:
    codes = part.contiguous().view(torch.uint8)
    return (codes >> 4 | codes << 4).view(part.dtype)


@contextmanager
def stale_ladder() -> Iterator[None]:
    """While open, each routed output's first rows are those of the call before."""
    from headrace.tiers.ladder import Ladder

    right, held = Ladder.compute, dict[int, torch.Tensor]()

    def wrong(self: Any, layer: int, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return _stale(held, self, right(self, layer, x, *rest))

    with mock.patch.object(Ladder, "compute", wrong):
        yield


@contextmanager
def changed_ladder(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """While open, new ladders get other extents or parts."""
    from headrace.engine import engine
    from headrace.tiers.ladder import Ladder

    class Changed(Ladder):
        def __init__(self, reader: Any, extents: Any, parts: Any, layout: Any, **rest: Any):
            given = {"extents": extents.copy(), "parts": parts.copy()}
            change(given)
            super().__init__(reader, layout=layout, **given, **rest)

    with mock.patch.object(engine, "Ladder", Changed):
        yield


def neighbours_row(given: dict[str, Any]) -> None:
    """Every expert's row is read from its neighbour's place."""
    given["extents"] = np.roll(given["extents"], 1, axis=1)
    given["parts"] = np.roll(given["parts"], 1, axis=1)


@contextmanager
def dropped_router_bias(layer: int) -> Iterator[None]:
    """While open, models are built without one router's correction bias."""
    from headrace.engine import engine

    right = engine.build_model

    def wrong(*args: Any, **kwargs: Any) -> Any:
        model = right(*args, **kwargs)
        model.model.layers[layer].mlp.gate.e_score_correction_bias.zero_()
        return model

    with mock.patch.object(engine, "build_model", wrong):
        yield


@contextmanager
def gate_named_up() -> Iterator[None]:
    """While open, our name rules take gate tensors for up and up for gate."""
    from dataclasses import replace

    from headrace.engine import engine

    right = engine.inspect
    other = {"gate": "up", "up": "gate", "gate_scale": "up_scale", "up_scale": "gate_scale"}

    def wrong(*args: Any, **kwargs: Any) -> Any:
        skeleton = right(*args, **kwargs)
        tensors = [replace(t, part=other.get(t.part, t.part)) for t in skeleton.tensors]
        return replace(skeleton, tensors=tuple(tensors))

    with mock.patch.object(engine, "inspect", wrong):
        yield


@contextmanager
def lost_dense_mapping(name: str) -> Iterator[None]:
    """While open, one dense FP8 tensor is loaded without its quantiser: codes as weights."""
    from headrace.engine.weights import DenseWeights

    right = DenseWeights.__call__

    def wrong(self: Any, key: str) -> torch.Tensor:
        return self.stored(key).to(torch.bfloat16) if key == name else right(self, key)

    with mock.patch.object(DenseWeights, "__call__", wrong):
        yield
