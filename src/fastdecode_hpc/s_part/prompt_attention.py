"""Causal attention of a prompt's queries by the native kernels; for tensors of a CPU.

Notes
-----
A query's bits depend on itself and on the keys and values that it sees: not on how its prompt was cut, on threads or on
other queries. They are the same for one instruction set, and nearly so on others. Callers ask `take` first.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from fastdecode_hpc import _kernels
from fastdecode_hpc.isa import choose_isa
from fastdecode_hpc.s_part.row_kernels import DTYPES

MOST_ROWS = 192
"""Query heads of one task at most: enough that reading keys and values is little beside computing with them."""

LEAST_ROWS = 48
"""Fewer would leave lanes of wide vectors empty."""

TASKS_A_THREAD = 4
"""Wanted at least, as tasks differ in how many keys they see."""

_own = threading.local()  # a thread's scratch memory


def take(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels can work on these; a token's heads must lie next to each other."""
    return all(
        x.is_cpu
        and x.dtype in DTYPES
        and x.dtype == q.dtype
        and x.stride(2) == 1
        and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
        for x in (q, k, v)
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    window: int | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`layers.causal_attention`; the result is contiguous."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    assert v.shape == k.shape and k.shape[2] == head_dim and num_heads % num_kv_heads == 0, (q.shape, k.shape, v.shape)
    assert num_keys == start + num_queries and (window is None or window > 0), (num_keys, start, num_queries, window)
    group_size, num_threads, item = num_heads // num_kv_heads, torch.get_num_threads(), q.element_size()
    out = torch.empty(q.shape, dtype=q.dtype)
    own_sinks = None if sinks is None else sinks.float().contiguous()
    assert own_sinks is None or own_sinks.shape == (num_heads,), own_sinks.shape
    if not hasattr(_own, "scratch"):
        _own.scratch = _kernels.Scratch()
    choose_isa()
    _kernels.attend_prompt(
        _own.scratch, q.data_ptr(), q.stride(0) * item, num_queries, k.data_ptr(), k.stride(0) * item, v.data_ptr(),
        v.stride(0) * item, out.data_ptr(), out.stride(0) * item, start, num_kv_heads, group_size, head_dim,
        DTYPES[q.dtype], window or 0, scale, cap or 0.0, 0 if own_sinks is None else own_sinks.data_ptr(),
        queries_of_task(num_queries, num_kv_heads, group_size, num_threads), num_threads,
    )  # fmt: skip
    return out


def queries_of_task(num_queries: int, num_kv_heads: int, group_size: int, num_threads: int) -> int:
    """How many queries of one KV head a thread computes together; changes no bits."""
    most, least = max(1, MOST_ROWS // group_size), max(1, LEAST_ROWS // group_size)
    shared = num_queries * num_kv_heads // (TASKS_A_THREAD * num_threads)
    return min(most, max(least, shared))
