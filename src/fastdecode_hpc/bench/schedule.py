"""``fastdecode bench schedule``: what the pipeline hides.

Weights are random and prompts are not computed: decode alone is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.bench.cases import split_names
from fastdecode_hpc.bench.measure import MIN_ROUNDS
from fastdecode_hpc.config import ConfigError, RunConfig, check_at_least
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.launch import announce, detect, launch

if TYPE_CHECKING:
    from fastdecode_hpc.bench.schedule_cases import Figures, ScheduleCases
    from fastdecode_hpc.transport.mpi import World

DEFAULT_MODEL = "benchmarks/configs/wide-attention"


def add_arguments(benches: Any) -> None:
    """Add ``schedule`` to the sub-commands of ``bench``."""
    parser = benches.add_parser(
        "schedule",
        help="how far S-Part and R-Part overlap",
        description="Measure how far S-Part and R-Part overlap, on random weights and given KV.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"folder with config.json (default: {DEFAULT_MODEL})")
    parser.add_argument("--ranks", type=int, metavar="N", help="outside a launcher: processes to start (default: 2)")
    parser.add_argument("--cases", type=split_names, default=[], metavar="NAME,...", help="only these (default: all)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="sequences in decode (default: 32)")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="steps of a measurement (default: 24)")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, metavar="N", help=f"(default: {MIN_ROUNDS})")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each rank (default: its cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a JSON file")
    parser.set_defaults(func=run_schedule)


def run_schedule(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode bench schedule``; the exit code."""
    _check(args)
    if detect().kind == "none" and (args.ranks or 2) > 1:
        return launch(args.ranks or 2, argv)
    announce()
    from fastdecode_hpc.engine import run_as_rank

    run = RunConfig(
        model=args.model, load_format="dummy", max_batch_size=args.batch, threads=args.threads, device="cpu"
    )
    return run_as_rank(run, lambda world: _run_rank(args, run, world))


def _check(args: argparse.Namespace) -> None:
    from fastdecode_hpc.bench.schedule_cases import OVERLAP

    check_at_least("rounds", args.rounds, MIN_ROUNDS)
    check_at_least("steps", args.steps, 4)
    check_at_least("batch", args.batch, 2)
    for name in args.cases:
        if name not in OVERLAP:
            raise ConfigError(f"--cases has {name!r}; there are {', '.join(OVERLAP)}")
    if not (Path(args.model) / "config.json").is_file():
        raise ConfigError(f"--model is {args.model}; it must be a folder with config.json, such as {DEFAULT_MODEL}")
    if args.json is not None:
        check_writable(args.json)


def _run_rank(args: argparse.Namespace, run: RunConfig, world: World | None) -> int:
    from fastdecode_hpc.bench.schedule_cases import ScheduleCases
    from fastdecode_hpc.bench.schedule_session import ScheduleSession

    session = ScheduleSession(run, world, (2, 1))
    if world is not None and not world.is_s_rank:
        session.follow()
        return 0
    cases = ScheduleCases(session, rounds=args.rounds, num_steps=args.steps)
    rows = cases.measure(args.cases)
    session.end()
    _report(args, cases, rows)
    return 0


def _report(args: argparse.Namespace, cases: ScheduleCases, rows: list[Figures]) -> None:
    from fastdecode_hpc.bench.schedule_cases import format_rows

    print(format_rows(rows))
    if args.json is not None:
        write_json(args.json, {"machine": cases.machine_figures(), "cases": rows})
