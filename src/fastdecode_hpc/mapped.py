"""What this process has mapped into its memory: libraries, and how much lies on huge pages. Reads /proc/self only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PROC = Path("/proc/self")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_FIGURE = re.compile(r"(\w+): +(\d+) kB")

Spans = Sequence[tuple[int, int]]  # addresses: first, and one past the last


def libraries(pattern: str, proc: Path = PROC) -> tuple[str, ...]:
    """Paths of the mapped files whose name matches a regular expression from its beginning; sorted."""
    try:
        lines = (proc / "maps").read_text().splitlines()
    except OSError:
        return ()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6 and fields[5].startswith("/")}
    return tuple(sorted(path for path in paths if re.match(pattern, Path(path).name)))


def huge_page_use(proc: Path = PROC) -> tuple[int, int]:
    """Bytes of this process's own memory, and those of them in huge pages; zeros where the kernel doesn't tell."""
    try:
        text = (proc / "smaps_rollup").read_text()
    except OSError:
        return 0, 0
    sizes = {name: int(kb) * 1024 for name, kb in _FIGURE.findall(text)}
    return sizes.get("Anonymous", 0), sizes.get("AnonHugePages", 0)


def huge_page_share(spans: Spans, proc: Path = PROC) -> float | None:
    """Share of the touched memory at these addresses that lies on huge pages.

    Parameters
    ----------
    spans : sequence of (int, int)
        Each in anonymous mappings that hold nothing else; the kernel may have joined neighbouring ones.

    Returns
    -------
    float or None
        0 to 1; None where nothing is touched, or the kernel doesn't tell.
    """
    try:
        with (proc / "smaps").open() as lines:
            touched, huge = _sum_mappings(lines, spans)
    except OSError:
        return None
    return huge / touched if touched else None


def _sum_mappings(lines: Iterable[str], spans: Spans) -> tuple[int, int]:
    """Touched and huge kB of the mappings that overlap one of the spans."""
    sums, ours = {"Rss": 0, "AnonHugePages": 0}, False
    for line in lines:
        if mapping := _MAPPING.match(line):
            start, stop = int(mapping[1], 16), int(mapping[2], 16)
            ours = any(start < last and first < stop for first, last in spans)
        elif ours and (figure := _FIGURE.match(line)) and figure[1] in sums:
            sums[figure[1]] += int(figure[2])
    return sums["Rss"], sums["AnonHugePages"]
