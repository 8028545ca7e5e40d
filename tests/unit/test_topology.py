"""NUMA nodes, hardware threads and huge pages, read from made-up hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode_hpc.topology import core_siblings, huge_page_mode, local_memory, numa_nodes, parse_cores


def make_host(sysfs: Path, *, nodes: dict[int, str], siblings: dict[int, str]) -> Path:
    for node, cores in nodes.items():
        folder = sysfs / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for core, listed in siblings.items():
        folder = sysfs / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{listed}\n")
    return sysfs


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of two physical cores with two hardware threads each, a node of memory alone; core 7 is offline."""
    pairs = {core: f"{core % 4},{core % 4 + 4}" for core in range(7)} | {3: "3"}
    return make_host(tmp_path, nodes={0: "0-1,4-5", 1: "2-3,6", 2: ""}, siblings=pairs)


def test_nodes_are_those_of_the_cores(two_sockets: Path) -> None:
    assert numa_nodes((0, 1), two_sockets) == (0,)
    assert numa_nodes((5, 6), two_sockets) == (0, 1)
    assert numa_nodes((2,), two_sockets) == (1,)
    assert numa_nodes((7,), two_sockets) == ()


def test_many_nodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    sysfs = make_host(tmp_path, nodes={node: str(node) for node in range(12)}, siblings={})
    (sysfs / "devices/system/node/possible").write_text("0-11\n")
    assert numa_nodes(tuple(range(12)), sysfs) == tuple(range(12))


def test_hardware_threads_of_one_core_come_together(two_sockets: Path) -> None:
    assert core_siblings(tuple(range(7)), two_sockets) == ((0, 4), (1, 5), (2, 6), (3,))
    assert core_siblings((0, 1, 5), two_sockets) == ((0,), (1, 5))  # what the mask leaves out is not there
    assert core_siblings((6, 7), two_sockets) == ((6,), (7,))


def test_memory_of_nodes_counts_what_can_be_freed(two_sockets: Path) -> None:
    for node, free in ((0, 1000), (1, 500)):
        text = f"Node {node} MemTotal:       99999 kB\nNode {node} MemFree:        {free} kB\n"
        text += f"Node {node} Inactive(file): 20 kB\nNode {node} SReclaimable:   3 kB\nNode {node} Inactive: 7 kB\n"
        (two_sockets / f"devices/system/node/node{node}/meminfo").write_text(text)
    assert local_memory((0,), two_sockets) == 1023 * 1024
    assert local_memory((0, 1), two_sockets) == (1023 + 523) * 1024
    assert local_memory((0, 2), two_sockets) is None  # node 2 tells nothing
    assert local_memory((), two_sockets) is None


def test_a_host_that_tells_nothing_is_unknown(tmp_path: Path) -> None:
    assert numa_nodes((0, 1), tmp_path) == ()
    assert core_siblings((0, 1), tmp_path) == ((0,), (1,))
    assert huge_page_mode(tmp_path) == ""


@pytest.mark.parametrize("text, mode", [("always [madvise] never", "madvise"), ("always madvise [never]\n", "never")])
def test_the_mode_of_huge_pages_is_the_one_in_brackets(tmp_path: Path, text: str, mode: str) -> None:
    file = tmp_path / "kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert huge_page_mode(tmp_path) == mode


def test_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == set()
