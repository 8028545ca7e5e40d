"""Command-line options that are fields of `RunConfig` and `SamplingParams`: one flag a field."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.host import parse_bytes
from fastdecode_hpc.sequence import SamplingParams
from fastdecode_hpc.signals import parse_duration

_T = TypeVar("_T")

SAMPLING_HELP = {
    "max_new_tokens": "most tokens to generate",
    "temperature": "0 is greedy",
    "top_k": "keep the K most likely tokens; 0: all",
    "top_p": "keep the smallest set of tokens of this mass",
    "min_p": "keep tokens at least this times as likely as the most likely one",
    "repetition_penalty": "above 1 makes tokens that were seen, in prompt or output, less likely",
    "presence_penalty": "taken off the logits of tokens in the output, once",
    "frequency_penalty": "taken off the logits of tokens in the output, as often as they are there",
}


def add_run_options(group: Any, names: Sequence[str] | None = None) -> None:
    """One flag a field of `RunConfig` (all, or these), with its help, choices and default."""
    hints = typing.get_type_hints(RunConfig)
    for spec in dataclasses.fields(RunConfig):
        if names is not None and spec.name not in names:
            continue
        flag, text = f"--{spec.name.replace('_', '-')}", spec.metadata["help"]
        kind = _plain_type(hints[spec.name])
        options: dict[str, Any] = {"default": spec.default, "help": _with_default(text, spec.default)}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = size if spec.metadata.get("metavar") == "SIZE" else kind
            options["choices"] = spec.metadata.get("choices")
            options["metavar"] = spec.metadata.get("metavar") or _metavar(kind, options["choices"])
        group.add_argument(flag, **options)


def add_sampling_options(group: Any) -> None:
    """Flags for lines that bring no settings of their own."""
    hints = typing.get_type_hints(SamplingParams)
    for spec in dataclasses.fields(SamplingParams):
        if spec.name in SAMPLING_HELP:
            text = _with_default(SAMPLING_HELP[spec.name], spec.default)
            kind = _plain_type(hints[spec.name])
            group.add_argument(
                f"--{spec.name.replace('_', '-')}", type=kind, default=spec.default, help=text, metavar=_metavar(kind)
            )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def as_type(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """A function that raises `ConfigError`, as a type of argparse, which shows the message of its own error only."""

    def parsed(text: str) -> _T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


size = as_type(parse_bytes)  # bytes from 40G and the like
duration = as_type(parse_duration)  # seconds from 30m and the like


def _plain_type(hint: Any) -> Any:
    """The type inside ``X | None``."""
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    return hint


def _metavar(kind: Any, choices: Any = None) -> str | None:
    return None if choices else {int: "N", float: "X"}.get(kind, "TEXT")


def _with_default(text: str, default: Any) -> str:
    shown = default is not None and default is not False and "default" not in text
    return f"{text} (default: {default})" if shown else text


def sampling(args: argparse.Namespace) -> SamplingParams:
    """What the flags of `add_sampling_options` say."""
    values = {name: getattr(args, name) for name in SAMPLING_HELP}
    try:
        return SamplingParams(**values, stop=tuple(args.stop), ignore_eos=args.ignore_eos)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def run_config(args: argparse.Namespace, **given: Any) -> RunConfig:
    """What the flags of `add_run_options` say, defaults for those that were not added, and what is given."""
    values = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(RunConfig) if hasattr(args, spec.name)}
    return RunConfig(**{**values, **given})
