"""The command line of ``fastdecode calibrate``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.config import ConfigError, RunConfig, check_at_least, split_kv_dtypes
from fastdecode_hpc.files import check_writable
from fastdecode_hpc.launch import announce, detect, launch
from fastdecode_hpc.options import add_run_options, as_type, run_config

if TYPE_CHECKING:
    from fastdecode_hpc.bench.schedule_session import ScheduleSession
    from fastdecode_hpc.calibrate.fit import PromptPoint
    from fastdecode_hpc.calibrate.samples import DecodePoint
    from fastdecode_hpc.planner.profile import Profile
    from fastdecode_hpc.transport.mpi import World

MIN_ROUNDS = 3
UNSTEADY = 0.2  # spread of a step from which on the profile is doubtful
RUN_OPTIONS = (
    "model", "load_format", "num_layers", "ranks", "device", "dtype", "weight_dtype", "s_part", "trust_remote_code",
    "cuda_graphs", "wire_dtype",
    "num_slots", "max_prefill_tokens", "prefill_chunk_tokens", "block_size", "kv_memory_bytes", "threads",
    "pin_threads", "wait", "isa", "batch_invariant", "allow_oversubscribe",
)  # fmt: skip


def add_arguments(commands: Any) -> None:
    """Add ``calibrate`` to the command line."""
    parser = commands.add_parser(
        "calibrate", help="measure the ranks of a job, for plan and simulate",
        description="Measure what the S-Part, attention and messages take on the ranks of this job, and write it down "
        "as a profile that plan, simulate and report read. Start it as the job will be started, on the same nodes.",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="profile to write (JSON)")
    parser.add_argument("--name", metavar="TEXT", help="of the profile (default: the file's)")
    parser.add_argument(
        "--batch-sizes", type=_numbers, default=[16, 64, 128], metavar="N,...",
        help="sequences over all slots, at least 2 numbers (default: 16,64,128)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=_numbers, default=[128, 512], metavar="N,...",
        help="tokens each, at least 2 numbers (default: 128,512)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-dtypes",
        type=as_type(split_kv_dtypes),
        default=["fp16"],
        metavar="TYPE,...",
        help="of the KV cache (default: fp16)",
    )
    parser.add_argument(
        "--prompts", type=_prompts, default=[(1, 64), (1, 256), (2, 256), (1, 1024), (8, 16)], metavar="NxLEN,...",
        help="prompts computed together, number x length, at least 3 (default: 1x64,1x256,2x256,1x1024,8x16)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="steps of a measurement (default: 16)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of which medians are taken, at least 3 (default: 5)"
    )
    add_run_options(parser.add_argument_group("run, as of generate"), RUN_OPTIONS)
    parser.set_defaults(func=run_calibrate)


def _numbers(text: str) -> list[int]:
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, such as 16,64") from None
    if values[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers must be at least 1")
    return values


def _prompts(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [(int(count), int(length)) for count, _, length in (part.partition("x") for part in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 4x256,1x1024") from None
    if min(min(pair) for pair in pairs) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers must be at least 1")
    return pairs


def run_calibrate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode calibrate``: start the ranks, or be one of them."""
    check_at_least("--rounds", args.rounds, MIN_ROUNDS)
    check_at_least("--steps", args.steps, 4)
    _check_enough(args)
    run = run_config(args, max_batch_size=args.batch_sizes[-1], kv_dtype=args.kv_dtypes[0], r_worker_weights="equal")
    if detect().kind == "none":
        check_writable(args.output)
    if detect().kind == "none" and (run.ranks or 1) > 1:
        return launch(run.ranks or 1, argv)
    announce()
    from fastdecode_hpc.engine import run_as_rank

    return run_as_rank(run, lambda world: _run_rank(args, run, world))


def _check_enough(args: argparse.Namespace) -> None:
    """A straight line needs two points, and what grows with rows and with tokens can't be told apart by one of them."""
    for name in ("batch_sizes", "contexts"):
        if len(getattr(args, name)) < 2:
            raise ConfigError(f"--{name.replace('_', '-')} has one value; give at least two, so that a fit is possible")
    if len(args.prompts) < 3:
        raise ConfigError(
            f"--prompts has {','.join(f'{count}x{length}' for count, length in args.prompts)}; give at least three, "
            "of several lengths, and one of several prompts together"
        )


def _run_rank(args: argparse.Namespace, run: RunConfig, world: World | None) -> int:
    from fastdecode_hpc.bench.rank_speeds import measure_messages, measure_reading
    from fastdecode_hpc.bench.schedule_session import ScheduleSession
    from fastdecode_hpc.calibrate.measure import Calibration
    from fastdecode_hpc.planner.profile import save_profile

    session = ScheduleSession(world)
    engine = session.first_engine(run)
    reading = measure_reading(world, engine.me.threads)
    messages = measure_messages(world)
    if world is not None and not world.is_s_rank:
        session.follow()
        return 0
    try:  # from here on rank 0 is alone with its mistakes, and lets the others go
        check_writable(args.output)
        points, prompts = choose_points(args, run, session)
    except ConfigError:
        session.end()
        raise
    measured = Calibration(session, run, rounds=args.rounds, num_steps=args.steps).measure(points, prompts)
    measured.links, measured.read_bandwidth = messages, reading
    session.end()
    profile = _profile(args, run, session, measured)
    save_profile(args.output, profile)
    print(format_profile(profile))
    print(f"written to {args.output}, for plan, simulate and generate to take (--profile {args.output})")
    return 0


def choose_points(
    args: argparse.Namespace, run: RunConfig, session: ScheduleSession
) -> tuple[list[DecodePoint], list[PromptPoint]]:
    """What is measured; on rank 0.

    Raises
    ------
    ConfigError
        For points that the model or the cache can't take, or that would say too little.
    """
    from fastdecode_hpc.bench.schedule_session import MARGIN_STEPS
    from fastdecode_hpc.calibrate.fit import PromptPoint
    from fastdecode_hpc.calibrate.samples import DecodePoint

    num_owners = len(session.first_engine(run).setup.owners)
    least = run.num_slots * num_owners
    if args.batch_sizes[0] < least:
        raise ConfigError(
            f"--batch-sizes has {args.batch_sizes[0]}; with {run.num_slots} slots and {num_owners} R-workers it must "
            f"be at least {least}, so that each of them has a sequence"
        )
    for count, length in args.prompts:
        session.check_room(run, f"--prompts has {count}x{length}", 1, length + 2)
        if count > 1 and (count > run.max_batch_size or count * length > run.max_prefill_tokens):
            raise ConfigError(
                f"--prompts has {count}x{length}; several prompts are computed together only up to the largest batch, "
                f"{run.max_batch_size}, and {run.max_prefill_tokens} tokens (--max-prefill-tokens)"
            )
    points = [
        DecodePoint(kv_dtype, batch, context)
        for kv_dtype in args.kv_dtypes
        for batch in args.batch_sizes
        for context in args.contexts
    ]
    for point in points:
        tokens = point.context + (args.steps + MARGIN_STEPS) // 2 + 1
        session.check_room(dataclasses.replace(run, kv_dtype=point.kv_dtype), f"{point}", point.batch, tokens)
    return points, [PromptPoint(*pair) for pair in args.prompts]


def _profile(args: argparse.Namespace, run: RunConfig, session: Any, measured: Any) -> Profile:
    from fastdecode_hpc.bench.machine import program_figures
    from fastdecode_hpc.calibrate.profile_maker import make_profile

    engine = session.first_engine(run)
    machine = {**program_figures(), "ranks": session.rank_lines(), "config": run.as_dict()}
    return make_profile(
        args.name or args.output.stem,
        run,
        engine.setup,
        measured,
        device=engine.device(),
        row_tiles=engine.row_tiles(),
        machine=machine,
    )


def format_profile(profile: Profile) -> str:
    """What was fitted, and how far it is off at each point."""
    lines = ["", "rank 0, seconds by rows of a mini-batch; layer and head by those computed, padding counted"]
    for name in ("layer", "head", "turn", "stage"):
        curve = getattr(profile.s_part, name)
        pairs = "  ".join(f"{x:g}: {seconds * 1e3:.3f} ms" for x, seconds in zip(curve.x, curve.seconds, strict=True))
        lines.append(f"  {name:6} {pairs}")
    part = profile.s_part
    lines.append(
        f"  prompts: {part.chunk_s * 1e3:.3f} ms a chunk and layer, {part.chunk_piece_s * 1e3:.3f} ms a prompt in it, "
        f"{part.chunk_token_s * 1e6:.2f} us a token, {part.chunk_pair_s * 1e9:.3f} ns a pair"
    )
    for number, worker in enumerate(profile.r_parts):
        lines.append(
            f"R-worker {number} on {worker.name}: reads {worker.read_bandwidth / 1e9:.1f} GB/s; link "
            f"{worker.latency_s * 1e6:.1f} us, {worker.link_bytes_per_s / 1e9:.2f} GB/s"
        )
        lines += [
            f"  {kv_dtype}: {rates.bytes_per_s / 1e9:.2f} GB/s, {rates.call_s * 1e6:.1f} us a call, "
            f"{rates.pair_s * 1e9:.0f} ns a row and KV head"
            for kv_dtype, rates in worker.rates.items()
        ]
    lines.append("steps: measured, predicted from the fit, error, spread (quartile range over median)")
    lines += [
        f"  {entry['point']:32} {entry['measured_s'] * 1e3:9.2f} ms {entry['predicted_s'] * 1e3:9.2f} ms "
        f"{entry['relative_error']:+7.1%} {entry['spread']:6.1%}"
        for entry in profile.residuals["steps"]
    ]
    lines += [f"note: {note}" for note in profile.notes]
    if (spread := max((entry["spread"] for entry in profile.residuals["steps"]), default=0.0)) > UNSTEADY:
        lines.append(
            f"note: steps varied by up to {spread:.0%}, so that predictions can't be better than that; measure on idle "
            "nodes, with more --rounds"
        )
    return "\n".join(lines)
