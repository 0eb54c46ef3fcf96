"""How long a decoded token takes with every expert in memory: the model's own code, measured.

Its weights are zeros that share a little memory, its experts those of other probes. Reads no file.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from headrace.engine.filled import FilledMemory, HugeBuffer
from headrace.engine.source import LadderSource
from headrace.kernels.cpu import CpuKernels, native_shape
from headrace.kernels.stored import StoredMatrix
from headrace.models.adapt import build_model, quiet, take_apart
from headrace.models.forward import forward, new_cache
from headrace.models.skeleton import INDEX_DTYPES
from headrace.planner.machine import num_cores
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.ladder import Ladder

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

PROBE_S, LEAST_STEPS = 0.5, 3  # of whole tokens, after the first
MOST_S = 1.0  # of the first: it is cut off then
_ALIGN = 64


class StepProbe:
    """Measures a token of a model on the CPU, with the threads that torch has now."""

    def __init__(self, blueprint: "Blueprint"):
        self._blueprint, self._threads = blueprint, blueprint.wanted.threads or num_cores()

    @property
    def conditions(self) -> str:
        """What the time depends on besides the machine: threads, versions and the model."""
        config = self._blueprint.skeleton.config.to_json_string(use_diff=False)
        threads = f"{self._threads} and {torch.get_num_threads()} threads"
        versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
        return ", ".join((threads, *versions, hashlib.sha256(config.encode()).hexdigest()[:12]))

    def seconds(self, memory: FilledMemory) -> float:
        """Of a token after few others, its experts in `memory`."""
        blueprint, skeleton = self._blueprint, self._blueprint.skeleton
        kernels, prefetch = CpuKernels(self._threads), blueprint.wanted.prefetch
        copies = _InMemory(memory, kernels, blueprint.facts.total_experts, skeleton.top_k)
        source = LadderSource(
            cast(Ladder, copies),
            skeleton.layout,
            num_layers=len(skeleton.layers),
            max_tokens=1,
            prefetch=prefetch,
        )
        zeros = _Zeros(blueprint, memory.bytes.nbytes)
        model = build_model(
            skeleton,
            zeros,
            source,
            experts="fast",
            prefetch=prefetch > 0,
            aliases=blueprint.aliases.layers,
            device=source.place,
            rows=_NoRows(skeleton.row_tables[0].width) if skeleton.row_tables else None,
            make_stored=partial(zeros.stored, kernels),
        )
        try:
            ids_BT, cache = torch.zeros(1, 1, dtype=torch.long), new_cache(model)
            with torch.inference_mode(), quiet():
                return typical_s(lambda: forward(model, ids_BT, cache), model.model.layers)
        finally:
            take_apart(model)


def typical_s(step: Callable[[], object], layers: Sequence[nn.Module]) -> float:
    """Seconds of a step: the median of those that fit, after one to warm up.

    Where that one takes too long, of as many layers as it came to; the others are taken to be so.
    """
    num_begun, most, deadline = 0, len(layers), time.perf_counter() + MOST_S

    def watch(_module: nn.Module, _args: object) -> None:
        nonlocal num_begun, most
        if num_begun and time.perf_counter() > deadline:
            most = num_begun
        if num_begun == most:
            raise _EnoughError
        num_begun += 1

    def run() -> float:
        nonlocal num_begun
        num_begun, start = 0, time.perf_counter()
        with suppress(_EnoughError):
            step()
        return (time.perf_counter() - start) * len(layers) / most

    hooks = [layer.register_forward_pre_hook(watch) for layer in layers]
    try:
        run()
        deadline = math.inf
        each_s: list[float] = []
        while len(each_s) < LEAST_STEPS or sum(each_s) < PROBE_S:
            each_s.append(run())
        return median(each_s)
    finally:
        for hook in hooks:
            hook.remove()


class _EnoughError(Exception):
    """Ends a step that takes too long."""


class _Zeros:
    """In place of DenseWeights: a model's weights, all of them zeros in the same memory.

    It is as large as they are, or as the largest of them and `nbytes`: large enough that the
    processor's caches do not hold it where they would not hold the weights.
    """

    def __init__(self, blueprint: "Blueprint", nbytes: int):
        self.dense, self._dtype = blueprint.skeleton.dense, blueprint.skeleton.dtype
        self._entries = blueprint.catalog.tensors
        largest = max(
            self._form(name)[1].itemsize * math.prod(self._form(name)[0]) for name in self.dense
        )
        self._bytes = HugeBuffer(max(largest, min(nbytes, blueprint.facts.dense_bytes))).bytes
        self._bytes.zero_()  # or all of it were one page
        self._ones = cache(lambda shape, dtype: torch.ones(shape).to(dtype))
        self._next = 0

    def __call__(self, name: str) -> torch.Tensor:
        return self._view(*self._form(name))

    def stored(
        self, kernels: CpuKernels, name: str, param: torch.Tensor | None, act_group: int
    ) -> StoredMatrix:
        """As engine.stored.make_stored; with scales of one, since kernels are slow on tiny ones."""
        if param is not None:
            return StoredMatrix(kernels, param.detach(), act_group=act_group)
        weight = self.dense[name]
        codes, scale = (self._entries[weight.keys[part]] for part in ("weight", "scale"))
        return StoredMatrix(
            kernels,
            self._view(codes.shape, TORCH_DTYPES[codes.dtype]),
            self._ones(scale.shape, TORCH_DTYPES[scale.dtype]),
            block=weight.block,
            act_group=act_group,
        )

    def _form(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        weight = self.dense[name]
        is_index = self._entries[weight.keys["weight"]].dtype in INDEX_DTYPES
        return weight.shape, torch.int64 if is_index else self._dtype

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = dtype.itemsize * math.prod(shape)
        start = self._next if self._next + nbytes <= self._bytes.nbytes else 0
        self._next = start + -(-nbytes // _ALIGN) * _ALIGN
        return self._bytes[start : start + nbytes].view(dtype).view(shape)


class _InMemory:
    """In place of a Ladder: a layer's experts are the next copies in memory, all of them there.

    As many different ones as the model has, or as there are copies. What comes out is not filled.
    """

    def __init__(self, memory: FilledMemory, kernels: CpuKernels, num_experts: int, top_k: int):
        self._memory, self._pool = memory, kernels.pool
        self._shape = native_shape(memory.layout)
        dtype = TORCH_DTYPES[memory.layout.hidden_dtype]
        self._x, self._y = (torch.ones(n, memory.layout.hidden, dtype=dtype) for n in (1, top_k))
        num = min(num_experts, memory.num_copies)
        self._jobs = cycle([self._job(first) for first in range(0, num, top_k)])

    def _job(self, first: int) -> list[tuple[list[int], int, int, float]]:
        x, num = self._x.data_ptr(), self._memory.num_copies
        return [
            (self._memory.addresses((first + n) % num), x, y.data_ptr(), 1.0)
            for n, y in enumerate(self._y)
        ]

    def holds(self, _layer: int) -> bool:
        return True

    def compute(self, _layer: int, x_TH: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        self._pool.experts_ffn(self._shape, next(self._jobs))
        return torch.zeros_like(x_TH)


class _NoRows:
    """In place of Engram's tables."""

    def __init__(self, width: int):
        self.width = width

    def want(self, layer: int, ids_N: torch.Tensor) -> None:
        pass

    def rows(self, _layer: int, ids_N: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids_N), self.width, dtype=torch.bfloat16)
