"""The same decode attention by torch, in the layout and type that are fastest on this machine.

The only torch import of `bench`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.bench.attention_run import NUM_ROWS, AttentionRun, Tokens
from fastdecode_hpc.bench.cases import Case, SizedCase, halved
from fastdecode_hpc.bench.measure import Times

LIMITS = {"int4": 0.5, "int8": 0.1, "": 0.03}  # most difference, relative to torch's result, by what the KV type holds
TRIES = 3
TRIAL_CACHES = 4  # the trial's fp16 KV is at most this times the last-level cache

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length in one layer, each head contiguous."""

    q: Tensor  # [num_sequences, num_heads, 1, head_dim]
    k: Tensor  # [num_sequences, num_kv_heads, num_tokens, head_dim]
    v: Tensor  # as k

    @property
    def grouped_q(self) -> Tensor:
        """The query heads of a KV head as rows: [num_sequences, num_kv_heads, group_size, head_dim]."""
        num_sequences, num_kv_heads, _, head_dim = self.k.shape
        return self.q.view(num_sequences, num_kv_heads, -1, head_dim)


def _sdpa(batch: Batch) -> Tensor:
    grouped = batch.q.shape[1] != batch.k.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(batch.q, batch.k, batch.v, enable_gqa=grouped)


def _sdpa_rows(batch: Batch) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(batch.grouped_q, batch.k, batch.v)


def _bmm(batch: Batch) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (batch.grouped_q, batch.k, batch.v))
    scores = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, dim=-1), v)


# All see every token, the newest included, so that none needs a mask.
WAYS: dict[str, Callable[[Batch], Tensor]] = {
    "scaled_dot_product_attention": _sdpa,
    "scaled_dot_product_attention, query group as rows": _sdpa_rows,
    "bmm and softmax": _bmm,
}


class TorchPeer:
    """Decode attention of a case by torch, over the same layers as ours.

    Parameters
    ----------
    sized : SizedCase
    tokens : Tokens
    num_threads : int
    cache_bytes : int
        Last-level cache.

    Attributes
    ----------
    variant : str
        The fastest type and way.
    """

    def __init__(self, sized: SizedCase, tokens: Tokens, *, num_threads: int, cache_bytes: int) -> None:
        torch.set_num_threads(num_threads)
        dtype, way = fastest_variant(sized.case, tokens, cache_bytes)
        self.variant = f"{dtype}, {way}"
        self._way = WAYS[way]
        self._layers = [make_batches(sized.case, tokens, dtype) for _ in range(sized.num_layers)]

    def __call__(self) -> Times:
        """Attend in every layer; seconds of one layer under ``attend``."""
        seconds = sum(_seconds(batches, self._way) for batches in self._layers)
        return {"attend": seconds / len(self._layers)}

    def check(self, run: AttentionRun) -> float:
        """How far the result of `run` is from torch's, relative to it (root mean squares).

        Raises
        ------
        RuntimeError
            If it is too far for rounding: one of the two computes something else.
        """
        reference = attend(self._layers[0], self._way)
        difference = float(np.linalg.norm(run.out - reference) / np.linalg.norm(reference))
        limit = next(limit for kind, limit in LIMITS.items() if kind in run.kv_dtype)
        if not difference <= limit:
            raise RuntimeError(
                f"the kernels' result differs from torch's by {difference:.3g} of it with a {run.kv_dtype} cache; "
                f"rounding explains {limit}"
            )
        return difference


def attend(batches: list[Batch], way: Callable[[Batch], Tensor]) -> np.ndarray:
    """Output of all sequences: [num_sequences, num_heads * head_dim] float32."""
    with torch.inference_mode():
        parts = [way(batch).float().reshape(len(batch.q), -1) for batch in batches]
        return np.asarray(torch.cat(parts).numpy())


def fastest_variant(case: Case, tokens: Tokens, cache_bytes: int) -> tuple[str, str]:
    """Try all types and ways in turn on a part of the case; the names of the fastest."""
    while case.num_sequences > 1 and case.call_bytes > TRIAL_CACHES * cache_bytes:
        case = dataclasses.replace(case, contexts=halved(case.contexts))
    batches = {dtype: make_batches(case, tokens, dtype) for dtype in DTYPES}
    best_s = {(dtype, way): float("inf") for dtype in DTYPES for way in WAYS}
    for _ in range(TRIES):
        for dtype, way in best_s:
            best_s[dtype, way] = min(best_s[dtype, way], _seconds(batches[dtype], WAYS[way]))
    return min(best_s, key=lambda variant: best_s[variant])


def _seconds(batches: list[Batch], way: Callable[[Batch], Tensor]) -> float:
    with torch.inference_mode():
        started = time.perf_counter()
        for batch in batches:
            way(batch)
        return time.perf_counter() - started


def make_batches(case: Case, tokens: Tokens, dtype: str) -> list[Batch]:
    """The data of one layer, sequences of one length together, in the order of the case."""
    batches, first = [], 0
    for count, num_tokens in case.contexts:
        q = tokens.qkv[first : first + count, : tokens.q_size].reshape(count, case.num_heads, 1, case.head_dim)
        k, v = _make_kv(case, tokens, first, count, num_tokens, DTYPES[dtype])
        batches.append(Batch(torch.from_numpy(q).to(DTYPES[dtype]), k, v))
        first += count
    return batches


def _make_kv(
    case: Case, tokens: Tokens, first: int, count: int, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    k, v = (torch.empty(count, case.num_kv_heads, num_tokens, case.head_dim, dtype=dtype) for _ in range(2))
    for i in range(count):
        for start in range(0, num_tokens, NUM_ROWS):
            rows = torch.from_numpy(tokens.kv_rows(first + i, start, min(NUM_ROWS, num_tokens - start)))
            parts = rows.view(-1, 2, case.num_kv_heads, case.head_dim).permute(1, 2, 0, 3)
            k[i, :, start : start + len(rows)] = parts[0]
            v[i, :, start : start + len(rows)] = parts[1]
    return k, v
