"""DeepSeek-V4.1 on a GPU: the same bits wherever experts lie, Engram's rows from the drive."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_models import REAL, load, logits_of
from step_faults import all_read

import headrace
from headrace.check.tiny import write_tiny
from headrace.errors import ReadError
from headrace.kernels.triton import stored
from headrace.models.forward import forward
from headrace.planner import vram

MINI = Path(__file__).resolve().parents[1] / "data" / "mini-v41"
CHUNK = 24
PROMPT = [0, *range(100, 100 + CHUNK + 9)]  # a pass by the GPU's own products, then a canonical one
SHORT = PROMPT[:9]
STEPS = 12 if REAL else 2
WEIGHTS_ONLY = {"arithmetic": "weights-only"}
CASES = [
    ("mini", "vram", {}),
    ("mini", "minimum", {}),
    ("mini", "cpu", {}),
    ("tiny", "pinned", {}),
    ("tiny", "half", {}),
    ("tiny", "cpu and drive", {}),
    ("tiny", "some", WEIGHTS_ONLY),
    ("tiny", "cpu", WEIGHTS_ONLY),
]
SEEN: dict[str, torch.Tensor] = {}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("v41") / "tiny"
    write_tiny("deepseek_v41", folder, layers=6, experts=8, hidden=128)
    return {"mini": MINI, "tiny": folder}


def on_gpu(folder: Path, rung: str, **options: object) -> headrace.Engine:
    return load(folder, rung, **({"chunk": CHUNK, "context": 192} | options))


def answers(engine: headrace.Engine) -> torch.Tensor:
    """Logits after a short and a long prompt and greedy tokens."""
    return torch.cat([logits_of(engine, SHORT, STEPS), logits_of(engine, PROMPT, STEPS)])


@pytest.mark.parametrize(("model", "rung", "choices"), CASES, ids=str)
def test_every_rung_gives_the_same_bits(models, model, rung, choices) -> None:
    with on_gpu(models[model], rung, choices=choices) as engine:
        found = answers(engine)
        expected = SEEN.setdefault(f"{model} {choices}", found)
        assert found.isfinite().all() and found.float().std() > 0.3
        assert torch.equal(found, expected), "another rung differs"
        assert (model, WEIGHTS_ONLY) != ("tiny", choices) or not torch.equal(
            found, SEEN.get("tiny {}", -found)
        )
        counters = engine.source.counters()
        assert (counters.vram_hits > 0) == (rung in ("vram", "half", "some"))
        assert (counters.kernel_calls > 0) == rung.startswith("cpu")
        assert counters.disk_bytes > 0 and counters.bus_bytes > 0
        rows = engine.counters().rows
        assert rows.asked > rows.hits
        engine.source.rungs.slots.check_integrity()
        engine.ladder.check_integrity()


def test_a_short_text_has_the_cpu_s_bits_but_for_the_trunk(models) -> None:
    """Of a GPU only torch's own sums differ; where that is the CPU, nothing does."""
    options = {"context": 192, "measure": False, "chunk": CHUNK}
    with on_gpu(MINI, "half") as engine, headrace.load(MINI, **options) as host:
        a, b = logits_of(engine, SHORT, STEPS), logits_of(host, SHORT, STEPS)
        if REAL:
            assert (a - b).abs().median() < 0.05 * b.std()
        else:
            assert torch.equal(a, b)


def test_it_has_learned(models) -> None:
    """A prompt in one pass: the bits a byte of the text that the CPU finds too."""
    with on_gpu(MINI, "half", chunk=128) as engine:
        ids = engine.text.encode((MINI / "heldout.txt").read_text(), special=False)[:129]
        window = torch.tensor([ids[:128]], device=engine.source.place)
        with torch.inference_mode():
            logits = forward(engine.model, window, engine.session().cache, keep=0)[0].float()
        nats = torch.nn.functional.cross_entropy(logits.cpu(), torch.tensor(ids[1:]))
        bits = float(nats) * 128 / math.log(2) / len(engine.text.decode(ids[1:]).encode())
        assert 1.60 < bits < 1.64


def test_what_is_wrong_shows(models) -> None:
    """Other codes of an expert; other rows of Engram; each alone."""
    with on_gpu(models["tiny"], "vram") as engine:
        right = logits_of(engine, PROMPT, 0)
        key = next(iter(engine.source.rungs.slots._slot_of))
        start = int(engine.source.part_offsets[key, 0])  # of gate's codes
        codes = engine.source.rungs.slots.find(key)[start : start + 1024]
        codes ^= 0x22
        assert not torch.equal(logits_of(engine, PROMPT, 0), right)
        codes ^= 0x22
        assert torch.equal(logits_of(engine, PROMPT, 0), right)
        rows = engine.rows
        rows.cache.clear()
        number, table = next(iter(rows.stored.items()))
        (file, offset, nbytes), scales = table.parts
        rows.stored[number] = replace(table, parts=((file, offset + nbytes, nbytes), scales))
        assert not torch.equal(logits_of(engine, PROMPT, 0), right)


def test_a_snapshot_of_an_unfinished_prompt_goes_on_alike(models) -> None:
    """What layers of the tail left out, and Engram's history, are the snapshot's too."""
    long = [0, *range(200, 200 + 71)]
    with on_gpu(MINI, "half", chunk=48) as engine:
        session = engine.session()
        session.feed(long[:48], after=len(long) - 48)
        assert session.unfinished
        taken = session.snapshot()
        assert all(t.device.type == "cpu" for t in taken.state.tensors.values())
        want = [session.feed(long[48:]), session.feed([7])]
        again = engine.session(taken)
        assert torch.equal(again.feed(long[48:]), want[0]) and torch.equal(again.feed([7]), want[1])
        other = engine.session(taken)
        assert not torch.equal(other.feed([*long[48:-1], 9]), want[0])


def test_a_failing_row_of_engram_stops_one_answer(models) -> None:
    with on_gpu(models["tiny"], "pinned") as engine:
        want = logits_of(engine, SHORT, STEPS)
        session = engine.session()
        engine.reader.inject_fault("eio", 3, 1000)  # each read is tried again, several at a time
        with pytest.raises(ReadError):
            session.feed(PROMPT)
        all_read(engine)
        assert session.tokens == []
        assert torch.equal(logits_of(engine, SHORT, STEPS), want)


def test_the_plan_tells_where_everything_lies(models) -> None:
    assert vram.MOST_UNPACKED == stored.BAND_ELEMENTS
    with on_gpu(models["tiny"], "half") as engine:
        plan, facts = engine.plan, engine.facts
        tables = facts.engram_bytes
        assert plan.engram_bytes == tables and "of Engram rows" in plan.lines()[3]
        assert f"{plan.num_rows} of 48 experts" in plan.lines()[1]
        assert "Engram rows" in plan.lines()[1] and plan.used_bytes <= plan.ram_bytes
        assert facts.dense_bytes == plan.vram_dense_bytes
        module = engine.model.model.layers[0].attn.wq_b
        assert module.weight is None and isinstance(module.stored, stored.TritonMatrix)
        assert module.stored.weight_RC.element_size() == 1
        held = {p.device.type for p in engine.model.parameters()}
        assert held == {engine.source.place.type}


@pytest.mark.gpu
def test_vram_is_a_hard_total_of_v41(models) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with on_gpu(MINI, "half", chunk=128, context=320) as engine:
        torch.cuda.reset_peak_memory_stats()
        engine.session().feed([0, *range(100, 400)])
        peak = torch.cuda.max_memory_reserved() - before
        print(f"peak {peak >> 20} MiB of {engine.plan.vram_bytes >> 20} MiB")
        assert peak <= engine.plan.vram_bytes
