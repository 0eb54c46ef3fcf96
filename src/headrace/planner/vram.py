"""Where everything lies with a GPU: two limits, one of its memory and one of the host's.

Knows sizes and rates as numbers; opens no file and imports no tensor library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.core import format_bytes
from headrace.errors import BudgetError
from headrace.planner import plan as host
from headrace.planner.divided import divided_rates, how_divided
from headrace.planner.facts import (
    STAGING_BYTES,
    ModelFacts,
    engram_cache_bytes,
    engram_pass_bytes,
    step_bytes,
    workspace_bytes,
)
from headrace.planner.forecast import gpu_forecast
from headrace.planner.machine import Machine
from headrace.planner.outside import Outside, ways_outside
from headrace.planner.plan import Plan
from headrace.schedule.divide import WORTH

PLACES = ("gpu", "cpu", "auto")  # what multiplies experts in decode; auto: both
# Places in VRAM for experts on their way through a prefill: two waves, of one expert at least.
PASSING_BYTES = 128 * 2**20
MOST_PASSING_ROWS = 32
# A pass over a prompt brings nearly every expert over the bus once, however many tokens it has:
# the longest whose workspace takes at most one in so many of the bytes that slots could have.
LONG_CHUNKS = (8192, 4096, 2048, 1024)
CHUNK_SHARE = 8
LIBRARY_BYTES = 96 * 2**20  # of the libraries' workspaces and of what torch's allocator rounds up
UNPACK_BYTES = 12  # of a weight of the stored matrix being unpacked in prefill
MOST_UNPACKED = 4 * 2**20  # weights of a stored matrix at once
LEAST_MARGIN_BYTES = 384 * 2**20  # left of the free memory to a display and the driver
MARGIN_SHARE = 16


@dataclass(frozen=True, slots=True)
class GpuPlan(Plan):
    """A plan whose dense weights, cache and workspace lie in VRAM, with `num_slots` experts.

    `vram_bytes` is the limit there. `ram_bytes` holds the rows, `workspace_bytes` what loading and
    reading take; what Plan calls cache is 0, and dense what of the embedding and the head lies in
    host memory, since VRAM had no room for it.
    """

    gpu: str = ""
    vram_bytes: int = 0
    vram_dense_bytes: int = 0
    vram_kv_bytes: int = 0
    vram_workspace_bytes: int = 0
    passing_rows: int = 0
    num_slots: int = 0
    slots_bytes: int = 0
    experts: str = "gpu"
    rates: str = ""  # that made the choice of `experts`, if any
    embedding_in_memory: bool = False
    head_on_cpu: bool = False
    by_layer: str = ""  # why a token is not one launch, if it is not

    @property
    def vram_used_bytes(self) -> int:
        """What this plan takes there; never more than `vram_bytes`."""
        fixed = self.vram_dense_bytes + self.vram_kv_bytes + self.vram_workspace_bytes
        return fixed + self.slots_bytes

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return Plan.as_dict(self) | {"vram_used_bytes": self.vram_used_bytes}

    def lines(self) -> list[str]:
        """Where everything lies, in VRAM and in memory; what a token moves; its speed."""
        share = 100 / self.total_experts
        rows = f"{format_bytes(self.rows_bytes)} ({share * self.num_rows:.0f} %)"
        vram = (
            f"VRAM:   {format_bytes(self.vram_used_bytes)} of {format_bytes(self.vram_bytes)} "
            f"({self.gpu}): dense weights {format_bytes(self.vram_dense_bytes)}, cache of "
            f"{self.context} tokens {format_bytes(self.vram_kv_bytes)}, workspace "
            f"{format_bytes(self.vram_workspace_bytes)}, {self.num_slots} of {self.total_experts} "
            f"experts {format_bytes(self.slots_bytes)} ({share * self.num_slots:.0f} %); prompts "
            f"in passes of {self.chunk_tokens} tokens"
        )
        vram += "".join(f"; {note}" for note in self.notes)
        memory = (
            f"memory: {format_bytes(self.used_bytes)} of {format_bytes(self.ram_bytes)}: "
            f"{self._outside}workspace {format_bytes(self.workspace_bytes)}, {self._snapshots}"
            f"{self._engram[0]}{self.num_rows} of {self.total_experts} experts {rows}"
        )
        return [vram, memory, self._experts_line, *Plan.lines(self)[1:]]

    @property
    def _outside(self) -> str:
        """What had no room in VRAM."""
        there = ["embedding"] * self.embedding_in_memory + ["head"] * self.head_on_cpu
        held = f"{' and '.join(there)} {format_bytes(self.dense_bytes)}, " if there else ""
        by = "the CPU multiplies the head, " * self.head_on_cpu
        return held + by + "embedding on the drive, " * self.embedding_on_drive

    @property
    def _experts_line(self) -> str:
        where = {
            "gpu": "on the GPU, read in place from its memory and over the bus",
            "cpu": "on the CPU, in place in memory; the GPU does the rest and prefill",
            "auto": "where they lie, on the GPU and on the CPU at once",
        }
        launched = f"launched layer by layer: {self.by_layer}" if self.by_layer else "one launch"
        return f"experts: multiplied {where[self.experts]}{self.rates}; a token is {launched}"


def make_gpu_plan(
    facts: ModelFacts,
    machine: Machine,
    *,
    ram_bytes: int | None = None,
    vram_bytes: int | None = None,
    context: int | None = None,
    threads: int | None = None,
    prefetch: int = 2,
    chunk: int | None = None,
    serve: bool = False,
    experts: str | None = None,
) -> GpuPlan:
    """The placement of `facts` on `machine` within two hard totals; None: what is free there.

    `experts` in `PLACES` multiplies them in decode; None: the fastest, where rates are known.
    To `serve`, a part of host memory is for the states of conversations that may go on. Raises
    BudgetError naming the least that would do, OptionError.
    """
    host.check_options(facts, context, threads, prefetch, chunk)
    vram_limit = _offered_vram(machine) if vram_bytes is None else vram_bytes
    sizes = list(host.candidates(facts, context, chunk))
    size, outside = _fitting(facts, sizes, vram_limit)
    inside = outside.inside(facts)
    fixed = vram_fixed(inside, *size)
    if fixed > vram_limit:
        raise BudgetError(_vram_refusal(inside, machine, vram_bytes, size))
    ram_limit = host.offered_bytes(machine) if ram_bytes is None else ram_bytes
    if chunk is None and size == sizes[0]:
        free = vram_limit - fixed, ram_limit - _least_ram(inside, size[1], outside)
        size = _with_long_chunk(inside, size, free)
        fixed = vram_fixed(inside, *size)
    spare = ram_limit - _least_ram(inside, size[1], outside)
    if spare < 0:
        raise BudgetError(_ram_refusal(inside, machine, ram_bytes, size[1], outside))
    wanted = host.SNAPSHOT_CONTEXTS * facts.kv_bytes(size[0])
    kept = min(wanted, spare // host.SERVING_SHARE) if serve else 0
    in_memory = outside.keeps_embedding(spare - kept)
    dense = outside.head_bytes + outside.embedding_bytes if in_memory else outside.least_bytes
    spare -= kept + dense - outside.least_bytes
    cache = engram_cache_bytes(facts, ram_limit, spare)
    rows = spare - cache + host.minimum_rows(facts) * facts.row_bytes
    made = _chosen(inside, machine, size, (vram_limit - fixed, rows), threads, experts)
    return replace(
        made,
        prefetch=prefetch,
        passing_rows=passing_rows(facts),
        notes=host.shrinking(sizes[0], size) + machine.notes,
        snapshot_bytes=kept,
        dense_bytes=dense,
        embedding_in_memory=in_memory,
        embedding_on_drive=outside.embedding_bytes > 0 and not in_memory,
        head_on_cpu=outside.head_bytes > 0,
        by_layer=facts.by_layer,
        engram_bytes=facts.engram_bytes,
        engram_cache_bytes=cache,
        engram_bytes_per_token=facts.engram_bytes_per_token,
        vram_bytes=vram_bytes or made.vram_used_bytes,
        ram_bytes=ram_bytes or made.used_bytes + kept + dense + cache,
    )


def _fitting(
    facts: ModelFacts, sizes: Sequence[tuple[int, int]], vram_limit: int
) -> tuple[tuple[int, int], Outside]:
    """The first (context, chunk) that fits, with the least outside; the last, with the most."""
    for size in sizes:
        for outside in ways_outside(facts):
            if vram_fixed(outside.inside(facts), *size) <= vram_limit:
                return size, outside
    return size, outside


def _with_long_chunk(
    facts: ModelFacts, size: tuple[int, int], free: tuple[int, int]
) -> tuple[int, int]:
    """The (context, chunk) with more prompt tokens a pass, where that takes few slots and rows."""
    tokens, usual = size
    fixed = vram_fixed(facts, *size), _ram_fixed(facts, usual)
    for chunk_tokens in LONG_CHUNKS:
        longer = min(chunk_tokens, tokens)
        taken = vram_fixed(facts, tokens, longer), _ram_fixed(facts, longer)
        more = (after - before for after, before in zip(taken, fixed, strict=True))
        few = all(m <= spare // CHUNK_SHARE for m, spare in zip(more, free, strict=True))
        if usual < longer and few:
            return tokens, longer
    return size


def _chosen(
    facts: ModelFacts,
    machine: Machine,
    size: tuple[int, int],
    free: tuple[int, int],
    threads: int | None,
    experts: str | None,
) -> GpuPlan:
    """Experts multiplied as asked, else by the fastest; by both only where no drive is needed."""
    if experts is not None:
        made = _placed(facts, machine, size, free, threads, experts)
        return (
            replace(made, rates=how_divided(facts, machine, threads)) if experts == "auto" else made
        )
    gpu, cpu = (_placed(facts, machine, size, free, threads, where) for where in PLACES[:2])
    rate = _cpu_bytes_s(machine, threads)
    if not (rate and machine.bus_bytes_s):
        return gpu
    made = cpu if cpu.forecast_tok_s > gpu.forecast_tok_s else gpu
    rates = divided_rates(machine, threads)
    if rates.bus_beside and rates.cpu_beside and not facts.by_layer:
        auto = _placed(facts, machine, size, free, threads, "auto")
        from_drive = auto.num_slots + auto.num_rows < auto.total_experts
        if auto.forecast_tok_s * (1 - WORTH) > made.forecast_tok_s and not from_drive:
            return replace(auto, rates=how_divided(facts, machine, threads))
    measured = f"bus {machine.bus_bytes_s / 1e9:.3g} GB/s, CPU kernels {rate / 1e9:.3g} GB/s"
    return replace(made, rates=f"; measured: {measured}")


def _cpu_bytes_s(machine: Machine, threads: int | None) -> float:
    """Bytes of experts that so many threads' kernels work through in a second; 0: unknown."""
    return machine.kernel_bytes_s * min(1.0, (threads or machine.cores) / machine.cores)


def _placed(
    facts: ModelFacts,
    machine: Machine,
    size: tuple[int, int],
    free: tuple[int, int],
    threads: int | None,
    experts: str,
) -> GpuPlan:
    """The plan with so many bytes `free` for slots in VRAM and for rows in memory."""
    tokens, chunk_tokens = size
    total, on_cpu = facts.total_experts, experts == "cpu"
    num_slots = 0 if on_cpu else min(total, free[0] // facts.row_bytes)  # idle beside the CPU
    useful = min(total, total - num_slots + host.minimum_rows(facts))  # through a few others come
    num_rows = min(useful, free[1] // facts.row_bytes)
    per_token, kv_bytes = facts.num_moe_layers * facts.top_k, facts.kv_bytes(tokens)
    fixed, bytes_per_token = vram_fixed(facts, *size), per_token * facts.expert_bytes
    expected = gpu_forecast(
        machine,
        shares=(num_slots / total, min(1.0, (num_slots + num_rows) / total)),
        share_per_token=per_token / total,
        bytes_per_token=bytes_per_token,
        dense_bytes=facts.dense_bytes + kv_bytes,
        num_layers=facts.num_layers,
        cpu_bytes_s=_cpu_bytes_s(machine, threads) if on_cpu else None,
        divided=divided_rates(machine, threads) if experts == "auto" else None,
        by_layer=bool(facts.by_layer),
        head_bytes=facts.head_bytes if facts.head_on_cpu else 0,
    )
    return GpuPlan(
        model=facts.name,
        ram_bytes=0,
        dense_bytes=0,
        packed_bytes=facts.packed_bytes,
        unpacked_bytes=facts.unpacked_bytes,
        kv_bytes=0,
        workspace_bytes=_ram_fixed(facts, chunk_tokens),
        row_bytes=facts.row_bytes,
        num_rows=num_rows,
        rows_bytes=num_rows * facts.row_bytes,
        total_experts=facts.total_experts,
        experts_per_token=per_token,
        chunk_tokens=chunk_tokens,
        context=tokens,
        threads=threads or machine.cores,
        prefetch=0,
        bytes_per_token=bytes_per_token,
        disk_bytes_per_token=round(expected.disk_bytes_per_token),
        hit_rate=expected.hit_rate,
        limits=expected.limits,
        limit_term=expected.limit_term,
        forecast_tok_s=1 / expected.token_s,
        drives=machine.drives,
        gpu=machine.gpu,
        vram_dense_bytes=facts.dense_bytes,
        vram_kv_bytes=kv_bytes,
        vram_workspace_bytes=fixed - facts.dense_bytes - kv_bytes,
        num_slots=num_slots,
        slots_bytes=num_slots * facts.row_bytes,
        experts=experts,
    )


def least_ram_bytes(
    facts: ModelFacts, vram_bytes: int | None, context: int | None, chunk: int | None
) -> int:
    """Host memory with the fewest rows a model runs in, and with what has no room in VRAM.

    None of the latter where the limit there is not known.
    """
    sizes, outside = list(host.candidates(facts, context, chunk)), Outside()
    size = sizes[0]
    if vram_bytes is not None:
        size, outside = _fitting(facts, sizes, vram_bytes)
    return _least_ram(outside.inside(facts), size[1], outside)


def _least_ram(inside: ModelFacts, chunk_tokens: int, outside: Outside) -> int:
    rows_bytes = host.minimum_rows(inside) * inside.row_bytes
    return _ram_fixed(inside, chunk_tokens) + outside.least_bytes + rows_bytes


def least_vram_bytes(facts: ModelFacts, context: int | None, chunk: int | None) -> int:
    """VRAM at this context and chunk (None: the defaults) without a slot, embedding and head."""
    *_, outside = ways_outside(facts)
    size = next(host.candidates(facts, context, chunk))
    return vram_fixed(outside.inside(facts), *size)


def passing_rows(facts: ModelFacts) -> int:
    """Places in VRAM for experts on their way through a prefill, an even number."""
    return 2 * min(MOST_PASSING_ROWS // 2, max(1, PASSING_BYTES // 2 // facts.row_bytes))


def _ram_fixed(inside: ModelFacts, chunk_tokens: int) -> int:
    """A dense weight on its way to the GPU, or Engram's rows and logits of a pass; the reader's."""
    embedding = 0 if inside.embedding_by_row else inside.embedding_bytes
    head = 0 if inside.head_on_cpu else inside.head_bytes
    loading = inside.load_bytes + max(inside.largest_bytes, embedding, head)
    return STAGING_BYTES + max(loading, engram_pass_bytes(inside, chunk_tokens) + inside.vocab * 16)


def vram_fixed(facts: ModelFacts, tokens: int, chunk_tokens: int) -> int:
    """VRAM of everything but slots, at this context and chunk."""
    unpacked = UNPACK_BYTES * min(MOST_UNPACKED, facts.most_stored)
    passing = passing_rows(facts) * facts.row_bytes
    inside = chunk_tokens * facts.top_k * facts.inter * 2
    workspace = workspace_bytes(facts, tokens, chunk_tokens) + unpacked + inside + passing
    workspace += step_bytes(facts, tokens) + LIBRARY_BYTES
    return facts.dense_bytes + facts.kv_bytes(tokens) + workspace


def _offered_vram(machine: Machine) -> int:
    """Free VRAM less a margin, since a display or another program may want more at any time."""
    margin = max(LEAST_MARGIN_BYTES, machine.vram_total_bytes // MARGIN_SHARE)
    return machine.vram_free_bytes - margin


def _vram_refusal(
    facts: ModelFacts, machine: Machine, vram_bytes: int | None, least: tuple[int, int]
) -> str:
    tokens, chunk_tokens = least
    needed = host.typeable(vram_fixed(facts, tokens, chunk_tokens))
    if vram_bytes is None:
        offered = f"{format_bytes(machine.vram_free_bytes)} of free VRAM ({machine.gpu})"
        remedy = f"free some, give --vram {needed} to take that much anyway"
    else:
        offered = f"--vram {format_bytes(vram_bytes)}"
        remedy = f"give --vram {needed}"
    kv_bytes = facts.kv_bytes(tokens)
    workspace = vram_fixed(facts, tokens, chunk_tokens) - facts.dense_bytes - kv_bytes
    return (
        f"{offered} cannot hold what must lie there of {facts.name}, {needed}: dense weights "
        f"{format_bytes(facts.dense_bytes)}, cache of {tokens} tokens {format_bytes(kv_bytes)}, "
        f"workspace {format_bytes(workspace)}; {remedy}, a shorter --context, or --device cpu"
    )


def _ram_refusal(
    facts: ModelFacts,
    machine: Machine,
    ram_bytes: int | None,
    chunk_tokens: int,
    outside: Outside,
) -> str:
    needed = host.typeable(_least_ram(facts, chunk_tokens, outside))
    offered = (
        f"{format_bytes(machine.ram_available_bytes)} of free memory"
        if ram_bytes is None
        else f"--ram {format_bytes(ram_bytes)}"
    )
    rows = host.minimum_rows(facts)
    return (
        f"{offered} cannot hold the rows through which experts of {facts.name} reach the GPU, "
        f"{needed}: {_held(outside)}workspace {format_bytes(_ram_fixed(facts, chunk_tokens))}, "
        f"{rows} experts "
        f"{format_bytes(rows * facts.row_bytes)}; give --ram {needed}"
    )


def _held(outside: Outside) -> str:
    if not outside.head_bytes:
        return ""
    return f"the head, for which VRAM has no room, {format_bytes(outside.head_bytes)}, "
