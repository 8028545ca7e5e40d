"""Reading safetensors row by row: one file, or the shards of an index.

Files are read, not mapped: touched pages of a mapping would count as this process's memory. Nothing in them is run
or unpickled.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.families.description import Family, WeightNames
from fastdecode_hpc.files import parse_json_object, read_json_object
from fastdecode_hpc.s_part.tensor_places import Place, check_places

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# All that the format has: of buffers, such as masks, and of quantised weights sizes must be known, not values.
_TYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
_DTYPE_NAMES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp32"}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 8


class _Entry(NamedTuple):
    path: Path
    offset_bytes: int
    type_name: str
    shape: tuple[int, ...]

    @property
    def size_bits(self) -> int:
        return math.prod(self.shape) * _TYPE_BITS[self.type_name]

    @property
    def size_bytes(self) -> int:
        return self.size_bits // 8


class SafetensorsCheckpoint:
    """The tensors of a folder with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises
    ------
    ConfigError
        If a file is missing, damaged or cut short, or holds a type that can't be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, _Entry] = {}
        for path in _files(folder):
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    other = self._entries[name].path.name
                    raise ConfigError(f"tensor {name} is in both {other} and {path.name} of {folder}")
                self._entries[name] = entry

    def names_of(self, family: Family) -> WeightNames:
        """The family's own names; checkpoints of the bare model lack their prefix, or its beginning.

        Raises
        ------
        ConfigError
            If a tensor that counts has a type that can't be used.
        """
        names = family.names
        for name, entry in self._entries.items():
            if entry.type_name not in _TYPES and not name.endswith(names.ignored):
                raise ConfigError(
                    f"tensor {name} in {entry.path} has type {entry.type_name}; only {', '.join(_TYPES)} are read"
                )
        parts = names.prefix.split(".")
        prefixes = (".".join(parts[first:]) for first in range(len(parts)))
        found = (prefix for prefix in prefixes if f"{prefix}{names.embedding}.weight" in self._entries)
        return dataclasses.replace(names, prefix=next(found, names.prefix))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def bytes_of(self, counts: Callable[[str], bool]) -> int:
        """Bytes of the tensors whose names count."""
        return sum(entry.size_bytes for name, entry in self._entries.items() if counts(name))

    @property
    def dtype(self) -> str:
        """The type that holds most of the elements: fp32, fp16 or bf16."""
        sizes: dict[str, int] = {}
        for entry in (entry for entry in self._entries.values() if entry.type_name in _TYPES):
            sizes[entry.type_name] = sizes.get(entry.type_name, 0) + math.prod(entry.shape)
        if not sizes:
            raise ConfigError(f"the checkpoint in {self._folder} holds no tensors")
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
        return _shards(index)
    if single.is_file():
        return [single]
    raise ConfigError(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json; other formats "
        "(pytorch_model.bin) are not read: load the model with transformers and save_pretrained it"
    )


def _shards(index: Path) -> list[Path]:
    """The files that an index names; they may be links, as in the cache of huggingface_hub, but stand beside it."""
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"{index} has weight_map {show(places)}; it must be an object of shards by tensor")
    for name, shard in places.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            raise ConfigError(f"{index} places tensor {name} in {show(shard)}; it must be a file in {index.parent}")
    shards = sorted(set(places.values()))
    missing = [shard for shard in shards if not _is_file(index.parent / shard)]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(shards)} shards are missing in {index.parent}: {', '.join(missing[:5])}"
        )
    return [index.parent / shard for shard in shards]


def _is_inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, checked against its size."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(file_bytes, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes")
            header = parse_json_object(file.read(header_bytes))
    except (struct.error, ValueError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, info, 8 + header_bytes) for name, info in header.items()}
    check_places(path, (Place(e.offset_bytes, e.offset_bytes + e.size_bytes, name) for name, e in entries.items()))
    return entries


def _entry(path: Path, name: str, info: Any, data_offset: int) -> _Entry:
    where = f"tensor {name} in {path}"
    fields = info if isinstance(info, dict) else {}
    type_name, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        raise ConfigError(
            f"{where} is described as {show(info)}; it must have a dtype, a shape of at most {_MAX_DIMENSIONS} "
            "sizes, and two data_offsets"
        )
    if not isinstance(type_name, str) or type_name not in _TYPE_BITS:
        raise ConfigError(f"{where} has type {_named(type_name)}; known are {', '.join(_TYPE_BITS)}")
    entry = _Entry(path, data_offset + offsets[0], type_name, tuple(shape))
    if 8 * (offsets[1] - offsets[0]) != entry.size_bits:
        raise ConfigError(f"{where} has {offsets[1] - offsets[0]} bytes, which is not its shape {show(shape)}")
    return entry


def _named(type_name: Any) -> str:
    return type_name if isinstance(type_name, str) else show(type_name)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Whether these are whole numbers that a file could have."""
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in values
    )
