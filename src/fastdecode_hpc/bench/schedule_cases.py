"""The cases of ``fastdecode bench schedule`` and their figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fastdecode_hpc.bench.figures import add_spread
from fastdecode_hpc.bench.machine import program_figures
from fastdecode_hpc.bench.measure import Spread, ratios
from fastdecode_hpc.bench.schedule_figures import Window
from fastdecode_hpc.bench.schedule_session import ScheduleSession

Figures = dict[str, Any]

# Time of attention over that of the S-Part, and mini-batches.
OVERLAP = {"balanced": (1.0, 2), "r-heavy": (2.0, 2), "s-heavy": (0.5, 2), "one-mini-batch": (1.0, 1)}


class ScheduleCases:
    """Measures cases in turn, round by round, so that what disturbs the machine disturbs all of them alike.

    Parameters
    ----------
    session : ScheduleSession
    rounds, num_steps : int
    """

    def __init__(self, session: ScheduleSession, *, rounds: int, num_steps: int) -> None:
        self.session, self.rounds, self.num_steps = session, rounds, num_steps

    def measure(self, names: Sequence[str]) -> list[Figures]:
        """Figures of the named cases, by default of all."""
        names = [name for name in OVERLAP if not names or name in names]
        contexts: dict[float, int] = {}
        for name in names:
            ratio, _ = OVERLAP[name]
            contexts[ratio] = contexts.get(ratio) or self.session.find_context(ratio)
        windows: dict[str, list[Window]] = {name: [] for name in names}
        for index in range(self.rounds + 1):
            for name in names:
                ratio, num_slots = OVERLAP[name]
                window = self.session.steady(num_slots, contexts[ratio], self.num_steps)
                windows[name] += [window] if index else []
            print(f"bench: round {index} of {self.rounds}", file=sys.stderr, flush=True)
        rows = []
        for name in names:
            row = _overlap_figures(name, contexts[OVERLAP[name][0]], self.session.batch, windows[name])
            if name == "balanced" and "one-mini-batch" in names:
                rates, alone = ([w.tokens_per_s for w in windows[n]] for n in (name, "one-mini-batch"))
                add_spread(row, "speedup_over_one_mini_batch", ratios(rates, alone))
            rows.append(row)
        return rows

    def machine_figures(self) -> Figures:
        return {**program_figures(), "ranks": [rank.line for rank in self.session.engines[2].setup.ranks]}


def _overlap_figures(name: str, context: int, batch: int, windows: Sequence[Window]) -> Figures:
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


def format_rows(rows: Sequence[Figures]) -> str:
    """A line a case."""
    lines = []
    for row in rows:
        times = f"S {row['t_s_part'] * 1e3:.1f} ms, R {row['t_r_part'] * 1e3:.1f} ms, step {row['step_s'] * 1e3:.1f} ms"
        text = (
            f"{row['name']}: {row['batch']} x {row['context']}, {row['num_slots']} slots: {times}; "
            f"pipeline_efficiency {_spread(row, 'pipeline_efficiency')}, bound {row['bound']:.2f}; "
            f"exposed_transport {row['exposed_transport']:.3f}"
        )
        if "speedup_over_one_mini_batch" in row:
            text += f"; over one mini-batch {_spread(row, 'speedup_over_one_mini_batch')}"
        lines.append(text)
    return "\n".join(lines)


def _spread(row: Figures, name: str) -> str:
    low, high = row[f"{name}_quartiles"]
    return f"{row[name]:.2f} ({low:.2f}-{high:.2f})"
