"""What rank 0 says once about how the ranks were placed: the numbers, and the launcher's flag that mends it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastdecode_hpc.affinity import Cores, num_usable_cores
from fastdecode_hpc.host import format_bytes, format_cores, format_ranks
from fastdecode_hpc.setup import Hello, Place, RankSetup, best_isa

HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"


class Advice(NamedTuple):
    """One kind of mistake: the numbers, and what mends it; each a sentence without its full stop."""

    fault: str
    fix: str

    def __str__(self) -> str:
        return f"{self.fault}. {self.fix}"


ThreadCores = tuple[Cores, ...]  # of one rank: the cores that each of its kernels' threads may run on


def placement_faults(places: Sequence[Place], *, wants_gpu: bool = False) -> list[Advice]:
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


def placement_advice(ranks: Sequence[RankSetup], thread_cores: Sequence[ThreadCores]) -> list[Advice]:
    """What else costs speed, a sentence for each kind of mistake, whatever the number of ranks.

    Parameters
    ----------
    ranks : sequence of RankSetup
    thread_cores : sequence of tuple
        For each rank the cores of each thread, read back; empty for a rank without kernels.
    """
    return [
        *lost_cores(ranks, thread_cores),
        *_beyond_their_nodes([rank for rank in ranks if rank.kv_bytes > (rank.numa_memory_bytes or rank.kv_bytes)]),
        *_small_pages([rank for rank in ranks if rank.num_blocks and rank.huge_pages == "never"]),
    ]


def lost_cores(places: Sequence[Place], thread_cores: Sequence[ThreadCores]) -> list[Advice]:
    """What is wrong where threads can use fewer cores than they were started with."""
    usable = [
        num_usable_cores(cores) if cores else len(place.cores)
        for place, cores in zip(places, thread_cores, strict=True)
    ]
    lost = [
        (place, count)
        for place, count in zip(places, usable, strict=True)
        if count < place.threads <= len(place.cores)  # others were started with too few
    ]
    if not lost:
        return []
    place, count = lost[0]
    return [
        Advice(
            f"{_names([place for place, _ in lost])} lost cores after the start ({_where(place)}: {place.threads} "
            f"threads can use {_cores(count)} of the {len(place.cores)} it started with)",
            "Unset OMP_PLACES, GOMP_CPU_AFFINITY, KMP_AFFINITY and OMP_THREAD_LIMIT, or set OMP_PROC_BIND=false",
        )
    ]


def unlike_ranks(hellos: Sequence[Hello]) -> list[Advice]:
    """What ranks that work together must have alike, and haven't: program and MPI library."""
    hosts = {hello.rank: hello.host.host for hello in hellos}
    versions = {hello.rank: hello.version for hello in hellos}
    libraries = {hello.rank: hello.library for hello in hellos}
    return [
        *unlike("fastdecode", versions, hosts, "Install one version everywhere"),
        *unlike("the MPI library", libraries, hosts, "Use one environment, or MPI module, on all nodes"),
    ]


def lowered_isa(ranks: Sequence[RankSetup], hellos: Sequence[Hello]) -> list[Advice]:
    """Which ranks compute with a slower instruction set than they have, for the sake of others."""
    faster: dict[str, list[Place]] = {}
    for rank, hello in zip(ranks, hellos, strict=True):
        if rank.isa is not None and rank.isa != (best := best_isa(hello.isas)):
            faster.setdefault(best, []).append(rank)
    if not faster:
        return []
    common = next(rank.isa for rank in ranks if rank.isa is not None)
    could = ", ".join(f"{_names(places)} ({_where(places[0])}) {best}" for best, places in sorted(faster.items()))
    return [
        Advice(
            f"all ranks compute with {common}, the best instruction set that all of them have; alone could use {could}",
            "Take nodes of one kind (sbatch --constraint), or --isa-per-rank where a row's bits may depend on where it "
            "was computed",
        )
    ]


def unlike(what: str, values: Mapping[int, str], hosts: Mapping[int, str], fix: str) -> list[Advice]:
    """Which ranks have something else than the first one; `values` and `hosts` are by rank."""
    first = min(values, default=0)
    others = [rank for rank, value in sorted(values.items()) if value != values[first]]
    if not others:
        return []
    where = ", ".join(sorted({hosts[rank] for rank in others})[:3])
    found = " and ".join(sorted({" ".join(values[rank].split()) for rank in others}))
    return [
        Advice(
            f"{what} is not the same on all ranks: rank {first} on {hosts[first]} has {' '.join(values[first].split())}"
            f", {format_ranks(others)} ({where}) {'have' if others[1:] else 'has'} {found}",
            fix,
        )
    ]


def _spanning(places: list[Place]) -> list[Advice]:
    if not places:
        return []
    example = f"{_where(places[0])}: nodes {format_cores(places[0].numa_nodes)}"
    return [
        Advice(
            f"{_names(places)} may run on several NUMA nodes ({example}), so threads read KV that lies at another node",
            "Give each R-worker one node: srun --cpu-bind=ldoms --mem-bind=local (where a socket is one node also "
            "--ntasks-per-socket=1 --cpu-bind=sockets --mem-bind=local), or mpirun --map-by numa --bind-to numa",
        )
    ]


def _too_few_cores(places: list[Place]) -> list[Advice]:
    if not places:
        return []
    place = places[0]
    return [
        Advice(
            f"{_names(places)} started with fewer cores than threads ({_where(place)}: {place.threads} threads, "
            f"{_cores(len(place.cores))}), so threads wait for each other",
            "Start ranks with more cores (srun --cpus-per-task=N, mpirun --map-by numa --bind-to numa), or lower "
            "--threads",
        )
    ]


def _same_cores(places: Sequence[Place]) -> list[Advice]:
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
    return [
        Advice(
            f"{format_ranks(sorted(crowded))} were started on the same cores ({example}), so they take turns",
            "Give each rank cores of its own (srun --cpus-per-task=N --cpu-bind=cores, mpirun --map-by slot:PE=N "
            "--bind-to core), start fewer on a node, or lower --threads",
        )
    ]


def _gpu_elsewhere(places: Sequence[Place]) -> list[Advice]:
    first, others = places[0], [place for place in places if place.gpus]
    if first.gpus or not others:
        return []
    return [
        Advice(
            f"rank 0 on {first.host} sees no GPU, and {_where(others[0])} sees {others[0].gpus}: the S-Part, on rank "
            "0, would run on the CPU",
            "Put the part with the GPU first (srun A : B, A with --gpus=1), or say --device cpu",
        )
    ]


def _beyond_their_nodes(ranks: list[RankSetup]) -> list[Advice]:
    if not ranks:
        return []
    rank = ranks[0]
    return [
        Advice(
            f"{_names(ranks)} may hold more KV than their NUMA nodes have free ({_where(rank)}: "
            f"{format_bytes(rank.kv_bytes)} of KV, {format_bytes(rank.numa_memory_bytes or 0)} free on nodes "
            f"{format_cores(rank.numa_nodes)}), so a part of it would lie at another node",
            "Lower --kv-memory-bytes, or leave it out",
        )
    ]


def _small_pages(ranks: list[RankSetup]) -> list[Advice]:
    if not ranks:
        return []
    hosts = sorted({rank.host for rank in ranks})
    return [
        Advice(
            f"transparent huge pages are off (never) on {hosts[0]}"
            f"{f' and {len(hosts) - 1} more' if hosts[1:] else ''}: reading KV misses the TLB more often",
            f"An administrator can write madvise to {HUGE_PAGES}",
        )
    ]


def _names(ranks: Sequence[Place]) -> str:
    return format_ranks([rank.rank for rank in ranks])


def _where(rank: Place) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"
