"""Decode attention of one case over a filled KV partition, ready to be timed."""

from __future__ import annotations

import time

import numpy as np

from fastdecode_hpc.bench.cases import Case, SizedCase
from fastdecode_hpc.bench.measure import Times
from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork
from fastdecode_hpc.r_part.kv_cache import KVPartition

WIRE_DTYPE = "fp16"
NUM_ROWS = 509  # of random K and V; a prime, so that they don't recur at the places of blocks


class Tokens:
    """Random q, k, v of a case in the wire's type; all layers have the same, no two sequences do.

    Parameters
    ----------
    case : Case
    seed : int
    """

    def __init__(self, case: Case, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kv_size = case.num_kv_heads * case.head_dim
        rows = rng.standard_normal((NUM_ROWS, 2 * kv_size), np.float32).astype(np.float16)
        self._rows = np.concatenate([rows, rows])
        self.q_size = case.num_heads * case.head_dim
        q = rng.standard_normal((case.num_sequences, self.q_size), np.float32).astype(np.float16)
        newest = [self.kv_rows(i, tokens - 1, 1) for i, tokens in enumerate(case.lengths)]
        # [num_sequences, qkv_size] float16, of the newest tokens
        self.qkv = np.ascontiguousarray(np.concatenate([q, np.concatenate(newest)], axis=1))

    def kv_rows(self, sequence: int, start: int, count: int) -> np.ndarray:
        """Rows ``[k|v]`` of up to `NUM_ROWS` tokens from `start` on: [count, 2 * kv_size] float16."""
        first = (sequence * 31 + start) % NUM_ROWS
        return self._rows[first : first + count]


class AttentionRun:
    """One case: its KV in memory, and the work of one step.

    Parameters
    ----------
    sized : SizedCase
    tokens : Tokens
    num_threads : int

    Notes
    -----
    A call visits every layer once. All layers together are larger than the caches, so each finds its KV in memory.
    """

    def __init__(self, sized: SizedCase, tokens: Tokens, num_threads: int) -> None:
        case = sized.case
        self.kv_dtype, self.num_layers = case.kv_dtype, sized.num_layers
        layout = case.layout(self.num_layers)
        num_blocks = np.sum([layout.worst_case(length) for length in case.lengths], axis=0)
        self.partition = KVPartition(layout, tuple(num_blocks.tolist()), num_threads=num_threads)
        self.qkv = tokens.qkv
        self.out = np.empty((case.num_sequences, tokens.q_size), np.float16)
        self._fill(case, tokens)
        self._attention = DecodeAttention(
            self.partition, num_heads=case.num_heads, wire_dtype=WIRE_DTYPE, num_threads=num_threads
        )
        positions = np.array(case.lengths, np.int64) - 1
        self._work = StepWork(self.partition, range(case.num_sequences), positions, num_threads=num_threads)

    def _fill(self, case: Case, tokens: Tokens) -> None:
        """Store all tokens but the newest, which `append` stores."""
        for seq_id, length in enumerate(case.lengths):
            self.partition.add(seq_id)
            self.partition.reserve(seq_id, length)
            for start in range(0, length - 1, NUM_ROWS):
                rows = tokens.kv_rows(seq_id, start, min(NUM_ROWS, length - 1 - start))
                for layer in range(self.num_layers):
                    self.partition.write_prefill(layer, seq_id, start, rows, WIRE_DTYPE)

    def __call__(self) -> Times:
        """Append and attend in every layer.

        Returns
        -------
        mapping
            Seconds of one layer: ``append``, ``attend``.
        """
        append_s = attend_s = 0.0
        for layer in range(self.num_layers):
            started = time.perf_counter()
            self._attention.append(layer, self._work, self.qkv)
            appended = time.perf_counter()
            for piece in range(self._work.num_pieces):
                self._attention.attend(layer, self._work, self.qkv, self.out, piece)
            append_s += appended - started
            attend_s += time.perf_counter() - appended
        return {"append": append_s / self.num_layers, "attend": attend_s / self.num_layers}
