"""Where the figures of a report come from: program, machine, ranks, settings."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fastdecode_hpc import __version__
from fastdecode_hpc.engine import Engine


def run_attributes(engine: Engine) -> dict[str, Any]:
    """The report's root attributes: enough to know later what was run, where, and with what."""
    ranks = [
        {"rank": r.rank, "host": r.host, "role": r.role, "threads": r.threads, "cores": list(r.cores), "isa": r.isa,
         "kv_bytes": r.kv_bytes, "start_s": r.start_s, "numa_nodes": list(r.numa_nodes), "pinned": r.pinned,
         "huge_pages": r.huge_pages, "gpus": r.gpus}
        for r in engine.setup.ranks
    ]  # fmt: skip
    return {
        "program_version": __version__,
        "git_commit": git_commit(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": engine.run_config.as_dict(),
        "model_config": dataclasses.asdict(engine.setup.model),
        "model_path": str(engine.model_path),
        "hostnames": sorted({r.host for r in engine.setup.ranks}),
        "ranks": ranks,
        "kv_bytes_per_token": engine.setup.layout.token_bytes,
        "clock_errors_s": engine.clocks.errors_s,
        "mpi_library": _mpi_library(engine),
        "slurm": {name: value for name, value in os.environ.items() if name.startswith("SLURM_")},
    }


def run_notes(engine: Engine) -> dict[str, str]:
    """What makes this run's figures other than those of the model itself; empty for an ordinary run."""
    notes, run, used = {}, engine.run_config, engine.setup.model.num_layers
    if used < engine.all_layers:
        notes["layers"] = f"only {used} of the model's {engine.all_layers} layers were run (--num-layers)"
    if run.load_format == "dummy":
        notes["weights"] = "random weights (--load-format dummy)"
    return notes


def _mpi_library(engine: Engine) -> str:
    if engine.world is None:
        return "none (one process)"
    from fastdecode_hpc.transport.mpi import library_version

    return library_version()


def git_commit() -> str:
    """Commit of the source tree the program runs from; empty for an installed one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
