"""The doctor's findings as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastdecode_hpc.doctor.checks import PROBLEM, WARNING, Finding
from fastdecode_hpc.doctor.compare import Speed
from fastdecode_hpc.host import format_ranks
from fastdecode_hpc.setup import Place


def format_findings(places: Sequence[Place], speeds: Sequence[Speed], findings: Sequence[Finding]) -> str:
    """Each rank's place, what it was measured to do, and a line a finding with its way out below."""
    by_rank = {speed.rank: _format_speed(speed) for speed in speeds}
    lines = [f"{place.where}{by_rank.get(place.rank, '')}" for place in places]
    width = max(len(one.check) for one in findings)
    for one in findings:
        ranks = f"{format_ranks(one.ranks)}: " if one.ranks else ""
        lines.append(f"{one.verdict:8} {one.check:{width}}  {ranks}{one.text}")
        if one.fix:
            lines.append(f"{'':8} {'':{width}}  -> {one.fix}")
    counts = Counter(one.verdict for one in findings)
    lines.append(f"{_count(counts[PROBLEM], PROBLEM)}, {_count(counts[WARNING], WARNING)}")
    return "\n".join(lines)


def _format_speed(speed: Speed) -> str:
    reading = f"  reads {speed.read_bytes_per_s / 1e9:.1f} GB/s" if speed.read_bytes_per_s else ""
    link = f"  link {speed.latency_s * 1e6:.1f} us, {speed.link_bytes_per_s / 1e9:.2f} GB/s"
    return reading + (link if speed.link_bytes_per_s else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
