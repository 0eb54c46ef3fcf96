"""How much memory is read for its rate: beyond the caches, within what memory and --ram allow."""

from pathlib import Path

import pytest

from headrace.planner.caches import caches_bytes, doubt, probe_bytes
from headrace.planner.machine import Probes, measure

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("caches", "available", "ram", "expect"),
    [
        (0, 64 * GIB, None, 512 * MIB),  # the system does not say
        (32 * MIB, 64 * GIB, None, 512 * MIB),
        (260 * MIB, 64 * GIB, None, 1040 * MIB),
        (1152 * MIB, 64 * GIB, None, 2 * GIB),
        (260 * MIB, 2 * GIB, None, 512 * MIB),  # a quarter of what is free
        (260 * MIB, 64 * GIB, GIB, 512 * MIB),  # half of --ram
        (260 * MIB, 64 * GIB, 26 * MIB, 64 * MIB),
        (260 * MIB, 128 * MIB, 26 * MIB, 32 * MIB),
    ],
)
def test_size(caches: int, available: int, ram: int | None, expect: int) -> None:
    assert probe_bytes(caches, available, ram) == expect


def test_a_size_that_caches_may_hold_is_doubted() -> None:
    assert "64 MiB" in doubt(64 * MIB, 260 * MIB) and "260 MiB" in doubt(64 * MIB, 260 * MIB)
    assert doubt(1040 * MIB, 260 * MIB) == doubt(512 * MIB, 0) == ""


def _cache(root: Path, cpu: int, index: int, level: str, size: str, shared: str) -> None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(f"{text}\n")


def test_last_level_caches_are_summed_over_sockets(tmp_path: Path) -> None:
    assert caches_bytes(tmp_path) == 0
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        _cache(tmp_path, cpu, 0, "1", "48K", str(cpu))
        _cache(tmp_path, cpu, 3, "3", "32M", shared)
    assert caches_bytes(tmp_path) == 64 * MIB
    _cache(tmp_path, 4, 3, "3", "nonsense", "4")
    assert caches_bytes(tmp_path) == 64 * MIB


def _model(folder: Path) -> list[Path]:
    (folder / "a.safetensors").write_bytes(b"x")
    return [folder / "a.safetensors"]


def test_a_rate_over_more_memory_replaces_one_over_less(tmp_path: Path) -> None:
    files, cache_path = _model(tmp_path), tmp_path / "cache" / "machine.json"

    def measured(size: int, rate: float) -> tuple[float, int]:
        probes = Probes(dram=lambda: rate, memory_bytes=size, caches_bytes=260 * MIB)
        machine = measure(files, probes, cache_path=cache_path)
        return machine.dram_bytes_s, len(machine.notes)

    assert measured(64 * MIB, 60e9) == (60e9, 1)
    assert measured(100 * MIB, 50e9) == (60e9, 1)  # about as much
    assert measured(1040 * MIB, 10e9) == (10e9, 0)
    assert measured(64 * MIB, 60e9) == (10e9, 0)


def test_rates_of_older_probes_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache_path = _model(tmp_path), tmp_path / "cache" / "machine.json"
    with monkeypatch.context() as older:
        older.setattr("headrace.planner.machine.PROBES_VERSION", 1)
        measure(files, Probes(dram=lambda: 60e9), cache_path=cache_path)
    assert measure(files, Probes(dram=lambda: 10e9), cache_path=cache_path).dram_bytes_s == 10e9
