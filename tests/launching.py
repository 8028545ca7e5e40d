"""Starting MPI programs from tests, with a hard time limit and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
BIN = Path(sys.prefix) / "bin"
# Ranks of a test share few cores; one thread each, and no setting of the caller's shell.
_CLEARED = ("OMP_", "PMI_", "OMPI_", "SLURM_", "PMIX_", "FASTDECODE_")


def clean_env(**extra: str) -> dict[str, str]:
    """The environment without any launcher's or OpenMP's variables, plus `extra`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
    return {**env, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **extra}


def is_open_mpi() -> bool:
    """Whether this environment's mpiexec is Open MPI's."""
    return "ompi" in os.path.realpath(BIN / "mpiexec") or (BIN / "ompi_info").exists()


def mpiexec(num_ranks: int) -> list[str]:
    """The command that starts `num_ranks` ranks with this environment's MPI."""
    program = BIN / "mpiexec"
    command = [str(program) if program.exists() else shutil.which("mpiexec") or "mpiexec"]
    if is_open_mpi():
        command += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "btl", "^ofi"]
    return [*command, "-n", str(num_ranks)]


def run_limited(command: list[str], *, timeout: float, env: dict[str, str] | None = None, cwd: Path | None = None):
    """Run to the end; whatever is left of the process group after `timeout` seconds is killed."""
    process = subprocess.Popen(
        command, env=env or clean_env(), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} ran longer than {timeout} s\n{out[-3000:]}\n{err[-5000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_ranks(num_ranks: int, arguments: list[str], *, timeout: float = 120, env: dict[str, str] | None = None):
    """Run a Python program on `num_ranks` ranks; one rank means no launcher at all."""
    launcher = mpiexec(num_ranks) if num_ranks > 1 else []
    return run_limited([*launcher, sys.executable, *arguments], timeout=timeout, env=env)


def fastdecode(*arguments: object, timeout: float = 120, env: dict[str, str] | None = None):
    """Run the command line as a user's shell would."""
    command = [sys.executable, "-m", "fastdecode_hpc", *map(str, arguments)]
    return run_limited(command, timeout=timeout, env=env)


def read_records(path: Path) -> list[dict]:
    """All records of an output file, by index."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return sorted((json.loads(line) for line in file), key=lambda record: record["index"])


def write_requests(path: Path, requests: list[dict]) -> Path:
    """A JSONL file of requests."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path
