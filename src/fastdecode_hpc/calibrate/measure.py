"""Measures the ranks of a job: rank 0 decides what is run, the others follow."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastdecode_hpc.bench.schedule_session import ScheduleSession
from fastdecode_hpc.calibrate.fit import PromptPoint
from fastdecode_hpc.calibrate.samples import DecodePoint, DecodeSample, median_sample, sample_of
from fastdecode_hpc.config import RunConfig


@dataclass(slots=True)
class Measured:
    """Medians of all rounds.

    Attributes
    ----------
    decode : dict of DecodePoint to DecodeSample
    spreads : dict of DecodePoint to float
        Quartile range over median of a step's seconds.
    prompts : dict of PromptPoint to float
        Seconds.
    links : dict of int to list of (int, float)
        By rank: bytes and seconds of messages.
    read_bandwidth : dict of int to float
        By rank, bytes/s.
    """

    decode: dict[DecodePoint, DecodeSample] = field(default_factory=dict)
    spreads: dict[DecodePoint, float] = field(default_factory=dict)
    prompts: dict[PromptPoint, float] = field(default_factory=dict)
    links: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    read_bandwidth: dict[int, float] = field(default_factory=dict)


class Calibration:
    """Runs points in turn, round by round, so that what disturbs the machine disturbs all of them alike.

    Parameters
    ----------
    session : ScheduleSession
    run : RunConfig
        Of all points, but for batch and type of the cache.
    rounds, num_steps : int
    """

    def __init__(self, session: ScheduleSession, run: RunConfig, *, rounds: int, num_steps: int) -> None:
        self.session, self.run, self.rounds, self.num_steps = session, run, rounds, num_steps

    def measure(self, points: Sequence[DecodePoint], prompts: Sequence[PromptPoint]) -> Measured:
        """Medians of `rounds` after one to warm up."""
        decode: dict[DecodePoint, list[DecodeSample]] = {point: [] for point in points}
        computed: dict[PromptPoint, list[float]] = {point: [] for point in prompts}
        for index in range(self.rounds + 1):
            for point in points:
                sample = self.decode(point)
                decode[point] += [sample] if index else []
            for prompt in prompts:
                seconds = self.compute(prompt)
                computed[prompt] += [seconds] if index else []
            print(f"calibrate: round {index} of {self.rounds}", file=sys.stderr, flush=True)
        return Measured(
            decode={point: median_sample(samples) for point, samples in decode.items()},
            spreads={point: spread([sample.step_s for sample in samples]) for point, samples in decode.items()},
            prompts={point: statistics.median(seconds) for point, seconds in computed.items()},
        )

    def decode(self, point: DecodePoint) -> DecodeSample:
        """One steady run."""
        window = self.session.steady(self.config_of(point), point.context, self.num_steps, batch_size=point.batch)
        return sample_of(window, one_process=self.session.world is None)

    def compute(self, point: PromptPoint) -> float:
        """Seconds of computing prompts."""
        recording = self.session.decode(self.run, [(point.prompt_len, 2)] * point.num_prompts, given_kv=False)
        return sum(step.t_prefill for step in recording.steps)

    def config_of(self, point: DecodePoint) -> RunConfig:
        """The options of a point's run; all batches of a type share an engine."""
        return dataclasses.replace(self.run, kv_dtype=point.kv_dtype)


def spread(values: Sequence[float]) -> float:
    """Quartile range over median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
