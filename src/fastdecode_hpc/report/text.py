"""A report as text for people."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode_hpc.host import format_cores
from fastdecode_hpc.report.figures import RankLoad, RankShares, Steps, rank_loads, rank_shares, whole_steps
from fastdecode_hpc.report.reader import Report, open_report
from fastdecode_hpc.report.schema import PREDICTED_UNITS, REBUILT, STEP_UNITS, partial_report

MAX_RANK_LINES = 12
WIDTH = 118  # of settings; texts stay on one line, to be copied
HARD_SPACE = "\xa0"  # where no line is broken
_SHOWN_STEPS = ("num_rows", "load_tokens", "t_s_part", "t_r_part", "t_transport", "t_wait", "t_prefill")
_MEASURED = {"predicted_t_s_part": "t_s_part", "predicted_t_r_part": "t_r_part"}
_SHARES = ("s_part", "prefill", "r_part", "exposed", "waiting", "other")
_STEP_HEAD = "  " + " " * 16 + "".join(f"{name:>12}" for name in ("mean", "median", "p95", "max", "sum"))


def format_report(path: str | Path) -> str:
    """The report as text for people: state, attributes, summary, where time went, means of the steps.

    Raises
    ------
    ConfigError
        If the file is no report of this program, or none that it can read.
    """
    with open_report(path) as report:
        parts = [_state_lines(report, Path(path)), _attribute_lines(report), _summary_lines(report)]
        if report.has("steps"):
            steps = whole_steps(report)
            parts += [_share_lines(rank_shares(report, steps)), _load_lines(rank_loads(report))]
            parts += [_predicted_lines(steps), _step_lines(report)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _state_lines(report: Report, asked: Path) -> Iterator[str]:
    if not report.is_complete:
        yield f"{report.path}: the run did not end: it goes on still, or was killed; figures are as of the last flush"
    if report.state == REBUILT:
        yield f"{report.path}: rebuilt from records after a run; it has no steps"
    partial = partial_report(asked)
    if report.path == asked and partial.exists():
        yield f"{partial} is of another run that has not ended; fastdecode report show {partial}"


def _attribute_lines(report: Report) -> Iterator[str]:
    """All of the root's attributes but for what is empty; of many ranks the first."""
    for name, value in sorted(report.attributes.items()):
        if isinstance(value, dict | list):
            told = _told(value)
            lines = [line for text in told[:MAX_RANK_LINES] for line in _wrapped(text)]
            lines += [f"and {len(told) - MAX_RANK_LINES} more"] if told[MAX_RANK_LINES:] else []
        else:
            lines = [str(value)]
        for number, line in enumerate(lines):
            yield f"{name if number == 0 else '':18} {line}"


def _told(value: dict[str, Any] | list[Any]) -> list[str]:
    """A JSON object as one text, a list of them as one each."""
    if isinstance(value, dict):
        given = {name: _plain(one) for name, one in value.items() if one not in (None, "", [], {})}
        return [", ".join(f"{name} {text}".replace(" ", HARD_SPACE) for name, text in given.items())]
    if value and all(isinstance(one, dict) for one in value):
        return [text for one in value for text in _told(one)]
    return [", ".join(map(_plain, value))]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and value == sorted({one for one in value if isinstance(one, int)}):
        return format_cores(tuple(value))
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _wrapped(text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - 19, break_long_words=False, break_on_hyphens=False)
    return [line.replace(HARD_SPACE, " ") for line in lines]


def _summary_lines(report: Report) -> list[str]:
    notes = [f"  note: {name}: {text}" for name, text in report.notes.items()]
    rows = [f"  {name:32} {value:14.6g} {_unit(unit)}".rstrip() for name, (value, unit) in report.summary.items()]
    if not rows and report.has("requests"):
        requests = report.columns("requests", ["output_tokens"])["output_tokens"]
        rows = [f"  {len(requests)} requests had their records, with {int(requests.sum())} output tokens"]
    return ["summary", *notes, *rows]


def _share_lines(shares: list[RankShares]) -> Iterator[str]:
    """Where each rank's time went; of many R-workers the least and most busy ones."""
    if not shares:
        return
    yield "where time went (% of the time from the first step to the end; exposed: a posted message not there yet)"
    yield f"  {'rank':6}" + "".join(f"{name:>10}" for name in (*_SHARES, "busy"))
    shown = shares
    if len(shares) > MAX_RANK_LINES:
        workers = sorted(shares[1:], key=lambda one: one.busy)
        half = MAX_RANK_LINES // 2 - 1
        shown = sorted([shares[0], *workers[:half], *workers[-half:]], key=lambda one: one.rank)
    for one in shown:
        yield f"  {one.rank:<6}" + "".join(f"{100 * getattr(one, name):10.1f}" for name in (*_SHARES, "busy"))
    if len(shown) < len(shares):
        yield f"  (the least and most busy of {len(shares) - 1} R-workers)"


def _load_lines(loads: list[RankLoad]) -> Iterator[str]:
    """How the load lay on the R-workers, what it should have been and why; of many those with least and most."""
    if len(loads) < 2:
        return
    source = loads[0].shares_from
    yield f"shares of the R-workers (%{f'; wanted: {source}' if source else ''}; attention, link: times the fastest's)"
    yield f"  {'rank':6}" + "".join(f"{name:>10}" for name in ("load", "rows", "wanted", "attention", "link"))
    shown = loads
    if len(loads) > MAX_RANK_LINES:
        ordered = sorted(loads, key=lambda one: one.load)
        half = MAX_RANK_LINES // 2
        shown = sorted([*ordered[:half], *ordered[-half:]], key=lambda one: one.rank)
    for one in shown:
        shares = (100 * one.load, 100 * one.rows, 100 * one.wanted, one.attention, one.link)
        yield f"  {one.rank:<6}" + "".join(f"{'-' if math.isnan(x) else f'{x:.1f}':>10}" for x in shares)
    if len(shown) < len(loads):
        yield f"  (those with least and most load of {len(loads)} R-workers)"


def _predicted_lines(steps: Steps) -> Iterator[str]:
    """Predictions beside what was measured, over the steps that have them."""
    names = [name for name in PREDICTED_UNITS if name in steps.sums]
    if not names or not len(steps):
        return
    yield "predicted and measured (s, means over the steps with predictions)"
    yield f"  {'':12}{'predicted':>12}{'measured':>12}{'ratio':>9}"
    for name in names:
        predicted = steps.sums[name]
        measured = steps.sums[_MEASURED[name]] if name in _MEASURED else np.diff(steps.edges)
        known = np.isfinite(predicted)
        if known.any():
            pair = float(predicted[known].mean()), float(measured[known].mean())
            ratio = f"{pair[0] / pair[1]:9.3f}" if pair[1] else f"{'-':>9}"
            yield f"  {name.removeprefix('predicted_'):12}{pair[0]:12.5g}{pair[1]:12.5g}{ratio}"


def _step_lines(report: Report) -> list[str]:
    steps = report.columns("steps", _SHOWN_STEPS)
    busy = steps["num_rows"] > 0
    lines = [f"steps ({int(busy.sum())} with rows, of {len(busy)}; per step and slot)", _STEP_HEAD]
    for name in _SHOWN_STEPS:
        values, unit = steps[name][busy], _unit(STEP_UNITS[name])
        if len(values):
            quantiles = np.quantile(values, (0.5, 0.95))
            figures = (values.mean(), *quantiles, values.max(), values.sum())
            lines.append(f"  {name:16}" + "".join(f"{x:12.5g}" for x in figures) + f" {unit}".rstrip())
    return lines


def _unit(unit: str) -> str:
    return "" if unit == "1" else unit
