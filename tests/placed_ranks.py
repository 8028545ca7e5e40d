"""Ranks as they tell what they have, and as rank 0 has placed them, for tests of decisions."""

from __future__ import annotations

import dataclasses

from fastdecode_hpc import __version__
from fastdecode_hpc.host import HostInfo
from fastdecode_hpc.launch import Launch
from fastdecode_hpc.setup import Hello, RankSetup

GIB = 1 << 30
X86 = ("scalar", "avx2")


def hello(rank: int, *, name: str = "n0", cores=(0, 1, 2, 3), threads: int | None = None, isas=X86, memory=10 * GIB):
    info = HostInfo(name, 100 + rank, tuple(cores), memory, 0.5)
    return Hello(rank, info, Launch("none"), threads, isas, __version__)


def rank(number: int, **changes) -> RankSetup:
    """An R-worker with four cores on one node."""
    setup = RankSetup(
        rank=number, role="R-worker", host="n0", threads=4, cores=(0, 1, 2, 3), isa="avx2", kv_bytes=1 << 30,
        num_blocks=(9,), wait="spin", use_progress_thread=False, start_s=0.1, numa_nodes=(0,),
        huge_pages="madvise",
    )  # fmt: skip
    return dataclasses.replace(setup, **changes)


S_WORKER = rank(0, role="S-worker", num_blocks=(), numa_nodes=(0, 1))
