"""Which R-worker owns which sequence, and how much KV each can hold.

Pure policy: blocks and shares are numbers here; the bytes live in `r_part.kv_cache`. Placement decides
owners, R-workers do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fastdecode_hpc.schedule.forecast import LoadForecast, RowForecast
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.schedule.worker_costs import WorkerCost
from fastdecode_hpc.sequence import Sequence

RETRY_STEPS = 10_000  # without a sequence
_EQUAL = WorkerCost()


@dataclass(slots=True)
class Placement:
    """Owners of sequences, and the blocks each R-worker has promised to them.

    Parameters
    ----------
    layout : KVLayout
    capacity : mapping of rank to tuple of int
        Blocks of each layer group that each R-worker holds. Rank 0 stands for a partition in the
        S-worker's own process.
    costs : mapping of rank to WorkerCost, optional
        What each R-worker takes for tokens and rows; all the same by default, tokens alone. May be changed while
        sequences run; it counts for those to come.

    Notes
    -----
    A sequence is admitted with its worst case (longest prompt plus output), so what has been admitted
    always finishes: nothing is evicted and nothing waits for blocks in mid-flight.
    """

    layout: KVLayout
    capacity: Mapping[int, tuple[int, ...]]
    costs: Mapping[int, WorkerCost] = field(default_factory=dict)
    _free: dict[int, list[int]] = field(init=False)
    _forecasts: dict[int, LoadForecast] = field(init=False)
    _rows: dict[int, RowForecast] = field(init=False)
    _used: dict[int, int] = field(init=False)  # last step at which each got or gave back a sequence

    def __post_init__(self) -> None:
        self._free = {rank: list(blocks) for rank, blocks in self.capacity.items()}
        self._forecasts = {rank: LoadForecast(self.layout) for rank in self.capacity}
        self._rows = {rank: RowForecast(self.layout) for rank in self.capacity}
        self._used = dict.fromkeys(self.capacity, 0)

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
            The owner's rank: of those that have room the one that is to be busy, with attention and its link, for the
            shortest time while the sequence runs. None while no R-worker has room. One whose link kept all sequences
            from it for `RETRY_STEPS` gets one: else nobody would see that the link is well again.
        """
        need = self.layout.worst_case(seq.max_context_len)
        room = [rank for rank in self.owners if _covers(self._free[rank], need)]
        if not room:
            return None
        own = self._forecasts[room[0]].loads_of(seq)
        mine, num_steps = int(own.sum()), len(own)
        idle = [
            rank for rank in room if step - self._used[rank] >= RETRY_STEPS and not self._rows[rank].expected(step, 1)
        ]
        owner = min(idle or room, key=lambda rank: (self._busy(rank, step, num_steps, mine), rank))
        self._used[owner] = step
        self._take(owner, need)
        self._forecasts[owner].add(seq, step)
        self._rows[owner].add(seq, step)
        seq.owner = owner
        return owner

    def release(self, seq: Sequence, step: int) -> None:
        """Give the reservation of a sequence back that ended before `step`."""
        self._used[seq.owner] = step
        self._take(seq.owner, tuple(-n for n in self.layout.worst_case(seq.max_context_len)))
        self._forecasts[seq.owner].remove(seq, step)
        self._rows[seq.owner].remove(seq, step)

    def free_blocks(self, rank: int) -> tuple[int, ...]:
        """Blocks of each group not promised to anybody."""
        return tuple(self._free[rank])

    def _busy(self, rank: int, step: int, num_steps: int, mine: int) -> float:
        """What an R-worker takes in `num_steps` steps with one more sequence, of `mine` token-layers; times layers."""
        cost = self.costs.get(rank, _EQUAL)
        busy = (self._forecasts[rank].expected(step, num_steps) + mine) * cost.token_s
        if cost.row_s or cost.step_s:
            row_layers = self._rows[rank].expected(step, num_steps) + num_steps * self.layout.num_layers
            busy += row_layers * cost.row_s + num_steps * self.layout.num_layers * cost.step_s
        return busy

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
