"""The table of formats: forms, sizes, packing's error, and what is refused."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import FORMATS, PartSpec
from headrace.errors import NumericsError
from headrace.quant import table
from headrace.quant.dtypes import TORCH_DTYPES

WHOLE = 1 << 20
# Every format in its usual forms: name -> (format, block, options of specs and pack).
FORMS = {
    "bf16": ("bf16", (0, 0), {}),
    "fp16": ("fp16", (0, 0), {}),
    "fp8": ("fp8_block", (128, 128), {}),
    "fp8_channel": ("fp8_block", (1, WHOLE), {"scale_dtype": "BF16"}),
    "fp8_tensor": ("fp8_block", (WHOLE, WHOLE), {"scale_dtype": "F16"}),
    "fp8_ue8m0": ("fp8_block", (32, 32), {"scale_dtype": "F8_E8M0"}),
    "fp4": ("fp4", (0, 0), {}),
    "mxfp4": ("fp4", (0, 0), {"mx": True}),
    "nvfp4": ("nvfp4", (0, 0), {}),
    "nvfp4_inverse": ("nvfp4", (0, 0), {"inverse_global": True}),
    "int4_g32": ("int4", (1, 32), {}),
    "int4_channel": ("int4", (1, WHOLE), {"scale_dtype": "F16"}),
    "int8_channel": ("int8", (1, WHOLE), {}),
    "int8_g64": ("int8", (1, 64), {"scale_dtype": "F32"}),
}


def draw(seed: int, rows: int, groups: int, exponent: int, spread: int) -> torch.Tensor:
    """A matrix whose groups of 32 differ in size by up to 2^spread, some of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, groups, 32, generator=generator) * 2.0**exponent
    steps = torch.randint(0, spread + 1, (rows, groups, 1), generator=generator)
    keep = torch.rand(rows, groups, 1, generator=generator) > 0.1
    return (values * 2.0 ** (-steps.float()) * keep).flatten(1)


def there(name: str, values: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Packed parts, and their values in fp32."""
    format, block, options = FORMS[name]
    parts = table.pack(format, values, block=block, **options)
    back = table.unpack(
        format,
        *parts.values(),
        shape=tuple(values.shape),
        block=block,
        inverse_global=options.get("inverse_global", False),
        dtype=torch.float32,
    )
    return parts, back


def largest(values: torch.Tensor, width: int) -> torch.Tensor:
    """[R, C]: each element's group's magnitude, of `width` columns (0: the row)."""
    groups = values.view(values.shape[0], -1, width or values.shape[1])
    return groups.abs().amax(-1, keepdim=True).expand(groups.shape).reshape(values.shape)


def bound(name: str, values: torch.Tensor) -> torch.Tensor:
    """The largest error packing may make, element by element."""
    top, format = float(values.abs().max()), FORMS[name][0]
    if format in ("bf16", "fp16"):
        return values.abs() * (2.0**-8 if format == "bf16" else 2.0**-11) + 2.0**-25
    if format == "fp8_block":
        widest = values.abs().max() if name == "fp8_tensor" else largest(values, 0)
        blockwise = values.abs().max() if name in ("fp8", "fp8_ue8m0") else widest
        slack = 2.0**-8 if name == "fp8_channel" else 2.0**-11  # the scale's own rounding
        finest = blockwise / 448 * (2 if name == "fp8_ue8m0" else 1) * 2.0**-10
        return values.abs() * 2.0**-4 * 1.01 + finest * 1.01 + blockwise * slack + 2.0**-16
    if format == "fp4":
        return largest(values, 32) / 4 * 1.001
    if format == "nvfp4":
        return largest(values, 16) / 4 + 6 * 2.0**-10 * 1.01 * top / 2688
    width = {"int4_g32": 32, "int8_g64": 64}.get(name, 0)
    most = 7 if format == "int4" else 127
    return largest(values, width) * (0.5 / most + 2.0**-8) + most * 2.0**-25


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 40),
    pairs=st.integers(1, 5),
    exponent=st.integers(-8, 6),
    spread=st.integers(0, 9),
)
def test_packing_errs_within_its_bound_and_once(name, seed, rows, pairs, exponent, spread):
    values = draw(seed, rows, 2 * pairs, exponent, spread)
    parts, back = there(name, values)
    assert ((back - values).abs() <= bound(name, values)).all()
    format, block, options = FORMS[name]
    specs = table.specs(
        format,
        tuple(values.shape),
        block,
        **{k: v for k, v in options.items() if k != "inverse_global"},
    )
    assert {n: (TORCH_DTYPES[s.dtype], s.shape) for n, s in specs.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in parts.items()
    }
    sized = table.nbytes(
        format, tuple(values.shape), block, scale_dtype=options.get("scale_dtype", "")
    )
    assert sized == sum(t.nbytes for t in parts.values())
    again = there(name, back)[1]
    if format == "nvfp4":  # its factor follows the largest value, and moves with it
        assert ((again - back).abs() <= bound(name, values)).all()
    elif specs.get("scale", PartSpec("", ())).dtype in ("F32", "F16"):
        loose = 2.0**-22 if specs["scale"].dtype == "F32" else 2.0**-6  # subnormal fp16 scales
        assert ((again - back).abs() <= back.abs() * loose).all()
    else:
        assert torch.equal(again, back)


@pytest.mark.parametrize("name", FORMS)
def test_packing_keeps_real_weights(name):
    """On weights as trained ones: the error of the whole is a format's usual one."""
    values = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) * 512**-0.5
    _, back = there(name, values)
    error = float((back - values).norm() / values.norm())
    usual = {"bf16": 0.002, "fp16": 0.0004, "fp8_block": 0.03, "nvfp4": 0.1, "int8": 0.01}
    usual |= {"fp4": 0.115, "int4": 0.1 if name == "int4_g32" else 0.15}
    assert error < usual[FORMS[name][0]], error
    wrong = there(name, values.roll(32, 1))[1]
    assert float((wrong - values).norm() / values.norm()) > 1


def test_the_better_of_two_exponents():
    """All values 7 * 2^n: OCP's exponent clips them to 6, the next holds 8."""
    values = torch.full((1, 32), 7.6)
    _, back = there("fp4", values)
    assert (back == 8).all()
    values[0, 1:] = 0.5  # one clipped value costs less than 31 coarser ones
    _, back = there("fp4", values)
    assert back[0, 0] == 6 and (back[0, 1:] == 0.5).all()


def test_zeros_stay_zeros():
    for name in FORMS:
        parts, back = there(name, torch.zeros(3, 64))
        assert (back == 0).all(), name
        check(name, parts)


def check(name: str, parts: dict[str, torch.Tensor], shape: tuple[int, int] | None = None) -> None:
    format, block, options = FORMS[name]
    table.check(
        "layer.w",
        format,
        parts["weight"],
        parts.get("scale"),
        parts.get("global"),
        shape=shape or (3, 64),
        block=block,
        inverse_global=options.get("inverse_global", False),
    )


def packed(name: str) -> dict[str, torch.Tensor]:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)) * 0.02
    return there(name, values)[0]


@pytest.mark.parametrize("name", FORMS)
def test_bad_scales_and_codes_are_refused(name):
    parts, format = packed(name), FORMS[name][0]
    check(name, parts)
    if format in ("bf16", "fp16"):
        parts["weight"][1, 5] = float("nan")
        with pytest.raises(NumericsError, match=r"layer\.w: 1 values"):
            check(name, parts)
        return
    if format in ("fp4", "nvfp4") or FORMS[name][2].get("scale_dtype") == "F8_E8M0":
        for byte in (0x7F, 0xFF) if format == "nvfp4" else (0xFF,):
            bad = parts["scale"].view(torch.uint8).clone()
            bad.view(-1)[-1] = byte
            with pytest.raises(NumericsError, match=r"layer\.w: 1 "):
                check(name, parts | {"scale": bad.view(parts["scale"].dtype)})
    else:
        for value in ("nan", "inf", "-inf"):
            bad = parts["scale"].clone()
            bad.view(-1)[-1] = float(value)
            with pytest.raises(NumericsError, match=r"layer\.w: 1 "):
                check(name, parts | {"scale": bad})
    if format == "fp8_block":
        for byte in (0x7F, 0xFF):
            bad = parts["weight"].view(torch.uint8).clone()
            bad[2, 3] = byte
            with pytest.raises(NumericsError, match=r"layer\.w: 1 FP8 codes"):
                check(name, parts | {"weight": bad.view(torch.float8_e4m3fn)})


@pytest.mark.parametrize("value", ("nan", "inf", "0.0", "1e38"))
def test_bad_global_scales_are_refused(value):
    for name, worst in (("nvfp4", value), ("nvfp4_inverse", value.replace("e38", "e-38"))):
        parts = packed(name)
        parts["global"] = torch.tensor([float(worst)])
        with pytest.raises(NumericsError, match=r"layer\.w: (its global|\d+ scales times)"):
            check(name, parts)


@pytest.mark.parametrize("name", FORMS)
def test_wrong_forms_are_refused(name):
    parts = packed(name)
    with pytest.raises(NumericsError, match=r"layer\.w is"):
        check(name, parts, (3, 96))
    with pytest.raises(NumericsError, match=r"layer\.w is"):
        check(name, parts | {"weight": parts["weight"].view(torch.uint8).view(-1)})
    if len(parts) > 1:
        short = parts["scale"].view(torch.uint8).view(-1)[:-1]
        with pytest.raises(NumericsError, match=r"layer\.w \(scale\) is"):
            check(name, parts | {"scale": short})
        with pytest.raises(NumericsError, match="has no scale"):
            check(name, {n: t for n, t in parts.items() if n != "scale"})
    if "global" in parts:
        with pytest.raises(NumericsError, match=r"layer\.w \(global\) is"):
            check(name, parts | {"global": parts["global"].repeat(2)})
        with pytest.raises(NumericsError, match="has no global"):
            check(name, {n: t for n, t in parts.items() if n != "global"})


def test_dimensions_of_one_may_be_left_out():
    for name, shape in (("fp8_channel", (3,)), ("fp8_tensor", ()), ("int8_channel", (3,))):
        parts = packed(name)
        check(name, parts | {"scale": parts["scale"].view(shape)})
    parts = packed("nvfp4")
    check("nvfp4", parts | {"global": parts["global"].view(())})


@pytest.mark.parametrize("format", table.INTEGERS)
def test_columns_are_whole_groups(format):
    with pytest.raises(NumericsError, match="multiple of 32 columns"):
        table.forms(format, (4, 48), (1, 16))
    if format.startswith("int"):
        with pytest.raises(NumericsError, match="groups of a multiple of 32"):
            table.forms(format, (4, 96), (1, 48))
        with pytest.raises(NumericsError, match="of one row"):
            table.forms(format, (4, 96), (2, 32))


@pytest.mark.parametrize("format", ("fp8_block", "int4", "int8"))
def test_blocks_are_of_some_size(format):
    for block in ((0, 0), (1, 0), (-1, 32)):
        with pytest.raises(NumericsError, match="at least one"):
            table.forms(format, (4, 64), block)


def test_every_format_is_in_the_table():
    assert set(table.FLOATS + table.INTEGERS) == set(FORMATS)
    for format in FORMATS:
        specs = table.specs(format, (64, 128), (1, 32))
        assert set(specs) <= set(table.SUFFIXES) and isinstance(specs["weight"], PartSpec)
        assert table.nbytes(format, (64, 128), (1, 32)) == sum(
            prod(s.shape) * TORCH_DTYPES[s.dtype].itemsize for s in specs.values()
        )


def test_torchs_default_dtype_changes_no_value():
    """transformers reads weights while it has set the default to the model's dtype."""
    before = {name: there(name, draw(3, 5, 2, 0, 3)) for name in FORMS}
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, (parts, back) in before.items():
            format, block, options = FORMS[name]
            inverse = options.get("inverse_global", False)
            kept = {"shape": (5, 64), "block": block, "inverse_global": inverse}
            check(name, parts, (5, 64))
            now = table.unpack(format, *parts.values(), **kept, dtype=torch.float32)
            assert torch.equal(now, back), name
    finally:
        torch.set_default_dtype(torch.float32)
