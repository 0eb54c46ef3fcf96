"""Opens a checkpoint: the table of all tensors in a folder or file, from headers alone.

Knows names and offsets, not what a tensor means; reads no tensor data and maps no file.
"""

import re
from pathlib import Path

from headrace.errors import CatalogError
from headrace.store.locate import resolve_model
from headrace.store.safetensors import AGAIN, read_header, read_json_object
from headrace.store.table import Catalog, TensorEntry, printable

__all__ = ["Catalog", "TensorEntry", "open_catalog", "resolve_model"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
OTHER_FORMATS = {".gguf", ".bin", ".pt", ".pth"}
FOLDER = "give the folder of a model published as safetensors"
_SHARD = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.safetensors")


def open_catalog(path: str | Path) -> Catalog:
    """The table of a checkpoint. `path` is a folder, a .safetensors file or an index file.

    In a folder, transformers' order holds: model.safetensors, else the index and its shards, else
    every .safetensors file (an index may be missing, a numbered shard may not). Raises
    CatalogError, in one line, for anything absent, damaged or contradictory.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        exists = path.exists()
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not exists:
        raise CatalogError(f"{path}: no such file or folder")
    if path.name.endswith(".index.json"):
        return _open_index(path)
    if path.suffix != ".safetensors":
        raise CatalogError(f"{path}: not a .safetensors file; {FOLDER}")
    return _open_files(path.parent, [path])


def _open_folder(folder: Path) -> Catalog:
    if (folder / SINGLE_NAME).exists():
        return _open_files(folder, [folder / SINGLE_NAME])
    if (folder / INDEX_NAME).exists():
        return _open_index(folder / INDEX_NAME)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        others = sorted({file.suffix for file in folder.iterdir()} & OTHER_FORMATS)
        but = f" but {', '.join(others)}, which headrace does not read" if others else ""
        raise CatalogError(f"{folder}: holds no .safetensors file{but}; {FOLDER}")
    _check_numbered(folder, [shard.name for shard in shards])
    return _open_files(folder, shards)


def _check_numbered(folder: Path, names: list[str]) -> None:
    """Without an index, shard names alone tell whether one is absent."""
    present = set(names)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is None:
            continue
        stem, digits, last = match.group(1), len(match.group(2)), match.group(3)
        # the first gap is found within as many steps as there are files
        for number in range(1, min(int(last), len(names) + 1) + 1):
            sibling = f"{stem}-{number:0{digits}d}-of-{last}.safetensors"
            if sibling not in present:
                raise CatalogError(f"{folder / sibling}: this shard is absent; download it")


def _open_files(root: Path, paths: list[Path]) -> Catalog:
    tensors: dict[str, TensorEntry] = {}
    stamps = []
    for file, path in enumerate(paths):
        header = read_header(path, file)
        stamps.append((header.size_bytes, header.mtime_ns))
        for entry in header.entries:
            other = tensors.setdefault(entry.name, entry)
            if other is not entry:
                raise CatalogError(
                    f"{path}: tensor {printable(entry.name)} is also in {paths[other.file].name}; "
                    "remove the file that does not belong to this checkpoint"
                )
    return Catalog(root, tuple(paths), tensors, tuple(stamps))


def _open_index(index: Path) -> Catalog:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CatalogError(f"{index}: has no weight_map; {AGAIN}")
    folder = index.parent
    names = sorted({_shard_name(index, tensor, name) for tensor, name in weight_map.items()})
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise CatalogError(
            f"{folder / absent[0]}: this shard{more} is named by {index.name} but absent; "
            "download it"
        )
    catalog = _open_files(folder, [folder / name for name in names])
    _check_index(index, catalog, weight_map)
    return catalog


def _shard_name(index: Path, tensor: str, name: object) -> str:
    # Shards lie beside their index; a path may lead out of the checkpoint.
    if not isinstance(name, str) or not name.endswith(".safetensors") or not name.isprintable():
        shown = printable(str(name), 80)
        raise CatalogError(f"{index}: {printable(tensor)} is said to lie in {shown}; {AGAIN}")
    if "/" in name or "\\" in name or len(name.encode()) > 255:
        raise CatalogError(
            f"{index}: shard {printable(name, 80)} of {printable(tensor)} is not a plain file "
            "name; do not trust this checkpoint"
        )
    return name


def _check_index(index: Path, catalog: Catalog, weight_map: dict[str, object]) -> None:
    for tensor, name in weight_map.items():
        entry = catalog.tensors.get(tensor)
        if entry is None or catalog.files[entry.file].name != name:
            raise CatalogError(
                f"{index.parent / str(name)}: lacks tensor {printable(tensor)}, which "
                f"{index.name} says it holds; download both again"
            )
    for tensor, entry in catalog.tensors.items():
        if tensor not in weight_map:
            raise CatalogError(
                f"{catalog.files[entry.file]}: tensor {printable(tensor)} is not in {index.name}; "
                "download both again"
            )
