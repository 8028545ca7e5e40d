"""Caches filled with random values, run through the kernels, and what NumPy says the result is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from fastdecode_hpc.config import QUANTISED_DTYPES, kv_token_bytes, parse_kv_dtype
from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork, numpy_dtype, reference_attention
from fastdecode_hpc.r_part.kv_cache import BlockPool, KVPartition
from fastdecode_hpc.schedule.kv_layout import RECENT_TOKENS, KVLayout, LayerGroup, with_recent

HALF_MAX, BFLOAT16_MAX_BITS = 65504.0, 0x7F7F
PANEL, GROUP = 8, 32  # tokens that lie together in K; values that share a scale in int4


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
class Codes:
    """Quantised values: codes [..., head_dim], and for each token and group what they stand for."""

    codes: np.ndarray  # int8 or uint8
    scales: np.ndarray  # [..., num_groups] fp32 of int8, fp16 of int4
    minimums: np.ndarray | None  # [..., num_groups] fp16, of int4

    def values(self) -> np.ndarray:
        """[..., head_dim] fp32."""
        head_dim = self.codes.shape[-1]
        scale, minimum = (
            None if x is None else np.repeat(x.astype(np.float32), GROUP if x.shape[-1] > 1 else head_dim, axis=-1)
            for x in (self.scales, self.minimums)
        )
        product = self.codes.astype(np.float32) * scale[..., :head_dim]
        return product if minimum is None else product + minimum[..., :head_dim]


def quantise(x: np.ndarray, dtype: str) -> Codes:
    """What int8 and int4 make of fp32 values [..., head_dim]: the specification, in NumPy.

    A token (int8) or group (int4) with an infinite or NaN value has a NaN scale; its codes mean nothing.
    """
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype == "int8":
            return _eight_bits(x)
        groups = [_four_bits(x[..., d : d + GROUP]) for d in range(0, x.shape[-1], GROUP)]
        return Codes(*(np.concatenate(parts, axis=-1) for parts in zip(*groups, strict=True)))


def _eight_bits(x: np.ndarray) -> Codes:
    scale = np.fmax.reduce(np.abs(x), axis=-1, keepdims=True) / np.float32(127)
    inverse = _inverse(scale)
    codes = np.rint(np.nan_to_num(x * inverse)).astype(np.int8)
    return Codes(codes, np.where(inverse > 0, scale, np.float32(0)) + _poison(x), None)


def _four_bits(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minimums of one group."""
    high = np.fmax(np.fmax.reduce(x, axis=-1, keepdims=True), np.float32(-HALF_MAX))
    minimum = from_float(-np.fmax.reduce(0 - x, axis=-1, keepdims=True), "fp16")
    low = minimum.astype(np.float32)
    scale = from_float((high - low) / np.float32(15) + _poison(x), "fp16")
    codes = np.rint(np.clip(np.nan_to_num((x - low) * _inverse(scale.astype(np.float32))), 0, 15))
    return codes.astype(np.uint8), scale, minimum


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.where(scale > 1e-30, np.float32(1) / np.where(scale > 1e-30, scale, np.float32(1)), np.float32(0))


def _poison(x: np.ndarray) -> np.ndarray:
    return (x * np.float32(0)).sum(axis=-1, keepdims=True)


def cached(x: np.ndarray, wire: str, dtype: str, position: int) -> np.ndarray:
    """What attention at `position` reads of values [num_tokens, ..., head_dim] of the wire's type, as fp32."""
    if dtype not in QUANTISED_DTYPES:
        return to_float(recast(x, wire, dtype), dtype)
    wide = quantise(to_float(x, wire), dtype).values()
    recent = max(0, (position - RECENT_TOKENS) // RECENT_TOKENS * RECENT_TOKENS)
    wide[recent:] = to_float(recast(x[recent:], wire, "fp16"), "fp16")
    return wide


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    wire: str = "fp32"
    cache: str = "fp32"
    block_size: int = 16
    num_layers: int = 2
    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def sinks(self) -> np.ndarray | None:
        """[num_layers, num_heads]: some hardly count, some take nearly all."""
        random = np.random.default_rng(5).standard_normal((self.num_layers, self.num_heads), np.float32)
        return 5 * random if self.has_sinks else None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_dtypes(self) -> tuple[str, str]:
        return parse_kv_dtype(self.cache)

    def layout(self) -> KVLayout:
        layers = tuple(range(self.num_layers))
        k_dtype, v_dtype = parse_kv_dtype(self.cache)
        group = LayerGroup(
            layers, self.num_kv_heads, self.head_dim, k_dtype, v_dtype, self.window, scale=self.scale,
            softcap=self.softcap,
        )  # fmt: skip
        return KVLayout(self.block_size, with_recent(group))


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

    def reference(self, row: int, layer: int = 1) -> tuple[np.ndarray, np.ndarray, float]:
        """Output [num_heads, head_dim], lse [num_heads], and the largest |v|."""
        shape = self.shape
        kv = np.concatenate([self.prompts[row], self.qkv[row : row + 1, shape.q_size :]])
        kv = kv.reshape(-1, 2, shape.num_kv_heads, shape.head_dim)
        kv = np.stack(
            [cached(kv[:, i], shape.wire, t, self.lengths[row]) for i, t in enumerate(shape.kv_dtypes)], axis=1
        )
        q = to_float(self.qkv[row, : shape.q_size], shape.wire).reshape(shape.num_heads, shape.head_dim)
        o, lse = reference_attention(
            q, kv[:, 0], kv[:, 1], self.lengths[row], window=shape.window, scale=shape.scale, softcap=shape.softcap,
            sinks=None if shape.sinks is None else shape.sinks[layer],
        )  # fmt: skip
        return o, lse, float(np.abs(kv[:, 1]).max())


def make_partition(shape: Shape, lengths: list[int], *, spare_blocks: int = 8, num_threads: int = 2) -> KVPartition:
    """A partition with room for these rows, all its memory NaN."""
    num_blocks = sum(-(-(n + 1) // shape.block_size) for n in lengths) + spare_blocks
    layout = shape.layout()
    partition = KVPartition(layout, (num_blocks,) * len(layout.groups), num_threads=num_threads)
    for pool in partition.pools:
        pool.arena[:] = 0xFF
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
    if shape.sinks is not None:
        attention.set_sinks(shape.sinks)
    qkv = np.ascontiguousarray(rows.qkv[order])
    out = np.full((len(order), shape.q_size), 77, numpy_dtype(shape.wire))
    lse = np.full((len(order), shape.num_heads), 77, np.float32)
    attention.append(layer, work, qkv)
    for piece in range(work.num_pieces):
        attention.attend(layer, work, qkv, out, piece, lse)
    return out, lse


def stored(pool: BlockPool, layer: int, seq_id: int, tokens: Iterable[int]) -> tuple[np.ndarray | Codes, ...]:
    """K and V of these tokens as they lie in the cache: each [num_tokens, num_kv_heads, head_dim].

    This is the layout of a block in NumPy, as kernels.h describes it; `layer` counts within the group.
    """
    group, block_size, tokens = pool.group, pool.block_size, np.array(tokens)
    shape = (-1, len(group.layers), group.num_kv_heads, block_size * group.head_token_bytes)
    heads = pool.arena.reshape(shape)[:, layer]  # [num_blocks, num_kv_heads, bytes]
    table = pool.tables[seq_id]
    blocks, places = table.ids[tokens // block_size - table.first], tokens % block_size
    border = block_size * kv_token_bytes(group.k_dtype, group.head_dim)
    parts = (heads[..., :border], group.k_dtype, True), (heads[..., border:], group.v_dtype, False)
    return tuple(
        _map_part(_read_part(memory, dtype, group.head_dim, block_size, is_key), lambda x: x[blocks, :, places])
        for memory, dtype, is_key in parts
    )


def _map_part(part: np.ndarray | Codes, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray | Codes:
    if not isinstance(part, Codes):
        return f(part)
    return Codes(f(part.codes), f(part.scales), None if part.minimums is None else f(part.minimums))


def _read_part(memory: np.ndarray, dtype: str, head_dim: int, block_size: int, is_key: bool) -> np.ndarray | Codes:
    """K or V of all blocks and KV heads, [..., bytes]: values or codes [..., block_size, head_dim]."""
    lead, num_groups = memory.shape[:-1], -(-head_dim // GROUP)
    if dtype == "int4":
        count = block_size * num_groups * PANEL
        words, rest = _as(memory[..., : 2 * count], np.uint16), _as(memory[..., 2 * count :], np.float16)
        codes = (words[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15).astype(np.uint8)
        codes = _apart(codes.reshape(*lead, count, 4), block_size, is_key)  # [tokens, words, codes of a word]
        if not is_key:  # [tokens, groups, words, codes of a word]
            codes = np.moveaxis(codes.reshape(*lead, block_size, num_groups, PANEL, 4), -1, -2)
        codes = codes.reshape(*lead, block_size, -1)
        scales = np.moveaxis(rest.reshape(*lead, 2, num_groups, block_size), -1, -2)
        return Codes(codes[..., :head_dim], scales[..., 0, :, :], scales[..., 1, :, :])
    item = np.dtype(np.int8) if dtype == "int8" else numpy_dtype(dtype)
    values = _as(memory[..., : block_size * head_dim * item.itemsize], item)
    if dtype == "int8":
        values = _apart(values[..., None], block_size, is_key)
    elif is_key:
        values = np.moveaxis(values.reshape(*lead, -1, head_dim, PANEL), -1, -2)
    values = values.reshape(*lead, block_size, head_dim)
    if dtype != "int8":
        return values
    return Codes(values, _as(memory[..., block_size * head_dim :], np.float32)[..., None], None)


def _apart(items: np.ndarray, block_size: int, is_key: bool) -> np.ndarray:
    """Quantised items [..., block_size * n, size] as [..., block_size, n, size]: K in pairs of items, V of tokens."""
    *lead, _, size = items.shape
    if is_key:  # [panels, pairs of items, tokens of a panel, (first, second)]
        pairs = items.reshape(*lead, block_size // PANEL, -1, PANEL, 2, size)
        return np.moveaxis(pairs, -3, -4).reshape(*lead, block_size, -1, size)
    pairs = items.reshape(*lead, block_size // 2, -1, 2, size)  # [pairs of tokens, items, (first, second)]
    return np.moveaxis(pairs, -2, -3).reshape(*lead, block_size, -1, size)


def _as(memory: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    return np.ascontiguousarray(memory).view(dtype)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)
