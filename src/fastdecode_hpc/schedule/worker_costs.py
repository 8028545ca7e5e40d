"""What R-workers take for tokens that they read and rows that they are sent, and how that deals rows out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.config import WEIGHT_WORDS, ConfigError, parse_weights

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """What one R-worker takes in a step, all layers together: ``step_s + rows * row_s + tokens * token_s``.

    Attributes
    ----------
    token_s : float
        Attention, a token that is read, averaged over layers; in seconds, or in any unit where nothing else is known.
    row_s : float
        Its link, a row: q, k, v on their way to it and the output on its way back.
    step_s : float
        Its link's latency, both ways.
    """

    token_s: float = 1.0
    row_s: float = 0.0
    step_s: float = 0.0

    def link_s(self, rows: float) -> float:
        """Seconds of the link in a step with so many rows."""
        return self.step_s + rows * self.row_s


def told_costs(text: str, owners: tuple[int, ...]) -> dict[int, WorkerCost]:
    """Costs that lead to the shares which ``--r-worker-weights`` gives in numbers; none where it gives a word.

    Raises
    ------
    ConfigError
        If there are not as many numbers as R-workers.
    """
    if text in WEIGHT_WORDS:
        return {}
    weights = parse_weights(text)
    if len(weights) != len(owners):
        raise ConfigError(f"r_worker_weights is {text!r}; it must have a number for each R-worker: {len(owners)}")
    mean = sum(weights) / len(weights)
    return {rank: WorkerCost(mean / weight) for rank, weight in zip(owners, weights, strict=True)}


def ideal_shares(costs: Mapping[int, WorkerCost], num_rows: float, read_len: float) -> dict[int, float]:
    """Share of the rows of each R-worker with which all take equally long, for rows that read equally much.

    Parameters
    ----------
    num_rows : float
        Of a mini-batch; with few of them one whose latency is longer than what the others take gets none.
    read_len : float
        Tokens that a row reads, averaged over layers.
    """
    ranks = sorted(costs)
    rows = _level([costs[rank] for rank in ranks], num_rows, read_len)
    return dict(zip(ranks, (rows / max(num_rows, 1e-12)).tolist(), strict=True))


def deal_rows(costs: Sequence[WorkerCost], num_rows: int, read_len: float, most: Ints | None = None) -> Ints:
    """Whole rows of each R-worker, as near to `ideal_shares` as can be; what is left over goes to the first ones.

    Parameters
    ----------
    read_len : float
        Tokens that a row reads, averaged over layers.
    most : int64 array, optional
        ``[num_workers]``: rows for which each has memory. Others get what is beyond it, as `Placement` has it.

    Returns
    -------
    int64 array
        ``[num_workers]``.
    """
    most = np.full(len(costs), num_rows) if most is None else most
    assert most.sum() >= num_rows, (most, num_rows)
    exact = _level_within(costs, num_rows, read_len, most)
    rows = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(np.round(rows - exact, 9), kind="stable")  # who lacks most of a row comes first
    order = order[(rows < most)[order]]
    rows[order[: num_rows - int(rows.sum())]] += 1
    return rows


def _level_within(costs: Sequence[WorkerCost], num_rows: int, read_len: float, most: Ints) -> Floats:
    """`_level` of those that don't get more than they have memory for; the others are full."""
    rows, is_open = most.astype(np.float64), np.ones(len(costs), np.bool_)
    while is_open.any():
        left = num_rows - float(most[~is_open].sum())
        level = _level([cost for cost, its_open in zip(costs, is_open, strict=True) if its_open], left, read_len)
        fits = level <= most[is_open] + 1e-9
        if fits.all():
            rows[is_open] = level
            break
        is_open[np.flatnonzero(is_open)[~fits]] = False  # the level of the others only rises by that
    return rows


def _level(costs: Sequence[WorkerCost], num_rows: float, read_len: float) -> Floats:
    """Rows with which all that have any take equally long: a level is filled up, over those of small latency first."""
    row_s = np.array([cost.row_s + read_len * cost.token_s for cost in costs])
    step_s = np.array([cost.step_s for cost in costs])
    order = np.argsort(step_s, kind="stable")
    rates = np.cumsum(1 / row_s[order])
    levels = (num_rows + np.cumsum(step_s[order] / row_s[order])) / rates  # with the first 1, 2, ... of them
    # The lowest level is that of as many as lie below it: one more of them, above it, would raise it.
    level = float(levels.min())
    return np.asarray(np.maximum(0.0, level - step_s) / row_s, np.float64)
