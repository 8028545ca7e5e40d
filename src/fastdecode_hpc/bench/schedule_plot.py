"""Load and step latency over time, under both schedules, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastdecode_hpc import plot_style
from fastdecode_hpc.bench.schedule_figures import PEAK_STEPS, running_median
from fastdecode_hpc.bench.schedule_session import Recording
from fastdecode_hpc.plot_style import BLUE, ORANGE
from fastdecode_hpc.schedule.step_figures import step_latencies, step_loads

HEIGHT_CM = 12.0


def plot_lives(recordings: Mapping[str, Recording], path: Path) -> None:
    """Draw each recording's load, and the running median of its step latency, by step."""
    with plot_style.page(HEIGHT_CM) as figure:
        loads, latencies = figure.subplots(2, 1, sharex=True)
        for (name, recording), colour in zip(recordings.items(), (BLUE, ORANGE), strict=False):
            latency = running_median(step_latencies(recording.steps), PEAK_STEPS)
            loads.plot(step_loads(recording.steps), label=name, color=colour)
            latencies.plot(latency * 1e3, label=name, color=colour)
        loads.set_ylabel("load (tokens read in a step)")
        latencies.set_ylabel("step latency (ms)")
        latencies.set_xlabel("step")
        for axes in (loads, latencies):
            axes.set_ylim(bottom=0)
        loads.legend()
        plot_style.save(figure, path)
