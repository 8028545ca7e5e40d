"""From the facts of all ranks to verdicts: do they fit each other, and is one of them slow? Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdecode_hpc.advice import Advice, ThreadCores, lost_cores, placement_faults, unlike, unlike_ranks
from fastdecode_hpc.doctor.checks import OK, PROBLEM, WARNING, Finding, examine
from fastdecode_hpc.doctor.facts import Facts
from fastdecode_hpc.setup import Place

SLOW_SHARE = 0.7  # of what the best of its kind does; less is slow
SLOW_LATENCY = 3.0  # times the best of its kind
LEAST_LATENCY_S = 20e-6  # below it nothing is slow: other ranks' work on the same cores shows more


@dataclass(frozen=True, slots=True)
class Speed:
    """What one rank was measured to do.

    Attributes
    ----------
    read_bytes_per_s : float
        Of plain reading, all R-workers at the same time.
    latency_s, link_bytes_per_s : float
        Of messages from rank 0; 0: there is no link.
    is_near : bool
        On rank 0's host.
    """

    rank: int
    host: str
    read_bytes_per_s: float
    latency_s: float = 0.0
    link_bytes_per_s: float = 0.0
    is_near: bool = True

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def examine_all(everyone: Sequence[Facts]) -> list[Finding]:
    """The checks of each rank: one line where all are well, else one for each way out."""
    found: dict[tuple[str, str, str], list[tuple[int, Finding]]] = {}
    order: dict[str, int] = {}
    for facts in everyone:
        for one in examine(facts):
            order.setdefault(one.check, len(order))
            found.setdefault((one.check, one.verdict, one.fix), []).append((facts.rank, one))
    merged = [_merge(same, everyone) for same in found.values()]
    faulty = {one.check for one in merged if one.verdict != OK}
    told = [one for one in merged if one.verdict != OK or one.check not in faulty]
    return sorted(told, key=lambda one: order[one.check])


def _merge(same: Sequence[tuple[int, Finding]], everyone: Sequence[Facts]) -> Finding:
    """What several ranks say alike, in the words of the first."""
    (first, one), ranks = same[0], tuple(rank for rank, _ in same)
    if len(everyone) == 1:
        return one
    differ = len({other.text for _, other in same}) > 1
    example = f" (rank {first} on {everyone[first].host})" if differ else ""
    return Finding(
        one.check,
        one.verdict,
        f"{one.text}{example}",
        one.fix,
        ranks if one.verdict != OK and len(ranks) < len(everyone) else (),
    )


def compare(
    everyone: Sequence[Facts], places: Sequence[Place], cores: Sequence[ThreadCores], *, in_batch: bool
) -> list[Finding]:
    """Whether the ranks fit each other, and their places.

    Parameters
    ----------
    cores : sequence of tuple
        For each rank the cores of each thread, read back; empty for a rank without kernels.
    in_batch : bool
        Under a batch scheduler, where `generate` refuses what it warns of elsewhere.
    """
    grave = PROBLEM if in_batch else WARNING
    found = [
        *(Finding("ranks", PROBLEM, one.fault, one.fix) for one in unlike_ranks([facts.hello for facts in everyone])),
        *(Finding("ranks", WARNING, one.fault, one.fix) for one in _differences(everyone)),
        *(Finding("placement", grave, one.fault, one.fix) for one in placement_faults(places, wants_gpu=True)),
        *(Finding("placement", WARNING, one.fault, one.fix) for one in lost_cores(places, cores)),
        *_uneven_threads(places),
    ]
    if len(everyone) > 1 and not any(one.check == "ranks" for one in found):
        text = f"all {len(everyone)} have the same program, MPI library, Python and instruction sets"
        found.append(Finding("ranks", OK, text))
    if not any(one.check == "placement" for one in found):
        found.append(Finding("placement", OK, "no rank spans NUMA nodes, and there is a core for each thread"))
    return found


def _differences(everyone: Sequence[Facts]) -> list[Advice]:
    hosts = {facts.rank: facts.host for facts in everyone}
    pythons = {facts.rank: facts.python for facts in everyone}
    isas = {facts.rank: " ".join(facts.hello.isas) for facts in everyone if facts.attends}
    return [
        *unlike("Python", pythons, hosts, "Use one environment on all nodes"),
        *unlike(
            "the set of instructions",
            isas,
            hosts,
            "All ranks will use the best that all have: take nodes of one kind (sbatch --constraint), or "
            "--isa-per-rank",
        ),
    ]


def _uneven_threads(places: Sequence[Place]) -> list[Finding]:
    workers = [place for place in places if place.role == "R-worker"]
    counts = {place.threads: place.rank for place in workers}
    if len(counts) < 2:
        return []
    few, many = min(counts), max(counts)
    return [
        Finding(
            "threads",
            WARNING,
            f"R-workers have unequal threads: rank {counts[few]} has {few}, rank {counts[many]} has {many}",
            "Give all R-workers the same --cpus-per-task; unequal ones get unequal shares of the load",
        )
    ]


def speeds_of(
    everyone: Sequence[Facts], reading: Mapping[int, float], links: Mapping[int, tuple[float, float]]
) -> list[Speed]:
    """What was measured, by rank; those that read nothing and have no link are left out."""
    no_link = (0.0, 0.0)
    return [
        Speed(
            facts.rank,
            facts.host,
            reading.get(facts.rank, 0.0),
            *links.get(facts.rank, no_link),
            is_near=facts.host == everyone[0].host,
        )
        for facts in everyone
        if facts.rank in reading or facts.rank in links
    ]


def judge_speeds(speeds: Sequence[Speed]) -> list[Finding]:
    """Which ranks are slow: to read, or to reach; each against the best of its kind."""
    readers = [speed for speed in speeds if speed.read_bytes_per_s]
    linked = [speed for speed in speeds if speed.link_bytes_per_s]
    found = _slow_readers(readers)
    for kind in ([one for one in linked if one.is_near], [one for one in linked if not one.is_near]):
        found += _slow_links(kind)
    return found


def _slow_readers(speeds: Sequence[Speed]) -> list[Finding]:
    if not speeds:
        return []
    best = max(speed.read_bytes_per_s for speed in speeds)
    slow = [speed for speed in speeds if speed.read_bytes_per_s < SLOW_SHARE * best]
    if not slow:
        middle = statistics.median(speed.read_bytes_per_s for speed in speeds)
        return [Finding("reading", OK, f"{middle / 1e9:.1f} GB/s an R-worker")]
    worst = min(slow, key=lambda speed: speed.read_bytes_per_s)
    return [
        Finding(
            "reading",
            WARNING,
            f"reads {worst.read_bytes_per_s / 1e9:.1f} GB/s ({worst.name}), and the best reads {best / 1e9:.1f}",
            "Look for other work on its node, memory modules that are missing, a lower clock, or fewer threads; "
            "leave the node out (sbatch --exclude), or let --r-worker-weights auto give it less",
            tuple(speed.rank for speed in slow),
        )
    ]


def _slow_links(speeds: Sequence[Speed]) -> list[Finding]:
    if not speeds:
        return []
    rate = max(speed.link_bytes_per_s for speed in speeds)
    latency = min(speed.latency_s for speed in speeds)
    slow = [
        speed
        for speed in speeds
        if speed.link_bytes_per_s < SLOW_SHARE * rate or speed.latency_s > max(LEAST_LATENCY_S, SLOW_LATENCY * latency)
    ]
    where = "on rank 0's node" if speeds[0].is_near else "to other nodes"
    best = f"{latency * 1e6:.1f} us, {rate / 1e9:.2f} GB/s"
    if not slow:
        return [Finding("links", OK, f"{where} {best}")]
    worst = min(slow, key=lambda speed: speed.link_bytes_per_s)
    return [
        Finding(
            "links",
            WARNING,
            f"messages from rank 0 take {worst.latency_s * 1e6:.1f} us and come at "
            f"{worst.link_bytes_per_s / 1e9:.2f} GB/s ({worst.name}); the best {where}: {best}",
            "Check that MPI uses the fast network on both nodes, that they are on one switch (sbatch --switches=1), "
            "and that ranks have cores of their own; until then --r-worker-weights auto gives it fewer sequences",
            tuple(speed.rank for speed in slow),
        )
    ]
