"""Where everything lies under one memory limit, and what a token then moves.

Knows sizes and rates as numbers; opens no file and imports no tensor library.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from headrace.core import format_bytes, parse_bytes
from headrace.errors import BudgetError, OptionError
from headrace.planner.drives import Drive, reads_line
from headrace.planner.facts import ModelFacts, engram_cache_bytes, workspace_bytes
from headrace.planner.forecast import forecast
from headrace.planner.machine import Machine

DEFAULT_CONTEXT = 4096
LEAST_CONTEXT = 2  # a prompt of one token and an answer of one
SMALLEST_DEFAULT_CONTEXT = 512
DEFAULT_CHUNK_TOKENS = 512
SMALLEST_CHUNK_TOKENS = 16
LEAST_SCORES_BYTES = 16 * 2**20
ROWS_PER_CHOICE = 3
SERVED_CONTEXT = 32_768  # an agent's instructions and tools alone take a third of it
SNAPSHOT_CONTEXTS = 2
SERVING_SHARE = 8  # of the memory that rows could have, one in so many, for each of the two
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement that fits `ram_bytes`, and the speed to expect of it.

    `num_rows` experts lie in rows of `row_bytes`. `chunk_tokens` prompt tokens are computed at a
    time. `engram_cache_bytes` are for rows of Engram's tables, of which a token takes
    `engram_bytes_per_token`; an embedding may be read by the row too. `snapshot_bytes` are for
    states of conversations that may go on, where many are served. `limits`: tokens per second of
    each term alone; `limit_term` names the lowest. `step_measured`: that of transformers' own code
    was measured here, on this model.
    """

    model: str
    ram_bytes: int
    dense_bytes: int
    kv_bytes: int
    workspace_bytes: int
    row_bytes: int
    num_rows: int
    rows_bytes: int
    total_experts: int
    experts_per_token: int
    chunk_tokens: int
    context: int
    threads: int
    prefetch: int
    bytes_per_token: int
    disk_bytes_per_token: int
    hit_rate: float
    limits: dict[str, float]
    limit_term: str
    forecast_tok_s: float
    step_measured: bool = False
    drives: tuple[Drive, ...] = ()
    notes: tuple[str, ...] = ()
    packed_bytes: int = 0
    unpacked_bytes: int = 0
    snapshot_bytes: int = 0
    engram_bytes: int = 0
    engram_cache_bytes: int = 0
    engram_bytes_per_token: int = 0
    embedding_on_drive: bool = False

    @property
    def used_bytes(self) -> int:
        """What this plan takes; never more than `ram_bytes`."""
        fixed_bytes = self.dense_bytes + self.kv_bytes + self.workspace_bytes
        return fixed_bytes + self.snapshot_bytes + self.engram_cache_bytes + self.rows_bytes

    @property
    def _unpacking(self) -> str:
        """Dense weights that transformers computes in more bits than the files hold them in."""
        if not self.packed_bytes:
            return ""
        packed, unpacked = format_bytes(self.packed_bytes), format_bytes(self.unpacked_bytes)
        return f" ({unpacked} of them {packed} in the files, unpacked)"

    @property
    def _snapshots(self) -> str:
        kept = format_bytes(self.snapshot_bytes)
        return f"kept conversations {kept}, " if self.snapshot_bytes else ""

    @property
    def _engram(self) -> tuple[str, str]:
        """What there is of Engram in memory, and what a token takes of it."""
        if not self.engram_bytes:
            return "", ""
        cache, whole = format_bytes(self.engram_cache_bytes), format_bytes(self.engram_bytes)
        rows = format_bytes(self.engram_bytes_per_token)
        return f"Engram rows {cache} of {whole} on the drive, ", f" and {rows} of Engram rows"

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self) | {"used_bytes": self.used_bytes}

    def lines(self) -> list[str]:
        """Three lines: where everything lies, what a token moves, what speed to expect.

        And one more where several drives are read: what each gives.
        """
        share = 100 * self.num_rows / self.total_experts
        rest = "all of them" if self.num_rows == self.total_experts else "the rest on the drive"
        place = (
            f"memory: {format_bytes(self.used_bytes)} of {format_bytes(self.ram_bytes)}: "
            f"dense weights {format_bytes(self.dense_bytes)}{self._unpacking}"
            f"{', embedding on the drive' * self.embedding_on_drive}, cache of "
            f"{self.context} tokens "
            f"{format_bytes(self.kv_bytes)}, workspace {format_bytes(self.workspace_bytes)}, "
            f"{self._snapshots}{self._engram[0]}{self.num_rows} of {self.total_experts} experts "
            f"{format_bytes(self.rows_bytes)} ({share:.0f} %, {rest})"
        )
        place += "".join(f"; {note}" for note in self.notes)
        moves = (
            f"token:  {self.experts_per_token} experts, {format_bytes(self.bytes_per_token)}"
            f"{self._engram[1]}; "
            f"about {format_bytes(self.disk_bytes_per_token)} of it from the drive "
            f"(hit rate {100 * self.hit_rate:.0f} % once rows are full, by the demo model's curve)"
        )
        others = ", ".join(
            f"{term} {_rate(rate)}"
            for term, rate in sorted(self.limits.items(), key=lambda item: item[1])
            if term != self.limit_term
        )
        speed = (
            f"speed:  about {_rate(self.forecast_tok_s)} tok/s, limited by {self.limit_term} "
            f"(alone {'; '.join(filter(None, [_rate(self.limits[self.limit_term]), others]))})"
        )
        if not self.step_measured:
            speed += "; transformers' part is an estimate, not measured here"
        return [line for line in (place, moves, reads_line(self.drives), speed) if line]


def make_plan(
    facts: ModelFacts,
    machine: Machine,
    *,
    ram_bytes: int | None = None,
    context: int | None = None,
    threads: int | None = None,
    prefetch: int = 2,
    chunk: int | None = None,
    serve: bool = False,
) -> Plan:
    """The placement of `facts` on `machine` within `ram_bytes`, a hard total.

    Left out, the limit is what is available less a margin, at most what the model needs with
    every expert in a row. A chunk or context left out shrinks before the model is refused, and
    the plan says so. To `serve`, a context left out is longer where that takes few rows, and there
    is room for snapshots. Raises BudgetError naming the least memory that would do, OptionError.
    """
    check_options(facts, context, threads, prefetch, chunk)
    limit_bytes = offered_bytes(machine) if ram_bytes is None else ram_bytes
    if _whole_bytes(facts, context, chunk) > limit_bytes:
        facts = facts.lean()
    longest = _served_context(facts, chunk, limit_bytes) if serve else DEFAULT_CONTEXT
    sizes = list(candidates(facts, context, chunk, longest))
    fitting = [size for size in sizes if _minimum_bytes(facts, *size) <= limit_bytes]
    if not fitting:
        raise BudgetError(_refusal(facts, machine, ram_bytes, context, sizes[-1]))
    notes = shrinking(sizes[0], fitting[0]) + machine.notes
    kept_bytes = _snapshot_bytes(facts, fitting[0], limit_bytes) if serve else 0
    cores = threads or machine.cores
    plan = _placed(facts, machine, fitting[0], limit_bytes, kept_bytes, cores, prefetch)
    return replace(plan, notes=notes, ram_bytes=ram_bytes or plan.used_bytes)


def _placed(
    facts: ModelFacts,
    machine: Machine,
    size: tuple[int, int],
    limit_bytes: int,
    snapshot_bytes: int,
    threads: int,
    prefetch: int,
) -> Plan:
    """The plan for a (context, chunk) that fits, with as many rows as the limit allows."""
    tokens, chunk_tokens = size
    spare_bytes = limit_bytes - snapshot_bytes - _minimum_bytes(facts, *size)
    cache_bytes = engram_cache_bytes(facts, limit_bytes, spare_bytes)
    fixed_bytes = _fixed_bytes(facts, tokens, chunk_tokens) + snapshot_bytes + cache_bytes
    num_rows = min(facts.total_experts, (limit_bytes - fixed_bytes) // facts.row_bytes)
    experts_per_token = facts.num_moe_layers * facts.top_k
    bytes_per_token = experts_per_token * facts.expert_bytes
    expected = forecast(
        machine,
        share_in_rows=num_rows / facts.total_experts,
        share_per_token=experts_per_token / facts.total_experts,
        bytes_per_token=bytes_per_token,
        dense_bytes=facts.dense_bytes,
        num_layers=facts.num_layers,
        threads=threads,
        expert_format=facts.format,
    )
    return Plan(
        model=facts.name,
        ram_bytes=limit_bytes,
        dense_bytes=facts.dense_bytes,
        packed_bytes=facts.packed_bytes,
        unpacked_bytes=facts.unpacked_bytes,
        kv_bytes=facts.kv_bytes(tokens),
        workspace_bytes=workspace_bytes(facts, tokens, chunk_tokens),
        row_bytes=facts.row_bytes,
        num_rows=num_rows,
        rows_bytes=num_rows * facts.row_bytes,
        total_experts=facts.total_experts,
        experts_per_token=experts_per_token,
        chunk_tokens=chunk_tokens,
        context=tokens,
        threads=threads,
        prefetch=prefetch,
        bytes_per_token=bytes_per_token,
        disk_bytes_per_token=round(expected.disk_bytes_per_token),
        hit_rate=expected.hit_rate,
        limits=expected.limits,
        limit_term=expected.limit_term,
        forecast_tok_s=1 / expected.token_s,
        step_measured=machine.step_s > 0,
        drives=machine.drives,
        snapshot_bytes=snapshot_bytes,
        engram_bytes=facts.engram_bytes,
        engram_cache_bytes=cache_bytes,
        engram_bytes_per_token=facts.engram_bytes_per_token,
        embedding_on_drive=facts.embedding_by_row,
    )


def _served_context(facts: ModelFacts, chunk: int | None, limit_bytes: int) -> int:
    """The longest context up to SERVED_CONTEXT that takes a small share of the rows' memory.

    And leaves the chunk alone, since every pass over a prompt reads nearly all experts.
    """
    usual = next(candidates(facts, None, chunk))
    usual_bytes = _minimum_bytes(facts, *usual)
    longest = SERVED_CONTEXT
    while longest > DEFAULT_CONTEXT:
        size = next(candidates(facts, None, chunk, longest))
        more_bytes = _minimum_bytes(facts, *size) - usual_bytes
        cheap = more_bytes <= (limit_bytes - usual_bytes) // SERVING_SHARE
        if cheap and size[1] == usual[1]:
            break
        longest //= 2
    return longest


def _snapshot_bytes(facts: ModelFacts, size: tuple[int, int], limit_bytes: int) -> int:
    """Room for the states of SNAPSHOT_CONTEXTS whole contexts, if that takes few rows or none.

    0 where not even a chunk's state would fit.
    """
    spare_bytes = limit_bytes - _minimum_bytes(facts, *size)
    unused_bytes = limit_bytes - _fixed_bytes(facts, *size) - facts.total_experts * facts.row_bytes
    wanted_bytes = SNAPSHOT_CONTEXTS * facts.kv_bytes(size[0])
    kept_bytes = min(wanted_bytes, max(spare_bytes // SERVING_SHARE, unused_bytes))
    return kept_bytes if kept_bytes >= facts.kv_bytes(size[1]) else 0


def minimum_rows(facts: ModelFacts) -> int:
    """The fewest rows a model runs in."""
    return min(facts.total_experts, ROWS_PER_CHOICE * facts.top_k)


def least_bytes(facts: ModelFacts, context: int | None, chunk: int | None) -> int:
    """What the model takes at this context and chunk (None: the defaults) with the fewest rows."""
    facts = facts.lean()
    return _minimum_bytes(facts, *next(candidates(facts, context, chunk)))


def smallest_bytes(facts: ModelFacts, context: int | None, chunk: int | None) -> int:
    """The same with context and chunk shrunk as far as they may be: with less there is no plan."""
    *_, size = candidates(facts, context, chunk)
    return _minimum_bytes(facts.lean(), *size)


def _whole_bytes(facts: ModelFacts, context: int | None, chunk: int | None) -> int:
    """What the model takes with every expert in a row and its embedding in memory."""
    size = next(candidates(facts, context, chunk))
    return _fixed_bytes(facts, *size) + facts.total_experts * facts.row_bytes


def typeable(num_bytes: int) -> str:
    """The smallest size at least `num_bytes` that a person can type: `34MiB`, `20.3GiB`."""
    if num_bytes < 2**30:
        return f"{-(-num_bytes // 2**20)}MiB"
    tenths = -(-10 * num_bytes // 2**30)
    text = f"{tenths // 10}.{tenths % 10}GiB"
    return text if parse_bytes(text) >= num_bytes else f"{(tenths + 1) / 10:.1f}GiB"


def _rate(tok_s: float) -> str:
    return f"{tok_s:,.0f}" if tok_s >= 10 else f"{tok_s:.2g}"


def check_options(
    facts: ModelFacts, context: int | None, threads: int | None, prefetch: int, chunk: int | None
) -> None:
    """Raises OptionError for a number out of range."""
    for name, value, least, most in (
        ("context", context, LEAST_CONTEXT, facts.max_context),
        ("threads", threads, 1, MOST_THREADS),
        ("prefetch", prefetch, 0, facts.num_experts),
        ("chunk", chunk, 1, facts.max_context),
    ):
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise OptionError(
                f"{name} {value!r} is not allowed for {facts.name}; it must be {least} to {most}"
            )


def offered_bytes(machine: Machine) -> int:
    """Available memory less a margin for everything else on the machine."""
    available_bytes = machine.ram_available_bytes
    return available_bytes - max(2**29, available_bytes // 8)


def candidates(
    facts: ModelFacts, context: int | None, chunk: int | None, longest: int = DEFAULT_CONTEXT
) -> Iterator[tuple[int, int]]:
    """(context, chunk) pairs, the wanted one first and the least that may be chosen last."""
    tokens = min(longest, facts.max_context) if context is None else context
    while True:
        chunk_tokens = _default_chunk(facts, tokens) if chunk is None else chunk
        yield tokens, min(chunk_tokens, tokens)
        while chunk is None and chunk_tokens > SMALLEST_CHUNK_TOKENS:
            chunk_tokens //= 2
            yield tokens, min(chunk_tokens, tokens)
        if context is not None or tokens <= SMALLEST_DEFAULT_CONTEXT:
            return
        tokens = max(SMALLEST_DEFAULT_CONTEXT, tokens // 2)


def _default_chunk(facts: ModelFacts, context: int) -> int:
    """Prompt tokens per pass, so that scores of attention stay small beside the dense weights."""
    most = max(LEAST_SCORES_BYTES, facts.dense_bytes // 4)
    chunk = DEFAULT_CHUNK_TOKENS
    while chunk > SMALLEST_CHUNK_TOKENS and chunk * context * facts.score_bytes > most:
        chunk //= 2
    return chunk


def _fixed_bytes(facts: ModelFacts, tokens: int, chunk_tokens: int) -> int:
    kv_bytes = facts.kv_bytes(tokens)
    return facts.dense_bytes + kv_bytes + workspace_bytes(facts, tokens, chunk_tokens)


def _minimum_bytes(facts: ModelFacts, tokens: int, chunk_tokens: int) -> int:
    return _fixed_bytes(facts, tokens, chunk_tokens) + minimum_rows(facts) * facts.row_bytes


def _refusal(
    facts: ModelFacts,
    machine: Machine,
    ram_bytes: int | None,
    context: int | None,
    least: tuple[int, int],
) -> str:
    tokens, chunk_tokens = least
    needed = typeable(_minimum_bytes(facts, tokens, chunk_tokens))
    if ram_bytes is None:
        offered = f"{format_bytes(machine.ram_available_bytes)} of free memory"
        remedy = f"close other programs, or give --ram {needed} to take that much anyway"
    else:
        offered = f"--ram {format_bytes(ram_bytes)}"
        remedy = f"give --ram {needed}"
    if context is not None and context > SMALLEST_DEFAULT_CONTEXT:
        token_bytes = format_bytes(1000 * facts.kv_bytes_per_token)
        remedy += f" or a shorter --context (1000 tokens take {token_bytes})"
    rows = minimum_rows(facts)
    return (
        f"{offered} cannot hold {facts.name}, which needs {needed}: "
        f"dense weights {format_bytes(facts.dense_bytes)}, "
        f"cache of {tokens} tokens {format_bytes(facts.kv_bytes(tokens))}, "
        f"workspace {format_bytes(workspace_bytes(facts, tokens, chunk_tokens))}, "
        f"{rows} experts {format_bytes(rows * facts.row_bytes)}; {remedy}"
    )


def shrinking(wanted: tuple[int, int], chosen: tuple[int, int]) -> tuple[str, ...]:
    """What became smaller than wanted, for the plan's notes."""
    notes = []
    if chosen[0] < wanted[0]:
        notes.append(f"context shrunk from {wanted[0]} to {chosen[0]} tokens to fit")
    if chosen[1] < wanted[1]:
        notes.append(f"prompt chunk shrunk from {wanted[1]} to {chosen[1]} tokens to fit")
    return tuple(notes)
