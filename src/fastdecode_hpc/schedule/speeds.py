"""How fast each R-worker reads, and is reached, from what the steps of a run tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Links = Mapping[int, tuple[int, float]]  # by R-worker, rows and seconds that they took; NaN: not seen

MEMORY = 0.998  # of a step's figures, what is left of them a step later
MIN_SECONDS = 0.5  # of attention on every R-worker, before figures of one of them count
MIN_STEPS = 32  # in which the link of an R-worker was seen, before its figures count
SEEN_SHARE = 0.25  # of a message's way that its receiver must have waited for it
IN_TURN = (0.75, 1.4)  # times over those of messages that leave one after the other, between which they do
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
        self._seen = dict.fromkeys(self._tokens, 0.0)  # seconds of the whole run: what is known stays known

    def add(self, rank: int, load_tokens: float, t_r_part: float) -> None:
        """One step of one R-worker: what it read in how many seconds. One that read nothing keeps its figures."""
        if load_tokens:
            self._tokens[rank] = self._tokens[rank] * MEMORY + load_tokens
            self._seconds[rank] = self._seconds[rank] * MEMORY + t_r_part
            self._seen[rank] += t_r_part

    def token_s(self) -> dict[int, float]:
        """Of each R-worker; empty until there is enough of all of them to go by."""
        if min(self._seen.values()) < MIN_SECONDS or not min(self._tokens.values()):
            return {}
        return {rank: self._seconds[rank] / self._tokens[rank] for rank in self._tokens}

    def mean_token_s(self) -> float:
        """Of all of them together, whatever there is; 0 before anything was read."""
        return sum(self._seconds.values()) / max(sum(self._tokens.values()), 1.0)


class Turns:
    """Takes off what q, k, v of R-workers wait for those of lower ranks, where these leave one after the other.

    Notes
    -----
    A scatter sends in the order of ranks. Behind one adapter that a single receiver can fill, message k then arrives
    when all before it have passed: links that are alike look the slower the higher their rank, and fewer rows would not
    make them faster. The first steps tell whether it is so, and it stays so for the run: the adapter does not change,
    and once shares follow links, times alone can't tell a slow link from one that waits. Two things can't be told
    apart: of two R-workers a second one that is twice as slow is taken to wait; and if the first of all is slow, the
    others are taken not to wait.
    """

    def __init__(self) -> None:
        self._in_turn: bool | None = None  # None: not known yet
        self._ratios: list[float] = []
        self._kept: list[Links] = []  # until it is known

    def take(self, links: Links) -> list[Links]:
        """What can be told now of this step, or of all steps so far, each link's own time in place of the one seen.

        Parameters
        ----------
        links : mapping of int to (int, float)
            Of a step: rows of each R-worker, and seconds to it or NaN.
        """
        if self._in_turn is not None:
            return [self._own(links)]
        ratio = _share_of_turn(links)
        if ratio is not None:
            self._kept.append(links)
            self._ratios.append(ratio)
        if len(self._ratios) < MIN_STEPS:
            return []
        low, high = IN_TURN
        self._in_turn = low < float(np.median(self._ratios)) < high
        kept, self._kept = self._kept, []
        return [self._own(one) for one in kept]

    def _own(self, links: Links) -> Links:
        seen = _seen_in_order(links)
        if not self._in_turn or len(seen) < 2:
            return links
        row_s = min(seconds / rows for _, rows, _, seconds in seen)
        own = {rank: (rows, max(seconds - row_s * before, row_s * rows)) for rank, rows, before, seconds in seen}
        return {rank: own.get(rank, one) for rank, one in links.items()}


def _seen_in_order(links: Links) -> list[tuple[int, int, int, float]]:
    """Rank, rows, rows of lower ranks and seconds, of those that were seen."""
    found, before = [], 0
    for rank, (rows, seconds) in sorted(links.items()):
        if rows and np.isfinite(seconds):
            found.append((rank, rows, before, seconds))
        before += rows
    return found


def _share_of_turn(links: Links) -> float | None:
    """Seconds over what they were if messages left in turn, as fast as the fastest; the lower median of R-workers."""
    seen = _seen_in_order(links)
    row_s = min((seconds / rows for _, rows, _, seconds in seen), default=0.0)
    ratios = sorted(seconds / (row_s * (before + rows)) for _, rows, before, seconds in seen if before and row_s > 0)
    return ratios[(len(ratios) - 1) // 2] if ratios and len(seen) > 1 else None


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
