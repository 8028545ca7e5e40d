"""``fastdecode bench schedule``: what the pipeline hides, and what the schedule levels.

Weights are random; but for the case ``prefill`` prompts are not computed.
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
    from fastdecode_hpc.bench.figures import Figures
    from fastdecode_hpc.bench.schedule_session import ScheduleSession
    from fastdecode_hpc.transport.mpi import World

OVERLAP_MODEL, LIVES_MODEL = "benchmarks/configs/wide-attention", "benchmarks/configs/short-lives"
OVERLAP_BATCH, LIVES_BATCH, EMPTY_BATCH = 256, 128, 64
LINK_RANKS = 3


def add_arguments(benches: Any) -> None:
    """Add ``schedule`` to the sub-commands of ``bench``."""
    parser = benches.add_parser(
        "schedule",
        help="how far S-Part and R-Part overlap, and what the schedules do",
        description="Measure how far S-Part and R-Part overlap, and what the schedules do, on random weights.",
    )
    parser.add_argument(
        "--model", metavar="MODEL",
        help=f"as of generate; only its shape counts (default: {OVERLAP_MODEL}, of whole generations {LIVES_MODEL})",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, metavar="N", help="outside a launcher: processes to start (default: 2)")
    parser.add_argument(
        "--cases", type=split_names, default=[], metavar="NAME,...", help="only these (default: all but slow-link)"
    )
    parser.add_argument(
        "--batch", type=int, metavar="N",
        help=f"sequences in decode (default: {OVERLAP_BATCH}, of whole generations {LIVES_BATCH})",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps of a measurement (default: 16)")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, metavar="N", help=f"(default: {MIN_ROUNDS})")
    parser.add_argument(
        "--new-tokens", type=int, metavar="N",
        help="of whole generations: mean length of an output (default: so that attention takes as long as the S-Part)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each rank (default: its cores)")
    parser.add_argument("--wait", choices=("auto", "spin", "sleep"), default="auto", help="as of generate")
    parser.add_argument(
        "--empty-stages", action="store_true", help="measure only the loop itself, in one process, with empty stages"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw load and step latency of whole generations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a JSON file")
    parser.set_defaults(func=run_schedule)


def run_schedule(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode bench schedule``; the exit code."""
    _check(args)
    if detect().kind == "none":
        _check_files(args)
        _check_ranks(args, args.ranks or 2)
    if args.empty_stages:
        from fastdecode_hpc.bench.empty_stages import measure_empty_stages

        _report(args, [measure_empty_stages(args.batch or EMPTY_BATCH, args.rounds)], [])
        return 0
    if detect().kind == "none" and (args.ranks or 2) > 1:
        return launch(args.ranks or 2, argv)
    announce()
    from fastdecode_hpc.engine import run_as_rank

    return run_as_rank(_run_config(args, OVERLAP_MODEL, OVERLAP_BATCH), lambda world: _run_rank(args, world))


def _check(args: argparse.Namespace) -> None:
    from fastdecode_hpc.bench.schedule_link import SLOW_LINK
    from fastdecode_hpc.bench.schedule_lives import LIVES
    from fastdecode_hpc.bench.schedule_overlap import OVERLAP
    from fastdecode_hpc.bench.schedule_prefill import PREFILL

    check_at_least("rounds", args.rounds, MIN_ROUNDS)
    check_at_least("steps", args.steps, 4)
    for name, low in (("batch", 2), ("new_tokens", 16)):
        if getattr(args, name) is not None:
            check_at_least(name, getattr(args, name), low)
    if args.empty_stages and (args.cases or args.plot):
        raise ConfigError("--empty-stages measures the loop alone; leave out --cases and --plot")
    known = (*OVERLAP, PREFILL, *LIVES, SLOW_LINK)
    for name in args.cases:
        if name not in known:
            raise ConfigError(f"--cases has {name!r}; there are {', '.join(known)}")
    if args.plot is not None:
        from fastdecode_hpc.plot_style import check_plot

        check_plot(args.plot)
        if args.cases and not set(args.cases) & set(LIVES):
            raise ConfigError(f"--plot draws whole generations; --cases must have one of {', '.join(LIVES)}")


def _check_ranks(args: argparse.Namespace, ranks: int) -> None:
    from fastdecode_hpc.bench.schedule_link import SLOW_LINK

    if SLOW_LINK in args.cases and ranks < LINK_RANKS:
        raise ConfigError(
            f"{SLOW_LINK} compares the links of R-workers; --ranks is {ranks} and must be {LINK_RANKS} or more"
        )


def _check_files(args: argparse.Namespace) -> None:
    """Only where they are written: other ranks may not see the folder."""
    for path in (args.json, args.plot):
        if path is not None:
            check_writable(path)


def _run_config(args: argparse.Namespace, model: str, batch: int) -> RunConfig:
    return RunConfig(
        model=args.model or model,
        load_format="dummy",
        max_batch_size=args.batch or batch,
        threads=args.threads,
        wait=args.wait,
        device="cpu",
    )


def _run_rank(args: argparse.Namespace, world: World | None) -> int:
    from fastdecode_hpc.bench.schedule_session import ScheduleSession

    session = ScheduleSession(world)
    if world is not None and not world.is_s_rank:
        session.follow()
        return 0
    try:  # from here on rank 0 is alone with its mistakes, and lets the others go
        _check_files(args)
        _check_ranks(args, 1 if world is None else world.size)
    except ConfigError:
        session.end()
        raise
    rows = _measure(args, session)
    session.end()
    _report(args, rows, session.rank_lines())
    return 0


def _measure(args: argparse.Namespace, session: ScheduleSession) -> list[Figures]:
    """The chosen cases, group by group."""
    from fastdecode_hpc.bench.schedule_link import SLOW_LINK, SlowLinkCase
    from fastdecode_hpc.bench.schedule_lives import LIVES, LivesCases
    from fastdecode_hpc.bench.schedule_overlap import OVERLAP, OverlapCases
    from fastdecode_hpc.bench.schedule_prefill import PREFILL, PrefillCase

    rows: list[Figures] = []
    overlap = _run_config(args, OVERLAP_MODEL, OVERLAP_BATCH)
    if names := _chosen(args, OVERLAP):
        rows += OverlapCases(session, overlap, rounds=args.rounds, num_steps=args.steps).measure(names)
    if _chosen(args, (PREFILL,)):
        rows.append(PrefillCase(session, overlap, rounds=args.rounds).measure())
    if names := _chosen(args, LIVES):
        run = _run_config(args, LIVES_MODEL, LIVES_BATCH)
        lives = LivesCases(session, run, rounds=args.rounds, mean_new=args.new_tokens)
        rows += lives.measure(names)
        if args.plot is not None:
            from fastdecode_hpc.bench.schedule_plot import plot_lives

            plot_lives(lives.recordings, args.plot)
    if SLOW_LINK in args.cases:
        rows.append(SlowLinkCase(session, overlap, rounds=args.rounds).measure())
    return rows


def _chosen(args: argparse.Namespace, names: Sequence[str] | dict[str, Any]) -> list[str]:
    return [name for name in names if not args.cases or name in args.cases]


def _report(args: argparse.Namespace, rows: list[Figures], ranks: list[str]) -> None:
    from fastdecode_hpc.bench.machine import program_figures
    from fastdecode_hpc.bench.schedule_table import format_rows

    print(format_rows(rows))
    if args.json is not None:
        write_json(args.json, {"machine": {**program_figures(), "ranks": ranks}, "cases": rows})
