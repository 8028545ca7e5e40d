"""How this process was started, and starting the ranks where no launcher did.

Imports neither mpi4py nor torch, so that the process that only starts the others costs nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.mpiexec import OPTIONS, environment, find_library, find_mpiexec, short_name, understands_pmix
from fastdecode_hpc.signals import STOP_SIGNALS, Process

LAUNCHED = "FASTDECODE_LAUNCHED"  # in a rank that `launch` started: the folder it shares with the launcher
MIN_RANKS_ALLOWED = 8  # on any node, for trying things out
POLL_S = 0.2  # how often launcher and ranks look at each other
SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "FLUX_JOB_ID": "Flux",
    "PE_HOSTFILE": "Grid Engine",
}
LEAVE_S = 1.0
FIRST_RESERVED_STEP = 0xFFFFFFF0  # step ids from here on are Slurm's own: interactive, batch, extern


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher says about this process, before MPI starts.

    Attributes
    ----------
    kind : str
        ``none``, ``mpirun`` (any mpiexec) or ``srun``.
    rank, size : int or None
        Rank, and number of processes that the launcher started; for a heterogeneous step all components
        together. None outside.
    component : int or None
        Component of a heterogeneous job that this rank runs in, where Slurm tells.
    is_heterogeneous : bool
        The step spans the components of a heterogeneous job.
    """

    kind: str
    rank: int | None = None
    size: int | None = None
    component: int | None = None
    is_heterogeneous: bool = False


def detect(env: Mapping[str, str] = os.environ) -> Launch:
    """Read from the environment who started this process.

    Notes
    -----
    mpiexec comes before srun: inside an allocation it starts its proxies by srun, so that its ranks see the step
    variables of the proxies, whose number of tasks is the number of nodes. Shells are no step: that of ``sbatch``
    and ``salloc`` (no step id), Slurm's interactive step, and ``srun --pty bash``.
    """
    rank_size = _mpiexec_rank_size(env)
    if rank_size is not None:
        return Launch("mpirun", *rank_size)
    if _is_in_step(env):
        return _srun_launch(env)
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "PMIX_SIZE")):  # other process managers
        if rank in env and "SLURM_STEP_ID" not in env:
            return Launch("mpirun", _number(env, rank), _number(env, size))
    return Launch("none")


def _mpiexec_rank_size(env: Mapping[str, str]) -> tuple[int | None, int | None] | None:
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    if "MPI_LOCALNRANKS" in env and "PMI_SIZE" in env:  # Hydra; Slurm's own PMI sets no MPI_LOCALNRANKS
        return _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    return None


def _is_in_step(env: Mapping[str, str]) -> bool:
    step, tasks = _number(env, "SLURM_STEP_ID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if step is None or step >= FIRST_RESERVED_STEP:
        return False
    return not ("SLURM_PTY_PORT" in env and tasks == 1)


def _srun_launch(env: Mapping[str, str]) -> Launch:
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    components = _number(env, "SLURM_HET_SIZE") or 1
    counts = [_number(env, f"SLURM_NTASKS_HET_GROUP_{index}") for index in range(components)]
    tasks = [count for count in counts if count is not None]
    if components == 1 or (tasks and sum(tasks) != size):  # or a step in one component of a heterogeneous job
        return Launch("srun", rank, size)
    return Launch("srun", rank, size, _component_of(rank, tasks), True)


def _component_of(rank: int | None, tasks: list[int]) -> int | None:
    for component in range(len(tasks)):
        if rank is not None and rank < sum(tasks[: component + 1]):
            return component
    return None


def _number(env: Mapping[str, str], name: str) -> int | None:
    try:
        return int(env[name]) if name in env else None
    except ValueError:
        raise ConfigError(f"environment variable {name} is {env[name]!r}; the launcher sets a number there") from None


def check_world(launches: Sequence[Launch], world_size: int, library: str) -> None:
    """Raise unless MPI's world is what the launcher started.

    A library that does not understand its launcher starts N worlds of one rank, silently.

    Parameters
    ----------
    launches : sequence of Launch
        What every rank of this world detected.
    world_size : int
        Size of MPI's world.
    library : str
        Name of the MPI library, for the message.

    Raises
    ------
    ConfigError
        With the way out.
    """
    for launch in launches:
        if launch.size is not None and launch.size != world_size:
            raise ConfigError(_mismatch(launch, world_size, library))


def _mismatch(launch: Launch, world_size: int, library: str) -> str:
    starter = "srun" if launch.kind == "srun" else "mpiexec"
    alone = ": each process runs alone" if world_size == 1 else ""
    name = short_name(library)
    text = f"{starter} started {launch.size} processes, but {name} sees a world of {world_size}{alone}. "
    if launch.kind == "srun":
        plugin = "pmix" if "open mpi" in library.lower() else "pmi2"
        return text + f"Use srun --mpi={plugin} (srun --mpi=list shows what there is), or that library's own mpiexec"
    return text + (
        "That mpiexec belongs to another MPI library. Use its own: without a launcher, "
        "--ranks N finds it; or let MPI4PY_LIBMPI name the libmpi of the mpiexec in use"
    )


def check_process_manager(launch: Launch, library: str, env: Mapping[str, str] = os.environ) -> None:
    """Raise where `library` is known not to understand what this step talks, before MPI starts and ends the job.

    Parameters
    ----------
    library : str
        What the MPI library says about itself, all lines.

    Raises
    ------
    ConfigError
        With the way out.
    """
    offered = process_manager(env)
    if launch.kind == "srun" and (launch.size or 1) > 1 and offered == "pmix" and not understands_pmix(library):
        raise ConfigError(
            f"srun --mpi=pmix started {launch.size} processes, but {short_name(library)} was "
            "built without PMIx and cannot start. Use srun --mpi=pmi2 (srun --mpi=list shows what there is)"
        )


def process_manager(env: Mapping[str, str] = os.environ) -> str:
    """By what the processes of a Slurm step find each other: pmi2, pmix, none or another plugin; empty outside."""
    if "SLURM_STEP_ID" not in env:
        return ""
    found = env.get("SLURM_MPI_TYPE") or ("pmix" if "PMIX_RANK" in env else "pmi2" if "PMI_FD" in env else "none")
    return "pmix" if found.startswith("pmix") else found  # also pmix_v3 and the like


def check_alone(launch: Launch, ranks: int | None, env: Mapping[str, str] = os.environ) -> None:
    """Raise where a batch job of several tasks runs one process, because srun was forgotten.

    Parameters
    ----------
    ranks : int or None
        What the user has asked for.

    Raises
    ------
    ConfigError
        With the way out.
    """
    tasks = _number(env, "SLURM_NTASKS") or 1
    if launch.kind == "none" and ranks is None and tasks > 1:
        raise ConfigError(
            f"this Slurm job has {tasks} tasks, but this process was not started by srun, so it would run alone. Put "
            "srun before the command, or say --ranks 1"
        )


def batch_scheduler(env: Mapping[str, str] = os.environ) -> str:
    """Name of the scheduler whose job this process belongs to; empty outside of one."""
    return next((name for variable, name in SCHEDULERS.items() if variable in env), "")


def speaks() -> bool:
    """Whether this process says what all processes of its job would say."""
    return (detect().rank or 0) == 0


def final_code(code: int, world_size: int = 0) -> int:
    """The exit code of this process, where its launcher started more processes than can tell each other when to leave.

    Launchers end all processes when one of them fails: a message that only the first one says would be lost. So the
    others leave with 0, and the first one gives them time to.

    Parameters
    ----------
    world_size : int
        Of MPI's world; 0 before it has started.
    """
    size = detect().size or 1
    if code == 0 or size == 1 or size == world_size:
        return code
    if not speaks():
        return 0
    time.sleep(LEAVE_S)
    return code


def launch(ranks: int, argv: Sequence[str], *, module: str = "fastdecode_hpc") -> int:
    """Start ``python -m module *argv`` as `ranks` MPI processes on this node, and wait for the end.

    TERM, INT, USR1 and USR2 go on to rank 0 alone, which decides; they wait until rank 0 has called `announce`
    and handles them. A third TERM or INT kills the job. From the main thread only.

    Returns
    -------
    int
        Rank 0's exit code; where a process died by a signal 128 plus its number, or what mpiexec makes of it.

    Raises
    ------
    ConfigError
        When mpi4py finds no MPI library, there is no mpiexec of that library, or so many ranks would choke the node.

    Notes
    -----
    What leaves no orphan: mpiexec is in a session of its own, so that Ctrl-C reaches it through this process only,
    and the kernel kills it when this process dies, even by kill -9 (PR_SET_PDEATHSIG). Each rank watches this
    process and its own parent (`announce`) and kills itself when one is gone. A rank that has not got there yet
    ends with its mpiexec.
    """
    if is_launched():
        raise RuntimeError(f"launch() in a process that launch() started ({LAUNCHED} is set)")
    _check_ranks(ranks)
    with tempfile.TemporaryDirectory(prefix="fastdecode-", ignore_cleanup_errors=True) as folder:
        job = _Job(Path(folder))
        with _handling(STOP_SIGNALS, job.on_signal):
            library = find_library()
            mpiexec = find_mpiexec(library)
            command = [str(mpiexec), *OPTIONS[library.family], "-n", str(ranks), sys.executable, "-m", module, *argv]
            return job.run(command, environment(library.family, mpiexec))


def _check_ranks(ranks: int) -> None:
    num_cores = len(os.sched_getaffinity(0))
    most = max(MIN_RANKS_ALLOWED, num_cores)
    if ranks > most:
        raise ConfigError(
            f"--ranks is {ranks}, and this process may use {num_cores} cores; start at most {most} here (one R-worker "
            "a socket is meant, with threads inside), or more nodes by srun or mpirun"
        )


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether `launch` started this process: then it is a rank, and starts no others."""
    return LAUNCHED in env


class _Job:
    """One run of mpiexec, and the folder in which it and the launcher leave each other notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = folder / "launcher"  # Process
        self.rank_0 = folder / "rank_0"  # Process, by `announce`
        self.orderly = folder / "orderly"  # empty: rank 0 ended by itself
        self._waiting: list[int] = []  # signals for rank 0
        self._num_ends = 0

    def run(self, command: list[str], env: dict[str, str]) -> int:
        Process.current().save(self.launcher)
        process = _start(command, env | {LAUNCHED: str(self.folder)})
        while True:
            try:
                return self._exit_code(process.wait(POLL_S))
            except subprocess.TimeoutExpired:
                self._forward(process)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)
        self._num_ends += number in (signal.SIGTERM, signal.SIGINT)

    def _forward(self, process: subprocess.Popen[bytes]) -> None:
        if self._num_ends > 2:
            process.kill()
        rank_0 = Process.load(self.rank_0)
        while rank_0 is not None and self._waiting and rank_0.catches(self._waiting[0]):
            rank_0.send(self._waiting.pop(0))

    def _exit_code(self, code: int) -> int:
        """Tell a death from a verdict: Hydra's code of a rank that died by SIGILL is 4, and by SIGQUIT 3."""
        if 2 < code <= signal.SIGRTMAX and self.rank_0.exists() and not self.orderly.exists():
            return 128 + code
        return code if code >= 0 else 128 - code


def _start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    # a job in another session cannot read this terminal
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    libc, launcher = ctypes.CDLL(None), os.getpid()

    def die_with_launcher() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)

    return subprocess.Popen(command, env=env, stdin=stdin, start_new_session=True, preexec_fn=die_with_launcher)


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def announce() -> None:
    """Make this rank part of the job that `launch` started; does nothing in any other process.

    Rank 0 tells the launcher its process id, for the signals, and when it ends by `sys.exit` (not by `os._exit`)
    that its code is its own. Every rank starts a thread that ends it when the launcher, or the mpiexec or proxy
    that is its parent, is gone.
    """
    if not is_launched():
        return
    job, parent = _Job(Path(os.environ[LAUNCHED])), os.getppid()
    launcher = Process.load(job.launcher)
    watch = threading.Thread(target=_watch, args=(job, launcher, parent), name="launcher-watch", daemon=True)
    watch.start()
    if detect().rank == 0:
        Process.current().save(job.rank_0)
        atexit.register(_leave_note, job.orderly)


def _watch(job: _Job, launcher: Process | None, parent: int) -> None:
    while launcher is not None and launcher.is_running() and os.getppid() == parent:
        time.sleep(POLL_S)
    shutil.rmtree(job.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_note(path: Path) -> None:
    if path.parent.exists():
        path.touch()
