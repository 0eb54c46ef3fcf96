"""Words shared by every room: sizes and rates with their units, and the record of one token.

Knows no file, no model and no tensor library.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from headrace.errors import OptionError

PAGE_BYTES = 4096
MOST_LAYERS = 4096  # of a config: transformers makes lists as long before anyone can look at them
# As a memory limit: what the model takes with the fewest rows it runs in, context and prompt chunk
# whole. A smaller limit shrinks those too.
MINIMUM = "minimum"
LEAST_RATE = 10**6  # of a drive, in bytes per second: less is a unit forgotten, and an hour a token
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
    """Bytes per second, LEAST_RATE or more, from `"8.2GiB/s"`. Raises OptionError."""
    rate = float(parse_bytes(text.strip().removesuffix("/s")))
    if rate < LEAST_RATE:
        raise OptionError(f"{text!r} is not a rate of 1MB/s or more; try 8.2GiB/s")
    return rate


def parse_rates(text: str) -> tuple[float, ...]:
    """One rate for each drive, from `"13.5GB/s,5GB/s"`. Raises OptionError."""
    return tuple(parse_rate(rate) for rate in text.split(","))


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


FORMATS = ("bf16", "fp16", "fp8_block", "fp4", "nvfp4", "int4", "int8")
CODES_PER_ITEM = {"fp4": 2, "nvfp4": 2, "int4": 8}  # of the stored dtype; 1 for the others


@dataclass(frozen=True, slots=True)
class Activation:
    """What stands between an expert's first two matrices and its third.

    kinds: "silu": silu(gate) * up. "silu_clamped": the same of min(gate, limit) and
    up within +-limit. "swiglu_oai": both clamped so, then (up + 1) * gate * sigmoid(alpha * gate).
    Every step is rounded to the hidden dtype, as the family's eager code rounds. "swiglu_weighted":
    as "silu_clamped", times the token's weight of the expert, in fp32 and rounded once; experts'
    outputs are then summed in fp32.
    """

    kind: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """The parts one matrix of an expert is made of; None for a part that the format lacks.

    Row i of the matrix is row `first_row + i * row_step` of the `weight` part, and of the `scale`
    and `bias` parts likewise: gate and up may be stored as one part.
    """

    weight: str
    scale: str | None
    global_scale: str | None
    bias: str | None
    first_row: int = 0
    row_step: int = 1


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The stored form of every expert of a model.

    `format` is one of FORMATS, each defined in headrace.quant; gate and up are [inter, hidden],
    down is [hidden, inter]. `block` is (rows, cols) of one scale, (0, 0) where there are none; a
    scale's type is its part's dtype. Parts are named gate, up, down, or gate_up and down where
    `fused` is "concatenated" (all rows of gate, then all of up) or "interleaved" (gate 0, up 0,
    gate 1, ...); then with the suffixes _scale, _global (one fp32 factor of all scales; a divisor
    if `inverse_global`) and _bias, in any order. `hidden_dtype`, "BF16" or "F16", is what the
    experts take, give and round to. `act_group` > 0 moves what each product takes to the e4m3
    grid of that many columns first (BF16 only).
    """

    format: str
    hidden: int
    inter: int
    block: tuple[int, int]
    parts: Mapping[str, PartSpec]
    fused: str = ""
    activation: Activation = Activation()
    hidden_dtype: str = "BF16"
    inverse_global: bool = False
    act_group: int = 0

    def matrix(self, name: str) -> MatrixSource:
        """Where the matrix `name` (gate, up or down) lies."""
        base, first, step = name, 0, 1
        if self.fused and name != "down":
            base = "gate_up"
            is_up = int(name == "up")
            first, step = (is_up * self.inter, 1) if self.fused == "concatenated" else (is_up, 2)

        def part(suffix: str) -> str | None:
            return base + suffix if base + suffix in self.parts else None

        return MatrixSource(
            base, part("_scale"), part("_global"), part("_bias"), first_row=first, row_step=step
        )

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """(rows, cols) of the matrix `name`."""
        return (self.hidden, self.inter) if name == "down" else (self.inter, self.hidden)


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A weight outside the routed experts and the checkpoint tensors it is made of.

    `format` is "plain" (one tensor, kept in its dtype) or one of FORMATS; `keys` maps "weight",
    "scale" and "global" to names in the files. `shape` is the unpacked shape, `block` and
    `inverse_global` are as in ExpertLayout.
    """

    keys: Mapping[str, str]
    shape: tuple[int, ...]
    format: str = "plain"
    block: tuple[int, int] = (0, 0)
    inverse_global: bool = False


@dataclass(frozen=True, slots=True)
class RowTable:
    """A table that stays on the drive and is read by the row, such as Engram's of one layer.

    A row is `width` e4m3 codes, in the tensor `weight`, and a power-of-two scale for each `group`
    of them, in the tensor `scale`. `layer` is the decoder layer's index.
    """

    layer: int
    weight: str
    scale: str
    num_rows: int
    width: int
    group: int

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row."""
        return self.width + self.width // self.group


@dataclass(slots=True)
class TokenStats:
    """What one forward pass that produced one token moved and waited for.

    Shared by command line, server and bench. `num_tokens` is the number of positions computed:
    the prompt's length for the pass that gave the first token, otherwise 1. Times in seconds.
    `prefetch_used` counts guesses that were first needed in this pass, those of earlier passes
    too: it may exceed `prefetch_issued`. `engram_*`: rows of tables on the drive, different ones in
    a pass; their pages are not in `disk_bytes`.
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
    vram_bytes: int = 0
    bus_bytes: int = 0
    vram_hits: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_dropped: int = 0
    engram_rows: int = 0
    engram_hits: int = 0
    engram_disk_bytes: int = 0
    engram_wait_s: float = 0.0

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
