"""What a rank finds out about itself for the doctor. Each fact is read where its home is; nothing is judged here."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode_hpc import host, mapped
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.launch import Launch, detect, process_manager
from fastdecode_hpc.mpiexec import family_of, find_library, find_mpiexec, start_alone, understands_pmix
from fastdecode_hpc.setup import Hello
from fastdecode_hpc.startup import say_hello

if TYPE_CHECKING:
    from fastdecode_hpc.advice import ThreadCores
    from fastdecode_hpc.transport.mpi import World

OPENMP = r"lib(gomp|iomp5|omp)\b"
PROBE_BYTES = 64 << 20  # of the memory that is touched to see whether it lies on huge pages
SLURM_ANSWER_S = 20.0
FAST_NETWORKS = ("/sys/class/infiniband", "/sys/class/cxi")


@dataclass(frozen=True, slots=True)
class Mpi:
    """What a process finds of MPI."""

    library: str = ""  # its name and version
    path: str = ""
    thread_level: str = ""  # empty: not known
    world_size: int = 0  # 0: MPI was not started
    mpiexec: str = ""
    understands_pmix: bool = True
    errors: tuple[str, ...] = ()  # why something of it can't be found or started

    @property
    def family(self) -> str:
        return family_of(self.library)


@dataclass(frozen=True, slots=True)
class Slurm:
    """How Slurm starts MPI programs here."""

    in_step: str = ""  # by what the processes of this step find each other; empty: no step
    offered: tuple[str, ...] = ()  # what `srun --mpi` takes; empty: there is no srun, or it was not asked
    default: str = ""
    tasks: int = 0  # of the job, where this process was not started by srun


@dataclass(frozen=True, slots=True)
class Gpu:
    """What torch has to say about GPUs."""

    name: str = ""  # of the first one; empty: torch sees none
    memory_bytes: int = 0
    torch: str = ""  # its version
    error: str = ""  # why torch can't be imported


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's facts.

    Attributes
    ----------
    mpi : Mpi or None
        None where it was not to be looked at.
    gpu : Gpu or None
        None where the rank has no use for one, or torch was not to be loaded.
    huge_share : float or None
        Of memory touched for a try; None where no KV will be held, or the kernel doesn't tell.
    write_error, lock_error : str or None
        Why nothing can be written in the output folder, or HDF5 can't lock files there; empty where it can; None where
        it was not tried.
    memlock_bytes : int
        That may be locked, as fast networks and pinned memory do; -1: no limit.
    can_read_peers : bool
        Whether the kernel lets processes read each other's memory, as MPI does for large messages on a node.
    """

    hello: Hello
    launch: Launch
    python: str
    executable: str
    mpi: Mpi | None
    slurm: Slurm
    holds_kv: bool
    isa: str  # in use; empty: FASTDECODE_ISA asks for one that is not here
    openmp: tuple[str, ...]
    huge_share: float | None
    memory_limits: Mapping[str, int]  # what bounds the memory |-> bytes that may still be taken
    memlock_bytes: int
    has_fast_network: bool
    shm_bytes: int  # free in /dev/shm
    can_read_peers: bool
    gpu: Gpu | None
    folder: str
    write_error: str | None
    lock_error: str | None

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def host(self) -> str:
        return self.hello.host.host

    @property
    def attends(self) -> bool:
        """Whether its kernels attend to anything: to KV, or on the CPU of an S-worker to prompts."""
        return self.holds_kv or self.gpu is None or not self.gpu.name


def look(world: World | None, *, threads: int | None, with_mpi: bool, folder: Path) -> Facts:
    """All that can be known before the ranks talk to each other.

    Parameters
    ----------
    threads : int, optional
        Asked for by flag.
    with_mpi : bool
        Load MPI and, on rank 0, torch.
    folder : Path
        Where output would go; tried on rank 0.
    """
    launched = detect()
    is_first = world is None or world.is_s_rank
    holds_kv = world is None or not is_first
    hello = say_hello(threads, world, launched, _isas)
    write_error, lock_error = _try_folder(folder) if is_first else (None, None)
    gpu = _look_at_gpu() if is_first and with_mpi else None
    return Facts(
        hello=hello,
        launch=launched,
        python=platform.python_version(),
        executable=sys.executable,
        mpi=_look_at_mpi(world) if with_mpi else None,
        slurm=look_at_slurm(launched),
        holds_kv=holds_kv,
        isa=_active_isa(),
        openmp=mapped.libraries(OPENMP),
        huge_share=_huge_share() if holds_kv else None,
        memory_limits=host.memory_limits(),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        has_fast_network=any(any(Path(place).glob("*")) for place in FAST_NETWORKS),
        shm_bytes=_free_bytes(Path("/dev/shm")),
        can_read_peers=host.can_read_peers(),
        gpu=gpu,
        folder=str(folder),
        write_error=write_error,
        lock_error=lock_error,
    )


def _isas() -> tuple[str, ...]:
    from fastdecode_hpc.isa import available_isas

    return available_isas()


def _active_isa() -> str:
    from fastdecode_hpc.isa import active_isa

    try:
        return active_isa()
    except ConfigError:
        return ""


def read_thread_cores(threads: int) -> ThreadCores:
    """The cores that each of the kernels' threads may run on, as the kernel tells them."""
    from fastdecode_hpc.r_part.attention import thread_cores

    return thread_cores(threads)


def _huge_share() -> float | None:
    from fastdecode_hpc.r_part.kv_cache import map_arena, memory_span

    arena = map_arena(PROBE_BYTES)
    arena[::4096] = 1
    return mapped.huge_page_share([memory_span(arena)])


def _look_at_mpi(world: World | None) -> Mpi:
    if world is not None:
        return _running_mpi(world)
    errors = []
    try:
        library = find_library()
    except ConfigError as error:
        return Mpi(errors=(str(error),))
    mpiexec = ""
    try:
        mpiexec = str(find_mpiexec(library))
    except ConfigError as error:
        errors.append(str(error))
    level, problem = start_alone()
    if problem:
        errors.append(f"MPI cannot be started in a process of its own: {problem}")
    return Mpi(library.version, str(library.path), level, 0, mpiexec, library.understands_pmix, tuple(errors))


def _running_mpi(world: World) -> Mpi:
    from fastdecode_hpc.transport.mpi import library_description, library_version, thread_level

    path = next(iter(mapped.libraries(r"libmpi(ch)?(\.|_|$)")), "")
    knows = understands_pmix(library_description())
    return Mpi(library_version(), path, thread_level(), world.size, understands_pmix=knows)


def look_at_slurm(launched: Launch, env: Mapping[str, str] = os.environ) -> Slurm:
    """How Slurm would start MPI programs, or has started this one."""
    if launched.kind == "srun":
        return Slurm(in_step=process_manager(env))
    if launched.kind != "none" or shutil.which("srun") is None:
        return Slurm()
    tasks = env.get("SLURM_NTASKS", "")
    default = env.get("SLURM_MPI_TYPE") or default_plugin(_answer("scontrol", "show", "config"))
    offered = parse_plugins(_answer("srun", "--mpi=list"))
    return Slurm(offered=offered, default=default, tasks=int(tasks) if tasks.isdigit() else 0)


def parse_plugins(text: str) -> tuple[str, ...]:
    """The plugins in what ``srun --mpi=list`` prints: one a line, under a heading."""
    lines = [line.strip().removeprefix("srun: ").strip() for line in text.splitlines()]
    return tuple(line for line in lines if line and " " not in line and not line.endswith(("...", ":")))


def default_plugin(text: str) -> str:
    """What ``scontrol show config`` says about MPI; empty where it says nothing."""
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "MpiDefault":
            return value.strip()
    return ""


def _answer(*command: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SLURM_ANSWER_S, stdin=subprocess.DEVNULL, check=False
        )
        return done.stdout + done.stderr
    return ""


def _look_at_gpu() -> Gpu:
    host.undo_openmp_binding()
    try:
        import fastdecode_hpc.s_part.build as build
    except (ImportError, OSError) as error:
        return Gpu(error=str(error).partition("\n")[0])
    name, num_bytes, version = build.describe_gpu()
    return Gpu(name, num_bytes, version)


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _try_folder(folder: Path) -> tuple[str, str | None]:
    """Why nothing can be written there, and why files can't be locked."""
    from fastdecode_hpc.report.locking import try_locks

    try:
        return "", try_locks(folder)
    except OSError as error:
        return error.strerror or str(error), None
