"""How much of an array really lies on huge pages: advice is one thing, what the kernel had left another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_FIGURE = re.compile(r"(Rss|AnonHugePages): +(\d+) kB")


def huge_page_share(arrays: Sequence[np.ndarray], smaps: Path = SMAPS) -> float | None:
    """Share of the touched memory of these arrays that lies on huge pages.

    Parameters
    ----------
    arrays : sequence of np.ndarray
        Each in anonymous mappings that hold nothing else; the kernel may have joined neighbouring ones.

    Returns
    -------
    float or None
        0 to 1; None where nothing is touched, or the kernel doesn't tell.
    """
    spans = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays if array.nbytes]
    try:
        with smaps.open() as lines:
            touched, huge = _sum_mappings(lines, spans)
    except OSError:
        return None
    return huge / touched if touched else None


def _sum_mappings(lines: Iterable[str], spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Touched and huge kB of the mappings that overlap one of the address spans."""
    sums, ours = {"Rss": 0, "AnonHugePages": 0}, False
    for line in lines:
        if mapping := _MAPPING.match(line):
            start, stop = int(mapping[1], 16), int(mapping[2], 16)
            ours = any(start < last and first < stop for first, last in spans)
        elif ours and (figure := _FIGURE.match(line)):
            sums[figure[1]] += int(figure[2])
    return sums["Rss"], sums["AnonHugePages"]
