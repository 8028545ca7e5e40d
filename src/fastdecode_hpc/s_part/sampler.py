"""From logits to the next tokens: greedy or sampled, each row by its own settings.

First bias and penalties change single logits (`s_part.penalties`), of greedy rows too; then the temperature, top-k,
top-p and min-p follow, and one token is drawn. Log-probabilities are reported of the model's own distribution, which
none of this has touched (vLLM's default, `raw_logprobs`, too).

Random numbers come from a counter-based generator keyed by (seed, noise key, choice, token index),
so a row's result never depends on its neighbours, on the batch or on the number of ranks.

`choose` enqueues everything on the logits' device without looking at a value, `pack` makes one tensor of it, and
`unpack` reads that on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode_hpc.s_part import row_kernels
from fastdecode_hpc.s_part.penalties import Put, adjust
from fastdecode_hpc.s_part.philox import uniform
from fastdecode_hpc.sequence import MAX_LOGPROBS, Sequence, TokenLogprob

MIN_TEMPERATURE = 1e-6  # below it only the most likely token has any mass in float32


class Sampled(NamedTuple):
    """Result for one row."""

    token: int
    logprob: TokenLogprob | None
    is_finite: bool  # False: the row's logits held NaN or infinity, `token` means nothing


class Choices(NamedTuple):
    """What was chosen for some rows, on the device of their logits; float64, which holds ids and float32 exactly."""

    rows: Tensor  # [num_rows, 2]: the token, whether all logits of the row are finite
    logprobs: Tensor | None  # [num_rows that ask for it, 1 + 2 * num_top], see `_report`


def choose(logits: Tensor, seqs: list[Sequence], put: Put) -> Choices:
    """Choose the next token of every row.

    Parameters
    ----------
    logits : Tensor
        ``[num_rows, vocab] float32``; changed in place by bias and penalties.
    seqs : list of Sequence
        One a row.
    put : callable
    """
    with torch.inference_mode():
        reported = _own_logprobs(logits, seqs, put)
        adjust(logits, seqs, put)
        best, finite = _pick(logits)
        tokens = _choose_tokens(best, logits, seqs, put)
        return Choices(
            torch.stack((tokens.double(), finite.double()), dim=1),
            None if reported is None else _report(reported.logprobs, tokens[reported.rows]),
        )


def pack(choices: Ordered[Choices]) -> Tensor:
    """Choices of consecutive rows in one tensor, ``[num_values]`` float64."""
    with torch.inference_mode():
        rows = [block.rows.flatten() for block in choices]
        return torch.cat([*rows, *(block.logprobs.flatten() for block in choices if block.logprobs is not None)])


def unpack(values: list[float], seqs: list[Sequence]) -> list[Sampled]:
    """The results of all rows from the values of `pack`."""
    num_reporting = sum(seq.params.logprobs is not None for seq in seqs)
    size = (len(values) - 2 * len(seqs)) // max(1, num_reporting)
    starts = itertools.count(2 * len(seqs), size)
    results = []
    for row, seq in enumerate(seqs):
        token, is_finite, logprob = int(values[2 * row]), bool(values[2 * row + 1]), None
        if seq.params.logprobs is not None:
            start = next(starts)
            logprob = _read_report(token, values[start : start + size], seq.params.logprobs)
        results.append(Sampled(token, logprob if is_finite else None, is_finite))
    return results


class _Reported(NamedTuple):
    """Rows whose log-probabilities are asked for."""

    rows: Tensor  # [num_reported] int64
    logprobs: Tensor  # [num_reported, vocab] float32, as the model gives them


def _own_logprobs(logits: Tensor, seqs: list[Sequence], put: Put) -> _Reported | None:
    reporting = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
    if not reporting:
        return None
    rows = put(torch.tensor(reporting))
    return _Reported(rows, logits[rows].log_softmax(dim=-1))


def _report(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of the row's token and of the best ones, and the ids of those.

    As many as can be asked for, whatever the rows ask: which of two equal ones comes first may depend on how many.
    """
    best = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]))
    own = logprobs.gather(1, tokens[:, None])
    return torch.cat((own.double(), best.values.double(), best.indices.double()), dim=1)


def _read_report(token: int, values: Ordered[float], num_top: int) -> TokenLogprob:
    own, best, ids = values[0], values[1 : 1 + len(values) // 2], values[1 + len(values) // 2 :]
    return TokenLogprob(token, own, tuple(zip(map(int, ids[:num_top]), best[:num_top], strict=True)))


def _pick(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``[num_rows]``: the most likely token, and whether all logits are finite."""
    if row_kernels.take(logits, 2):
        places = row_kernels.pick(logits)
        return places.clamp_min(0), places >= 0
    # Each of these is NaN where any value is.
    return logits.argmax(dim=-1), logits.amax(dim=-1).isfinite() & logits.amin(dim=-1).isfinite()


def _choose_tokens(tokens: Tensor, logits: Tensor, seqs: list[Sequence], put: Put) -> Tensor:
    """``[num_rows] int64``: the most likely token, one that was drawn, or the one that is known beforehand."""
    drawn = [row for row, seq in enumerate(seqs) if not seq.params.is_greedy]
    if drawn:
        rows = put(torch.tensor(drawn))
        tokens.index_copy_(0, rows, _draw(logits[rows], [seqs[row] for row in drawn], put))
    forced = [(row, seq.forced_id) for row, seq in enumerate(seqs) if seq.forced_id is not None]
    if forced:  # a rebuilt sequence repeats its tokens
        rows, ids = put(torch.tensor(forced)).unbind(dim=1)
        tokens.index_copy_(0, rows, ids)
    return tokens


def random_numbers(seqs: list[Sequence]) -> NDArray[np.float64]:
    """The number in [0, 1) that each sequence's next token is drawn with: ``[num_rows]``."""
    return uniform(np.array([[s.seed, s.noise_key, s.choice, len(s.output_ids)] for s in seqs], np.uint64))


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
    target = put(torch.from_numpy(random_numbers(seqs))[:, None]) * cdf[:, -1:]
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
