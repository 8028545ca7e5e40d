"""From logits to the next tokens: greedy or sampled, each row by its own settings.

Random numbers come from a counter-based generator keyed by (seed, noise key, choice, token index),
so a row's result never depends on its neighbours, on the batch or on the number of ranks.

`choose` enqueues everything on the logits' device without looking at a value, `pack` makes one tensor of it, and
`unpack` reads that on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.sequence import Sequence, TokenLogprob

Put = Callable[[Tensor], Tensor]  # brings a small host tensor to the device of the logits

MIN_TEMPERATURE = 1e-6  # below it only the most likely token has any mass in float32


class Sampled(NamedTuple):
    """Result for one row."""

    token: int
    logprob: TokenLogprob | None
    is_finite: bool  # False: the row's logits held NaN or infinity, `token` means nothing


def uniform(seed: int, noise_key: int, choice: int, token_index: int) -> float:
    """The row's random number in [0, 1): Philox keyed by (seed, noise_key), counting (token_index, choice)."""
    key, counter = np.array([seed, noise_key], np.uint64), np.array([0, 0, token_index, choice], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw()
    return (int(raw) >> 11) * 2.0**-53


class Choices(NamedTuple):
    """What was chosen for some rows, on the device of their logits."""

    rows: Tensor  # [num_rows, 2] float64: the token, whether all logits of the row are finite
    logprobs: list[Tensor]  # of each row that asks for them: [1 + 2 * num_top] float64


def choose(logits: Tensor, seqs: list[Sequence], put: Put) -> Choices:
    """Choose the next token of every row.

    Parameters
    ----------
    logits : Tensor
        ``[num_rows, vocab] float32``; changed in place by repetition penalties.
    seqs : list of Sequence
        One a row.
    put : callable
    """
    with torch.inference_mode():
        for row, seq in enumerate(seqs):
            if seq.params.repetition_penalty != 1.0:
                _penalise(logits[row], seq, put)
        tokens = logits.argmax(dim=-1)
        drawn = [row for row, seq in enumerate(seqs) if not seq.params.is_greedy]
        if drawn:
            rows = put(torch.tensor(drawn))
            tokens.index_copy_(0, rows, _draw(logits[rows], [seqs[row] for row in drawn], put))
        forced = [(row, seq.forced_id) for row, seq in enumerate(seqs) if seq.forced_id is not None]
        if forced:  # a rebuilt sequence repeats its tokens
            places, ids = put(torch.tensor(forced)).unbind(dim=1)
            tokens.index_copy_(0, places, ids)
        finite = torch.isfinite(logits).all(dim=-1)
        return Choices(
            torch.stack((tokens.double(), finite.double()), dim=1),
            [
                _logprob(logits[row], tokens[row : row + 1], seq.params.logprobs)
                for row, seq in enumerate(seqs)
                if seq.params.logprobs is not None
            ],
        )


def pack(choices: Ordered[Choices]) -> Tensor:
    """Choices of consecutive rows in one tensor, ``[num_values]`` float64 (which holds ids and float32 exactly)."""
    with torch.inference_mode():
        rows = [block.rows.flatten() for block in choices]
        return torch.cat([*rows, *(logprobs for block in choices for logprobs in block.logprobs)])


def unpack(values: list[float], seqs: list[Sequence]) -> list[Sampled]:
    """The results of all rows from the values of `pack`."""
    rest = itertools.islice(values, 2 * len(seqs), None)
    results = []
    for row, seq in enumerate(seqs):
        token, is_finite = int(values[2 * row]), bool(values[2 * row + 1])
        logprob = None if seq.params.logprobs is None else _read_logprob(token, rest, seq.params.logprobs)
        results.append(Sampled(token, logprob if is_finite else None, is_finite))
    return results


def _penalise(logits: Tensor, seq: Sequence, put: Put) -> None:
    """Divide positive and multiply negative logits of every token in prompt or output (CTRL, section 4.1)."""
    seen = put(torch.tensor(sorted({*seq.prompt_ids, *seq.output_ids})))
    values, penalty = logits[seen], seq.params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _draw(logits: Tensor, seqs: list[Sequence], put: Put) -> Tensor:
    """Sample one token a row by inverting its distribution function at the row's random number.

    Any token where logits are not finite.
    """
    temperature = put(torch.tensor([[max(seq.params.temperature, MIN_TEMPERATURE)] for seq in seqs]))
    # The largest logit is taken off first: a tiny temperature then can't overflow.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    probs = _filter(scaled, seqs, put)
    # float64: with 100k tokens a float32 running sum loses the tail.
    cdf = probs.double().cumsum(dim=-1)
    u = torch.tensor([[uniform(s.seed, s.noise_key, s.choice, len(s.output_ids))] for s in seqs], dtype=torch.float64)
    target = put(u) * cdf[:, -1:]
    picks = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    # Rounding can put the target on the very end: the last token with any mass is meant then.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(picks, last)


def _filter(scaled: Tensor, seqs: list[Sequence], put: Put) -> Tensor:
    """Probabilities after top-k, then top-p, then min-p; what is filtered out has 0."""
    probs = scaled.softmax(dim=-1)
    ranked = [row for row, seq in enumerate(seqs) if seq.params.top_k > 0 or seq.params.top_p < 1.0]
    if ranked:
        rows = put(torch.tensor(ranked))
        probs.index_copy_(0, rows, _keep_best(probs[rows], [seqs[row] for row in ranked], put))
    min_p = put(torch.tensor([[seq.params.min_p] for seq in seqs]))
    return probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)


def _keep_best(probs: Tensor, seqs: list[Sequence], put: Put) -> Tensor:
    """Zero what lies outside the `top_k` likeliest, then outside the smallest set of mass `top_p` among those."""
    vocab = probs.shape[-1]
    top_k = put(torch.tensor([[s.params.top_k or vocab] for s in seqs]))
    top_p = put(torch.tensor([[s.params.top_p] for s in seqs], dtype=torch.float64))
    order = probs.sort(dim=-1, descending=True, stable=True)
    best = order.values.masked_fill(torch.arange(vocab, device=probs.device) >= top_k, 0.0).double()
    before = best.cumsum(dim=-1) - best
    kept = best.masked_fill(before >= top_p * best.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(probs).scatter_(-1, order.indices, kept.to(probs.dtype))


def _logprob(logits: Tensor, token: Tensor, num_top: int) -> Tensor:
    """Log-probabilities of one row before temperature and filters: of `token`, of the `num_top` best, and their ids."""
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(num_top)
    return torch.cat((logprobs[token].double(), best.values.double(), best.indices.double()))


def _read_logprob(token: int, values: Iterator[float], num_top: int) -> TokenLogprob:
    own, *rest = itertools.islice(values, 1 + 2 * num_top)
    best, ids = rest[:num_top], rest[num_top:]
    return TokenLogprob(token, own, tuple(zip(map(int, ids), best, strict=True)))
