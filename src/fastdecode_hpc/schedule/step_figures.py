"""Figures of whole steps, all slots together, from the records of a run, be it real or simulated. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.timing import StepTimes


def step_latencies(steps: Sequence[StepTimes]) -> npt.NDArray[np.float64]:
    """Seconds from each step's start to the next one's: ``[num_steps - 1]``."""
    return np.diff([step.t_start for step in sorted(steps, key=lambda step: step.step) if step.slot == 0])


def step_loads(steps: Sequence[StepTimes]) -> npt.NDArray[np.int64]:
    """Load of each step, all slots together: ``[num_steps]`` tokens."""
    loads: dict[int, int] = defaultdict(int)
    for step in steps:
        loads[step.step] += step.load_tokens
    return np.array([loads[step] for step in sorted(loads)])
