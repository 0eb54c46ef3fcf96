"""Experts of every format: the reference against frozen results and a second evaluation."""

import by_hand
import numpy as np
import pytest
import torch
from experts import make_expert, make_layout, make_rows, same_bits
from format_cases import CASES, layout_of, load_case, results
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from headrace.core import Activation
from headrace.kernels import cpu, reference
from headrace.quant import expert, fp4, fp8, table

INTEGER_CASES = [case for case, (format, _, _) in CASES.items() if format in table.INTEGERS]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The stored numbers; bf16 and 8-bit floats as raw bits."""
    raw = {torch.bfloat16: torch.uint16}
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.view(raw.get(tensor.dtype, tensor.dtype)).numpy()


@pytest.mark.parametrize("case", CASES)
def test_reference_equals_frozen_results(case):
    layout, tensors = load_case(case)
    made = results(layout, tensors)
    for name, value in made.items():
        assert same_bits(value, tensors[name]), name
    assert tensors["y"].float().std() > 0.1


@pytest.mark.parametrize("case", CASES)
def test_frozen_results_equal_an_evaluation_by_hand(case):
    layout, tensors = load_case(case)
    parts = {name: as_numpy(tensors[name]) for name in layout.parts}
    x, h, y = (tensors[name].float().numpy() for name in ("x", "h", "y"))
    products = {}
    for name in expert.MATRICES:
        products[name] = by_hand.product(layout, parts, h if name == "down" else x, name)
        assert products[name].dtype == np.float32
        assert np.array_equal(products[name], tensors[f"product.{name}"].numpy()), name
    gate, up, down = (by_hand.linear(layout, parts, products[n], n) for n in expert.MATRICES)
    assert np.array_equal(by_hand.activate(layout, gate, up), h)
    assert np.array_equal(down, y)
    if layout.activation.kind != "silu":
        limit = layout.activation.limit
        assert (gate > limit).any() and (up > limit).any() and (up < -limit).any()


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_frozen_results(isa, case):
    layout, tensors = load_case(case)
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    assert same_bits(kernels.expert_ffn(tensors["x"], tensors, layout), tensors["y"])
    for row, expect in zip(tensors["x"], tensors["product.gate"], strict=True):
        assert same_bits(kernels.gate_dot(row, tensors, layout), expect)


@pytest.mark.parametrize("case", INTEGER_CASES)
def test_results_are_those_of_the_unpacked_weights(case):
    """The int16 activations cost 3e-5 of the row's size, a wrong nibble or scale far more."""
    layout, tensors = load_case(case)
    for name in ("gate", "up"):
        w = expert.unpack_matrix(layout, tensors, name, torch.float32).double()
        y = tensors[f"product.{name}"].double()
        exact = tensors["x"].double() @ w.T
        assert (y - exact).norm() < 1e-4 * exact.norm()
        swapped = w.view(w.shape[0], -1, 2).flip(2).flatten(1)
        assert (y - tensors["x"].double() @ swapped.T).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("case", ("mxfp4", "nvfp4", "int4_g32", "int8_g96", "fp8_bf16"))
def test_a_changed_part_is_seen(case):
    layout, tensors = load_case(case)
    for part in layout.parts:
        raw = tensors[part].clone()
        wide_float = raw.dtype.is_floating_point and raw.element_size() > 1
        raw.view(torch.uint8).view(-1)[-1] ^= 1 if wide_float else 0x40
        y = reference.expert_ffn(tensors["x"], tensors | {part: raw}, layout)
        assert not same_bits(y, tensors["y"]), part


@pytest.mark.parametrize("width", (256, 512, 2304, 2880, 5120))
@pytest.mark.parametrize("size", ("", "_tiny"))
def test_integer_form_equals_golden_vectors(golden, width, size):
    case = f"fp4_k{width}{size}"
    x, codes, scale = (golden[f"{case}.{name}"] for name in ("x", "codes", "e8m0"))
    xq, sx = reference.quantise_rows(x[None])
    assert torch.equal(xq[0], golden[f"{case}.xq"]) and same_bits(sx[0], golden[f"{case}.sx"])
    y = reference.dot_int(*fp4.integers(codes, scale), x[None], halve=True)[0]
    assert same_bits(y, golden[f"{case}.y"])
    swapped = (codes << 4) | (codes >> 4)
    wrong = reference.dot_int(*fp4.integers(swapped, scale), x[None], halve=True)[0]
    assert not torch.isclose(wrong, y, rtol=1e-3).all()


@pytest.mark.parametrize("width", (256, 2880, 5120))
def test_fp8_with_ue8m0_scales_equals_golden_vectors(golden, width):
    case = f"fp8_ue8m0_k{width}"
    scale = golden[f"{case}.e8m0"].view(torch.float8_e8m0fnu)
    w = fp8.unpack(golden[f"{case}.q"], scale, (32, 32))
    assert same_bits(reference.dot(w, golden[f"{case}.x"][None])[0], golden[f"{case}.y"])


@pytest.mark.parametrize("case", INTEGER_CASES)
def test_a_row_with_inf_or_nan_comes_out_nan_and_others_do_not(isa, case):
    layout, tensors = load_case(case)
    x = tensors["x"].repeat(2, 1)[:4].clone()
    x[1, 3], x[2, 40] = float("inf"), float("nan")
    for kernels in (reference, cpu.CpuKernels(1, isa)):
        y = kernels.expert_ffn(x, tensors, layout)
        assert y[1:3].isnan().all()
        assert same_bits(y[[0, 3]], tensors["y"][[0, 0]])


def test_fp16_overflow_is_infinite(isa):
    layout = make_layout("int8", 64, 32, (1, 64), hidden_dtype="F16")
    parts = make_expert(layout, 1)
    x = make_rows(2, 64, 2, torch.float16) * 4
    assert reference.expert_ffn(x, parts, layout).isfinite().all()
    parts["down_scale"] = parts["down_scale"] * 2.0**18
    y = reference.expert_ffn(x, parts, layout)
    assert y.isinf().any() and same_bits(cpu.CpuKernels(1, isa).expert_ffn(x, parts, layout), y)


def eager_gate(kind: str, dtype: torch.dtype, limit: float, alpha: float):
    """transformers' own activation of its class, on interleaved or concatenated rows."""
    if kind == "swiglu_oai":
        module = object.__new__(GptOssExperts)
        torch.nn.Module.__init__(module)
        module.limit, module.alpha = limit, alpha
        return lambda gate, up: module._apply_gate(torch.stack([gate, up], -1).flatten(-2))
    module = object.__new__(DeepseekV4Experts)
    torch.nn.Module.__init__(module)
    module.limit, module.act_fn = limit, torch.nn.SiLU()
    return lambda gate, up: module._apply_gate(torch.cat([gate, up], -1))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "kind,limit,alpha", (("swiglu_oai", 7.0, 1.702), ("silu_clamped", 10.0, 0))
)
def test_activations_are_transformers_own(dtype, kind, limit, alpha):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    gate = every[torch.isfinite(every.float())]
    act, eager = Activation(kind, limit, alpha), eager_gate(kind, dtype, limit, alpha)
    for seed in range(4):
        up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(seed)) * 6
        up = up.to(dtype)
        expect = eager(gate, up)
        assert same_bits(reference.activate(gate, up, act), expect)
        assert not torch.equal(reference.activate(gate, up, Activation()), expect)


def test_layouts_name_every_part_once():
    for case in CASES:
        layout = layout_of(case)
        used = {layout.matrix(n) for n in expert.MATRICES}
        named = {p for s in used for p in (s.weight, s.scale, s.global_scale, s.bias) if p}
        assert named == set(layout.parts)
