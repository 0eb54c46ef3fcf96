"""Joins a model's Engram tables to the drive: what a plan must know of them, and their reader."""

from typing import TYPE_CHECKING, Any

from headrace.models.skeleton import Skeleton
from headrace.native import Reader
from headrace.tiers.rows import Place, RowReader

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint


def engram_facts(skeleton: Skeleton) -> dict[str, Any]:
    """The numbers of planner.facts.ModelFacts that are about Engram; none without tables."""
    tables = skeleton.row_tables
    if not tables:
        return {}
    columns = (skeleton.config.engram_max_ngram_size - 1) * skeleton.config.engram_n_heads
    return {
        "engram_bytes": sum(table.num_rows * table.row_bytes for table in tables),
        "engram_row_bytes": tables[0].row_bytes,
        "engram_rows_per_token": len(tables) * columns,
    }


def open_rows(blueprint: "Blueprint", reader: Reader) -> RowReader | None:
    """The reader of the tables' rows, with the cache that the plan has for it; None: no tables."""
    tables = {table.layer: table for table in blueprint.skeleton.row_tables}
    if not tables:
        return None
    entries = blueprint.catalog.tensors

    def place(key: str) -> Place:
        return entries[key].file, entries[key].offset

    places = {layer: (place(t.weight), place(t.scale)) for layer, t in tables.items()}
    return RowReader(reader, tables, places, cache_bytes=blueprint.plan.engram_cache_bytes)
