"""What the R-workers will read in the steps to come. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence

Ints = npt.NDArray[np.int64]


class LoadForecast:
    """Load of every coming step, if each sequence runs for as long as it may.

    Parameters
    ----------
    layout : KVLayout

    Notes
    -----
    The paper's Algorithm 1 keeps the load at the end of each micro-batch, for equal lengths. Here every coming step has
    its load, so lengths may differ, and a window, which stops a sequence's load from growing, is exact too. To add or
    remove a sequence with N tokens to come is one addition of N numbers. Loads are in token-layers: whole numbers.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._first_step = 0
        self._loads: Ints = np.zeros(0, np.int64)  # of `_first_step` and the steps after it
        self._stops: dict[int, int] = {}  # seq_id |-> step after its last

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._stops

    def add(self, seq: Sequence, step: int) -> None:
        """`seq` runs from `step` on."""
        self._forget(step)
        own = coming_loads(self.layout, seq)
        self._stops[seq.seq_id] = step + len(own)
        self._from(step, len(own))[: len(own)] += own

    def remove(self, seq: Sequence, step: int) -> bool:
        """`seq` does not run in `step` or later: the load that was still expected is free; whether there was any."""
        left = self._stops.pop(seq.seq_id) - step
        if left > 0:
            self._from(step, left)[:left] -= coming_loads(self.layout, seq)[-left:]
        return left > 0

    def load(self, step: int) -> float:
        """Load expected in `step`, in tokens averaged over layers."""
        return float(self._from(step, 1)[0]) / self.layout.num_layers

    def num_fitting(self, seqs: Ordered[Sequence], step: int, limit: float) -> int:
        """How many of `seqs`, from the first on, can all start in `step` with no step's load above `limit`."""
        own = [coming_loads(self.layout, seq) for seq in seqs]
        longest = max(map(len, own), default=0)
        total = self._from(step, longest)[:longest].copy()
        for count, loads in enumerate(own):
            total[: len(loads)] += loads
            if total[: len(loads)].max(initial=0) > limit * self.layout.num_layers:
                return count
        return len(own)

    def _from(self, step: int, count: int) -> Ints:
        """The loads from `step` on, at least `count`."""
        index = step - self._first_step
        assert index >= 0, f"step {step} is forgotten; {self._first_step} is the first that is known"
        missing = index + count - len(self._loads)
        if missing > 0:
            self._loads = np.concatenate([self._loads, np.zeros(missing + len(self._loads) // 2, np.int64)])
        return self._loads[index:]

    def _forget(self, step: int) -> None:
        """Drop the steps before `step`, once they are most of what is kept."""
        past = step - self._first_step
        if past > len(self._loads) // 2:
            self._loads, self._first_step = self._loads[past:].copy(), step


class OwnersForecast:
    """What each R-worker reads in the steps to come, and its rows, if each sequence runs for as long as it may.

    Parameters
    ----------
    layout : KVLayout
    num_owners : int

    Notes
    -----
    What is kept are sums from the first step on: whatever a stretch of steps holds, on all R-workers, is then one
    subtraction. They are whole numbers, so nothing is lost when the first steps are forgotten.
    """

    def __init__(self, layout: KVLayout, num_owners: int) -> None:
        self.layout = layout
        self._first_step = 0
        self._sums: Ints = np.zeros((num_owners, 2, 1), np.int64)  # before `_first_step` and each step after it
        self._stops: dict[int, int] = {}  # seq_id |-> step after its last

    def add(self, owner: int, seq: Sequence, step: int, own: Ints) -> None:
        """`seq`, with `own` of `sums_of`, runs on the R-worker at place `owner` from `step` on."""
        self._forget(step)
        self._stops[seq.seq_id] = step + own.shape[1]
        self._change(owner, step, own, np.add)

    def remove(self, owner: int, seq: Sequence, step: int) -> None:
        """`seq` does not run in `step` or later."""
        left = self._stops.pop(seq.seq_id) - step
        if left > 0:
            self._change(owner, step, _sums(coming_loads(self.layout, seq)[-left:]), np.subtract)

    def expected(self, step: int, num_steps: int) -> Ints:
        """Token-layers and rows of each R-worker in `num_steps` steps from `step` on: ``[num_owners, 2]``."""
        first, last = self._index(step), self._sums.shape[2] - 1
        return self._sums[:, :, min(first + num_steps, last)] - self._sums[:, :, min(first, last)]

    def sums_of(self, seq: Sequence) -> Ints:
        """Token-layers and rows of `seq` up to the end of each of its coming decode steps: ``[2, num_steps]``."""
        return _sums(coming_loads(self.layout, seq))

    def _change(self, owner: int, step: int, own: Ints, how: np.ufunc) -> None:
        first, count = self._index(step) + 1, own.shape[1]
        if not count:
            return
        missing = first + count - self._sums.shape[2]
        if missing > 0:
            self._sums = np.pad(self._sums, ((0, 0), (0, 0), (0, missing + self._sums.shape[2] // 2)), "edge")
        sums = self._sums[owner]
        during, after = sums[:, first : first + count], sums[:, first + count :]
        how(during, own, out=during)
        how(after, own[:, -1:], out=after)

    def _index(self, step: int) -> int:
        index = step - self._first_step
        assert index >= 0, f"step {step} is forgotten; {self._first_step} is the first that is known"
        return index

    def _forget(self, step: int) -> None:
        """Drop the steps before `step`, once they are most of what is kept."""
        past = min(step - self._first_step, self._sums.shape[2] - 1)
        if past > self._sums.shape[2] // 2:
            self._sums, self._first_step = self._sums[:, :, past:].copy(), step


def coming_loads(layout: KVLayout, seq: Sequence) -> Ints:
    """Token-layers that `seq` reads in each of its coming decode steps; the first token is prefill's."""
    done = max(1, len(seq.output_ids))
    return layout.loads(np.arange(seq.prompt_len + done, seq.prompt_len + seq.max_new_tokens))


def _sums(loads: Ints) -> Ints:
    """Of token-layers and rows of one sequence, up to each step."""
    sums = np.empty((2, len(loads)), np.int64)
    np.cumsum(loads, out=sums[0])
    sums[1] = np.arange(1, len(loads) + 1)
    return sums
