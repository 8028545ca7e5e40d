"""Pictures of reports: made for any number of ranks and steps, every axis with its quantity and unit."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import h5py
import pytest

from fastdecode_hpc import plot_style
from fastdecode_hpc.cli import run_command
from fastdecode_hpc.report import command, compare, plot
from fastdecode_hpc.report.panels import Drawn
from fastdecode_hpc.report.reader import open_report
from report_files import MadeUpRun, as_version_1

PNG = b"\x89PNG"
RUNS = {
    "one rank": MadeUpRun(num_ranks=1, num_steps=10),
    "three ranks": MadeUpRun(num_steps=10),
    "many": MadeUpRun(num_ranks=65, num_steps=160, num_layers=2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plots")
    found = {
        name: run.write(folder / f"{name}.h5".replace(" ", "-"), predicts=True, load_limit=1200.0)
        for name, run in RUNS.items()
    }
    return {**found, "old": as_version_1(found["three ranks"], folder / "old.h5")}


@pytest.mark.parametrize("name", [*RUNS, "old"])
def test_a_page_is_drawn_with_units_and_without_overlaps(paths, tmp_path: Path, monkeypatch, name: str) -> None:
    pages = []
    monkeypatch.setattr(plot_style, "save", lambda page, path: pages.append(page))
    plot.plot_report(paths[name], tmp_path / "page.png")
    (page,) = pages
    page.draw_without_rendering()
    assert len(page.axes) == len(plot.PANELS)
    assert page.get_figwidth() == pytest.approx(17 / 2.54)
    for axes in page.axes:
        assert axes.get_title(loc="left")
        assert re.search(r"\((s|ms|%)\)|^step$", axes.get_xlabel()), axes.get_title(loc="left")
        assert re.search(r"\(ms\)|tokens|rank", axes.get_ylabel())
        check_tick_labels_are_apart(axes)
    boxes = [axes.get_tightbbox() for axes in page.axes]
    for above, below in itertools.pairwise(boxes):
        assert above.y0 >= below.y1 - 1, "panels overlap"
    assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= page.bbox.width + 1


def check_tick_labels_are_apart(axes) -> None:
    for axis, side in ((axes.xaxis, "x"), (axes.yaxis, "y")):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
        boxes = sorted(boxes, key=lambda box: getattr(box, f"{side}0"))
        for one, other in itertools.pairwise(boxes):
            assert getattr(one, f"{side}1") <= getattr(other, f"{side}0") + 1, "tick labels overlap"


@pytest.mark.parametrize("figure", plot.FIGURES)
def test_every_figure_becomes_a_picture(paths, tmp_path: Path, figure: str) -> None:
    for name in ("one rank", "three ranks"):
        out = tmp_path / f"{figure}-{name}.png"
        assert run_command(["report", "plot", str(paths[name]), "-o", str(out), "--figure", figure]) == 0
        assert out.read_bytes()[:4] == PNG


def test_the_command_line_offers_what_can_be_drawn() -> None:
    assert command.FIGURES == plot.FIGURES


def test_the_gantt_chart_holds_every_span_of_its_steps(paths) -> None:
    for name, run in RUNS.items():
        with open_report(paths[name]) as report:
            drawn = Drawn.of(report)
        with plot_style.page(10) as page:
            axes = page.subplots()
            plot.PANELS["gantt"](axes, drawn)
            num_drawn = sum(len(collection.get_paths()) for collection in axes.collections)
        num_spans = sum(len(columns["kind"]) for columns in drawn.group.by_rank.values())
        assert num_drawn == num_spans >= 4 * run.num_slots * run.num_layers * 2


def test_long_runs_are_binned(tmp_path: Path, paths) -> None:
    with open_report(paths["many"]) as report:
        drawn = Drawn.of(report)
    with plot_style.page(10) as page:
        axes = page.subplots()
        plot.PANELS["load"](axes, drawn)
        labels = {text.get_text() for text in axes.get_legend().get_texts()}
        points = max(len(patch.get_data().values) for patch in axes.patches)
    assert {"load", "limit", "most loaded R-worker", "mean R-worker", "load, least to most"} == labels
    assert points == 150


def test_wrong_pictures_are_refused(paths, tmp_path: Path, capsys) -> None:
    path = str(paths["one rank"])
    assert run_command(["report", "plot", path, "-o", str(tmp_path / "a.xyz")]) == 2
    assert "--out is" in capsys.readouterr().err
    assert run_command(["report", "plot", path, "-o", str(tmp_path / "none" / "a.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_ratios_are_drawn(paths, tmp_path: Path) -> None:
    files = [str(paths[name]) for name in RUNS]
    out = tmp_path / "ratios.png"
    assert run_command(["report", "compare", *files, "--plot", str(out)]) == 0
    assert out.read_bytes()[:4] == PNG
    compared = compare._compare([compare._read(paths[name]) for name in RUNS], list(RUNS))
    with plot_style.page(8) as page:
        axes = page.subplots()
        compare.draw_ratios(axes, compared, ["run_time", "decode_tokens_per_s"])
        widths = sorted(bar.get_width() for bar in axes.patches)
    expected = [ratio for name in ("run_time", "decode_tokens_per_s") for ratio in compared.ratios(name)[1:]]
    assert widths == pytest.approx(sorted(expected))
    assert "(1)" in axes.get_xlabel() and "run_time (s)" in [label.get_text() for label in axes.get_yticklabels()]


def test_a_partial_report_can_be_drawn(paths, tmp_path: Path) -> None:
    partial = tmp_path / "run.h5.partial"
    partial.write_bytes(paths["three ranks"].read_bytes())
    with h5py.File(partial, "r+") as file:
        file.attrs["state"] = "running"
    assert run_command(["report", "plot", str(tmp_path / "run.h5")]) == 0
    assert (tmp_path / "run.png").read_bytes()[:4] == PNG
