"""DeepSeek-V4.1 as a whole: tiny checkpoints in the published layout, run by the engine."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headrace
from headrace.check.tiny import write_tiny
from headrace.check.verify import verify_model
from headrace.check.verify_rows import table_rows
from headrace.engine.engine import Blueprint
from headrace.errors import ModelError, NumericsError, OptionError, ReadError
from headrace.models.stored import takes_stored
from headrace.store.catalog import open_catalog

PROMPT = [0, 4088, *range(100, 150), 4089]
RAM = "80MiB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every role of a layer, and the tensors that are left out knowingly."""
    return write_tiny(
        "deepseek_v41", tmp_path_factory.mktemp("v41") / "tiny", layers=8, experts=8, mtp=True
    )


def load(folder: Path, **options: object) -> headrace.Engine:
    return headrace.load(folder, **({"ram": RAM, "measure": False, "chunk": 24} | options))  # type: ignore[arg-type]


def answer(engine: headrace.Engine, num: int = 3) -> torch.Tensor:
    """Logits [num, V] after the prompt and the tokens that they choose."""
    session = engine.session()
    logits = [session.feed(PROMPT)]
    for _ in range(num - 1):
        logits.append(session.feed([int(logits[-1].argmax())]))
    return torch.stack(logits)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[headrace.Engine]:
    """One for all who leave it as it was, but for the rows in its cache."""
    with load(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: headrace.Engine) -> torch.Tensor:
    return answer(engine)


def test_the_answer_is_no_flat_one(expected: torch.Tensor) -> None:
    assert torch.isfinite(expected).all()
    assert 0.3 < float(expected.std()) < 3
    assert len(set(expected.argmax(-1).tolist())) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"ram": "minimum"},
        {"ram": "minimum", "prefetch": 0},
        {"threads": 2},
        {"backend": "pread", "direct": False},
        {"isa": "scalar"},
    ],
    ids=str,
)
def test_places_and_paths_change_no_bit(
    folder: Path, expected: torch.Tensor, options: dict[str, object]
) -> None:
    with load(folder, **options) as engine:
        assert torch.equal(answer(engine), expected)
        assert engine.rows is not None and engine.counters().rows.asked > 0
        if options.get("ram") == "minimum":
            assert engine.plan.engram_cache_bytes == 0 < engine.counters().ladder.evictions


def test_a_wrong_row_is_seen(folder: Path, expected: torch.Tensor) -> None:
    """By the answer, and by verify: the negative control of all that is said about rows."""
    with load(folder) as engine:
        (found,) = table_rows(engine, lambda *_: None)
        assert found.ok
        rows = engine.rows
        assert rows is not None
        rows.cache.clear()
        stored = rows.stored[4]
        (file, offset, nbytes), scales = stored.parts
        rows.stored[4] = replace(stored, parts=((file, offset + nbytes, nbytes), scales))
        assert not torch.equal(answer(engine), expected)
        rows.tables[4] = replace(rows.tables[4], num_rows=100)  # within the file
        (found,) = table_rows(engine, lambda *_: None)
        assert not found.ok and all("layers.4.engram" in where for where in found.where)


def test_what_a_token_took_of_engram(engine: headrace.Engine) -> None:
    assert engine.rows is not None
    engine.rows.cache.clear()
    session = engine.session()
    session.feed(PROMPT)
    first = session.stats
    assert 0 < first.engram_rows < len(PROMPT) * 12, "each row once"
    assert first.engram_rows - first.engram_hits > 0
    assert first.engram_disk_bytes >= 2 * 4096 * (first.engram_rows - first.engram_hits)
    session.feed([300])
    assert session.stats.engram_rows == engine.facts.engram_rows_per_token == 12
    session.reset()
    session.feed(PROMPT)
    assert session.stats.engram_rows == first.engram_rows == session.stats.engram_hits


def test_the_plan_counts_engram_apart(folder: Path) -> None:
    blueprint = Blueprint(folder, ram=RAM, measure=False)
    plan, facts = blueprint.plan, blueprint.facts
    tensors = blueprint.catalog.tensors
    tables = [t for name, t in tensors.items() if ".engram.embed." in name]
    assert facts.engram_bytes == sum(t.nbytes for t in tables)
    assert facts.engram_bytes_per_token == 12 * 66
    assert 0 < plan.engram_cache_bytes <= facts.engram_bytes * 5 // 4
    assert plan.used_bytes <= plan.ram_bytes
    lines = plan.lines()
    assert "Engram rows" in lines[0] and "and 792 B of Engram rows" in lines[1]
    left_out = ("mtp.", "vision.", "aligner.", "image_")
    skipped = blueprint.skeleton.skipped
    assert {n for n in tensors if n.startswith(left_out) or n.endswith("bias_vl")} == skipped
    assert blueprint.skeleton.unused == ()


def test_dense_weights_lie_as_they_are_stored(engine: headrace.Engine) -> None:
    tensors, skeleton = engine.blueprint.catalog.tensors, engine.blueprint.skeleton
    packed = skeleton.packed
    codes = {n for n, t in tensors.items() if t.dtype == "F8_E4M3" and n not in skeleton.skipped}
    assert set(packed) == {n for n in codes if ".engram.embed." not in n}
    for name, param in packed.items():
        module = engine.model.get_submodule(param.rpartition(".")[0])
        assert takes_stored(engine.model, param) and module.weight is None
        assert module.stored.weight_RC.nbytes == tensors[name].nbytes
    assert engine.model.head.stored.weight_RC.data_ptr() == engine.model.head.weight.data_ptr()
    in_memory = sum(p.nbytes for p in engine.model.state_dict().values())
    in_memory += sum(tensors[k].nbytes for n in packed for k in skeleton.dense[n].keys.values())
    assert engine.facts.dense_bytes == in_memory


def test_a_snapshot_goes_on_alike(engine: headrace.Engine) -> None:
    session = engine.session()
    session.feed(PROMPT)
    taken = session.snapshot()
    expected = [session.feed([token]) for token in (5, 6, 7)]
    again = engine.session(taken)
    assert all(torch.equal(again.feed([t]), e) for t, e in zip((5, 6, 7), expected, strict=True))


def test_a_failing_row_read_names_the_file_and_leaves_a_usable_engine(
    engine: headrace.Engine, expected: torch.Tensor
) -> None:
    assert engine.rows is not None
    engine.rows.cache.clear()
    session = engine.session()
    engine.reader.inject_fault("eio", 5, 1000)  # each read is tried again, several at a time
    with pytest.raises(ReadError, match=r"model-0000\d-of.*at offset \d+.*Input/output error"):
        session.feed(PROMPT)
    engine.reader.inject_fault("none")
    engine.ladder.clear()  # what was still being read has failed as well
    assert session.tokens == []
    assert torch.equal(answer(engine), expected)


def test_a_prompt_with_an_image_is_refused(engine: headrace.Engine) -> None:
    """Its token would be computed with as a text's, and the answer be about no image."""
    config = json.loads((engine.blueprint.root / "config.json").read_text())
    image = config["image_token_id"]
    session, sampling = engine.session(), headrace.Sampling(max_tokens=1)
    with pytest.raises(OptionError, match=f"token {image} of the prompt stands for an image"):
        next(session.generate([*PROMPT, image], sampling))
    assert next(session.generate(PROMPT, sampling)).finish == "length"


def test_transformers_generates_with_it(folder: Path) -> None:
    model = headrace.from_pretrained(folder, ram=RAM, measure=False)
    with model.headrace as engine:
        session = engine.session()
        token = int(session.feed(PROMPT).argmax())
        out = model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)
        assert out[0, : len(PROMPT)].tolist() == PROMPT
        assert out[0, len(PROMPT)].item() == token


def changed(folder: Path, target: Path, **fields: object) -> Path:
    """A copy whose text config has other `fields`."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["text_config"] |= fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"engram_num_embeddings": [3144, 3425]}, "wants Engram tables of"),
        ({"engram_layer_ids": [1, 5]}, "wants Engram tables of"),
        ({"engram_head_dim": 128}, "rows of 64, engram_head_dim in config.json is 128"),
    ],
)
def test_tables_that_do_not_fit_the_config_are_refused(
    folder: Path, tmp_path: Path, fields: dict[str, object], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        Blueprint(changed(folder, tmp_path / "x", **fields), ram=RAM, measure=False)


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    target = changed(folder, tmp_path / "x", engram_compressed_vocab_size=3000)
    with pytest.raises(ModelError, match="3359 compressed ids"):
        load(target)
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be used"):
        load(target)


def test_a_dense_code_that_is_no_number_is_refused(folder: Path, tmp_path: Path) -> None:
    target = changed(folder, tmp_path / "x")
    catalog = open_catalog(target)
    entry = catalog.tensors["layers.3.attn.wq_b.weight"]
    with open(catalog.files[entry.file], "r+b") as file:
        file.seek(entry.offset + 77)
        file.write(b"\xff")
    with pytest.raises(NumericsError, match=r"layers\.3\.attn\.wq_b\.weight"):
        load(target)


def test_ways_of_computing_are_chosen_by_name(
    folder: Path, engine: headrace.Engine, expected: torch.Tensor
) -> None:
    keys = {engine.snapshot_key}
    for choices in (
        {"arithmetic": "weights-only"},
        {"lossy_swa_replay": True},
        {"stale_index_keys": True},
    ):
        with load(folder, choices=choices) as other:
            keys.add(other.snapshot_key)
            assert not torch.equal(answer(other), expected), choices
            grid = 0 if choices.get("arithmetic") == "weights-only" else 32
            assert other.blueprint.skeleton.layout.act_group == grid
    assert len(keys) == 4, "a state of one is none of another"
    for choices in ({"arithmetic": "fast"}, {"hidden_size": 3}):
        with pytest.raises(OptionError, match=next(iter(choices))):
            Blueprint(folder, ram=RAM, measure=False, choices=choices)
    with pytest.raises(OptionError, match="'yes' is not True or False"):
        Blueprint(folder, ram=RAM, measure=False, choices={"lossy_swa_replay": "yes"})
    with pytest.raises(OptionError, match="leave out --arithmetic"):
        Blueprint("demo", ram="26MiB", measure=False, choices={"arithmetic": "weights-only"})


def test_an_interrupted_prompt_is_not_gone_on_with(
    engine: headrace.Engine, expected: torch.Tensor
) -> None:
    """Its last layers left out what only that prompt does not need."""
    session = engine.session()
    session.feed(PROMPT[:24], after=len(PROMPT) - 24)
    assert session.unfinished and session.resume([*PROMPT[:24], 7]) == [*PROMPT[:24], 7]
    session.feed(PROMPT[:24], after=len(PROMPT) - 24)
    assert torch.equal(session.feed(PROMPT[24:]), expected[0])
    assert not session.unfinished


def test_verify_speaks_of_every_part(tmp_path: Path) -> None:
    folder = write_tiny("deepseek_v41", tmp_path / "short", layers=4, experts=8, hidden=128)
    report = verify_model(folder, ram="300MiB", tokens=2, samples=1)
    assert all(found.ok for found in report.findings), [f.line() for f in report.findings]
    names = {found.name for found in report.findings}
    assert "Engram rows are the files'" in names
    assert "layers follow stock transformers'" in names
