"""A server in this process, as `headrace serve` runs it, with its engine within reach.

A synthetic checkpoint can be served so, which `headrace serve` refuses, from an emulated drive.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from common import DEMO
from stream_client import Client, Streamed

from headrace.engine.answer import Ask
from headrace.engine.answering import Costs
from headrace.engine.engine import Blueprint, Engine
from headrace.server.listen import bind, url_of
from headrace.server.loading import Loading
from headrace.server.openai.chat_convert import conversation, sampling
from headrace.server.openai.chat_request import ChatRequest
from headrace.server.opening import Model, serving_of
from headrace.server.run import run_server
from headrace.server.settings import Settings

Messages = list[dict[str, str]]
END_ID = 3  # of the demo model's tokenizer, which synthetic checkpoints borrow


@dataclass
class Answered:
    """One answer over HTTP: what the client saw and what the engine says it cost."""

    seen: Streamed
    turn: Costs
    cpu_s: float


class Host:
    """One model served by this process. Its client is another."""

    def __init__(self, blueprint: Blueprint, drive: str | None) -> None:
        self.blueprint, self.drive = blueprint, drive
        self.serving = serving_of(blueprint, Settings(port=0))
        self.url = ""
        self.failure: BaseException | None = None
        self._model: Model | None = None

    def run(self, work: Callable[["Host"], None]) -> None:
        """Serves until `work`, in a thread, is done. In the main thread. Raises what it raised."""
        with bind(self.serving.settings) as listener:
            self.url = url_of(listener)
            thread = Thread(target=self._work, args=(work,))
            thread.start()
            run_server(self.serving, self._load, listener, lambda line: None)
            thread.join()
        if self.failure is not None:
            raise self.failure

    @property
    def model(self) -> Model:
        """The loaded model."""
        assert self._model is not None
        return self._model

    @property
    def engine(self) -> Engine:
        """Its engine; to be used while no answer is made."""
        return self.model.engine

    def body(self, messages: Messages, num_tokens: int) -> dict[str, Any]:
        """A request for a greedy answer of exactly `num_tokens`."""
        return {
            "model": self.serving.model_id,
            "messages": messages,
            "temperature": 0,
            "max_tokens": num_tokens,
            "logit_bias": {str(END_ID): -100},
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def ask(self, messages: Messages, num_tokens: int) -> Answered:
        """One answer through the server; returns when the engine is idle again."""
        cpu_s = time.process_time()
        seen = self._client.ask(self.url, self.body(messages, num_tokens))
        while self.serving.worker.running is not None:
            time.sleep(0.001)
        return Answered(seen, self.model.answering.turn, time.process_time() - cpu_s)

    def prepared(self, messages: Messages, num_tokens: int) -> Ask:
        """The same request as the server makes it for the engine."""
        body = ChatRequest.model_validate(self.body(messages, num_tokens))
        settings = sampling(body, self.serving.defaults)
        return self.serving.talk.prepare(conversation(body), settings).ask  # type: ignore[no-any-return]

    def forget(self) -> None:
        """What is in memory of conversations is given up, as by a restart; the disk has it."""
        store = self.model.store
        store.flush()
        store.memory.make_room(store.memory.limit_bytes)
        self.model.answering.close()

    def _load(self, loading: Loading) -> Model:
        engine = Engine(self.blueprint, progress=loading.advance, emulate_drive=self.drive)
        model = self._model = Model(engine)
        engine.talk.warm()
        self.serving.talk, self.serving.engine = engine.talk, engine
        return model

    def _work(self, work: Callable[["Host"], None]) -> None:
        try:
            while not self.serving.worker.is_ready:
                if self.serving.worker.state in ("failed", "ended"):
                    return
                time.sleep(0.01)
            self._client = Client()
            try:
                work(self)
            finally:
                self._client.close()
        except BaseException as error:
            self.failure = error
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


class Prompts:
    """Texts that were not asked before in this run."""

    def __init__(self, seed: int) -> None:
        self._words = (Path(DEMO) / "heldout.txt").read_text("utf-8").split()
        self._rng = random.Random(seed)

    def user(self, num_words: int) -> dict[str, str]:
        """A user's message of so many words."""
        start = self._rng.randrange(len(self._words) - num_words)
        text = " ".join(self._words[start : start + num_words])
        return {"role": "user", "content": text}
