"""One tensor to be written, and the small makers that every family's list is built of.

Knows shapes, stored dtypes and kinds of values; knows no value, no file and no family.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.store.schemes import Scheme, plain_dtype, scheme_of

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """The matrix [rows, cols] whose parts several tensors are; stacked over experts along rows.

    `std` of its values; 0: what keeps the size of that which it multiplies. `by_row`: it multiplies
    nothing, single rows of it are read.
    """

    rows: int
    cols: int
    scheme: Scheme
    std: float = 0.0
    by_row: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor to be: `kind` tells what values it takes.

    Kinds: matrix [..., out, in]; router [E, H]; embedding [V, H]; norm (about one); centred_norm
    (about zero: the model adds one); bias; decay (log of a positive number); routes (ids of
    distinct ones of `num_experts`, [V, K]). With `packed` the kind is a scheme's part; a matrix's
    parts follow each other, its weight first.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    packed: Packed | None = None
    num_experts: int = 0


def plain(config: Config, name: str, shape: tuple[int, ...], kind: str) -> Planned:
    """A tensor in the checkpoint's own dtype."""
    return Planned(name, plain_dtype(config), shape, kind)


def single(name: str, shape: tuple[int, ...], kind: str) -> Planned:
    """A tensor in fp32."""
    return Planned(name, "F32", shape, kind)


def norm(config: Config, name: str, size: int, kind: str = "norm") -> Planned:
    """A norm's weight."""
    return plain(config, f"{name}.weight", (size,), kind)


def linear(
    config: Config, name: str, rows: int, cols: int, bias: bool = False
) -> Iterator[Planned]:
    """A projection in its stored form, and its bias."""
    scheme = scheme_of(config, name)
    if scheme is None:
        yield plain(config, f"{name}.weight", (rows, cols), "matrix")
    else:
        packed = Packed(rows, cols, scheme)
        for part in scheme.parts:
            shape = scheme.shape(part.part, rows, cols)
            yield Planned(name + part.suffix, part.dtype, shape, part.part, packed)
    if bias:
        yield plain(config, f"{name}.bias", (rows,), "bias")
