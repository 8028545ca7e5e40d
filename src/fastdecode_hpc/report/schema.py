"""What a report holds: tables, columns, units, names. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

PROGRAM: Final = "fastdecode_hpc"
SCHEMA_VERSION: Final = 2

RUNNING, COMPLETE, REBUILT = "running", "complete", "rebuilt"  # root attribute `state`

STEP_UNITS: Final[Mapping[str, str]] = MappingProxyType({
    "step": "1",
    "slot": "1",
    "t_start": "s",
    "t_end": "s",
    "num_rows": "1",
    "load_tokens": "tokens",
    "prefill_tokens": "tokens",
    "t_s_part": "s",
    "t_head": "s",
    "t_r_part": "s",
    "t_transport": "s",
    "t_exposed": "s",
    "t_wait": "s",
    "t_turn": "s",
    "t_prefill": "s",
})  # fmt: skip
PREDICTED_UNITS: Final[Mapping[str, str]] = MappingProxyType(
    {"predicted_t_s_part": "s", "predicted_t_r_part": "s", "predicted_t_step": "s"}
)
LOAD_UNITS: Final[Mapping[str, str]] = MappingProxyType({
    "step": "1",
    "load_tokens": "tokens",
    "load_limit": "tokens",
    "rank_load_max": "tokens",
    "rank_load_mean": "tokens",
})  # fmt: skip
RANK_UNITS: Final[Mapping[str, str]] = MappingProxyType(
    {"t_r_part": "s", "t_turn": "s", "t_wait": "s", "t_exposed": "s", "free_blocks": "blocks", "load_tokens": "tokens",
     "num_rows": "1", "t_link": "s"}
)  # fmt: skip
SPAN_UNITS: Final[Mapping[str, str]] = MappingProxyType(
    {"t_start": "s", "t_end": "s", "kind": "1", "step": "1", "slot": "1", "layer": "1"}
)
REQUEST_UNITS: Final[Mapping[str, str]] = MappingProxyType({
    "index": "1",
    "prompt_tokens": "tokens",
    "output_tokens": "tokens",
    "finish_reason": "1",
    "failed": "1",
    "owner": "1",
    "queue_wait": "s",
    "t_admitted": "s",
    "t_first_token": "s",
    "t_finished": "s",
})  # fmt: skip

SPAN_KINDS: Final = ("s_part", "head", "r_part", "wait", "exposed", "prefill")  # codes are places
FINISH_REASONS: Final = ("unknown", "stop", "length", "mixed", "error")
CODE_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"kind": SPAN_KINDS, "finish_reason": FINISH_REASONS, "failed": ("no", "yes")}
)

_DTYPE_OF_UNIT = {"1": "i8", "tokens": "i8", "blocks": "i8"}
_DTYPE_OF_COLUMN = {
    **dict.fromkeys(CODE_NAMES, "i1"),
    "slot": "i2",
    "layer": "i2",
    "owner": "i4",
    "load_limit": "f8",  # nan: none
    "rank_load_mean": "f8",
}


def column_dtype(name: str, unit: str) -> str:
    """NumPy's name of the type in which a column is stored."""
    return _DTYPE_OF_COLUMN.get(name, _DTYPE_OF_UNIT.get(unit, "f8"))


def partial_report(path: Path) -> Path:
    """The name of a report until its run has ended in order."""
    return path.with_name(f"{path.name}.partial")
