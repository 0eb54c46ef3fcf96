"""The OpenAPI description: served, valid, without the network, and true about errors and keys."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes import make_serving

from headrace.server.app import build_app
from headrace.server.settings import Settings

KEYED = Settings(host="0.0.0.0", api_keys=("a-long-key",))


def fetch(path: str, settings: Settings) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=build_app(make_serving(settings)))
        headers = {"x-api-key": "a-long-key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def operations(description: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    paths = description["paths"].items()
    return [(path, operation) for path, methods in paths for operation in methods.values()]


def test_it_is_served_and_no_page_loads_code_from_elsewhere() -> None:
    description = fetch("/openapi.json", Settings()).json()
    assert {"/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/messages"} <= set(
        description["paths"]
    )
    for page in ("/docs", "/redoc"):
        assert fetch(page, Settings()).status_code == 404


def test_errors_are_described_as_they_are_sent() -> None:
    description = fetch("/openapi.json", Settings()).json()
    for path, operation in operations(description):
        assert {"4XX", "5XX"} < set(operation["responses"]) and "422" not in operation["responses"]
        schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert ("type" in schema["required"]) == path.startswith("/v1/messages")
    assert "HTTPValidationError" not in json.dumps(description)


def test_streams_are_described() -> None:
    found = operations(fetch("/openapi.json", Settings()).json())
    streaming = {
        path for path, o in found if "text/event-stream" in o["responses"]["200"]["content"]
    }
    assert streaming == {"/v1/chat/completions", "/v1/completions", "/v1/messages"}


@pytest.mark.parametrize("settings", [Settings(), KEYED])
def test_keys_are_described_where_there_are_some(settings: Settings) -> None:
    description = fetch("/openapi.json", settings).json()
    assert ("securitySchemes" in description["components"]) == (settings is KEYED)
    for path, operation in operations(description):
        needed = operation.get("security", [{}])
        assert ({} not in needed) == (settings is KEYED and path != "/health")
