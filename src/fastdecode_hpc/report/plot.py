"""A report as a picture: one page, or one of its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdecode_hpc import plot_style
from fastdecode_hpc.report import panels
from fastdecode_hpc.report.panels import Drawn
from fastdecode_hpc.report.reader import Report, open_report

PANELS: dict[str, Callable[[Any, Drawn], None]] = {
    "throughput": panels.throughput,
    "steps": panels.split,
    "load": panels.load,
    "gantt": panels.gantt,
    "utilisation": panels.utilisation,
}
PAGE = "page"
FIGURES = (PAGE, *PANELS)

CURVE_CM = 4.6
RANK_CM = 0.45  # of a panel with a row for each rank
MOST_RANK_CM = 6.5  # the page stays within A4
MARGIN_CM = 2.6
TITLE_CM = 1.2


def plot_report(path: str | Path, out: Path, figure: str = PAGE) -> None:
    """Draw a report into a file.

    Parameters
    ----------
    out : Path
        Its ending says in which format.
    figure : str
        One of `FIGURES`.

    Raises
    ------
    ConfigError
        If the report cannot be read, lacks what is to be drawn, or the picture cannot be written.
    """
    plot_style.check_plot(out, "--out")
    with open_report(path) as report:
        drawn = Drawn.of(report)
        title = _title(report)
    names = list(PANELS) if figure == PAGE else [figure]
    heights = [_height_cm(name, drawn) for name in names]
    with plot_style.page(sum(heights) + TITLE_CM) as page:
        draw(page, drawn, names, heights)
        page.suptitle(title, x=0.01, ha="left", fontsize=8)
        plot_style.save(page, out)


def draw(page: Any, drawn: Drawn, names: list[str], heights: list[float]) -> None:
    """Put panels on a page, one below the other."""
    all_axes = page.subplots(len(names), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, name in zip(all_axes, names, strict=True):
        PANELS[name](axes, drawn)


def _height_cm(name: str, drawn: Drawn) -> float:
    if name not in ("gantt", "utilisation"):
        return CURVE_CM
    return max(CURVE_CM - 0.8, min(MOST_RANK_CM, MARGIN_CM + RANK_CM * drawn.num_ranks))


def _title(report: Report) -> str:
    """What was run, in two lines."""
    attributes = report.attributes
    config = attributes.get("config")
    config = config if isinstance(config, dict) else {}
    ranks = attributes.get("ranks")
    words = [
        f"model {Path(str(attributes.get('model_path', '?'))).name}",
        f"{len(ranks)} rank{'s' if len(ranks) != 1 else ''}" if isinstance(ranks, list) else "",
        f"batch {config['max_batch_size']}" if "max_batch_size" in config else "",
        f"KV {config['kv_dtype']}" if "kv_dtype" in config else "",
        str(config.get("schedule", "")),
        str(attributes.get("date", "")),
    ]
    ended = "" if report.is_complete else " (the run did not end)"
    notes = [f"\n{name}: {text}" for name, text in report.notes.items()]
    return f"{report.path.name}{ended}\n{', '.join(filter(None, words))}{''.join(notes)}"
