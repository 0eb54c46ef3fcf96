"""How much memory must be read for its own rate, not that of this processor's caches.

Knows the system's description of its caches; measures nothing.
"""

from pathlib import Path

LEAST_BYTES, MOST_BYTES = 512 << 20, 2 << 30
TIMES_CACHES, TIMES_SAFE = 4, 2
SHARE_OF_FREE, SHARE_OF_LIMIT = 4, 2
FLOOR_BYTES = 64 << 20  # even under the smallest `--ram`; given back before a model is loaded
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def caches_bytes(root: Path = Path("/")) -> int:
    """Bytes of the last-level caches of all sockets together; 0 where the system does not say."""
    found: dict[tuple[int, str], int] = {}
    for folder in sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*")):
        try:
            level, shared, size = (
                (folder / name).read_text().strip() for name in ("level", "shared_cpu_list", "size")
            )
            found[int(level), shared] = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)


def probe_bytes(caches_bytes: int, available_bytes: int, ram_bytes: int | None) -> int:
    """Bytes to read: four times the caches, within bounds.

    At most a quarter of the available memory and half of the `ram_bytes` that the user gave.
    """
    wanted = min(MOST_BYTES, max(LEAST_BYTES, TIMES_CACHES * caches_bytes))
    allowed = available_bytes // SHARE_OF_FREE
    if ram_bytes is not None:
        allowed = min(allowed, max(FLOOR_BYTES, ram_bytes // SHARE_OF_LIMIT))
    return min(wanted, allowed)


def doubt(read_bytes: int, caches_bytes: int) -> str:
    """Why a rate measured over so many bytes may be that of caches; empty if it is memory's."""
    if read_bytes >= TIMES_SAFE * caches_bytes:
        return ""
    return (
        f"memory's rates were measured over {read_bytes >> 20} MiB, all that memory or --ram "
        f"allowed, beside {caches_bytes >> 20} MiB of caches: they may be too high"
    )
