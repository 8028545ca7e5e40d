"""``fastdecode bench``: its sub-commands. Each module adds its own; what is heavy is imported when it runs."""

from __future__ import annotations

from typing import Any

from fastdecode_hpc.bench import fidelity, kernel, schedule, throughput


def add_arguments(commands: Any) -> None:
    """Add ``bench`` and its sub-commands to the command line."""
    parser = commands.add_parser("bench", help="measure this machine", description="Measure this machine.")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    kernel.add_arguments(benches)
    fidelity.add_arguments(benches)
    schedule.add_arguments(benches)
    throughput.add_arguments(benches)
