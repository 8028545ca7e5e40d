"""What a KV type costs, in figures: statistics over the scores of each token. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np


class Scores(Protocol):
    """Arrays of ``[num_tokens]``, as `s_part.forced.TokenScores`."""

    @property
    def nll(self) -> np.ndarray: ...
    @property
    def top1(self) -> np.ndarray: ...
    @property
    def logit_error(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class FidelityCase:
    """One KV type against fp32; shares are of 1, not percent."""

    name: str
    kv_dtype: str
    bytes_per_token: float  # of the KV cache, all layers, scales included
    num_tokens: int
    mean_nll: float  # nats
    perplexity: float
    perplexity_change: float  # perplexity / that of fp32 - 1
    perplexity_change_se: float  # its standard error over tokens
    top1_agreement: float  # share of tokens where both have the same most likely one
    max_logit_difference: float

    @classmethod
    def compare(
        cls, kv_dtype: str, bytes_per_token: float, scores: Sequence[Scores], reference: Sequence[Scores]
    ) -> FidelityCase:
        """Figures of one type; scores of batch after batch, for the same tokens as `reference`."""
        nll, nll_reference = _joined(scores, "nll"), _joined(reference, "nll")
        difference = nll - nll_reference  # paired: most of the spread between tokens is common to both
        ratio = math.exp(difference.mean())
        spread = difference.std(ddof=1) if len(nll) > 1 else math.nan
        return cls(
            name=kv_dtype,
            kv_dtype=kv_dtype,
            bytes_per_token=bytes_per_token,
            num_tokens=len(nll),
            mean_nll=float(nll.mean()),
            perplexity=math.exp(nll.mean()),
            perplexity_change=ratio - 1,
            perplexity_change_se=float(ratio * spread / math.sqrt(len(nll))),
            top1_agreement=float((_joined(scores, "top1") == _joined(reference, "top1")).mean()),
            max_logit_difference=float(_joined(scores, "logit_error").max()),
        )


def _joined(scores: Sequence[Scores], name: str) -> np.ndarray:
    return np.concatenate([getattr(part, name) for part in scores])


def format_table(cases: Sequence[FidelityCase]) -> str:
    """The cases as lines for people; changes in percent."""
    width = max(7, *(len(case.kv_dtype) for case in cases))
    lines = [
        f"{'kv type':<{width}}  bytes/token  mean NLL  perplexity    change %      +- %  top-1 %  max logit diff",
        *(
            f"{case.kv_dtype:<{width}}  {case.bytes_per_token:>11.0f}  {case.mean_nll:8.5f}  {case.perplexity:10.4f}  "
            f"{100 * case.perplexity_change:+10.4f}  {100 * case.perplexity_change_se:8.4f}  "
            f"{100 * case.top1_agreement:7.2f}  {case.max_logit_difference:14.4f}"
            for case in cases
        ),
    ]
    return "\n".join(lines)


def as_dicts(cases: Sequence[FidelityCase]) -> list[dict[str, Any]]:
    """The cases as plain values, for a file."""
    return [asdict(case) for case in cases]
