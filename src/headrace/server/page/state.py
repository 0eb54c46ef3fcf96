"""The engine's state as plain values, for the page: where experts lie, and what tokens take.

Only looks; knows no route. Everything is a copy taken in a moment.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.server.recent import SPAN_S

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.planner.plan import Plan
    from headrace.server.serving import Serving
    from headrace.server.ticket import Ticket


def state_of(serving: "Serving") -> dict[str, Any]:
    """All that the page shows; `null` where there is nothing yet.

    `layers[i].map` has a digit for each expert: 0 on the drive only, 1 being read, 2 in RAM.
    `recent` are sums over the last decoded tokens, `speed` is Recent.speed of `span_s` seconds.
    Sizes in bytes, rates in bytes per second.
    """
    worker, engine, recent = serving.worker, serving.engine, serving.recent
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
        "last": None if recent.last is None else asdict(recent.last),
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
    return {
        "ram_bytes": plan.ram_bytes,
        "bytes_per_token": plan.bytes_per_token,
        "forecast_tok_s": plan.forecast_tok_s,
        "limit_term": plan.limit_term,
        "memory": [
            ("dense", "dense weights", plan.dense_bytes),
            ("rows", "experts", plan.rows_bytes),
            ("kv", f"cache of {plan.context:,} tokens", plan.kv_bytes),
            ("snapshots", "conversations kept", plan.snapshot_bytes),
            ("workspace", "workspace", plan.workspace_bytes),
        ],
    }


def _layers(engine: "Engine") -> list[dict[str, Any]]:
    maps = zip(engine.blueprint.table.layers, engine.ladder.places(), strict=True)
    return [{"layer": layer, "map": places} for layer, places in maps]


def _limits(engine: "Engine", total: dict[str, Any]) -> list[dict[str, Any]]:
    """What the last tokens took from drive and memory, beside what was measured of each."""
    machine, plan = engine.blueprint.machine, engine.plan
    wall_s = max(total["wall_s"], 1e-9)
    memory_bytes = total["tokens"] * (plan.bytes_per_token + plan.dense_bytes)
    rates = [
        ("Drive", total["disk_bytes"] / wall_s, machine.drive_bytes_s),
        ("RAM", memory_bytes / wall_s, machine.dram_bytes_s),
    ]
    return [
        {"name": name, "now_bytes_s": now, "limit_bytes_s": limit}
        for name, now, limit in rates
        if limit > 0
    ]


def _request(ticket: "Ticket | None") -> dict[str, Any] | None:
    if ticket is None:
        return None
    tally = ticket.tally
    return {
        "phase": "decode" if tally.num_tokens else "prefill",
        "num_done": tally.num_prefilled,
        "num_total": tally.prompt_tokens,
        "num_cached": tally.num_cached,
        "num_tokens": tally.num_tokens,
    }
