"""Opening a checkpoint whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from fastdecode_hpc.families.description import Family, WeightNames
from fastdecode_hpc.model_config import gguf_config, read_hf_config
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.gguf_rope import with_gguf_scaling
from fastdecode_hpc.s_part.safetensors_file import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """Files that can be read row by row."""

    def names_of(self, family: Family) -> WeightNames:
        """What the files call the tensors of a model of this family."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""

    @property
    def dtype(self) -> str:
        """The type of most elements: fp32, bf16 or fp16."""

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows ``[count, columns]`` of a tensor; a vector is one row."""


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path that `resolve_model` gave; raises `ConfigError` if it is damaged."""
    return GGUFFile(path) if path.suffix == ".gguf" else SafetensorsCheckpoint(path)


def read_model_config(path: Path) -> ModelConfig:
    """The shape of the model at a path that `resolve_model` gave, before any weight is read.

    Raises
    ------
    ConfigError
        If the architecture or a feature of it isn't supported.
    """
    if path.suffix != ".gguf":
        return read_hf_config(path)
    file = GGUFFile(path)
    return with_gguf_scaling(file, gguf_config(path, file.header))


def checkpoint_dtype(path: Path) -> str:
    """The type a checkpoint holds: fp32, bf16 or fp16; quantised GGUF counts as fp16."""
    return open_checkpoint(path).dtype
