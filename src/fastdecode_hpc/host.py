"""What this process may use of its host: cores, threads, memory. Linux; standard library only.

Reads the affinity mask and the cgroup, never the node's totals: a job owns a share of a node.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastdecode_hpc import topology
from fastdecode_hpc.affinity import binding_asked
from fastdecode_hpc.config import ConfigError

# Read before torch and OpenMP are loaded: with OMP_PROC_BIND set they shrink the mask of the main thread.
_CORES_AT_START = tuple(sorted(os.sched_getaffinity(0)))
_UNLIMITED = 1 << 60  # cgroups write "no limit" as a number near 2**63
SLURM_MB = 1 << 20
KEPT_BLOCK_BYTES, KEPT_BYTES = 1 << 27, 1 << 28  # logits of 128 rows over 256,000 tokens are as large as a block
RETURNED_BLOCK_BYTES = 1 << 17  # glibc's own threshold, until it has seen a larger block freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One rank's place, as it is printed, compared and stored."""

    host: str
    pid: int
    cores: tuple[int, ...]
    memory_bytes: int  # that this process may still take
    age_s: float  # since the process was started
    numa_nodes: tuple[int, ...] = ()  # of its cores; empty: unknown
    siblings: tuple[tuple[int, ...], ...] = ()  # its cores, grouped by physical core
    huge_pages: str = ""  # always | madvise | never; empty: unknown
    numa_memory_bytes: int | None = None  # that can still be taken on its NUMA nodes; None: unknown
    gpus: int = 0  # that it may use

    @property
    def num_physical_cores(self) -> int:
        """Hardware threads of one physical core count once."""
        return len(self.siblings) or len(self.cores)


def look() -> HostInfo:
    """Describe this process's place."""
    nodes = topology.numa_nodes(_CORES_AT_START)
    return HostInfo(
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=_CORES_AT_START,
        memory_bytes=available_memory(),
        age_s=process_age(),
        numa_nodes=nodes,
        siblings=topology.core_siblings(_CORES_AT_START),
        huge_pages=topology.huge_page_mode(),
        numa_memory_bytes=topology.local_memory(nodes),
        gpus=visible_gpus(),
    )


def undo_openmp_binding(env: Mapping[str, str] = os.environ) -> None:
    """Where OpenMP is told to bind threads, let the calling thread use all cores that the process started with.

    The runtime binds the thread that loads it to one core. Another OpenMP runtime that is loaded later then sees
    that one core only, and every thread started from there stays on it.
    """
    if binding_asked(env):
        with suppress(OSError):  # a core went offline, or masks can't be set here: the mask stays as it is
            os.sched_setaffinity(0, _CORES_AT_START)


def return_freed_memory() -> None:
    """Let malloc give what is freed in blocks above `RETURNED_BLOCK_BYTES` back to the system at once.

    By default it takes ever larger blocks from its heap, where what stays lies between what was freed: weights that are
    packed one after the other then take up to half as much again.
    """
    _set_malloc(_M_MMAP_THRESHOLD, RETURNED_BLOCK_BYTES)


def keep_freed_memory() -> None:
    """Let malloc keep what is freed in blocks below `KEPT_BLOCK_BYTES`, and hand it out again.

    By default it gives large ones back to the system at once, and taking them anew costs a page fault every 4 KiB: a
    step that makes 25 MB of logits then spends more time on faults than on what it computes. A process keeps so
    what its largest step held at once, but no more than `KEPT_BYTES` at the end of its heap.
    """
    _set_malloc(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    _set_malloc(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _set_malloc(parameter: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(parameter, value)


def visible_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use, without a GPU library: NVIDIA's devices, and CUDA_VISIBLE_DEVICES."""
    found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    if "CUDA_VISIBLE_DEVICES" not in env:
        return found
    chosen = itertools.takewhile(lambda name: name not in ("", "-1"), env["CUDA_VISIBLE_DEVICES"].split(","))
    return min(found, len(list(chosen)))


def asked_threads(flag: int | None, here: HostInfo, env: Mapping[str, str] = os.environ) -> int | None:
    """Threads that the user asked for: the flag, else OMP_NUM_THREADS, else SLURM_CPUS_PER_TASK, else None.

    Slurm's CPUs may be hardware threads: no more of them count than the rank has physical cores.

    Raises
    ------
    ConfigError
        If a variable is set but is no positive number.
    """
    if flag is not None:
        return flag
    if threads := _count_in(env, "OMP_NUM_THREADS"):
        return threads
    if cpus := _count_in(env, "SLURM_CPUS_PER_TASK"):
        # More than the mask has: srun was started without --cpus-per-task, which is to be seen.
        return cpus if cpus > len(here.cores) else min(cpus, here.num_physical_cores)
    return None


def _count_in(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    if not value:
        return None
    first = value.split(",")[0]  # OMP allows a list, one entry a nesting level
    if not first.isdigit() or int(first) < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return int(first)


def format_cores(cores: tuple[int, ...]) -> str:
    """Cores as Linux writes lists: ``0-3,8``."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 3``, ``ranks 0-2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_cores(tuple(ranks))}"


def format_bytes(num_bytes: float) -> str:
    """A size for people: ``1.5 GiB``."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(num_bytes).bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def parse_bytes(text: str) -> int:
    """Read a size such as ``40G``, ``512MiB`` or ``1000000``.

    Raises
    ------
    ConfigError
        If it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is no size; write a number with K, M, G or T, such as 40G")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def available_memory(env: Mapping[str, str] = os.environ) -> int:
    """Bytes this process and its fellows of the same job may still take on this host."""
    return min(memory_limits(env).values())


def memory_limits(env: Mapping[str, str] = os.environ) -> dict[str, int]:
    """What bounds that memory, by name, each with the bytes that it leaves."""
    limits = {"the host": _mem_available()}
    if rooms := _cgroup_rooms():
        limits["the cgroup"] = min(rooms)
    if (node := env.get("SLURM_MEM_PER_NODE", "")).isdigit() and int(node):
        limits["SLURM_MEM_PER_NODE"] = int(node) * SLURM_MB
    return {name: max(0, left) for name, left in limits.items()}


def can_read_peers() -> bool:
    """Whether the kernel lets a process read another's memory in one copy, as MPI does for messages on a node.

    Tried on this process itself: containers forbid the call altogether.
    """
    libc, byte = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(1)
    span = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)
    return bool(libc.process_vm_readv(os.getpid(), span, 1, span, 1, 0) == 1)


def _mem_available() -> int:
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else _UNLIMITED


def _cgroup_rooms() -> list[int]:
    """Limit minus use of every memory cgroup above this process (v1 and v2)."""
    rooms = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms_up(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            rooms += _rooms_up(Path("/sys/fs/cgroup/memory"), path, *files)
    return rooms


def _rooms_up(root: Path, path: str, limit_file: str, use_file: str) -> list[int]:
    folder, rooms = root / path.lstrip("/"), []
    while folder.is_relative_to(root):
        limit, used = _read_number(folder / limit_file), _read_number(folder / use_file)
        if limit is not None and used is not None and limit < _UNLIMITED:
            rooms.append(limit - used + _reclaimable(folder))
        if folder == root:
            break
        folder = folder.parent
    return rooms


def _reclaimable(folder: Path) -> int:
    """Page cache counts as used, but goes when memory is needed."""
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    match = re.search(r"^(?:total_)?inactive_file (\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def describe_address_space() -> str:
    """How much this process has mapped and may map, in words: limits that batch systems and shells set."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    most = "has no limit of its own (ulimit -v)" if limit < 0 else f"may map {format_bytes(limit)} (ulimit -v)"
    return f"it has mapped {format_bytes(mapped)} and {most}"


def process_age() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
