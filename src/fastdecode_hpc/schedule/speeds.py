"""How much of the load each R-worker should carry, from what they are measured to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode_hpc.config import WEIGHT_WORDS, ConfigError, parse_weights

MEMORY = 0.998  # of a step's figures, what is left of them a step later
MIN_SECONDS = 0.5  # of attention on every R-worker, before figures count


class WorkerSpeeds:
    """Tokens read a second by each R-worker, over the last few hundred steps.

    Parameters
    ----------
    ranks : iterable of int
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._tokens = dict.fromkeys(ranks, 0.0)
        self._seconds = dict.fromkeys(self._tokens, 0.0)

    def add(self, rank: int, load_tokens: float, t_r_part: float) -> None:
        """One step of one R-worker: what it read in how many seconds."""
        self._tokens[rank] = self._tokens[rank] * MEMORY + load_tokens
        self._seconds[rank] = self._seconds[rank] * MEMORY + t_r_part

    def weights(self) -> dict[int, float]:
        """Speed of each R-worker over their mean; empty until there is enough to go by."""
        if min(self._seconds.values()) < MIN_SECONDS or not min(self._tokens.values()):
            return {}
        speeds = {rank: self._tokens[rank] / self._seconds[rank] for rank in self._tokens}
        mean = sum(speeds.values()) / len(speeds)
        return {rank: speed / mean for rank, speed in speeds.items()}


def fixed_weights(text: str, owners: tuple[int, ...]) -> dict[int, float]:
    """Shares of the R-workers as the options give them; none where they are equal or to be measured.

    Raises
    ------
    ConfigError
        If there are not as many as R-workers.
    """
    if text in WEIGHT_WORDS:
        return {}
    weights = parse_weights(text)
    if len(weights) != len(owners):
        raise ConfigError(f"r_worker_weights is {text!r}; it must have a number for each R-worker: {len(owners)}")
    mean = sum(weights) / len(weights)
    return {rank: weight / mean for rank, weight in zip(owners, weights, strict=True)}
