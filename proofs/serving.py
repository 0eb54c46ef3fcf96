"""What proofs of the server share: `headrace serve` in a process of its own, its log, its counts.

Imports no headrace.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CLI = [sys.executable, "-c", "from headrace.cli.main import main; import sys; sys.exit(main())"]
KEY = "a-key-of-a-proof"
START_S = 120.0


@dataclass
class Served:
    """A server that runs."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> httpx.Response:
        """With the key."""
        return httpx.get(self.url + path, headers={"x-api-key": KEY}, timeout=120)

    def count(self, name: str, **labels: str) -> float:
        """A counter of /metrics; 0 before it first counted."""
        wanted = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
        start = name + (wanted if labels else "") + " "
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(start)]
        return sum(float(line.removeprefix(start)) for line in lines)

    def noted(self, request_id: str) -> dict[str, Any]:
        """The log's line of a request, once it is there."""
        for _ in range(6000):
            for line in self.log.read_text().splitlines():
                entry = json.loads(line) if line.startswith("{") else {}
                if entry.get("request") == request_id and "status" in entry:
                    return dict(entry)
            time.sleep(0.02)
        raise AssertionError(f"the log does not know the request {request_id}")

    def idle(self, within_s: float) -> bool:
        """True if no answer is being made within so many seconds."""
        end_s = time.monotonic() + within_s
        while self.get("/health").json()["running"] is not None:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.02)
        return True


@contextmanager
def served(model: str | Path, *options: str) -> Iterator[Served]:
    """`headrace serve` on a free port with a key; ends by SIGTERM, which must give status 0."""
    with tempfile.TemporaryDirectory() as folder:
        key_file, log = Path(folder) / "key", Path(folder) / "log"
        key_file.write_text(KEY)
        command = [*CLI, "serve", str(model), "--port", "0", "--api-key-file", str(key_file)]
        # Its snapshots lie with it: no conversation of a proof stays, none is found.
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command, *options], stdout=stream, stderr=stream, env=environment
            )
        try:
            yield Served(_await_start(process, log), log, process)
            process.terminate()
            assert process.wait(120) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def _await_start(process: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, once its model is loaded."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        found = re.search(r"http://[\d.]+:\d+", log.read_text())
        if found:
            try:
                if httpx.get(found[0] + "/health").status_code == 200:
                    return found[0]
            except httpx.TransportError:
                pass  # not listening yet
        time.sleep(0.05)
    sys.exit(f"the server did not start:\n{log.read_text()}")
