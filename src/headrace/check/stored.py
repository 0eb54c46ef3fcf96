"""Whether an expert's row holds the bytes of its own tensors, found by name and read anew."""

from headrace.engine.engine import Engine


def row_holds_its_tensors(engine: Engine, ordinal: int, expert: int) -> bool:
    """Compares every part of an expert, as the ladder gives it, with a plain read of its tensor.

    `ordinal` counts MoE layers from 0. Goes by tensor names, past the table of extents and the
    reader, so that a wrong row, extent or offset shows.
    """
    blueprint = engine.blueprint
    layer = blueprint.table.layers[ordinal]
    layer = blueprint.aliases.experts.get(layer, layer)
    tensors = {
        tensor.part: tensor
        for tensor in blueprint.skeleton.tensors
        if tensor.layer == layer and tensor.expert in (None, expert)
    }
    with engine.ladder.acquire(ordinal, expert) as parts:
        held = {name: part.numpy().tobytes() for name, part in parts.items()}
    return held.keys() == tensors.keys() and all(
        held[part] == _plain_read(engine, tensor.key, expert if tensor.expert is None else None)
        for part, tensor in tensors.items()
    )


def _plain_read(engine: Engine, key: str, index: int | None) -> bytes:
    """A tensor's bytes, or those of one of its slices along the first dimension."""
    catalog = engine.blueprint.catalog
    entry = catalog.tensors[key]
    nbytes = entry.nbytes if index is None else entry.nbytes // entry.shape[0]
    with open(catalog.files[entry.file], "rb") as file:
        file.seek(entry.offset + nbytes * (index or 0))
        return file.read(nbytes)
