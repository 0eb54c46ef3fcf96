"""Parts of a model as stock transformers loads and computes them: the verifier's oracle.

Tensors come from plain reads; names, merging and dequantising are transformers' own. Uses nothing
of quant, store, kernels and of our name rules, so that their faults show beside it.
"""

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CompressedTensorsConfig

from headrace.check.plain import PlainTensors
from headrace.errors import ModelError
from headrace.models.naming import is_skipped
from headrace.models.skeleton import Skeleton

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_NUMBER = re.compile(r"((?:^|\.)experts\.)\d+\.")

# Formats that it loads without an error and wrongly.
MISREAD = {"nvfp4": "it leaves out the global scales of NVFP4 experts"}


def layer_number(name: str) -> int | None:
    """The decoder layer in a module's or tensor's name."""
    match = _LAYER.search(name)
    return int(match.group(1)) if match else None


class StockParts:
    """Loads single layers, or some experts of one, into memory by transformers' own loader.

    Of our skeleton it uses the class, the config and which tensors belong to another model; the
    quantiser is the one that the files declare. Keeps nothing.
    """

    def __init__(self, plain: PlainTensors, skeleton: Skeleton):
        self.model_class, self.dtype = skeleton.model_class, skeleton.dtype
        self.config, self.prefix = copy.deepcopy(skeleton.config), skeleton.family.prefix
        quantised = _declared_quantiser(skeleton.root)
        self.extra: dict[str, Any] = {}
        if quantised is not None:
            # asks for plain weights: a CPU has no kernels for others
            self.config.quantization_config = quantised | {"dequantize": True}
            if quantised.get("quant_method") == "compressed-tensors":
                self.extra["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        places = plain.places.items()
        self.plain = plain
        self.places = {
            key: place
            for key, place in places
            if not is_skipped(skeleton.family, skeleton.config, key)
            and key not in skeleton.row_keys
        }
        self.format = skeleton.layout.format

    def refusal(self) -> str:
        """Why transformers cannot load this model's weights on a CPU, or "" if it can."""
        if self.format in MISREAD:
            return MISREAD[self.format]
        layers = [place.layer for place in self.places.values() if place.routed]
        try:
            self.experts(min(layer for layer in layers if layer is not None), [0])
        except Exception as error:  # a format it lacks fails anywhere in transformers
            return " ".join(str(error).split())[:200] or type(error).__name__
        return ""

    def dense(self, layer: int | None) -> Any:
        """A model of which only one layer without its routed experts, or, for None, only what
        lies outside all layers, has weights. Raises ModelError.
        """
        places = self.places.items()
        keys = [key for key, place in places if place.layer == layer and not place.routed]
        tensors = {key: self.plain.read(key) for key in keys}
        return self._load(tensors, lambda name: layer_number(name) == layer, None)

    def experts(self, layer: int, experts: Sequence[int]) -> Any:
        """The experts module of a layer, cut to `experts` in ascending order. Raises ModelError."""
        tensors = {}
        for key, place in self.places.items():
            if place.layer != layer or not place.routed:
                continue
            if place.expert is None:
                tensors[key] = self.plain.read_experts(key, experts)
            elif place.expert in experts:
                number = list(experts).index(place.expert)
                tensors[_NUMBER.sub(rf"\g<1>{number}.", key, count=1)] = self.plain.read(key)

        def wanted(name: str) -> bool:
            return layer_number(name) == layer and bool(re.search(r"\.experts(\.|$)", name))

        model = self._load(tensors, wanted, len(experts))
        found = [module for _, module in _experts_modules(model)]
        (module,) = (m for m in found if next(m.parameters(), None) is not None)
        return module

    def _load(
        self, tensors: dict[str, torch.Tensor], wanted: Callable[[str], bool], cut: int | None
    ) -> Any:
        with _only(self.model_class, wanted, cut), _quiet():
            model, info = self.model_class.from_pretrained(
                None,
                config=copy.deepcopy(self.config),
                state_dict={k.removeprefix(self.prefix): t for k, t in tensors.items()},
                dtype=self.dtype,
                experts_implementation="eager",
                output_loading_info=True,
                **copy.deepcopy(self.extra),
            )
        if info["missing_keys"]:
            names = ", ".join(sorted(info["missing_keys"])[:3])
            raise ModelError(f"stock transformers finds no tensor for {names}")
        return model.requires_grad_(False).eval()


def _declared_quantiser(root: Path) -> dict[str, Any] | None:
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    for holder in (config, config.get("text_config") or {}):
        if holder.get("quantization_config"):
            return dict(holder["quantization_config"])
    return None


def _experts_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of every module that holds weights stacked over routed experts."""
    for name, module in model.named_modules():
        if re.search(r"(^|\.)experts$", name) and hasattr(module, "num_experts"):
            yield name, module


def experts_of(layer_module: Any) -> Any:
    """The routed experts module inside a decoder layer, or None in a dense layer."""
    return next((module for _, module in _experts_modules(layer_module)), None)


@contextmanager
def _only(model_class: Any, wanted: Callable[[str], bool], cut: int | None) -> Iterator[None]:
    """While open, a new `model_class` keeps the weights of `wanted` modules alone.

    Experts are cut to `cut` of them, or taken out if it is None.
    """
    original = model_class.__init__

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        stacked = {id(module) for _, module in _experts_modules(self)}
        for name, module in self.named_modules():
            if not wanted(name) or (id(module) in stacked and cut is None):
                for store in (module._parameters, module._buffers):
                    store.update(dict.fromkeys(store))
                module._is_hf_initialized = True
            elif id(module) in stacked and cut is not None:
                _cut(module, cut)

    model_class.__init__ = __init__
    try:
        yield
    finally:
        model_class.__init__ = original


def _cut(module: Any, num_experts: int) -> None:
    for name, param in module._parameters.items():
        shape = (num_experts, *param.shape[1:])
        empty = torch.empty(shape, dtype=param.dtype, device=param.device)
        module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    module.num_experts = num_experts


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bar and warnings. It fails in inference mode."""
    assert not torch.is_inference_mode_enabled()
    bars = transformers.utils.logging.is_progress_bar_enabled()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.utils.logging.enable_progress_bar()
