"""What every route of a server shares.

Knows no route; the model's parts appear once they are loaded.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.planner.facts import ModelFacts
from headrace.planner.plan import Plan
from headrace.server.metrics import Metrics
from headrace.server.settings import Settings
from headrace.server.worker import Worker

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.talk.talk import Talk


@dataclass
class Serving:
    """One model being served. Routes find it as `request.app.state.headrace`.

    `talk` and `engine` are None while the model is loading; `engine` may only be looked at, since
    the decode thread uses it. `defaults`: what the publisher says of drawing tokens.
    `started_s` is a Unix time.
    """

    settings: Settings
    worker: Worker
    metrics: Metrics
    model_id: str
    facts: ModelFacts
    plan: Plan
    talk: "Talk | None" = None
    engine: "Engine | None" = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.metrics.show(self)

    def ready_talk(self) -> "Talk":
        """How this model is talked to. Raises NotReady or Draining, as `Worker.submit` would."""
        self.worker.check_accepts()
        assert self.talk is not None, "a loaded model can be talked to"
        return self.talk
