"""Chooses sequences so that every slot gets its share of the rows, and of each R-worker's load. Pure.

A stage lasts as long as its slowest R-worker, so what has to be level is the load of each R-worker in each slot.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from fastdecode_hpc.sequence import Sequence

TOLERANCE = 0.05  # of an R-worker's share of a slot, that it may read too much before a sequence is exchanged

Loads = Counter[int]  # owner |-> load; may be negative


class LoadedSequence(NamedTuple):
    """A sequence and what its next step reads."""

    seq: Sequence
    load: int


def sum_loads(seqs: Iterable[LoadedSequence]) -> Loads:
    """Load by owner."""
    loads: Loads = Counter()
    for seq, load in seqs:
        loads[seq.owner] += load
    return loads


def is_level(loads: Loads, targets: Mapping[int, float], num_rows: int) -> bool:
    """Whether no R-worker reads much more than it should in this slot.

    Less than one average sequence too much is level: with few rows it could not be helped, only moved about.
    """
    tolerance = max(TOLERANCE, len(targets) / max(1, num_rows))
    return all(loads[owner] - target <= tolerance * target for owner, target in targets.items())


def take_level(candidates: Ordered[LoadedSequence], count: int, missing: Loads) -> list[Sequence]:
    """Take up to `count` candidates that bring each owner near the load it misses.

    Of equal ones the earlier goes first.
    """
    queues: dict[int, list[tuple[int, int]]] = {}
    for place, (seq, load) in enumerate(candidates):
        insort(queues.setdefault(seq.owner, []), (load, place))
    missing, taken = missing.copy(), []
    for left in range(min(count, len(candidates)), 0, -1):
        owner = max((owner for owner, queue in queues.items() if queue), key=lambda owner: missing[owner])
        load, place = _pop_nearest(queues[owner], missing.total() / left)
        missing[owner] -= load
        taken.append(candidates[place].seq)
    return taken


def choose_leaving(own: Ordered[LoadedSequence], share: int, targets: Mapping[int, float]) -> list[Sequence]:
    """Who leaves a slot for another one.

    Parameters
    ----------
    own : sequence of LoadedSequence
        What the slot has.
    share : int
        Rows that it should have.
    targets : mapping of int to float
        Load that it should have, by owner.

    Notes
    -----
    A full slot in which an R-worker reads too much gives one of its sequences away; the slot that takes it gives an
    average one back. One of the two then misses a step, so it is done only where it levels out most of the difference.
    """
    if len(own) < share:
        return []
    loads = sum_loads(own)
    excess: Loads = Counter({owner: round(loads[owner] - target) for owner, target in targets.items()})
    if len(own) > share:
        return take_level(own, len(own) - share, excess)
    if is_level(loads, targets, len(own)):
        return []
    owner = max(targets, key=lambda owner: excess[owner])
    mine = [seq for seq in own if seq.seq.owner == owner]
    average = loads[owner] / len(mine)
    nearest = min(mine, key=lambda seq: abs(seq.load - average - excess[owner]))
    left = abs(excess[owner] - (nearest.load - average))
    return [nearest.seq] if left < excess[owner] / 2 else []


def _pop_nearest(queue: list[tuple[int, int]], wanted: float) -> tuple[int, int]:
    """Remove the entry whose load is nearest to `wanted` from a sorted list."""
    after = bisect_left(queue, (wanted, -1))
    nearest = min(queue[max(0, after - 1) : after + 1], key=lambda entry: abs(entry[0] - wanted))
    return queue.pop(bisect_left(queue, (nearest[0], -1)))
