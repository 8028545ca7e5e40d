"""Start real ranks of a stand-in program, end them in every way, and look that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

import fastdecode_hpc
from fastdecode_hpc.signals import SAME_REQUEST_S
from launching import clean_env

pytest.importorskip("mpi4py")

LIMIT_S = 10.0
INTEL_DEATH = 255  # what Intel MPI's mpiexec says of any signal
PACKAGES = str(Path(fastdecode_hpc.__file__).parents[1])
STAND_IN = '''
import os, sys, time
from fastdecode_hpc.launch import announce, detect, is_launched, launch
from fastdecode_hpc.signals import StopRequest

announce()
stop = StopRequest()
stop.install()

import mpi4py
mpi4py.rc.finalize = False
from mpi4py import MPI
from pathlib import Path

world, (task, *more) = MPI.COMM_WORLD, sys.argv[1:]
rank = world.rank


def wait_for_stop():
    """Until rank 0 got a signal; the others only poll, as R-workers do."""
    Path(f"ready.{rank}").write_text(str(os.getpid()))
    while rank == 0 and not (stop() and task == "wait"):
        time.sleep(0.02)
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.02)
    Path(f"reason.{rank}").write_text(str(stop.reason))
    return 75


def again():
    """What a rank does that meets --ranks once more."""
    assert is_launched() and detect().kind == "mpirun" and detect().size == world.size
    try:
        launch(2, ["exit", "0"], module="stand_in")
    except RuntimeError:
        return 0


code = {"exit": lambda: int(more[0]), "wait": wait_for_stop, "stubborn": wait_for_stop, "again": again}[task]()
MPI.Finalize()
sys.exit(code if rank == 0 else 0)
'''
LAUNCHER = "import sys; from fastdecode_hpc.launch import launch; sys.exit(launch(2, sys.argv[1:], module='stand_in'))"


class Run:
    """A launcher with two ranks; its processes are known by a variable of their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "stand_in.py").write_text(STAND_IN)
        self.folder, self.mark = folder, uuid.uuid4().hex
        env = clean_env(TEST_LAUNCH_MARK=self.mark, TMPDIR=str(folder))
        env["PYTHONPATH"] = os.pathsep.join([str(folder), PACKAGES, env["PYTHONPATH"]])
        command = [sys.executable, "-c", LAUNCHER, *arguments]
        self.launcher = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True)

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TEST_LAUNCH_MARK") == self.mark
        except psutil.Error:
            return False  # gone, a zombie, or another user's

    def ready(self) -> list[int]:
        """Process ids of both ranks, once they wait."""
        files = [self.folder / f"ready.{rank}" for rank in range(2)]
        wait_until(lambda: self.has_ended() or all(file.exists() and file.read_text() for file in files), 30)
        return [int(file.read_text()) for file in files]

    def has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def code(self) -> int:
        return self.launcher.wait(30)

    def clean_up(self) -> None:
        for process in self.processes():
            process.kill()
        self.launcher.wait(LIMIT_S)


def wait_until(is_done, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    runs: list[Run] = []

    def start_one(*arguments: str) -> Run:
        runs.append(Run(tmp_path, *arguments))
        return runs[-1]

    yield start_one
    for run in runs:
        run.clean_up()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 75])
def test_rank_0s_exit_code_arrives(start, code):
    run = start("exit", str(code))
    assert run.code() == code
    assert not list(run.folder.glob("fastdecode-*"))


def test_a_rank_does_not_launch_again(start):
    assert start("again").code() == 0


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM", "SIGINT"])
def test_a_signal_to_the_launcher_reaches_rank_0_only(start, name):
    run = start("wait")
    run.ready()
    run.launcher.send_signal(getattr(signal, name))
    assert run.code() == 75
    assert [(run.folder / f"reason.{rank}").read_text() for rank in range(2)] == [name, "None"]


def test_a_signal_before_rank_0_is_ready_is_not_lost(start):
    run = start("wait")
    wait_until(lambda: run.has_ended() or list(run.folder.glob("fastdecode-*")))
    time.sleep(0.05)  # the launcher handles signals from here on; the ranks take longer
    run.launcher.send_signal(signal.SIGUSR1)
    assert run.code() == 75
    assert (run.folder / "reason.0").read_text() == "SIGUSR1"


def test_a_second_term_ends_the_job_at_once(start):
    run = start("stubborn")
    run.ready()
    run.launcher.terminate()
    time.sleep(SAME_REQUEST_S + 0.4)
    assert not run.has_ended()
    run.launcher.terminate()
    assert run.launcher.wait(LIMIT_S) in (128 + signal.SIGTERM, INTEL_DEATH)
    wait_until(lambda: not run.processes())


def test_a_third_term_ends_a_job_whose_rank_0_is_stuck(start):
    run = start("wait")
    os.kill(run.ready()[0], signal.SIGSTOP)
    for _ in range(3):
        time.sleep(0.3)
        assert not run.has_ended()
        run.launcher.terminate()
    assert run.launcher.wait(LIMIT_S) == 128 + signal.SIGKILL
    wait_until(lambda: not run.processes())


def test_killing_the_launcher_leaves_no_process(start):
    run = start("wait")
    assert set(run.ready()) < {process.pid for process in run.processes()}
    run.launcher.kill()
    wait_until(lambda: not run.processes())


def test_killing_mpiexec_leaves_no_process(start):
    run = start("wait")
    run.ready()
    psutil.Process(run.launcher.pid).children()[0].kill()
    assert run.launcher.wait(LIMIT_S) == 128 + signal.SIGKILL
    wait_until(lambda: not run.processes())


@pytest.mark.parametrize("rank", [0, 1])
def test_killing_a_rank_ends_the_job(start, rank):
    run = start("wait")
    os.kill(run.ready()[rank], signal.SIGKILL)
    assert run.launcher.wait(LIMIT_S) != 0
    wait_until(lambda: not run.processes())


def test_a_death_by_signal_is_not_taken_for_an_exit_code(start):
    run = start("wait")
    os.kill(run.ready()[1], signal.SIGILL)
    # Another rank may come first: MPICH's launcher closes its pipes, and who writes to them dies of SIGPIPE.
    assert run.launcher.wait(LIMIT_S) in (128 + signal.SIGILL, 128 + signal.SIGPIPE, INTEL_DEATH)
