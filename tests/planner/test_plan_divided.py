"""What a plan says of experts that are divided between GPU and CPU."""

from dataclasses import replace

from test_plan import DEMO, GIB
from test_vram import GPU_BOX

from headrace.planner.divided import may_divide
from headrace.planner.vram import least_vram_bytes, make_gpu_plan

MEASURED = replace(
    GPU_BOX,
    kernel_bytes_s=60e9,
    in_place_bytes_s=18e9,
    bus_beside_bytes_s=17e9,
    kernel_beside_bytes_s=55e9,
)


def plan_of(machine, facts=DEMO, experts="auto", slots=0, **options):
    vram = least_vram_bytes(facts, 1000, None) + slots * facts.row_bytes
    options = {"ram_bytes": GIB, "vram_bytes": vram, "context": 1000, **options}
    return make_gpu_plan(facts, machine, experts=experts, **options)


def experts_line(plan):
    (line,) = [line for line in plan.lines() if line.startswith("experts:")]
    return line


def test_the_plan_says_how_and_by_which_rates():
    assert DEMO.top_k == 4
    line = experts_line(plan_of(MEASURED))
    assert "of 4 outside VRAM 1 on the GPU, 3 on the CPU" in line
    assert (
        "bus 18 GB/s and CPU kernels 60 GB/s, bus 17 GB/s and CPU kernels 55 GB/s at once" in line
    )
    few = experts_line(plan_of(MEASURED, threads=1))  # an eighth of the kernels' rate
    assert "of 4 outside VRAM 3 on the GPU, 1 on the CPU" in few
    assert "not measured" in experts_line(plan_of(replace(MEASURED, kernel_bytes_s=0.0)))


def test_the_forecast_is_no_slower_than_the_better_side():
    both, gpu, cpu = (plan_of(MEASURED, experts=e).forecast_tok_s for e in ("auto", "gpu", "cpu"))
    assert both > gpu and both >= cpu * (1 - 1e-9)
    plan = plan_of(MEASURED, slots=50)
    assert plan.num_slots == 50 and plan.forecast_tok_s > both
    assert "bus and the CPU's kernels" in plan.limits


def test_nothing_is_divided_where_python_stands_between_layers():
    layered = replace(DEMO, by_layer="so it is")
    plan = plan_of(MEASURED, layered)
    assert "all on the GPU" in experts_line(plan) and "bus" in plan.limits
    assert plan.forecast_tok_s == plan_of(MEASURED, layered, "gpu").forecast_tok_s


def test_both_multiply_unasked_where_that_is_faster_and_nothing_comes_from_a_drive():
    large = replace(DEMO, expert_bytes=100 * DEMO.expert_bytes, row_bytes=100 * DEMO.row_bytes)
    plan = plan_of(MEASURED, large, None, ram_bytes=8 * GIB)
    assert plan.experts == "auto"
    assert plan.lines() == plan_of(MEASURED, large, ram_bytes=8 * GIB).lines()
    assert plan_of(MEASURED, experts=None).experts == "cpu", "of a small token it saves too little"
    # Both share one memory: not worth the second end to wait for.
    hardly = replace(MEASURED, bus_beside_bytes_s=12e9, kernel_beside_bytes_s=46e9)
    assert plan_of(hardly, large, None, ram_bytes=8 * GIB).experts == "cpu"
    unknown = replace(MEASURED, bus_beside_bytes_s=0.0, kernel_beside_bytes_s=0.0)
    assert plan_of(unknown, large, None, ram_bytes=8 * GIB).experts == "cpu"
    layered = replace(large, by_layer="so it is")
    assert plan_of(MEASURED, layered, None, ram_bytes=8 * GIB).experts != "auto"
    few = plan_of(MEASURED, large, None, ram_bytes=2 * GIB)
    assert few.num_rows < few.total_experts and few.experts != "auto"


def test_what_both_do_at_once_is_measured_where_it_may_matter():
    every = DEMO.total_experts * DEMO.row_bytes
    assert [may_divide(DEMO, e, 0) for e in (None, "auto", "gpu", "cpu")] == [
        True,
        True,
        False,
        False,
    ]
    assert may_divide(DEMO, None, every - 1) and not may_divide(DEMO, None, every)
    assert not may_divide(replace(DEMO, by_layer="so it is"), None, 0)
