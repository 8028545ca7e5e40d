"""Load and step latency over time, under both schedules, as a picture. The only matplotlib import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastdecode_hpc.bench.schedule_figures import PEAK_STEPS, running_median, step_latencies, step_loads
from fastdecode_hpc.bench.schedule_session import Recording
from fastdecode_hpc.config import ConfigError


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if nothing can be drawn to `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'fastdecode-hpc[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise ConfigError(f"--plot is {path}; its ending must be one of {', '.join(sorted(known))}")


def plot_lives(recordings: Mapping[str, Recording], path: Path) -> None:
    """Draw each recording's load, and the running median of its step latency, by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    loads, latencies = figure.subplots(2, 1, sharex=True)
    for name, recording in recordings.items():
        loads.plot(step_loads(recording.steps), label=name, linewidth=1)
        latencies.plot(running_median(step_latencies(recording.steps), PEAK_STEPS) * 1e3, label=name, linewidth=1)
    loads.set_ylabel("load (tokens read in a step)")
    latencies.set_ylabel("step latency (ms)")
    latencies.set_xlabel("step")
    for axes in (loads, latencies):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    loads.legend(fontsize="small")
    figure.savefig(path, dpi=150)
