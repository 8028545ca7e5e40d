"""The shape of a model, from config.json or GGUF metadata; what can't be computed is refused by name."""

from __future__ import annotations

from pathlib import Path

from fastdecode_hpc.config import naming
from fastdecode_hpc.families.config_json import config_of
from fastdecode_hpc.families.gguf import config_of_gguf
from fastdecode_hpc.files import read_json_object
from fastdecode_hpc.gguf_header import GGUFHeader, read_gguf_header
from fastdecode_hpc.model_shape import ModelConfig


def read_hf_config(folder: Path) -> ModelConfig:
    """The model of a folder with config.json.

    Raises
    ------
    ConfigError
        If the architecture or a feature of it isn't supported, or a value is missing or of another kind.
    """
    path = folder / "config.json"
    with naming(path):
        return config_of(folder, read_json_object(path))


def gguf_config(path: Path, header: GGUFHeader) -> ModelConfig:
    """The model of a GGUF file, but for a scaling that only its ``rope_freqs`` show; raises as `read_hf_config`."""
    with naming(path):
        return config_of_gguf(path, header)


def read_model_shape(path: Path) -> ModelConfig:
    """The shape of the model at a path that `resolve_model` gave, for who computes nothing with it.

    Of a GGUF file the scaling of positions may be missing. Raises as `read_hf_config`.
    """
    return gguf_config(path, read_gguf_header(path)) if path.suffix == ".gguf" else read_hf_config(path)
