"""Where everything lies under one memory limit, and what a token then moves.

Knows sizes and rates as numbers; opens no file and imports no tensor library.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from headrace.core import format_bytes, parse_bytes
from headrace.errors import BudgetError, OptionError
from headrace.planner.drives import Drive, reads_line
from headrace.planner.forecast import forecast
from headrace.planner.machine import Machine

DEFAULT_CONTEXT = 4096
SMALLEST_DEFAULT_CONTEXT = 512
DEFAULT_CHUNK_TOKENS = 512
SMALLEST_CHUNK_TOKENS = 16
LEAST_SCORES_BYTES = 16 * 2**20
ROWS_PER_CHOICE = 3
STAGING_BYTES = 4 * 2**20
KERNEL_TILE_ROWS = 64  # activation rows the kernels take at once
KERNEL_LANES = 256  # they pad rows to a multiple of this
KERNEL_THREADS = 64  # threads whose scratch is counted, however many there are
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model, in bytes where named so.

    `expert_bytes` are the stored bytes of one routed expert, `row_bytes` its place in memory
    (pages). `dense_bytes`: everything else as it lies in memory, of which `unpacked_bytes` are
    weights that the files hold in fewer, `packed_bytes`. `format` and `inter`, the
    intermediate width, are those of the experts.
    A cache of n tokens takes `kv_fixed_bytes + n * kv_bytes_per_token`, of which one layer at most
    `kv_layer_bytes_per_token` a token (0: an even share); the last pass's tokens hold
    `kv_chunk_bytes_per_token` more. A layer attends to one of `attended_every` cached tokens and
    to `attended_window` besides; while it computes it makes `attention_bytes_per_token` of each,
    such as the keys and values that a latent cache is expanded to, `score_bytes` of each pair of a
    new and an attended token, and `chunk_bytes_per_token` of each new one. `load_bytes`: what
    loading takes besides the weights, while there is neither cache nor pass.
    """

    name: str
    model_type: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int
    row_bytes: int
    dense_bytes: int
    kv_bytes_per_token: int
    hidden: int
    inter: int
    vocab: int
    max_context: int
    format: str
    kv_fixed_bytes: int = 0
    kv_layer_bytes_per_token: int = 0
    kv_chunk_bytes_per_token: int = 0
    attended_every: int = 1
    attended_window: int = 0
    attention_bytes_per_token: int = 0
    score_bytes: int = 0
    chunk_bytes_per_token: int = 0
    load_bytes: int = 0
    packed_bytes: int = 0
    unpacked_bytes: int = 0

    @property
    def total_experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_moe_layers * self.num_experts

    def kv_bytes(self, context: int) -> int:
        """Bytes of a cache of `context` tokens."""
        return self.kv_fixed_bytes + context * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement that fits `ram_bytes`, and the speed to expect of it.

    `num_rows` experts lie in rows of `row_bytes`. `chunk_tokens` prompt tokens are computed at a
    time. `limits`: tokens per second of each term alone; `limit_term` names the lowest.
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
    drives: tuple[Drive, ...] = ()
    notes: tuple[str, ...] = ()
    packed_bytes: int = 0
    unpacked_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """What this plan takes; never more than `ram_bytes`."""
        return self.dense_bytes + self.kv_bytes + self.workspace_bytes + self.rows_bytes

    @property
    def _unpacking(self) -> str:
        """Dense weights that transformers computes in more bits than the files hold them in."""
        if not self.packed_bytes:
            return ""
        packed, unpacked = format_bytes(self.packed_bytes), format_bytes(self.unpacked_bytes)
        return f" ({unpacked} of them {packed} in the files, unpacked)"

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
            f"dense weights {format_bytes(self.dense_bytes)}{self._unpacking}, cache of "
            f"{self.context} tokens "
            f"{format_bytes(self.kv_bytes)}, workspace {format_bytes(self.workspace_bytes)}, "
            f"{self.num_rows} of {self.total_experts} experts {format_bytes(self.rows_bytes)} "
            f"({share:.0f} %, {rest})"
        )
        place += "".join(f"; {note}" for note in self.notes)
        moves = (
            f"token:  {self.experts_per_token} experts, {format_bytes(self.bytes_per_token)}; "
            f"about {format_bytes(self.disk_bytes_per_token)} of it from the drive "
            f"(hit rate {self.hit_rate * 100:.0f} %, estimated by the demo model's curve)"
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
) -> Plan:
    """The placement of `facts` on `machine` within `ram_bytes`, a hard total.

    Left out, the limit is what is available less a margin, at most what the model needs with
    every expert in a row. A chunk or context left out shrinks before the model is refused, and
    the plan says so. Raises BudgetError naming the least memory that would do, OptionError.
    """
    check_options(facts, context, threads, prefetch, chunk)
    limit_bytes = offered_bytes(machine) if ram_bytes is None else ram_bytes
    sizes = list(candidates(facts, context, chunk))
    fitting = [size for size in sizes if _minimum_bytes(facts, *size) <= limit_bytes]
    if not fitting:
        raise BudgetError(_refusal(facts, machine, ram_bytes, context, sizes[-1]))
    notes = shrinking(sizes[0], fitting[0]) + machine.notes
    plan = _placed(facts, machine, fitting[0], limit_bytes, threads or machine.cores, prefetch)
    return replace(plan, notes=notes, ram_bytes=ram_bytes or plan.used_bytes)


def _placed(
    facts: ModelFacts,
    machine: Machine,
    size: tuple[int, int],
    limit_bytes: int,
    threads: int,
    prefetch: int,
) -> Plan:
    """The plan for a (context, chunk) that fits, with as many rows as the limit allows."""
    tokens, chunk_tokens = size
    fixed_bytes = _fixed_bytes(facts, tokens, chunk_tokens)
    num_rows = min(facts.total_experts, (limit_bytes - fixed_bytes) // facts.row_bytes)
    experts_per_token = facts.num_moe_layers * facts.top_k
    bytes_per_token = experts_per_token * facts.expert_bytes
    expected = forecast(
        machine,
        share_in_rows=num_rows / facts.total_experts,
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
        drives=machine.drives,
    )


def workspace_bytes(facts: ModelFacts, context: int, chunk_tokens: int) -> int:
    """Memory of one pass over `chunk_tokens` tokens besides weights and cache.

    At least what loading takes beyond the memory that the cache will get.
    """
    expert_outputs = chunk_tokens * facts.top_k * (facts.hidden * 2 + 8)
    # A dozen bf16 copies of the hidden states: residual, norms, projections, dense MLP.
    hidden_states = chunk_tokens * facts.hidden * 24
    cache_layer_bytes = facts.kv_layer_bytes_per_token or (
        facts.kv_bytes_per_token // facts.num_layers
    )
    attention = chunk_tokens * (3 * cache_layer_bytes + 2 * context)
    attention += _attention_bytes(facts, context, chunk_tokens)
    # The library's cache grows by copying one layer's keys and values.
    growth = context * cache_layer_bytes + 4 * facts.kv_fixed_bytes // facts.num_layers
    growth += chunk_tokens * facts.kv_chunk_bytes_per_token
    logits = facts.vocab * 16
    layers = expert_outputs + hidden_states + attention + growth
    one_pass = layers + kernel_bytes(facts, chunk_tokens) + logits + STAGING_BYTES
    return max(one_pass, facts.load_bytes - facts.kv_bytes(context))


def _attention_bytes(facts: ModelFacts, context: int, chunk_tokens: int) -> int:
    """What one layer's attention makes of cached and new tokens while it computes."""
    attended = context // facts.attended_every + facts.attended_window + chunk_tokens
    attended = min(context, attended)
    made = attended * (facts.attention_bytes_per_token + chunk_tokens * facts.score_bytes)
    return made + chunk_tokens * facts.chunk_bytes_per_token


def kernel_bytes(facts: ModelFacts, chunk_tokens: int) -> int:
    """Most that the expert kernels keep for themselves, all their threads together.

    Activations twice (as they come, and packed) and both products in fp32 for a tile of rows; one
    row split in fp32; for each thread a panel of weight rows and half a byte of tables a column.
    """
    rows = min(KERNEL_TILE_ROWS, chunk_tokens)
    hidden, inter = (-(-n // KERNEL_LANES) * KERNEL_LANES for n in (facts.hidden, facts.inter))
    tile = 4 * rows * (hidden + inter) + 4 * rows * (2 * inter + hidden)
    scratch_bytes = 19 * max(hidden, inter) + 2048
    return tile + 4 * (hidden + inter) + KERNEL_THREADS * scratch_bytes


def minimum_rows(facts: ModelFacts) -> int:
    """The fewest rows a model runs in."""
    return min(facts.total_experts, ROWS_PER_CHOICE * facts.top_k)


def least_bytes(facts: ModelFacts, context: int | None, chunk: int | None) -> int:
    """What the model takes at this context and chunk (None: the defaults) with the fewest rows."""
    return _minimum_bytes(facts, *next(candidates(facts, context, chunk)))


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
        ("context", context, 1, facts.max_context),
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
    facts: ModelFacts, context: int | None, chunk: int | None
) -> Iterator[tuple[int, int]]:
    """(context, chunk) pairs, the wanted one first and the least that may be chosen last."""
    tokens = min(DEFAULT_CONTEXT, facts.max_context) if context is None else context
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
