"""``fastdecode plan`` and ``fastdecode simulate``: their options and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.config import (
    S_PARTS,
    SCHEDULES,
    WEIGHT_DTYPES,
    ConfigError,
    RunConfig,
    check_at_least,
    check_positive,
)
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.options import add_run_options, duration, run_config, size

if TYPE_CHECKING:
    from fastdecode_hpc.planner.lengths import Lengths
    from fastdecode_hpc.planner.plan import Plan, Planner
    from fastdecode_hpc.planner.profile import Profile

PLAN_OPTIONS = (
    "trust_remote_code",
    "kv_dtype",
    "wire_dtype",
    "num_slots",
    "max_prefill_tokens",
    "prefill_chunk_tokens",
)
SIMULATE_OPTIONS = (
    *PLAN_OPTIONS,
    "schedule",
    "max_batch_size",
    "start_interval",
    "load_limit",
    "block_size",
    "kv_memory_bytes",
    "r_worker_weights",
)
LINKS = {  # option |-> how it is told
    "latency": (1e6, "us"),
    "link_bandwidth": (1e-9, "GB/s"),
    "s_bandwidth": (1e-9, "GB/s"),
    "switch_bandwidth": (1e-9, "GB/s"),
}
MODEL_HELP = "as of generate, or a well-known shape: llama-2-7b, llama-2-13b, llama-3-8b, llama-3-70b, opt-175b, ..."


def add_arguments(commands: Any) -> None:
    """Add both commands to the command line."""
    _add_plan(commands)
    _add_simulate(commands)


def _add_common(parser: Any) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--profile", required=True, metavar="FILE|NAME",
        help="what the machine does in how long: a file of fastdecode calibrate, or a published one: a10-epyc7452, "
        "h100-epyc7452",
    )  # fmt: skip
    for flag, choices in (("--s-part", S_PARTS), ("--weight-dtype", WEIGHT_DTYPES)):
        parser.add_argument(flag, choices=choices, help="as of generate; default: the profile's, which it must be")
    parser.add_argument("--prompt-len", type=int, metavar="N", help="tokens of a prompt (default: 1)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a whole sequence, its prompt counted")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help="instead: JSONL file of prompt_len and output_len, or the output of an earlier job",
    )  # fmt: skip


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="propose batch and number of R-workers",
        description="Propose how many R-workers, which batch and which schedule a job should have, and predict how "
        "fast it will be, from a profile of the machine. Needs neither MPI nor the model's weights.",
    )  # fmt: skip
    _add_common(parser)
    parser.add_argument(
        "--max-r-workers", type=int, default=16, metavar="N", help="look at up to so many (default: 16)"
    )
    parser.add_argument(
        "--latency-target", type=duration, metavar="TIME", help="a sequence must be decoded within it, e.g. 2m"
    )
    parser.add_argument(
        "--price", type=_prices, metavar="S,R", help="price an hour of rank 0's machine and of one R-worker's socket"
    )
    parser.add_argument(
        "--schedule", choices=("best", *SCHEDULES), default="best",
        help="as of generate; best: whichever gives more tokens/s (default)",
    )  # fmt: skip
    parser.add_argument("--r-memory", type=size, metavar="SIZE", help="memory of a socket (default: the profile's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there, too")
    add_run_options(parser.add_argument_group("run, as of generate"), PLAN_OPTIONS)
    parser.set_defaults(func=run_plan)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="run a job on paper",
        description="Walk the schedule of a job on the clock of a profile: any number of R-workers, sequences of any "
        "lengths, links that jitter or share a switch. Needs neither MPI nor the model's weights.",
    )  # fmt: skip
    _add_common(parser)
    parser.add_argument("--r-workers", type=int, required=True, metavar="N", help="R-workers, 1 to 1024")
    parser.add_argument(
        "--num-sequences", type=int, metavar="N", help="sequences of --length (default: four times the batch)"
    )
    parser.add_argument("--max-steps", type=int, metavar="N", help="end after so many steps")
    parser.add_argument("--given-kv", action="store_true", help="prompts take no time")
    links = parser.add_argument_group("links, where they differ from the profile's")
    links.add_argument(
        "--latency",
        type=_each(float),
        metavar="SECONDS,...",
        help="of a message between rank 0 and an R-worker: one number, or one for each R-worker",
    )
    links.add_argument(
        "--link-bandwidth", type=_each(size), metavar="SIZE,...",
        help="bytes a second of an R-worker's link: one, or one for each, such as 1G,1G,200M",
    )  # fmt: skip
    links.add_argument("--s-bandwidth", type=size, metavar="SIZE", help="bytes a second of rank 0's link, each way")
    links.add_argument("--switch-bandwidth", type=size, metavar="SIZE", help="bytes a second of a switch all share")
    links.add_argument(
        "--jitter", type=float, default=0.0, metavar="X",
        help="spread of what a message takes: sigma of a log-normal factor (default: 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the jitter (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    add_run_options(parser.add_argument_group("run, as of generate"), SIMULATE_OPTIONS)
    parser.set_defaults(func=run_simulate)


def _each(parse: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """A type of argparse: a value, or several with commas between them."""

    def parsed(text: str) -> tuple[float, ...]:
        try:
            return tuple(float(parse(part)) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number and no list of numbers") from None

    return parsed


def _prices(text: str) -> tuple[float, float]:
    try:
        s_part, r_part = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not two prices, such as 1.2,0.4") from None
    if not (0 <= s_part < math.inf and 0 <= r_part < math.inf and s_part + r_part > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: prices must not be negative, and not both 0")
    return s_part, r_part


def run_plan(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode plan``."""
    from fastdecode_hpc.planner.plan import Planner, Wish
    from fastdecode_hpc.planner.profile import PROFILES, find_profile, load_profile
    from fastdecode_hpc.planner.shapes import find_shape
    from fastdecode_hpc.planner.text import format_plan, plan_as_dict

    check_at_least("--max-r-workers", args.max_r_workers, 1, 1024)
    if args.r_memory is not None:
        check_positive("--r-memory", args.r_memory)
    if args.json is not None:
        check_writable(args.json)
    profile = load_profile(args.profile)
    asked = _run_config(args, profile)
    model = find_shape(args.model, s_part=asked.s_part, trust_remote_code=asked.trust_remote_code)
    price_s, price_r = args.price or (None, None)
    wish = Wish(tuple(_lengths(args, 1)), args.latency_target, price_s, price_r, args.r_memory)
    schedules = SCHEDULES if args.schedule == "best" else (args.schedule,)
    runs = [dataclasses.replace(asked, schedule=schedule) for schedule in schedules]
    planners = [Planner(profile, model, run, wish) for run in runs]
    plans = [(planner, planner.plan(args.max_r_workers)) for planner in planners]
    planner, plan = min(plans, key=_rank)  # of about equal ones the plain
    own_profile = "" if find_profile(args.profile).parent == PROFILES else args.profile
    print(format_plan(planner, plan, args.model, own_profile))
    if args.json is not None:
        write_json(args.json, plan_as_dict(planner, plan, args.model, own_profile))
    return 0


def _rank(planned: tuple[Planner, Plan]) -> float:
    """Where a plan stands among those of other schedules: by price where there is one, else by speed."""
    best = planned[1].best
    return -round(best.tokens_per_s, -1) if best.cost_per_million is None else float(f"{best.cost_per_million:.2g}")


def run_simulate(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode simulate``."""
    from fastdecode_hpc.planner.profile import load_profile
    from fastdecode_hpc.planner.shapes import find_shape
    from fastdecode_hpc.planner.simulate import Simulation
    from fastdecode_hpc.planner.text import describe_profile, format_simulation, simulation_figures

    _check_simulate(args)
    known = load_profile(args.profile)
    config = _run_config(args, known)
    model = find_shape(args.model, s_part=config.s_part, trust_remote_code=config.trust_remote_code)
    profile = _with_links(known, args)
    lengths = _lengths(args, args.num_sequences or 4 * config.max_batch_size)
    simulation = Simulation(
        profile,
        model,
        config,
        num_workers=args.r_workers,
        given_kv=args.given_kv,
        jitter=args.jitter,
        seed=args.seed,
        max_steps=args.max_steps,
    )
    simulation.check_fit(lengths)
    result = simulation.run(lengths)
    figures = simulation_figures(simulation, result)
    changed = [
        f"--{name.replace('_', '-')} {', '.join(f'{x * factor:.3g}' for x in values)} {unit}"
        for name, (factor, unit) in LINKS.items()
        if (values := _values(args, name))
    ]
    print(describe_profile(known, model, args.r_workers, changed))
    print(format_simulation(figures))
    if shares := simulation.shares.describe():
        print(f"shares of the load: {shares}")
    if args.json is not None:
        source = {"name": profile.name, "source": profile.source, "replaced": changed}
        told = {"model": args.model, "r_workers": args.r_workers, "given_kv": args.given_kv, "jitter": args.jitter}
        write_json(args.json, {"profile": source, **told, "config": config.as_dict(), "figures": figures,
                               "shares": simulation.shares.ideal()})  # fmt: skip
    return 0


def _run_config(args: argparse.Namespace, profile: Profile) -> RunConfig:
    """The options of a run with the profile's S-Part; raises `ConfigError` where another one is asked for."""
    profile.check_s_part({name: getattr(args, name) for name in profile.s_part_options})
    given = {"schedule": RunConfig().schedule} if args.schedule == "best" else {}
    return run_config(args, profile=None, **profile.s_part_options, **given)


def _check_simulate(args: argparse.Namespace) -> None:
    check_at_least("--r-workers", args.r_workers, 1, 1024)
    for name in ("num_sequences", "max_steps"):
        if getattr(args, name) is not None:
            check_at_least(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    for name in ("jitter", "latency"):
        for value in _values(args, name):
            if not 0 <= value < math.inf:
                raise ConfigError(f"--{name} is {value}; it must not be negative")
    for name in ("link_bandwidth", "s_bandwidth", "switch_bandwidth"):
        for value in _values(args, name):
            check_positive(f"--{name.replace('_', '-')}", value)
    for name in ("latency", "link_bandwidth"):
        if (count := len(_values(args, name))) not in (0, 1, args.r_workers):
            raise ConfigError(
                f"--{name.replace('_', '-')} has {count} numbers; it must have one, or one for each R-worker: "
                f"{args.r_workers}"
            )
    if args.json is not None:
        check_writable(args.json)


def _values(args: argparse.Namespace, name: str) -> tuple[float, ...]:
    """What an option of one or several numbers has; nothing where it was not given."""
    value = getattr(args, name)
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _lengths(args: argparse.Namespace, count: int) -> list[Lengths]:
    from fastdecode_hpc.planner.lengths import Lengths, read_lengths

    if (args.length is None) == (args.lengths is None):
        raise ConfigError("give --length, or --lengths FILE")
    if args.lengths is not None:
        for name in ("prompt_len", "num_sequences"):
            if getattr(args, name, None) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} does not go with --lengths, which has its own")
        return read_lengths(args.lengths)
    args.prompt_len = 1 if args.prompt_len is None else args.prompt_len
    check_at_least("--prompt-len", args.prompt_len, 1)
    check_at_least("--length", args.length, args.prompt_len + 1)
    return [Lengths(args.prompt_len, args.length - args.prompt_len)] * count


def _with_links(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile with the links that the options describe; it has an entry for each R-worker then."""
    given = {"latency_s": _values(args, "latency"), "link_bytes_per_s": _values(args, "link_bandwidth")}
    changes: list[dict[str, Any]] = [
        {name: values[worker % len(values)] for name, values in given.items() if values}
        for worker in range(args.r_workers)
    ]
    shared = {"s_bytes_per_s": args.s_bandwidth, "switch_bytes_per_s": args.switch_bandwidth}
    network: dict[str, Any] = {name: float(value) for name, value in shared.items() if value is not None}
    return dataclasses.replace(
        profile,
        r_parts=tuple(dataclasses.replace(profile.r_part(worker), **own) for worker, own in enumerate(changes)),
        network=dataclasses.replace(profile.network, **network),
    )
