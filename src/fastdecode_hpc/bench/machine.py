"""What a figure depends on, read from Linux: processor, cores, caches, NUMA nodes, huge pages."""

from __future__ import annotations

import platform
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_hpc import __version__, topology
from fastdecode_hpc.host import parse_bytes
from fastdecode_hpc.provenance import git_commit

DEFAULT_CACHE_BYTES = 32 << 20  # of the last level, where Linux does not tell
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Machine:
    """The part of a node that this process may use."""

    processor: str
    cores: tuple[int, ...]  # logical ones
    num_physical_cores: int  # that these cores are threads of
    numa_nodes: tuple[int, ...]  # that these cores belong to; empty where Linux does not tell
    cache_bytes: int  # last-level caches that these cores use, all together
    cache_is_read: bool  # False: `DEFAULT_CACHE_BYTES`
    huge_page_mode: str  # always, madvise, never; empty where Linux does not tell
    load_average: float  # threads of the whole node that wanted to run in the last minute


def look_at_machine(cores: tuple[int, ...], root: Path = _ROOT) -> Machine:
    """Read what the kernel tells about these cores; `root` is ``/`` outside tests."""
    caches = last_level_caches(cores, root)
    return Machine(
        processor=_processor(root),
        cores=cores,
        num_physical_cores=len(topology.core_siblings(cores, root / "sys")),
        numa_nodes=topology.numa_nodes(cores, root / "sys"),
        cache_bytes=sum(caches) or DEFAULT_CACHE_BYTES,
        cache_is_read=bool(caches),
        huge_page_mode=topology.huge_page_mode(root / "sys"),
        load_average=float((_read(root / "proc/loadavg").split() or ["0"])[0]),
    )


def last_level_caches(cores: tuple[int, ...], root: Path = _ROOT) -> list[int]:
    """Bytes of each last-level cache that some of these cores share, each cache once."""
    found = {}  # the cores that share a cache |-> its bytes
    for core in cores:
        levels = {
            _read(cache / "level"): (_read(cache / "shared_cpu_list"), _read(cache / "size"))
            for cache in (_cpu(root, core) / "cache").glob("index*")
            if _read(cache / "type") in ("Unified", "Data")
        }
        if levels:
            shared_by, size = levels[max(levels)]
            found[shared_by] = parse_bytes(size)
    return list(found.values())


def _processor(root: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1] if match else platform.machine()


def _cpu(root: Path, core: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{core}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def program_figures() -> dict[str, Any]:
    """Where, with which program and when figures were taken."""
    return {
        "host": socket.gethostname(),
        "program_version": __version__,
        "git_commit": git_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
