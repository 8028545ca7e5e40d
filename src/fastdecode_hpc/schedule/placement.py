"""Which R-worker owns which sequence, and how much KV each can hold.

Pure policy: blocks and shares are numbers here; the bytes live in `r_part.kv_cache`. Placement decides
owners, R-workers do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fastdecode_hpc.schedule.forecast import LoadForecast
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence


@dataclass(slots=True)
class Placement:
    """Owners of sequences, and the blocks each R-worker has promised to them.

    Parameters
    ----------
    layout : KVLayout
    capacity : mapping of rank to tuple of int
        Blocks of each layer group that each R-worker holds. Rank 0 stands for a partition in the
        S-worker's own process.
    weights : dict of rank to float, optional
        Share of the load that each R-worker should carry; equal by default. A worker of weight 2 gets
        twice the tokens of one of weight 1. May be changed while sequences run; it counts for those to come.

    Notes
    -----
    A sequence is admitted with its worst case (longest prompt plus output), so what has been admitted
    always finishes: nothing is evicted and nothing waits for blocks in mid-flight.
    """

    layout: KVLayout
    capacity: Mapping[int, tuple[int, ...]]
    weights: dict[int, float] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(init=False)
    _forecasts: dict[int, LoadForecast] = field(init=False)

    def __post_init__(self) -> None:
        self._free = {rank: list(blocks) for rank, blocks in self.capacity.items()}
        self._forecasts = {rank: LoadForecast(self.layout) for rank in self.capacity}

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(sorted(self.capacity))

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether some R-worker could hold `num_tokens` tokens if it were empty."""
        need = self.layout.worst_case(num_tokens)
        return any(_covers(blocks, need) for blocks in self.capacity.values())

    def place(self, seq: Sequence, step: int) -> int | None:
        """Reserve the worst case of a sequence, which starts at about `step`.

        Returns
        -------
        int or None
            The owner's rank: of those that have room the one that is to read least, for its weight, while the sequence
            runs. None while no R-worker has room.
        """
        need = self.layout.worst_case(seq.max_context_len)
        room = [rank for rank in self.owners if _covers(self._free[rank], need)]
        if not room:
            return None
        own = self._forecasts[room[0]].loads_of(seq)
        mine, num_steps = int(own.sum()), len(own)
        after = {rank: self._forecasts[rank].expected(step, num_steps) + mine for rank in room}
        owner = min(room, key=lambda rank: (after[rank] / self.weight(rank), rank))
        self._take(owner, need)
        self._forecasts[owner].add(seq, step)
        seq.owner = owner
        return owner

    def release(self, seq: Sequence, step: int) -> None:
        """Give the reservation of a sequence back that ended before `step`."""
        self._take(seq.owner, tuple(-n for n in self.layout.worst_case(seq.max_context_len)))
        self._forecasts[seq.owner].remove(seq, step)

    def free_blocks(self, rank: int) -> tuple[int, ...]:
        """Blocks of each group not promised to anybody."""
        return tuple(self._free[rank])

    def weight(self, rank: int) -> float:
        """Share of the load that an R-worker should carry, the mean being about 1."""
        return self.weights.get(rank, 1.0)

    def _take(self, rank: int, need: Iterable[int]) -> None:
        self._free[rank] = [free - blocks for free, blocks in zip(self._free[rank], need, strict=True)]


def _covers(have: Iterable[int], need: Iterable[int]) -> bool:
    return all(a >= b for a, b in zip(have, need, strict=True))


def row_counts(owners: Iterable[int], size: int) -> list[int]:
    """Rows of a mini-batch that each rank owns, as MPI's counts; `owners` is sorted.

    Raises
    ------
    AssertionError
        If the rows are not ordered by owner: the scatter would not be contiguous.
    """
    counts, last = [0] * size, 0
    for owner in owners:
        assert owner >= last, "rows of a mini-batch must be ordered by owner"
        counts[owner] += 1
        last = owner
    return counts
