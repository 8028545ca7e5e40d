"""Which R-worker owns which sequence, and how much KV each can hold.

Pure policy: blocks and shares are numbers here; the bytes live in `r_part.kv_cache`. Placement decides
owners, R-workers do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fastdecode_hpc.schedule.forecast import OwnersForecast
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.schedule.worker_costs import Floats, Ints, WorkerCost
from fastdecode_hpc.sequence import Sequence

RETRY_STEPS = 10_000  # without a sequence
_EQUAL = WorkerCost()


class Placement:
    """Owners of sequences, and the blocks each R-worker has promised to them.

    Parameters
    ----------
    layout : KVLayout
    capacity : mapping of rank to tuple of int
        Blocks of each layer group that each R-worker holds. Rank 0 stands for a partition in the
        S-worker's own process.
    costs : mapping of rank to WorkerCost, optional
        What each R-worker takes for tokens and rows; all the same by default, tokens alone. Others may be set while
        sequences run; they count for those to come.

    Notes
    -----
    A sequence is admitted with its worst case (longest prompt plus output), so what has been admitted
    always finishes: nothing is evicted and nothing waits for blocks in mid-flight. All R-workers are compared at
    once, in arrays with a place for each in the order of ranks: there may be hundreds, and each sequence is placed.
    """

    def __init__(
        self,
        layout: KVLayout,
        capacity: Mapping[int, tuple[int, ...]],
        costs: Mapping[int, WorkerCost] | None = None,
    ) -> None:
        self.layout, self.capacity = layout, capacity
        self._num_layers = layout.num_layers
        self.owners = tuple(sorted(capacity))
        self._index = {rank: index for index, rank in enumerate(self.owners)}
        self._free = np.array([capacity[rank] for rank in self.owners], np.int64)  # [num_owners, num_groups]
        self._used = np.zeros(len(self.owners), np.int64)  # last step at which each got or gave back a sequence
        self._forecast = OwnersForecast(layout, len(self.owners))
        self.costs = costs or {}

    @property
    def costs(self) -> Mapping[int, WorkerCost]:
        """What each R-worker takes; ones that are set are not changed afterwards."""
        return self._costs

    @costs.setter
    def costs(self, costs: Mapping[int, WorkerCost]) -> None:
        if costs is getattr(self, "_costs", None):  # as after most steps
            return
        self._costs = costs
        each = [costs.get(rank, _EQUAL) for rank in self.owners]
        self._token_s = np.array([cost.token_s for cost in each])
        self._link_s = np.array([(cost.row_s, cost.step_s) for cost in each]).T
        self._links_cost = bool(self._link_s.any())

    def fits_ever(self, num_tokens: int) -> bool:
        """Whether some R-worker could hold `num_tokens` tokens if it were empty."""
        need = self.layout.worst_case(num_tokens)
        return any(all(a >= b for a, b in zip(blocks, need, strict=True)) for blocks in self.capacity.values())

    def place(self, seq: Sequence, step: int) -> int | None:
        """Reserve the worst case of a sequence, which starts at about `step`.

        Returns
        -------
        int or None
            The owner's rank: of those that have room the one that is to be busy, with attention and its link, for the
            shortest time while the sequence runs. None while no R-worker has room. One whose link kept all sequences
            from it for `RETRY_STEPS` gets one: else nobody would see that the link is well again.
        """
        need = np.array(self.layout.worst_case(seq.max_context_len))
        short = self._free < need
        full = short.any(axis=1) if short.any() else None
        if full is not None and full.all():
            return None
        own = self._forecast.sums_of(seq)
        busy = self._busy(step, own)
        if full is not None:
            busy[full] = np.inf
        if step >= RETRY_STEPS:
            self._prefer_idle(busy, step)
        index = int(busy.argmin())
        self._used[index] = step
        self._free[index] -= need
        self._forecast.add(index, seq, step, own)
        seq.owner = self.owners[index]
        return seq.owner

    def release(self, seq: Sequence, step: int) -> None:
        """Give the reservation of a sequence back that ended before `step`."""
        index = self._index[seq.owner]
        self._used[index] = step
        self._free[index] += self.layout.worst_case(seq.max_context_len)
        self._forecast.remove(index, seq, step)

    def free_blocks(self, rank: int) -> tuple[int, ...]:
        """Blocks of each group not promised to anybody."""
        return tuple(self._free[self._index[rank]].tolist())

    def _busy(self, step: int, own: Ints) -> Floats:
        """What each R-worker takes while a sequence, with `own` of `sums_of`, runs, were it there; times layers."""
        num_steps = own.shape[1]
        if not num_steps:
            return np.zeros(len(self.owners))
        with_it = self._forecast.expected(step, num_steps) + own[:, -1]
        busy: Floats = with_it[:, 0] * self._token_s
        if self._links_cost:
            row_s, step_s = self._link_s
            busy += with_it[:, 1] * self._num_layers * row_s + num_steps * self._num_layers * step_s
        return busy

    def _prefer_idle(self, busy: Floats, step: int) -> None:
        """Let only those be chosen that got nothing for long, if there are such."""
        idle = (step - self._used >= RETRY_STEPS) & (busy < np.inf)
        if idle.any():
            idle &= self._forecast.expected(step, 1)[:, 1] == 0
            if idle.any():
                busy[~idle] = np.inf


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
