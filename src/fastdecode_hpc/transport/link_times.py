"""What can be said about each link from the times that both its ends have written down. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.speeds import link_s
from fastdecode_hpc.transport.base import StepReport

CLOCK_DRIFT = 1e-5  # seconds a second by which clocks of two hosts may drift apart, be they disciplined or not
LINK_ACCURACY = 0.2  # by how much clocks may be off, over the longest time that they are to tell

Floats = npt.NDArray[np.float64]


def clock_doubt(offset_s: float, error_s: float, age_s: float) -> float:
    """How far the difference to another rank's clock may be off, so long after it was measured.

    Ranks of one host have one clock, which can't drift: its offset is none but for the error.
    """
    return error_s + (0.0 if abs(offset_s) <= error_s else CLOCK_DRIFT * age_s)


def link_times(
    posted: Floats,
    reports: Mapping[int, StepReport],
    latencies: Mapping[int, float],
    doubts: Mapping[int, float],
) -> dict[int, float]:
    """Seconds that q, k, v of a layer were on their way to each R-worker, where that can be seen.

    Parameters
    ----------
    posted : float64 array
        When they were sent, of each layer, on rank 0's clock as all times here.
    reports : mapping of int to StepReport
        Of R-workers with rows.
    latencies : mapping of int to float
        Seconds of a short message to each.
    doubts : mapping of int to float
        Seconds by which the clock of each may be off. Where that is a fifth of the longest time or more, nothing can be
        seen.
    """
    if not reports:
        return {}
    asked, arrived, before = (
        np.stack([getattr(one, name) for one in reports.values()], axis=1)
        for name in ("t_asked", "t_arrived", "t_before")
    )
    latency = np.array([latencies[rank] for rank in reports])
    found = link_s(posted[:, None], asked, arrived, before, latency)
    seen = {rank: seconds for rank, seconds in zip(reports, found.tolist(), strict=True) if math.isfinite(seconds)}
    longest = max(seen.values(), default=0.0)
    return {rank: seconds for rank, seconds in seen.items() if doubts[rank] <= LINK_ACCURACY * longest}
