"""Find the mpiexec that belongs to the MPI library in use, and keep what it starts on this node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fastdecode_hpc.config import ConfigError

PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))
print(*sorted({line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/libmpi" in line}), sep="\\n")
"""

ANSWER_S = 300.0  # a first import from a cold parallel file system takes long

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

    @property
    def family(self) -> str:
        return _family(self.version)


def find_library() -> Library:
    """Ask mpi4py, in a process of its own, which MPI library it loads."""
    probe = _ask([sys.executable, "-c", PROBE], _own_environment())
    lines = probe.stdout.splitlines()
    if probe.returncode or len(lines) < 2:
        reason = (probe.stderr.strip().splitlines() or ["no libmpi is loaded"])[-1]
        raise ConfigError(
            f"mpi4py cannot load an MPI library ({reason}). Install one (pip install mpich), load your cluster's "
            "MPI module, or use --ranks 1, which needs no MPI"
        )
    return Library(lines[0], Path(lines[1]))


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
    return _family(text) if any(word in text for word in ("HYDRA", "Intel(R) MPI", "Open MPI", "OpenRTE")) else None


def _ask(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the launcher
    )  # fmt: skip


def _family(text: str) -> str:
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
