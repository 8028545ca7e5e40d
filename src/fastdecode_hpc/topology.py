"""What the host looks like below this process's cores: NUMA nodes, hardware threads, huge pages. Reads sysfs only."""

from __future__ import annotations

import re
from pathlib import Path

SYSFS = Path("/sys")
Cores = tuple[int, ...]


def numa_nodes(cores: Cores, sysfs: Path = SYSFS) -> tuple[int, ...]:
    """NUMA nodes that hold any of these cores; empty where the kernel doesn't tell.

    Nodes that have memory alone (HBM, CXL) hold no core and are left out.
    """
    found = []
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        here = parse_cores(_read(folder / "cpulist"))
        if not here.isdisjoint(cores):
            found.append(int(folder.name.removeprefix("node")))
    return tuple(sorted(found))


def local_memory(nodes: Cores, sysfs: Path = SYSFS) -> int | None:
    """Bytes of these NUMA nodes that can still be taken, page cache counted in; None where the kernel doesn't tell."""
    total = 0
    for node in nodes:
        text = _read(sysfs / f"devices/system/node/node{node}/meminfo")
        values = dict(re.findall(r"^Node \d+ (\S+):\s+(\d+) kB", text, re.MULTILINE))
        if "MemFree" not in values:
            return None
        total += sum(int(values.get(name, 0)) for name in ("MemFree", "Inactive(file)", "SReclaimable")) * 1024
    return total if nodes else None


def core_siblings(cores: Cores, sysfs: Path = SYSFS) -> tuple[Cores, ...]:
    """These cores (the kernel's CPUs), grouped by the physical core whose hardware threads they are.

    Groups and their members ascend. What the kernel doesn't tell of, an offline core say, is a group of its own.
    """
    groups = set()
    for core in cores:
        listed = _read(sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        groups.add(tuple(sorted((parse_cores(listed) & set(cores)) | {core})))
    return tuple(sorted(groups))


def huge_page_mode(sysfs: Path = SYSFS) -> str:
    """Transparent huge pages of this host: always, madvise or never; empty where the kernel has none."""
    text = _read(sysfs / "kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else ""


def parse_cores(text: str) -> set[int]:
    """Cores of a kernel list such as ``0-3,8``."""
    cores: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
