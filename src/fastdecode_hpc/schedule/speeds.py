"""How fast each R-worker reads, and is reached, from what the steps of a run tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MEMORY = 0.998  # of a step's figures, what is left of them a step later
MIN_SECONDS = 0.5  # of attention on every R-worker, before figures of one of them count
MIN_STEPS = 32  # in which the link of an R-worker was seen, before its figures count
SEEN_SHARE = 0.25  # of a message's way that its receiver must have waited for it
SPREAD = 0.2  # of rows, relative to their mean, from which latency and bandwidth can be told apart


def link_s(posted: Floats, asked: Floats, arrived: Floats, before: Floats, latency: Floats | float) -> Any:
    """Seconds that q, k, v of a layer are on their way to an R-worker, the median over layers.

    Parameters
    ----------
    posted, asked, arrived, before : float arrays
        ``[num_layers, ...]``: when they were sent, when the worker was free to take them, when they were there, and
        when the q, k, v before them, of whichever slot, had been there. All on one clock.
    latency : float or float array
        Of a short message.

    Returns
    -------
    float array
        ``[...]``; NaN where nothing was seen.

    Notes
    -----
    A message begins when it is sent, or when the link has passed the one before it. When it arrives is seen only by a
    worker that looks, not by one that is busy with the other slot; so those count that were waited for during a part of
    their way.
    """
    # What is late rather than slow passes several messages at a time.
    begun = np.maximum(posted, before - latency)
    seconds = arrived - begun
    is_seen = (seconds > 0) & (arrived - asked >= SEEN_SHARE * seconds)
    ordered = np.sort(np.where(is_seen, seconds, np.inf), axis=0)
    middle = np.maximum(is_seen.sum(axis=0) - 1, 0) // 2
    found = np.take_along_axis(ordered, middle[np.newaxis, ...], axis=0)[0]
    return np.where(np.isfinite(found), found, np.nan)


class WorkerSpeeds:
    """Seconds of attention a token read, of each R-worker, over the last few hundred steps.

    Parameters
    ----------
    ranks : iterable of int
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._tokens = dict.fromkeys(ranks, 0.0)
        self._seconds = dict.fromkeys(self._tokens, 0.0)

    def add(self, rank: int, load_tokens: float, t_r_part: float) -> None:
        """One step of one R-worker: what it read in how many seconds. One that read nothing keeps its figures."""
        if load_tokens:
            self._tokens[rank] = self._tokens[rank] * MEMORY + load_tokens
            self._seconds[rank] = self._seconds[rank] * MEMORY + t_r_part

    def token_s(self) -> dict[int, float]:
        """Of each R-worker; empty until there is enough of all of them to go by."""
        if min(self._seconds.values()) < MIN_SECONDS or not min(self._tokens.values()):
            return {}
        return {rank: self._seconds[rank] / self._tokens[rank] for rank in self._tokens}

    def mean_token_s(self) -> float:
        """Of all of them together, whatever there is; 0 before anything was read."""
        return sum(self._seconds.values()) / max(sum(self._tokens.values()), 1.0)


class LinkSpeeds:
    """Latency of each R-worker's link and seconds a row of q, k, v takes on it, over the last few hundred steps.

    Parameters
    ----------
    ranks : iterable of int
    latencies : mapping of int to float
        Of a short message to each, in seconds, as far as known: what no link can be faster than.
    """

    def __init__(self, ranks: Iterable[int], latencies: Mapping[int, float]) -> None:
        self._lines = {rank: _Line(latencies.get(rank, 0.0)) for rank in ranks}

    def add(self, rank: int, num_rows: int, t_link: float) -> None:
        """A step in which so many rows took so long to an R-worker, in each layer."""
        self._lines[rank].add(num_rows, t_link)

    def known(self) -> dict[int, tuple[float, float]]:
        """Latency and seconds a row, of the R-workers whose link was seen often enough."""
        return {rank: line.fit() for rank, line in self._lines.items() if line.count >= MIN_STEPS}


class _Line:
    """A straight line through rows and seconds, as far as these tell one.

    As long as the rows hardly change, the latency is what it was found to be before. Else all of a link that is late
    rather than slow would be put down to its rows: with fewer of them each would seem to cost more, and so on.
    """

    def __init__(self, latency: float) -> None:
        self.count = 0
        self._least = self._latency = latency
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0

    def add(self, rows: float, seconds: float) -> None:
        self.count += 1
        self._weight = self._weight * MEMORY + 1
        self._rows = self._rows * MEMORY + rows
        self._seconds = self._seconds * MEMORY + seconds
        self._squares = self._squares * MEMORY + rows * rows
        self._products = self._products * MEMORY + rows * seconds

    def fit(self) -> tuple[float, float]:
        """Latency and seconds a row; neither is negative."""
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        least = min(self._least, seconds)
        variance = self._squares / self._weight - rows * rows
        if variance > (SPREAD * rows) ** 2:
            slope = (self._products / self._weight - rows * seconds) / variance
            self._latency = seconds - min(max(slope, 0.0), (seconds - least) / rows) * rows
        latency = min(self._latency, seconds)
        return latency, (seconds - latency) / rows
