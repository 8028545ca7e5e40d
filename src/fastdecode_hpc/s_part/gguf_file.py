"""Reading GGUF files: metadata, and tensors row by row.

The `gguf` package dequantises. Data is read, not mapped: touched pages of a mapping would count as this
process's memory.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.families.description import Family, WeightNames
from fastdecode_hpc.gguf_header import TensorInfo, read_gguf_header
from fastdecode_hpc.s_part.tensor_places import Place, check_places


class GGUFFile:
    """Metadata and tensors of one GGUF file.

    Attributes
    ----------
    header : GGUFHeader

    Raises
    ------
    ConfigError
        If the file is damaged, cut short, of another version or byte order, or holds a type that can't be
        used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_gguf_header(path)
        self._entries = self.header.tensors
        for name, entry in self._entries.items():
            _check_entry(path, name, entry)
        check_places(path, (_place(name, entry) for name, entry in self._entries.items()))

    def names_of(self, family: Family) -> WeightNames:
        """llama.cpp's names of a family that it keeps."""
        assert family.gguf is not None
        return family.gguf.names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    @property
    def dtype(self) -> str:
        """The type that holds most of the elements: fp32, bf16, or fp16, which stands for all quantised ones."""
        sizes: dict[int, int] = {}
        for entry in self._entries.values():
            sizes[entry.type_id] = sizes.get(entry.type_id, 0) + math.prod(entry.shape)
        if not sizes:
            raise ConfigError(f"{self.path} holds no tensors")
        largest = max(sizes, key=lambda type_id: sizes[type_id])
        return {"F32": "fp32", "F64": "fp32", "BF16": "bf16"}.get(_type_name(largest), "fp16")

    def rope_divisors(self, name: str, count: int) -> Tensor | None:
        """What each of `count` rotary frequencies is divided by, float32; None where no tensor of this name says it."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        if entry.shape != (count,):
            raise ConfigError(f"{self.path} has {name} of shape {list(entry.shape)}; it must be [{count}]")
        return self.read(name, 0, 1)[0]

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to ``first + count - 1`` of a tensor (a vector is one row), dequantised to float32."""
        from gguf.quants import dequantize

        entry = self._entries[name]
        row_bytes = _row_bytes(entry)
        rows = np.empty((count, row_bytes), np.uint8)
        with self.path.open("rb") as file:
            file.seek(entry.offset_bytes + first * row_bytes)
            num_read = file.readinto(rows.data)
        if num_read != rows.nbytes:
            raise ConfigError(f"{self.path} ends inside tensor {name}; it is incomplete, copy it again")
        # Blocks do not depend on rows: as one long row the package handles them in one go, many times faster.
        values = dequantize(rows.reshape(1, -1), _quantization(entry.type_id))
        return torch.from_numpy(values).view(count, -1)


def _quantization(type_id: int) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(type_id)


def _type_name(type_id: int) -> str:
    return str(_quantization(type_id).name)


def _row_bytes(entry: TensorInfo) -> int:
    block, block_bytes = _block_sizes(entry.type_id)
    return entry.shape[-1] // block * block_bytes


def _place(name: str, entry: TensorInfo) -> Place:
    size_bytes = math.prod(entry.shape[:-1]) * _row_bytes(entry)
    return Place(entry.offset_bytes, entry.offset_bytes + size_bytes, name)


@cache
def _block_sizes(type_id: int) -> tuple[int, int]:
    """Elements and bytes of a block of a GGML type.

    Raises
    ------
    ValueError, NotImplementedError, KeyError
        Unless the `gguf` package can turn it into floats.
    """
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    block, block_bytes = GGML_QUANT_SIZES[_quantization(type_id)]
    dequantize(np.zeros((1, block_bytes), np.uint8), _quantization(type_id))
    return block, block_bytes


def _check_entry(path: Path, name: str, entry: TensorInfo) -> None:
    """Raise unless a tensor has a usable type, and rows of whole blocks."""
    try:
        block, _ = _block_sizes(entry.type_id)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise ConfigError(
            f"tensor {name} in {path} has GGUF type {entry.type_id}, which can't be read: {error}"
        ) from error
    if entry.shape[-1] % block:
        raise ConfigError(
            f"tensor {name} in {path} has rows of {entry.shape[-1]}, not a multiple of its block of {block}"
        )
