"""Calibrates the ranks it is started with, and measures other points in turn with that; rank 0 writes all as JSON.

Usage (by model_accuracy.py): mpiexec -n 3 python measured_accuracy.py points|layers OUTPUT.json ROUNDS

A shared machine drifts by 10 % within seconds. So every round is a calibration of its own: what is predicted from its
calibrated points is compared with the points measured between them, and medians over rounds are taken of the ratios.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastdecode_hpc.bench.rank_speeds import measure_messages, measure_reading
from fastdecode_hpc.bench.schedule_session import ScheduleSession
from fastdecode_hpc.calibrate.fit import PromptPoint
from fastdecode_hpc.calibrate.measure import Calibration, Measured, spread
from fastdecode_hpc.calibrate.profile_maker import make_profile, predict_step
from fastdecode_hpc.calibrate.samples import DecodePoint, DecodeSample
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import run_as_rank
from fastdecode_hpc.files import write_json
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.planner.simulate import Simulation

MAX_SPREAD, MAX_REPEATS = 0.10, 2  # if the ratios of a point spread more, all rounds are run again, and count too
MODEL = str(Path(__file__).with_name("configs") / "wide-attention")  # its head is small beside its layers
REAL_MODEL, FEW_LAYERS = "smollm2", (4, 8)
STEPS = 8
PROMPTS = [PromptPoint(1, 64), PromptPoint(1, 256), PromptPoint(2, 256), PromptPoint(1, 768), PromptPoint(8, 16)]
CALIBRATED = [
    *(DecodePoint("fp16", *shape) for shape in ((32, 64), (32, 256), (64, 128), (128, 64), (128, 256))),
    *(DecodePoint("int8", *shape) for shape in ((32, 64), (64, 256), (128, 128))),
]
# By number of R-workers: what is predicted.
CHECKED = {
    1: [DecodePoint("fp16", 48, 150), DecodePoint("int8", 96, 110), DecodePoint("fp16", 112, 320)],
    2: [DecodePoint("fp16", 80, 120), DecodePoint("int8", 48, 200)],
    3: [DecodePoint("fp16", 96, 160), DecodePoint("int8", 40, 220)],
}
SCHEDULES = {1: ("greedy", "load-stabilizing"), 2: ("greedy",), 3: ("load-stabilizing",)}
LIVES_BATCH, NUM_LIVES = 64, 128


class Job:
    """All runs of one job; a point is a name, how it is measured, and what of a measurement counts."""

    def __init__(self, world: Any, run: RunConfig, rounds: int) -> None:
        self.run, self.rounds = run, rounds
        self.session = ScheduleSession(world)
        self.engine = self.session.first_engine(run)
        self.num_workers = world.size - 1
        self.reading, self.messages = measure_reading(world, 1), measure_messages(world)

    def decode(self, run: RunConfig, point: DecodePoint) -> DecodeSample:
        """One steady run."""
        return Calibration(self.session, run, rounds=1, num_steps=STEPS).decode(point)

    def compute(self, point: PromptPoint) -> float:
        """Seconds of prompts."""
        return Calibration(self.session, self.run, rounds=1, num_steps=STEPS).compute(point)

    def live(self, schedule: str) -> float:
        """Seconds of whole ragged lives, prompts computed."""
        recording = self.session.decode(
            self.run_of(schedule), [(entry.prompt_len, entry.output_len) for entry in LIVES], given_kv=False
        )
        return max(recording.t_finished_s)

    def run_of(self, schedule: str) -> RunConfig:
        """The options of a whole run."""
        return dataclasses.replace(self.run, schedule=schedule, max_batch_size=LIVES_BATCH)

    def profile(self, run: RunConfig, decode: dict, prompts: dict) -> Profile:
        """A profile from one round."""
        measured = Measured(decode=decode, prompts=prompts, links=self.messages, read_bandwidth=self.reading)
        engine = self.session.first_engine(run)
        return make_profile(
            "here", run, engine.setup, measured,
            device=engine.device(), row_tiles=engine.row_tiles(), machine={},
        )  # fmt: skip


def ragged_lives() -> list[Lengths]:
    """Long-tailed lengths."""
    rng = random.Random(7)
    return [Lengths(rng.randint(4, 120), min(96, 8 + int(rng.expovariate(1 / 24)))) for _ in range(NUM_LIVES)]


LIVES = ragged_lives()
Round = dict[str, tuple[float, float]]  # point |-> seconds predicted and measured


def points_round(job: Job) -> Round:
    """One calibration, with the points to predict measured between its own."""
    checked = CHECKED[job.num_workers]
    order = [point for pair in itertools.zip_longest(CALIBRATED, checked) for point in pair if point is not None]
    samples = {point: job.decode(job.run, point) for point in order}
    prompts = {point: job.compute(point) for point in PROMPTS}
    lives = {schedule: job.live(schedule) for schedule in SCHEDULES[job.num_workers]}
    profile = job.profile(job.run, {point: samples[point] for point in CALIBRATED}, prompts)
    found = {f"steady {point}": (predict(job, profile, job.run, point, samples[point]), samples[point].step_s)
             for point in checked}  # fmt: skip
    for schedule, seconds in lives.items():
        run = Simulation(profile, job.engine.setup.model, job.run_of(schedule), num_workers=job.num_workers)
        found[f"whole run, {schedule}"] = run.run(LIVES).wall_s, seconds
    return found


def layers_round(job: Job) -> Round:
    """A real model calibrated with its first layers, and all of it measured."""
    point, whole = DecodePoint("fp16", 24, 256), real_run(job.run, None)
    measured, prompts, found = job.decode(whole, point), {point: job.compute(point) for point in PROMPTS[:2]}, {}
    for num_layers in FEW_LAYERS:
        run = real_run(job.run, num_layers)
        points = [DecodePoint("fp16", batch, context) for batch in (16, 32) for context in (128, 384)]
        profile = job.profile(run, {point: job.decode(run, point) for point in points}, prompts)
        predicted = predict(job, profile, whole, point, measured)
        found[f"all layers of {REAL_MODEL} from {num_layers}, {point}"] = predicted, measured.step_s
    return found


def real_run(run: RunConfig, num_layers: int | None) -> RunConfig:
    """The options with the real model."""
    return dataclasses.replace(run, model=REAL_MODEL, load_format="auto", num_layers=num_layers, max_batch_size=32)


def predict(job: Job, profile: Profile, run: RunConfig, point: DecodePoint, sample: DecodeSample) -> float:
    """Seconds of a step."""
    model = job.session.first_engine(dataclasses.replace(run, kv_dtype=point.kv_dtype)).setup.model
    return predict_step(profile, model, run, point.kv_dtype, point.batch, sample.context)


def measure(job: Job, one_round: Callable[[Job], Round]) -> list[dict[str, Any]]:
    """Rounds after one to warm up, and more where ratios spread too much."""
    one_round(job)
    rounds: list[Round] = []
    for _ in range(1 + MAX_REPEATS):
        for _ in range(job.rounds):
            rounds.append(one_round(job))
            print(f"model_accuracy: {job.num_workers} R-workers, round {len(rounds)}", file=sys.stderr, flush=True)
        points = [entry(f"{job.num_workers} R-workers, {name}", [one[name] for one in rounds]) for name in rounds[0]]
        if all(point["spread"] <= MAX_SPREAD for point in points):
            break
    return points


def entry(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Median of the measured seconds, and of predicted over measured."""
    measured = statistics.median(seconds for _, seconds in pairs)
    ratios = [predicted / seconds for predicted, seconds in pairs]
    return {"name": name, "unit": "s", "measured": measured, "predicted": measured * statistics.median(ratios),
            "spread": spread(ratios)}  # fmt: skip


def main() -> int:
    """Be one rank."""
    kind, output, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    run = RunConfig(
        model=MODEL, load_format="dummy", threads=1, max_batch_size=128, device="cpu", r_worker_weights="equal"
    )

    def work(world: Any) -> int:
        job = Job(world, run, rounds)
        if not world.is_s_rank:
            job.session.follow()
            return 0
        found = measure(job, {"points": points_round, "layers": layers_round}[kind])
        job.session.end()
        write_json(output, found)
        return 0

    return run_as_rank(run, work)


if __name__ == "__main__":
    sys.exit(main())
