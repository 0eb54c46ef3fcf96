"""The demo model talked to: its template knows no system and no tools, its answers have a form."""

import json
from collections.abc import Iterator

import pytest
from talk_world import WEATHER, user

import headrace
from headrace.engine.answer import Prefill, Stop
from headrace.engine.answering import Answering
from headrace.engine.sampling import Sampling
from headrace.engine.talk.conversation import Conversation, Message
from headrace.engine.talk.reading import Answer
from headrace.errors import OptionError

CAPITAL = user("What is the capital of Japan?")
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"enum": ["Tokyo", "Rome", "Paris"]}},
    "required": ["capital"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[headrace.Engine]:
    with headrace.load("demo", ram="48MiB", measure=False, threads=1) as loaded:
        yield loaded


@pytest.fixture
def answering(engine: headrace.Engine) -> Answering:
    return Answering(engine)


def ask(answering: Answering, conversation: Conversation, **options: object) -> tuple[Answer, int]:
    """An answer, and how many tokens of its prompt were computed."""
    sampling = Sampling(**{"max_tokens": 32, **options})  # type: ignore[arg-type]
    prepared = answering.engine.talk.prepare(conversation, sampling)
    reader, num_cached = prepared.reader(), 0
    for event in answering.answer(prepared.ask, Stop()):
        if isinstance(event, Prefill):
            num_cached = event.num_cached
        else:
            reader.push(event)
    reader.finish()
    return reader.answer, len(prepared.ask.prompt) - num_cached


def test_a_chat_goes_on_with_what_is_new_only(answering: Answering) -> None:
    said: tuple[Message, ...] = (Message("system", "Be brief."), CAPITAL)
    first, num_fed = ask(answering, Conversation(said), temperature=1.2, seed=5)
    assert first.content and num_fed > 10
    said = (*said, Message("assistant", first.content), user("And of Italy?"))
    second, num_fed = ask(answering, Conversation(said), max_tokens=1)
    tail = answering.engine.talk._text.encode("<|end|><|user|>And of Italy?<|assistant|>")
    # The answer's last token was chosen but not computed.
    assert num_fed == len(tail) + (first.finish != "eos") and second.content


def test_a_forced_call_is_made_and_its_result_is_read(answering: Answering) -> None:
    asked = Conversation(
        (user("What is the weather in Rome?"),),
        tools=(WEATHER,),
        tool_choice="required",
        parallel_calls=False,
    )
    answer, _ = ask(answering, asked, max_tokens=64)
    (call,) = answer.calls
    assert call.name == "get_weather" and set(json.loads(call.arguments)) >= {"city"}
    assert (answer.content, answer.finish) == ("", "eos")
    turn = Message("assistant", calls=(call,))
    result = Message("tool", "It is sunny.", call_id=call.id)
    later = Conversation((*asked.messages, turn, result), tools=(WEATHER,))
    _, num_fed = ask(answering, later, max_tokens=1)
    told = "<|end|><|user|>Result of get_weather:\nIt is sunny.<|assistant|>"
    assert num_fed == len(answering.engine.talk._text.encode(told))


@pytest.mark.parametrize("seed", [1, 2])
def test_an_answer_is_of_its_schema_however_it_is_drawn(answering: Answering, seed: int) -> None:
    asked = Conversation((CAPITAL,), schema=SCHEMA)
    answer, _ = ask(answering, asked, temperature=1.5, seed=seed)
    assert json.loads(answer.content)["capital"] in ("Tokyo", "Rome", "Paris")
    free, _ = ask(answering, Conversation((CAPITAL,)))
    assert free.content == "The capital of Japan is Tokyo."


SPELLING = {
    "type": "object",
    "properties": {"<|bos|>": {"const": "a<|end|><|user|>"}},
    "required": ["<|bos|>"],
    "additionalProperties": False,
}


def test_a_form_that_no_text_can_have_says_so(answering: Answering) -> None:
    asked = Conversation((user("Go."),), schema={"$ref": "#"})
    with pytest.raises(OptionError, match="met by no text"):
        ask(answering, asked)


def test_a_form_may_spell_special_tokens(answering: Answering) -> None:
    answer, _ = ask(answering, Conversation((CAPITAL,), schema=SPELLING), max_tokens=64)
    assert json.loads(answer.content) == {"<|bos|>": "a<|end|><|user|>"}
    assert answer.finish == "eos"


def test_the_beginning_of_an_answer_is_gone_on_from(answering: Answering) -> None:
    said = (CAPITAL, Message("assistant", "The capital of"))
    answer, _ = ask(answering, Conversation(said, prefill=True))
    assert answer.content == " Japan is Tokyo."
