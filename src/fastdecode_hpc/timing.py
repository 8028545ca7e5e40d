"""Named times of a run: where each step of each slot spent its seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds spent in a kind of work."""

    total_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.total_s += time.perf_counter() - started

    def discount(self, seconds: float) -> None:
        """Take off what was no work: waits inside a block."""
        self.total_s -= seconds

    def take(self) -> float:
        """Seconds since the last call."""
        total, self.total_s = self.total_s, 0.0
        return total


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one R-worker reported for one step of one slot."""

    t_r_part: float
    t_wait: float
    t_exposed: float  # of its waits, after the awaited message had been posted
    free_blocks: int
    load_tokens: int  # read in this step, averaged over layers
    t_turn: float = 0.0  # of t_r_part: taking the plan, making the step's work list
    num_rows: int = 0
    t_link: float = math.nan  # that q, k, v of a layer were on their way, where the worker had nothing else to do


@dataclass(frozen=True, slots=True)
class StageTimes:
    """When the stages of one step of one slot took place: what was written down anyway, nothing copied.

    Attributes
    ----------
    t_origin : float
        The run's start. As all times here in seconds on rank 0's clock, which began anywhere.
    posted, asked, back : sequence of float
        For each layer when q, k, v were posted, when attention output was asked for, and when it was there; empty
        where the step had no rows.
    ranks : dict of int to three float64 arrays
        Of each R-worker the times of `StepReport`: asked, arrived and posted, ``[num_layers]`` each.
    prefill : sequence of float
        Starts and ends of work on prompts, in turn.
    """

    t_origin: float
    posted: Sequence[float]
    asked: Sequence[float]
    back: Sequence[float]
    ranks: dict[int, tuple[Any, Any, Any]]
    prefill: Sequence[float]


@dataclass(slots=True)
class StepTimes:
    """One step of one slot as rank 0 saw it. Times in seconds, `t_start` since the first step.

    `t_turn` is what rank 0 spent between two steps of the slot beside t_s_part, t_prefill and t_wait: tokens, plan,
    reports. Of the turn that ends a step, that part counts with the next one.
    """

    step: int
    slot: int
    t_start: float
    num_rows: int
    load_tokens: int  # read by the R-workers, averaged over layers
    prefill_tokens: int  # token-layers listed on this plan, over the number of layers
    t_s_part: float = 0.0
    t_head: float = 0.0  # of t_s_part: logits and sampling
    t_turn: float = 0.0
    t_prefill: float = 0.0
    t_wait: float = 0.0
    t_transport: float = 0.0
    t_exposed: float = 0.0  # of t_wait, after the awaited message had been posted
    t_end: float = 0.0
    ranks: dict[int, RankTimes] = field(default_factory=dict)
    rank_loads: dict[int, int] = field(default_factory=dict)  # load of each R-worker
    rank_rows: dict[int, int] = field(default_factory=dict)
    stages: StageTimes | None = None  # large: to be dropped by who keeps the steps of a run

    @property
    def t_r_part(self) -> float:
        """Of the slowest R-worker."""
        return max((rank.t_r_part for rank in self.ranks.values()), default=0.0)


class Patience:
    """How long something may fail to happen.

    Parameters
    ----------
    limit_s : float
    gap_s : float
        The most that counts of the time between two questions. A process that was suspended, or that was kept busy by
        something else, could not see what happened meanwhile; without a bound a job that a batch system suspends
        would be over as soon as it goes on.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, limit_s: float, *, gap_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._gap_s = gap_s
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """It happened: count from now on."""
        self._spent_s, self._asked_s = 0.0, self._clock()

    def is_over(self) -> bool:
        """Whether it has failed to happen for the limit; to be asked more often than once in `gap_s`."""
        now = self._clock()
        self._spent_s += min(now - self._asked_s, self._gap_s)
        self._asked_s = now
        return self._spent_s > self.limit_s
