"""`fastdecode models`: the families as a table, made from their descriptions."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from fastdecode_hpc.families.description import Family, Key
from fastdecode_hpc.families.known import FAMILIES

THROUGH_TRANSFORMERS = (
    "apertus", "arcee", "codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma3n_text",
    "glm", "glm4", "glm4_moe", "gpt_bigcode", "gptj", "granitemoe", "helium", "hunyuan_v1_dense", "minimax_m2",
    "ministral", "nemotron", "olmo", "olmoe", "persimmon", "phi", "phimoe", "qwen2_moe", "seed_oss", "smollm3",
    "vaultgemma",
)  # fmt: skip
"""Those of no native family that are tested."""

_HEAD = ("family", "models", "GGUF", "attention", "layers", "positions")
_PLACES = {"before": "before", "after": "after", "both": "before and after"}  # attention and MLP
_TEXT = """\
These families are computed natively. Models of a family that differ from it in what isn't computed are refused before
any weight is read, by the name of what differs. Attention is what the R-workers' kernels are told.
"""
_TESTED = """\
Each family is tested on tiny random checkpoints against transformers (logits within 1e-4 in float32, greedy text over
real caches on one and three ranks), each GGUF form against its safetensors twin and against llama.cpp.
"""
_OTHERS = """\
With --s-part transformers any causal model runs whose code in transformers looks its attention up in the table of
attention functions; tested as above:
{}
Cross-attention, state-space and linear-attention layers, latent attention (MLA), ALiBi, and here also
attention sinks, are refused before any weight is read.
"""


def add_arguments(commands: Any) -> None:
    """Add ``models`` to the command line."""
    parser = commands.add_parser("models", help="the models that can be run", description="List what can be run.")
    parser.set_defaults(func=run_models)


def run_models(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """``fastdecode models``."""
    print(format_models())
    return 0


def format_models() -> str:
    """The table, and what holds for all of it."""
    rows = [_HEAD, *map(_row, FAMILIES)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    others = textwrap.fill(", ".join(THROUGH_TRANSFORMERS), 118)
    return "\n".join([*lines, "", _TEXT + _TESTED, _OTHERS.format(others)]).rstrip()


def _row(family: Family) -> tuple[str, ...]:
    parts = (_attention(family), _layers(family), _positions(family))
    gguf = "-" if family.gguf is None else family.gguf.architecture
    return family.name, family.models, gguf, *(", ".join(part) or "-" for part in parts)


def _attention(family: Family) -> Iterator[str]:
    """What the kernels of a family are told beside sizes and types."""
    if family.window is not None:
        yield "window in some layers" if family.window.first or family.window.period else "window"
    if "attention_scale" in family.values:
        yield "own scale"
    if "attention_softcap" in family.values:
        yield "soft-cap"
    if "attention_sinks" in family.values:
        yield "sinks"


def _layers(family: Family) -> Iterator[str]:
    values = family.values
    norm, place = "LayerNorm" if values.get("norm") == "layer" else "RMSNorm", values.get("norm_place", "before")
    yield f"{norm} {'before or after' if isinstance(place, Key) else _PLACES[place]}"
    if values.get("qk_norm"):
        yield "q/k norm"
    if values.get("parallel"):
        yield "parallel residual"
    yield "plain MLP" if values.get("gated") is False else "gated MLP"
    if family.experts is not None:
        yield "experts"


def _positions(family: Family) -> Iterator[str]:
    if family.rotary is None:
        yield "learned"
        return
    yield "rotary"
    if family.rotary.share_key:
        yield "partial"
    if family.rotary.windowed_theta is not None:
        yield "another base in layers with a window"
