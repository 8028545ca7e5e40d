"""Reading safetensors row by row: one file, or the shards of an index.

Files are read, not mapped: touched pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_DTYPE_NAMES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp32"}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class _Entry(NamedTuple):
    path: Path
    offset_bytes: int
    type_name: str
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """The tensors of a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises
    ------
    ConfigError
        If a file is missing, damaged or cut short, or holds a type that can't be used.
    """

    permuted_qk = False

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, _Entry] = {}
        for path in _files(folder):
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise ConfigError(f"tensor {name} is in both {self._entries[name].path.name} and {path.name}")
                self._entries[name] = entry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    @property
    def dtype(self) -> str:
        """The type that holds most of the elements: fp32, fp16 or bf16."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            sizes[entry.type_name] = sizes.get(entry.type_name, 0) + math.prod(entry.shape)
        return _DTYPE_NAMES[max(sizes, key=lambda name: sizes[name])]

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Rows `first` to ``first + count - 1`` of a tensor (a vector is one row) in the file's type."""
        entry = self._entries[name]
        rows = torch.empty((count, entry.shape[-1]), dtype=_TYPES[entry.type_name])
        row_bytes = entry.shape[-1] * rows.element_size()
        with entry.path.open("rb") as file:
            file.seek(entry.offset_bytes + first * row_bytes)
            num_read = file.readinto(rows.view(torch.uint8).numpy().data)
        if num_read != count * row_bytes:
            raise ConfigError(f"{entry.path} ends inside tensor {name}; it is incomplete, copy it again")
        return rows


def _files(folder: Path) -> list[Path]:
    """The files that hold the folder's weights."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(shards)} shards are missing in {folder}: {', '.join(missing[:5])}"
            )
        return [folder / shard for shard in shards]
    if single.is_file():
        return [single]
    raise ConfigError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json; other formats "
        "(pytorch_model.bin) are not read: load the model with transformers and save_pretrained it"
    )


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, checked against its size."""
    file_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(file_bytes, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
    except (struct.error, ValueError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {name: _entry(path, name, info, 8 + header_bytes, file_bytes) for name, info in header.items()}


def _entry(path: Path, name: str, info: dict[str, Any], data_offset: int, file_bytes: int) -> _Entry:
    type_name, shape = info["dtype"], tuple(info["shape"])
    begin, end = info["data_offsets"]
    if type_name not in _TYPES:
        raise ConfigError(f"tensor {name} in {path} has type {type_name}; only {', '.join(_TYPES)} are read")
    if end - begin != math.prod(shape) * _TYPES[type_name].itemsize:
        raise ConfigError(f"tensor {name} in {path} has {end - begin} bytes, which is not its shape {list(shape)}")
    if data_offset + end > file_bytes:
        raise ConfigError(
            f"{path} has {file_bytes} bytes, but tensor {name} ends at {data_offset + end}; "
            "it is incomplete, copy it again"
        )
    return _Entry(path, data_offset + begin, type_name, shape)
