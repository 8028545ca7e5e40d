#!/usr/bin/env python
"""How far predictions are off: against the figures of FastDecode's paper, or against this machine.

python benchmarks/model_accuracy.py --paper [--json FILE]
python benchmarks/model_accuracy.py --measured [--rounds 5] [--json FILE]

--paper: the profile a10-epyc7452 holds what of the paper's Tables 1-3 is needed. What is predicted was read from its
figures 9, 11, 12 and 13 (printed labels, else from the vector drawings, +-1 %).

--measured: on this machine, with 1, 2 and 3 R-workers, a few steady runs are measured to fit a profile, and others in
turn with them (other batch, context, type of the cache, whole ragged runs under both schedules, all layers of a model
from a few), which are predicted. Rank 0 has the first core, R-workers share the second. The spread is that of predicted
over measured, round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastdecode_hpc.bench.machine import program_figures
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.files import write_json
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.planner.profile import load_profile
from fastdecode_hpc.planner.shapes import SHAPES
from fastdecode_hpc.planner.simulate import Simulation
from fastdecode_hpc.planner.steady import steady_step
from fastdecode_hpc.schedule.step_figures import step_latencies

PROFILE = "a10-epyc7452"
SOCKETS, BATCH = 8, 1024
TARGET = 0.15

# Figure 9: tokens/s of whole generations of 1024 tokens, all sequences started together.
FIGURE_9 = {
    "llama-2-7b": {128: 1052, 256: 1542, 512: 2202, 1024: 2279},
    "llama-2-13b": {128: 660, 256: 1026, 512: 1363, 1024: 1441},
}
# Figure 13: tokens/s of 1024 sequences of a fixed length, by sockets.
FIGURE_13 = {
    ("llama-2-7b", 1024): {1: 277, 2: 533, 4: 1037, 8: 1610},
    ("llama-2-13b", 1024): {1: 176, 2: 336, 4: 656, 8: 1182},
    ("llama-2-13b", 128): {1: 590, 2: 1068, 4: 1789, 8: 1774},
}
# Figures 11 and 12: latency of a step, steady with the load-stabilizing schedule over the longest without it.
FIGURES_11_12 = {("llama-2-7b", 1024): 0.665, ("llama-2-13b", 1024): 0.71, ("llama-2-7b", 768): 0.75}

WHY = {
    "fig13-llama-2-13b-128-1": "each row costs an R-worker more than reading its KV: this point and the one with 1024 "
    "tokens lie on a line with 25 us a row and block, which no table of the paper shows",
    "fig13-llama-2-13b-128-2": "as with one socket",
}


class Point(NamedTuple):
    """One figure of the paper and its prediction."""

    name: str
    unit: str
    measured: float
    predicted: float
    spread: float = 0.0

    @property
    def relative_error(self) -> float:
        return self.predicted / self.measured - 1


def paper_points() -> Iterator[Point]:
    """All points, in the order of the figures."""
    profile = load_profile(PROFILE)
    for model, rates in FIGURE_9.items():
        for batch, rate in rates.items():
            yield Point(f"fig9-{model}-{batch}", "tokens/s", rate, generation_rate(profile, model, batch))
    for (model, length), latency in FIGURES_11_12.items():
        yield Point(f"fig11-{model}-{length}", "ratio", latency, latency_ratio(profile, model, length))
    for (model, length), by_sockets in FIGURE_13.items():
        for sockets, rate in by_sockets.items():
            step = steady_step(
                profile, SHAPES[model], RunConfig(), num_workers=sockets, batch_size=BATCH, context_len=length
            )
            yield Point(f"fig13-{model}-{length}-{sockets}", "tokens/s", rate, BATCH / step.step_s)


def generation_rate(profile, model: str, batch: int) -> float:
    """Tokens/s of `batch` sequences of 1024 tokens that start together."""
    run = Simulation(profile, SHAPES[model], RunConfig(max_batch_size=batch), num_workers=SOCKETS, given_kv=True)
    return run.run([Lengths(1, 1023)] * batch).tokens_per_s


def latency_ratio(profile, model: str, length: int) -> float:
    """Median step of the schedule once it has settled, over the longest step of sequences that start together."""
    greedy = Simulation(profile, SHAPES[model], RunConfig(max_batch_size=BATCH), num_workers=SOCKETS, given_kv=True)
    peak = max(step_latencies(greedy.run([Lengths(1, length - 1)] * BATCH).steps))
    config = RunConfig(max_batch_size=BATCH, schedule="load-stabilizing")
    level = Simulation(
        profile, SHAPES[model], config, num_workers=SOCKETS, given_kv=True, max_steps=length + length // 4
    )
    settled = step_latencies(level.run([Lengths(1, length - 1)] * (3 * BATCH)).steps)[length:]
    return statistics.median(settled) / peak


def report(points: list[Point], json_file: Path | None, case: str, **machine) -> None:
    """Print a table, its median, and write both."""
    width = max(len(point.name) for point in points)
    print(f"{'':{width}} {'measured':>10} {'predicted':>10} {'error':>8}")
    for point in points:
        note = f"  {WHY.get(point.name, '')}" if abs(point.relative_error) > TARGET else ""
        figures = f"{point.measured:10.4g} {point.predicted:10.4g} {point.relative_error:+8.1%}"
        spread = f"  spread {point.spread:.1%}" if point.spread else ""
        print(f"{point.name:{width}} {figures} {point.unit}{spread}{note}")
    errors = [abs(point.relative_error) for point in points]
    print(f"{case}: {statistics.median(errors):.1%} (worst {max(errors):.1%}, {len(points)} points)")
    if json_file is not None:
        cases = [{**point._asdict(), "relative_error": point.relative_error} for point in points]
        summary = {"name": case, "relative_error": statistics.median(errors), "worst": max(errors)}
        write_json(json_file, {"machine": machine, "cases": [summary, *cases]})


def measured_points(rounds: int) -> list[Point]:
    """All points of this machine, from one job for each number of R-workers."""
    from fastdecode_hpc.mpiexec import find_library, find_mpiexec

    program, found = Path(__file__).with_name("measured_accuracy.py"), []
    mpiexec = str(find_mpiexec(find_library()))
    for kind, workers in (("points", 1), ("points", 2), ("points", 3), ("layers", 1)):
        cores = ",".join(["0"] + ["1"] * workers)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "points.json"
            command = [mpiexec, "-n", str(workers + 1), "-bind-to", f"user:{cores}", sys.executable, str(program)]
            subprocess.run([*command, kind, str(output), str(rounds)], check=True)
            found += json.loads(output.read_text())
    return [Point(**point) for point in found]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="against the paper's figures; no machine is measured")
    parser.add_argument("--measured", action="store_true", help="against this machine, on MPICH")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of which medians are taken (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the points to a JSON file")
    args = parser.parse_args()
    if args.paper == args.measured:
        parser.error("give --paper or --measured")
    if args.paper:
        report(list(paper_points()), args.json, "paper-median", profile=PROFILE)
    else:
        report(measured_points(args.rounds), args.json, "measured-median", **program_figures())
    return 0


if __name__ == "__main__":
    sys.exit(main())
