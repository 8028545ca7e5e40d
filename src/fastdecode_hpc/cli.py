"""The command line: ``fastdecode generate``, ``validate``, ``models``, ``doctor`` and what else COMMAND names.

Parsing, ``--help`` and ``--version`` import neither MPI nor torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastdecode_hpc import __version__
from fastdecode_hpc.bench import command as bench_command
from fastdecode_hpc.calibrate import command as calibrate_command
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.doctor import command as doctor_command
from fastdecode_hpc.families import table as models_command
from fastdecode_hpc.files import OutputError
from fastdecode_hpc.host import process_age
from fastdecode_hpc.launch import announce, detect, final_code, launch, speaks
from fastdecode_hpc.options import add_run_options, add_sampling_options, duration, run_config, sampling
from fastdecode_hpc.planner import command as planner_command
from fastdecode_hpc.report import command as report_command
from fastdecode_hpc.signals import StopRequest, find_deadline

if TYPE_CHECKING:
    from fastdecode_hpc.job_files import JobFiles
    from fastdecode_hpc.sequence import SamplingParams
    from fastdecode_hpc.transport.mpi import World

VALIDATE_OPTIONS = ("s_part", "trust_remote_code", "max_context_len", "overlong", "merge_system")


class _Parser(argparse.ArgumentParser):
    """Says a usage error once, not once a rank."""

    def error(self, message: str) -> NoReturn:
        if speaks():
            self.print_usage(sys.stderr)
            print(f"fastdecode: {message}", file=sys.stderr)
        raise SystemExit(final_code(2))


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="fastdecode", description="Offline LLM decoding with the KV cache on CPU sockets, over MPI.")
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_validate(commands)
    models_command.add_arguments(commands)
    doctor_command.add_arguments(commands)
    report_command.add_arguments(commands)
    calibrate_command.add_arguments(commands)
    planner_command.add_arguments(commands)
    bench_command.add_arguments(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="complete a file of prompts", description="Complete a JSONL file of prompts.",
    )  # fmt: skip
    files = parser.add_argument_group("files")
    files.add_argument("--input", required=True, help="JSONL file of prompts, or - for standard input")
    files.add_argument("--output", required=True, type=Path, help="JSONL file of records, appended as requests finish")
    files.add_argument("--report", type=Path, help="HDF5 file of figures; FILE.partial until the run has ended")
    files.add_argument(
        "--overwrite", action="store_true", help="replace an existing output instead of going on with it"
    )
    files.add_argument(
        "--auto-id", action="store_true", help="give lines without a custom_id one, and make repeated ones unique"
    )
    files.add_argument(
        "--verify", type=int, default=0, metavar="K",
        help="when all is done, recompute K random finished requests plainly and compare (default: 0)",
    )  # fmt: skip
    ends = parser.add_argument_group("when to end early")
    ends.add_argument("--max-errors", type=int, metavar="N", help="end with code 4 after more than N failed requests")
    ends.add_argument(
        "--on-error", choices=("continue", "stop"), default="continue",
        help="stop: end with code 4 after the first failed request, as --max-errors 0 (default: continue)",
    )  # fmt: skip
    ends.add_argument(
        "--time-budget", type=duration, metavar="TIME",
        help="stop with code 75 after this time, e.g. 30m, 2h or D-HH:MM:SS; the same command goes on later "
        "(default: shortly before Slurm ends the job)",
    )  # fmt: skip
    add_run_options(parser.add_argument_group("run"))
    add_sampling_options(parser.add_argument_group("sampling, for lines that bring no settings of their own"))
    parser.set_defaults(func=run_generate)


def _add_validate(commands: Any) -> None:
    parser = commands.add_parser(
        "validate", help="check a file of prompts",
        description="Check every line of a JSONL file of prompts as generate would, without running anything; code 3 "
        "if some lines would fail. With --model lengths and chat templates are checked too.",
    )  # fmt: skip
    parser.add_argument("input", help="JSONL file of prompts, or - for standard input")
    parser.add_argument("--model", metavar="MODEL", help="as of generate; its weights are not read")
    parser.add_argument("--auto-id", action="store_true", help="as of generate")
    add_run_options(parser, VALIDATE_OPTIONS)
    add_sampling_options(parser.add_argument_group("sampling, for lines that bring no settings of their own"))
    parser.set_defaults(func=run_validate)


def run_command(argv: Sequence[str]) -> int:
    """Parse and run; the exit code."""
    args = build_parser().parse_args(argv)
    try:
        func: Callable[[argparse.Namespace, Sequence[str]], int] = args.func
        code = func(args, argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `fastdecode ... | head`
        if detect().kind != "none":  # a rank's mistakes end the job
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
        return 128 + signal.SIGPIPE
    except ConfigError as error:
        if speaks():
            print(f"fastdecode: {error}", file=sys.stderr)
        return final_code(2)


def run_validate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode validate FILE``."""
    from fastdecode_hpc.validate import make_intake, validate

    run = RunConfig(**{name: getattr(args, name) for name in VALIDATE_OPTIONS})
    intake = make_intake(args.model, run) if args.model is not None else None
    return validate(args.input, sampling(args), auto_id=args.auto_id, intake=intake)


def run_generate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode generate``: start the ranks, or be one of them."""
    run, defaults = run_config(args), sampling(args)
    if detect().kind == "none" and (run.ranks or 1) > 1:
        return launch(run.ranks or 1, argv)
    announce()
    from fastdecode_hpc.engine import run_as_rank

    return run_as_rank(run, lambda world: _run_rank(run, _job_files(args, defaults), args.time_budget, world))


def _run_rank(run: RunConfig, files: JobFiles, time_budget_s: float | None, world: World | None) -> int:
    """What this rank does in a job; the exit code is rank 0's (0 on the others).

    Raises
    ------
    ConfigError, Dismissed
        While the ranks agree: all of them leave in order.
    """
    from fastdecode_hpc.engine import Engine
    from fastdecode_hpc.job import Job

    stop = StopRequest(find_deadline(time_budget_s, process_age()))
    stop.install()
    if world is not None:
        stop.on_asked = world.control.alive  # whoever asks gets on, be it a job that waits for standard input
    job = Job(files, run, stop)
    engine = Engine(run, world=world, preflight=job.check, stop_requested=stop, verifies=files.verify > 0)
    try:
        if engine.is_s_rank:
            code = job.run(engine)
        else:
            engine.work()
            code = 0
    except (ConfigError, OutputError) as error:
        if world is None:
            raise
        # The others are at work already and wait for plans; nothing collective is possible any more.
        print(f"fastdecode: {error}", file=sys.stderr, flush=True)
        world.abort(2 if isinstance(error, ConfigError) else 1)
        raise
    stop.release()
    return code


def _job_files(args: argparse.Namespace, defaults: SamplingParams) -> JobFiles:
    from fastdecode_hpc.job_files import JobFiles

    return JobFiles(
        input=args.input,
        output=args.output,
        overwrite=args.overwrite,
        report=args.report,
        max_errors=_max_errors(args),
        auto_id=args.auto_id,
        verify=args.verify,
        defaults=defaults,
    )


def _max_errors(args: argparse.Namespace) -> int | None:
    limit: int | None = args.max_errors
    if args.on_error == "stop" and limit:
        raise ConfigError(f"--on-error is stop and --max-errors {limit}; give one of them")
    return 0 if args.on_error == "stop" else limit
