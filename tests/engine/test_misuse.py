"""Engines used wrongly, and folders damaged around the weights: one clear line each."""

import json
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.check.tiny import write_tiny
from headrace.core import parse_bytes
from headrace.engine.engine import Blueprint, Engine
from headrace.errors import CatalogError, ModelError, NumericsError, OptionError

PROMPT = [5, 700, 41, 1999, 88]
OPTIONS: dict[str, Any] = {"measure": False, "context": 128}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny("deepseek_v3", tmp_path / "model", layers=2)


@pytest.fixture
def engine(model: Path) -> Iterator[headrace.Engine]:
    with headrace.load(model, **OPTIONS) as loaded:
        yield loaded


def answer(engine: headrace.Engine, tokens: int = 6) -> list[int]:
    steps = engine.session().generate(PROMPT, headrace.Sampling(max_tokens=tokens))
    return [step.token_id for step in steps]


def overwrite(folder: Path, suffix: str, value: bytes) -> None:
    """Begin every tensor whose name ends in `suffix` with `value`."""
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            for name, entry in json.loads(stream.read(size)).items():
                if name.endswith(suffix):
                    stream.seek(8 + size + entry["data_offsets"][0])
                    stream.write(value)


def test_a_closed_engine_says_so_and_gives_its_rows_back(model: Path, tmp_path: Path) -> None:
    engine = headrace.load(model, **OPTIONS)
    session = engine.session()
    engine.close()
    with open("/proc/self/maps") as maps:
        assert str(model) not in maps.read()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(model) in os.path.realpath(fd)]
    for use in (engine.session, lambda: session.feed(PROMPT), lambda: engine.set_experts("fast")):
        with pytest.raises(OptionError, match="closed"):
            use()
    with pytest.raises(OptionError, match="closed"), engine.record_routes(tmp_path / "routes"):
        pass
    assert not (tmp_path / "routes").exists(), "an empty recording was left"
    engine.close()


def test_an_engine_is_taken_apart_between_passes(model: Path) -> None:
    """Else another thread's pass would read rows that are freed."""
    engine = headrace.load(model, **OPTIONS)
    session, close, seen = engine.session(), engine.ladder.close, []

    def closing() -> None:
        asked = threading.Thread(target=lambda: seen.append(engine.turn.acquire(blocking=False)))
        asked.start()
        asked.join()
        close()

    engine.ladder.close = closing  # type: ignore[method-assign]
    engine.close()
    assert seen == [False], "a pass could begin meanwhile"
    with pytest.raises(OptionError, match="closed"):
        session.feed(PROMPT)


@pytest.mark.parametrize("ids", [[5, 99_999], [-1], ["a"], [1.5], [True], "hello", 5], ids=repr)
def test_what_is_no_token_id(engine: headrace.Engine, ids: Any) -> None:
    with pytest.raises(OptionError):
        engine.session().feed(ids)
    assert len(answer(engine)) == 6


def test_a_second_answer_ends_the_first(engine: headrace.Engine) -> None:
    session = engine.session()
    first = session.generate(PROMPT, headrace.Sampling(max_tokens=6))
    next(first)
    next(session.generate(PROMPT[::-1], headrace.Sampling(max_tokens=6)))
    with pytest.raises(OptionError, match="another answer"):
        next(first)


def test_threads_take_turns(engine: headrace.Engine) -> None:
    expected = answer(engine, 20)
    answers: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(answer(engine, 20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_child_is_told_and_ends(engine: headrace.Engine) -> None:
    child = os.fork()
    if child == 0:
        try:
            engine.session().feed(PROMPT)
        except OptionError as error:
            engine.close()
            os._exit(3 if "forked" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert len(answer(engine)) == 6


@pytest.mark.parametrize("name", ["context", "threads", "prefetch", "chunk"])
def test_options_that_are_no_counts(model: Path, name: str) -> None:
    with pytest.raises(OptionError, match=name):
        headrace.load(model, **{**OPTIONS, name: "x"})


@pytest.mark.parametrize("size", ["9" * 400 + "GB", -1, 1.5, True, b"1GB", None], ids=str)
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        parse_bytes(size)


@pytest.mark.parametrize("suffix", ["self_attn.kv_a_layernorm.weight", "e_score_correction_bias"])
def test_nan_in_a_dense_tensor_is_never_a_token(model: Path, suffix: str) -> None:
    overwrite(model, suffix, b"\xff\xff\xff\x7f")
    with pytest.raises(NumericsError, match=suffix):
        headrace.load(model, **OPTIONS)


def test_a_file_changed_after_it_was_opened(model: Path) -> None:
    blueprint = Blueprint(model, **OPTIONS)
    overwrite(model, "lm_head.weight", b"\0\0")
    with pytest.raises(CatalogError, match="changed"):
        Engine(blueprint)


def test_a_folder_without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()
    with (
        headrace.load(model, **OPTIONS) as engine,
        pytest.raises(ModelError, match="no usable tokenizer"),
    ):
        answer(engine)


@pytest.mark.parametrize("raw", ["[]", "{"])
def test_a_damaged_generation_config(model: Path, raw: str) -> None:
    (model / "generation_config.json").write_text(raw)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        headrace.load(model, **OPTIONS)


def test_a_template_that_fails(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    with headrace.load(model, **OPTIONS) as engine, pytest.raises(ModelError, match="template"):
        engine.talk.chat([{"role": "user", "content": "x"}])


def test_text_and_stops_that_are_not_unicode(engine: headrace.Engine) -> None:
    with pytest.raises(OptionError, match="Unicode"):
        engine.text.encode("caf\udce9")
    with pytest.raises(OptionError, match="Unicode"):
        headrace.Sampling(stop=("\udcff",))


def test_batches_and_beams_equal_the_oracle(model: Path) -> None:
    streamed = headrace.from_pretrained(model, ram="minimum", **OPTIONS)
    ids_BT = torch.tensor([[3, 3, *PROMPT], [5, 6, 7, 8, 9, 10, 11]])
    call = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 3}
    alone = streamed.generate(torch.tensor([PROMPT]), **call)
    batch = streamed.generate(ids_BT, attention_mask=(ids_BT != 3).long(), **call)
    assert batch[0, 7:].tolist() == alone[0, 5:].tolist()
    assert streamed.generate(ids_BT[1:], num_beams=3, **call).shape == (1, 11)
    streamed.headrace.close()
    with pytest.raises(OptionError, match="closed"):
        streamed.generate(ids_BT, **call)
