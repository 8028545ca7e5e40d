"""What messages between rank 0 and each other rank take, with nothing else under way."""

from __future__ import annotations

import statistics
import time

import numpy as np

from fastdecode_hpc.transport.mpi import S_RANK, World

SIZES = (8, 65536, 1 << 20, 8 << 20)  # bytes


def measure_links(world: World, rounds: int) -> dict[int, list[tuple[int, float]]] | None:
    """Seconds of a message of each of `SIZES`, one way, to each rank; collective.

    Returns
    -------
    dict or None
        At rank 0, by rank: pairs of bytes and seconds, medians of `rounds`. A message's answer has 8 bytes, and half of
        such a round trip is taken off.
    """
    if not world.is_s_rank:
        for size in SIZES:
            _answer(world, size, rounds)
        return None
    return {rank: _ask(world, rank, rounds) for rank in range(1, world.size)}


def _ask(world: World, rank: int, rounds: int) -> list[tuple[int, float]]:
    trips = {size: _round_trip(world, rank, size, rounds) for size in SIZES}
    back = trips[SIZES[0]] / 2
    return [(size, max(seconds - back, 0.0)) for size, seconds in trips.items()]


def _round_trip(world: World, rank: int, size: int, rounds: int) -> float:
    message, answer, trips = np.zeros(size, np.uint8), np.zeros(1), []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        world.send(message, rank, f"rank {rank} to take a message of {size} bytes")
        world.receive(answer, rank, f"the answer of rank {rank}")
        trips.append(time.perf_counter() - started)
    return statistics.median(trips[1:])  # the first one warms up


def _answer(world: World, size: int, rounds: int) -> None:
    message, answer = np.zeros(size, np.uint8), np.zeros(1)
    for _ in range(rounds + 1):
        world.receive(message, S_RANK, f"a message of {size} bytes from rank 0")
        world.send(answer, S_RANK, "rank 0 to take an answer")
