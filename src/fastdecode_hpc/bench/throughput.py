"""``fastdecode bench throughput``: sweeps of whole runs, one HDF5 file a sweep."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.bench.cases import split_names
from fastdecode_hpc.config import SCHEDULES, ConfigError, RunConfig, check_at_least, check_choice, split_kv_dtypes
from fastdecode_hpc.files import check_writable
from fastdecode_hpc.launch import announce, detect, launch
from fastdecode_hpc.options import add_run_options, run_config

if TYPE_CHECKING:
    from fastdecode_hpc.bench.schedule_session import ScheduleSession
    from fastdecode_hpc.report.sweep import Row, SweepFile
    from fastdecode_hpc.timing import StepTimes
    from fastdecode_hpc.transport.mpi import World

FULL = 0.95  # of the most rows of a step: steps with fewer are the beginning or the end
KEYS = ("ranks", "schedule", "kv_dtype", "batch", "context", "new_tokens", "prompts", "round")
UNITS = {
    "ranks": "1", "schedule": "text", "kv_dtype": "text", "batch": "1", "context": "tokens", "new_tokens": "tokens",
    "prompts": "text", "round": "1", "decode_tokens_per_s": "tokens/s", "end_to_end_tokens_per_s": "tokens/s",
    "step_s": "s", "t_s_part": "s", "t_r_part": "s", "t_wait": "s", "t_prefill": "s", "rows": "1",
}  # fmt: skip
RUN_OPTIONS = (
    "model", "load_format", "s_part", "trust_remote_code", "num_layers", "device", "dtype", "weight_dtype",
    "cuda_graphs", "wire_dtype", "num_slots",
    "max_prefill_tokens", "prefill_chunk_tokens", "block_size", "kv_memory_bytes", "threads", "pin_threads", "wait",
    "isa", "batch_invariant", "r_worker_weights", "allow_oversubscribe",
)  # fmt: skip


def add_arguments(benches: Any) -> None:
    """Add ``bench throughput`` to the command line."""
    parser = benches.add_parser(
        "throughput", help="tokens/s over batch, context, type of the cache, ranks and schedule",
        description="Run every combination of the listed values and keep what each run told in one HDF5 file. The same "
        "command goes on with an unfinished file.",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="HDF5 file of the sweep")
    parser.add_argument("--ranks", default="1", metavar="N,...", help="processes, outside a launcher (default: 1)")
    for name, default, text in (
        ("batch-sizes", "32", "sequences at once"),
        ("contexts", "256", "tokens that a sequence has at the middle of its output"),
        ("new-tokens", "32", "tokens of an output"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="N,...", help=f"{text} (default: {default})")
    parser.add_argument("--kv-dtypes", default="fp16", metavar="TYPE,...", help="of the KV cache (default: fp16)")
    parser.add_argument(
        "--schedules", type=split_names, default=["greedy"], metavar="NAME,...", help="(default: greedy)"
    )
    parser.add_argument("--prompts", choices=("given", "computed"), default="given",
                        help="given: their KV takes no time, only decode is measured (default)")  # fmt: skip
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="K/N",
        help="run only every N-th combination, from the K-th on (from 0): one task of a job array",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="beside one that warms up (default: 3)")
    add_run_options(parser.add_argument_group("run, as of generate"), RUN_OPTIONS)
    parser.set_defaults(func=run_throughput)


def _part(text: str) -> tuple[int, int]:
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 0/4") from None
    if not 0 <= number < count:
        raise argparse.ArgumentTypeError(f"{text!r}: parts are numbered from 0, so this must be below {count}")
    return number, count


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One combination."""

    schedule: str
    kv_dtype: str
    batch: int
    context: int
    new_tokens: int

    def __str__(self) -> str:
        lengths = f"context {self.context}, {self.new_tokens} new tokens"
        return f"{self.schedule}, {self.kv_dtype}, batch {self.batch}, {lengths}"


def run_throughput(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode bench throughput``; the exit code."""
    ranks, cases = _whole_numbers("--ranks", args.ranks), list_cases(args)
    check_at_least("--rounds", args.rounds, 1)
    if detect().kind == "none":
        check_writable(args.output)
    if detect().kind == "none" and (len(ranks) > 1 or ranks[0] > 1):
        return _run_each(ranks, argv)
    announce()
    from fastdecode_hpc.engine import run_as_rank

    return run_as_rank(_config(args, cases[0]), lambda world: _run_rank(args, cases, world))


def _run_each(ranks: Sequence[int], argv: Sequence[str]) -> int:
    """One job for each number of ranks, all of which add to the same file."""
    for count in ranks:
        code = launch(count, [*argv, "--ranks", str(count)])  # the last one counts
        if code:
            return code
    return 0


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Every combination of the listed values, or this part of them.

    Raises
    ------
    ConfigError
        Naming a value that can't be one.
    """
    for schedule in args.schedules:
        check_choice("--schedules", schedule, SCHEDULES)
    values = [
        args.schedules,
        split_kv_dtypes(args.kv_dtypes),
        *(_whole_numbers(f"--{name}", getattr(args, name.replace("-", "_")))
          for name in ("batch-sizes", "contexts", "new-tokens")),
    ]  # fmt: skip
    cases = [Case(*combination) for combination in itertools.product(*values)]
    for case in cases:
        if case.new_tokens < 8 or case.context <= case.new_tokens // 2:
            raise ConfigError(
                f"--new-tokens has {case.new_tokens} and --contexts has {case.context}; an output needs at least 8 "
                "tokens, and a context more than half an output"
            )
    number, count = args.part
    if number >= len(cases):
        raise ConfigError(f"--part is {number}/{count}, and there are {len(cases)} combinations; use as many parts")
    return cases[number::count]


def _whole_numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; it must be whole numbers, such as 32,128") from None
    for value in values:
        check_at_least(name, value, 1)
    return values


def _config(args: argparse.Namespace, case: Case) -> RunConfig:
    given = {"schedule": case.schedule, "kv_dtype": case.kv_dtype, "max_batch_size": case.batch}
    return run_config(args, ranks=1 if detect().kind == "none" else None, **given)


def _run_rank(args: argparse.Namespace, cases: Sequence[Case], world: World | None) -> int:
    from fastdecode_hpc.bench.schedule_session import ScheduleSession
    from fastdecode_hpc.report.sweep_text import format_sweep

    largest = max(case.batch for case in cases)
    session = ScheduleSession(world, largest)
    session.first_engine(_config(args, cases[0]))
    if world is not None and not world.is_s_rank:
        session.follow()
        return 0
    try:  # from here on rank 0 is alone with its mistakes, and lets the others go
        sweep = _open_sweep(args, cases, session)
    except ConfigError:
        session.end()
        raise
    measure(args, cases, session, sweep)
    session.end()
    print(format_sweep(sweep.rows, KEYS))
    return 0


def _open_sweep(args: argparse.Namespace, cases: Sequence[Case], session: ScheduleSession) -> SweepFile:
    """The file, once all cases are known to fit."""
    from fastdecode_hpc.bench.machine import program_figures
    from fastdecode_hpc.report.sweep import SweepFile

    for case in cases:
        tokens = case.context + case.new_tokens // 2 + 1
        session.check_room(_config(args, case), f"{case}", case.batch, tokens)
    same = {name: str(getattr(args, name)) for name in RUN_OPTIONS}
    return SweepFile(args.output, UNITS, KEYS, fixed=same, attributes=program_figures())


def measure(args: argparse.Namespace, cases: Sequence[Case], session: ScheduleSession, sweep: SweepFile) -> None:
    """All that the file does not have yet, round by round; a case's first run of a job warms it up."""
    warm: set[Case] = set()
    ranks = 1 if session.world is None else session.world.size
    for index in range(1, args.rounds + 1):
        for case in cases:
            key = {**dataclasses.asdict(case), "ranks": ranks, "prompts": args.prompts, "round": index}
            if key in sweep:
                continue
            if case not in warm:
                warm.add(case)
                run_case(args, case, session)
            sweep.add({**key, **run_case(args, case, session)})
            print(f"bench: {ranks} ranks, {case}, round {index} of {args.rounds}", file=sys.stderr, flush=True)


def run_case(args: argparse.Namespace, case: Case, session: ScheduleSession) -> Row:
    """Figures of one run: two batches of sequences for the load-stabilizing schedule, else one."""
    lives = 2 if case.schedule == "load-stabilizing" else 1
    prompt_len = case.context - case.new_tokens // 2
    recording = session.decode(
        _config(args, case), [(prompt_len, case.new_tokens)] * (case.batch * lives), given_kv=args.prompts == "given"
    )
    first, last = full_stretch(recording.steps)
    window = recording.window(first, max(last, first + 1))  # there is a step after those that are full
    means = {name: sum(getattr(step, name) for step in window.steps) / window.num_steps
             for name in ("t_s_part", "t_r_part", "t_wait")}  # fmt: skip
    return {
        "decode_tokens_per_s": window.tokens_per_s,
        "end_to_end_tokens_per_s": case.batch * lives * case.new_tokens / max(recording.t_finished_s),
        "step_s": window.step_s,
        "t_prefill": sum(step.t_prefill for step in recording.steps),
        "rows": round(sum(step.num_rows for step in window.steps) / window.num_steps),
        **means,
    }


def full_stretch(steps: Sequence[StepTimes]) -> tuple[int, int]:
    """First and last of the steps in which about as many sequences ran as ever."""
    rows: Counter[int] = Counter()
    for step in steps:
        rows[step.step] += step.num_rows
    full = [step for step, count in rows.items() if count >= FULL * max(rows.values())]
    return min(full), max(full)
