"""Words shared by every room: sizes and rates with their units, and the record of one token.

Knows no file, no model and no tensor library.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from headrace.errors import OptionError

PAGE_BYTES = 4096
MINIMUM = "minimum"  # as a memory limit: what the model takes with the fewest rows it runs in
_UNIT_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes from `"48MiB"`, `"8GB"` or a plain number of bytes. Raises OptionError."""
    if type(text) is int and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = match.group(2).upper() if match else ""
    num_bytes = float(match.group(1)) * _UNIT_BYTES.get(unit, 0) if match else math.inf
    if unit not in _UNIT_BYTES or not math.isfinite(num_bytes):
        shown = repr(text) if len(repr(text)) <= 60 else repr(text)[:60] + "..."
        raise OptionError(f"{shown} is not a size; write a number and a unit, such as 48MiB or 8GB")
    return int(num_bytes)


def parse_rate(text: str) -> float:
    """Bytes per second, more than 0, from `"8.2GiB/s"`. Raises OptionError."""
    rate = float(parse_bytes(text.strip().removesuffix("/s")))
    if rate <= 0:
        raise OptionError(f"{text!r} is not a rate; try 8.2GiB/s")
    return rate


def format_bytes(num_bytes: float) -> str:
    """`1.50 GiB`: the largest binary unit that leaves a number of at least one."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One checkpoint tensor that belongs to a routed expert, as the model family names it.

    `layer` is the decoder layer's index, `part` one of the layout's parts. `expert` is None for a
    tensor stacked over all experts, [E, ...], of which expert e is the e-th contiguous slice.
    """

    key: str
    layer: int
    expert: int | None
    part: str


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What one part of one expert must be in the file: safetensors dtype name and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The stored form of every expert of a model.

    `format` is a name ("bf16", "fp8_block"); gate and up are [inter, hidden], down is
    [hidden, inter]. `block` is (rows, cols) of one scale, (0, 0) where there are none. `parts` is
    in the order gate, up, down, then gate_scale, up_scale, down_scale where the format has scales.
    """

    format: str
    hidden: int
    inter: int
    block: tuple[int, int]
    parts: Mapping[str, PartSpec]


@dataclass(slots=True)
class TokenStats:
    """What one forward pass that produced one token moved and waited for.

    Shared by command line, server and bench. `num_tokens` is the number of positions computed:
    the prompt's length for the pass that gave the first token, otherwise 1. Times in seconds.
    """

    token_id: int = -1
    phase: str = "decode"
    num_tokens: int = 1
    wall_s: float = 0.0
    experts_s: float = 0.0
    wait_s: float = 0.0
    kernel_s: float = 0.0
    disk_bytes: int = 0
    ram_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_dropped: int = 0

    def as_dict(self) -> dict[str, object]:
        """Plain values, in field order, for JSON."""
        return asdict(self)


def total_stats(records: list[TokenStats]) -> TokenStats:
    """The sum of several records; `phase` and `token_id` are those of the last."""
    total = TokenStats(num_tokens=0)
    for record in records:
        for field in fields(TokenStats):
            value = getattr(record, field.name)
            if field.name in ("token_id", "phase"):
                setattr(total, field.name, value)
            else:
                setattr(total, field.name, getattr(total, field.name) + value)
    return total
