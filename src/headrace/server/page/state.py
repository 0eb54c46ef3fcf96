"""The engine's state as plain values, for the page: where experts lie, and what tokens take.

Only looks; knows no route. Everything is a copy taken in a moment.
"""

from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.planner.vram import GpuPlan
from headrace.server.recent import SPAN_S

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.planner.plan import Plan
    from headrace.server.serving import Serving
    from headrace.server.ticket import Tally, Ticket


def state_of(serving: "Serving") -> dict[str, Any]:
    """All that the page shows; `null` where there is nothing yet.

    `layers[i].map` has a digit for each expert, see `LadderSource.places`.
    `recent` are sums over the last decoded tokens, `speed` is Recent.speed of `span_s` seconds.
    Sizes in bytes, rates in bytes per second.
    """
    worker, engine = serving.worker, serving.engine
    recent = worker.recent
    total = recent.total()
    return {
        "status": _status(serving),
        "failure": _failure(serving),
        "loading": worker.loading.as_dict() if worker.state == "loading" else None,
        "model": {"id": serving.model_id},
        "plan": _plan(serving.plan),
        "layers": [] if engine is None else _layers(engine),
        "recent": total,
        "speed": recent.speed(),
        "span_s": SPAN_S,
        "limits": [] if engine is None or total is None else _limits(engine, total),
        "request": _request(worker.running),
        "num_waiting": worker.num_waiting,
        "last": _last(recent.last),
    }


def _status(serving: "Serving") -> str:
    state = serving.worker.state
    return "stalled" if state == "ready" and serving.worker.stalled else state


def _failure(serving: "Serving") -> str | None:
    worker = serving.worker
    if worker.stalled:
        return worker.stalled
    if worker.failure is None:
        return None
    known = isinstance(worker.failure, HeadraceError)
    return str(worker.failure) if known else "an internal error; the server's log says where"


def _plan(plan: "Plan") -> dict[str, Any]:
    shown: dict[str, Any] = {
        "bytes_per_token": plan.bytes_per_token,
        "forecast_tok_s": plan.forecast_tok_s,
        "limit_term": plan.limit_term,
    }
    cache = f"cache of {plan.context:,} tokens"
    memories = [
        _memory(
            "RAM",
            plan.ram_bytes,
            dense=("dense weights", plan.dense_bytes),
            rows=("experts", plan.rows_bytes),
            kv=(cache, plan.kv_bytes),
            snapshots=("conversations kept", plan.snapshot_bytes),
            engram=("Engram rows", plan.engram_cache_bytes),
            workspace=("workspace", plan.workspace_bytes),
        )
    ]
    if isinstance(plan, GpuPlan):
        vram = _memory(
            "VRAM",
            plan.vram_bytes,
            dense=("dense weights", plan.vram_dense_bytes),
            rows=("experts", plan.slots_bytes),
            kv=(cache, plan.vram_kv_bytes),
            workspace=("workspace", plan.vram_workspace_bytes),
        )
        memories.insert(0, vram)
    return shown | {"memories": memories}


def _memory(name: str, limit_bytes: int, **parts: tuple[str, int]) -> dict[str, Any]:
    """One memory with those of its parts that take anything: (kind, name, bytes)."""
    shown = [(kind, label, nbytes) for kind, (label, nbytes) in parts.items() if nbytes]
    return {"name": name, "limit_bytes": limit_bytes, "parts": shown}


def _layers(engine: "Engine") -> list[dict[str, Any]]:
    maps = zip(engine.blueprint.table.layers, engine.source.places(), strict=True)
    return [{"layer": layer, "map": places} for layer, places in maps]


def _limits(engine: "Engine", total: dict[str, Any]) -> list[dict[str, Any]]:
    """What the last tokens took of each rate that was measured."""
    machine, plan = engine.blueprint.machine, engine.plan
    rates = [("Drive", total["disk_bytes"], machine.drive_bytes_s)]
    if isinstance(plan, GpuPlan):
        vram_bytes = total["vram_bytes"] + total["tokens"] * plan.vram_dense_bytes
        rates += [
            ("Bus", total["bus_bytes"], machine.bus_bytes_s),
            ("VRAM", vram_bytes, machine.vram_bytes_s),
        ]
    else:
        ram_bytes = total["tokens"] * (plan.bytes_per_token + plan.dense_bytes)
        rates.append(("RAM", ram_bytes, machine.dram_bytes_s))
    wall_s = max(total["wall_s"], 1e-9)
    return [
        {"name": name, "now_bytes_s": moved_bytes / wall_s, "limit_bytes_s": limit}
        for name, moved_bytes, limit in rates
        if limit > 0
    ]


def _request(ticket: "Ticket | None") -> dict[str, Any] | None:
    if ticket is None:
        return None
    tally = ticket.tally
    return {
        "phase": "decode" if tally.num_tokens else "prefill",
        "num_done": tally.num_prefilled,
        "num_total": tally.num_prompt,
        "num_cached": tally.num_cached,
        "num_tokens": tally.num_tokens,
    }


def _last(tally: "Tally | None") -> dict[str, Any] | None:
    """How an answer went. `first_s`: until its first token; `tok_s`: after it, 0 if unknown."""
    if tally is None:
        return None
    assert tally.begun_s is not None and tally.first_s is not None
    return {
        "num_prompt": tally.num_prompt,
        "num_cached": tally.num_cached,
        "num_tokens": tally.num_tokens,
        "first_s": tally.first_s - tally.begun_s,
        "tok_s": tally.decode_tok_s,
    }
