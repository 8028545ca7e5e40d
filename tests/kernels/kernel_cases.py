"""Caches filled with random values, run through the kernels, and what NumPy says the result is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork, numpy_dtype, reference_attention
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.placement import KVLayout, LayerGroup

HALF_MAX, BFLOAT16_MAX_BITS = 65504.0, 0x7F7F


def from_float(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round fp32 to nearest even; finite values that are too large saturate."""
    x = np.asarray(x, np.float32)
    if dtype == "fp32":
        return x.copy()
    if dtype == "fp16":
        return np.where(np.isinf(x), x, np.clip(x, -HALF_MAX, HALF_MAX)).astype(np.float16)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = np.where(np.isfinite(x) & (rounded & 0x7FFF > BFLOAT16_MAX_BITS), bits >> 16, rounded)
    return np.where(np.isnan(x), (bits | 0x400000) >> 16, rounded).astype(np.uint16)


def to_float(x: np.ndarray, dtype: str) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else x.astype(np.float32)


def recast(x: np.ndarray, source: str, target: str) -> np.ndarray:
    """From one type's storage to the other's; equal types keep every bit."""
    return x.copy() if source == target else from_float(to_float(x, source), target)


@dataclass
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    wire: str = "fp32"
    cache: str = "fp32"
    block_size: int = 16
    num_layers: int = 2

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layout(self) -> KVLayout:
        layers = tuple(range(self.num_layers))
        group = LayerGroup(layers, self.num_kv_heads, self.head_dim, self.cache, self.window)
        return KVLayout(self.block_size, (group,))


@dataclass
class Rows:
    """The sequences of a test: for each its older K and V and its newest q, k, v, in the wire's type."""

    shape: Shape
    lengths: list[int]  # older tokens
    prompts: list[np.ndarray] = field(default_factory=list)  # [length, 2 * kv_size]
    qkv: np.ndarray = None  # [num_rows, qkv_size]

    @classmethod
    def random(cls, shape: Shape, lengths: list[int], *, seed: int = 0, q_scale: float = 1.0) -> Rows:
        rng = np.random.default_rng(seed)
        prompts = [from_float(rng.standard_normal((n, 2 * shape.kv_size), np.float32), shape.wire) for n in lengths]
        qkv = rng.standard_normal((len(lengths), shape.q_size + 2 * shape.kv_size), np.float32)
        qkv[:, : shape.q_size] *= q_scale
        return cls(shape, lengths, prompts, from_float(qkv, shape.wire))

    def reference(self, row: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Output [num_heads, head_dim], lse [num_heads], and the largest |v|."""
        shape = self.shape
        kv = np.concatenate([self.prompts[row], self.qkv[row : row + 1, shape.q_size :]])
        kv = to_float(recast(kv, shape.wire, shape.cache), shape.cache)
        kv = kv.reshape(-1, 2, shape.num_kv_heads, shape.head_dim)
        q = to_float(self.qkv[row, : shape.q_size], shape.wire).reshape(shape.num_heads, shape.head_dim)
        o, lse = reference_attention(q, kv[:, 0], kv[:, 1], self.lengths[row], window=shape.window)
        return o, lse, float(np.abs(kv[:, 1]).max())


def make_partition(shape: Shape, lengths: list[int], *, spare_blocks: int = 8, num_threads: int = 2) -> KVPartition:
    """A partition with room for these rows, all its memory NaN."""
    num_blocks = sum(-(-(n + 1) // shape.block_size) for n in lengths) + spare_blocks
    partition = KVPartition(shape.layout(), (num_blocks,), num_threads=num_threads)
    partition.pools[0].arena[:] = 0xFF
    return partition


def fill(partition: KVPartition, rows: Rows, layer: int = 1, ids: list[int] | None = None) -> None:
    """Store the prompts of sequences `ids` (default all); those of windowed layers only as far as they are seen."""
    group = rows.shape.layout().groups[0]
    for i in range(len(rows.lengths)) if ids is None else ids:
        length = rows.lengths[i]
        start = group.first_needed(length)
        partition.add(i, start)
        partition.reserve(i, length + 1)
        partition.write_prefill(layer, i, start, rows.prompts[i][start:], rows.shape.wire)


def attend(
    partition: KVPartition,
    rows: Rows,
    *,
    order: list[int] | None = None,
    layer: int = 1,
    num_threads: int = 2,
    **options: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Append the newest tokens of rows `order` and attend: output in the wire's type, and lse."""
    order = list(range(len(rows.lengths))) if order is None else order
    shape = rows.shape
    work = StepWork(partition, order, np.array([rows.lengths[i] for i in order]), num_threads=num_threads, **options)
    attention = DecodeAttention(partition, num_heads=shape.num_heads, wire_dtype=shape.wire, num_threads=num_threads)
    qkv = np.ascontiguousarray(rows.qkv[order])
    out = np.full((len(order), shape.q_size), 77, numpy_dtype(shape.wire))
    lse = np.full((len(order), shape.num_heads), 77, np.float32)
    attention.append(layer, work, qkv)
    for piece in range(work.num_pieces):
        attention.attend(layer, work, qkv, out, piece, lse)
    return out, lse


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8)
