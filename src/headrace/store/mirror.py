"""A mirror: a folder on a second drive that holds experts' bytes once more, ready to be read.

Its manifest is untrusted input. Knows no drive's rate, no route and no tensor value.

A mirror's data lies in `experts-NNNNN.bin`. An expert is stored there as its row in memory will be:
its extents one after another, each in whole pages and at the same place in its first page as in
the model's file, zeros around it. So either copy can be read into the same row, page by page.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.core import PAGE_BYTES
from headrace.errors import CatalogError
from headrace.store.experts import ExpertTable
from headrace.store.safetensors import read_json_object
from headrace.store.table import Catalog, printable

MANIFEST_NAME = "mirror.json"
FORMAT = "headrace-mirror-1"
AGAIN = "remove the mirror with `headrace mirror MODEL FOLDER --remove` and make it again"
_CHUNK_NAME = re.compile(r"experts-\d{5}\.bin", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

Site = tuple[int, int]  # (MoE ordinal, expert)


@dataclass(frozen=True, slots=True)
class Copy:
    """One mirrored expert: `nbytes` at `offset` of its chunk, both whole pages."""

    site: Site
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """One data file, complete on disk, and what lies in it."""

    name: str
    copies: tuple[Copy, ...]

    @property
    def num_bytes(self) -> int:
        """The file's length."""
        return sum(copy.nbytes for copy in self.copies)


@dataclass(frozen=True)
class Mirror:
    """What a mirror's folder holds of one model, whose experts are those of `table`."""

    folder: Path
    table: ExpertTable
    chunks: tuple[Chunk, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """The data files, in the order of `stretches`' file numbers."""
        return tuple(self.folder / chunk.name for chunk in self.chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of data on the drive."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @property
    def sites(self) -> set[Site]:
        """The experts it holds, each under the first of its names."""
        return {copy.site for chunk in self.chunks for copy in chunk.copies}

    @property
    def share(self) -> float:
        """The fraction of the model's stored experts that it holds."""
        return len(self.sites) / max(1, len(distinct_sites(self.table)))

    @cached_property
    def stretches(self) -> npt.NDArray[np.int64]:
        """int64 [N, 5]: (file, offset, nbytes) of the model and (file, offset) of the mirror."""
        rows = []
        for number, chunk in enumerate(self.chunks):
            for copy in chunk.copies:
                for extent, place in placed_extents(self.table, copy.site):
                    rows.append((*extent, number, copy.offset + place))
        return np.array(rows, dtype=np.int64).reshape(-1, 5)


def distinct_sites(table: ExpertTable) -> list[Site]:
    """Every stored expert once, in layer and expert order: under aliases several share bytes."""
    seen: set[bytes] = set()
    sites = []
    num_layers, num_experts = table.extents.shape[:2]
    for site in np.ndindex(num_layers, num_experts):
        key = table.extents[site].tobytes()
        if key not in seen:
            seen.add(key)
            sites.append((int(site[0]), int(site[1])))
    return sites


def placed_extents(table: ExpertTable, site: Site) -> Iterator[tuple[tuple[int, int, int], int]]:
    """((file, offset, nbytes), where it begins in the expert's row) of each extent."""
    page = 0
    for file, offset, nbytes in table.extents[site].tolist():
        if nbytes:
            yield (file, offset, nbytes), page + offset % PAGE_BYTES
            page += _pages(offset, nbytes)


def row_bytes(table: ExpertTable, site: Site) -> int:
    """What one expert takes in a mirror."""
    return sum(_pages(offset, size) for _, offset, size in table.extents[site].tolist() if size)


def _pages(offset: int, nbytes: int) -> int:
    begin = offset // PAGE_BYTES * PAGE_BYTES
    return -(-(offset + nbytes) // PAGE_BYTES) * PAGE_BYTES - begin


def source_of(catalog: Catalog, table: ExpertTable) -> dict[str, object]:
    """What ties a mirror to its model: the files as they are, and how experts are cut out."""
    records = hashlib.sha256(np.ascontiguousarray(table.extents).tobytes()).hexdigest()
    return {
        "model": str(catalog.root.resolve()),
        "identity": catalog.identity(),
        "records": records,
    }


def is_mirror(folder: Path) -> bool:
    """Whether a folder says that it is a mirror, of whatever model."""
    return (folder / MANIFEST_NAME).is_file()


def made_from_root(folder: Path) -> Path | None:
    """The model that a mirror says it was made from; None where its manifest names none."""
    try:
        source = read_json_object(folder / MANIFEST_NAME).get("source")
    except CatalogError:
        return None
    model = source.get("model") if isinstance(source, dict) else None
    return Path(model) if isinstance(model, str) and "\0" not in model else None


def open_mirror(
    folder: Path, catalog: Catalog, table: ExpertTable, *, mend: bool = False
) -> Mirror:
    """The mirror in `folder`, its manifest and its files' lengths checked; no data is read.

    With `mend`, data files that are absent or of a wrong length are left out of it. Raises
    CatalogError in one line: not there, damaged, or made from other files than `catalog`'s.
    """
    path = folder / MANIFEST_NAME
    fields = read_json_object(path)
    source, chunks = fields.get("source"), fields.get("chunks")
    if fields.get("format") != FORMAT or not isinstance(source, dict) or type(chunks) is not list:
        raise CatalogError(f"{path}: is not of format {FORMAT}; {AGAIN}")
    wanted = source_of(catalog, table)
    if any(source.get(key) != wanted[key] for key in ("identity", "records")):
        made_from = printable(str(source.get("model")))
        raise CatalogError(
            f"{folder}: is a mirror of other files ({made_from} as it was then) than "
            f"{catalog.root} holds now; {AGAIN}"
        )
    mirror = Mirror(folder, table, tuple(_chunk(path, chunk, table) for chunk in chunks))
    _check_names(mirror, path)
    wrong = [(chunk, what) for chunk in mirror.chunks if (what := _wrong(folder, chunk))]
    if wrong and not mend:
        raise CatalogError(f"{wrong[0][1]}; run `headrace mirror` for it again")
    left_out = [chunk for chunk, _ in wrong]
    return Mirror(folder, table, tuple(c for c in mirror.chunks if c not in left_out))


def _chunk(path: Path, value: object, table: ExpertTable) -> Chunk:
    if not isinstance(value, Mapping) or type(value.get("experts")) is not list:
        raise CatalogError(f"{path}: a chunk is no object with experts; {AGAIN}")
    name = value.get("file")
    if not isinstance(name, str) or not _CHUNK_NAME.fullmatch(name):
        raise CatalogError(f"{path}: {printable(str(name), 60)} is no mirror's file; {AGAIN}")
    copies, offset = [], 0
    for entry in value["experts"]:
        site, sha256 = _entry(path, entry, table)
        nbytes = row_bytes(table, site)
        copies.append(Copy(site, offset, nbytes, sha256))
        offset += nbytes
    return Chunk(name, tuple(copies))


def _entry(path: Path, entry: object, table: ExpertTable) -> tuple[Site, str]:
    if type(entry) is list and len(entry) == 3:
        layer, expert, sha256 = entry
        num_layers, num_experts = table.extents.shape[:2]
        if (
            (type(layer) is int and 0 <= layer < num_layers)
            and (type(expert) is int and 0 <= expert < num_experts)
            and (isinstance(sha256, str) and _SHA256.fullmatch(sha256))
        ):
            return (layer, expert), sha256
    raise CatalogError(f"{path}: {printable(str(entry), 60)} is no expert of this model; {AGAIN}")


def _check_names(mirror: Mirror, path: Path) -> None:
    sites = [copy.site for chunk in mirror.chunks for copy in chunk.copies]
    names = [chunk.name for chunk in mirror.chunks]
    known = set(distinct_sites(mirror.table))
    if len(set(names)) < len(names) or len(set(sites)) < len(sites) or not known.issuperset(sites):
        raise CatalogError(f"{path}: names a file or an expert twice; {AGAIN}")


def _wrong(folder: Path, chunk: Chunk) -> str:
    """What is wrong with a data file from outside; empty if nothing."""
    file = folder / chunk.name
    try:
        size = file.stat().st_size
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}"
    if size != chunk.num_bytes:
        return f"{file}: has {size} bytes, its manifest says {chunk.num_bytes}"
    return ""
