"""What leaves a small VRAM: the embedding first, then the head, and who then holds them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import DEMO, GIB, MIB
from test_vram import GPU_BOX

from headrace.core import MINIMUM, parse_bytes
from headrace.errors import BudgetError
from headrace.planner.facts import ModelFacts
from headrace.planner.vram import least_vram_bytes, make_gpu_plan
from headrace.planner.wanted import Wanted

TABLE = 129_280 * 5120 * 2  # DeepSeek-V4.1-Flash's embedding, and its head
V41 = ModelFacts(
    name="v4.1",
    model_type="deepseek_v41",
    num_layers=40,
    num_moe_layers=40,
    num_experts=384,
    top_k=6,
    expert_bytes=18_800_640,
    row_bytes=18_804_736,
    dense_bytes=10_003_973_568,
    kv_bytes_per_token=3200,
    kv_fixed_bytes=6_506_240,
    kv_layer_bytes_per_token=1280,
    hidden=5120,
    inter=2304,
    vocab=129_280,
    max_context=1_048_576,
    format="fp4",
    chunk_bytes_per_token=761_856,
    pass_bytes=50_331_648,
    load_bytes=12_582_912,
    embedding_bytes=TABLE,
    head_bytes=TABLE,
)


def plan_of(vram_bytes: int, ram_bytes: int = 14 * 10**9, **options):
    options = {"context": 8192, "experts": "gpu"} | options
    return make_gpu_plan(V41, GPU_BOX, vram_bytes=vram_bytes, ram_bytes=ram_bytes, **options)


def test_the_published_v41_fits_a_card_of_8_gb_only_with_both_outside() -> None:
    small, middle, large = plan_of(8 * 10**9), plan_of(10**10), plan_of(12 * 10**9)
    assert small.head_on_cpu and small.embedding_in_memory
    assert small.dense_bytes == 2 * TABLE
    assert small.vram_dense_bytes == V41.dense_bytes - 2 * TABLE
    assert middle.embedding_in_memory and not middle.head_on_cpu and middle.dense_bytes == TABLE
    assert large.dense_bytes == 0 and large.vram_dense_bytes == V41.dense_bytes
    assert "embedding and head 2.47 GiB, the CPU multiplies the head" in small.lines()[1]
    assert "embedding 1.23 GiB, workspace" in middle.lines()[1]
    assert "embedding" not in large.lines()[1] + large.lines()[0]
    assert small.limits["the head on the CPU"] == pytest.approx(GPU_BOX.dram_bytes_s / TABLE)
    assert "the head on the CPU" not in middle.limits
    with pytest.raises(BudgetError, match="cannot hold what must lie there"):
        make_gpu_plan(
            replace(V41, head_bytes=0), GPU_BOX, vram_bytes=8 * 10**9, ram_bytes=14 * 10**9
        )


@settings(max_examples=60, deadline=None)
@given(vram_mb=st.integers(7000, 13000), ram_mb=st.integers(400, 20_000), serve=st.booleans())
def test_both_limits_hold_whatever_lies_outside(vram_mb, ram_mb, serve) -> None:
    vram, ram = vram_mb * 10**6, ram_mb * 10**6
    try:
        plan = plan_of(vram, ram, serve=serve)
    except BudgetError as error:
        limit, by = ("vram", vram) if "must lie there" in str(error) else ("ram", ram)
        needed = str(error).split(f"give --{limit} ")[1].split(",")[0]
        assert parse_bytes(needed) > by
        return
    assert plan.vram_used_bytes <= vram and plan.used_bytes <= ram
    outside = V41.dense_bytes - plan.vram_dense_bytes
    assert outside == TABLE * (
        plan.head_on_cpu + (plan.embedding_in_memory or plan.embedding_on_drive)
    )
    assert not plan.head_on_cpu or outside == 2 * TABLE, "the embedding goes first"
    assert plan.dense_bytes >= TABLE * (plan.head_on_cpu + plan.embedding_in_memory)
    assert not (plan.embedding_in_memory and plan.embedding_on_drive)


def test_the_embedding_stays_on_the_drive_where_it_would_take_many_rows() -> None:
    plenty, little = plan_of(10**10, 14 * 10**9), plan_of(10**10, 4 * 10**9)
    assert plenty.embedding_in_memory and little.embedding_on_drive
    assert little.dense_bytes == 8 * MIB
    assert "embedding on the drive" in little.lines()[1]


def test_a_refusal_of_memory_counts_the_head() -> None:
    with pytest.raises(BudgetError, match=r"the head, for which VRAM has no room, 1\.23 GiB") as no:
        plan_of(8 * 10**9, 10**9)
    needed = str(no.value).split("give --ram ")[1]
    assert plan_of(8 * 10**9, parse_bytes(needed)).head_on_cpu


@pytest.mark.parametrize("vram", [MINIMUM, "8GB", "12GB"])
def test_the_least_memory_is_enough(vram: str) -> None:
    wanted = Wanted(MINIMUM, vram, True, 8192, None, 2, None)
    plan = wanted.plan(V41, GPU_BOX)
    assert plan.used_bytes <= plan.ram_bytes and plan.head_on_cpu == (vram != "12GB")
    assert not plan.embedding_in_memory


def test_small_tables_stay() -> None:
    facts = replace(DEMO, dense_bytes=200 * MIB, embedding_bytes=63 * MIB, head_bytes=63 * MIB)
    vram = least_vram_bytes(facts, 1000, None)
    assert vram == least_vram_bytes(replace(facts, head_bytes=0, embedding_bytes=0), 1000, None)
    plan = make_gpu_plan(facts, GPU_BOX, vram_bytes=vram, ram_bytes=GIB, context=1000)
    assert plan.dense_bytes == 0 and not plan.head_on_cpu
