"""How fast each rank of a job reads memory, and messages go between rank 0 and each of them; all ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode_hpc.transport.mpi import World

READ_BYTES = 1 << 29  # of the buffer whose reading is timed, on each rank
READ_ROUNDS, LINK_ROUNDS = 5, 20

Messages = list[tuple[int, float]]  # bytes and seconds


def measure_reading(world: World | None, num_threads: int, num_bytes: int = READ_BYTES) -> dict[int, float]:
    """Bytes/s that each R-worker reads, all at the same time; collective, by rank at rank 0."""
    from fastdecode_hpc.bench.measure import interleave
    from fastdecode_hpc.bench.read_bandwidth import ReadLoops

    mine = 0.0
    if world is None or not world.is_s_rank:
        loops = ReadLoops(num_bytes, num_threads)
        mine = statistics.median(loops.best(interleave(loops.contenders, rounds=READ_ROUNDS))[1])
    if world is None:
        return {0: mine}
    found = world.gather(mine, "read bandwidth")
    return {rank: rate for rank, rate in enumerate(found or ()) if rank}


def measure_messages(world: World | None) -> dict[int, Messages]:
    """Seconds of messages between rank 0 and each other rank; collective, at rank 0."""
    if world is None:
        return {}
    from fastdecode_hpc.transport.mpi_links import measure_links

    return measure_links(world, LINK_ROUNDS) or {}


def fit_link(messages: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency in seconds and bytes/s of a link, from bytes and seconds of messages; the smallest comes first."""
    latency = messages[0][1]
    rates = [size / max(seconds - latency, 1e-12) for size, seconds in messages[1:]]
    return latency, statistics.median(rates)
