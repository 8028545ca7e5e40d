"""How fast each R-worker reads, and is reached, from what the steps of a run tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

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
        ``[num_layers, ...]``: when they were sent (NaN: not to be counted), when the worker was free to take them, when
        they were there, and when the message before them, of whichever slot or with prompt K/V, had been there. All on
        one clock.
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
    num_workers : int
    """

    def __init__(self, num_workers: int) -> None:
        self._tokens, self._seconds, self._seen = np.zeros((3, num_workers))  # seen: of the whole run; stays known

    def add(self, load_tokens: Floats, t_r_part: Floats) -> None:
        """What R-workers read in some steps, in how many seconds; ``[num_steps, num_workers]`` each.

        One that read nothing in a step keeps its figures.
        """
        kept, weights = _weights(load_tokens > 0)
        self._tokens = self._tokens * kept + (weights * load_tokens).sum(axis=0)
        self._seconds = self._seconds * kept + (weights * t_r_part).sum(axis=0)
        self._seen += np.where(load_tokens > 0, t_r_part, 0.0).sum(axis=0)

    def token_s(self) -> list[float]:
        """Of each R-worker; empty until there is enough of all of them to go by."""
        if self._seen.min() < MIN_SECONDS or not self._tokens.min():
            return []
        found: list[float] = (self._seconds / self._tokens).tolist()
        return found

    def mean_token_s(self) -> float:
        """Of all of them together, whatever there is; 0 before anything was read."""
        return float(self._seconds.sum() / max(self._tokens.sum(), 1.0))


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
        self._kept: list[tuple[Floats, Floats]] = []  # until it is known

    def take(self, rows: Floats, seconds: Floats) -> list[tuple[Floats, Floats]]:
        """What can be told now of these steps, and of those before, each link's own time in place of the one seen.

        Parameters
        ----------
        rows, seconds : float arrays
            ``[num_steps, num_workers]``: rows of each R-worker, in the order of ranks, and seconds to it or NaN.

        Returns
        -------
        list of (rows, seconds)
            As were given.
        """
        if self._in_turn is None:
            ratios = _shares_of_turn(rows, seconds)
            tells = np.isfinite(ratios)
            if tells.any():  # of a single R-worker no step ever tells
                self._kept.append((rows[tells], seconds[tells]))
                self._ratios += ratios[tells].tolist()
            if len(self._ratios) < MIN_STEPS:
                return []
            low, high = IN_TURN
            self._in_turn = low < float(np.median(self._ratios)) < high
            kept, self._kept = self._kept, []
            return [(rows, self._own(rows, seconds)) for rows, seconds in kept]
        return [(rows, self._own(rows, seconds))]

    def _own(self, rows: Floats, seconds: Floats) -> Floats:
        if not self._in_turn:
            return seconds
        before, row_s = _before(rows), _row_s(rows, seconds)
        own = np.maximum(seconds - row_s * before, row_s * rows)
        several = (np.isfinite(seconds) & (rows > 0)).sum(axis=1, keepdims=True) >= 2
        return np.where(several, own, seconds)


def _before(rows: Floats) -> Floats:
    """Rows of lower ranks."""
    return np.cumsum(rows, axis=1) - rows


def _row_s(rows: Floats, seconds: Floats) -> Floats:
    """Seconds a row of the fastest R-worker that was seen in each step: ``[num_steps, 1]``; 0 where none was."""
    each = np.divide(seconds, rows, out=np.full_like(seconds, np.inf), where=(rows > 0) & np.isfinite(seconds))
    least = each.min(axis=1, keepdims=True)
    return np.where(np.isfinite(least), least, 0.0)


def _shares_of_turn(rows: Floats, seconds: Floats) -> Floats:
    """Seconds over what they were if messages left in turn, as fast as the fastest; the lower median of R-workers.

    Returns
    -------
    float array
        ``[num_steps]``; inf where it can't be told: two must have been seen, one of them with rows of others before it.
    """
    before, row_s = _before(rows), _row_s(rows, seconds)
    seen = (rows > 0) & np.isfinite(seconds)
    waits = seen & (before > 0) & (row_s > 0) & (seen.sum(axis=1, keepdims=True) >= 2)
    ratios = np.divide(seconds, row_s * (before + rows), out=np.full_like(seconds, np.inf), where=waits)
    middle = np.maximum(waits.sum(axis=1) - 1, 0) // 2
    return np.asarray(np.take_along_axis(np.sort(ratios, axis=1), middle[:, np.newaxis], axis=1)[:, 0], np.float64)


class LinkSpeeds:
    """Latency of each R-worker's link and seconds a row of q, k, v takes on it, over the last few hundred steps.

    A straight line through rows and seconds, as far as these tell one. As long as the rows hardly change, the latency
    is what it was found to be before. Else all of a link that is late rather than slow would be put down to its rows:
    with fewer of them each would seem to cost more, and so on.

    Parameters
    ----------
    latencies : sequence of float
        Of a short message to each, in seconds, 0 where it isn't known: what no link can be faster than.
    """

    def __init__(self, latencies: Sequence[float]) -> None:
        self._least = np.array(latencies, np.float64)
        self._latency = self._least.copy()
        self._count = np.zeros(len(latencies), np.int64)
        self._sums = np.zeros((5, len(latencies)))  # of weights, rows, seconds, squares of rows, products

    def add(self, rows: Floats, t_link: Floats) -> None:
        """Steps in which so many rows took so long to each R-worker, in each layer; ``[num_steps, num_workers]`` each.

        Where nothing was seen the time is NaN.
        """
        seen = (rows > 0) & np.isfinite(t_link)
        kept, weights = _weights(seen)
        seconds = np.where(seen, t_link, 0.0)
        figures = np.stack([np.ones_like(rows), rows, seconds, rows * rows, rows * seconds])
        self._count += seen.sum(axis=0)
        self._sums = self._sums * kept + (weights * figures).sum(axis=1)

    def known(self) -> dict[int, tuple[float, float]]:
        """Latency and seconds a row, by place, of the R-workers whose link was seen often enough. Never negative."""
        places = np.flatnonzero(self._count >= MIN_STEPS)
        if not len(places):
            return {}
        weight, rows, seconds, squares, products = self._sums[:, places]
        rows, seconds, squares, products = rows / weight, seconds / weight, squares / weight, products / weight
        variance = squares - rows * rows
        differ = variance > (SPREAD * rows) ** 2
        slope = (products - rows * seconds) / np.where(differ, variance, 1.0)
        most = (seconds - np.minimum(self._least[places], seconds)) / rows
        fitted = seconds - np.minimum(np.maximum(slope, 0.0), most) * rows
        self._latency[places] = np.where(differ, fitted, self._latency[places])
        latency = np.minimum(self._latency[places], seconds)
        row_s = (seconds - latency) / rows
        return dict(zip(places.tolist(), zip(latency.tolist(), row_s.tolist(), strict=True), strict=True))


def _weights(counts: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """What is left of what was known before, and weights of new figures, where those count that do.

    Parameters
    ----------
    counts : bool array
        ``[num_steps, num_workers]``.

    Returns
    -------
    kept : float array
        ``[num_workers]``.
    weights : float array
        ``[num_steps, num_workers]``; the last figure of each counts as 1.
    """
    later = np.cumsum(counts[::-1], axis=0)[::-1]  # this one and those after it
    return MEMORY ** counts.sum(axis=0), np.where(counts, MEMORY ** (later - 1.0), 0.0)
