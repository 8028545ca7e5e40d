"""What a long prompt does to the decode steps beside it."""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.bench.figures import Figures, add_spread
from fastdecode_hpc.bench.measure import Spread, ratios
from fastdecode_hpc.bench.schedule_session import SETTLING_STEPS, Recording, ScheduleSession
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.schedule.step_figures import step_latencies

PREFILL = "prefill"
LONG_PROMPT = 4096
SHORT_PROMPT = 16
STEPS_BEFORE = 24  # decode steps until the long prompt may begin
ALLOWED = 1.2  # times a step's usual latency, that decode may take beside a prompt


class PrefillCase:
    """A full batch decodes; one place is freed, and a prompt of 4096 tokens takes it.

    Parameters
    ----------
    session : ScheduleSession
    run : RunConfig
    rounds : int
    """

    def __init__(self, session: ScheduleSession, run: RunConfig, *, rounds: int) -> None:
        self.session, self.run, self.rounds = session, run, rounds

    def measure(self) -> Figures:
        """Latency of a step beside prefill, over 1.2 usual steps and what the same prefill takes alone."""
        usual, beside, alone = [], [], []
        for index in range(self.rounds + 1):
            together, own = self._beside_decode(), self._alone()
            if index:  # the first round warms up
                without = _latencies(together, with_prefill=False)[SETTLING_STEPS:STEPS_BEFORE]
                usual.append(float(np.median(without)))
                beside.append(float(np.median(_latencies(together, with_prefill=True, after=SETTLING_STEPS))))
                alone.append(own)
            print(f"bench: prefill, round {index} of {self.rounds}", file=sys.stderr, flush=True)
        row: Figures = {
            "name": PREFILL,
            "batch": self.run.max_batch_size,
            "prompt_len": LONG_PROMPT,
            "max_prefill_tokens": self.run.max_prefill_tokens,
        }
        add_spread(row, "step_s", Spread.of(usual))
        add_spread(row, "step_beside_prefill_s", Spread.of(beside))
        add_spread(row, "prefill_alone_s", Spread.of(alone))
        allowed = [ALLOWED * step + own for step, own in zip(usual, alone, strict=True)]
        add_spread(row, "latency_over_allowed", ratios(beside, allowed))
        return row

    def _beside_decode(self) -> Recording:
        prompt_steps = -(-LONG_PROMPT // self.run.max_prefill_tokens)
        long_lived = (SHORT_PROMPT, STEPS_BEFORE + 2 * prompt_steps + 8)
        lengths = [long_lived] * (self.run.max_batch_size - 1) + [(SHORT_PROMPT, STEPS_BEFORE), (LONG_PROMPT, 2)]
        return self.session.decode(self.run, lengths, given_kv=False)

    def _alone(self) -> float:
        """Seconds that `max_prefill_tokens` of the long prompt take through all layers, with nothing else to do."""
        recording = self.session.decode(self.run, [(LONG_PROMPT, 2)], given_kv=False)
        tokens = sum(step.prefill_tokens for step in recording.steps)
        seconds = sum(step.t_prefill for step in recording.steps)
        return seconds * self.run.max_prefill_tokens / tokens


def _latencies(recording: Recording, *, with_prefill: bool, after: int = 0) -> npt.NDArray[np.float64]:
    """Latencies of the steps that computed prompts, or that did not, from step `after` on."""
    tokens: dict[int, int] = defaultdict(int)
    for step in recording.steps:
        tokens[step.step] += step.prefill_tokens
    latencies = step_latencies(recording.steps)
    return np.array([x for step, x in enumerate(latencies) if step >= after and (tokens[step] > 0) == with_prefill])
