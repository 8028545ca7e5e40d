"""Measuring things in turn (A B A B ...), so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SETTLE_S = 0.02  # idle threads of an OpenMP runtime spin for some ms before they sleep
MIN_ROUNDS = 5

Times = Mapping[str, float]  # seconds of each part of what was run
Contender = Callable[[], Times]
Samples = dict[str, list[float]]  # part |-> seconds in each round


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value a round, at least two."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def interleave(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Samples]:
    """Run all contenders in turn, once to warm up and then `rounds` times.

    Returns
    -------
    dict
        By contender and part, seconds in each round.
    """
    samples: dict[str, Samples] = {name: {} for name in contenders}
    for index in range(rounds + 1):
        for name, run in contenders.items():
            sleep(SETTLE_S)
            times = run()
            for part, seconds in times.items() if index else ():
                samples[name].setdefault(part, []).append(seconds)
    return samples


def ratios(tops: Sequence[float], bottoms: Sequence[float]) -> Spread:
    """Spread of top / bottom, each pair of one round."""
    return Spread.of([top / bottom for top, bottom in zip(tops, bottoms, strict=True)])
