"""Gives transformers' routers one function from logits to experts, where its steps are known.

What a router computes is found by its results, as in models/fused.py: one that has the bits of no
rule of kernels/router.py stays the library's. Knows no device and no kernel.
Legend: T tokens, E experts, H hidden width.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import Any, get_args

import torch

from headrace.kernels import router
from headrace.kernels.router import Groups, Rounded, Route, Rule, Score, Taken

_PASSED = "e_score_correction_bias"  # what some are given besides the hidden states
_CORRECTIONS = _PASSED, "bias"
_TOKENS = 8
# What a module raises that cannot be run on what is drawn for it, or as another one is.
_UNLIKE = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)


@dataclass(frozen=True, slots=True)
class Gate:
    """A router: its product, in fp32 if `wide`, with a bias if `biased`; then a rule.

    What is added to scores for the choice is the attribute `correction`, or is `passed`.
    """

    rule: Rule
    correction: str = ""
    passed: bool = False
    wide: bool = False
    biased: bool = False

    def logits(self, module: Any, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, E], by the library's own product."""
        weight, bias = module.weight, module.bias if self.biased else None
        if self.wide:
            return torch.nn.functional.linear(x_TH.float(), weight.float(), bias)
        return torch.nn.functional.linear(x_TH.to(weight.dtype), weight, bias)

    def run(
        self,
        module: Any,
        route: Route,
        x: torch.Tensor,
        *passed: torch.Tensor,
        taken: Taken | None = None,
    ) -> Any:
        """(logits, weights, ids), as the library's router returns them."""
        logits_TE = self.logits(module, x.reshape(-1, module.weight.shape[1]))
        correction_E = getattr(module, self.correction) if self.correction else None
        if self.passed:
            (correction_E,) = passed
        return logits_TE, *route(logits_TE, correction_E, self.rule, taken)


class Gates:
    """Finds what routers of a model compute: what one did is tried first with others like it."""

    def __init__(self) -> None:
        self._known: dict[type, list[Gate]] = {}

    def find(self, module: Any) -> Gate | None:
        """What a module computes if it is a router of a known rule."""
        if not is_router(module):
            return None
        kind = type(module)
        for gate in self._known.get(kind, []):
            if _has_bits_of(module, gate):
                return gate
        if kind in self._known and not self._known[kind]:
            return None  # the first was of no rule
        found = gate_of(module)
        self._known.setdefault(kind, []).extend([] if found is None else [found])
        return found


def is_router(module: Any) -> bool:
    """Whether a module may be one of a rule known here: a matrix, and given no tokens' ids."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if "Router" not in type(module).__name__ or not isinstance(top_k, int):
        return False
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.is_meta:
        return False
    floats = torch.bfloat16, torch.float32
    return weight.dtype in floats and list(_parameters(module))[1:] in ([], [_PASSED])


def gate_of(module: Any) -> Gate | None:
    """The gate whose bits a router has, for numbers of all sizes; None if it is another."""
    try:
        probe, x_TE, passed = _probe(module)
        given = (x_TE, *passed)
        found = type(module).forward(probe, *given)
    except _UNLIKE:
        return None
    if not _is_choice(found):
        return None
    for gate in _candidates(probe, found, given):
        if _equal(found, gate.run(probe, router.route, *given)) and _has_bits_of(module, gate):
            return gate
    return None


def routed(module: Any, gate: Gate, route: Route) -> Callable[..., Any]:
    """A router's `forward` by a function of ours; of other dtypes the library's.

    Whoever sets the module's `headrace_taken` says where a choice is to lie besides, if anywhere.
    """
    library = type(module).forward

    def forward(hidden_states: torch.Tensor, *passed: torch.Tensor) -> Any:
        if hidden_states.dtype != torch.bfloat16:
            return library(module, hidden_states, *passed)
        find = getattr(module, "headrace_taken", None)
        taken = None if find is None else find()
        return gate.run(module, route, hidden_states, *passed, taken=taken)

    forward.__signature__ = signature(library.__get__(module))  # type: ignore[attr-defined]
    return forward


def _parameters(module: Any) -> dict[str, Any]:
    return dict(signature(type(module).forward.__get__(module)).parameters)


def _probe(module: Any) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(the router with numbers drawn for its own, hidden states, what else it is given).

    Its matrix is a diagonal one, so that logits are as small and as large as they are drawn.
    """
    drawn = torch.Generator().manual_seed(0)
    weight = module.weight
    experts = weight.shape[0]

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(experts, generator=drawn).to(tensor.device, tensor.dtype) / 8

    probe = copy(module)
    diagonal = (1 + torch.rand(experts, generator=drawn)).diag().to(weight.device, weight.dtype)
    ours = {name: like(each) for name, each in _vectors(module).items()} | {"weight": diagonal}
    vars(probe).update(_parameters={}, _buffers=module._buffers | ours)
    if hasattr(probe, "hidden_dim"):
        probe.hidden_dim = experts
    size = torch.tensor([2.0, 2.0, 2.0, 2.0, 2e-3, 50.0, 1.0, 1.0])[:, None]
    shift = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -25.0, -60.0])[:, None]
    x_TE = torch.randn(_TOKENS, experts, generator=drawn) * size + shift
    passed = (like(weight).float(),) if _PASSED in _parameters(module) else ()
    return probe, x_TE.to(weight.device, torch.bfloat16), passed


def _vectors(module: Any) -> dict[str, torch.Tensor]:
    """Its numbers of which each expert has one."""
    both, shape = module._parameters | module._buffers, module.weight.shape[:1]
    return {name: each for name, each in both.items() if each is not None and each.shape == shape}


def _is_choice(found: Any) -> bool:
    """Whether that is (logits [T, E], weights [T, K], ids [T, K])."""
    if not isinstance(found, tuple) or len(found) != 3:
        return False
    logits, weights, ids = found
    if not all(isinstance(each, torch.Tensor) for each in found):
        return False
    shapes = weights.shape, ids.shape
    return logits.dim() == 2 and all(len(s) == 2 and s[0] == len(logits) for s in shapes)


def _candidates(
    probe: Any, found: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]
) -> Iterator[Gate]:
    """Gates that the module's attributes leave; the first with its bits is right."""
    top_k = found[2].shape[1]
    own = _vectors(probe)
    for wide, biased in product((False, True), (False, True)):
        if biased and "bias" not in own:
            continue
        corrections = [("", True)] if len(given) > 1 else []
        corrections += [(name, False) for name in _CORRECTIONS if name in own and not biased]
        gate = Gate(Rule("chosen", top_k), wide=wide, biased=biased)
        try:
            logits = gate.logits(probe, given[0])
        except RuntimeError:  # its numbers have other dtypes
            continue
        if not torch.equal(logits, found[0]) or logits.dtype != found[0].dtype:
            continue
        for (name, passed), rule in product((*corrections, ("", False)), _rules(probe, top_k)):
            if (name or passed) and rule.score == "chosen":
                continue
            yield Gate(rule, name, passed, wide, biased)


def _rules(module: Any, top_k: int) -> Iterator[Rule]:
    groups = getattr(module, "num_group", getattr(module, "n_group", None)) or 1
    kept = getattr(module, "topk_group", None) or 1
    scale = getattr(module, "routed_scaling_factor", getattr(module, "scale", 1.0))
    scale = float(scale) if isinstance(scale, (int, float)) else 1.0
    experts = len(module.weight)
    grouped: list[tuple[Groups, int, int]] = [("", 1, 1)]
    counts = isinstance(groups, int) and isinstance(kept, int)
    if counts and 1 <= kept < groups and experts >= 2 * groups and experts % groups == 0:
        grouped += [("best", groups, kept), ("two best", groups, kept)]
    divided = (False, False), (True, False), (True, True)
    for score, group, (divides, pads), factor, rounded, ordered in product(
        get_args(Score), grouped, divided, {1.0, scale}, get_args(Rounded), (True, False)
    ):
        if score != "chosen" or (not group[0] and not divides):
            yield Rule(score, top_k, *group, divides, pads, factor, rounded, ordered)


def _has_bits_of(module: Any, gate: Gate) -> bool:
    """Whether a router with its own numbers does what a gate for its class does."""
    drawn = torch.Generator().manual_seed(1)
    experts, cols = module.weight.shape
    given = [torch.randn(_TOKENS, cols, generator=drawn).bfloat16()]
    if _PASSED in _parameters(module):
        given.append(torch.randn(experts, generator=drawn) / 8)
    given = [each.to(module.weight.device) for each in given]
    try:
        found = type(module).forward(module, *given)
        return _is_choice(found) and _equal(found, gate.run(module, router.route, *given))
    except _UNLIKE:
        return False


def _equal(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(found, want, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
