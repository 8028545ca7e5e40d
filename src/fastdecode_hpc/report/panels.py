"""The panels of a report's picture, each on axes that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdecode_hpc import plot_style
from fastdecode_hpc.plot_style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from fastdecode_hpc.report.figures import Bins, RankShares, SpanGroup, Steps, busiest_group, rank_shares, whole_steps
from fastdecode_hpc.report.reader import Report
from fastdecode_hpc.report.schema import SPAN_KINDS

Array = npt.NDArray[Any]

ROOM_FOR_LABELS = 16  # ranks of which each gets one
LABELS_OF_MANY = 8
# What is drawn of a Gantt chart, later kinds over earlier ones.
_KIND_COLOURS = {
    "wait": YELLOW,
    "exposed": VERMILLION,
    "prefill": GREEN,
    "s_part": BLUE,
    "head": PURPLE,
    "r_part": ORANGE,
}
_KIND_NAMES = {"wait": "waiting", "exposed": "exposed transport", "prefill": "prefill", "s_part": "S-Part",
               "head": "last layer, logits, sampling", "r_part": "R-Part"}  # fmt: skip
_SHARE_COLOURS = {"s_part": BLUE, "prefill": GREEN, "r_part": ORANGE, "exposed": VERMILLION, "waiting": YELLOW,
                  "other": GREY}  # fmt: skip
_SHARE_NAMES = {"s_part": "S-Part", "prefill": "prefill", "r_part": "R-Part", "exposed": "exposed transport",
                "waiting": "waiting", "other": "other"}  # fmt: skip
_SECOND_SLOT = 0.55  # opacity of every other slot's stages
_BAR = 0.8  # of the room of a rank


@dataclass(frozen=True, slots=True)
class Drawn:
    """What panels are drawn from, read once."""

    steps: Steps
    load: dict[str, Array]
    shares: list[RankShares]
    group: SpanGroup | None
    num_r_workers: int

    @classmethod
    def of(cls, report: Report) -> Drawn:
        """Read what there is; an older report has neither load limits nor spans."""
        steps = whole_steps(report)
        load = report.columns("load") if report.has("load") else {}
        return cls(steps, load, rank_shares(report, steps), busiest_group(report, steps), len(report.ranks))

    @property
    def num_ranks(self) -> int:
        return len(self.shares)


def throughput(axes: Any, drawn: Drawn) -> None:
    """Tokens a second over time: generated, and of prompts."""
    axes.set(title="Throughput", xlabel="time (s)", ylabel="tokens / s")
    steps = drawn.steps
    if _is_empty(axes, len(steps)):
        return
    bins = Bins.of(len(steps))
    edges = bins.edges(steps.edges)
    widths = np.maximum(np.diff(edges), 1e-9)
    for name, label, colour in (("num_rows", "decode", BLUE), ("prefill_tokens", "prefill", GREEN)):
        rates = bins.sum(steps.sums[name]) / widths
        if rates.any():
            _curve(axes, rates, edges, color=colour, label=label)
    mean = steps.total("num_rows") / steps.wall_s
    axes.axhline(mean, color=BLUE, linestyle=":", label=f"decode, prefill's time included: {_short(mean)}")
    _finish(axes, edges)


def split(axes: Any, drawn: Drawn) -> None:
    """Where rank 0's time of a step goes, the R-Part beside it, and predictions where there are any."""
    axes.set(title="Step time on rank 0, and the R-Part beside it", xlabel="time (s)", ylabel="time of a step (ms)")
    steps = drawn.steps
    if _is_empty(axes, len(steps)):
        return
    bins = Bins.of(len(steps))
    edges = bins.edges(steps.edges)
    whole = bins.mean(np.diff(steps.edges)) * 1e3
    lower = np.zeros_like(whole)
    for name, values in _parts_of_step(drawn, bins, whole).items():
        if values.any():
            upper = lower + values
            axes.stairs(upper, edges, baseline=lower, fill=True, color=_SHARE_COLOURS[name], label=_SHARE_NAMES[name])
            lower = upper
    if drawn.num_ranks > 1:
        label = "R-Part, slowest R-worker"
        axes.stairs(
            bins.mean(steps.sums["t_r_part"]) * 1e3, edges, color=BLACK, linewidth=1.2, label=label, baseline=None
        )
    if "predicted_t_step" in steps.sums:
        predicted = bins.mean(steps.sums["predicted_t_step"]) * 1e3
        axes.stairs(
            predicted, edges, color=BLACK, linewidth=1.2, linestyle="--", label="step, predicted", baseline=None
        )
    _finish(axes, edges, top=_robust_top(whole))


def _parts_of_step(drawn: Drawn, bins: Bins, whole: Array) -> dict[str, Array]:
    """Milliseconds of a step by what they were spent with, which add up to it."""
    sums = drawn.steps.sums
    names = {"s_part": "t_s_part", "prefill": "t_prefill", "exposed": "t_exposed", "waiting": "t_wait"}
    parts = {part: bins.mean(sums[name]) * 1e3 for part, name in names.items()}
    parts["waiting"] = np.maximum(parts["waiting"] - parts["exposed"], 0.0)
    if drawn.num_ranks == 1:  # it does both parts
        parts["r_part"] = bins.mean(sums["t_r_part"]) * 1e3
    parts["other"] = np.maximum(whole - sum(parts.values()), 0.0)
    return {name: parts[name] for name in _SHARE_COLOURS if name in parts}


def load(axes: Any, drawn: Drawn) -> None:
    """Load of each step against its limit, and how it lies on the R-workers."""
    axes.set(title="Load", xlabel="step", ylabel="tokens read in a step")
    table = drawn.load or {"step": drawn.steps.step, "load_tokens": drawn.steps.sums["load_tokens"]}
    if _is_empty(axes, len(table["step"])):
        return
    bins = Bins.of(len(table["step"]))
    edges = bins.edges(np.append(table["step"], table["step"][-1] + 1))
    values = table["load_tokens"]
    low, high = bins.extremes(values)
    if (bins.counts > 1).any():
        axes.stairs(high, edges, baseline=low, fill=True, color=SKY, alpha=0.5, label="load, least to most")
    _curve(axes, bins.mean(values), edges, color=BLUE, label="load")
    if drawn.num_r_workers > 1 and "rank_load_max" in table:
        axes.stairs(
            bins.mean(table["rank_load_max"]), edges, color=VERMILLION, label="most loaded R-worker", baseline=None
        )
        axes.stairs(
            bins.mean(table["rank_load_mean"]),
            edges,
            color=ORANGE,
            label="mean R-worker",
            linestyle="--",
            baseline=None,
        )
    if "load_limit" in table and np.isfinite(table["load_limit"]).any():
        axes.stairs(
            bins.extremes(table["load_limit"])[1], edges, color=BLACK, linestyle="--", label="limit", baseline=None
        )
    _finish(axes, edges)


def gantt(axes: Any, drawn: Drawn) -> None:
    """What each rank did when in the four steps with the largest batch."""
    axes.set(title="Ranks in consecutive steps", xlabel="time (ms)", ylabel="rank")
    group = drawn.group
    if _is_empty(axes, 0 if group is None else 1, "no spans in this report"):
        return
    assert group is not None
    first, last = group.steps
    axes.set_title(f"Ranks in steps {first} to {last} (pale: every other slot)")
    ranks = sorted(group.by_rank)
    end = 0.0
    for kind, colour in _KIND_COLOURS.items():
        boxes, opacities = _boxes(group, ranks, kind)
        if len(boxes):
            axes.add_collection(plot_style.rectangles(boxes, [(colour, opacity) for opacity in opacities]))
            end = max(end, boxes[:, 1].max())
    drawn_kinds = {kind for kind in _KIND_COLOURS if len(_boxes(group, ranks, kind)[0])}
    _label_ranks(axes, ranks)
    axes.set_xlim(0, end or 1.0)
    axes.grid(visible=False)
    colours = {_KIND_NAMES[kind]: _KIND_COLOURS[kind] for kind in reversed(_KIND_COLOURS) if kind in drawn_kinds}
    _legend(axes, handles=plot_style.patches(colours))


def _boxes(group: SpanGroup, ranks: list[int], kind: str) -> tuple[Array, Array]:
    """Rectangles of one kind, ``[num, 4]``, and how opaque each is."""
    boxes, opacities = [np.zeros((0, 4))], [np.zeros(0)]
    code = SPAN_KINDS.index(kind)
    for row, rank in enumerate(ranks):
        of_rank = group.by_rank[rank]
        mine = of_rank["kind"] == code
        left, right, slot = (of_rank[name][mine] for name in ("t_start", "t_end", "slot"))
        middle = np.full(len(left), float(row))
        boxes.append(np.stack([left * 1e3, right * 1e3, middle - _BAR / 2, middle + _BAR / 2], axis=-1))
        opacities.append(np.where((slot % 2 == 0) | (kind in ("wait", "exposed")), 1.0, _SECOND_SLOT))
    return np.concatenate(boxes), np.concatenate(opacities)


def utilisation(axes: Any, drawn: Drawn) -> None:
    """What each rank spent its time with."""
    axes.set(title="Utilisation", xlabel="share of the time from first step to end (%)", ylabel="rank")
    if _is_empty(axes, len(drawn.shares)):
        return
    rows = np.arange(len(drawn.shares))
    left = np.zeros(len(rows))
    for name, colour in _SHARE_COLOURS.items():
        widths = np.array([100 * getattr(one, name) for one in drawn.shares])
        if widths.any():
            axes.barh(rows, widths, left=left, height=_BAR, color=colour, label=_SHARE_NAMES[name])
            left += widths
    _label_ranks(axes, [one.rank for one in drawn.shares])
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    _legend(axes)


def _label_ranks(axes: Any, ranks: list[int]) -> None:
    """Ranks downwards, each with its number where there is room."""
    every = 1 if len(ranks) <= ROOM_FOR_LABELS else -(-len(ranks) // LABELS_OF_MANY)
    axes.set_yticks(range(0, len(ranks), every), [str(rank) for rank in ranks[::every]])
    axes.set_ylim(len(ranks) - 0.5, -0.5)


def _curve(axes: Any, values: Array, edges: Array, **options: Any) -> None:
    """Values that hold from one edge to the next."""
    axes.stairs(values, edges, baseline=None, linewidth=1.2, **options)


def _finish(axes: Any, edges: Array, *, top: float | None = None) -> None:
    axes.set_xlim(min(0, edges[0]), max(edges[-1], 1e-9))
    axes.set_ylim(0, top)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, place: _short(value))
    _legend(axes)


def _legend(axes: Any, **options: Any) -> None:
    """Beside the axes: inside it would hide something."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, handlelength=1.4, **options)


def _is_empty(axes: Any, num_items: int, text: str = "nothing to draw") -> bool:
    """Say so where there is nothing."""
    if not num_items:
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")
        axes.set(xticks=[], yticks=[])
    return not num_items


def _robust_top(values: Array) -> float | None:
    """A limit of the axis that a few long steps don't set; None where there are none of these."""
    usual = 1.6 * float(np.quantile(values, 0.97))
    return usual if 0 < 2 * usual < float(values.max()) else None


def _short(value: float) -> str:
    """A number in at most five characters or so."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
