"""A sweep for people: a line a combination."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fastdecode_hpc.report.sweep import Row


def format_sweep(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """A line a case: medians over rounds."""
    lines = [f"{'ranks':>5} {'schedule':16} {'KV':14} {'batch':>6} {'context':>8} {'new':>5} {'prompts':8} "
             f"{'decode tok/s':>13} {'spread':>7} "
             f"{'end to end':>11} {'step ms':>9} {'S ms':>8} {'R ms':>8}"]  # fmt: skip
    for key, same in _groups(rows, keys):
        ranks, schedule, kv_dtype, batch, context, new_tokens, prompts = key
        rates = [row["decode_tokens_per_s"] for row in same]
        figures = {name: _median(row[name] for row in same) for name in same[0] if name not in keys}
        lines.append(
            f"{ranks:5} {schedule:16} {kv_dtype:14} {batch:6} {context:8} {new_tokens:5} {prompts:8} "
            f"{figures['decode_tokens_per_s']:13.1f} "
            f"{(max(rates) - min(rates)) / _median(rates):7.1%} {figures['end_to_end_tokens_per_s']:11.1f} "
            f"{figures['step_s'] * 1e3:9.2f} {figures['t_s_part'] * 1e3:8.2f} {figures['t_r_part'] * 1e3:8.2f}"
        )
    return "\n".join(lines)


def _groups(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    names = [name for name in keys if name != "round"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    yield from sorted(groups.items())


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))
