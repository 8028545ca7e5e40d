"""Calibrates the ranks it is started with, and measures other points beside, in turn; rank 0 writes all as JSON.

Usage (by model_accuracy.py): mpiexec -n 3 python measured_accuracy.py OUTPUT.json ROUNDS
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from fastdecode_hpc.bench.schedule_session import ScheduleSession
from fastdecode_hpc.calibrate.fit import PromptPoint
from fastdecode_hpc.calibrate.measure import Calibration, Measured, measure_messages, measure_reading, spread
from fastdecode_hpc.calibrate.profile_maker import make_profile, predict_step
from fastdecode_hpc.calibrate.samples import DecodePoint, median_sample
from fastdecode_hpc.config import ModelConfig, RunConfig
from fastdecode_hpc.engine import Engine, run_as_rank
from fastdecode_hpc.files import write_json
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.planner.simulate import Simulation

MAX_SPREAD, MAX_REPEATS = 0.10, 3  # a point whose spread is larger is measured again
MODEL = str(Path(__file__).with_name("configs") / "wide-attention")  # its head is small beside its layers
REAL_MODEL, FEW_LAYERS = "smollm2", (4, 8)
STEPS = 8
TYPES = ("fp16", "int8")
PROMPTS = [PromptPoint(1, 64), PromptPoint(1, 256), PromptPoint(2, 256), PromptPoint(1, 768), PromptPoint(8, 16)]
CALIBRATED = [DecodePoint(t, batch, context) for t in TYPES for batch in (32, 128) for context in (64, 256)]
# By number of R-workers: what is predicted.
CHECKED = {
    1: [DecodePoint("fp16", 64, 150), DecodePoint("int8", 96, 110), DecodePoint("fp16", 112, 320)],
    2: [DecodePoint("fp16", 64, 120), DecodePoint("int8", 80, 200)],
    3: [DecodePoint("fp16", 96, 160), DecodePoint("int8", 48, 220)],
}
SCHEDULES = {1: ("greedy", "load-stabilizing"), 2: ("greedy",), 3: ("load-stabilizing",)}
LIVES_BATCH, NUM_LIVES = 64, 128


@dataclasses.dataclass
class Point:
    """Something that is measured in each round."""

    name: str
    measure: Callable[[], object]
    value: Callable[[object], float]  # what of a measurement counts
    samples: list = dataclasses.field(default_factory=list)

    @property
    def spread(self) -> float:
        """Quartile range over median."""
        return spread([self.value(sample) for sample in self.samples])

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.value(sample) for sample in self.samples)


class Session:
    """All runs of one job."""

    def __init__(self, world, run: RunConfig, rounds: int) -> None:
        self.world, self.run, self.rounds = world, run, rounds
        self.session = ScheduleSession(world)
        self.engine = self.session.first_engine(run)
        self.num_workers = world.size - 1
        self.reading, self.messages = measure_reading(world, 1), measure_messages(world)

    def measure(self, points: list[Point]) -> None:
        """All points in turn, one round to warm up; those that spread too much again."""
        for index in range(self.rounds + 1):
            for point in points:
                sample = point.measure()
                point.samples += [sample] if index else []
            print(f"model_accuracy: {self.num_workers} R-workers, round {index} of {self.rounds}", file=sys.stderr)
        for _ in range(MAX_REPEATS):
            for point in points:
                if point.spread > MAX_SPREAD:
                    print(f"model_accuracy: again {point.name}: spread {point.spread:.1%}", file=sys.stderr)
                    point.samples = [point.measure() for _ in range(self.rounds)]

    def decode_point(self, run: RunConfig, point: DecodePoint, name: str = "") -> Point:
        """A steady run."""
        calibration = Calibration(self.session, run, rounds=self.rounds, num_steps=STEPS)
        return Point(name or f"steady {point}", lambda: calibration.decode(point), lambda sample: sample.step_s)

    def prompt_point(self, run: RunConfig, point: PromptPoint) -> Point:
        """Prompts."""
        calibration = Calibration(self.session, run, rounds=self.rounds, num_steps=STEPS)
        return Point(f"prompts {point}", lambda: calibration.compute(point), lambda seconds: seconds)

    def lives_point(self, schedule: str) -> Point:
        """Whole ragged lives, prompts computed; seconds."""
        run = dataclasses.replace(self.run, schedule=schedule, max_batch_size=LIVES_BATCH)

        def measure() -> float:
            recording = self.session.decode(run, [(e.prompt_len, e.output_len) for e in LIVES], given_kv=False)
            return max(recording.t_finished_s)

        return Point(f"whole run, {schedule}", measure, lambda seconds: seconds)


def ragged_lives() -> list[Lengths]:
    """Long-tailed lengths."""
    rng = random.Random(7)
    return [Lengths(rng.randint(4, 120), min(96, 8 + int(rng.expovariate(1 / 24)))) for _ in range(NUM_LIVES)]


LIVES = ragged_lives()


def profile_of(session: Session, engine: Engine, run: RunConfig, decode: dict, prompts: dict) -> Profile:
    """A profile from some of the points."""
    measured = Measured(
        decode={point: median_sample(entry.samples) for point, entry in decode.items()},
        prompts={point: entry.median for point, entry in prompts.items()},
        links=session.messages,
        read_bandwidth=session.reading,
    )
    return make_profile("here", run, engine.setup, measured, device=engine.device(), machine={})


def entry_of(session: Session, point: Point, predicted: float) -> dict:
    """A line of the result."""
    return {
        "name": f"{session.num_workers} R-workers, {point.name}",
        "unit": "s",
        "measured": point.median,
        "predicted": predicted,
        "spread": point.spread,
    }


def check(session: Session) -> list[dict]:
    """Calibrate, measure other points beside, predict them."""
    run, model = session.run, session.engine.setup.model
    decode = {point: session.decode_point(run, point) for point in CALIBRATED}
    prompts = {point: session.prompt_point(run, point) for point in PROMPTS}
    checked = {point: session.decode_point(run, point) for point in CHECKED[session.num_workers]}
    lives = {schedule: session.lives_point(schedule) for schedule in SCHEDULES[session.num_workers]}
    layers = layer_points(session) if session.num_workers == 1 else {}
    extra = [entry for entries in layers.values() for entry in entries.values()]
    session.measure([*decode.values(), *prompts.values(), *checked.values(), *lives.values(), *extra])
    profile = profile_of(session, session.engine, run, decode, prompts)
    found = [entry_of(session, entry, predict(profile, model, run, point, entry)) for point, entry in checked.items()]
    for schedule, entry in lives.items():
        config = dataclasses.replace(run, schedule=schedule, max_batch_size=LIVES_BATCH)
        simulated = Simulation(profile, model, config, num_workers=session.num_workers).run(LIVES)
        found.append(entry_of(session, entry, simulated.wall_s))
    return found + (extrapolate(session, layers, prompts) if layers else [])


def predict(profile: Profile, model: ModelConfig, run: RunConfig, point: DecodePoint, entry: Point) -> float:
    """Seconds of a step."""
    context = median_sample(entry.samples).context
    return predict_step(profile, model, run, point.kv_dtype, point.batch, context)


def layer_points(session: Session) -> dict[int, dict[DecodePoint, Point]]:
    """A real model with a few and with all layers (None)."""
    points = [DecodePoint("fp16", batch, context) for batch in (16, 32) for context in (128, 384)]
    found = {}
    for num_layers in (*FEW_LAYERS, None):
        run, chosen = real_run(session.run, num_layers), points if num_layers else [DecodePoint("fp16", 24, 256)]
        found[num_layers] = {
            point: session.decode_point(run, point, f"{num_layers or 'all'} layers of {REAL_MODEL}, {point}")
            for point in chosen
        }
    return found


def real_run(run: RunConfig, num_layers: int | None) -> RunConfig:
    """The options with the real model."""
    return dataclasses.replace(run, model=REAL_MODEL, load_format="auto", num_layers=num_layers, max_batch_size=32)


def extrapolate(session: Session, layers: dict, prompts: dict) -> list[dict]:
    """All layers, predicted from a few."""
    point, entry = next(iter(layers[None].items()))
    whole = session.session.first_engine(real_run(session.run, None)).setup.model
    found = []
    for num_layers in FEW_LAYERS:
        run = real_run(session.run, num_layers)
        engine = session.session.first_engine(run)
        profile = profile_of(session, engine, run, layers[num_layers], prompts)
        line = entry_of(session, entry, predict(profile, whole, run, point, entry))
        found.append({**line, "name": f"{line['name']}, from {num_layers} layers"})
    return found


def main() -> int:
    """Be one rank."""
    output, rounds = Path(sys.argv[1]), int(sys.argv[2])
    run = RunConfig(
        model=MODEL, load_format="dummy", threads=1, max_batch_size=128, device="cpu", r_worker_weights="equal"
    )

    def work(world) -> int:
        session = Session(world, run, rounds)
        if not world.is_s_rank:
            session.session.follow()
            return 0
        found = check(session)
        session.session.end()
        write_json(output, found)
        return 0

    return run_as_rank(run, work)


if __name__ == "__main__":
    sys.exit(main())
