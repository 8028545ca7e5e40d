"""From what came of requests to rows of ``/requests``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastdecode_hpc.report.schema import FINISH_REASONS, REQUEST_UNITS
from fastdecode_hpc.results import Completion

UNKNOWN_RANK = -1


def completion_row(completion: Completion) -> dict[str, float]:
    """The row of a request that was run, to its end or not."""
    ran = completion.t_first_token_s > 0
    return {
        "index": completion.request.index,
        "prompt_tokens": completion.prompt_tokens,
        "output_tokens": completion.output_tokens,
        "finish_reason": reason_code([choice.finish_reason for choice in completion.choices])
        if completion.error is None
        else FINISH_REASONS.index("error"),
        "failed": completion.error is not None,
        "owner": completion.owner,
        "queue_wait": max(0.0, completion.t_admitted_s - completion.t_read_s) if ran else math.nan,
        "t_admitted": completion.t_admitted_s if ran else math.nan,
        "t_first_token": completion.t_first_token_s if ran else math.nan,
        "t_finished": completion.t_finished_s if ran else math.nan,
    }


def failed_row(index: int) -> dict[str, float]:
    """The row of a line that holds no request that could be run."""
    times = dict.fromkeys((name for name, unit in REQUEST_UNITS.items() if unit == "s"), math.nan)
    counts = {"index": index, "prompt_tokens": 0, "output_tokens": 0, "failed": True, "owner": UNKNOWN_RANK}
    return {**counts, "finish_reason": FINISH_REASONS.index("error"), **times}


def reason_code(reasons: Sequence[str | None]) -> int:
    """The code of the reason for which all choices of a request ended, or of ``mixed``."""
    distinct = set(reasons)
    if len(distinct) > 1:
        return FINISH_REASONS.index("mixed")
    reason = distinct.pop() if distinct else None
    return FINISH_REASONS.index(reason) if reason in FINISH_REASONS[1:3] else 0
