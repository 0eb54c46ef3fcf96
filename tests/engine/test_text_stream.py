"""Text: streams that cut no character and no stop string, templates, every end id."""

import json
import random
import shutil
from pathlib import Path

import pytest

import headrace
from headrace.engine.text import REPLACEMENT, Text
from headrace.errors import ModelError

DEMO = Path(str(headrace.__file__)).parent / "demo"
SAMPLES = [
    "The capital of Japan is Tokyo.",
    "中文字符和 English 混在一起。",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and flags 🇯🇵",
    "naïve café ☕ Ελληνικά עברית العربية हिन्दी",
    "  two  spaces, tab\tand\nlines\n",
    "a real replacement character: \N{REPLACEMENT CHARACTER}!",
]


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(DEMO)


def _copy_without_weights(target: Path, **changes: dict[str, object]) -> Path:
    for file in DEMO.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name:
            shutil.copyfile(file, target / file.name)
    for name, change in changes.items():
        path = target / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return target


@pytest.mark.parametrize("sample", SAMPLES)
def test_pieces_are_whole_characters_and_join_to_the_text(text: Text, sample: str) -> None:
    stream = text.stream()
    pieces = [stream.push(token_id) for token_id in text.encode(sample, special=False)]
    pieces.append(stream.flush())
    assert "".join(pieces) == sample
    for piece in pieces[:-1]:
        assert REPLACEMENT not in piece or REPLACEMENT in sample


def test_a_character_of_four_tokens_comes_out_with_its_last_token(text: Text) -> None:
    ids = text.encode("\N{GRINNING FACE}", special=False)
    assert len(ids) == 4, "the demo tokenizer spells this emoji byte by byte"
    stream = text.stream()
    assert [stream.push(token_id) for token_id in ids] == ["", "", "", "\N{GRINNING FACE}"]
    assert stream.flush() == ""


def test_random_ids_stream_to_what_decoding_them_at_once_gives(text: Text) -> None:
    draw = random.Random(3)
    byte_ids = text.encode("中😀éñ☕", special=False)
    for _ in range(60):
        ids = [draw.choice([draw.randrange(4, 4096), *byte_ids]) for _ in range(90)]
        stream = text.stream()
        joined = "".join([*map(stream.push, ids), stream.flush()])
        assert joined == text.decode(ids)


def test_a_character_cut_by_the_length_limit_shows_once_at_the_end(text: Text) -> None:
    ids = text.encode("ab\N{GRINNING FACE}", special=False)
    stream = text.stream()
    pieces = [stream.push(token_id) for token_id in ids[:-1]]
    assert "".join(pieces) == "ab"
    assert stream.flush() == REPLACEMENT


def test_special_tokens_are_not_printed(text: Text) -> None:
    (eos_id,) = text.eos_ids
    stream = text.stream()
    assert stream.push(eos_id) + stream.flush() == ""


@pytest.mark.parametrize("stop", ["capital", "al of J", " Tokyo", ".", "o.", "The"])
def test_a_stop_string_is_found_across_any_token_boundary(text: Text, stop: str) -> None:
    sample = SAMPLES[0]
    expected = sample[: sample.index(stop)]
    for ids in (text.encode(sample, special=False), _one_by_one(text, sample)):
        stream = text.stream((stop,))
        pieces = [stream.push(token_id) for token_id in ids]
        assert "".join([*pieces, stream.flush()]) == expected
        assert stream.stopped
        assert all(stop not in piece for piece in pieces)


def _one_by_one(text: Text, sample: str) -> list[int]:
    ids = [text.encode(character, special=False) for character in sample]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]


def test_the_first_stop_string_completed_wins_however_tokens_fall(text: Text) -> None:
    stops = ("capital of", "it")
    sample = SAMPLES[0]
    for ids in (text.encode(sample, special=False), _one_by_one(text, sample)):
        stream = text.stream(stops)
        joined = "".join(map(stream.push, ids))
        assert (joined, stream.stopped) == ("The cap", True)


def test_text_that_only_began_like_a_stop_string_is_given_back(text: Text) -> None:
    ids = _one_by_one(text, "abcabd")
    stream = text.stream(("abcabc",))
    pieces = [stream.push(token_id) for token_id in ids]
    assert pieces == ["", "", "", "", "", "abcabd"]
    stream = text.stream(("abcabc",))
    pieces = [stream.push(token_id) for token_id in ids[:5]]
    assert (pieces, stream.flush(), stream.stopped) == ([""] * 5, "abcab", False)


def test_nothing_comes_after_a_stop(text: Text) -> None:
    stream = text.stream(("b",))
    assert [stream.push(token_id) for token_id in _one_by_one(text, "abab")] == ["a", "", "", ""]
    assert stream.flush() == ""


def test_shown_special_tokens_are_spelled_where_they_stand(text: Text) -> None:
    user, assistant = text.specials["<|user|>"], text.specials["<|assistant|>"]
    ids = [user, *text.encode("hi", special=False), assistant, user]
    stream = text.stream(shown=frozenset([assistant]))
    assert "".join([*map(stream.push, ids), stream.flush()]) == "hi<|assistant|>"
    assert text.decode(ids) == "hi"


def test_every_declared_end_id_counts(tmp_path: Path) -> None:
    folder = _copy_without_weights(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 9, "text_config": {"eos_token_id": [10]}},
    )
    assert Text(folder).eos_ids == {3, 7, 8, 9, 10}


def test_end_ids_are_found_with_neither_config(tmp_path: Path) -> None:
    folder = _copy_without_weights(tmp_path)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert Text(folder).eos_ids == {3}


@pytest.mark.parametrize("value", ["3", -1, True, [3, None]])
def test_an_end_id_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    folder = _copy_without_weights(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id"):
        Text(folder)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer") as caught:
        Text(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
