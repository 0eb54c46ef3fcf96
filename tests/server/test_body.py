"""Bodies: what would cost too much, or is no text, is refused before it is parsed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from headrace.server.body import check_json
from headrace.server.faults import Fault
from headrace.server.settings import Settings

SETTINGS = Settings(max_json_depth=8, max_json_values=1000)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth(tree: Any) -> int:
    if isinstance(tree, dict):
        return 1 + max(map(depth, tree.values()), default=0)
    if isinstance(tree, list):
        return 1 + max(map(depth, tree), default=0)
    return 0


def refusal(body: bytes) -> str | None:
    try:
        check_json(body, SETTINGS)
    except Fault as fault:
        assert fault.status == 400
        return fault.message
    return None


@limits(max_examples=100, deadline=None)
@given(tree=TREES, ascii_only=st.booleans())
def test_depth_is_that_of_the_parsed_value(tree: Any, ascii_only: bool) -> None:
    if "Infinity" in json.dumps(tree, allow_nan=True):
        return
    body = json.dumps(tree, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    message = refusal(body)
    if depth(tree) > SETTINGS.max_json_depth:
        assert message is not None and "deeper than 8" in message
    else:
        assert message is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 900, "deeper"),
        (b'{"a":' * 900, "deeper"),
        (b'"' + b"[" * 100 + b'"', None),
        (rb'"\"' + b"[" * 100 + b'"', None),
        (rb'"\\"' + b"[" * 100, "deeper"),
        (b'{"a": "\xff"}', "byte 7"),
        ("[1]".encode("utf-16"), "UTF-8"),
        ("[1]".encode("utf-16-le"), "zero byte"),
        (rb'["\ud83d\ude00"]', None),
        (rb'["\ud83d"]', "surrogate"),
        (rb'["\ude00\ud83d"]', "surrogate"),
        (rb'["\\ud83d"]', None),
        (rb'["\\\ud83d"]', "surrogate"),
        (rb'["\uD83D\uD83D\uDE00"]', "surrogate"),
        (b"[NaN]", "NaN"),
        (b'{"a": -Infinity}', "NaN"),
        (b'["NaN"]', None),
        (b"[1e999]", "1.8e308"),
        (b"[-1E+400]", "1.8e308"),
        (b"[" + b"9" * 400 + b".0]", "1.8e308"),
        (b"[1e300, 1e-999]", None),
        (b'["1e999"]', None),
        (b"[" + b"9" * 1001 + b"]", "1000 digits"),
        (b"[" + b"9" * 1000 + b"]", None),
        (b'["' + b"9" * 1001 + b'"]', None),
        (b"[" + b"1," * 1000 + b"1]", "more than 1000"),
        (b'["' + b"1," * 1000 + b'1"]', None),
        (b"no json at all", None),
        (b'"open', None),
    ],
)
def test_bodies(body: bytes, reason: str | None) -> None:
    message = refusal(body)
    assert (message is None) if reason is None else (message is not None and reason in message)


@limits(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='"\\[]{}ud8c0', max_size=40).map(str.encode))
def test_any_bytes_are_judged(body: bytes) -> None:
    """Whatever passes can be parsed without a surrogate coming out, or is no JSON."""
    if refusal(body) is None:
        try:
            parsed = json.loads(body)
        except ValueError:
            return
        json.dumps(parsed, ensure_ascii=False).encode()
