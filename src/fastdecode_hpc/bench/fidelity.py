"""``fastdecode bench fidelity``: what each KV type costs in accuracy on a text, through the real cache and kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode_hpc import __version__, host
from fastdecode_hpc.config import ConfigError, RunConfig, check_at_least
from fastdecode_hpc.files import check_writable, write_json
from fastdecode_hpc.launch import detect
from fastdecode_hpc.model_shape import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from fastdecode_hpc.bench.fidelity_figures import FidelityCase
    from fastdecode_hpc.s_part.base import BaseSPart
    from fastdecode_hpc.s_part.forced import TokenScores

REFERENCE = "fp32"
DEFAULT_KV_DTYPES = ("fp16", "bf16", "int8", "k=int8,v=int4", "int4")
BATCH_TOKENS = 2048  # tokens that pass a layer at once, in whole windows: the memory this takes
DESCRIPTION = """\
Predict every token of a text from those before it, once for each KV type, and compare with fp32 KV. K and V go
through the cache and the attention kernels of a real run; all else is fp32. See docs/fidelity.md.
"""


def add_arguments(commands: Any) -> None:
    """Add ``fidelity`` to the benchmarks' parsers."""
    parser = commands.add_parser(
        "fidelity", help="what each KV type costs in accuracy, on a text of yours", description=DESCRIPTION
    )
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="plain UTF-8 text")
    parser.add_argument("--model", default="smollm2", metavar="TEXT", help="as for generate (default: smollm2)")
    parser.add_argument(
        "--kv-dtypes", action="extend", nargs="+", metavar="TYPE",
        help="types to compare with fp32, each as --kv-dtype of generate takes it, with spaces between them "
        f"(default: {' '.join(DEFAULT_KV_DTYPES)})",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of a window (default: 512)")
    parser.add_argument(
        "--max-tokens", type=int, default=20480, metavar="N", help="most tokens that count (default: 20480)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: OMP_NUM_THREADS, or this process's cores")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where the S-Part runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.set_defaults(func=run_fidelity)


def run_fidelity(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure, print and write; the exit code."""
    runs = _check(args)
    from fastdecode_hpc.bench.fidelity_figures import format_table
    from fastdecode_hpc.log import set_up_logging
    from fastdecode_hpc.model_files import resolve_model
    from fastdecode_hpc.s_part.build import build_native
    from fastdecode_hpc.s_part.weights import read_model_config

    set_up_logging(0)
    path = resolve_model(args.model)
    model = read_model_config(path)
    windows = _read_text(args, path, model)
    here = host.look()
    threads = host.asked_threads(args.threads, here) or here.num_physical_cores
    s_part = build_native(runs[0], model, path, threads=threads, max_context_len=args.context)
    cases = measure(s_part, windows, [run.kv_dtype for run in runs], threads=threads, block_size=runs[0].block_size)
    print(f"{cases[0].num_tokens} tokens of {args.text} in {len(windows)} windows of {args.context}")
    print(format_table(cases))
    if args.json is not None:
        _write_json(args, cases, threads)
    return 0


def measure(
    s_part: BaseSPart, windows: np.ndarray, kv_dtypes: Sequence[str], *, threads: int, block_size: int
) -> list[FidelityCase]:
    """Figures of each type, the first of which is the reference.

    Parameters
    ----------
    windows : np.ndarray
        [num_windows, context] int64 token ids; all of a window but its first count.
    """
    from fastdecode_hpc.bench.fidelity_figures import FidelityCase
    from fastdecode_hpc.bench.window_cache import WindowCache
    from fastdecode_hpc.progress import CountLine
    from fastdecode_hpc.s_part.forced import forced_pass, score_passes

    num_windows, context = windows.shape
    batch_size = min(num_windows, max(1, BATCH_TOKENS // context))
    caches = [
        WindowCache(
            s_part.config, kv_dtype, context=context, max_windows=batch_size, block_size=block_size, num_threads=threads
        )
        for kv_dtype in kv_dtypes
    ]
    for cache in caches:
        cache.set_sinks(s_part.all_sinks())
    scores: list[list[TokenScores]] = [[] for _ in caches]
    progress = CountLine(num_windows * len(caches), "windows")
    for start in range(0, num_windows, batch_size):
        batch = windows[start : start + batch_size]
        passes = []
        for cache in caches:
            cache.begin(len(batch))
            passes.append(forced_pass(s_part, batch, cache.attend))
            progress.advance(len(batch))
        for kept, new in zip(scores, score_passes(s_part, batch, passes), strict=True):
            kept.append(new)
    progress.close()
    return [
        FidelityCase.compare(kv_dtype, cache.layout.token_bytes, own, scores[0])
        for kv_dtype, cache, own in zip(kv_dtypes, caches, scores, strict=True)
    ]


def _check(args: argparse.Namespace) -> list[RunConfig]:
    """One configuration for each type, fp32 first; whatever is wrong is said before anything is loaded."""
    if (detect().size or 1) > 1:
        raise ConfigError("bench fidelity is one process; start it without mpirun or srun, or with one rank")
    check_at_least("--context", args.context, 2)
    check_at_least("--max-tokens", args.max_tokens, 1)
    if args.threads is not None:
        check_at_least("--threads", args.threads, 1)
    if args.json is not None:
        check_writable(args.json)
    kv_dtypes = dict.fromkeys((REFERENCE, *(args.kv_dtypes or DEFAULT_KV_DTYPES)))
    return [
        RunConfig(
            model=args.model, device=args.device, dtype="fp32", wire_dtype="fp32", kv_dtype=kv_dtype,
            batch_invariant=False,  # every type sees the same rows in the same places
        )
        for kv_dtype in kv_dtypes
    ]  # fmt: skip


def _read_text(args: argparse.Namespace, path: Path, model: ModelConfig) -> np.ndarray:
    """The windows of the text: [num_windows, context] int64."""
    from fastdecode_hpc.bench.text_windows import read_windows
    from fastdecode_hpc.tokenizer import Tokenizer

    if args.context > model.max_context_len:
        raise ConfigError(f"--context is {args.context}; this model was made for at most {model.max_context_len}")
    return read_windows(
        args.text, Tokenizer.load(path), context=args.context, max_tokens=args.max_tokens, bos=model.bos_token_id
    )


def _write_json(args: argparse.Namespace, cases: Sequence[FidelityCase], threads: int) -> None:
    from fastdecode_hpc.bench.fidelity_figures import as_dicts

    content = {
        "machine": _machine(threads),
        "settings": {"model": args.model, "text": str(args.text), "context": args.context},
        "cases": as_dicts(cases),
    }
    write_json(args.json, content)


def _machine(threads: int) -> dict[str, Any]:
    from fastdecode_hpc.bench.machine import look_at_machine
    from fastdecode_hpc.isa import active_isa

    here = host.look()
    return {
        "host": here.host,
        **asdict(look_at_machine(here.cores)),
        "threads": threads,
        "isa": active_isa(),
        "program_version": __version__,
    }
