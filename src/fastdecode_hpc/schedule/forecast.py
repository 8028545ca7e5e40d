"""What the R-workers will read in the steps to come. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence


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
        self._loads: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # of `_first_step` and the steps after it
        self._stops: dict[int, int] = {}  # seq_id |-> step after its last

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._stops

    def add(self, seq: Sequence, step: int) -> None:
        """`seq` runs from `step` on."""
        self._forget(step)
        own = self.loads_of(seq)
        self._stops[seq.seq_id] = step + len(own)
        self._from(step, len(own))[: len(own)] += own

    def remove(self, seq: Sequence, step: int) -> bool:
        """`seq` does not run in `step` or later: the load that was still expected is free; whether there was any."""
        left = self._stops.pop(seq.seq_id) - step
        if left > 0:
            self._from(step, left)[:left] -= self.loads_of(seq)[-left:]
        return left > 0

    def load(self, step: int) -> float:
        """Load expected in `step`, in tokens averaged over layers."""
        return float(self._from(step, 1)[0]) / self.layout.num_layers

    def expected(self, step: int, num_steps: int) -> int:
        """Token-layers read in `num_steps` steps from `step` on."""
        return int(self._from(step, num_steps)[:num_steps].sum())

    def num_fitting(self, seqs: Ordered[Sequence], step: int, limit: float) -> int:
        """How many of `seqs`, from the first on, can all start in `step` with no step's load above `limit`."""
        own = [self.loads_of(seq) for seq in seqs]
        longest = max(map(len, own), default=0)
        total = self._from(step, longest)[:longest].copy()
        for count, loads in enumerate(own):
            total[: len(loads)] += loads
            if total[: len(loads)].max(initial=0) > limit * self.layout.num_layers:
                return count
        return len(own)

    def loads_of(self, seq: Sequence) -> npt.NDArray[np.int64]:
        """Token-layers that `seq` reads in each of its coming decode steps; the first token is prefill's."""
        done = max(1, len(seq.output_ids))
        return self.layout.loads(np.arange(seq.prompt_len + done, seq.prompt_len + seq.max_new_tokens))

    def _from(self, step: int, count: int) -> npt.NDArray[np.int64]:
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


class RowForecast(LoadForecast):
    """Rows of every coming step in the same way, each as many times as there are layers."""

    def loads_of(self, seq: Sequence) -> npt.NDArray[np.int64]:
        """One row in each of its coming decode steps."""
        num_steps = seq.max_new_tokens - max(1, len(seq.output_ids))
        return np.full(max(0, num_steps), self.layout.num_layers, np.int64)
