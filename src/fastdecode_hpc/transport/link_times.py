"""What can be said about each link from the times that both its ends have written down. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.speeds import link_s
from fastdecode_hpc.transport.base import StepReport

LINK_ACCURACY = 0.2  # by how much clocks may be off, over the longest time that they are to tell

Floats = npt.NDArray[np.float64]


def link_times(
    posted: Floats,
    reports: Mapping[int, StepReport],
    behind_kv: Sequence[Collection[int]],
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
    behind_kv : sequence of collection of int
        Of each layer the ranks to which prompt K/V was still leaving when q, k, v were sent: these shared the link with
        it, or waited for it, and tell nothing.
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
    sent = np.repeat(posted[:, None], len(reports), axis=1)
    for layer, ranks in enumerate(behind_kv):
        if ranks:
            sent[layer, [rank in ranks for rank in reports]] = math.nan
    found = link_s(sent, asked, arrived, before, latency)
    seen = {rank: seconds for rank, seconds in zip(reports, found.tolist(), strict=True) if math.isfinite(seconds)}
    longest = max(seen.values(), default=0.0)
    return {rank: seconds for rank, seconds in seen.items() if doubts[rank] <= LINK_ACCURACY * longest}
