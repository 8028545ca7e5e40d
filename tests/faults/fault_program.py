"""``fastdecode`` with a planted fault: FAULT=raise|kill|hang, FAULT_RANK, at the fifth step of that rank.

The moment of the fault is written to the file FAULT_TIME.

Usage: fault_program.py <arguments of fastdecode>
"""

import os
import signal
import sys
import time
from pathlib import Path

from fastdecode_hpc.__main__ import main
from fastdecode_hpc.launch import detect


def fail() -> None:
    kind = os.environ["FAULT"]
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    raise RuntimeError("planted fault")


def plant(owner: type, name: str) -> None:
    method, calls = getattr(owner, name), 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 5:
            fail()
        return method(*args, **kwargs)

    setattr(owner, name, wrapper)


if detect().rank == int(os.environ["FAULT_RANK"]):
    if detect().rank == 0:
        from fastdecode_hpc.s_part.worker import SWorker

        plant(SWorker, "end_step")
    else:
        from fastdecode_hpc.r_part.worker import RWorker

        plant(RWorker, "end_step")
sys.exit(main())
