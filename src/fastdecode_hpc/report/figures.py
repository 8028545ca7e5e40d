"""From a report's columns to what is told and drawn: per step, per rank, binned. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.report.reader import Report
from fastdecode_hpc.report.schema import PREDICTED_UNITS, SPAN_KINDS

Array = npt.NDArray[Any]

MAX_BINS = 150  # points of a curve
OF_WHOLE_STEP = "predicted_t_step"
SUMMED = (
    "num_rows", "load_tokens", "prefill_tokens", "t_s_part", "t_r_part", "t_transport", "t_exposed", "t_wait",
    "t_prefill",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """Whole steps of a run, all slots together.

    Attributes
    ----------
    step : array
        Their numbers, ``[num_steps]``.
    edges : array
        Seconds since the run's start at which they began, and the end of the last; ``[num_steps + 1]``.
    sums : dict of str to array
        Columns of ``/steps`` added over slots; a prediction that is missing for one of them is NaN.
    """

    step: Array
    edges: Array
    sums: dict[str, Array]

    def __len__(self) -> int:
        return len(self.step)

    @property
    def wall_s(self) -> float:
        """From the first step's start to the last one's end."""
        return float(self.edges[-1] - self.edges[0]) if len(self) else 0.0

    def total(self, name: str) -> float:
        """Sum of a column."""
        return float(np.nansum(self.sums[name])) if name in self.sums else 0.0


def whole_steps(report: Report) -> Steps:
    """Add the slots of each step up.

    Raises
    ------
    ConfigError
        If the report lacks columns for it.
    """
    wanted = [name for name in (*SUMMED, *PREDICTED_UNITS) if name in SUMMED or report.has("steps", name)]
    columns = report.columns("steps", ["step", "t_start", "t_end", *wanted])
    step = columns["step"]
    if not len(step):
        return Steps(step, np.zeros(1), {name: columns[name] for name in wanted})
    firsts = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    edges = np.append(columns["t_start"][firsts], columns["t_end"].max())
    sums = {name: np.add.reduceat(columns[name], firsts) for name in wanted}
    if OF_WHOLE_STEP in sums:  # stands in the rows of all slots
        sums[OF_WHOLE_STEP] = columns[OF_WHOLE_STEP][firsts]
    return Steps(step[firsts], np.maximum.accumulate(edges), sums)


@dataclass(frozen=True, slots=True)
class Bins:
    """Steps in groups of neighbours, few enough to be drawn.

    Attributes
    ----------
    firsts : array
        The first step of each bin, ``[num_bins]``.
    counts : array
        How many steps a bin has.
    """

    firsts: Array
    counts: Array

    @classmethod
    def of(cls, num_steps: int, max_bins: int = MAX_BINS) -> Bins:
        """As many as there are steps, up to `max_bins`."""
        edges = np.linspace(0, num_steps, min(num_steps, max_bins) + 1).astype(np.int64)
        return cls(edges[:-1], np.diff(edges))

    def mean(self, values: Array) -> Array:
        """Mean of each bin."""
        return np.add.reduceat(values, self.firsts) / self.counts if len(self.firsts) else values[:0]

    def sum(self, values: Array) -> Array:
        """Sum of each bin."""
        return np.add.reduceat(values, self.firsts) if len(self.firsts) else values[:0]

    def extremes(self, values: Array) -> tuple[Array, Array]:
        """Least and largest of each bin."""
        if not len(self.firsts):
            return values[:0], values[:0]
        return np.minimum.reduceat(values, self.firsts), np.maximum.reduceat(values, self.firsts)

    def edges(self, of_steps: Array) -> Array:
        """Where bins begin, and where the last ends, from the same of steps: ``[num_bins + 1]``."""
        return np.append(of_steps[self.firsts], of_steps[-1])


@dataclass(frozen=True, slots=True)
class RankShares:
    """What part of the run's time one rank spent with what; the parts add up to 1."""

    rank: int
    s_part: float = 0.0
    prefill: float = 0.0
    r_part: float = 0.0
    exposed: float = 0.0  # waiting although the awaited message had been posted
    waiting: float = 0.0  # other waits
    other: float = 0.0

    @property
    def busy(self) -> float:
        """Share of the time in which it computed."""
        return self.s_part + self.prefill + self.r_part


def rank_shares(report: Report, steps: Steps) -> list[RankShares]:
    """Rank 0 and the R-workers, by rank; empty where no time has passed."""
    if not steps.wall_s:
        return []
    of_rank = {rank: _sums(report, rank) for rank in report.ranks}
    parts = {
        rank: {"r_part": t["t_r_part"], "exposed": t["t_exposed"], "waiting": t["t_wait"]}
        for rank, t in of_rank.items()
    }
    own = parts.get(0, {"exposed": 0.0, "waiting": 0.0})
    own["s_part"], own["prefill"] = steps.total("t_s_part"), steps.total("t_prefill")
    own["exposed"], own["waiting"] = steps.total("t_exposed"), steps.total("t_wait")
    parts[0] = own
    return [_shares(rank, parts[rank], steps.wall_s) for rank in sorted(parts)]


def _sums(report: Report, rank: int) -> dict[str, float]:
    columns = report.columns(f"ranks/{rank}", ["t_r_part", "t_exposed", "t_wait"])
    return {name: float(values.sum()) for name, values in columns.items()}


def _shares(rank: int, seconds: dict[str, float], wall_s: float) -> RankShares:
    shares = {name: value / wall_s for name, value in seconds.items()}
    shares["exposed"] = min(shares["exposed"], shares["waiting"])
    shares["waiting"] -= shares["exposed"]
    return RankShares(rank, **shares, other=max(0.0, 1.0 - sum(shares.values())))


@dataclass(frozen=True, slots=True)
class RankLoad:
    """How much of the load one R-worker carried, and why; NaN where the report does not say.

    Attributes
    ----------
    rank : int
    load, rows : float
        Share of all tokens that were read, and of all rows.
    wanted : float
        Share that placement aimed at when the run ended.
    attention, link : float
        Seconds of a token and of the link in a step, over those of the fastest R-worker.
    shares_from : str
        Where `wanted` comes from; empty: unknown.
    """

    rank: int
    load: float
    rows: float
    wanted: float
    attention: float
    link: float
    shares_from: str


def rank_loads(report: Report) -> list[RankLoad]:
    """The R-workers by rank."""
    loads = {rank: float(_loads(report, rank).sum()) for rank in report.ranks}
    rows = {rank: _total_rows(report, rank) for rank in report.ranks}
    told = {rank: report.rank_attributes(rank) for rank in report.ranks}
    attention = {rank: float(one.get("token_s", np.nan)) for rank, one in told.items()}
    mean_rows = {rank: rows[rank] / max(_num_steps(report, rank), 1) for rank in report.ranks}
    mean = sum(mean_rows.values()) / max(len(mean_rows), 1)
    link = {rank: float(one.get("step_s", np.nan) + mean * one.get("row_s", np.nan)) for rank, one in told.items()}
    return [
        RankLoad(
            rank,
            _part(loads, rank),
            _part(rows, rank),
            float(told[rank].get("wanted_share", np.nan)),
            _times(attention, rank),
            _times(link, rank),
            str(told[rank].get("shares_from", "")),
        )
        for rank in report.ranks
    ]


def _total_rows(report: Report, rank: int) -> float:
    table = f"ranks/{rank}"
    return float(report.columns(table, ["num_rows"])["num_rows"].sum()) if report.has(table, "num_rows") else np.nan


def _num_steps(report: Report, rank: int) -> int:
    """Steps of slots in which the R-worker read something."""
    return int(np.count_nonzero(_loads(report, rank)))


def _loads(report: Report, rank: int) -> Array:
    return report.columns(f"ranks/{rank}", ["load_tokens"])["load_tokens"]


def _part(values: dict[int, float], rank: int) -> float:
    total = sum(values.values())
    return values[rank] / total if total else np.nan


def _times(seconds: dict[int, float], rank: int) -> float:
    """Over the least of them; 1 where all take no time."""
    least = min(seconds.values())
    return seconds[rank] / least if least else (np.nan if seconds[rank] else 1.0)


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans of all ranks in consecutive steps, times since the start of the first.

    Attributes
    ----------
    steps : tuple of int
        First and last.
    by_rank : dict of int to dict of str to array
        Columns as in the report, ``kind`` among them.
    """

    steps: tuple[int, int]
    by_rank: dict[int, dict[str, Array]]


def busiest_group(report: Report, steps: Steps) -> SpanGroup | None:
    """The kept group of steps in which most rows were run, the latest of these; None where nothing was kept."""
    spans = {rank: report.columns(f"ranks/{rank}/spans") for rank in report.span_ranks}
    kept = np.unique(np.concatenate([of_rank["step"] for of_rank in spans.values()])) if spans else np.zeros(0)
    if not len(kept) or not len(steps):
        return None
    groups = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1)
    rows = dict(zip(steps.step.tolist(), steps.sums["num_rows"].tolist(), strict=True))
    groups = [piece for group in groups for piece in _pieces(group, report)]
    best = max(groups, key=lambda group: (sum(rows.get(step, 0) for step in group.tolist()), group[0]))
    first, last = int(best[0]), int(best[-1])
    inside = {rank: _between(of_rank, first, last) for rank, of_rank in spans.items()}
    start = min((of_rank["t_start"].min() for of_rank in inside.values() if len(of_rank["step"])), default=0.0)
    for of_rank in inside.values():
        of_rank["t_start"], of_rank["t_end"] = of_rank["t_start"] - start, of_rank["t_end"] - start
    return SpanGroup((first, last), inside)


def _pieces(group: Array, report: Report) -> list[Array]:
    """Groups that followed each other without a gap, one by one."""
    size = report.spans_group_steps
    return [group[first : first + size] for first in range(0, len(group), size)]


def _between(columns: dict[str, Array], first: int, last: int) -> dict[str, Array]:
    inside = (columns["step"] >= first) & (columns["step"] <= last)
    return {name: values[inside] for name, values in columns.items()}


def kind_code(name: str) -> int:
    """The code of a kind of span."""
    return SPAN_KINDS.index(name)
