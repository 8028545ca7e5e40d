"""The kinds of S-Part: native, or transformers' own code. Each reads a model's shape, and builds the S-Part for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.build import build_native
from fastdecode_hpc.s_part.checkpoint import read_model_config

Progress = Callable[[int, int], None]  # called with bytes of weights in place and their total


class SPartKind(Protocol):
    """How the S-Part of one model is made."""

    def read_model(self) -> ModelConfig:
        """The whole model's shape, before any weight is read; raises `ConfigError` where it can't be run."""

    def weights_bytes(self, model: ModelConfig) -> int | None:
        """Bytes that its weights take on the S-Part's device; None: what the sizes of `model` say."""

    def build(self, model: ModelConfig, *, threads: int, max_context_len: int, progress: Progress | None) -> BaseSPart:
        """Load the weights of as many layers as `model` has."""


class NativeKind:
    """Families that are described in `families.known`."""

    def __init__(self, run: RunConfig, path: Path) -> None:
        self._run, self._path = run, path

    def read_model(self) -> ModelConfig:
        return read_model_config(self._path)

    def weights_bytes(self, model: ModelConfig) -> int | None:
        return None

    def build(self, model: ModelConfig, *, threads: int, max_context_len: int, progress: Progress | None) -> BaseSPart:
        return build_native(
            self._run, model, self._path, threads=threads, max_context_len=max_context_len, progress=progress
        )


def find_kind(run: RunConfig, path: Path) -> SPartKind:
    """The kind that the options ask for, for the model at a path that `resolve_model` gave."""
    if run.s_part == "native":
        return NativeKind(run, path)
    from fastdecode_hpc.s_part.transformers_kind import TransformersKind

    return TransformersKind(run, path)
