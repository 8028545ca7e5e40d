"""From logits to the next tokens: greedy or sampled, each row by its own settings.

Random numbers come from a counter-based generator keyed by (seed, request index, choice, token index),
so a row's result never depends on its neighbours, on the batch or on the number of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fastdecode_hpc.sequence import Sequence, TokenLogprob

MIN_TEMPERATURE = 1e-6  # below it only the most likely token has any mass in float32


class Sampled(NamedTuple):
    """Result for one row."""

    token: int
    logprob: TokenLogprob | None
    is_finite: bool  # False: the row's logits held NaN or infinity, `token` means nothing


def uniform(seed: int, index: int, choice: int, token_index: int) -> float:
    """The row's random number in [0, 1): Philox keyed by (seed, index), counting (token_index, choice)."""
    key, counter = np.array([seed, index], np.uint64), np.array([0, 0, token_index, choice], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw()
    return (int(raw) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, seqs: list[Sequence]) -> list[Sampled]:
    """Choose the next token of every row.

    Parameters
    ----------
    logits : Tensor
        ``[num_rows, vocab] float32``; changed in place by repetition penalties.
    seqs : list of Sequence
        One a row.
    """
    with torch.inference_mode():
        return _sample(logits, seqs)


def _sample(logits: torch.Tensor, seqs: list[Sequence]) -> list[Sampled]:
    for row, seq in enumerate(seqs):
        if seq.params.repetition_penalty != 1.0:
            _penalise(logits[row], seq)
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, seq in enumerate(seqs) if not seq.params.is_greedy and finite[row]]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [seqs[row] for row in drawn])
    ids = tokens.tolist()
    return [
        Sampled(token, _logprob(logits[row], token, seq.params.logprobs) if ok else None, ok)
        for row, (token, seq, ok) in enumerate(zip(ids, seqs, finite, strict=True))
    ]


def _penalise(logits: torch.Tensor, seq: Sequence) -> None:
    """Divide positive and multiply negative logits of every token in prompt or output (CTRL, section 4.1)."""
    seen = torch.tensor(sorted({*seq.prompt_ids, *seq.output_ids}), device=logits.device)
    values, penalty = logits[seen], seq.params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(logits: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """Sample one token a row by inverting its distribution function at the row's random number."""
    device = logits.device
    temperature = torch.tensor([[max(seq.params.temperature, MIN_TEMPERATURE)] for seq in seqs], device=device)
    # The largest logit is taken off first: a tiny temperature then can't overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probs = _filter(scaled, seqs)
    # float64: with 100k tokens a float32 running sum loses the tail.
    cdf = probs.double().cumsum(dim=-1)
    u = torch.tensor([[uniform(s.seed, s.index, s.choice, len(s.output_ids))] for s in seqs], dtype=torch.float64)
    target = u.to(device) * cdf[:, -1:]
    picks = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    # Rounding can put the target on the very end: the last token with any mass is meant then.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(picks, last)


def _filter(scaled: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """Probabilities after top-k, then top-p, then min-p; what is filtered out has 0."""
    probs = scaled.softmax(dim=-1)
    ranked = [row for row, seq in enumerate(seqs) if seq.params.top_k > 0 or seq.params.top_p < 1.0]
    if ranked:
        probs[ranked] = _keep_best(probs[ranked], [seqs[row] for row in ranked])
    min_p = torch.tensor([[seq.params.min_p] for seq in seqs], device=scaled.device)
    return probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)


def _keep_best(probs: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """Zero what lies outside the `top_k` likeliest, then outside the smallest set of mass `top_p` among those."""
    vocab, device = probs.shape[-1], probs.device
    top_k = torch.tensor([[s.params.top_k or vocab] for s in seqs], device=device)
    top_p = torch.tensor([[s.params.top_p] for s in seqs], device=device, dtype=torch.float64)
    order = probs.sort(dim=-1, descending=True, stable=True)
    best = order.values.masked_fill(torch.arange(vocab, device=device) >= top_k, 0.0).double()
    before = best.cumsum(dim=-1) - best
    kept = best.masked_fill(before >= top_p * best.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order.indices, kept.to(probs.dtype))


def _logprob(logits: torch.Tensor, token: int, num_top: int | None) -> TokenLogprob | None:
    """Log-probabilities of one row before temperature and filters."""
    if num_top is None:
        return None
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(num_top)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
