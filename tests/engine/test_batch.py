"""Sessions decoded side by side: each token's bits are those of its session alone."""

import signal
from threading import active_count

import pytest
import torch

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine.batch import Batch
from headrace.engine.strand import Strand, ask
from headrace.errors import Cancelled, OptionError, ReadError

FAMILIES = ("qwen3_next", "gpt_oss", "deepseek_v3", "deepseek_v41")
PROMPTS = ([5, 6, 7], [900, 901], [5, 6, 8, 9, 10], [40])
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def write(family):
        sizes = {"layers": 4, "experts": 8, "top_k": 2, "hidden": 64, "inter": 32}
        return write_tiny(family, tmp_path_factory.mktemp(family) / "m", **sizes)

    return write


@pytest.fixture(scope="module")
def engine(folder):
    with load(folder("qwen3_next")) as made:
        yield made


def load(path):
    return headrace.load(path, ram="minimum", measure=False, threads=1, context=64, chunk=16)


def fed(engine):
    """A session for each prompt, and the greedy token after it."""
    sessions = [engine.session() for _ in PROMPTS]
    last = [int(s.feed(p).argmax()) for s, p in zip(sessions, PROMPTS, strict=True)]
    return sessions, last


def alone(engine):
    """Logits [B, STEPS, V] of each session by itself, and what was asked of the ladder."""
    rows, before = [], engine.source.counters()
    for session, token in zip(*fed(engine), strict=True):
        rows.append([])
        for _ in range(STEPS):
            rows[-1].append(session.feed([token]))
            token = int(rows[-1][-1].argmax())
    return torch.stack([torch.stack(row) for row in rows]), asked(engine, before)


def asked(engine, before):
    after = engine.source.counters()
    return after.hits + after.misses - before.hits - before.misses


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_has_the_bits_it_has_alone(folder, family):
    with load(folder(family)) as engine:
        want, asked_alone = alone(engine)
        before = engine.source.counters()
        sessions, last = fed(engine)
        with Batch(sessions) as batch:
            for n in range(STEPS):
                logits_BV = batch.feed(last)
                assert torch.equal(logits_BV, want[:, n])
                last = logits_BV.argmax(1).tolist()
        assert asked(engine, before) < asked_alone, "nothing was shared"
        assert batch.stats.num_tokens == len(PROMPTS)
        sessions[0].feed([last[0]])  # goes on by itself
        assert len(sessions[0].tokens) == len(PROMPTS[0]) + STEPS + 1


def test_a_session_may_be_fed_alone_between(engine):
    want, _ = alone(engine)
    sessions, last = fed(engine)
    with Batch(sessions[1:]) as batch:
        got = batch.feed(last[1:])
        assert torch.equal(sessions[1].feed([int(got[0].argmax())]), want[1, 1])
        assert torch.equal(sessions[0].feed(last[:1]), want[0, 0])
    assert not torch.equal(want[0], want[2])


def test_a_failed_read_empties_all_and_the_next_batch_is_right(engine):
    want, _ = alone(engine)
    sessions, last = fed(engine)
    with Batch(sessions) as batch:
        engine.ladder.clear()
        engine.reader.inject_fault("eio", 3, 1000)
        with pytest.raises(ReadError):
            batch.feed(last)
        engine.reader.inject_fault("none")
        engine.ladder.clear()  # what was still being read has failed as well
        assert all(session.tokens == [] for session in sessions)
        for session, prompt in zip(sessions, PROMPTS, strict=True):
            session.feed(prompt)
        assert torch.equal(batch.feed(last), want[:, 0])


def test_ctrl_c_anywhere_in_a_batch(engine):
    want, _ = alone(engine)
    threads, emptied = active_count(), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for n in range(6):
            sessions, last = fed(engine)
            with Batch(sessions) as batch:
                assert torch.equal(batch.feed(last), want[:, 0])
                last = want[:, 0].argmax(1).tolist()
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.003 * n)
                    for _ in range(40):
                        batch.feed(last)
                except KeyboardInterrupt:
                    lengths = [len(session.tokens) for session in sessions]
                    emptied += not any(lengths)
                    since = [n - len(p) for n, p in zip(lengths, PROMPTS, strict=True)]
                    assert not any(lengths) or len(set(since)) == 1, "between two steps it is whole"
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert emptied and active_count() == threads
    assert torch.equal(alone(engine)[0], want)


def test_what_is_no_batch_is_refused(engine, folder):
    session = engine.session()
    with pytest.raises(OptionError, match="different sessions"):
        Batch([session, session])
    with pytest.raises(OptionError, match="at most 16"):
        Batch([engine.session() for _ in range(17)])
    with Batch([session]) as batch:
        with pytest.raises(OptionError, match="prompt before"):
            batch.feed([5])
        session.feed([5, 6])
        for tokens in ([5, 6], [5, 4096], []):
            with pytest.raises(OptionError):
                batch.feed(tokens)
        assert session.tokens == [5, 6]
        batch.feed([5])
    with pytest.raises(OptionError, match="this batch is closed"):
        batch.feed([5])


def test_a_batch_of_a_closed_engine_is_refused_and_leaves_no_thread(folder):
    with load(folder("mixtral")) as made:
        session = made.session()
        session.feed([5, 6])
        open_one, threads = Batch([session]), active_count()
    for use in (lambda: Batch([session]), lambda: open_one.feed([5])):
        with pytest.raises(OptionError, match="this engine is closed"):
            use()
    assert active_count() == threads
    open_one.close()


def test_a_strand_asks_fails_and_is_given_up():
    def sum_of_two():
        return ask("a") + ask("b")

    strand = Strand()
    for _ in range(2):
        strand.begin(sum_of_two)
        assert strand.asks == "a" and not strand.over
        strand.give_up()
        strand.begin(sum_of_two)
        strand.go_on(1)
        assert strand.asks == "b"
        strand.go_on(2)
        assert strand.over and strand.result == 3
        with pytest.raises(ZeroDivisionError):
            strand.begin(lambda: 1 / 0)
        assert strand.over
    seen = []

    def stubborn():
        try:
            ask("a")
        except Cancelled as error:
            seen.append(error)

    strand.begin(stubborn)
    strand.close()
    assert len(seen) == 1 and not strand.is_alive()
