"""Reading GGUF files: metadata, and tensors row by row under the names that safetensors checkpoints use.

The header is parsed here and the arrays of the tokenizer are skipped; the `gguf` package, whose reader makes
a Python object of every token, is used for the quantised types only. Files are read, not mapped: touched
pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 1024  # longer arrays belong to the tokenizer

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class _Entry(NamedTuple):
    offset_bytes: int
    type_id: int
    shape: tuple[int, ...]


class GGUFFile:
    """Metadata and tensors of one GGUF file.

    Attributes
    ----------
    metadata : dict
        All scalars, strings and short arrays, by key.
    permuted_qk : bool
        Rows of Q and K are in the order of interleaved rotary embedding.

    Raises
    ------
    ConfigError
        If the file is damaged, cut short, of another version or byte order, or holds a type that can't be
        used.
    """

    permuted_qk = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                cursor = _Cursor(data, path)
                num_tensors, num_pairs = cursor.read_preamble()
                self.metadata: dict[str, Any] = dict(cursor.read_pair() for _ in range(num_pairs))
                entries = dict(cursor.read_tensor_info() for _ in range(num_tensors))
                header_bytes = cursor.offset
        except ConfigError:
            raise
        except (struct.error, ValueError) as error:
            raise ConfigError(f"{path} is not a whole GGUF file: {error}") from error
        alignment = int(self.metadata.get("general.alignment", 32))
        data_offset = -(-header_bytes // alignment) * alignment
        self._entries = {
            _standard_name(name): entry._replace(offset_bytes=entry.offset_bytes + data_offset)
            for name, entry in entries.items()
        }
        self._check_entries()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor but ``rope_freqs``, by the name that safetensors checkpoints use."""
        return {name: entry.shape for name, entry in self._entries.items() if name != "rope_freqs.weight"}

    @property
    def dtype(self) -> str:
        """The type that holds most of the elements: fp32, bf16, or fp16, which stands for all quantised ones."""
        sizes: dict[int, int] = {}
        for entry in self._entries.values():
            sizes[entry.type_id] = sizes.get(entry.type_id, 0) + math.prod(entry.shape)
        largest = max(sizes, key=lambda type_id: sizes[type_id])
        return {"F32": "fp32", "F64": "fp32", "BF16": "bf16"}.get(_type_name(largest), "fp16")

    def rope_divisors(self) -> Tensor | None:
        """What each rotary frequency is divided by, ``[head_dim / 2]`` float32; None where nothing is said."""
        entry = self._entries.get("rope_freqs.weight")
        return None if entry is None else self.read("rope_freqs.weight", 0, 1)[0]

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

    def _check_entries(self) -> None:
        """Raise unless every tensor has a usable type and lies within the file."""
        file_bytes = self.path.stat().st_size
        for name, entry in self._entries.items():
            _check_type(self.path, name, entry)
            end = entry.offset_bytes + math.prod(entry.shape[:-1]) * _row_bytes(entry)
            if end > file_bytes:
                raise ConfigError(
                    f"{self.path} has {file_bytes} bytes, but tensor {name} ends at {end}; "
                    "it is incomplete, copy it again"
                )


class _Cursor:
    """A place in the header of a GGUF file that moves on as values are read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset = data, path, 0

    def read_preamble(self) -> tuple[int, int]:
        """Numbers of tensors and of metadata pairs."""
        magic, version = self.data[:4], struct.unpack_from("<I", self.data, 4)[0]
        if magic != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file: it begins with {magic!r}")
        if version not in (2, 3):
            raise ConfigError(f"{self.path} has GGUF version {version}; only 2 and 3, little-endian, are read")
        self.offset = 24
        num_tensors, num_pairs = struct.unpack_from("<QQ", self.data, 8)
        return num_tensors, num_pairs

    def read_scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.offset)[0]
        self.offset += struct.calcsize("<" + code)
        return value

    def read_string(self) -> str:
        length = self.read_scalar("Q")
        begin, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise ValueError(f"a string ends at byte {self.offset} of {len(self.data)}")
        return self.data[begin : self.offset].decode()

    def read_pair(self) -> tuple[str, Any]:
        key = self.read_string()
        return key, self._read_value(self.read_scalar("I"))

    def read_tensor_info(self) -> tuple[str, _Entry]:
        name = self.read_string()
        dims = [self.read_scalar("Q") for _ in range(self.read_scalar("I"))]
        type_id, offset_bytes = self.read_scalar("I"), self.read_scalar("Q")
        return name, _Entry(offset_bytes, type_id, tuple(reversed(dims)))

    def _read_value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.read_string()
        if type_id == _ARRAY:
            return self._read_array()
        if type_id not in _SCALARS:
            raise ValueError(f"a value of unknown type {type_id}")
        return self.read_scalar(_SCALARS[type_id])

    def _read_array(self) -> list[Any] | None:
        """The values of an array, or None for a long one, which is skipped."""
        type_id, length = self.read_scalar("I"), self.read_scalar("Q")
        if length <= _MAX_ARRAY:
            return [self._read_value(type_id) for _ in range(length)]
        if type_id == _STRING:
            self._skip_strings(length)
        elif type_id in _SCALARS:
            self.offset += length * struct.calcsize("<" + _SCALARS[type_id])
        else:
            raise ValueError(f"an array of {length} values of type {type_id}")
        return None

    def _skip_strings(self, count: int) -> None:
        unpack, data, offset = struct.Struct("<Q").unpack_from, self.data, self.offset
        for _ in range(count):
            offset += 8 + unpack(data, offset)[0]
        self.offset = offset


def _standard_name(name: str) -> str:
    """The name of a tensor in a safetensors checkpoint; unknown ones keep their own."""
    match = _LAYER_PATTERN.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def _quantization(type_id: int) -> Any:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(type_id)


def _type_name(type_id: int) -> str:
    return str(_quantization(type_id).name)


def _row_bytes(entry: _Entry) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[_quantization(entry.type_id)]
    return int(entry.shape[-1] // block * block_bytes)


def _check_type(path: Path, name: str, entry: _Entry) -> None:
    """Raise unless the `gguf` package can turn a tensor into floats."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        block, block_bytes = GGML_QUANT_SIZES[_quantization(entry.type_id)]
        dequantize(np.zeros((1, block_bytes), np.uint8), _quantization(entry.type_id))
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"tensor {name} in {path} has GGUF type {entry.type_id}, which can't be read: {error}"
        ) from error
    if entry.shape[-1] % block:
        raise ConfigError(
            f"tensor {name} in {path} has rows of {entry.shape[-1]}, not a multiple of its block of {block}"
        )
