"""What rank 0 says once about how the ranks were placed: the numbers, and the launcher's flag that mends it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode_hpc.affinity import Cores, num_usable_cores
from fastdecode_hpc.host import format_bytes, format_cores
from fastdecode_hpc.setup import RankSetup

ThreadCores = tuple[Cores, ...]  # of one rank: the cores that each of its kernels' threads may run on


def placement_advice(ranks: Sequence[RankSetup], thread_cores: Sequence[ThreadCores]) -> list[str]:
    """What is wrong with the placement, a sentence for each kind of mistake, whatever the number of ranks.

    Parameters
    ----------
    ranks : sequence of RankSetup
    thread_cores : sequence of tuple
        For each rank the cores of each thread, read back; empty for a rank without kernels.
    """
    usable = [_num_usable(rank, cores) for rank, cores in zip(ranks, thread_cores, strict=True)]
    crowded = [(rank, count) for rank, count in zip(ranks, usable, strict=True) if count < rank.threads]
    return [
        *_spanning([rank for rank in ranks if rank.num_blocks and len(rank.numa_nodes) > 1]),
        *_too_few_cores([rank for rank, _ in crowded if len(rank.cores) < rank.threads]),
        *_bound_together([(rank, count) for rank, count in crowded if len(rank.cores) >= rank.threads]),
        *_beyond_their_nodes([rank for rank in ranks if rank.kv_bytes > (rank.numa_memory_bytes or rank.kv_bytes)]),
        *_small_pages([rank for rank in ranks if rank.num_blocks and rank.huge_pages == "never"]),
    ]


def _num_usable(rank: RankSetup, cores: ThreadCores) -> int:
    return num_usable_cores(cores) if cores else min(rank.threads, len(rank.cores))


def _spanning(ranks: list[RankSetup]) -> list[str]:
    if not ranks:
        return []
    example = f"{_where(ranks[0])}: nodes {format_cores(ranks[0].numa_nodes)}"
    return [
        f"{_names(ranks)} may run on several NUMA nodes ({example}), so threads read KV that lies at another node. "
        "Give each R-worker one node: srun --ntasks-per-socket=1 --cpu-bind=sockets --mem-bind=local, or "
        "mpirun --map-by numa --bind-to numa"
    ]


def _too_few_cores(ranks: list[RankSetup]) -> list[str]:
    if not ranks:
        return []
    rank = ranks[0]
    return [
        f"{_names(ranks)} started with fewer cores than threads ({_where(rank)}: "
        f"{rank.threads} threads, {_cores(len(rank.cores))}), so threads wait for each other. Start ranks with more "
        "cores (srun --cpus-per-task=N, mpirun --map-by numa --bind-to numa), or lower --threads"
    ]


def _bound_together(crowded: list[tuple[RankSetup, int]]) -> list[str]:
    if not crowded:
        return []
    rank, count = crowded[0]
    return [
        f"{_names([rank for rank, _ in crowded])} lost cores after the start ({_where(rank)}: {rank.threads} threads "
        f"can use {_cores(count)} of the {len(rank.cores)} it started with). Unset OMP_PLACES, GOMP_CPU_AFFINITY, "
        "KMP_AFFINITY and OMP_THREAD_LIMIT, or set OMP_PROC_BIND=false"
    ]


def _beyond_their_nodes(ranks: list[RankSetup]) -> list[str]:
    if not ranks:
        return []
    rank = ranks[0]
    return [
        f"{_names(ranks)} may hold more KV than their NUMA nodes have free ({_where(rank)}: "
        f"{format_bytes(rank.kv_bytes)} of KV, {format_bytes(rank.numa_memory_bytes or 0)} free on nodes "
        f"{format_cores(rank.numa_nodes)}), so a part of it would lie at another node. Lower --kv-memory-bytes, or "
        "leave it out"
    ]


def _small_pages(ranks: list[RankSetup]) -> list[str]:
    if not ranks:
        return []
    hosts = sorted({rank.host for rank in ranks})
    return [
        f"transparent huge pages are off (never) on {hosts[0]}{f' and {len(hosts) - 1} more' if hosts[1:] else ''}: "
        "reading KV misses the TLB more often. An administrator can write madvise to "
        "/sys/kernel/mm/transparent_hugepage/enabled"
    ]


def _names(ranks: list[RankSetup]) -> str:
    return f"{'ranks' if ranks[1:] else 'rank'} {format_cores(tuple(rank.rank for rank in ranks))}"


def _where(rank: RankSetup) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"
