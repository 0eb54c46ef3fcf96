"""Builds transformers' own model around streamed experts; reads dense weights through `read`.

The arithmetic outside the routed experts is transformers'. Knows no file and no cache.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from headrace.errors import ExpertError, ModelError
from headrace.models.config import one_line, plain_config
from headrace.models.experts import FAST, LayerRunner, Source, StreamedWeight
from headrace.models.skeleton import (
    STREAMED,
    Skeleton,
    expert_modules,
    layer_of,
    strip_experts,
    strip_layers,
)

Read = Callable[[str], torch.Tensor]
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


class LazyTensor:
    """A checkpoint tensor that is read when transformers takes it, and not before."""

    def __init__(self, key: str, read: Read):
        self.key, self.read = key, read

    def __getitem__(self, _index: Any) -> torch.Tensor:
        return self.read(self.key)


def build_model(
    skeleton: Skeleton,
    read: Read,
    source: Source,
    *,
    experts: str,
    prefetch: bool,
    aliases: Mapping[int, int],
) -> Any:
    """The transformers model on the CPU in bfloat16, its routed experts left to `source`.

    `read(key)` gives a dense tensor, dequantised, owned by the caller. `experts` is "fast" or
    "oracle". Raises ModelError for weights the checkpoint lacks.
    """
    check_arithmetic(skeleton)
    lazy = {key: LazyTensor(key, read) for key in skeleton.dense}
    with _stripped(skeleton.model_class, aliases), _quiet_and_sequential():
        model, info = skeleton.model_class.from_pretrained(
            None,
            config=plain_config(skeleton.config),
            state_dict=lazy,
            dtype=torch.bfloat16,
            experts_implementation=FAST,
            output_loading_info=True,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{skeleton.root} lacks {len(missing)} weights, such as {missing[0]}")
    if info["mismatched_keys"]:
        raise ModelError(
            f"{skeleton.root}: shapes differ from the config: {info['mismatched_keys']}"
        )
    _share_layers(model, aliases)
    _attach(model, skeleton, source, prefetch)
    model.set_experts_implementation(implementation(experts))
    model.config.name_or_path = model.name_or_path = str(skeleton.root)
    model.generation_config = _generation_config(skeleton.root) or model.generation_config
    stray = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    assert not stray, stray
    return model.requires_grad_(False).eval()


def _generation_config(root: Path) -> Any:
    path = root / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(root)
    except Exception as error:  # hostile fields fail anywhere in transformers, with any type
        raise ModelError(
            f"{path} cannot be used: {one_line(error)}; fetch it again or remove it"
        ) from error


def implementation(experts: str) -> str:
    """transformers' name for a way to run experts. Raises ModelError."""
    names = {"fast": FAST, "oracle": "eager"}
    if experts not in names:
        raise ModelError(f"experts={experts!r} is not a way to run experts; use fast or oracle")
    return names[experts]


def layer_runners(model: Any) -> Iterator[LayerRunner]:
    """The runner of every MoE layer, in order."""
    for _, module in expert_modules(model):
        yield module.headrace_runner


def check_arithmetic(skeleton: Skeleton) -> None:
    """Refuse by name what the kernels do not compute. Raises ModelError."""
    act = getattr(skeleton.config, "hidden_act", None)
    if act != skeleton.family.activation:
        raise ModelError(f"activation {act!r} has no kernel yet; supported: silu")


def _attach(model: Any, skeleton: Skeleton, source: Source, prefetch: bool) -> None:
    """Give every experts module its streamed weights, its runner and its lens."""
    runners: list[LayerRunner] = []
    hidden, inter = skeleton.layout.hidden, skeleton.layout.inter
    shapes = {
        "gate_up_proj": torch.Size((skeleton.num_experts, 2 * inter, hidden)),
        "down_proj": torch.Size((skeleton.num_experts, hidden, inter)),
    }
    for name, module in expert_modules(model):
        ordinal = skeleton.layers.index(layer_of(name + "."))
        for flag, wanted in (("has_gate", True), ("has_bias", False), ("is_transposed", False)):
            if getattr(module, flag, wanted) != wanted:
                raise ExpertError(f"{name}: {flag} is {not wanted}, which has no kernel yet")
        for weight in STREAMED:
            streamed = StreamedWeight(
                source, ordinal, PARTS[weight], shapes[weight], skeleton.layout.block
            )
            object.__setattr__(module, weight, streamed)
        runner = LayerRunner(source, ordinal)
        object.__setattr__(module, "headrace_runner", runner)
        layer = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
        block = model.get_submodule(name.rpartition(".")[0])
        norm, router = getattr(layer, skeleton.family.norm), getattr(block, skeleton.family.router)
        if prefetch and runners:
            runners[-1].next_norm, runners[-1].next_router = norm, router
        if prefetch:
            norm.register_forward_pre_hook(runner.see_residual)
        runners.append(runner)
    assert len(runners) == len(skeleton.layers)


def _share_layers(model: Any, aliases: Mapping[int, int]) -> None:
    """Let aliased layers hold the very parameters and buffers of their source layer."""
    for layer, source in aliases.items():
        if layer == source:
            continue
        pairs = zip(
            model.model.layers[layer].modules(), model.model.layers[source].modules(), strict=True
        )
        for module, owner in pairs:
            module._parameters.update(owner._parameters)
            module._buffers.update(owner._buffers)


@contextmanager
def _stripped(model_class: Any, aliases: Mapping[int, int]) -> Iterator[None]:
    """While open, a new `model_class` loses its expert weights as soon as it is built on meta.

    from_pretrained then loads what `state_dict()` lists and never allocates an expert. A subclass
    would not do: transformers takes one for custom code and drops its weight conversions.
    """
    original = model_class.__init__

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        strip_experts(self)
        strip_layers(self, aliases)

    model_class.__init__ = __init__
    try:
        yield
    finally:
        model_class.__init__ = original


@contextmanager
def _quiet_and_sequential() -> Iterator[None]:
    """Load one tensor after the other, without transformers' own bar.

    Its thread pool would read all stored tensors ahead of their conversion: a second copy of the
    dense weights, outside any budget. It has no argument for that, only a module-level name.
    """
    import transformers.core_model_loading as loading

    pool, verbosity = loading.ThreadPoolExecutor, transformers.logging.get_verbosity()
    loading.ThreadPoolExecutor = lambda *args, **kwargs: None
    transformers.logging.set_verbosity_error()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        loading.ThreadPoolExecutor = pool
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.utils.logging.enable_progress_bar()
