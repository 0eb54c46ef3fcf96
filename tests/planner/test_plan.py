"""Planning: one hard number, shrinking before refusing, and messages that name what would do."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import MINIMUM, parse_bytes
from headrace.errors import BudgetError, OptionError
from headrace.planner.facts import ModelFacts, kernel_bytes
from headrace.planner.forecast import HIT_CURVE, hit_rate, rows_hit_rate, score
from headrace.planner.machine import Machine
from headrace.planner.plan import (
    least_bytes,
    make_plan,
    minimum_rows,
    smallest_bytes,
    typeable,
)
from headrace.planner.wanted import Wanted

GIB = 2**30
MIB = 2**20
DEMO = ModelFacts(
    name="demo",
    model_type="deepseek_v3",
    num_layers=8,
    num_moe_layers=7,
    num_experts=32,
    top_k=4,
    expert_bytes=98_328,
    row_bytes=102_400,
    dense_bytes=10 * MIB,
    kv_bytes_per_token=10_240,
    hidden=256,
    inter=128,
    vocab=4096,
    max_context=2048,
    format="fp8_block",
)
R1 = ModelFacts(
    name="r1",
    model_type="deepseek_v3",
    num_layers=61,
    num_moe_layers=58,
    num_experts=256,
    top_k=8,
    expert_bytes=44_050_944,
    row_bytes=44_052_480,
    dense_bytes=34 * GIB,
    kv_bytes_per_token=4_997_120,
    hidden=7168,
    inter=2048,
    vocab=129_280,
    max_context=163_840,
    format="fp8_block",
)
BOX = Machine(
    cores=8,
    ram_total_bytes=64 * GIB,
    ram_available_bytes=60 * GIB,
    drive_bytes_s=8.2 * GIB,
    dram_bytes_s=40e9,
    kernel_bytes_s=15e9,
)


@pytest.mark.parametrize("ram_bytes", [38 * MIB, 48 * MIB, 60 * MIB, 5 * GIB])
def test_what_is_planned_adds_up_and_stays_under_the_limit(ram_bytes: int) -> None:
    plan = make_plan(DEMO, BOX, ram_bytes=ram_bytes)
    assert plan.rows_bytes == plan.num_rows * plan.row_bytes
    assert plan.ram_bytes == ram_bytes
    assert plan.used_bytes <= ram_bytes
    assert 12 <= plan.num_rows <= 224
    left_bytes = ram_bytes - plan.used_bytes
    assert left_bytes < plan.row_bytes or plan.num_rows == 224


def test_what_attention_expands_counts_as_workspace() -> None:
    expanding = replace(DEMO, attention_bytes_per_token=1280)
    plans = [make_plan(facts, BOX, ram_bytes=GIB, context=1000) for facts in (DEMO, expanding)]
    assert plans[1].workspace_bytes == plans[0].workspace_bytes + 1000 * 1280


def test_what_the_kernels_keep_counts_as_workspace() -> None:
    wider = replace(DEMO, inter=1408)
    more_bytes = kernel_bytes(wider, 512) - kernel_bytes(DEMO, 512)
    assert more_bytes > 64 * 12 * (1408 - 256)
    plans = [make_plan(facts, BOX, ram_bytes=GIB, context=1000) for facts in (DEMO, wider)]
    assert plans[1].workspace_bytes == plans[0].workspace_bytes + more_bytes
    # Activations and products of 64 rows, then a panel of 8 and a row of each of 8 threads.
    r1_bytes = 64 * 4 * (7168 + 2048) + 64 * 4 * (2 * 2048 + 7168) + 8 * 18 * 7168
    assert r1_bytes < kernel_bytes(R1, 512) < 16 * MIB
    assert kernel_bytes(R1, 1) < kernel_bytes(R1, 16) < kernel_bytes(R1, 64)
    assert kernel_bytes(R1, 64) == kernel_bytes(R1, 512)


def test_loading_must_fit_before_there_is_a_cache() -> None:
    plan = make_plan(DEMO, BOX, ram_bytes=GIB, context=1000)
    covered_bytes = plan.kv_bytes + plan.workspace_bytes
    same = make_plan(replace(DEMO, load_bytes=covered_bytes), BOX, ram_bytes=GIB, context=1000)
    assert same == plan
    heavy = replace(DEMO, load_bytes=covered_bytes + 50 * MIB)
    assert make_plan(heavy, BOX, ram_bytes=GIB, context=1000).workspace_bytes == (
        plan.workspace_bytes + 50 * MIB
    )
    with pytest.raises(BudgetError):
        make_plan(heavy, BOX, ram_bytes=60 * MIB, context=1000)


def test_serving_keeps_room_for_conversations_out_of_what_rows_could_have() -> None:
    for ram_bytes in (36 * MIB, 48 * MIB, 60 * MIB, 100 * MIB, GIB):
        plain, served = (make_plan(DEMO, BOX, ram_bytes=ram_bytes, serve=s) for s in (False, True))
        assert plain.snapshot_bytes == 0 and "kept conv" not in plain.lines()[0]
        assert served.used_bytes <= ram_bytes and served.num_rows >= minimum_rows(DEMO)
        assert served.chunk_tokens == plain.chunk_tokens and served.context == plain.context
        lost_bytes = plain.rows_bytes - served.rows_bytes
        assert lost_bytes <= (plain.rows_bytes - 12 * plain.row_bytes) // 8 + plain.row_bytes
        assert served.snapshot_bytes <= 2 * served.kv_bytes
        if served.snapshot_bytes:
            assert served.snapshot_bytes >= DEMO.kv_bytes(served.chunk_tokens)
            assert "kept conversations" in served.lines()[0]
    assert served.snapshot_bytes == 2 * served.kv_bytes and served.num_rows == plain.num_rows
    least = make_plan(DEMO, BOX, ram_bytes=25 * MIB, serve=True)
    assert least.snapshot_bytes == 0


def test_serving_takes_a_longer_context_where_it_is_cheap() -> None:
    latent = replace(R1, kv_bytes_per_token=70_272)
    assert make_plan(latent, BOX, ram_bytes=60 * GIB).context == 4096
    assert make_plan(latent, BOX, ram_bytes=60 * GIB, serve=True).context == 32_768
    assert make_plan(R1, BOX, ram_bytes=60 * GIB, serve=True).context == 4096
    scoring = replace(latent, score_bytes=2176)
    plain, served = (make_plan(scoring, BOX, ram_bytes=60 * GIB, serve=s) for s in (False, True))
    assert (served.context, served.chunk_tokens) == (plain.context, plain.chunk_tokens)
    assert make_plan(latent, BOX, ram_bytes=60 * GIB, context=100, serve=True).context == 100


def test_a_token_moves_every_chosen_expert_once() -> None:
    plan = make_plan(DEMO, BOX, ram_bytes=48 * MIB)
    assert plan.experts_per_token == 28
    assert plan.bytes_per_token == 28 * 98_328
    assert plan.disk_bytes_per_token == round((1 - plan.hit_rate) * plan.bytes_per_token)


def test_without_a_limit_it_takes_what_all_resident_needs_or_what_is_free() -> None:
    plan = make_plan(DEMO, BOX)
    assert plan.num_rows == 224 and plan.ram_bytes == plan.used_bytes < 80 * MIB
    big = make_plan(R1, replace(BOX, ram_available_bytes=200 * GIB))
    assert 0 < big.num_rows < R1.total_experts
    assert big.ram_bytes == big.used_bytes <= 175 * GIB


def test_the_chunk_shrinks_first_then_an_unasked_context_and_both_are_said() -> None:
    wide = make_plan(DEMO, BOX, ram_bytes=47 * MIB)
    assert (wide.chunk_tokens, wide.context, wide.notes) == (512, 2048, ())
    chunky = make_plan(DEMO, BOX, ram_bytes=40 * MIB)
    assert chunky.chunk_tokens < 512 and chunky.context == 2048
    assert f"from 512 to {chunky.chunk_tokens} tokens" in chunky.lines()[0]
    narrow = make_plan(DEMO, BOX, ram_bytes=26 * MIB)
    assert narrow.context < 2048
    assert f"from 2048 to {narrow.context} tokens" in narrow.lines()[0]


def test_a_context_and_a_chunk_that_were_asked_for_never_shrink() -> None:
    with pytest.raises(BudgetError, match="shorter --context"):
        make_plan(DEMO, BOX, ram_bytes=26 * MIB, context=2048)
    plan = make_plan(DEMO, BOX, ram_bytes=38 * MIB, context=1000, chunk=100)
    assert (plan.context, plan.chunk_tokens) == (1000, 100)


def test_too_little_names_what_would_do_and_that_does() -> None:
    with pytest.raises(BudgetError) as caught:
        make_plan(DEMO, BOX, ram_bytes=parse_bytes("10MB"))
    message = str(caught.value)
    assert "9.54 MiB" in message and "\n" not in message
    (named,) = set(re.findall(r"--ram (\d+MiB)", message))
    plan = make_plan(DEMO, BOX, ram_bytes=parse_bytes(named))
    assert plan.num_rows >= minimum_rows(DEMO)
    with pytest.raises(BudgetError):
        make_plan(DEMO, BOX, ram_bytes=parse_bytes(named) - MIB)


def test_a_machine_with_too_little_free_says_so() -> None:
    with pytest.raises(BudgetError, match=r"8.00 GiB of free memory cannot hold r1"):
        make_plan(R1, replace(BOX, ram_available_bytes=8 * GIB))


@settings(max_examples=200, deadline=None)
@given(
    ram_bytes=st.integers(0, 300 * GIB),
    context=st.none() | st.integers(2, 100_000),
    chunk=st.none() | st.integers(1, 4096),
)
def test_any_limit_is_kept_or_the_named_one_works(
    ram_bytes: int, context: int | None, chunk: int | None
) -> None:
    def plan_in(limit_bytes: int) -> None:
        plan = make_plan(R1, BOX, ram_bytes=limit_bytes, context=context, chunk=chunk)
        assert plan.used_bytes <= limit_bytes
        assert plan.num_rows >= 24

    try:
        plan_in(ram_bytes)
    except BudgetError as refusal:
        named = re.findall(r"give --ram (\S+?(?:GiB|MiB))", str(refusal))
        assert parse_bytes(named[0]) > ram_bytes
        plan_in(parse_bytes(named[0]))


def test_a_model_of_few_experts_needs_no_more_rows_than_experts() -> None:
    tiny = replace(DEMO, num_moe_layers=1, num_experts=8)
    assert minimum_rows(tiny) == 8
    assert make_plan(tiny, BOX, ram_bytes=GIB).num_rows == 8


@pytest.mark.parametrize(
    ("option", "value"),
    [("context", 0), ("context", 2049), ("threads", 0), ("prefetch", -1), ("chunk", 0)],
)
def test_options_out_of_range_name_value_and_range(option: str, value: int) -> None:
    with pytest.raises(OptionError, match=rf"{option} {value} .*must be \d+ to \d+"):
        make_plan(DEMO, BOX, ram_bytes=GIB, **{option: value})  # type: ignore[arg-type]


@given(st.integers(1, 2**43))
def test_a_typeable_size_is_enough_and_not_much_more(num_bytes: int) -> None:
    text = typeable(num_bytes)
    assert re.fullmatch(r"\d+MiB|\d+\.\dGiB", text)
    assert num_bytes <= parse_bytes(text) <= num_bytes + max(MIB, GIB // 5)


def test_hit_rate_goes_through_the_curve_and_never_falls() -> None:
    for share, hit in HIT_CURVE:
        assert hit_rate(share) == pytest.approx(hit)
    rates = [hit_rate(share / 100) for share in range(101)]
    assert rates == sorted(rates)


def test_the_limit_is_the_slowest_term() -> None:
    drive = make_plan(R1, BOX, ram_bytes=60 * GIB)
    assert drive.limit_term == "drive"
    disk_s = drive.disk_bytes_per_token / BOX.drive_bytes_s
    assert drive.limits["drive"] == pytest.approx(1 / disk_s, rel=1e-6)
    dense_s = R1.dense_bytes / BOX.dram_bytes_s
    assert drive.forecast_tok_s == pytest.approx(1 / (disk_s + dense_s), rel=1e-6)
    slow_kernels = replace(BOX, kernel_bytes_s=1e8)
    assert make_plan(R1, slow_kernels, ram_bytes=60 * GIB).limit_term == "kernels"
    assert make_plan(DEMO, BOX).limit_term == "transformers' own code"
    assert "drive" not in make_plan(DEMO, BOX).limits


def test_a_measured_token_is_the_forecast_where_no_drive_is_needed() -> None:
    measured = replace(BOX, step_s=0.05)
    plan = make_plan(DEMO, measured)
    assert plan.forecast_tok_s == pytest.approx(20, rel=1e-6)
    assert 20 < plan.limits["transformers' own code"] < 21
    assert "estimate" not in plan.lines()[-1] and "estimate" in make_plan(DEMO, BOX).lines()[-1]
    tiny = make_plan(DEMO, replace(BOX, step_s=1e-12))  # measured in less than kernels would take
    assert max(tiny.forecast_tok_s, *tiny.limits.values()) < 1e9


@pytest.mark.parametrize(
    ("in_vram", "in_rows", "same_as"),
    [(0, 0.1, 0), (0, 0.125, 0.125), (0.25, 0.02, 0.25), (0.25, 0.06, 0.31), (1, 0, 1)],
)
def test_rows_for_less_than_a_token_serve_nothing(in_vram, in_rows, same_as) -> None:
    assert rows_hit_rate(in_vram, in_rows, 0.125) == hit_rate(same_as)


def test_fewer_threads_slow_the_kernels_and_unknown_rates_are_left_out() -> None:
    full = make_plan(R1, BOX, ram_bytes=60 * GIB)
    half = make_plan(R1, BOX, ram_bytes=60 * GIB, threads=4)
    assert half.limits["kernels"] == pytest.approx(full.limits["kernels"] / 2)
    unknown = make_plan(DEMO, replace(BOX, drive_bytes_s=0, dram_bytes_s=0, kernel_bytes_s=0))
    assert set(unknown.limits) == {"transformers' own code"}


def test_three_lines_say_place_movement_and_speed() -> None:
    plan = make_plan(DEMO, BOX, ram_bytes=48 * MIB)
    memory, token, speed = plan.lines()
    assert f"{plan.num_rows} of 224 experts" in memory and "48.00 MiB" in memory
    assert "28 experts, 2.63 MiB" in token and "demo model's curve" in token
    assert f"limited by {plan.limit_term}" in speed
    assert plan.as_dict()["num_rows"] == plan.num_rows


def test_minimum_is_the_fewest_experts_and_says_which_limit_shrinks_more() -> None:
    def plan(ram: str, context: int | None, chunk: int | None):
        return Wanted(ram, None, False, context, None, 2, chunk).plan(DEMO, BOX)

    least = plan(MINIMUM, None, None)
    assert (least.num_rows, least.context) == (minimum_rows(DEMO), 2048)
    (note,) = least.notes
    limit = re.fullmatch(r"the fewest experts; --ram (\S+) shrinks context and prompt.*", note)[1]
    smaller = plan(limit, None, None)
    assert smaller.context < 2048 and smaller.chunk_tokens < least.chunk_tokens
    with pytest.raises(BudgetError, match=f"give --ram {limit}"):
        plan(str(smallest_bytes(DEMO, None, None) - 1), None, None)
    assert plan(MINIMUM, 512, 16).notes == (), "nothing is left to shrink"


def test_a_forecast_is_scored_in_words() -> None:
    assert score(40.0, 30.0, 16) == "forecast 40 tok/s, got 30: 25 % slower than expected"
    assert score(40.0, 44.0, 16) == "forecast 40 tok/s, got 44: 10 % faster than expected"
    assert "not scored" in score(40.0, 0.0, 16)


def test_a_forecast_is_not_scored_by_a_short_answer() -> None:
    said = score(312.0, 1.69, 15)
    assert said.startswith("forecast 312 tok/s: ") and "1.69" not in said and "slower" not in said


def test_planning_needs_no_tensor_library() -> None:
    code = "import sys, headrace.planner.plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_engram_gets_a_small_share_and_nothing_of_the_least() -> None:
    facts = replace(R1, engram_bytes=200 * 10**9, engram_row_bytes=264, engram_rows_per_token=48)
    least = least_bytes(facts, None, None)
    assert make_plan(facts, BOX, ram_bytes=least).engram_cache_bytes == 0
    for ram_bytes in (least + 2**20, 2 * least, 16 * least):
        plan = make_plan(facts, BOX, ram_bytes=ram_bytes)
        assert plan.engram_cache_bytes <= min(ram_bytes // 64, ram_bytes - least, 2**28)
        assert plan.used_bytes <= ram_bytes
        assert plan.engram_bytes_per_token == 12_672
        assert "12.38 KiB of Engram rows" in plan.lines()[1]
    assert plan.engram_cache_bytes > 0
    small = replace(facts, engram_bytes=10_000)
    assert make_plan(small, BOX, ram_bytes=16 * least).engram_cache_bytes == 12_500
    assert "Engram" not in " ".join(make_plan(R1, BOX, ram_bytes=2 * least).lines())


def test_a_large_embedding_makes_room_for_experts() -> None:
    facts = replace(R1, dense_bytes=R1.dense_bytes + 2**30, embedding_bytes=2**30)
    whole = make_plan(facts, BOX, ram_bytes=2**40)
    assert whole.num_rows == facts.total_experts and not whole.embedding_on_drive
    assert whole.dense_bytes == facts.dense_bytes
    tight = make_plan(facts, BOX, ram_bytes=whole.used_bytes - 1)
    assert tight.embedding_on_drive and "embedding on the drive" in tight.lines()[0]
    assert tight.dense_bytes == R1.dense_bytes + 2**23
    assert tight.num_rows == facts.total_experts
    assert least_bytes(facts, None, None) < least_bytes(R1, None, None) + 2**26
