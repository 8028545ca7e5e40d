"""Lengths of sequences to plan for: a file of them, or one length for all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.model_shape import ModelConfig


@dataclass(frozen=True, slots=True)
class Lengths:
    """A sequence to be: tokens of its prompt, of its output, and the most that this could have been."""

    prompt_len: int
    output_len: int
    max_new_tokens: int = 0  # 0: as long as it is

    def __post_init__(self) -> None:
        for name, low in (("prompt_len", 1), ("output_len", 1), ("max_new_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} is {show(value)}; it must be a whole number of at least {low}")

    @property
    def bound(self) -> int:
        """Most tokens that the output may have: what the schedule and admission know."""
        return max(self.output_len, self.max_new_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the whole sequence at its bound."""
        return self.prompt_len + self.bound


def check_lengths(lengths: Iterable[Lengths], model: ModelConfig) -> None:
    """Raise `ConfigError` for a sequence that is longer than the model can take."""
    limit = model.max_context_len
    for number, entry in enumerate(lengths, start=1):
        if entry.longest > limit:
            raise ConfigError(f"sequence {number} may have {entry.longest} tokens; this model takes at most {limit}")


def read_lengths(path: Path) -> list[Lengths]:
    """Lengths from a JSONL file.

    A line is ``{"prompt_len": 120, "output_len": 300, "max_new_tokens": 512}``, the last optional, or a record that
    ``fastdecode generate`` wrote, of which ``usage`` is read: tokens of several choices are shared out evenly. Records
    of failed requests are left out.

    Raises
    ------
    ConfigError
        With the line's number.
    """
    try:
        with path.open() as file:
            found = list(itertools.chain.from_iterable(_entries(path, file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no lengths")
    return found


def _entries(path: Path, lines: Any) -> Iterator[list[Lengths]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _parse(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of {path}: {error}") from None


def _parse(value: Any) -> list[Lengths]:
    if not isinstance(value, dict):
        raise ConfigError(f"it holds {show(value)}; it must be an object")
    if value.get("error") is not None:
        return []
    response = value.get("response")
    body = response.get("body", {}) if isinstance(response, dict) else value
    usage = body.get("usage") if isinstance(body, dict) else None
    if isinstance(usage, dict):
        return _of_record(body, usage)
    if missing := [name for name in ("prompt_len", "output_len") if name not in value]:
        raise ConfigError(
            f"it has no {' and no '.join(missing)}; a line has both, or is a record of an earlier job's "
            "output, with usage"
        )
    return [Lengths(value.get("prompt_len"), value.get("output_len"), value.get("max_new_tokens", 0))]  # type: ignore[arg-type]


def _of_record(body: dict[str, Any], usage: dict[str, Any]) -> list[Lengths]:
    choices = body.get("choices")
    count = len(choices) if isinstance(choices, list) and choices else 1
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(output, int):
        raise ConfigError(f"completion_tokens is {show(output)}; it must be a whole number")
    return [Lengths(prompt, max(1, round(output / count)))] * count  # type: ignore[arg-type]
