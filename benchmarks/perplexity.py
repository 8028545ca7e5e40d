#!/usr/bin/env python
"""What the S-Part's types cost: perplexity of a text with weights in floats and in 8 bits, and their memory.

python benchmarks/perplexity.py --text FILE [--model smollm2] [--context 512] [--max-tokens 20480] [--json FILE]

Every token is predicted from those before it in its window, as `fastdecode bench fidelity` does it
(docs/fidelity.md), with the KV cache and what goes between the parts in fp32. Changes are against fp32, token by token.
--dither 0.02 first multiplies each weight by 1 + 0.02 times a normal number, in all cases the same ones: then weights
of a quantised file lie on no grid, like those of an unquantised one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc import host
from fastdecode_hpc.bench.fidelity import BATCH_TOKENS
from fastdecode_hpc.bench.fidelity_figures import FidelityCase
from fastdecode_hpc.bench.machine import program_figures
from fastdecode_hpc.bench.text_windows import read_windows
from fastdecode_hpc.bench.window_cache import WindowCache
from fastdecode_hpc.files import write_json
from fastdecode_hpc.model_files import resolve_model
from fastdecode_hpc.s_part.forced import TokenScores, forced_pass, score_passes
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.products import pack_part
from fastdecode_hpc.s_part.weights import LayerWeights, Weights, load_weights, read_model_config
from fastdecode_hpc.s_part.wire import TORCH_DTYPES
from fastdecode_hpc.tokenizer import Tokenizer


class Types(NamedTuple):
    """Types of an S-Part."""

    dtype: str
    weight_dtype: str = "auto"

    @property
    def name(self) -> str:
        return self.dtype if self.weight_dtype == "auto" else f"{self.dtype}, {self.weight_dtype} weights"


CASES = (Types("fp32"), Types("fp32", "int8"), Types("bf16"), Types("bf16", "int8"))


def build(types: Types, args: argparse.Namespace) -> SPart:
    """An S-Part of these types."""
    path, cpu, dtype = resolve_model(args.model), torch.device("cpu"), TORCH_DTYPES[types.dtype]
    model, random = read_model_config(path), torch.Generator().manual_seed(0)

    def finish(part: Weights | LayerWeights) -> None:
        for name in ["lm_head"] if isinstance(part, Weights) else part.matrices():
            dither(getattr(part, name), args.dither, random)
        pack_part(part, types.weight_dtype)

    weights = load_weights(path, model, dtype=dtype, device=cpu, finish=finish)
    return SPart(model, weights, device=cpu, dtype=dtype, batch_invariant=False, max_positions=args.context)


def dither(weight: Tensor, share: float, random: torch.Generator) -> None:
    """Multiply values by numbers near 1, in place."""
    if share:
        weight.mul_(1 + share * torch.randn(weight.shape, generator=random))


def score(types: Types, args: argparse.Namespace, windows: np.ndarray) -> tuple[int, list[TokenScores]]:
    """Bytes of the weights, and how each token was predicted."""
    s_part, threads = build(types, args), torch.get_num_threads()
    size = min(len(windows), max(1, BATCH_TOKENS // args.context))
    cache = WindowCache(
        s_part.config, "fp32", context=args.context, max_windows=size, block_size=32, num_threads=threads
    )
    cache.set_sinks(s_part.all_sinks())
    scores = []
    for first in range(0, len(windows), size):
        batch = windows[first : first + size]
        cache.begin(len(batch))
        scores += score_passes(s_part, batch, [forced_pass(s_part, batch, cache.attend)])
    return s_part.weights.size_bytes, scores


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=20480)
    parser.add_argument("--dither", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    here = host.look()
    torch.set_num_threads(host.asked_threads(None, here) or here.num_physical_cores)
    path = resolve_model(args.model)
    windows = read_windows(
        args.text, Tokenizer.load(path), context=args.context, max_tokens=args.max_tokens,
        bos=read_model_config(path).bos_token_id,
    )  # fmt: skip
    print(f"{'types':<20}  {'weights MB':>10}  perplexity    change %      +- %  top-1 %")
    figures, reference = [], None
    for types in CASES:
        size_bytes, scores = score(types, args, windows)
        reference = reference or scores
        case = FidelityCase.compare("fp32", 0.0, scores, reference)
        print(
            f"{types.name:<20}  {size_bytes / 1e6:10.1f}  {case.perplexity:10.4f}  "
            f"{100 * case.perplexity_change:+10.4f}  {100 * case.perplexity_change_se:8.4f}  "
            f"{100 * case.top1_agreement:7.2f}",
            flush=True,
        )
        figures.append(
            {
                "name": types.name, **types._asdict(), "weights_bytes": size_bytes, "num_tokens": case.num_tokens,
                "mean_nll": case.mean_nll, "perplexity": case.perplexity, "perplexity_change": case.perplexity_change,
                "perplexity_change_se": case.perplexity_change_se, "top1_agreement": case.top1_agreement,
            }
        )  # fmt: skip
    if args.json is not None:
        write_json(
            args.json,
            {
                "machine": program_figures(),
                "settings": {"text": str(args.text), "dither": args.dither},
                "cases": figures,
            },
        )


if __name__ == "__main__":
    main()
