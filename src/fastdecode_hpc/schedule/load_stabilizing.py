"""When prefilled sequences start to decode: all at once, or so that the load of every step stays level.

The load of a step is what the R-workers read in it. It grows with every token of a running sequence, so a batch that
starts together ends with twice its mean load, while the S-Part's time stays what it was: one of the two parts is idle
at any time. The load-stabilizing schedule (FastDecode, section 4.2) starts a micro-batch every few steps instead.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Protocol

from fastdecode_hpc.schedule.forecast import LoadForecast
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence


class Starts(Protocol):
    """Decides how many ready sequences start to decode in a step."""

    def may_admit(self, num_waiting: int, num_running: int) -> bool:
        """Whether another sequence may be prefilled.

        Parameters
        ----------
        num_waiting : int
            Sequences in prefill or ready.
        num_running : int
            Sequences that decode.
        """

    def admitted(self, seq: Sequence) -> None:
        """A sequence goes into prefill."""

    def num_startable(self, ready: Collection[Sequence], step: int) -> int:
        """How many of `ready`, from the first on, may start in `step`; asked for every slot."""

    def started(self, seq: Sequence, step: int) -> None:
        """`step` is the sequence's next decode step: its first, or after one that it missed."""

    def finished(self, seq: Sequence, step: int) -> None:
        """A sequence does not decode in `step` or later."""


class Greedy:
    """Every sequence starts as soon as it can.

    Parameters
    ----------
    max_batch_size : int
        Most sequences in prefill, ready or decode.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size

    def may_admit(self, num_waiting: int, num_running: int) -> bool:
        return num_waiting + num_running < self.max_batch_size

    def admitted(self, seq: Sequence) -> None:
        pass

    def num_startable(self, ready: Collection[Sequence], step: int) -> int:
        return len(ready)

    def started(self, seq: Sequence, step: int) -> None:
        pass

    def finished(self, seq: Sequence, step: int) -> None:
        pass


def choose_interval(mean_steps: float, *, max_batch_size: int, spread: int) -> int:
    """Steps from one micro-batch to the next for which a micro-batch gets `spread` sequences."""
    return max(1, round(spread * mean_steps / max_batch_size))


class LoadStabilizing:
    """Starts micro-batches at intervals and never lets a step's expected load pass a limit.

    Parameters
    ----------
    layout : KVLayout
    max_batch_size : int
        B, most sequences in decode. As many as two micro-batches are prefilled ahead.
    start_interval : int, optional
        F, steps from one micro-batch to the next. By default a micro-batch gets `spread` sequences.
    load_limit : float, optional
        Most tokens that a step may read, averaged over layers. By default what B sequences like those admitted so far
        read in the steady state, see Notes.
    spread : int
        Over how many places (slots times R-workers) the sequences of a micro-batch are spread.

    Notes
    -----
    A micro-batch has ``M = B F / S`` sequences (equation 5), S being the mean number of new tokens of the sequences
    admitted so far. For prompts of length P the load is then at most ``B (P + (S + F) / 2) + M`` (equation 6 with
    prompts). With unequal lengths the mean load of a running sequence takes the place of ``P + S / 2``: a long sequence
    counts for as many steps as it runs.

    In every interval M sequences may start, and one more for each that has ended. So the batch grows evenly from the
    cold start on, while the place of what ends is filled at once, where the limit allows it. Sequences start in the
    order in which they became ready; the first is never passed over, so none starves. A sequence above the limit by
    itself runs alone.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_batch_size: int,
        start_interval: int | None = None,
        load_limit: float | None = None,
        spread: int = 1,
    ) -> None:
        self.layout = layout
        self.max_batch_size = max_batch_size
        self.forecast = LoadForecast(layout)
        self._start_interval, self._load_limit, self._spread = start_interval, load_limit, spread
        self._num_admitted = self._sum_steps = self._sum_loads = 0  # of sequences admitted; loads in token-layers
        self._num_running = 0
        self._interval_stop = 0  # step at which the next interval begins
        self._quota = 0  # sequences that may still start in this one

    @property
    def start_interval(self) -> int:
        """F, in steps."""
        if self._start_interval is not None:
            return self._start_interval
        return choose_interval(self._mean_steps, max_batch_size=self.max_batch_size, spread=self._spread)

    @property
    def micro_batch_size(self) -> int:
        """M, in sequences."""
        return max(1, min(self.max_batch_size, round(self.max_batch_size * self.start_interval / self._mean_steps)))

    @property
    def load_limit(self) -> float:
        """Most tokens that a step may read, averaged over layers."""
        if self._load_limit is not None:
            return self._load_limit
        mean_load = self._sum_loads / max(1, self._sum_steps) / self.layout.num_layers
        return self.max_batch_size * (mean_load + self.start_interval / 2) + self.micro_batch_size

    @property
    def _mean_steps(self) -> float:
        return max(1.0, self._sum_steps / max(1, self._num_admitted))

    def may_admit(self, num_waiting: int, num_running: int) -> bool:
        return num_waiting < 2 * self.micro_batch_size

    def admitted(self, seq: Sequence) -> None:
        loads = self.forecast.loads_of(seq)
        self._num_admitted += 1
        self._sum_steps += len(loads)
        self._sum_loads += int(loads.sum())

    def num_startable(self, ready: Collection[Sequence], step: int) -> int:
        if step >= self._interval_stop:
            self._interval_stop = step + self.start_interval
            self._quota = min(self._quota, self.micro_batch_size) + self.micro_batch_size
        room = min(self._quota, self.max_batch_size - self._num_running)
        fitting = self.forecast.num_fitting(list(islice(ready, max(0, room))), step, self.load_limit)
        return 1 if ready and not fitting and not self._num_running else fitting

    def started(self, seq: Sequence, step: int) -> None:
        if seq in self.forecast:
            self.forecast.remove(seq, step)
        else:
            self._num_running += 1
            self._quota -= 1
        self.forecast.add(seq, step)

    def finished(self, seq: Sequence, step: int) -> None:
        if seq in self.forecast:
            self.forecast.remove(seq, step)
            self._num_running -= 1
            self._quota += 1
