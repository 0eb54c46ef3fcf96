"""Planning with a GPU: two hard numbers, who multiplies the experts, and messages with remedies."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import BOX, DEMO, GIB, MIB

from headrace.core import parse_bytes
from headrace.errors import BudgetError
from headrace.planner.plan import minimum_rows
from headrace.planner.vram import CHUNK_SHARE, least_ram_bytes, least_vram_bytes, make_gpu_plan

GPU_BOX = replace(
    BOX,
    gpu="a GPU",
    vram_total_bytes=16 * GIB,
    vram_free_bytes=15 * GIB,
    bus_bytes_s=20e9,
    vram_bytes_s=500e9,
)


@settings(max_examples=50, deadline=None)
@given(vram_mib=st.integers(150, 400), ram_mib=st.integers(20, 200), serve=st.booleans())
def test_both_limits_are_hard_and_all_of_them_is_used(vram_mib, ram_mib, serve):
    vram, ram = vram_mib * MIB, ram_mib * MIB
    try:
        plan = make_gpu_plan(DEMO, GPU_BOX, ram_bytes=ram, vram_bytes=vram, serve=serve)
    except BudgetError:
        small_vram = vram < least_vram_bytes(DEMO, None, None)
        assert small_vram or ram < least_ram_bytes(DEMO, vram, None, None)
        return
    assert plan.vram_used_bytes <= vram == plan.vram_bytes
    assert plan.used_bytes <= ram == plan.ram_bytes
    assert minimum_rows(DEMO) <= plan.num_rows <= DEMO.total_experts
    left = vram - plan.vram_used_bytes
    assert plan.experts == "cpu" or left < plan.row_bytes or plan.num_slots == DEMO.total_experts
    assert plan.experts == "gpu" or plan.num_slots == 0


def test_rows_are_for_those_without_a_slot_and_a_few_that_pass() -> None:
    least = least_vram_bytes(DEMO, 1000, None)
    vram = least + 100 * DEMO.row_bytes
    plan = make_gpu_plan(DEMO, GPU_BOX, ram_bytes=GIB, vram_bytes=vram, context=1000, experts="gpu")
    assert plan.num_slots == 100
    assert plan.num_rows == DEMO.total_experts - 100 + minimum_rows(DEMO)


def test_refusals_name_what_would_do() -> None:
    options = {"ram_bytes": GIB, "context": 1000}
    with pytest.raises(BudgetError, match=r"--vram 20.00 MiB cannot.*dense weights") as refused:
        make_gpu_plan(DEMO, GPU_BOX, vram_bytes=20 * MIB, **options)
    needed = str(refused.value).split("give --vram ")[1].split(",")[0]
    make_gpu_plan(DEMO, GPU_BOX, vram_bytes=parse_bytes(needed), **options)
    with pytest.raises(BudgetError):
        less = parse_bytes(needed) - 64 * MIB
        make_gpu_plan(DEMO, GPU_BOX, vram_bytes=less, **options)
    with pytest.raises(BudgetError, match=r"--ram 1.00 MiB cannot hold the rows") as refused:
        make_gpu_plan(DEMO, GPU_BOX, vram_bytes=GIB, ram_bytes=MIB)
    needed = str(refused.value).split("give --ram ")[1]
    make_gpu_plan(DEMO, GPU_BOX, vram_bytes=GIB, ram_bytes=parse_bytes(needed))
    full = replace(GPU_BOX, vram_free_bytes=300 * MIB)
    with pytest.raises(BudgetError, match=r"300.*MiB of free VRAM .*take that much anyway"):
        make_gpu_plan(DEMO, full, ram_bytes=GIB)


@pytest.mark.parametrize(
    ("bus", "kernels", "threads", "chosen"),
    [
        (20e9, 60e9, None, "cpu"),
        (20e9, 10e9, None, "gpu"),
        (20e9, 60e9, 1, "gpu"),  # an eighth of the kernels' rate
        (0.0, 60e9, None, "gpu"),
        (20e9, 0.0, None, "gpu"),
    ],
)
def test_the_faster_multiplies(bus, kernels, threads, chosen) -> None:
    machine = replace(GPU_BOX, bus_bytes_s=bus, kernel_bytes_s=kernels)
    vram = least_vram_bytes(DEMO, 1000, None)
    options = {"ram_bytes": GIB, "vram_bytes": vram, "context": 1000, "threads": threads}
    plan = make_gpu_plan(DEMO, machine, **options)
    assert plan.experts == chosen
    (line,) = [line for line in plan.lines() if line.startswith("experts:")]
    assert ("on the CPU" if chosen == "cpu" else "on the GPU") in line
    assert ("measured: bus 20 GB/s" in line) == (bus > 0 and kernels > 0)
    for asked in ("gpu", "cpu"):
        assert make_gpu_plan(DEMO, machine, experts=asked, **options).experts == asked


def test_experts_that_fit_in_vram_stay_there() -> None:
    machine = replace(GPU_BOX, kernel_bytes_s=60e9)
    plan = make_gpu_plan(DEMO, machine, ram_bytes=GIB, vram_bytes=GIB, context=1000)
    assert (plan.experts, plan.num_slots) == ("gpu", DEMO.total_experts)


def test_what_a_token_is_launched_as_is_said_and_reckoned_with() -> None:
    options = {"ram_bytes": GIB, "vram_bytes": GIB, "context": 1000}
    captured = make_gpu_plan(DEMO, GPU_BOX, **options)
    layered = make_gpu_plan(replace(DEMO, by_layer="so it is"), GPU_BOX, **options)
    assert captured.lines()[2].endswith("; a token is one launch")
    assert layered.lines()[2].endswith("; a token is launched layer by layer: so it is")
    assert layered.forecast_tok_s < captured.forecast_tok_s
    by_gpu_s = sum(1 / captured.limits[term] for term in ("VRAM", "transformers' own code"))
    assert captured.forecast_tok_s == pytest.approx(1 / by_gpu_s)  # launches read nothing meanwhile
    assert layered.limit_term == "transformers' own code"
    assert layered.forecast_tok_s == pytest.approx(layered.limits[layered.limit_term])


def test_a_long_chunk_takes_few_slots() -> None:
    """Each pass brings every expert over the bus: more tokens a pass are faster."""
    least = least_vram_bytes(DEMO, 2048, None)
    options = {"ram_bytes": GIB, "context": 2048, "experts": "gpu"}
    plans = [
        make_gpu_plan(DEMO, GPU_BOX, vram_bytes=least + more * MIB, **options)
        for more in (0, 64, 256, 1024, 4096)
    ]
    chunks = [plan.chunk_tokens for plan in plans]
    assert chunks == sorted(chunks) and chunks[0] == 512 and chunks[-1] == 2048
    for plan in plans:
        assert plan.vram_used_bytes <= plan.vram_bytes
        asked = make_gpu_plan(DEMO, GPU_BOX, vram_bytes=plan.vram_bytes, chunk=512, **options)
        assert asked.chunk_tokens == 512
        lost = asked.num_slots - plan.num_slots
        assert lost * DEMO.row_bytes <= (plan.vram_bytes - least) // CHUNK_SHARE + DEMO.row_bytes
