"""Several reports beside each other: settings that differ, figures, ratios to the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_hpc import plot_style
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.plot_style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from fastdecode_hpc.report.reader import Report, open_report

# Root attributes that are settings rather than names of things or places.
_SETTINGS = ("program_version", "git_commit", "model_path", "mpi_library")
_DRAWN = (
    "load_time", "prefill_time", "run_time", "prefill_tokens_per_s", "decode_tokens_per_s", "end_to_end_tokens_per_s",
)  # fmt: skip
_COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE)
BAR_CM = 0.42
MARGIN_CM = 3.0
MAX_NAME = 28


@dataclass(frozen=True, slots=True)
class Compared:
    """Reports beside each other.

    Attributes
    ----------
    names : list of str
        Of the reports, all different.
    settings : dict of str to list
        Those that are not the same in all reports; None where a report lacks one.
    figures : dict of str to list of float
        Of the summaries; NaN where a report lacks one.
    units : dict of str to str
    notes : dict of str to list
        Of the summaries.
    """

    names: list[str]
    settings: dict[str, list[Any]]
    figures: dict[str, list[float]]
    units: dict[str, str]
    notes: dict[str, list[Any]]

    def ratios(self, name: str) -> list[float]:
        """A figure of each report over that of the first; NaN where there is none."""
        values = self.figures[name]
        return [value / values[0] if values[0] else math.nan for value in values]


@dataclass(frozen=True, slots=True)
class _One:
    settings: dict[str, Any]
    summary: dict[str, tuple[float, str]]
    notes: dict[str, str]


def compare(paths: Sequence[Path], *, plot: Path | None = None, json_file: Path | None = None) -> str:
    """A table of what differs, and of all figures with their ratios to the first report.

    Parameters
    ----------
    plot : Path, optional
        Where the ratios are drawn.
    json_file : Path, optional
        Where the comparison is written for programs.

    Raises
    ------
    ConfigError
        If a report cannot be read or has no summary, or an output cannot be written.
    """
    if len(paths) < 2:
        raise ConfigError(f"compare was given {len(paths)} report; it takes at least 2")
    if plot is not None:
        plot_style.check_plot(plot)
    if json_file is not None:
        check_writable(json_file)
    compared = _compare([_read(path) for path in paths], _short_names(paths))
    if plot is not None:
        _plot(compared, plot)
    if json_file is not None:
        write_json(json_file, _as_json(compared, paths))
    return "\n".join(_lines(compared))


def _read(path: Path) -> _One:
    with open_report(path) as report:
        if not report.summary:
            raise ConfigError(f"{report.path} has no summary: its run did not end")
        return _One(_settings(report), report.summary, report.notes)


def _settings(report: Report) -> dict[str, Any]:
    """What can explain a difference: options, program, model, and how many ranks on how many hosts."""
    attributes = report.attributes
    found = {name: attributes[name] for name in _SETTINGS if name in attributes}
    for name in ("ranks", "hostnames"):
        if isinstance(attributes.get(name), list):
            found[f"number of {name}"] = len(attributes[name])
    if isinstance(attributes.get("ranks"), list):
        found["threads"] = _told([rank.get("threads") for rank in attributes["ranks"]])
        found["isa"] = _told([rank.get("isa") for rank in attributes["ranks"] if rank.get("isa")])
    for prefix, name in (("", "config"), ("model ", "model_config")):
        if isinstance(attributes.get(name), dict):
            found |= {f"{prefix}{key}": value for key, value in attributes[name].items() if key != "ranks"}
    return found


def _told(values: list[Any]) -> Any:
    """One value for all ranks, or all of them."""
    return values[0] if len(set(map(str, values))) == 1 else ",".join(map(str, values))


def _compare(reports: list[_One], names: list[str]) -> Compared:
    settings = _beside([one.settings for one in reports], None)
    figures = _beside([{name: value for name, (value, _) in one.summary.items()} for one in reports], math.nan)
    units = {name: unit for one in reports for name, (_, unit) in one.summary.items()}
    notes = _beside([one.notes for one in reports], None)
    differing = {name: values for name, values in settings.items() if any(value != values[0] for value in values)}
    return Compared(names, differing, figures, units, notes)


def _beside(dicts: Sequence[Mapping[str, Any]], missing: Any) -> dict[str, list[Any]]:
    """Values of each key, in the order in which keys first appear."""
    return {key: [one.get(key, missing) for one in dicts] for key in dict.fromkeys(key for one in dicts for key in one)}


def _short_names(paths: Sequence[Path]) -> list[str]:
    """File names, with their folders where two are the same, and numbers where that doesn't help."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.stem}" for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return [name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}" for name in names]


def _lines(compared: Compared) -> list[str]:
    width = max(14, *(len(name) + 2 for name in compared.names))
    head = f"{'':34}" + "".join(f"{name:>{width}}" for name in compared.names)
    lines = ["settings that differ" if compared.settings else "no setting differs", head]
    lines += [_text_row(name, values, width) for name, values in compared.settings.items()]
    lines += ["", "summary; below each figure its ratio to the first report's", head]
    lines += [_text_row(f"note: {name}", values, width) for name, values in compared.notes.items()]
    for name, values in compared.figures.items():
        unit = "" if compared.units[name] == "1" else f" ({compared.units[name]})"
        lines.append(f"  {name + unit:32}" + "".join(f"{_number(value):>{width}}" for value in values))
        ratios = "".join(f"{_ratio(value):>{width}}" for value in compared.ratios(name)[1:])
        lines.append(f"{'':34}{'':{width}}{ratios}".rstrip())
    return [line for line in lines if line.strip() or not line]


def _text_row(name: str, values: list[Any], width: int) -> str:
    texts = ["-" if value is None else str(value) for value in values]
    if max(map(len, texts)) < width - 1:
        return f"  {name:32}" + "".join(f"{text:>{width}}" for text in texts)
    return "\n".join([f"  {name}", *(f"      {text}" for text in texts)])


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.6g}"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"x{value:.3f}"


def _as_json(compared: Compared, paths: Sequence[Path]) -> dict[str, Any]:
    return {
        "reports": [
            {"name": name, "path": str(path)} for name, path in zip(compared.names, paths, strict=True)
        ],
        "settings": compared.settings,
        "notes": compared.notes,
        "figures": {
            name: {"units": compared.units[name], "values": _finite(values), "ratios": _finite(compared.ratios(name))}
            for name, values in compared.figures.items()
        },
    }  # fmt: skip


def _finite(values: list[float]) -> list[float | None]:
    """JSON has no NaN."""
    return [value if math.isfinite(value) else None for value in values]


def _plot(compared: Compared, path: Path) -> None:
    names = [name for name in _DRAWN if name in compared.figures]
    others = compared.names[1:]
    with plot_style.page(MARGIN_CM + BAR_CM * (len(others) + 0.6) * max(1, len(names))) as figure:
        draw_ratios(figure.subplots(), compared, names)
        plot_style.save(figure, path)


def draw_ratios(axes: Any, compared: Compared, names: list[str]) -> None:
    """Bars: the main figures of every report but the first, over the first one's."""
    others = compared.names[1:]
    height = 0.8 / len(others)
    for place, other in enumerate(others):
        rows = [row + (place + 0.5) * height - 0.4 for row in range(len(names))]
        ratios = [compared.ratios(name)[place + 1] for name in names]
        bars = axes.barh(rows, ratios, height=0.9 * height, color=_COLOURS[place % len(_COLOURS)], label=other)
        texts = axes.bar_label(bars, [_ratio(ratio) for ratio in ratios], padding=2, fontsize=7)
        for text in texts:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axvline(1.0, color=BLACK, linewidth=0.8)
    axes.set_yticks(range(len(names)), [f"{name} ({compared.units[name]})" for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.set(title=f"Ratios to {compared.names[0]}", xlabel=f"figure over that of {compared.names[0]} (1)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
