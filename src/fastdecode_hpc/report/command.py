"""``fastdecode report``: its sub-commands. What is heavy is imported when they run; torch and MPI never are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = ("page", "throughput", "steps", "load", "gantt", "utilisation")  # as of `plot`, which is heavy


def add_arguments(commands: Any) -> None:
    """Add ``report`` and its sub-commands to the command line."""
    parser = commands.add_parser(
        "report", help="read the reports of runs",
        description="Read, draw, compare, export or rebuild the HDF5 reports of runs.",
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_show(actions)
    _add_plot(actions)
    _add_compare(actions)
    _add_export(actions)
    _add_rebuild(actions)
    _add_predict(actions)
    _add_merge(actions)


def _add_show(actions: Any) -> None:
    parser = actions.add_parser("show", help="print a report for people")
    parser.add_argument("file", type=Path)
    parser.set_defaults(func=run_show)


def _add_plot(actions: Any) -> None:
    parser = actions.add_parser("plot", help="draw a report")
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "-o", "--out", type=Path, metavar="OUT.png",
        help="picture; its ending says in which format (default: the report's name with .png, in its folder)",
    )  # fmt: skip
    parser.add_argument("--figure", choices=FIGURES, default="page", help="page: all of them (default)")
    parser.set_defaults(func=run_plot)


def _add_compare(actions: Any) -> None:
    parser = actions.add_parser(
        "compare", help="the figures of several reports beside each other, as ratios to the first",
    )  # fmt: skip
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the ratios")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison to a file")
    parser.set_defaults(func=run_compare)


def _add_export(actions: Any) -> None:
    parser = actions.add_parser("export", help="write every table as CSV")
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path, metavar="DIR", help="made where it is missing")
    parser.set_defaults(func=run_export)


def _add_rebuild(actions: Any) -> None:
    parser = actions.add_parser("rebuild", help="after a crash: a report of what the records of an output hold")
    parser.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.h5")
    parser.set_defaults(func=run_rebuild)


def _add_predict(actions: Any) -> None:
    parser = actions.add_parser("predict", help="put what a profile predicts beside what was measured")
    parser.add_argument("file", type=Path)
    parser.add_argument("--profile", required=True, metavar="FILE|NAME", help="as of fastdecode plan")
    parser.add_argument("-o", "--out", type=Path, metavar="OUT.h5", help="a copy with it (default: the report itself)")
    parser.set_defaults(func=run_predict)


def _add_merge(actions: Any) -> None:
    parser = actions.add_parser("merge", help="put the parts of a sweep, of a job array's tasks, into one file")
    parser.add_argument("files", type=Path, nargs="+", metavar="PART.h5")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="SWEEP.h5")
    parser.set_defaults(func=run_merge)


def run_merge(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report merge PART.h5 … -o SWEEP.h5``."""
    from fastdecode_hpc.report.sweep import merge_sweeps
    from fastdecode_hpc.report.sweep_text import format_sweep

    print(format_sweep(*merge_sweeps(args.files, args.out)))
    return 0


def run_predict(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report predict FILE --profile PROFILE``."""
    from fastdecode_hpc.planner.profile import load_profile
    from fastdecode_hpc.report.predict import predict
    from fastdecode_hpc.report.text import format_report

    predict(args.file, load_profile(args.profile), args.out)
    print(format_report(args.out or args.file))
    return 0


def run_show(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report show FILE``."""
    from fastdecode_hpc.report.text import format_report

    print(format_report(args.file))
    return 0


def run_plot(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report plot FILE``."""
    from fastdecode_hpc.report.plot import plot_report

    out = args.out if args.out is not None else args.file.with_suffix(".png")
    plot_report(args.file, out, args.figure)
    print(f"drawn to {out}")
    return 0


def run_compare(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report compare A.h5 B.h5 …``."""
    from fastdecode_hpc.report.compare import compare

    print(compare(args.files, plot=args.plot, json_file=args.json))
    return 0


def run_export(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report export FILE DIR``."""
    from fastdecode_hpc.report.export import export

    for path in export(args.file, args.folder):
        print(path)
    return 0


def run_rebuild(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode report rebuild OUTPUT.jsonl -o FILE.h5``."""
    from fastdecode_hpc.report.rebuild import rebuild

    print(rebuild(args.output, args.out))
    return 0
