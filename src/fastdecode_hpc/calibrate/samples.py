"""What one measured run says about the stages in it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastdecode_hpc.bench.schedule_figures import Window
from fastdecode_hpc.schedule.step_figures import step_latencies
from fastdecode_hpc.timing import StepTimes


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A steady run to measure: a full batch whose sequences all have about `context` tokens."""

    kv_dtype: str
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.kv_dtype}, batch {self.batch}, context {self.context}"


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One R-worker in one step of one slot; seconds of a layer, of a step, of a stage."""

    rows: float
    layer_s: float
    turn_s: float
    stage_s: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Medians over the steps of one steady run.

    Attributes
    ----------
    rows, context : float
        Of a mini-batch: sequences, and tokens that each reads.
    step_s : float
        One step of all slots.
    layer_s, head_s, turn_s, stage_s : float
        Rank 0, as `planner.profile.SPartProfile` has them.
    workers : list of WorkerSample
    """

    rows: float
    context: float
    step_s: float
    layer_s: float
    head_s: float
    turn_s: float
    stage_s: float
    workers: list[WorkerSample]


def sample_of(window: Window, *, one_process: bool) -> DecodeSample:
    """Reduce the steps of a steady run.

    Parameters
    ----------
    one_process : bool
        Nothing overlaps: what the R-Part takes is part of rank 0's time.
    """
    steps, num_layers = window.steps, window.num_layers
    stages = window.num_steps * num_layers * window.num_slots
    busy = sum(step.t_s_part + step.t_turn + step.t_prefill + step.t_wait for step in steps)
    if one_process:
        busy += sum(step.t_r_part for step in steps)
    stage_s = max(0.0, (window.wall_s - busy) / stages)
    layer_s = statistics.median(_layer_s(step, num_layers, stage_s) for step in steps)
    return DecodeSample(
        rows=statistics.fmean(step.num_rows for step in steps),
        context=statistics.fmean(step.load_tokens / max(1, step.num_rows) for step in steps),
        step_s=float(statistics.median(step_latencies(steps))),
        layer_s=layer_s,
        head_s=statistics.median(step.t_head for step in steps),
        turn_s=statistics.median(step.t_turn + step.t_s_part - step.t_head - num_layers * layer_s for step in steps),
        stage_s=stage_s,
        workers=[_worker(steps, rank, window, stages, one_process) for rank in sorted(steps[0].ranks)],
    )


def _layer_s(step: StepTimes, num_layers: int, stage_s: float) -> float:
    """Seconds of both halves of a layer on rank 0, from the layers in the middle.

    The first ones find caches full of the head and of what lies between two steps. What they take longer belongs to
    the step: else a few layers would predict many wrongly.
    """
    mean = (step.t_s_part - step.t_head) / num_layers
    if step.stages is None or len(step.stages.back) < 2:
        return mean
    back, posted = np.asarray(step.stages.back), np.asarray(step.stages.posted)
    return float(min(mean, max(0.0, np.median(posted[1:] - back[:-1]) - stage_s)))


def _worker(steps: Sequence[StepTimes], rank: int, window: Window, stages: int, one_process: bool) -> WorkerSample:
    times = [step.ranks[rank] for step in steps]
    share = sum(t.load_tokens for t in times) / max(1, sum(step.load_tokens for step in steps))
    idle = window.wall_s - sum(t.t_r_part + t.t_wait for t in times)
    return WorkerSample(
        rows=share * statistics.fmean(step.num_rows for step in steps),
        layer_s=statistics.median((t.t_r_part - t.t_turn) / window.num_layers for t in times),
        turn_s=statistics.median(t.t_turn for t in times),
        stage_s=0.0 if one_process else max(0.0, idle / stages),
    )


def median_sample(samples: Sequence[DecodeSample]) -> DecodeSample:
    """Medians of the same point measured several times."""

    def middle(name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in samples))

    workers = [
        WorkerSample(*(statistics.median(getattr(w, name) for w in same) for name in WorkerSample.__slots__))
        for same in zip(*(sample.workers for sample in samples), strict=True)
    ]
    figures: dict[str, float] = {name: middle(name) for name in DecodeSample.__slots__ if name != "workers"}
    return DecodeSample(**figures, workers=workers)
