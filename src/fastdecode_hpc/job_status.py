"""How a job ended: exit codes, their states, the summary for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXIT_OK, EXIT_INTERNAL, EXIT_USAGE, EXIT_SOME_FAILED, EXIT_TOO_MANY_ERRORS, EXIT_STOPPED = 0, 1, 2, 3, 4, 75
STATE_OF_EXIT = {
    EXIT_OK: "finished",
    EXIT_INTERNAL: "internal error",
    EXIT_USAGE: "usage error",
    EXIT_SOME_FAILED: "finished, some requests failed",
    EXIT_TOO_MANY_ERRORS: "stopped: too many request errors",
    EXIT_STOPPED: "stopped early, resumable",
}


def format_status(status: Mapping[str, Any], output: Path, report: Path | None) -> str:
    """A summary of a job that ended in order, for people; at most eight lines."""
    reason = f" ({status['reason']})" if status["reason"] else ""
    answered = status["num_requests"] + status["resumed_records"]
    errors = status["num_errors"] + status["resumed_errors"]
    lines = [
        f"{status['state']}{reason}",
        f"  requests  {answered} of {status['total_requests']} answered, {errors} of them with an error"
        + (f"; {status['resumed_records']} by earlier runs" if status["resumed_records"] else ""),
        f"  tokens    {status['output_tokens']} generated, {status['prompt_tokens']} of prompts computed",
        f"  time      {status['load_time']:.1f} s to load, {status['run_time']:.1f} s to run: "
        f"{status['end_to_end_tokens_per_s']:.1f} tok/s; decode {status['decode_tokens_per_s']:.1f}, "
        f"prefill {status['prefill_tokens_per_s']:.1f} tok/s",
        f"  output    {output}" + (f", report {report}" if report else ""),
    ]
    if status["shares"]:
        lines.append(f"  shares    {status['shares']}")
    if status["errors_by_code"]:
        lines.insert(2, "  errors    " + ", ".join(f"{code} {n}" for code, n in status["errors_by_code"].items()))
    if status["remaining_requests"]:
        lines.append(
            f"  left      {status['remaining_requests']} requests, {status['parked_requests']} of them begun; the same "
            "command goes on"
        )
    return "\n".join(lines)


def last_code(status: Path) -> int | None:
    """The exit code in a status file; None where there is none."""
    try:
        return json.loads(status.read_text())["exit_code"]  # type: ignore[no-any-return]
    except (OSError, ValueError, LookupError, TypeError):
        return None
