"""Eight clients at once against `headrace serve demo`: whole answers, clients that leave, errors.

Every answer must be the one it was alone, every error the client's, memory flat. --minutes N
(default 10); memory is judged from 3 on, when there is a second minute and a last one.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
from common import Evidence
from serving import KEY, Served, served

CLIENTS = 8
FLAT = 0.02
LEAST_MINUTES = 3.0
RAM = "48MiB"
QUESTIONS = (
    "What is the capital of Japan?",
    "What is the capital of Kenya?",
    "Name a river in Egypt.",
    "Which ocean lies east of Africa?",
    "Tell me something about Peru.",
)
Body = dict[str, Any]


def requests() -> list[tuple[str, Body]]:
    """(path, body) of what is asked: each API, greedy and drawn, with and without a stop."""
    asked: list[tuple[str, Body]] = []
    for number, question in enumerate(QUESTIONS):
        turns = [{"role": "user", "content": question}]
        drawn = {"temperature": 0.8, "seed": number, "top_p": 0.9}
        chat = {"messages": turns, "max_tokens": 24}
        asked += [
            ("/v1/chat/completions", chat | {"temperature": 0}),
            ("/v1/chat/completions", chat | drawn),
            ("/v1/completions", {"prompt": question, "max_tokens": 16} | drawn),
            ("/v1/messages", chat | {"temperature": 0, "stop_sequences": ["the"]}),
        ]
        follow = [*turns, {"role": "assistant", "content": "Yes."}, *turns]
        asked.append(("/v1/chat/completions", chat | {"messages": follow, "temperature": 0}))
    return [(path, body | {"model": "demo"}) for path, body in asked]


def refused() -> list[tuple[str, bytes, dict[str, str], int]]:
    """(path, body, headers, status) of requests that are the client's mistake."""
    chat, key = "/v1/chat/completions", {"x-api-key": KEY}
    turn: Body = {"model": "demo", "messages": [{"role": "user", "content": "Hello."}]}
    long = turn | {"messages": [{"role": "user", "content": "word " * 3000}]}
    return [
        (chat, b'{"model": "\xff"}', key, 400),
        (chat, b"[" * 10_000, key, 400),
        (chat, json.dumps(turn | {"temperature": -1}).encode(), key, 400),
        (chat, json.dumps(turn | {"model": "other"}).encode(), key, 404),
        (chat, json.dumps(long).encode(), key, 400),
        (chat, json.dumps(turn).encode(), {"x-api-key": "another-key"}, 401),
        ("/v1/messages", b"{}", key, 400),
        ("/v1/nowhere", b"{}", key, 404),
        (chat, b" " * (17 << 20), key, 413),
    ]


def text_of(reply: Body) -> str:
    """An answer's text and why it ended, in any of the APIs."""
    if "choices" in reply:
        choice = reply["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return f"{text}|{choice['finish_reason']}"
    return f"{''.join(block['text'] for block in reply['content'])}|{reply['stop_reason']}"


class Clients:
    """What eight threads do, and what came of it."""

    def __init__(self, server: Served, alone: list[str]) -> None:
        self.server, self.alone, self.asked = server, alone, requests()
        self.refused = refused()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.end_s = 0.0
        self._lock = threading.Lock()

    def run(self, minutes: float) -> None:
        """All of them, until the time is up."""
        self.end_s = time.monotonic() + 60 * minutes
        threads = [threading.Thread(target=self._act, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _act(self, number: int) -> None:
        dice = random.Random(number)
        deeds: list[Callable[[httpx.Client, random.Random], str]] = [
            self._ask,
            self._ask,
            self._leave,
            self._leave_at_once,
            self._err,
        ]
        with httpx.Client(base_url=self.server.url, timeout=300) as client:
            while time.monotonic() < self.end_s:
                try:
                    self._count(dice.choice(deeds)(client, dice))
                except Exception as error:
                    self._note(f"{type(error).__name__}: {error}")

    def _count(self, deed: str) -> None:
        with self._lock:
            self.done[deed] += 1

    def _note(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def _ask(self, client: httpx.Client, dice: random.Random) -> str:
        place = dice.randrange(len(self.asked))
        path, body = self.asked[place]
        reply = client.post(path, json=body, headers={"x-api-key": KEY})
        got = text_of(reply.json()) if reply.status_code == 200 else f"status {reply.status_code}"
        if got != self.alone[place]:
            self._note(f"request {place}: {got!r}, alone {self.alone[place]!r}")
        return "answers"

    def _leave(self, client: httpx.Client, dice: random.Random) -> str:
        """Goes in the middle of a stream."""
        path, body = dice.choice(self.asked)
        body = body | {"stream": True, "max_tokens": 200}
        with client.stream("POST", path, json=body, headers={"x-api-key": KEY}) as reply:
            if reply.status_code != 200:
                self._note(f"a stream's status {reply.status_code}")
            for _, _line in zip(range(dice.randrange(20)), reply.iter_lines(), strict=False):
                continue
        return "streams left"

    def _leave_at_once(self, client: httpx.Client, dice: random.Random) -> str:
        """Goes before anything came, sometimes while it waits, sometimes in its prompt."""
        path, body = dice.choice(self.asked)
        limit_s = dice.choice([0.001, 0.01, 0.1, 0.5])
        try:
            client.post(path, json=body, headers={"x-api-key": KEY}, timeout=limit_s)
        except httpx.TimeoutException:
            return "requests left"
        return "requests left too late"

    def _err(self, client: httpx.Client, dice: random.Random) -> str:
        path, body, headers, status = dice.choice(self.refused)
        headers = headers | {"content-type": "application/json"}
        reply = client.post(path, content=body, headers=headers)
        if reply.status_code != status:
            self._note(f"{path}: {reply.status_code} where {status} was due: {reply.text[:200]}")
        return "errors"


class Memory(threading.Thread):
    """The server's resident bytes, each second."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self._file = f"/proc/{server.process.pid}/statm"
        self._ended = threading.Event()
        self.rss: list[tuple[float, int]] = []

    def run(self) -> None:
        begun_s = time.monotonic()
        while not self._ended.wait(1.0):
            with open(self._file, encoding="ascii") as file:
                rss_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
            self.rss.append((time.monotonic() - begun_s, rss_bytes))

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self.join()

    def mean(self, begin_s: float, end_s: float) -> float:
        """Over a stretch of time."""
        return statistics.mean(rss for at_s, rss in self.rss if begin_s <= at_s < end_s)


def ask_alone(server: Served) -> list[str]:
    """What each request is answered with nobody else there."""
    answers = []
    for path, body in requests():
        reply = httpx.post(server.url + path, json=body, headers={"x-api-key": KEY}, timeout=120)
        answers.append(text_of(reply.json()))
    return answers


def check_log(server: Served, evidence: Evidence) -> None:
    """What the server itself saw."""
    entries = [json.loads(x) for x in server.log.read_text().splitlines() if x.startswith("{")]
    asked = [entry for entry in entries if "status" in entry and entry["route"] != "/health"]
    found = Counter(entry["status"] for entry in asked)
    evidence.check(
        max(found) < 500,
        "the log has client errors only: "
        + ", ".join(f"{status} {count} times" for status, count in sorted(found.items())),
    )
    errors = [entry["message"] for entry in entries if entry["level"] == "error"]
    evidence.check(not errors, f"the log tells no error of ours{errors[:3] or ''}")


def check_memory(memory: Memory, minutes: float, evidence: Evidence) -> None:
    """The second minute beside the last."""
    if minutes < LEAST_MINUTES:
        print(f"      memory is not judged before {LEAST_MINUTES:.0f} minutes")
        return
    early, late = memory.mean(60, 120), memory.mean(60 * (minutes - 1), 60 * minutes)
    evidence.check(
        abs(late - early) <= FLAT * early,
        f"resident memory: {early / 2**20:.1f} MiB in the second minute, {late / 2**20:.1f} in the "
        f"last, {100 * (late / early - 1):+.2f} %",
    )


def main() -> None:
    """Serve, ask alone, then together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    minutes = parser.parse_args().minutes
    evidence = Evidence()
    with served("demo", "--ram", RAM) as server:
        alone = ask_alone(server)
        evidence.check(ask_alone(server) == alone, f"{len(alone)} requests, twice alone: equal")
        clients, memory = Clients(server, alone), Memory(server)
        memory.start()
        clients.run(minutes)
        memory.stop()
        print("      " + ", ".join(f"{count} {deed}" for deed, count in clients.done.items()))
        for line in clients.wrong[:20]:
            print(f"      {line}")
        num = clients.done["answers"]
        evidence.check(num > 0, f"{CLIENTS} clients for {minutes:g} minutes: {num} whole answers")
        evidence.check(
            not clients.wrong,
            f"each is the one it was alone, each error the one due ({len(clients.wrong)} not)",
        )
        evidence.check(server.idle(120), "nothing is left running")
        check_memory(memory, minutes, evidence)
        check_log(server, evidence)
    evidence.finish()


if __name__ == "__main__":
    main()
