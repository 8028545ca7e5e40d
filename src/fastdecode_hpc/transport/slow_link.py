"""A link that is slower than the machine's: for measurements and tests of what a slow one does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlowLink:
    """How slow.

    Attributes
    ----------
    bytes_per_s : float
        Each way.
    latency_s : float
    """

    bytes_per_s: float
    latency_s: float = 0.0


class Lane:
    """One way of a link, which passes messages one after the other.

    Parameters
    ----------
    link : SlowLink
    """

    def __init__(self, link: SlowLink) -> None:
        self._link = link
        self._free = 0.0

    def passes(self, start: float, num_bytes: int) -> float:
        """When a message that is there at `start` is through."""
        self._free = max(self._free, start) + num_bytes / self._link.bytes_per_s
        return self._free + self._link.latency_s
