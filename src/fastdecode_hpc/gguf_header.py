"""Reading the header of a GGUF file: its metadata and where its tensors lie, fast enough for every start.

Parsed straight from a memory map: token arrays of 100,000 entries take a fraction of a second (the `gguf`
package makes several Python objects of each entry). No count in a file is believed before that many entries have been
read, so a header takes memory in proportion to its bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fastdecode_hpc.config import ConfigError, show

GGUFMetadata: TypeAlias = dict[str, Any]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")
_FILE_HEAD = struct.Struct("<4sIQQ")
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # as of safetensors; a vocabulary of 128,000 tokens takes 8,000,000
_MAX_DIMENSIONS = 4  # of ggml

_T = TypeVar("_T")


class TensorInfo(NamedTuple):
    """Place, GGML type and shape (slowest dimension first) of one tensor."""

    offset_bytes: int  # from the start of the file
    type_id: int
    shape: tuple[int, ...]


class GGUFHeader(NamedTuple):
    """What stands before the tensors' data."""

    metadata: GGUFMetadata  # all key-value pairs; arrays are lists
    tensors: dict[str, TensorInfo]  # of 1 to 4 dimensions above 0; their types and places are as the file has them


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read metadata and tensor places of a GGUF file.

    Raises
    ------
    ConfigError
        When the file is no GGUF file, is cut off or damaged, or has a version other than 2 or 3.
    """
    try:
        with path.open("rb") as file:
            num_bytes = min(os.fstat(file.fileno()).st_size, _MAX_HEADER_BYTES)
            with mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ) as data:
                return _Reader(data, path).read_all()
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{path} is a damaged or cut-off GGUF file: {error}; copy it again") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}") from None


class _Reader:
    """A cursor over the header of a mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def read_all(self) -> GGUFHeader:
        magic, version, num_tensors, num_pairs = _FILE_HEAD.unpack_from(self.data, 0)
        if magic != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file: it starts with {magic!r}")
        if version not in _VERSIONS:
            raise ConfigError(f"{self.path} has GGUF version {version}; little-endian versions 2 and 3 can be read")
        self.offset = _FILE_HEAD.size
        metadata = self._named("metadata", num_pairs, self._pair)
        tensors = self._named("tensor", num_tensors, self._tensor)
        alignment = self._alignment(metadata)
        data_offset = -(-self.offset // alignment) * alignment
        places = {name: info._replace(offset_bytes=info.offset_bytes + data_offset) for name, info in tensors.items()}
        return GGUFHeader(metadata, places)

    def _named(self, what: str, count: int, read_one: Callable[[], tuple[str, _T]]) -> dict[str, _T]:
        """Entries by name; programs differ in which of two they take, so there may be one."""
        found: dict[str, _T] = {}
        for _ in range(count):
            name, value = read_one()
            if name in found:
                raise ConfigError(f"{self.path} has the {what} {name} twice; it is damaged, copy it again")
            found[name] = value
        return found

    def _alignment(self, metadata: GGUFMetadata) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            raise ConfigError(
                f"{self.path} has general.alignment {show(value)}; it must be a power of 2, at most {_MAX_ALIGNMENT}"
            )
        return value

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._strings(1)[0]
        num_dimensions = self._scalars("I", 1)[0]
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ConfigError(
                f"tensor {name} in {self.path} has {num_dimensions} dimensions; it must have 1 to "
                f"{_MAX_DIMENSIONS}, so the file is damaged: copy it again"
            )
        shape = tuple(reversed(self._scalars("Q", num_dimensions)))
        if 0 in shape:
            raise ConfigError(f"tensor {name} in {self.path} has shape {list(shape)}; no dimension may be 0")
        type_id, offset_bytes = self._scalars("I", 1)[0], self._scalars("Q", 1)[0]
        return name, TensorInfo(offset_bytes, type_id, shape)

    def _pair(self) -> tuple[str, Any]:
        key = self._strings(1)[0]
        return key, self._value(self._scalars("I", 1)[0])

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            item_kind, count = _ARRAY_HEAD.unpack_from(self.data, self.offset)
            self.offset += _ARRAY_HEAD.size
            return self._items(item_kind, count)
        return self._items(kind, 1)[0]

    def _items(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        if kind not in _SCALARS:
            raise ConfigError(f"{self.path} holds a value of unknown GGUF type {kind}")
        return self._scalars(_SCALARS[kind], count)

    def _scalars(self, code: str, count: int) -> list[Any]:
        layout = struct.Struct(f"<{count}{code}")
        values = list(layout.unpack_from(self.data, self.offset))
        self.offset += layout.size
        return values

    def _strings(self, count: int) -> list[str]:
        # The one hot loop: local names, no calls beyond the two that do the work.
        data, offset, unpack, strings = self.data, self.offset, _LENGTH.unpack_from, []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            strings.append(data[start:offset].decode("utf-8"))
        if offset > len(data):  # slices end quietly at the end of the file
            raise struct.error(f"a string ends at byte {offset} of {len(data)}")
        self.offset = offset
        return strings
