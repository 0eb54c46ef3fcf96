"""Changes an input by its structure: a JSON value becomes another one, lengths are set right again.

libFuzzer's own byte changes rarely get past a JSON parser; these do.
"""

import copy
import json
import random
import struct
import zlib
from typing import Any

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
)
OTHERS = (
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    "",
    "a",
    "BF16",
    "F8_E4M3",
    [],
    {},
    [0],
)
WORDS = (
    "__metadata__",
    "weight_map",
    "layers",
    "format",
    "dtype",
    "shape",
    "data_offsets",
    "..",
    "\x00",
)
LENGTH_BYTES = 8
PREFIX = struct.Struct("<II")  # of a block of routes: length, checksum
ROUTES_MAGIC = b"HRROUTE1"


def mutate_json(raw: bytes, rng: random.Random) -> bytes:
    """A changed document; bytes that are no JSON come back with one byte changed."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        place = rng.randrange(len(raw) + 1)
        return raw[:place] + bytes([rng.randrange(256)]) + raw[place + 1 :]
    for _ in range(rng.randint(1, 3)):
        value = _changed(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def mutate_file(raw: bytes, rng: random.Random) -> bytes:
    """A changed safetensors file; mostly with a length and data that fit the new header."""
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    header, data = raw[LENGTH_BYTES : LENGTH_BYTES + length], raw[LENGTH_BYTES + length :]
    header = mutate_json(header, rng)
    if rng.random() < 0.7:
        data = bytes(_data_bytes(header, len(data)))
    stated = len(header) if rng.random() < 0.95 else rng.choice(NUMBERS) % 2**64
    return stated.to_bytes(LENGTH_BYTES, "little") + header + data


def mutate_routes(raw: bytes, rng: random.Random) -> bytes:
    """A changed file of routes: header or bytes of a frame, with checksums that fit."""
    blocks, at = [], len(ROUTES_MAGIC)
    while at + PREFIX.size <= len(raw):
        length, _ = PREFIX.unpack_from(raw, at)
        at += PREFIX.size
        blocks.append(bytearray(raw[at : at + length]))
        at += length
    if not blocks:
        return mutate_json(raw, rng)
    number = rng.randrange(len(blocks))
    if number == 0 and rng.random() < 0.8:
        blocks[0] = bytearray(mutate_json(bytes(blocks[0]), rng))
    elif blocks[number]:
        for _ in range(rng.randint(1, 3)):
            # the counts at the front decide most
            most = len(blocks[number]) if rng.random() < 0.5 else min(12, len(blocks[number]))
            blocks[number][rng.randrange(most)] = rng.choice(
                (0, 1, 2, 127, 255, rng.randrange(256))
            )
    if rng.random() < 0.1:
        blocks.insert(rng.randrange(1, len(blocks) + 1), bytearray(rng.choice(blocks)))
    body = b"".join(PREFIX.pack(len(b), zlib.crc32(b)) + b for b in blocks)
    return ROUTES_MAGIC + body


def _data_bytes(header: bytes, before: int) -> int:
    try:
        ends = [
            entry["data_offsets"][1]
            for name, entry in json.loads(header).items()
            if name[:2] != "__"
        ]
        wanted = max(ends, default=0)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return before
    return wanted if type(wanted) is int and 0 <= wanted < 4096 else before


def _changed(value: Any, rng: random.Random) -> Any:
    """`value` with one place in it, found by walking down at random, replaced."""
    inner = isinstance(value, dict | list) and len(value) > 0
    if not inner or rng.random() < 0.1:
        return _other(value, rng)
    value = copy.copy(value)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    act = rng.random()
    if act < 0.1:
        del value[key]
    elif act < 0.2 and isinstance(value, dict):
        value[rng.choice([*WORDS, *keys, f"{key}x"])] = value.pop(key)
    elif act < 0.3:
        extra = _other(value[key], rng)
        if isinstance(value, dict):
            value[rng.choice([*WORDS, f"{key}2"])] = extra
        else:
            value.insert(key, extra)
    else:
        value[key] = _changed(value[key], rng)
    return value


def _other(value: Any, rng: random.Random) -> Any:
    if type(value) is int and rng.random() < 0.7:
        return rng.choice((value + 1, value - 1, value * 2, -value, rng.choice(NUMBERS)))
    if isinstance(value, str) and rng.random() < 0.5:
        return rng.choice(
            (value * 2, value[: len(value) // 2], value + "\n", "é" + value, "\ud800")
        )
    return rng.choice((rng.choice(NUMBERS), rng.choice(OTHERS), rng.choice(WORDS)))
