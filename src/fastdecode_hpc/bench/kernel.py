"""``fastdecode bench kernel``: how near the attention kernels come to what this machine's memory gives.

One process, without MPI; torch and llama.cpp only where they are asked for, to compare with.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.bench.cases import Case, choose_cases, custom_case, group_cases, split_names
from fastdecode_hpc.bench.decode_windows import least_context, num_new_tokens
from fastdecode_hpc.bench.figures import Figures
from fastdecode_hpc.bench.measure import MIN_ROUNDS
from fastdecode_hpc.bench.table import format_decode, format_machine, format_table
from fastdecode_hpc.config import ConfigError, RunConfig, check_at_least
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.host import asked_threads, look

if TYPE_CHECKING:
    from fastdecode_hpc.bench.kernel_session import KernelSession

PEERS = ("torch", "llamacpp")
SHAPE_DEFAULTS: dict[str, Any] = {
    "kv_dtype": "fp16",
    "num_heads": 32,
    "num_kv_heads": None,
    "head_dim": 128,
    "batch": 32,
    "context": 2048,
}


def add_arguments(benches: Any) -> None:
    """Add ``kernel`` to the sub-commands of ``bench``."""
    parser = benches.add_parser(
        "kernel",
        help="decode attention against the memory's read bandwidth",
        description="Measure the decode attention kernels against the read bandwidth of this machine's memory.",
    )
    parser.add_argument(
        "--cases", type=split_names, default=[], metavar="NAME,...", help="only these cases (default: all)"
    )
    _add_shape(parser.add_argument_group("a case of your own, named custom"))
    run = parser.add_argument_group("run")
    run.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds of the interleaved run (default: 7)")
    run.add_argument("--threads", type=int, metavar="N", help=_help_of("threads"))
    run.add_argument("--isa", choices=_choices_of("isa"), help="instruction set (default: FASTDECODE_ISA, or the best)")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random q, k and v (default: 0)")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a JSON file")
    peers = parser.add_argument_group("comparison")
    peers.add_argument(
        "--compare",
        type=split_names,
        default=[],
        metavar="PEER,...",
        help="torch: the same attention by torch; llamacpp: decode of a whole model by llama.cpp",
    )
    peers.add_argument("--model", default="smollm2", help="llamacpp: a .gguf file, or smollm2 (default: smollm2)")
    peers.add_argument("--compare-batch", type=int, default=4, metavar="N", help="llamacpp: sequences (default: 4)")
    peers.add_argument(
        "--compare-context", type=int, default=4096, metavar="N", help="llamacpp: tokens of each (default: 4096)"
    )
    parser.set_defaults(func=run_kernel)


def _add_shape(group: Any) -> None:
    """The flags default to None, which tells whether any of them was given."""
    texts = {"kv_dtype": "type of the KV cache", "num_heads": "query heads", "num_kv_heads": "KV heads",
             "head_dim": "elements of a head", "batch": "sequences", "context": "tokens of each sequence"}  # fmt: skip
    for name, default in SHAPE_DEFAULTS.items():
        kind, metavar = (str, "TYPE") if name == "kv_dtype" else (int, "N")
        shown = "as many as query heads" if default is None else default
        text = f"{texts[name]} (default: {shown})"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def _help_of(option: str) -> str:
    return str(next(spec for spec in dataclasses.fields(RunConfig) if spec.name == option).metadata["help"])


def _choices_of(option: str) -> Any:
    return next(spec for spec in dataclasses.fields(RunConfig) if spec.name == option).metadata["choices"]


def run_kernel(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode bench kernel``; the exit code.

    Raises
    ------
    ConfigError
        Before anything is measured, for what can't be measured or written.
    """
    cases = _cases_of(args)
    settings = Settings.of(args)
    if args.json is not None:
        check_writable(args.json)
    from fastdecode_hpc.bench.kernel_session import KernelSession

    session = KernelSession(settings)
    for group in group_cases(cases):
        session.measure(group)
    machine = session.machine_figures()
    if "llamacpp" in settings.peers:
        session.compare_decode(args.model, args.compare_batch, args.compare_context)
    _print(session, machine)
    if args.json is not None:
        write_json(args.json, {"machine": machine, "cases": session.rows})
    return 0


def _print(session: KernelSession, machine: Figures) -> None:
    print(format_table([row for row in session.rows if "kernel_efficiency" in row]))
    for row in session.rows:
        if "speedup_over_llamacpp" in row:
            print(format_decode(row))
    for note in session.notes:
        print(f"note: {note}")
    print(format_machine(machine))
    for hint in session.hints():
        print(f"hint: {hint}")


def _cases_of(args: argparse.Namespace) -> list[Case]:
    given = {name: getattr(args, name) for name in SHAPE_DEFAULTS if getattr(args, name) is not None}
    if not given:
        return choose_cases(args.cases)
    if args.cases:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"--cases and a shape of your own ({flags}) contradict each other; give one")
    return [custom_case(**(SHAPE_DEFAULTS | given))]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure."""

    rounds: int
    num_threads: int
    isa: str
    seed: int
    peers: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """Check the flags; select the instruction set."""
        check_at_least("rounds", args.rounds, MIN_ROUNDS)
        check_at_least("seed", args.seed, 0)
        here = look()
        threads = asked_threads(args.threads, here)
        if threads is not None:
            check_at_least("threads", threads, 1)
        for peer in args.compare:
            if peer not in PEERS:
                raise ConfigError(f"--compare has {peer!r}; it takes {' and '.join(PEERS)}")
        if "llamacpp" in args.compare:
            _check_llamacpp(args)
        from fastdecode_hpc.isa import active_isa, select_isa

        if args.isa is not None:
            select_isa(args.isa)
        return cls(args.rounds, threads or here.num_physical_cores, active_isa(), args.seed, tuple(args.compare))


def _check_llamacpp(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("--compare llamacpp needs the package xllamacpp: pip install xllamacpp")
    if args.model != "smollm2" and not (args.model.endswith(".gguf") and Path(args.model).is_file()):
        raise ConfigError(f"--model is {args.model!r}; llama.cpp reads .gguf files: name one, or smollm2")
    check_at_least("compare-batch", args.compare_batch, 1)
    least = least_context(args.rounds)
    if args.compare_context < least:
        raise ConfigError(
            f"--compare-context is {args.compare_context}; {args.rounds} rounds decode {num_new_tokens(args.rounds)} "
            f"tokens, so it must be at least {least}"
        )
