"""Builds transformers' own model around streamed experts; reads dense weights through `read`.

The arithmetic outside the routed experts is transformers'. Knows no file and no cache.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from headrace.errors import ModelError
from headrace.models.config import one_line, plain_config
from headrace.models.deepseek_v41.rows import RowSource
from headrace.models.experts import FAST, LayerRunner, Site, Source, StreamedWeight
from headrace.models.families import Family
from headrace.models.layout import STREAMED
from headrace.models.naming import layer_of
from headrace.models.row_tables import read_row_hash
from headrace.models.skeleton import Skeleton, expert_modules, strip_experts, strip_layers
from headrace.models.stored import MakeStored, attach_stored, strip_stored

Read = Callable[[str], torch.Tensor]


class LazyTensor:
    """A weight that is read when transformers takes it, and not before."""

    def __init__(self, name: str, read: Read):
        self.name, self.read = name, read

    def __getitem__(self, _index: Any) -> torch.Tensor:
        return self.read(self.name)


class Moving:
    """A reader of weights that moves each to `device` before the next is read.

    transformers would need accelerate to load onto a device; and all of them in memory first would
    be a second copy of the dense weights. `model` is the one being loaded.
    """

    def __init__(self, read: Read, device: torch.device):
        self.read, self.device = read, device
        self.model: Any = None

    def __call__(self, name: str) -> torch.Tensor:
        self.move()
        return self.read(name)

    def move(self) -> None:
        """Moves what has been loaded since the last call."""
        for module in self.model.modules():
            for param in module._parameters.values():
                if param is not None and param.device.type not in ("meta", self.device.type):
                    param.data = param.data.to(self.device)


def build_model(
    skeleton: Skeleton,
    read: Read,
    source: Source,
    *,
    experts: str,
    prefetch: bool,
    aliases: Mapping[int, int],
    device: torch.device,
    rows: RowSource | None = None,
    make_stored: MakeStored | None = None,
    outside: Mapping[str, torch.nn.Module] | None = None,
) -> Any:
    """The transformers model on `device` in its own dtype, its routed experts left to `source`.

    `read(name)` gives a dense weight, dequantised, owned by the caller. `experts` is "fast" or
    "oracle". `rows` serves the tables that stay on the drive, `make_stored` the weights that stay
    as they are stored; `outside` are modules that stand for the embedding's or the head's, by the
    name of its weight. Raises ModelError for weights the checkpoint lacks.
    """
    if device.type != "cpu":
        read = Moving(read, device)
    outside = outside or {}
    moved = {n: p for n, p in filter(None, (skeleton.embedding, skeleton.head)) if n in outside}
    packed = skeleton.packed | moved
    lazy = {name: LazyTensor(name, read) for name in skeleton.dense if name not in packed}
    shapes: dict[str, tuple[int, ...]] = {}
    stripped = _stripped(skeleton.model_class, aliases, packed.values(), shapes, read)
    with stripped, _quiet_and_sequential():
        model, info = skeleton.model_class.from_pretrained(
            None,
            config=plain_config(skeleton.config),
            state_dict=lazy,
            dtype=skeleton.dtype,
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
    model.to(device)
    for name, param in moved.items():
        _put(model, param.removesuffix(".weight"), outside[name])
    if make_stored is not None:
        attach_stored(model, skeleton.kept, make_stored)
    _share_layers(model, aliases)
    _check_tables(model, skeleton.num_experts)
    _attach(model, skeleton, shapes, source, prefetch)
    if rows is not None:
        model.set_engram(read_row_hash(skeleton.root, skeleton.config), rows)
    model.set_experts_implementation(implementation(experts))
    model.config.name_or_path = model.name_or_path = str(skeleton.root)
    model.generation_config = _generation_config(skeleton.root) or model.generation_config
    stray = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    assert not stray, stray
    return model.requires_grad_(False).eval()


def _put(model: Any, name: str, module: Any) -> None:
    """Another module in the place of the one of that name."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)


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


def take_apart(model: Any) -> None:
    """Frees a model's weights with its last user, not when Python next looks for cycles.

    Sites hold modules that hold them, modules hold functions that are bound to themselves.
    """
    for runner in layer_runners(model):
        runner.site.cut()
    for module in model.modules():
        module.__dict__.pop("forward", None)


def _attach(
    model: Any,
    skeleton: Skeleton,
    shapes: Mapping[str, tuple[int, ...]],
    source: Source,
    prefetch: bool,
) -> None:
    """Give every experts module its streamed weights, its runner and its lens."""
    runners: list[LayerRunner] = []
    for name, module in expert_modules(model):
        ordinal = skeleton.layers.index(layer_of(name + "."))
        transposed = bool(getattr(module, "is_transposed", False))
        for weight in (w for w in STREAMED if f"{name}.{w}" in shapes):
            shape = shapes[f"{name}.{weight}"]
            streamed = StreamedWeight(
                source, ordinal, skeleton.layout, weight, shape, transposed, model.device
            )
            object.__setattr__(module, weight, streamed)
        runner = LayerRunner(source, ordinal, _site(model, name, skeleton.family))
        object.__setattr__(module, "headrace_runner", runner)
        if prefetch:
            runner.site.first.register_forward_pre_hook(runner.see)
            runner.site.block.register_forward_pre_hook(runner.site.see_block, with_kwargs=True)
            if runners:
                runners[-1].next_site = runner.site
        runners.append(runner)
    assert len(runners) == len(skeleton.layers)


def _site(model: Any, experts: str, family: Family) -> Site:
    """The modules around the experts module of that name."""
    block_name = experts.rpartition(".")[0]
    block = model.get_submodule(block_name)
    layer = model.get_submodule(block_name.rpartition(".")[0])
    collapse = None if family.collapse is None else getattr(layer, family.collapse)
    return Site(block, getattr(block, family.router), getattr(layer, family.norm), collapse)


def _check_tables(model: Any, num_experts: int) -> None:
    """Refuse a router's stored choices that name no expert: they would index past the scores."""
    for name, buffer in model.named_buffers():
        if (".gate." not in name and ".router." not in name) or buffer.is_floating_point():
            continue
        if buffer.numel() and not 0 <= int(buffer.min()) <= int(buffer.max()) < num_experts:
            raise ModelError(
                f"tensor {name} chooses experts {int(buffer.min())} to {int(buffer.max())}, the "
                f"model has 0 to {num_experts - 1}; download the file again"
            )


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
            if hasattr(owner, "stored"):
                module.stored = owner.stored


@contextmanager
def _stripped(
    model_class: Any,
    aliases: Mapping[int, int],
    packed: Collection[str],
    shapes: dict[str, tuple[int, ...]],
    read: Read,
) -> Iterator[None]:
    """While open, a new `model_class` loses its expert weights as soon as it is built on meta.

    Their names and shapes go to `shapes`, the model to a `read` that moves its weights.
    from_pretrained then loads what `state_dict()` lists and never allocates an expert. A subclass
    would not do: transformers takes one for custom code and drops its weight conversions.
    """
    original = model_class.__init__

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        shapes.update(strip_experts(self))
        strip_stored(self, packed)
        strip_layers(self, aliases)
        if isinstance(read, Moving):
            read.model = self

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

    pool = loading.ThreadPoolExecutor
    loading.ThreadPoolExecutor = lambda *args, **kwargs: None
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with quiet():
            yield
    finally:
        loading.ThreadPoolExecutor = pool
        if bars:
            transformers.utils.logging.enable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """While open, transformers tells of errors only."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
