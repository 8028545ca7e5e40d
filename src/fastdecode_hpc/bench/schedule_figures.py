"""From the steps of a run to the figures of ``fastdecode bench schedule``. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.bound import StageTimes, best_step_time
from fastdecode_hpc.schedule.step_figures import step_latencies, step_loads
from fastdecode_hpc.timing import StepTimes

PEAK_STEPS = 9  # of which the median counts as a step's latency when the longest is looked for


@dataclass(frozen=True, slots=True)
class Window:
    """Whole steps of a run, of all slots: from the start of step `first` to that of step `stop`.

    Attributes
    ----------
    wall_s : float
    steps : list of StepTimes
        Of all slots in [first, stop).
    num_layers, num_slots : int
    """

    wall_s: float
    steps: list[StepTimes]
    num_layers: int
    num_slots: int

    @classmethod
    def of(cls, steps: Sequence[StepTimes], first: int, stop: int, *, num_layers: int, num_slots: int) -> Window:
        """Cut a window; step `stop` must have begun."""
        started = {step.step: step.t_start for step in steps if step.slot == 0}
        inside = [step for step in steps if first <= step.step < stop]
        return cls(started[stop] - started[first], inside, num_layers, num_slots)

    @property
    def num_steps(self) -> int:
        return len({step.step for step in self.steps})

    @property
    def step_s(self) -> float:
        """Seconds of one step of all slots."""
        return self.wall_s / self.num_steps

    @property
    def t_s_part(self) -> float:
        return sum(step.t_s_part for step in self.steps)

    @property
    def t_r_part(self) -> float:
        """Of the slowest R-worker of each step and slot."""
        return sum(step.t_r_part for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return sum(step.num_rows for step in self.steps) / self.wall_s

    @property
    def pipeline_efficiency(self) -> float:
        """The busier part's time over wall time."""
        return max(self.t_s_part, self.t_r_part) / self.wall_s

    @property
    def peak_load(self) -> int:
        """Most tokens read in a step."""
        return int(step_loads(self.steps).max())

    @property
    def mean_load(self) -> float:
        """Tokens read in a step."""
        return float(step_loads(self.steps).mean())

    @property
    def bound(self) -> float:
        """The same ratio if stages of these times follow each other without any loss."""
        slots = [self._stage_times(slot) for slot in range(self.num_slots)]
        best = best_step_time(slots, self.num_layers) * self.num_steps
        return max(self.t_s_part, self.t_r_part) / best

    @property
    def exposed_transport(self) -> float:
        """Share of wall time in which rank 0, or an R-worker, waited for a message that had been posted; their sum."""
        ranks: dict[int, float] = defaultdict(float)
        for step in self.steps:
            for rank, times in step.ranks.items():
                ranks[rank] += times.t_exposed
        own = sum(step.t_exposed for step in self.steps)
        return (own + max(ranks.values(), default=0.0)) / self.wall_s

    @property
    def imbalance(self) -> float:
        """Largest over mean load of the R-workers, averaged over steps."""
        loads: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for step in self.steps:
            for rank, times in step.ranks.items():
                loads[step.step][rank] += times.load_tokens
        ratios = [max(one.values()) * len(one) / sum(one.values()) for one in loads.values() if sum(one.values())]
        return float(np.mean(ratios)) if ratios else 1.0

    def _stage_times(self, slot: int) -> StageTimes:
        """Mean over the window's steps."""
        steps = [step for step in self.steps if step.slot == slot]
        count = max(1, len(steps))
        head = sum(step.t_head for step in steps) / count
        s_part = sum(step.t_s_part for step in steps) / count
        r_part = sum(step.t_r_part for step in steps) / count
        return StageTimes((s_part - head) / self.num_layers, head, r_part / self.num_layers)


def full_steps(steps: Sequence[StepTimes], num_rows: int) -> tuple[int, int]:
    """First and last of the steps in which all slots together had `num_rows` rows and no prompt was computed."""
    rows: dict[int, int] = defaultdict(int)
    for step in steps:
        rows[step.step] += step.num_rows if not step.t_prefill else 0
    full = [step for step, count in rows.items() if count == num_rows]
    return (min(full), max(full)) if full else (0, 0)


def peak_latency(windows: Sequence[Window]) -> float:
    """Longest step of runs that did the same, seconds.

    Of each step the median over the runs counts, and of those a running median: any single step may be disturbed on a
    shared machine.
    """
    latencies = [step_latencies(window.steps) for window in windows]
    length = min(map(len, latencies))
    typical = np.median([one[:length] for one in latencies], axis=0)
    return float(running_median(typical, PEAK_STEPS).max())


def running_median(values: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Median of every `width` neighbours: ``[len(values) - width + 1]``, at least one."""
    width = min(width, len(values))
    return np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)


def steps_between(steps: Sequence[StepTimes], start_s: float, stop_s: float) -> tuple[int, int]:
    """First and last of the steps that began in a stretch of time."""
    inside = [step.step for step in steps if step.slot == 0 and start_s <= step.t_start <= stop_s]
    return min(inside), max(inside)
