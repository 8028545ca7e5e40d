"""How far the clocks of other ranks are off rank 0's, from round trips. Pure."""

from __future__ import annotations

from collections.abc import Iterable

CLOCK_DRIFT = 5e-5  # seconds a second by which clocks of two hosts may drift apart, be they disciplined or not


class Clocks:
    """Of each rank the offset of its clock to rank 0's, by the round trip that tells it best.

    A short round trip tells it well, an old one less than it did. So of two the one counts that leaves less doubt now.

    Parameters
    ----------
    trips : iterable of (float, float)
        Of `World.align_clocks`: offset and error of each rank, in seconds.
    now : float
        When these were found, in seconds on rank 0's clock.

    Attributes
    ----------
    offsets_s : list of float
        By rank: to be subtracted from the times of its clock.
    errors_s : list of float
        How far they may have been off when they were found.
    latencies_s : list of float
        Of a short message: half of the shortest round trip ever.
    """

    def __init__(self, trips: Iterable[tuple[float, float]], now: float) -> None:
        trips = list(trips)
        self.offsets_s = [offset for offset, _ in trips]
        self.errors_s = [error for _, error in trips]
        self.latencies_s = self.errors_s.copy()
        self._found_s = [now] * len(trips)

    def drifts(self, rank: int) -> bool:
        """Whether it is another clock. Ranks of one host have one: its offset is none but for the error."""
        return abs(self.offsets_s[rank]) > self.errors_s[rank]

    def doubt(self, rank: int, now: float) -> float:
        """How far the offset may be off by now, in seconds."""
        drift_s = CLOCK_DRIFT * (now - self._found_s[rank]) if self.drifts(rank) else 0.0
        return self.errors_s[rank] + drift_s

    def answered(self, rank: int, sent: float, came: float, left: float, back: float) -> None:
        """A question was sent and its answer is back, on rank 0's clock; it came and the answer left on the rank's.

        How long the answer was held is known on the rank's clock alone, which may run faster meanwhile.
        """
        held = left - came
        error_s = (back - sent - held + CLOCK_DRIFT * held) / 2
        self.take(rank, (came - sent + left - back) / 2, max(0.0, error_s), back)

    def take(self, rank: int, offset_s: float, error_s: float, now: float) -> None:
        """A round trip has been made."""
        self.latencies_s[rank] = min(self.latencies_s[rank], error_s)
        if error_s < self.doubt(rank, now):
            self.offsets_s[rank], self.errors_s[rank], self._found_s[rank] = offset_s, error_s, now
