"""What `bench` reads of the machine, from small copies of /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode_hpc.bench.machine import DEFAULT_CACHE_BYTES, last_level_caches, look_at_machine

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def add_core(root: Path, core: int, l3_shared: str, siblings: str) -> None:
    cpu = f"sys/devices/system/cpu/cpu{core}"
    caches = [("1", "Data", "32K", siblings), ("1", "Instruction", "64M", siblings), ("2", "Unified", "1M", siblings),
              ("3", "Unified", "16384K", l3_shared)]  # fmt: skip
    for index, (level, kind, size, shared) in enumerate(caches):
        folder = f"{cpu}/cache/index{index}"
        write(root, {f"{folder}/level": level, f"{folder}/type": kind, f"{folder}/size": size,
                     f"{folder}/shared_cpu_list": shared})  # fmt: skip
    write(root, {f"{cpu}/topology/thread_siblings_list": siblings})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two NUMA nodes of two cores each with two threads; a last-level cache a node."""
    for core in range(8):
        add_core(tmp_path, core, "0-1,4-5" if core % 4 < 2 else "2-3,6-7", f"{core % 4},{core % 4 + 4}")
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU 9000\nmodel name\t: Test CPU 9000",
            "proc/loadavg": "1.25 0.50 0.10 1/100 4242",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
            "sys/devices/system/node/node0/cpulist": "0-1,4-5",
            "sys/devices/system/node/node1/cpulist": "2-3,6-7",
            "sys/devices/system/node/possible": "0-1",
        },
    )
    return tmp_path


def test_the_machine_as_linux_tells_it(root: Path) -> None:
    machine = look_at_machine((0, 1, 4), root)
    assert machine.processor == "Test CPU 9000"
    assert machine.num_physical_cores == 2
    assert machine.numa_nodes == (0,)
    assert (machine.cache_bytes, machine.cache_is_read) == (16 * MIB, True)
    assert machine.huge_page_mode == "madvise"
    assert machine.load_average == 1.25


def test_all_caches_that_the_mask_reaches_count(root: Path) -> None:
    assert last_level_caches((1, 2), root) == [16 * MIB, 16 * MIB]
    assert look_at_machine(tuple(range(8)), root).cache_bytes == 32 * MIB
    assert look_at_machine(tuple(range(8)), root).numa_nodes == (0, 1)


def test_a_silent_machine_gets_the_default_cache(tmp_path: Path) -> None:
    machine = look_at_machine((0, 1), tmp_path)
    assert (machine.cache_bytes, machine.cache_is_read) == (DEFAULT_CACHE_BYTES, False)
    assert (machine.numa_nodes, machine.huge_page_mode, machine.num_physical_cores) == ((), "", 2)
