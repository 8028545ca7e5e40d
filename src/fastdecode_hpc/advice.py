"""What rank 0 says once about how the ranks were placed: the numbers, and the launcher's flag that mends it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode_hpc.affinity import Cores, num_usable_cores
from fastdecode_hpc.host import format_bytes, format_cores, format_ranks
from fastdecode_hpc.setup import Place, RankSetup

ThreadCores = tuple[Cores, ...]  # of one rank: the cores that each of its kernels' threads may run on


def placement_faults(places: Sequence[Place], *, wants_gpu: bool = False) -> list[str]:
    """What is wrong with the places that the ranks were started at, a sentence for each kind of mistake.

    Under a batch scheduler a job with any of them is refused: it would waste what was booked.

    Parameters
    ----------
    places : sequence of Place
    wants_gpu : bool
        Whether the S-Part goes to a GPU where there is one.
    """
    return [
        *_spanning([place for place in places if place.role == "R-worker" and len(place.numa_nodes) > 1]),
        *_too_few_cores([place for place in places if len(place.cores) < place.threads]),
        *_same_cores(places),
        *(_gpu_elsewhere(places) if wants_gpu else []),
    ]


def placement_advice(ranks: Sequence[RankSetup], thread_cores: Sequence[ThreadCores]) -> list[str]:
    """What else costs speed, a sentence for each kind of mistake, whatever the number of ranks.

    Parameters
    ----------
    ranks : sequence of RankSetup
    thread_cores : sequence of tuple
        For each rank the cores of each thread, read back; empty for a rank without kernels.
    """
    usable = [num_usable_cores(cores) if cores else len(rank.cores)
              for rank, cores in zip(ranks, thread_cores, strict=True)]  # fmt: skip
    lost = [
        (rank, count)
        for rank, count in zip(ranks, usable, strict=True)
        if count < rank.threads <= len(rank.cores)  # others were started with too few
    ]
    return [
        *_bound_together(lost),
        *_beyond_their_nodes([rank for rank in ranks if rank.kv_bytes > (rank.numa_memory_bytes or rank.kv_bytes)]),
        *_small_pages([rank for rank in ranks if rank.num_blocks and rank.huge_pages == "never"]),
    ]


def _spanning(places: list[Place]) -> list[str]:
    if not places:
        return []
    example = f"{_where(places[0])}: nodes {format_cores(places[0].numa_nodes)}"
    return [
        f"{_names(places)} may run on several NUMA nodes ({example}), so threads read KV that lies at another node. "
        "Give each R-worker one node: srun --cpu-bind=ldoms --mem-bind=local (where a socket is one node also "
        "--ntasks-per-socket=1 --cpu-bind=sockets --mem-bind=local), or mpirun --map-by numa --bind-to numa"
    ]


def _too_few_cores(places: list[Place]) -> list[str]:
    if not places:
        return []
    place = places[0]
    return [
        f"{_names(places)} started with fewer cores than threads ({_where(place)}: "
        f"{place.threads} threads, {_cores(len(place.cores))}), so threads wait for each other. Start ranks with more "
        "cores (srun --cpus-per-task=N, mpirun --map-by numa --bind-to numa), or lower --threads"
    ]


def _same_cores(places: Sequence[Place]) -> list[str]:
    """Ranks that have to take turns on the cores they share; a rank with too many threads for itself is told apart."""
    crowded: dict[int, Place] = {}
    example = ""
    for place in places:
        sharing = [other for other in places if other.host == place.host and set(other.cores) & set(place.cores)]
        cores = {core for other in sharing for core in other.cores}
        threads = sum(min(other.threads, len(other.cores)) for other in sharing)
        if len(sharing) > 1 and threads > len(cores):
            crowded |= {other.rank: other for other in sharing}
            shown = format_cores(tuple(sorted(cores)))
            example = example or f"on {place.host}: {_names(sharing)} with {threads} threads on cores {shown}"
    if not crowded:
        return []
    ranks = [crowded[rank] for rank in sorted(crowded)]
    return [
        f"{_names(ranks)} were started on the same cores ({example}), so they take turns. Give each rank cores of its "
        "own (srun --cpus-per-task=N --cpu-bind=cores, mpirun --map-by slot:PE=N --bind-to core), start fewer on a "
        "node, or lower --threads"
    ]


def _gpu_elsewhere(places: Sequence[Place]) -> list[str]:
    first, others = places[0], [place for place in places if place.gpus]
    if first.gpus or not others:
        return []
    return [
        f"rank 0 on {first.host} sees no GPU, and {_where(others[0])} sees {others[0].gpus}: the S-Part, on rank 0, "
        "would run on the CPU. Put the part with the GPU first (srun A : B, A with --gpus=1), or say --device cpu"
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


def _names(ranks: Sequence[Place]) -> str:
    return format_ranks([rank.rank for rank in ranks])


def _where(rank: Place) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"
