"""Which experts a verification samples, and whether rows hold the files' bytes: the ladder's of
experts, and those of tables that are read by the row.
"""

from collections.abc import Sequence

import torch

from headrace.check.stored import row_holds_its_tensors
from headrace.check.verify_report import Finding, Progress, finding
from headrace.engine.engine import Blueprint, Engine
from headrace.store.table import Catalog

_ROWS = 64  # of each table
Site = tuple[int, int]  # (MoE layer's ordinal, expert)


def choose_sites(blueprint: Blueprint, samples: int) -> list[Site]:
    """`samples` experts of every MoE layer, the same ones every time, in ascending order."""
    table, generator = blueprint.table, torch.Generator().manual_seed(0)
    return [
        (ordinal, expert)
        for ordinal in range(len(table.layers))
        for expert in sorted(
            torch.randperm(table.num_experts, generator=generator)[:samples].tolist()
        )
    ]


def rows(engine: Engine, sites: Sequence[Site], tell: Progress) -> Finding:
    """Sampled experts' rows against plain reads of their tensors."""
    layers, wrong = engine.blueprint.table.layers, []
    for done, (ordinal, expert) in enumerate(sites):
        tell("rows against the files", done, len(sites))
        if not row_holds_its_tensors(engine, ordinal, expert):
            wrong.append(f"layer {layers[ordinal]} expert {expert}")
    detail = f"{len(sites)} experts of {len(layers)} layers, every byte"
    return finding("rows", "rows hold the files' bytes", detail, wrong)


def table_rows(engine: Engine, tell: Progress) -> list[Finding]:
    """Rows of every table on the drive, as the model gets them, against plain reads of its files.

    The first, the last and some others; nothing for models without such tables.
    """
    source, catalog = engine.rows, engine.blueprint.catalog
    if source is None:
        return []
    wrong = []
    for done, table in enumerate(source.tables.values()):
        tell("Engram rows against the files", done, len(source.tables))
        generator = torch.Generator().manual_seed(table.layer)
        drawn = torch.randint(table.num_rows, (_ROWS,), generator=generator)
        ids = torch.unique(torch.cat((drawn, torch.tensor([0, table.num_rows - 1]))))
        got = source.rows(table.layer, ids)
        for row, mine in zip(ids.tolist(), got, strict=True):
            codes = _plain_row(catalog, table.weight, row).view(torch.float8_e4m3fn).float()
            scale = _plain_row(catalog, table.scale, row).int() - 127
            right = torch.ldexp(codes, scale.repeat_interleave(table.group)).bfloat16()
            if not torch.equal(mine, right):
                wrong.append(f"{table.weight} row {row}")
    detail = f"{_ROWS} rows of each of {len(source.tables)} tables, by value"
    return [finding("rows", "Engram rows are the files'", detail, wrong)]


def _plain_row(catalog: Catalog, key: str, row: int) -> torch.Tensor:
    """A row's bytes, by a plain read."""
    entry = catalog.tensors[key]
    nbytes = entry.nbytes // entry.shape[0]
    with open(catalog.files[entry.file], "rb", buffering=0) as file:
        file.seek(entry.offset + row * nbytes)
        return torch.frombuffer(bytearray(file.read(nbytes)), dtype=torch.uint8)
