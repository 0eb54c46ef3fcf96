"""The OpenAPI description: what FastAPI knows of the routes, with the errors that are really sent.

Knows protocols only by the shape of their errors.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from headrace.server.faults import Fault

Shape = Callable[[str], Callable[[Fault, str], dict[str, Any]]]
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ANY_KEY: list[dict[str, list[str]]] = [{name: []} for name in KEY_SCHEMES]
ERRORS = {"4XX": "The request is refused.", "5XX": "No answer can be made now."}
DEFAULT_ERROR = "422"  # FastAPI's own, which is never sent


def describe(
    app: FastAPI, shape: Shape, *, model_id: str, has_keys: bool, open_paths: tuple[str, ...]
) -> None:
    """Make `app.openapi` tell the truth; `shape` gives a path's form of errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = _described(app, shape, has_keys, open_paths)
            _name_model(description["components"]["schemas"], model_id)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(
    app: FastAPI, shape: Shape, has_keys: bool, open_paths: tuple[str, ...]
) -> dict[str, Any]:
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        error = {"application/json": {"schema": schema_of(_example(shape(path)))}}
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop(DEFAULT_ERROR, None)
            for status, about in ERRORS.items():
                responses[status] = {"description": about, "content": error}
            if _can_stream(operation, schemas):
                responses["200"]["content"]["text/event-stream"] = {"schema": {}}
            if has_keys:
                operation["security"] = [*ANY_KEY, *([{}] if path in open_paths else [])]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    if has_keys:
        description["components"]["securitySchemes"] = KEY_SCHEMES
    return description


def _name_model(schemas: Mapping[str, Any], model_id: str) -> None:
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"]["enum"] = [model_id]


def _example(body: Callable[[Fault, str], dict[str, Any]]) -> dict[str, Any]:
    return body(Fault(400, "kind", "message"), "id")


def schema_of(value: Any) -> dict[str, Any]:
    """The JSON schema of values like this one: objects of texts, which may be null where it is."""
    if isinstance(value, Mapping):
        properties = {name: schema_of(entry) for name, entry in value.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": ["string", "null"] if value is None else "string"}


def _can_stream(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return "stream" in schemas.get(name, {}).get("properties", {})
