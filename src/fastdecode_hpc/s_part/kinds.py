"""The kinds of S-Part: native, or transformers' own code. Each reads a model's shape, and builds the S-Part for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.families.refused import KindError
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.build import build_native
from fastdecode_hpc.s_part.checkpoint import read_model_config

if TYPE_CHECKING:
    from fastdecode_hpc.s_part.transformers_kind import TransformersKind

Progress = Callable[[int, int], None]  # called with bytes of weights in place and their total


class SPartKind(Protocol):
    """How the S-Part of one model is made.

    Where a model can't be run, and another kind may, that one is asked: it is named as a way out only if it runs it.
    """

    def read_model(self) -> ModelConfig:
        """The whole model's shape, on any machine, from no weights; raises `ConfigError` where it can't be run."""

    def weights_bytes(self, model: ModelConfig) -> int | None:
        """Bytes that its weights take on the S-Part's device; None: what the sizes of `model` say.

        Raises `ConfigError` where they can't be run on this machine.
        """

    def build(self, model: ModelConfig, *, threads: int, max_context_len: int, progress: Progress | None) -> BaseSPart:
        """Load the weights of as many layers as `model` has."""


class NativeKind:
    """Families that are described in `families.known`."""

    def __init__(self, run: RunConfig, path: Path) -> None:
        self._run, self._path = run, path

    def read_model(self) -> ModelConfig:
        try:
            return read_model_config(self._path)
        except KindError as error:
            raise ConfigError(f"{error}; {_by_transformers(self._run, self._path)}") from error

    def weights_bytes(self, model: ModelConfig) -> int | None:
        return None

    def build(self, model: ModelConfig, *, threads: int, max_context_len: int, progress: Progress | None) -> BaseSPart:
        return build_native(
            self._run, model, self._path, threads=threads, max_context_len=max_context_len, progress=progress
        )


def _by_transformers(run: RunConfig, path: Path) -> str:
    """What transformers' code does with a model, on this machine and otherwise as it is asked for."""
    try:
        kind = _transformers_kind(dataclasses.replace(run, s_part="transformers"), path)
        kind.read_alone()
        kind.check_machine()
    except ConfigError as error:
        told = str(error).removeprefix(f"{path / 'config.json'}: ")
        return f"with --s-part transformers: {told}"
    return "--s-part transformers runs it as it is, on transformers' code"


def _transformers_kind(run: RunConfig, path: Path) -> TransformersKind:
    from fastdecode_hpc.s_part.transformers_kind import TransformersKind

    return TransformersKind(run, path)


def find_kind(run: RunConfig, path: Path) -> SPartKind:
    """The kind that the options ask for, for the model at a path that `resolve_model` gave."""
    if run.s_part == "native":
        return NativeKind(run, path)
    return _transformers_kind(run, path)
