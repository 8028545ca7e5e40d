"""Seconds as a function of one number, through measured points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastdecode_hpc.config import ConfigError


@dataclass(frozen=True)
class Curve:
    """Straight lines between points; beyond the last one its line goes on, below the first the value stays.

    Attributes
    ----------
    x : tuple of float
        Rows or tokens, increasing, above 0.
    seconds : tuple of float
        At those; not negative.
    """

    x: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.seconds) or not self.x:
            raise ConfigError(f"a curve has {len(self.x)} places and {len(self.seconds)} values; it needs equally many")
        if any(b <= a for a, b in zip((0.0, *self.x), self.x, strict=False)) or min(self.seconds) < 0:
            raise ConfigError(f"a curve goes through {self.x}, {self.seconds}; places must increase from above 0")

    def __call__(self, x: float) -> float:
        """Seconds at `x`."""
        if x <= self.x[-1] or len(self.x) == 1:
            return float(np.interp(x, self.x, self.seconds))
        (x0, x1), (y0, y1) = self.x[-2:], self.seconds[-2:]
        return max(y1, y1 + (x - x1) * (y1 - y0) / (x1 - x0))
