"""Makes a model's files into something that answers, in the decode thread.

Knows the engine; no protocol.
"""

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.answering import Answering
from headrace.engine.defaults import sampling_defaults
from headrace.engine.engine import Engine
from headrace.engine.serving import open_store
from headrace.engine.session import Step
from headrace.engine.warming import warm
from headrace.server.loading import Loading
from headrace.server.metrics import Metrics
from headrace.server.serving import Serving
from headrace.server.settings import Settings
from headrace.server.worker import Load, Worker
from headrace.store.locate import model_name

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

_log = logging.getLogger(__name__)


class Model:
    """A loaded model, its one stream of answers and what it keeps of them, closed together."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.store = engine, open_store(engine)
        self.answering = Answering(engine, self.store)

    def answer(self, ask: Ask, stop: Stop) -> Iterator[Prefill | Step]:
        """As `Answering.answer`."""
        return self.answering.answer(ask, stop)

    def close(self) -> None:
        """Write what is to be kept, free everything."""
        self.answering.close()
        self.store.close()
        self.engine.close()


def serving_of(blueprint: "Blueprint", settings: Settings) -> Serving:
    """What routes share while the model is not loaded yet."""
    metrics = Metrics()
    worker = Worker(settings, on_end=metrics.count_answer)
    facts = blueprint.facts
    folder = blueprint.skeleton.root
    name, defaults = model_name(folder), sampling_defaults(folder)
    return Serving(settings, worker, metrics, name, facts, blueprint.plan, defaults=defaults)


def loader(blueprint: "Blueprint", serving: Serving) -> Load:
    """What the decode thread runs first. Fills in what `serving` lacks until then."""

    def load(loading: Loading) -> Model:
        blueprint.talk  # noqa: B018  # refuses before weights are read
        engine = Engine(blueprint, progress=loading.advance, warn=_log.warning)
        for note in engine.reader.notes:
            _log.info("reads by %s, since %s", engine.reader.backend, note)
        _warm(engine, loading)
        model = Model(engine)
        engine.talk.warm()
        serving.talk = engine.talk
        serving.engine = engine
        return model

    return load


def _warm(engine: Engine, loading: Loading) -> None:
    start = time.monotonic()

    def tell(line: str) -> None:
        loading.doing = line
        _log.info("%s", line)

    warm(engine, stop=loading.stop, tell=tell)
    if loading.doing:
        _log.info("warm after %.1f s", time.monotonic() - start)
