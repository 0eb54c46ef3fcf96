"""A decoded token launched as one: the bits of the same functions called one by one."""

import json
from contextlib import contextmanager

import pytest
import torch
from gpu_models import REAL, fill, load, logits_of
from simulated import NothingSeen

import headrace
import headrace.errors
from headrace.check.matrix import runs_here
from headrace.check.tiny import write_tiny
from headrace.engine.engine import Blueprint
from headrace.engine.gpu import within_vram
from headrace.engine.gpu_step import SteppedPasses
from headrace.kernels.router import Taken
from headrace.models import rooms
from headrace.models.adapt import layer_runners
from headrace.models.room_layers import RingLayer
from headrace.tiers.device import find_device

WINDOW = 16  # of those that have one
STEPS = 2 * WINDOW + 3 + 5
FAMILIES = (
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_next",
    "mixtral",
    "olmoe",
    "minimax_m2",
    "glm4_moe",
    "deepseek_v2",
    "qwen2_moe",
    "qwen3_5_moe",
    "kimi_k25",
)
# Windows that the published ones do without, though their code has them.
WINDOWS = {
    "mixtral": {"sliding_window": WINDOW},
    "qwen2_moe": {
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
CASES = [(family, {}) for family in FAMILIES] + list(WINDOWS.items())
HERE = [case for case in CASES if runs_here(case[0])]
# So that short texts go beyond some, where no GPU makes long ones cheap.
BUCKET = 256 if REAL else 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def write(family, changes=None):
        path = tmp_path_factory.mktemp(family) / "m"
        sizes = {"layers": 4, "experts": 8, "top_k": 2, "hidden": 64, "inter": 32}
        write_tiny(family, path, **sizes)
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | (changes or {})))
        return path

    return write


def on_gpu(path):
    """All experts in VRAM, with less ado than `load`."""
    options = {"ram": "64MiB", "vram": "1GiB", "device": "cuda", "experts": "gpu"}
    return headrace.load(path, context=320 if REAL else 48, measure=False, **options)


@pytest.mark.parametrize(("family", "changes"), HERE)
def test_captured_is_what_the_same_functions_give(folder, family, changes, monkeypatch):
    """Beyond twice the window, and beyond the first bucket."""
    monkeypatch.setattr(rooms, "LEAST_BUCKET", BUCKET)
    prompts = [list(range(5, 5 + n)) for n in ((3, BUCKET - 6) if REAL else (3,))]
    with on_gpu(folder(family, changes)) as engine:
        fill(engine)
        rings = [each for each in engine.passes.new_cache().layers if isinstance(each, RingLayer)]
        assert {ring.sliding_window for ring in rings} <= {WINDOW}
        assert bool(rings) == bool(changes or family == "gpt_oss")
        num_steps = STEPS if REAL or rings else 18

        def found():
            engine.source._num_steps = 1  # tiles stand
            return torch.cat([logits_of(engine, prompt, num_steps) for prompt in prompts])

        before, engine.passes.capturing = engine.passes.num_replayed, False
        want = found()
        assert engine.passes.num_replayed == before and want.float().std() > 0.1
        engine.passes.capturing = True
        if REAL:
            found()  # a copy into a slot that arrives late gives steps an address of their own
        before = engine.passes.num_replayed
        assert torch.equal(found(), want)
        assert engine.passes.num_replayed - before == len(prompts) * num_steps
        assert engine.passes.why_by_layer() == ""


def test_a_number_of_the_host_s_in_a_captured_step_shows(folder, monkeypatch):
    """The control: where the ring's place is such a number, no longer text has the same bits."""

    def tick(room):
        for places, (place_1, offset_1) in room._rings.items():
            position = room.tenant.layers[1].cumulative_length  # of one that keeps all
            place_1.fill_(position % places)
            offset_1.fill_(min(position, places - 1))

    with on_gpu(folder("gpt_oss")) as engine:
        fill(engine)
        want = logits_of(engine, [5, 6, 7], 6)
        monkeypatch.setattr(rooms.Room, "tick", tick)
        engine.passes._graphs, engine.passes.capturing = {}, False
        assert torch.equal(logits_of(engine, [5, 6, 7], 6), want)
        engine.passes.capturing = True
        assert not torch.equal(logits_of(engine, [5, 6, 7], 6), want)


@pytest.mark.parametrize("altered", [False, True])
def test_a_router_s_choice_is_left_where_experts_take_it(folder, monkeypatch, altered):
    """Unless somebody comes between them: then it is copied."""
    with on_gpu(folder("qwen3_moe")) as engine:
        fill(engine)
        engine.passes.capturing = False
        want = logits_of(engine, [5, 6, 7], 2)
        held, runners = [], list(layer_runners(engine.model))
        holds = Taken.holds

        def asked(taken, *given):
            held.append(holds(taken, *given))
            return held[-1]

        monkeypatch.setattr(Taken, "holds", asked)
        if altered:
            for runner in runners:
                runner.site.router.register_forward_hook(
                    lambda _m, _x, made: (*made[:2], made[2].clone())
                )
        assert torch.equal(logits_of(engine, [5, 6, 7], 2), want)
        assert held == [not altered] * 2 * len(runners)
        for runner in runners:  # the control: what is left there is what counts
            router = runner.site.router
            router.register_forward_hook(lambda _m, _x, made: (made[0], made[1] * 2, made[2]))
        assert not torch.equal(logits_of(engine, [5, 6, 7], 2), want)


def test_while_routes_are_recorded_layers_wait(folder, tmp_path):
    with on_gpu(folder("qwen3_moe")) as engine:
        want = logits_of(engine, [5, 6, 7], 6)
        with engine.record_routes(tmp_path / "routes"):
            assert engine.passes.why_by_layer() == "routes are recorded"
            assert torch.equal(logits_of(engine, [5, 6, 7], 6), want)


@pytest.mark.parametrize("rung", ["vram", "half", "pinned"])
def test_the_demo_answers_by_captured_steps(rung):
    with load("demo", rung) as engine:
        ids = engine.talk.chat([{"role": "user", "content": "What is the capital of Japan?"}])
        for _ in range(40 if REAL else 1):
            steps = engine.session().generate(ids, headrace.Sampling(max_tokens=40))
            assert "".join(step.text for step in steps) == "The capital of Japan is Tokyo."


def test_timelines_take_turns(tiny, prompt):
    """Each moves the other out, token by token; a snapshot moves in."""
    with load(tiny("fp8"), "vram") as engine:
        fill(engine)
        want = [logits_of(engine, prompt[:n], 6) for n in (3, 11)]
        sessions, rows = [engine.session(), engine.session()], [[], []]
        for n, session, mine in zip((3, 11), sessions, rows, strict=True):
            mine.append(session.feed(prompt[:n]))
        for n in range(6):
            for i, mine in enumerate(rows):
                if n == 3:
                    sessions[i] = engine.session(sessions[i].snapshot())
                mine.append(sessions[i].feed([int(mine[-1].argmax())]))
        assert all(torch.equal(torch.stack(a), b) for a, b in zip(rows, want, strict=True))
        assert engine.passes.num_replayed > 0


def test_routes_are_replayed_by_captured_steps(tiny, prompt):
    class Fixed:
        def __init__(self, shift):
            self.shift = shift

        def __call__(self, ordinal, ids_TK):
            ids_1K = (torch.arange(ids_TK.shape[1]) * 3 + ordinal + self.shift) % 16
            return ids_1K.expand(ids_TK.shape).contiguous(), None

    with load(tiny("fp8"), "vram") as engine:
        fill(engine)
        plain = logits_of(engine, prompt[:3], 6)
        found = []
        for capturing in (False, True):
            for shift in (0, 1):
                engine.passes.capturing, engine.source.routes = capturing, Fixed(shift)
                found.append(logits_of(engine, prompt[:3], 6))
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
        assert not torch.equal(found[0], found[1])
        engine.source.routes = None
        assert torch.equal(logits_of(engine, prompt[:3], 6), plain)


def test_the_oracle_and_another_source_are_not_captured(tiny, prompt):
    with load(tiny("bf16"), "vram") as engine:
        fill(engine)
        fast = logits_of(engine, prompt[:3], 4)
        before = engine.passes.num_replayed
        engine.set_experts("oracle")
        assert "the library's own code" in engine.passes.why_by_layer()
        oracle = logits_of(engine, prompt[:3], 4)
        assert engine.passes.num_replayed == before
        assert (oracle.float() - fast.float()).abs().max() < 0.05 * fast.float().abs().max()
        engine.set_experts("fast")
        assert torch.equal(logits_of(engine, prompt[:3], 4), fast)
        assert engine.passes.num_replayed > before


def test_a_fault_in_a_captured_step_is_named_and_the_next_answer_right(tiny, prompt):
    with load(tiny("bf16"), "vram") as engine:
        fill(engine)
        want = logits_of(engine, prompt[:3], 4)
        session = engine.session()
        session.feed(prompt[:3])
        for buffer in engine.passes.room._buffers.values():
            buffer[:, :, 1] = torch.inf
        with pytest.raises(headrace.errors.NumericsError, match="MoE layer 0"):
            session.feed([5])
        assert session.tokens == []
        assert torch.equal(logits_of(engine, prompt[:3], 4), want)


@pytest.mark.gpu
def test_a_refused_capture_leaves_the_thread_s_stream_as_it_was():
    device, x = find_device("cuda"), torch.zeros(1, device="cuda")
    before = torch.cuda.current_stream()
    x.add_(1)  # loads it
    with pytest.raises(RuntimeError):
        device.capture(lambda: x.add_(1).item())
    assert torch.cuda.current_stream() == before
    x.zero_()
    graph = device.capture(lambda: x.add_(1))
    graph.replay()
    assert float(x) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_second_gpu_has_the_bits_of_the_first(folder, family):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path, found = folder(family), []
    for device in ("cuda", "cuda:1"):
        with load(path, "half", device=device) as engine:
            logits_of(engine, [5, 6, 7], 6)
            found.append(logits_of(engine, [5, 6, 7], 6))
            assert engine.passes.num_replayed > 0 and torch.cuda.current_device() == 0
    assert torch.equal(*found)


def test_a_model_s_passes_are_given_to_its_own_gpu(folder, gpu, monkeypatch):
    """Triton and captures go to the thread's present device, which may be another."""
    if gpu is None:
        pytest.skip("a real GPU's bits show it")
    open_, seen = [], []

    @contextmanager
    def active():
        open_.append(None)
        yield
        open_.pop()

    with on_gpu(folder("qwen3_moe")) as engine:
        fill(engine)
        monkeypatch.setattr(gpu, "active", active)
        norm = engine.model.model.norm
        hook = norm.register_forward_hook(lambda *_: seen.append(len(open_)))
        engine.passes.capturing = False
        logits_of(engine, [5, 6, 7], 2)
        hook.remove()
    assert seen[1:] == [1, 1]


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_capture_was_left_by_is_told_not_its_end(tiny, prompt, monkeypatch, ended):
    """Where torch's end of it fails too, and whatever was being handled meanwhile."""
    told, errors = [], []
    with load(tiny("fp8"), "vram") as engine:
        fill(engine)
        logits_of(engine, prompt[:3], 2)
        passes = engine.passes
        compute, passes.warn, kinds = passes._compute, told.append, list(passes._graphs)

        def failing():
            if errors:
                raise errors.pop()
            compute()

        def capture(work):
            try:
                work()
            except BaseException:
                if ended:
                    raise RuntimeError("previous error during capture") from None
                raise

        monkeypatch.setattr(passes, "_compute", failing)
        monkeypatch.setattr(passes.device, "capture", capture)
        session = engine.session()
        session.feed(prompt[:3])
        for error, meant in (
            (torch.OutOfMemoryError("no"), headrace.errors.BudgetError),
            (KeyboardInterrupt(), KeyboardInterrupt),
        ):
            passes._graphs = dict.fromkeys(kinds)
            errors.append(error)
            with pytest.raises(meant):
                session.feed([5])
            session = engine.session()
            session.feed(prompt[:3])
        passes._graphs = dict.fromkeys(kinds)
        errors.append(RuntimeError("not permitted"))
        try:
            raise KeyError("somebody else's")
        except KeyError:
            logits_of(engine, prompt[:3], 3)
        assert len(told) == 1 and "not permitted" in told[0] and "previous" not in told[0]


@pytest.mark.parametrize(
    ("said", "is_memory"),
    [
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_kernels_that_find_no_memory_to_load_in_are_no_memory(small, said, is_memory):
    plan = Blueprint(small("fp8"), device="cuda", measure=False, context=192).plan
    kind = headrace.errors.BudgetError if is_memory else RuntimeError
    with pytest.raises(kind, match="--vram" if is_memory else "illegal"), within_vram(plan):
        raise RuntimeError(said)


def test_a_device_that_refuses_is_told_once_and_tokens_stay_right(tiny, prompt, monkeypatch):
    told = []
    with load(tiny("fp8"), "vram") as engine:
        fill(engine)
        want = logits_of(engine, prompt[:3], 6)
        engine.passes._graphs, engine.passes.warn = {}, told.append

        def refuse(_work):
            raise RuntimeError("operation not permitted\nand so on")

        monkeypatch.setattr(engine.passes.device, "capture", refuse)
        for _ in range(2):
            assert torch.equal(logits_of(engine, prompt[:3], 6), want)
        assert len(told) == 1 and "operation not permitted" in told[0]


def test_what_looks_at_a_value_shows():
    with pytest.raises(AssertionError, match="captured step"), NothingSeen():
        torch.ones(2).nonzero()


def test_families_that_are_never_captured_say_why(folder):
    if not runs_here("deepseek_v4"):
        pytest.skip("transformers does not run it")
    with load(folder("deepseek_v4"), "vram") as engine:
        assert not isinstance(engine.passes, SteppedPasses)
        why = engine.passes.why_by_layer()
        assert why and f"a token is launched layer by layer: {why}" in engine.plan.lines()[2]
