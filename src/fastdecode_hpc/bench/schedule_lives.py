"""Whole generations of sequences, from cold start to end, under both schedules: the ablation."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from fastdecode_hpc.bench.figures import Figures, add_spread
from fastdecode_hpc.bench.measure import Spread, ratios
from fastdecode_hpc.bench.schedule_figures import Window, peak_latency, steps_between
from fastdecode_hpc.bench.schedule_session import Lengths, Recording, ScheduleSession
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.schedule.load_stabilizing import choose_interval

GREEDY, LOAD_STABILIZING = "greedy", "load-stabilizing"
PROMPT_LEN = 8
GENERATIONS = 4
LENGTH_SPREAD = 0.8  # standard deviation of the logarithm of ragged lengths


class LivesCase(NamedTuple):
    """One combination."""

    num_slots: int
    schedule: str
    lengths: str  # equal | ragged

    @property
    def name(self) -> str:
        return f"{self.schedule}-{self.lengths}-{self.num_slots}"


LIVES = {
    case.name: case
    for case in (
        LivesCase(num_slots, schedule, lengths)
        for lengths in ("equal", "ragged")
        for num_slots in (2, 1)
        for schedule in (GREEDY, LOAD_STABILIZING)
    )
}


def make_lengths(kind: str, mean_new: int, count: int) -> list[Lengths]:
    """Lengths of `count` sequences; ragged ones have a long tail (lognormal), nearly the same mean, and no order."""
    if kind == "equal":
        return [(PROMPT_LEN, mean_new)] * count
    normal = NormalDist(-(LENGTH_SPREAD**2) / 2, LENGTH_SPREAD)
    spread = np.exp([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    np.random.default_rng(1).shuffle(spread)
    return [(PROMPT_LEN, max(2, round(mean_new * one))) for one in spread.tolist()]


class LivesCases:
    """Measures the ablation in turn, round by round.

    Parameters
    ----------
    session : ScheduleSession
    run : RunConfig
    rounds : int
    mean_new : int, optional
        Tokens of an output; by default so many that with the load-stabilizing schedule attention takes as long as the
        S-Part.
    """

    def __init__(self, session: ScheduleSession, run: RunConfig, *, rounds: int, mean_new: int | None = None) -> None:
        self.session, self.run, self.rounds, self.mean_new = session, run, rounds, mean_new
        self.recordings: dict[str, Recording] = {}  # the last of each case

    def measure(self, names: Sequence[str]) -> list[Figures]:
        """Figures of the named cases."""
        mean_new = self.mean_new or self._balanced_length()
        windows: dict[str, list[Window]] = {name: [] for name in names}
        rates: dict[str, list[float]] = {name: [] for name in names}
        for index in range(self.rounds):
            for name in names:
                recording = self._record(LIVES[name], mean_new)
                self.recordings[name] = recording
                windows[name].append(steady_window(recording))
                rates[name].append(total_rate(recording))
            print(f"bench: generations, round {index + 1} of {self.rounds}", file=sys.stderr, flush=True)
        rows = []
        for name in names:
            row = self._figures(LIVES[name], mean_new, windows[name], rates[name])
            other = LIVES[name]._replace(schedule=GREEDY).name
            if other != name and other in names:
                _add_ratios(row, windows[name], windows[other], rates[name], rates[other])
            rows.append(row)
        return rows

    def _balanced_length(self) -> int:
        context = self.session.find_context(dataclasses.replace(self.run, num_slots=2), 1.0)
        return max(16, 2 * (context - PROMPT_LEN))

    def _record(self, case: LivesCase, mean_new: int) -> Recording:
        lengths = make_lengths(case.lengths, mean_new, GENERATIONS * self.run.max_batch_size)
        return self.session.decode(self._run(case), lengths)

    def _run(self, case: LivesCase) -> RunConfig:
        return dataclasses.replace(self.run, num_slots=case.num_slots, schedule=case.schedule)

    def _figures(self, case: LivesCase, mean_new: int, windows: Sequence[Window], rates: Sequence[float]) -> Figures:
        batch = self.run.max_batch_size
        row: dict[str, Any] = {"name": case.name, **case._asdict(), "batch": batch, "mean_new_tokens": mean_new}
        if case.lengths == "equal" and case.schedule == LOAD_STABILIZING:
            places = case.num_slots * self.session.num_owners(self._run(case))
            interval = choose_interval(mean_new - 1, max_batch_size=batch, spread=places)
            row["start_interval"], row["load_bound"] = interval, load_bound(batch, PROMPT_LEN, mean_new, interval)
        row["peak_load"] = max(window.peak_load for window in windows)
        row["mean_load"] = float(np.mean([window.mean_load for window in windows]))
        row["imbalance"] = float(np.mean([window.imbalance for window in windows]))
        add_spread(row, "t_s_part", Spread.of([w.t_s_part / w.num_steps for w in windows]))
        add_spread(row, "t_r_part", Spread.of([w.t_r_part / w.num_steps for w in windows]))
        add_spread(row, "step_s", Spread.of([w.step_s for w in windows]))
        row["peak_step_s"] = peak_latency(windows)
        add_spread(row, "tokens_per_s", Spread.of([w.tokens_per_s for w in windows]))
        add_spread(row, "tokens_per_s_with_cold_start", Spread.of(rates))
        return row


def load_bound(batch: int, prompt_len: int, new: int, interval: int) -> float:
    """Most tokens that a step reads in the steady state, ``B (P + (S + F) / 2) + M`` with ``M = B F / S``.

    Parameters
    ----------
    batch, prompt_len, new, interval : int
        B, P, S (tokens of an output) and F (steps from one micro-batch to the next).
    """
    return batch * (prompt_len + (new + interval) / 2) + batch * interval / new


def steady_window(recording: Recording) -> Window:
    """From the first sequence's end to the last one's start: neither cold start nor the end of the run."""
    first, last = steps_between(recording.steps, min(recording.t_finished_s), max(recording.t_started_s))
    return recording.window(first, last)


def total_rate(recording: Recording) -> float:
    """Tokens a second of the whole run."""
    return sum(step.num_rows for step in recording.steps) / max(recording.t_finished_s)


def _add_ratios(
    row: Figures, own: Sequence[Window], other: Sequence[Window], rates: Sequence[float], other_rates: Sequence[float]
) -> None:
    """How the schedule does against greedy starts, round by round."""
    row["peak_step_over_greedy"] = row["peak_step_s"] / peak_latency(other)
    add_spread(row, "speedup_over_greedy", ratios([w.tokens_per_s for w in own], [w.tokens_per_s for w in other]))
    add_spread(row, "speedup_over_greedy_with_cold_start", ratios(rates, other_rates))
