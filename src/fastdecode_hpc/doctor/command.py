"""The command line of ``fastdecode doctor``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.launch import announce, batch_scheduler, detect, launch, speaks
from fastdecode_hpc.options import add_run_options

if TYPE_CHECKING:
    from fastdecode_hpc.doctor.checks import Finding
    from fastdecode_hpc.doctor.compare import Speed
    from fastdecode_hpc.doctor.facts import Facts
    from fastdecode_hpc.setup import Place
    from fastdecode_hpc.transport.mpi import World

EXIT_PROBLEM = 2  # as for any set-up with which nothing can be run


def add_arguments(commands: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor", help="check this node, or the ranks of a job",
        description="Check what this process has of MPI, cores, memory, GPU and kernels; under srun or mpiexec also "
        "how the ranks fit each other, how fast each R-worker reads and how fast rank 0 reaches it. Start it as the "
        "job will be started. Code 0: no problem, though there may be warnings; 2: a problem.",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts and verdicts there, too")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="where output will go (default: this folder)"
    )
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument("--no-mpi", action="store_true", help="this process alone; neither MPI nor torch is loaded")
    add_run_options(parser, ("ranks", "threads"))
    parser.set_defaults(func=run_doctor)


def run_doctor(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode doctor``; the exit code."""
    if args.no_mpi and (args.ranks or 1) > 1:
        raise ConfigError(f"--no-mpi looks at one process, and --ranks is {args.ranks}; give one of them")
    if not args.folder.is_dir():
        raise ConfigError(f"--folder is {args.folder}, which is no folder; make it first")
    if args.json is not None:
        check_writable(args.json)
    if args.no_mpi:
        return _examine(args, None)
    if detect().kind == "none" and (args.ranks or 1) > 1:
        return launch(args.ranks, argv)
    announce()
    from fastdecode_hpc.engine import run_as_rank

    run = RunConfig(ranks=args.ranks, threads=args.threads, allow_oversubscribe=True)  # what is wrong is to be told
    return run_as_rank(run, lambda world: _examine(args, world))


def _examine(args: argparse.Namespace, world: World | None) -> int:
    """All of it, on every rank; rank 0 tells."""
    from fastdecode_hpc.doctor.compare import compare, examine_all, judge_speeds, speeds_of
    from fastdecode_hpc.doctor.facts import look, read_thread_cores

    if world is not None and world.size != detect().size and not speaks():
        return 0  # of N worlds of one rank the first one tells
    mine = look(world, threads=args.threads, with_mpi=not args.no_mpi, folder=args.folder)
    everyone = [mine] if world is None else world.gather(mine, "what it has")
    places = _agree(world, everyone)
    place = places[mine.rank]
    cores = read_thread_cores(place.threads) if mine.holds_kv else ()
    all_cores = [cores] if world is None else world.gather(cores, "cores of its threads")
    reading, links = ({}, {}) if args.quick else _measure(world, mine, places)
    if everyone is None or all_cores is None:
        return 0
    speeds = speeds_of(everyone, reading, links)
    findings = [
        *examine_all(everyone),
        *compare(everyone, places, all_cores, in_batch=bool(batch_scheduler())),
        *judge_speeds(speeds),
    ]
    return _tell(args, everyone, places, speeds, findings)


def _agree(world: World | None, everyone: list[Facts] | None) -> list[Place]:
    """Rank 0's answer to where all ranks are, on all of them."""
    from fastdecode_hpc.setup import place_of

    places = None
    if everyone is not None:
        hellos = [facts.hello for facts in everyone]
        places = [place_of(hello, hellos) for hello in hellos]
    if world is not None:
        places = world.bcast(places)
    assert places is not None
    return places


def _measure(
    world: World | None, mine: Facts, places: Sequence[Place]
) -> tuple[dict[int, float], dict[int, tuple[float, float]]]:
    """Bytes/s that each R-worker reads, and latency and bytes/s of rank 0's messages to it; at rank 0."""
    from fastdecode_hpc.bench.rank_speeds import READ_BYTES, fit_link, measure_messages, measure_reading

    if world is not None and world.size == 1:
        return {}, {}  # each of N processes thinks it is alone: nothing they measure means anything
    here = sum(place.host == mine.host for place in places)
    num_bytes = min(READ_BYTES, mine.hello.host.memory_bytes // (4 * here))
    reading = measure_reading(world, places[mine.rank].threads, num_bytes)
    return reading, {rank: fit_link(messages) for rank, messages in measure_messages(world).items()}


def _tell(
    args: argparse.Namespace,
    everyone: Sequence[Facts],
    places: Sequence[Place],
    speeds: Sequence[Speed],
    findings: Sequence[Finding],
) -> int:
    from fastdecode_hpc.doctor.checks import PROBLEM, VERDICTS
    from fastdecode_hpc.doctor.text import format_findings

    verdict = max((one.verdict for one in findings), key=VERDICTS.index)
    print(format_findings(places, speeds, findings))
    if args.json is not None:
        content = {
            "verdict": verdict,
            "findings": [dataclasses.asdict(one) for one in findings],
            "places": [dataclasses.asdict(place) for place in places],
            "speeds": [dataclasses.asdict(speed) for speed in speeds],
            "ranks": [dataclasses.asdict(facts) for facts in everyone],
        }
        write_json(args.json, content)
    return EXIT_PROBLEM if verdict == PROBLEM else 0
