"""From the facts of one rank to verdicts, one small function a thing. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastdecode_hpc.advice import HUGE_PAGES
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.doctor.facts import Facts
from fastdecode_hpc.host import format_bytes, format_cores
from fastdecode_hpc.launch import check_alone, check_world
from fastdecode_hpc.mpiexec import short_name
from fastdecode_hpc.setup import ISAS_BEST_FIRST, best_isa

OK, WARNING, PROBLEM = "ok", "warning", "problem"
VERDICTS = (OK, WARNING, PROBLEM)  # the last one that occurs is that of all

PLUGINS = {"MPICH": "pmi2", "Open MPI": "pmix"}  # srun --mpi, by family of the library
HUGE_SHARE = 0.9  # of touched memory; less is a fault
LEAST_MEMORY = 4 << 30
LEAST_SHM = 256 << 20  # of /dev/shm, for the messages of ranks on one node


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said about one thing.

    Attributes
    ----------
    check : str
        What was looked at, in two words at most.
    verdict : str
        ok, warning or problem.
    ranks : tuple of int
        That it is true of; empty: of all.
    """

    check: str
    verdict: str
    text: str
    fix: str = ""
    ranks: tuple[int, ...] = ()


Check = Callable[[Facts], Finding | None]  # None: there is nothing to look at on this rank


def program(facts: Facts) -> Finding:
    """Versions; and whether what the user set can be understood."""
    text = f"fastdecode {facts.hello.version}, Python {facts.python} ({facts.executable})"
    if facts.hello.error is not None:
        return Finding("program", PROBLEM, f"{text}; {facts.hello.error}")
    return Finding("program", OK, text)


def mpi_library(facts: Facts) -> Finding | None:
    """Which MPI is loaded, and from where."""
    if facts.mpi is None:
        return None
    if not facts.mpi.library:
        return Finding("MPI library", PROBLEM, "; ".join(facts.mpi.errors))
    return Finding("MPI library", OK, f"{short_name(facts.mpi.library)} ({facts.mpi.path or 'path unknown'})")


def launcher(facts: Facts) -> Finding | None:
    """Who started the processes, and whether MPI sees as many."""
    mpi, launched = facts.mpi, facts.launch
    if mpi is None or not mpi.library:
        return None
    try:
        check_alone(launched, None, {"SLURM_NTASKS": str(facts.slurm.tasks)} if facts.slurm.tasks else {})
        if mpi.world_size:
            check_world([launched], mpi.world_size, mpi.library)
    except ConfigError as error:
        return Finding("launcher", PROBLEM, str(error))
    if launched.kind != "none":
        many = "es" if launched.size != 1 else ""
        text = f"{launched.kind} started {launched.size} process{many}, and MPI sees {mpi.world_size or 1}"
        return Finding("launcher", OK, text)
    if not mpi.mpiexec:
        return Finding("launcher", WARNING, mpi.errors[0] if mpi.errors else "there is no mpiexec of this library")
    return Finding("launcher", OK, f"none started this process; {mpi.mpiexec} belongs to the library")


def slurm_plugin(facts: Facts) -> Finding | None:
    """Whether Slurm and the MPI library find each other."""
    if facts.mpi is None or not facts.mpi.library or not (facts.slurm.in_step or facts.slurm.offered):
        return None
    wanted, slurm = PLUGINS[facts.mpi.family], facts.slurm
    if slurm.in_step:
        return _plugin_of_step(facts, wanted)
    offered = ", ".join(slurm.offered)
    if not any(_is_plugin(name, wanted) for name in slurm.offered):
        return Finding(
            "Slurm plugin",
            PROBLEM,
            f"srun --mpi offers {offered}; {facts.mpi.family} needs {wanted}",
            "Start with this library's own mpiexec inside the job, or use the MPI library that the site has for srun",
        )
    if not _is_plugin(slurm.default, wanted):
        return Finding(
            "Slurm plugin",
            WARNING,
            f"srun uses --mpi={slurm.default or 'none'} unless told; {facts.mpi.family} needs {wanted}",
            f"Say srun --mpi={wanted}, or export SLURM_MPI_TYPE={wanted}",
        )
    return Finding("Slurm plugin", OK, f"srun --mpi={slurm.default}, its default, fits {facts.mpi.family}")


def _plugin_of_step(facts: Facts, wanted: str) -> Finding:
    found = facts.slurm.in_step
    assert facts.mpi is not None
    if _is_plugin(found, wanted) or (facts.launch.size or 1) == 1:
        return Finding("Slurm plugin", OK, f"srun --mpi={found}, for {facts.mpi.family}")
    text = f"srun --mpi={found} started this step; {facts.mpi.family} usually needs {wanted}"
    if facts.mpi.world_size == facts.launch.size:
        return Finding("Slurm plugin", OK, f"{text}, but it works here")
    return Finding("Slurm plugin", PROBLEM, text, f"Use srun --mpi={wanted}")


def _is_plugin(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}_")  # pmix_v4


def thread_level(facts: Facts) -> Finding | None:
    """Whether a second thread may call MPI."""
    if facts.mpi is None or not facts.mpi.library:
        return None
    level = facts.mpi.thread_level
    if level in ("SERIALIZED", "MULTIPLE"):
        return Finding("thread level", OK, level)
    if not level:
        text = facts.mpi.errors[-1] if facts.mpi.errors else "unknown"
        fix = "Run doctor under srun or mpiexec, as the job will be started; login nodes often forbid MPI"
        return Finding("thread level", WARNING, text, fix)
    return Finding(
        "thread level",
        WARNING,
        f"{level}: no second thread may call MPI, so there is no progress thread and there are no signs of life",
        "Use an MPI built with thread support",
    )


def kernels(facts: Facts) -> Finding | None:
    """The instruction set of attention."""
    has = facts.hello.isas
    if not facts.attends:
        return None
    text = f"{facts.isa or 'none'} (here are {', '.join(has)})"
    if not facts.isa:
        return Finding("kernels", PROBLEM, f"FASTDECODE_ISA asks for one that is not here: {', '.join(has)}",
                       "Unset FASTDECODE_ISA")  # fmt: skip
    if ISAS_BEST_FIRST.index(facts.isa) > ISAS_BEST_FIRST.index(best_isa(has)):
        return Finding("kernels", WARNING, f"{text}: FASTDECODE_ISA forces a slower one", "Unset FASTDECODE_ISA")
    if facts.isa == "scalar":
        fix = "Use a processor with AVX2 or NEON, or build the program on one"
        return Finding("kernels", WARNING, f"{text}: attention will be several times slower", fix)
    return Finding("kernels", OK, text)


def openmp(facts: Facts) -> Finding:
    """OpenMP runtimes in this process: two of them fight for the cores."""
    binding = f"; {facts.hello.binding}" if facts.hello.binding else ""
    names = ", ".join(facts.openmp) or "none loaded"
    if len(facts.openmp) > 1:
        return Finding(
            "OpenMP",
            WARNING,
            f"{len(facts.openmp)} runtimes in one process: {names}{binding}",
            "Take torch and the kernels from one set of packages; where both stay, set OMP_WAIT_POLICY=passive",
        )
    return Finding("OpenMP", OK, f"{names}{binding}")


def cores(facts: Facts) -> Finding:
    """The affinity mask, and what it holds."""
    here = facts.hello.host
    threads = f", threads asked for: {facts.hello.threads}" if facts.hello.threads else ""
    physical = here.num_physical_cores
    smt = f" of {physical} physical ones" if physical < len(here.cores) else ""
    text = f"{len(here.cores)} ({format_cores(here.cores)}){smt}{threads}"
    if facts.hello.threads and physical < facts.hello.threads <= len(here.cores):
        return Finding("cores", WARNING, f"{text}: two threads on a core read no faster than one",
                       f"Use --threads {physical}, or srun --hint=nomultithread")  # fmt: skip
    return Finding("cores", OK, text)


def numa(facts: Facts) -> Finding:
    """NUMA nodes of the mask; a rank over several of them is judged with its role, by `compare`."""
    nodes = facts.hello.host.numa_nodes
    if not nodes:
        return Finding("NUMA", OK, "the kernel doesn't tell")
    free = facts.hello.host.numa_memory_bytes
    memory = f", {format_bytes(free)} free there" if free is not None else ""
    text = f"node{'s' if nodes[1:] else ''} {format_cores(nodes)}{memory}"
    if nodes[1:] and facts.launch.kind == "none":
        return Finding("NUMA", WARNING, f"{text}: one process over several nodes reads KV that lies at another one",
                       f"Start one R-worker a node: mpirun -n {len(nodes) + 1} --map-by numa, or srun")  # fmt: skip
    return Finding("NUMA", OK, text)


def huge_pages(facts: Facts) -> Finding | None:
    """Whether memory for KV comes on huge pages: tried, not believed."""
    share, mode = facts.huge_share, facts.hello.host.huge_pages
    if share is None:
        return None
    told = f"{mode} mode" if mode else "the kernel has none"
    text = f"{told}, {share:.0%} of memory touched for a try lay on huge pages"
    if share >= HUGE_SHARE:
        return Finding("huge pages", OK, text)
    if mode in ("never", ""):
        fix = f"An administrator can write madvise to {HUGE_PAGES}"
    else:
        fix = "Memory is fragmented: take a node that was started lately, or ask for /proc/sys/vm/compact_memory"
    return Finding("huge pages", WARNING, f"{text}: reading KV misses the TLB more often", fix)


def memory(facts: Facts) -> Finding:
    """What may still be taken, and what bounds it."""
    bound, left = min(facts.memory_limits.items(), key=lambda item: item[1])
    text = f"{format_bytes(left)} may still be taken, bound by {bound}"
    if left < LEAST_MEMORY:
        fix = "Ask for more (sbatch --mem, --mem=0 for all of the node)" if bound != "the host" else "Use another node"
        return Finding("memory", WARNING, f"{text}; weights and KV need some GiB", fix)
    return Finding("memory", OK, text)


def locked_memory(facts: Facts) -> Finding | None:
    """Fast networks register memory, which needs to be locked."""
    if not facts.has_fast_network:
        return None
    if facts.memlock_bytes < 0:
        return Finding("locked memory", OK, "no limit")
    return Finding(
        "locked memory",
        WARNING,
        f"at most {format_bytes(facts.memlock_bytes)} may be locked, and this node has a fast network",
        "Ask for an unlimited memlock in slurmd's limits (LimitMEMLOCK=infinity), or ulimit -l unlimited",
    )


def shared_memory(facts: Facts) -> Finding | None:
    """Ranks on one node talk through /dev/shm."""
    if facts.mpi is None:
        return None
    text = f"{format_bytes(facts.shm_bytes)} free in /dev/shm"
    if facts.shm_bytes < LEAST_SHM:
        fix = "Start the container with a larger one (docker --shm-size=2g; Apptainer takes the host's)"
        return Finding("shared memory", WARNING, f"{text}, little for several ranks on this node", fix)
    return Finding("shared memory", OK, text)


def single_copy(facts: Facts) -> Finding | None:
    """Large messages on a node in one copy; Open MPI fails noisily where containers forbid it."""
    if facts.mpi is None or facts.can_read_peers:
        return None
    fix = "Allow it (docker --cap-add=SYS_PTRACE), or tell Open MPI: OMPI_MCA_smsc=^cma (before 5.0: "
    fix += "OMPI_MCA_btl_vader_single_copy_mechanism=none)"
    return Finding("single copy", WARNING, "processes may not read each other's memory here (process_vm_readv)", fix)


def gpu(facts: Facts) -> Finding | None:
    """Whether the S-Part has what it may need."""
    if facts.gpu is None:
        return None
    if facts.gpu.error:
        return Finding(
            "GPU", PROBLEM, f"torch cannot be imported: {facts.gpu.error}", "Install torch in this environment"
        )
    if facts.gpu.name:
        return Finding("GPU", OK, f"{facts.gpu.name}, {format_bytes(facts.gpu.memory_bytes)}, torch {facts.gpu.torch}")
    count = facts.hello.host.gpus
    if count:
        fix = "Install a torch built for CUDA that fits the driver (nvidia-smi names its version)"
        text = f"the node shows {count} GPUs, but torch {facts.gpu.torch} sees none: the S-Part would run on the CPU"
        return Finding("GPU", WARNING, text, fix)
    return Finding("GPU", OK, f"none: the S-Part runs on the CPU (torch {facts.gpu.torch})")


def locking(facts: Facts) -> Finding | None:
    """Whether reports can be written and locked in the output folder."""
    if facts.write_error is None:
        return None
    if facts.write_error:
        text = f"nothing can be written in {Path(facts.folder).absolute()}: {facts.write_error}"
        return Finding("output folder", PROBLEM, text, "Name another one with --folder, and for the output")
    name = f"HDF5 files in {Path(facts.folder).absolute()}"
    if facts.lock_error:
        return Finding(
            "output folder",
            WARNING,
            f"{name} cannot be locked: {facts.lock_error}",
            "Reports are written without locks there; for programs that read them set HDF5_USE_FILE_LOCKING=FALSE",
        )
    return Finding("output folder", OK, f"{name} can be written and locked")


CHECKS: tuple[Check, ...] = (
    program, mpi_library, launcher, slurm_plugin, thread_level, kernels, openmp, cores, numa, huge_pages, memory,
    locked_memory, shared_memory, single_copy, gpu, locking,
)  # fmt: skip


def examine(facts: Facts) -> list[Finding]:
    """All checks of one rank."""
    return [found for check in CHECKS if (found := check(facts)) is not None]
