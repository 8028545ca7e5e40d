"""Attention of a prompt's chunk by the native kernel beside torch's, in turn, in GFLOP/s.

Usage: python prompt_attention.py [--threads N] [--rounds N] [--json FILE]

A chunk is the last 256 tokens of its context. Only products with keys that a query sees count: 4 operations for each
element of a head. torch's mask is made beforehand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdecode_hpc.bench.machine import program_figures
from fastdecode_hpc.bench.measure import Contender, Spread, Times, interleave, ratios
from fastdecode_hpc.files import write_json
from fastdecode_hpc.isa import active_isa
from fastdecode_hpc.s_part import prompt_attention

CHUNK = 256
CONTEXTS = (256, 1024, 4096)
HEADS = ((12, 4, 64), (32, 8, 128))  # query heads, KV heads, head_dim
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_S = 0.05  # of one measurement


class Case(NamedTuple):
    """One chunk."""

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int

    @property
    def operations(self) -> int:
        start = self.context - CHUNK
        seen = sum(range(start + 1, self.context + 1))
        return 4 * seen * self.num_heads * self.head_dim

    def make(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the chunk, keys and values of all tokens, as views of rows ``[q|k|v]``."""
        generator = torch.Generator().manual_seed(0)
        heads = self.num_heads + 2 * self.num_kv_heads
        rows = torch.randn(self.context, heads, self.head_dim, generator=generator).to(DTYPES[self.dtype])
        q, k, v = rows.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q[-CHUNK:], k, v


def contenders(case: Case) -> dict[str, Contender]:
    """Both ways, once they agree."""
    q, k, v = case.make()
    start, scale = case.context - CHUNK, case.head_dim**-0.5
    age = torch.arange(start, case.context)[:, None] - torch.arange(case.context)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    mask = {"attn_mask": age >= 0} if start else {"is_causal": True}

    def theirs() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*heads, **mask, enable_gqa=True)[0].transpose(0, 1)

    def ours() -> Tensor:
        return prompt_attention.attend(q, k, v, start, None, scale, None)

    torch.testing.assert_close(ours(), theirs(), atol=1e-5 if case.dtype == "fp32" else 2e-2, rtol=2e-2)
    return {"ours": timed(ours), "torch": timed(theirs)}


def timed(attend: Callable[[], Tensor]) -> Contender:
    """As often in a round as takes some time; seconds of one."""

    def once() -> float:
        started = time.perf_counter()
        attend()
        return time.perf_counter() - started

    count = max(1, round(LEAST_S / min(once() for _ in range(3))))

    def run() -> Times:
        return {"attend": sum(once() for _ in range(count)) / count}

    return run


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A case's figures."""
    samples = interleave(contenders(case), rounds=rounds)
    ours, theirs = (samples[name]["attend"] for name in ("ours", "torch"))
    speed = {name: Spread.of([case.operations / t for t in times]) for name, times in (("", ours), ("torch_", theirs))}
    figures = {f"{name}operations_per_s": spread.median for name, spread in speed.items()}
    over = ratios(theirs, ours)
    return case._asdict() | figures | {"speedup_over_torch": over.median, "quartiles": [over.low, over.high]}


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{active_isa()}, {args.threads} threads\ntype  heads     context  GFLOP/s  torch  over torch")
    rows = []
    for case in (Case(dtype, *heads, context) for dtype in DTYPES for heads in HEADS for context in CONTEXTS):
        row = measure(case, args.rounds)
        rows.append(row)
        print(
            f"{case.dtype}  {case.num_heads}/{case.num_kv_heads}x{case.head_dim:<4}  {case.context:6}  "
            f"{row['operations_per_s'] / 1e9:7.0f}  {row['torch_operations_per_s'] / 1e9:5.0f}  "
            f"{row['speedup_over_torch']:.2f} ({row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})"
        )
    if args.json is not None:
        machine = program_figures() | {"isa": active_isa(), "num_threads": args.threads}
        write_json(args.json, {"machine": machine, "cases": rows})


if __name__ == "__main__":
    main()
