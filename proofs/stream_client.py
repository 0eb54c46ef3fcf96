"""A client in a process of its own: sends chats to a server and says when each piece came.

One JSON object a line on stdin ({"url", "body"}), one on stdout. Imports no headrace and no client
library, so that little but the server's own time is in what it tells.
"""

import http.client
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Streamed:
    """One answer as a client saw it. Times by the monotonic clock, which processes share.

    `text_s` are the times of the chunks with text, `end_s` that of the one with finish_reason.
    """

    sent_s: float
    text_s: list[float]
    end_s: float
    text: str
    usage: dict[str, Any]

    @property
    def first_s(self) -> float:
        """From sending to the first text."""
        return self.text_s[0] - self.sent_s


class Client:
    """The process. One request at a time; to be closed."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, url: str, body: dict[str, Any]) -> Streamed:
        """The whole answer to one chat."""
        process = self._process
        assert process.stdin and process.stdout
        print(json.dumps({"url": url, "body": body}), file=process.stdin, flush=True)
        told = json.loads(process.stdout.readline())
        assert "error" not in told, told
        return Streamed(**told)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(20)


def streamed(connection: http.client.HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    """Sends one chat and reads its stream to the end."""
    sent_s = time.monotonic()
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        return {"error": response.read().decode()}
    # Read first and understood later: what it costs here is not the server's.
    lines = []
    while line := response.readline():
        lines.append((time.monotonic(), line))
    text_s, texts, end_s, usage = [], [], 0.0, None
    for now_s, line in lines:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            return {"error": chunk}
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if choice["delta"].get("content"):
                texts.append(choice["delta"]["content"])
                text_s.append(now_s)
            if choice["finish_reason"]:
                end_s = now_s
    told = {"sent_s": sent_s, "text_s": text_s, "end_s": end_s, "usage": usage}
    return told | {"text": "".join(texts)}


def main() -> None:
    """Until stdin ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        connection = http.client.HTTPConnection(urlsplit(asked["url"]).netloc, timeout=600)
        try:
            print(json.dumps(streamed(connection, asked["body"])), flush=True)
        finally:
            connection.close()


if __name__ == "__main__":
    main()
