"""``fastdecode`` with a planted fault on one rank.

FAULT: raise | kill (SIGKILL) | stop (SIGSTOP) | hang (for ever, outside of MPI) | pause (for PAUSE_S, then go on) |
memory (an allocation beyond RLIMIT_AS) | small (from here on RLIMIT_AS leaves 64 MiB) | disk
(from here on files end at 1000 bytes).
FAULT_RANK: where. FAULT_AT: init (before MPI is initialised) | start (before the hello) | cache (before the KV cache is
made) | load (rank 0: in place of the weights; others: while they wait for these) | step (the fifth; the default) | end
(after the last plan) | exit (before MPI is left).
FAULT_TIME: the file to which the moment is written. AWAY_LIMITS, LEAST_INIT_S: replace the constants of these names.

Usage: fault_program.py <arguments of fastdecode>
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

from fastdecode_hpc import engine, startup
from fastdecode_hpc.__main__ import main
from fastdecode_hpc.launch import detect
from fastdecode_hpc.transport import control, mpi

SMALL = 64 << 20


def limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SMALL, mapped + SMALL))


def fail() -> None:
    kind = os.environ["FAULT"]
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    if kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "small":
        limit_memory()
    elif kind == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    elif kind == "memory":
        limit_memory()
        bytearray(4 * SMALL)
    elif kind in ("hang", "pause"):
        time.sleep(float(os.environ.get("PAUSE_S", "3600")))
    else:
        raise RuntimeError("planted fault")


def plant(owner, name: str, call: int = 1) -> None:
    """Fail before the given call of a function."""
    function, calls = getattr(owner, name), 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            fail()
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def plant_at(moment: str, *, is_s_rank: bool) -> None:
    if moment == "init":
        plant(mpi, "init_mpi")
    elif moment == "start":
        plant(startup, "say_hello")
    elif moment == "cache":
        plant(engine.Engine, "_make_partition")
    elif moment == "load":
        plant(*(engine.Engine, "_load") if is_s_rank else (mpi.World, "bcast", 2))
    elif moment == "exit":
        plant(mpi.World, "finalize")
    elif is_s_rank:
        from fastdecode_hpc.s_part.worker import SWorker
        from fastdecode_hpc.transport.mpi_s_end import MpiSEnd

        plant(*(SWorker, "end_step", 5) if moment == "step" else (MpiSEnd, "close"))
    else:
        from fastdecode_hpc.r_part.worker import RWorker

        plant(*(RWorker, "end_step", 5) if moment == "step" else (RWorker, "clear"))


control.AWAY_LIMITS = int(os.environ.get("AWAY_LIMITS", control.AWAY_LIMITS))
mpi.LEAST_INIT_S = float(os.environ.get("LEAST_INIT_S", mpi.LEAST_INIT_S))
if detect().rank == int(os.environ["FAULT_RANK"]):
    plant_at(os.environ.get("FAULT_AT", "step"), is_s_rank=detect().rank == 0)
sys.exit(main())
