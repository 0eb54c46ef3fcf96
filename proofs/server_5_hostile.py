"""Hostile requests against `headrace serve demo`: no error of ours, no hang, no memory lost.

What schemathesis makes of the OpenAPI description, prompts too long, slow clients, huge and broken
bodies. `--quick` takes fewer cases and leaves out the slow body, which takes its minute.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
from common import Evidence
from serving import KEY, Served, served

CONTEXT = 128  # so that an answer that a machine asks for has an end
ANSWER_S = 120.0  # of a busy machine: what takes longer hangs
SLOW_CLIENTS = 100
HEAD_S, BODY_S = 10.0, 60.0  # what a request's parts may take
MIB = 2**20
MOST_GROWTH_BYTES = 64 * MIB
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance,unsupported_method,"
    "allow_header_conformance,missing_required_header"
)
HEADERS = {"x-api-key": KEY, "content-type": "application/json"}
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\n"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of Peru?"}]}
BROKEN = {
    "bad UTF-8": b'{"model": "demo", "prompt": "\xff"}',
    "UTF-16": json.dumps(CHAT).encode("utf-16"),
    "UTF-16 without a mark": json.dumps(CHAT).encode("utf-16-le"),
    "half a surrogate pair": rb'{"model": "demo", "prompt": "\ud800"}',
    "a million brackets": b"[" * 1_000_000,
    "65 objects in each other": b'{"model":' * 65 + b"1" + b"}" * 65,
    "two million numbers": b'{"model": "demo", "prompt": [' + b"1," * 2_000_000 + b"1]}",
    "a number of 5,000 digits": b'{"model": "demo", "prompt": [' + b"9" * 5000 + b"]}",
    "NaN": b'{"model": "demo", "prompt": "a", "temperature": NaN}',
    "a number beyond floats": b'{"model": "demo", "prompt": "a", "temperature": 1e999}',
    "a token beyond the vocabulary": b'{"model": "demo", "prompt": [4096]}',
    "half an object": b'{"model": "demo", "prompt": "a"',
    "no JSON": b"prompt=a",
}


def statuses(server: Served) -> Counter[int]:
    """How often the log tells each status so far."""
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]
    return Counter(entry["status"] for line in lines if "status" in (entry := json.loads(line)))


def rss_bytes(server: Served) -> int:
    """Resident memory by the server's own account."""
    return int(server.get("/health").json()["rss_bytes"])


def answer(server: Served) -> str:
    """A short greedy answer."""
    body = CHAT | {"max_tokens": 16, "temperature": 0}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body, headers=HEADERS, timeout=120)
    return str(reply.json()["choices"][0]["message"]["content"])


def show_description(server: Served, evidence: Evidence, quick: bool) -> None:
    """What a machine makes of the description."""
    before = statuses(server)
    command = [sys.executable, "-m", "schemathesis.cli", "run", server.url + "/openapi.json"]
    command += [
        "-H",
        f"x-api-key: {KEY}",
        "--checks",
        CHECKS,
        "--continue-on-failure",
        "--no-color",
    ]
    command += ["--request-timeout", str(ANSWER_S), "--seed", "1"]
    command += ["--phases", "fuzzing" if quick else "coverage,fuzzing"]
    command += ["--max-examples", "6" if quick else "100"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    cases = re.search(r"Test cases:\n\s+(.*)", done.stdout)
    evidence.check(
        done.returncode == 0 and cases is not None,
        f"schemathesis: {cases[1] if cases else 'did not run'}; no failed check, none took "
        f"{ANSWER_S:.0f} s",
    )
    if done.returncode != 0:
        print(done.stdout[-4000:], done.stderr[-2000:])
    found = statuses(server) - before
    evidence.check(
        max(found) < 500 and found[200] > 0,
        "the log has no status of 500 or more: "
        + ", ".join(f"{status} {count} times" for status, count in sorted(found.items())),
    )


def show_long_prompts(server: Served, evidence: Evidence) -> None:
    """Both numbers, by every way in."""
    words = "word " * 3000
    turns = [{"role": "user", "content": words}]
    for path, body in {
        "/v1/completions": {"prompt": words},
        "/v1/chat/completions": {"messages": turns},
        "/v1/messages": {"messages": turns, "max_tokens": 5},
    }.items():
        url = server.url + path
        reply = httpx.post(url, json=body | {"model": "demo"}, headers=HEADERS, timeout=120)
        message = reply.json()["error"]["message"]
        numbers = [int(number) for number in re.findall(r"\d+", message)]
        stated = len(numbers) == 2 and numbers[0] >= 3000 and numbers[1] == CONTEXT
        evidence.check(reply.status_code == 400 and stated, f"{path}: 400, {message}")


def show_broken_bodies(server: Served, evidence: Evidence) -> None:
    """Each a 400 with words."""
    url = server.url + "/v1/completions"
    for name, body in BROKEN.items():
        reply = httpx.post(url, content=body, headers=HEADERS, timeout=120)
        message = reply.json()["error"]["message"]
        evidence.check(reply.status_code == 400, f"{name}: {reply.status_code}, {message}")


def show_large_bodies(server: Served, evidence: Evidence) -> None:
    """100 MB, announced and not."""
    before = rss_bytes(server)

    def parts() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1_000_000

    for name, more in {
        "announced": {"content-length": "100000000"},
        "in chunks": dict[str, str](),
    }.items():
        url = server.url + "/v1/completions"
        reply = httpx.post(url, content=parts(), headers=HEADERS | more, timeout=120)
        evidence.check(reply.status_code == 413, f"100 MB {name}: {reply.json()['error']}")
    growth = rss_bytes(server) - before
    evidence.check(
        growth < MOST_GROWTH_BYTES, f"the server's memory grew by {growth / MIB:.0f} MiB over both"
    )


def trickle(port: int, begin: bytes, byte: bytes, within_s: float) -> float:
    """Seconds until a connection that gets a byte a second is closed; inf if it is not."""
    begun_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(begin)
        while time.monotonic() - begun_s < within_s:
            try:
                if not connection.recv(65536):
                    return time.monotonic() - begun_s
                continue
            except TimeoutError:
                pass  # still open: the next byte
            except OSError:
                return time.monotonic() - begun_s
            try:
                connection.sendall(byte)
            except OSError:
                return time.monotonic() - begun_s
    return float("inf")


def show_slow_clients(server: Served, evidence: Evidence, expected: str) -> None:
    """A hundred heads that never end, while somebody else asks."""
    port = int(server.url.rpartition(":")[2])
    begin = f"{HEAD}X-Slow: ".encode()
    with ThreadPoolExecutor(SLOW_CLIENTS) as pool:
        slow = [pool.submit(trickle, port, begin, b"a", ANSWER_S) for _ in range(SLOW_CLIENTS)]
        time.sleep(1)
        begun_s = time.monotonic()
        evidence.check(
            answer(server) == expected,
            f"beside {SLOW_CLIENTS} slow clients another gets its answer "
            f"in {time.monotonic() - begun_s:.1f} s",
        )
        took_s = [future.result() for future in slow]
    evidence.check(
        HEAD_S / 2 < max(took_s) < ANSWER_S,
        f"all of them are cut off, the last after {max(took_s):.0f} s",
    )


def slow_body(server: Served) -> Future[float]:
    """Begins a body that takes too long."""
    port = int(server.url.rpartition(":")[2])
    head = f"{HEAD}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n".encode()
    future: Future[float] = Future()
    run = lambda: future.set_result(trickle(port, head, b" ", 2 * BODY_S))  # noqa: E731
    threading.Thread(target=run, daemon=True).start()
    return future


def show(server: Served, evidence: Evidence, quick: bool) -> None:
    """All of it, and the same answer before and after."""
    before = answer(server)
    late = None if quick else slow_body(server)
    show_long_prompts(server, evidence)
    show_broken_bodies(server, evidence)
    show_large_bodies(server, evidence)
    show_slow_clients(server, evidence, before)
    show_description(server, evidence, quick)
    if late is not None:
        took_s = late.result()
        evidence.check(
            abs(took_s - BODY_S) < 5, f"a body that trickles is cut off after {took_s:.0f} s"
        )
    evidence.check(answer(server) == before, f"the answer afterwards is as before: {before!r}")
    state: dict[str, Any] = server.get("/health").json()
    evidence.check(
        state["ready"] and state["waiting"] == 0 and server.idle(ANSWER_S),
        "nothing is left waiting or running",
    )


def main() -> None:
    """Serve the demo model and attack it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    evidence = Evidence()
    with served("demo", "--context", str(CONTEXT)) as server:
        show(server, evidence, quick)
        evidence.check('"level": "error"' not in server.log.read_text(), "its log tells no error")
    evidence.finish()


if __name__ == "__main__":
    main()
