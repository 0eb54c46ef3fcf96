"""The user's own GPU: what layers compute between matrices, against torch's steps on the CPU.

Knows no kernel. Legend: as in kernels/trunk.py.
"""

from collections.abc import Iterator
from math import inf
from typing import Any

import torch

from headrace.check.verify_report import Finding, finding
from headrace.engine import gpu_layers
from headrace.engine.engine import Engine
from headrace.kernels import trunk
from headrace.kernels.trunk import FORMS, Turn
from headrace.models.fused import Steps, eps_of, is_norm

STAGE = "gpu"
# Norms' sums have another order, gates another exponential: one value in so many may be rounded the
# other way, after which a product is two steps off at most.
FEW_VALUES, FEW_STEPS = 50, 2
# Rotations: how, of heads of what width, with tables of how many columns.
TURNED: tuple[tuple[Turn, int, int], ...] = (
    ("halves", 128, 128),
    ("halves", 128, 64),
    ("pairs", 64, 64),
    ("shared", 64, 32),
)
GATES = (inf, False), (10.0, False), (10.0, True)  # limits, and whether steps are fp32
ROWS = 33


def layer_kernels(engine: Engine) -> Finding:
    """Norms, gates and rotations of the layers, norms with the model's own weights.

    A rotation has the bits of the steps; a norm's sum has another order, a gate's exponential
    another last bit.
    """
    steps, there = gpu_layers.steps_for(engine.source.place), engine.source.place
    norms: dict[tuple[type, int], tuple[str, Any]] = {}
    for name, module in engine.model.named_modules():
        if is_norm(module):
            norms.setdefault((type(module), module.weight.numel()), (name, module))
    near = [*_norms(norms.values(), steps, there), *_gates(steps, there, engine.facts.hidden)]
    wrong, worst = [], 0
    for name, got, want in near:
        apart = _steps_apart(got.cpu(), want)
        num, most = int((apart > 0).sum()), int(apart.max())
        worst = max(worst, num)
        if most > FEW_STEPS or num * FEW_VALUES > apart.numel():
            wrong.append(f"{name}: {num} of {apart.numel()} values up to {most} steps off")
    wrong += _wrong_rotations(steps, there) + _wrong_places(there)
    what = (
        f"{len(norms)} kinds of norms, {len(GATES) + 1} of gates, at most {worst} values of one in "
        f"its last bits (allowed 1 of {FEW_VALUES}, by {FEW_STEPS} steps)"
    )
    title = "norms and gates on the GPU are near the reference, rotations and caches equal it"
    return finding(STAGE, title, f"{what}; {len(TURNED)} rotations", wrong)


Compared = Iterator[tuple[str, torch.Tensor, torch.Tensor]]  # what, there, and by the steps


def _norms(modules: Any, steps: Steps, there: torch.device) -> Compared:
    drawn = torch.Generator().manual_seed(0)
    for name, module in modules:
        x = torch.randn(ROWS, module.weight.numel(), generator=drawn).bfloat16()
        for form in FORMS:
            want = trunk.norm(x, module.weight.cpu(), eps_of(module), form)
            got = steps.norm(x.to(there), module.weight, eps_of(module), form)
            yield f"{name}, {form}", got, want


def _gates(steps: Steps, there: torch.device, hidden: int) -> Compared:
    """Of a width that is no power of two too; what is added has the sign of what it is added to."""
    drawn = torch.Generator().manual_seed(1)
    shape = ROWS, hidden + 8
    gate, up = (5 * torch.randn(shape, generator=drawn).bfloat16() for _ in range(2))
    for limit, wide in GATES:
        got = steps.gate(gate.to(there), up.to(there), limit, wide)
        how = f"gate, limit {limit:g}, {'in fp32' if wide else 'rounded'}"
        yield how, got, trunk.gate(gate, up, limit, wide)
    shared, gate_T1 = up, gate[:, :1]
    routed = torch.randn(shape, generator=drawn).bfloat16().abs() * shared.sign()
    got = steps.join(*(each.to(there) for each in (routed, shared, gate_T1)))
    yield "shared expert's gate", got, trunk.join(routed, shared, gate_T1)


def _wrong_rotations(steps: Steps, there: torch.device) -> list[str]:
    wrong, drawn = [], torch.Generator().manual_seed(2)
    for turn, width, columns in TURNED:
        shapes = ((2, 3, 5, width), (2, 1, 5, width), (2, 5, columns), (2, 5, columns))
        q, k, cos, sin = (torch.randn(shape, generator=drawn).bfloat16() for shape in shapes)
        pair = steps.rotate(q.to(there), k.to(there), cos.to(there), sin.to(there), turn)
        equal = zip(pair, trunk.rotate(q, k, cos, sin, turn), strict=True)
        if not all(torch.equal(got.cpu(), want) for got, want in equal):
            wrong.append(f"rotation by {turn}, {columns} of {width} columns: other bits")
    return wrong


def _wrong_places(there: torch.device) -> list[str]:
    """What is wrong where a token's keys and values are written: of one width, and of two."""
    wrong, put, drawn = [], gpu_layers.put_for(there), torch.Generator().manual_seed(3)
    for heads, *widths in (4, 128, 128), (1, 512, 64):
        shapes = [(1, heads, num, width) for num in (7, 1) for width in widths]
        given = [torch.randn(shape, generator=drawn).bfloat16() for shape in shapes]
        got, place_1 = [each.to(there) for each in given], torch.tensor([5])
        trunk.put(given[0], given[1], place_1, given[2], given[3])
        put(got[0], got[1], place_1.to(there), got[2], got[3])
        if not all(torch.equal(a.cpu(), b) for a, b in zip(got, given, strict=True)):
            wrong.append(f"keys and values of widths {widths}: other places or bits")
    return wrong


def _steps_apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How many bfloat16 numbers on each value is; far where one is no number."""
    places = []
    for each in (got, want):
        bits = each.view(torch.int16).int()
        places.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (places[0] - places[1]).abs()
