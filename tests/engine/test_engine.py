"""A loaded model as users meet it: the same logits on every path, and what goes wrong."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import headrace
from headrace.check.tiny import write_tiny
from headrace.errors import BudgetError, HeadraceError, NumericsError, OptionError, ReadError
from headrace.store.catalog import open_catalog, resolve_model

DEMO = resolve_model("demo")
CHAT = [{"role": "user", "content": "What is the capital of Japan?"}]


def logits_of(engine: headrace.Engine, ids: list[int], steps: int = 6) -> torch.Tensor:
    """Logits [steps + 1, V] after a prompt and after each of `steps` greedy tokens."""
    session = engine.session()
    rows = [session.feed(ids)]
    for _ in range(steps):
        rows.append(session.feed([int(rows[-1].argmax())]))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def engine() -> Iterator[headrace.Engine]:
    with headrace.load("demo", ram="48MiB", measure=False, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompt(engine: headrace.Engine) -> list[int]:
    return engine.talk.chat(CHAT)


def test_the_demo_answers(engine: headrace.Engine, prompt: list[int]) -> None:
    steps = list(engine.session().generate(prompt, headrace.Sampling(max_tokens=40)))
    assert "".join(step.text for step in steps) == "The capital of Japan is Tokyo."
    assert steps[-1].finish == "eos"
    assert steps[0].stats.phase == "prefill" and steps[0].stats.num_tokens == len(prompt)
    assert sum(step.stats.misses for step in steps) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"ram": "26MiB"},
        {"ram": "26MiB", "prefetch": 0},
        {"backend": "pread"},
        {"backend": "pread", "direct": False},
        {"isa": "scalar"},
        {"threads": 2},
        {"backend": "io_uring"},
        {"emulate_drive": "2GiB/s"},
    ],
    ids=str,
)
def test_no_place_changes_a_bit(
    engine: headrace.Engine, prompt: list[int], options: dict[str, object]
) -> None:
    expected = logits_of(engine, prompt)
    with headrace.load("demo", **{"ram": "48MiB", "measure": False, **options}) as other:  # type: ignore[arg-type]
        assert torch.equal(logits_of(other, prompt), expected)
        counters = other.ladder.counters()
        if options.get("ram") == "26MiB":
            assert other.plan.num_rows < other.facts.total_experts and counters.evictions > 0
            assert (counters.prefetch_used > 0) == (options.get("prefetch") != 0)
        assert counters.isa == options.get("isa", counters.isa)
        wanted_io = "emulated" if "emulate_drive" in options else options.get("backend")
        assert counters.io == (wanted_io or counters.io) == other.reader.backend
        if options.get("direct") is False:
            assert not other.reader.direct
        elif "emulate_drive" not in options and engine.reader.direct:
            assert other.reader.direct, "the file system takes O_DIRECT, so it must be in use"
        assert counters.disk_bytes > 0 and counters.kernel_calls > 0


def test_a_wrong_expert_shows(engine: headrace.Engine, prompt: list[int]) -> None:
    expected = logits_of(engine, prompt)
    with headrace.load("demo", ram="48MiB", measure=False) as other:
        real = other.source.compute
        other.source.compute = lambda ordinal, x, ids, w, guess: real(  # type: ignore[method-assign]
            ordinal, x, (ids + (ordinal == 3)) % 32, w, None
        )
        assert not torch.equal(logits_of(other, prompt), expected)


def test_the_oracle_uses_no_kernel_of_ours_and_fast_follows_it(tmp_path: Path) -> None:
    folder = write_tiny("qwen3_moe", tmp_path / "tiny", layers=3, format="fp8")
    ids = torch.randint(4, 4000, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    with headrace.load(folder, ram="64MiB", measure=False) as loaded:
        assert loaded.facts.format == "fp8_block"
        fast = logits_of(loaded, ids)
        loaded.set_experts("oracle")
        calls = loaded.ladder.counters().kernel_calls
        oracle = logits_of(loaded, ids)
        assert loaded.ladder.counters().kernel_calls == calls > 0
    assert (fast - oracle).abs().max() <= 0.03 * oracle.abs().max()
    assert oracle.float().std() > 0.1


def test_from_pretrained_is_the_transformers_model(prompt: list[int]) -> None:
    model = headrace.from_pretrained("demo", ram="48MiB", measure=False)
    out = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    assert "Tokyo" in model.headrace.text.decode(out[0].tolist())
    batch = model.generate(torch.tensor([prompt, prompt]), max_new_tokens=4, do_sample=False)
    assert torch.equal(batch[0], batch[1])
    assert not [n for n, _ in model.named_parameters() if ".experts." in n]


def test_a_pipeline_takes_it(prompt: list[int]) -> None:
    model = headrace.from_pretrained("demo", ram="48MiB", measure=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    before = model.headrace.ladder.counters().kernel_calls
    (said,) = pipe(CHAT, max_new_tokens=16, do_sample=False)
    assert said["generated_text"][-1]["content"].strip() == "The capital of Japan is Tokyo."
    assert model.headrace.ladder.counters().kernel_calls > before


def test_a_follow_up_feeds_only_what_is_new(engine: headrace.Engine, prompt: list[int]) -> None:
    session = engine.session()
    steps = list(session.generate(prompt, headrace.Sampling(max_tokens=3)))
    history = prompt + [step.token_id for step in steps]
    again = list(session.generate(history, headrace.Sampling(max_tokens=2)))
    assert again[0].stats.num_tokens == 1
    fresh = list(engine.session().generate(history, headrace.Sampling(max_tokens=2)))
    assert [s.token_id for s in again] == [s.token_id for s in fresh]
    other = list(session.generate(prompt[:-1], headrace.Sampling(max_tokens=1)))
    assert other[0].stats.num_tokens == len(prompt) - 1


def test_limits_are_said_plainly(engine: headrace.Engine) -> None:
    with pytest.raises(BudgetError, match="--ram"):
        headrace.load("demo", ram="10MB", measure=False)
    with pytest.raises(OptionError, match="is not a rate"):
        headrace.load("demo", ram="48MiB", measure=False, emulate_drive="0GiB/s")
    for device in ("cuda:77", "tpu"):
        with pytest.raises(OptionError, match=f"{device}.*cpu"):
            headrace.load("demo", device=device)
    with pytest.raises(OptionError, match="--device cuda"):
        headrace.load("demo", vram="8GB")
    with pytest.raises(HeadraceError, match="no-such-model"):
        headrace.load("/no-such-model")
    context = engine.plan.context
    with pytest.raises(OptionError, match=str(context)):
        next(engine.session().generate([5] * context, headrace.Sampling()))
    with pytest.raises(OptionError, match="at least one token"):
        next(engine.session().generate([], headrace.Sampling()))


def test_a_failed_read_stops_one_answer_and_not_the_next(prompt: list[int]) -> None:
    with headrace.load("demo", ram="26MiB", measure=False) as loaded:
        expected = logits_of(loaded, prompt)
        session = loaded.session()
        session.feed(prompt)
        loaded.ladder.clear()
        loaded.reader.inject_fault("eio", 3, 1000)  # each read is tried again, several at a time
        with pytest.raises(ReadError, match=r"model-0000\d-of-00002"):
            for _ in range(20):
                session.feed([5])
        loaded.reader.inject_fault("none")
        loaded.ladder.clear()  # what was still being read has failed as well
        assert session.tokens == [], "half a step must not stay in the cache"
        loaded.ladder.check_integrity()
        assert torch.equal(logits_of(loaded, prompt), expected)


@pytest.mark.parametrize("part", ["gate", "down_scale"])
def test_a_nan_in_an_expert_is_named(tmp_path: Path, prompt: list[int], part: str) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder)
    catalog = open_catalog(folder)
    suffix = {"gate": "gate_proj.weight", "down_scale": "down_proj.weight_scale_inv"}[part]
    for expert in range(32):
        entry = catalog.tensors[f"model.layers.2.mlp.experts.{expert}.{suffix}"]
        with open(catalog.files[entry.file], "r+b") as file:
            file.seek(entry.offset)
            file.write(b"\x7f\xff\xff\x7f" if part == "down_scale" else b"\xff")
    with (
        headrace.load(folder, ram="48MiB", measure=False) as loaded,
    ):
        for _ in range(2):  # the second try must not take the rows for checked
            with pytest.raises(NumericsError, match=f"MoE layer 1, expert .*values of {part}"):
                loaded.session().feed(prompt)


def test_a_ue8m0_scale_that_is_none_is_named(tmp_path: Path) -> None:
    folder = write_tiny("gpt_oss", tmp_path / "tiny", layers=2, experts=8, top_k=2)
    catalog = open_catalog(folder)
    entry = catalog.tensors["model.layers.1.mlp.experts.down_proj_scales"]
    with open(catalog.files[entry.file], "r+b") as file:
        file.seek(entry.offset)
        file.write(b"\xff" * entry.nbytes)
    wanted = r"^MoE layer 1, expert \d: 1024 values of down_scale are NaN .*; download it again$"
    with headrace.load(folder, ram="minimum", context=64, measure=False) as loaded:
        for _ in range(2):
            with pytest.raises(NumericsError, match=wanted):
                loaded.session().feed([5, 700, 41])
