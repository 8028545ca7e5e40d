"""Find the mpiexec that belongs to the MPI library in use, and keep what it starts on this node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fastdecode_hpc.config import ConfigError

PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
paths = sorted({line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/libmpi" in line})
print(json.dumps([MPI.Get_library_version().strip(chr(0)), paths]))
"""
START_PROBE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_SERIALIZED)
names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
print(next(name for name in names if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread()), flush=True)
MPI.Finalize()
"""

ANSWER_S = 300.0  # a first import from a cold parallel file system takes long
START_S = 60.0  # of MPI in one process; on login nodes it may hang

# options that keep all ranks on this node, whatever batch system surrounds it
OPTIONS = {
    "MPICH": ("-launcher", "fork", "-hosts", "localhost"),
    "Open MPI": ("--oversubscribe", "--bind-to", "none"),
}
NAMES = {
    "MPICH": ("mpiexec", "mpiexec.hydra", "mpiexec.mpich"),
    "Open MPI": ("mpiexec", "mpiexec.openmpi", "prterun"),
}

# Without these Open MPI spreads the ranks over the nodes of a surrounding allocation; PRTE_ is version 5.
OPENMPI_LOCAL = {
    "PRTE_MCA_plm": "ssh", "PRTE_MCA_ras": "^slurm,tm,lsf,gridengine,pbs",
    "OMPI_MCA_plm": "rsh", "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine",
}  # fmt: skip
# A second less to start, and a waiting rank lets go of a core it shares.
OPENMPI_DEFAULTS = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx", "OMPI_MCA_mpi_yield_when_idle": "1"}


class Library(NamedTuple):
    """The MPI library that mpi4py loads."""

    version: str
    path: Path
    description: str = ""  # all that it says about itself

    @property
    def family(self) -> str:
        return family_of(self.version)

    @property
    def understands_pmix(self) -> bool:
        return understands_pmix(self.description)


def find_library() -> Library:
    """Ask mpi4py, in a process of its own, which MPI library it loads."""
    probe = _ask([sys.executable, "-c", PROBE], _own_environment())
    description, paths = json.loads(probe.stdout) if probe.returncode == 0 else ("", [])
    if not paths:
        reason = (probe.stderr.strip().splitlines() or ["no libmpi is loaded"])[-1]
        raise ConfigError(
            f"mpi4py cannot load an MPI library ({reason}). Install one (pip install mpich), load your cluster's "
            "MPI module, or use --ranks 1, which needs no MPI"
        )
    return Library(description.splitlines()[0].strip("\0"), Path(paths[0]), description)


def start_alone(limit_s: float = START_S) -> tuple[str, str]:
    """Start MPI in a process of its own, as a job of one rank: the thread level it gives, or why that fails."""
    try:
        probe = _ask([sys.executable, "-c", START_PROBE], _own_environment(), limit_s)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {limit_s:g} s"
    words = probe.stdout.split()
    if probe.returncode or not words:
        return "", " ".join(probe.stderr.split())[:300] or f"exit code {probe.returncode}"
    return words[-1], ""


def short_name(description: str) -> str:
    """Name and version out of what a library says about itself."""
    line = description.splitlines()[0].partition(",")[0] if description else ""  # Open MPI tells its builder after it
    return " ".join(line.split())  # MPICH pads its version


def understands_pmix(description: str) -> bool:
    """False for a library that says how it was configured, and not for PMIx; MPICH tells, the others don't."""
    configured = re.search(r"^MPICH configure:(.*)$", description, re.MULTILINE)
    return configured is None or "pmix" in configured[1]


def find_mpiexec(library: Library) -> Path:
    """Find the mpiexec that belongs to `library`: beside it, else on PATH."""
    folders = [parent / "bin" for parent in library.path.parents]
    folders += [Path(folder) for folder in os.get_exec_path()]
    for folder in folders:
        for name in NAMES[library.family]:
            if os.access(folder / name, os.X_OK) and _family_of_mpiexec(folder / name) == library.family:
                return folder / name
    raise ConfigError(
        f"mpi4py loads {library.version} ({library.path}), but no mpiexec of {library.family} is beside it or on "
        "PATH. Put it on PATH (module load), start with your own launcher (srun, mpirun -n N fastdecode ...), "
        "or use --ranks 1, which needs no MPI"
    )


def _family_of_mpiexec(path: Path) -> str | None:
    try:
        answer = _ask([str(path), "--version"], _own_environment(path.parent))
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = answer.stdout + answer.stderr
    return family_of(text) if any(word in text for word in ("HYDRA", "Intel(R) MPI", "Open MPI", "OpenRTE")) else None


def _ask(command: list[str], env: dict[str, str], limit_s: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the launcher
    )  # fmt: skip


def family_of(text: str) -> str:
    """`MPICH` (with its many children, which all bring Hydra) or `Open MPI`."""
    return "Open MPI" if any(word in text for word in ("Open MPI", "OpenRTE")) else "MPICH"


def _own_environment(folder: Path | None = None) -> dict[str, str]:
    """The environment less what another launcher told this process: to mpiexec it would look like a parent."""
    env = {name: value for name, value in os.environ.items() if not _is_a_launchers(name)}
    if folder is not None:  # Intel's mpiexec looks for its other half there
        env["PATH"] = os.pathsep.join([str(folder), env.get("PATH", os.defpath)])
    return env


def _is_a_launchers(name: str) -> bool:
    prefixes = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "HYDI_")
    return name.startswith(prefixes) and not name.startswith("PMIX_MCA_")


def environment(family: str, mpiexec: Path) -> dict[str, str]:
    """What `mpiexec` and its ranks need to see, and not see, to run on this node alone."""
    env = _own_environment(mpiexec.parent)
    if family == "Open MPI":
        env |= OPENMPI_LOCAL
        for name, value in OPENMPI_DEFAULTS.items():
            env.setdefault(name, value)
        if os.geteuid() == 0:
            env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            env.setdefault("HOME", str(Path.home()))
    return env
