"""The cases of ``fastdecode bench schedule`` on sequences of one length: how far the parts overlap."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

from fastdecode_hpc.bench.figures import Figures, add_spread
from fastdecode_hpc.bench.measure import Spread, ratios
from fastdecode_hpc.bench.schedule_figures import Window
from fastdecode_hpc.bench.schedule_session import ScheduleSession
from fastdecode_hpc.config import RunConfig

ONE_MINI_BATCH = "one-mini-batch"
# Time of attention over that of the S-Part, and mini-batches.
OVERLAP = {"balanced": (1.0, 2), "r-heavy": (2.0, 2), "s-heavy": (0.5, 2), ONE_MINI_BATCH: (1.0, 1)}


class OverlapCases:
    """Measures cases in turn, round by round, so that what disturbs the machine disturbs all of them alike.

    Parameters
    ----------
    session : ScheduleSession
    run : RunConfig
    rounds, num_steps : int
    """

    def __init__(self, session: ScheduleSession, run: RunConfig, *, rounds: int, num_steps: int) -> None:
        self.session, self.run, self.rounds, self.num_steps = session, run, rounds, num_steps

    def measure(self, names: Sequence[str]) -> list[Figures]:
        """Figures of the named cases."""
        contexts: dict[float, int] = {}
        for name in names:
            ratio, _ = OVERLAP[name]
            contexts[ratio] = contexts.get(ratio) or self.session.find_context(self._run(2), ratio, self.num_steps)
        windows: dict[str, list[Window]] = {name: [] for name in names}
        for index in range(self.rounds + 1):
            for name in names:
                ratio, num_slots = OVERLAP[name]
                window = self.session.steady(self._run(num_slots), contexts[ratio], self.num_steps)
                windows[name] += [window] if index else []  # the first round warms up
                if num_slots == 2 and index < self.rounds:  # what a part takes drifts with the machine's state
                    contexts[ratio] = self.session.adjust(self._run(2), contexts[ratio], ratio, window, self.num_steps)
            print(f"bench: overlap, round {index} of {self.rounds}", file=sys.stderr, flush=True)
        rows = []
        for name in names:
            row = _figures(name, contexts[OVERLAP[name][0]], self.run.max_batch_size, windows[name])
            if name == "balanced" and ONE_MINI_BATCH in names:
                rates, alone = ([w.tokens_per_s for w in windows[n]] for n in (name, ONE_MINI_BATCH))
                add_spread(row, "speedup_over_one_mini_batch", ratios(rates, alone))
            rows.append(row)
        return rows

    def _run(self, num_slots: int) -> RunConfig:
        return dataclasses.replace(self.run, num_slots=num_slots)


def _figures(name: str, context: int, batch: int, windows: Sequence[Window]) -> Figures:
    row: Figures = {"name": name, "context": context, "batch": batch, "num_slots": windows[0].num_slots}
    figures: dict[str, Callable[[Window], float]] = {
        "step_s": lambda w: w.step_s,
        "t_s_part": lambda w: w.t_s_part / w.num_steps,
        "t_r_part": lambda w: w.t_r_part / w.num_steps,
        "tokens_per_s": lambda w: w.tokens_per_s,
        "pipeline_efficiency": lambda w: w.pipeline_efficiency,
        "bound": lambda w: w.bound,
        "efficiency_over_bound": lambda w: w.pipeline_efficiency / w.bound,
        "exposed_transport": lambda w: w.exposed_transport,
        "imbalance": lambda w: w.imbalance,
    }
    for figure, value in figures.items():
        add_spread(row, figure, Spread.of([value(window) for window in windows]))
    return row
