"""How wrong logits must be to explain a choice: what tells a near-tie from a corrupted row.

The margin of a token is the smallest m, in nats, such that changing each logit by at most m / 2 makes the sampler take
it. For a greedy row it is the difference of two log-probabilities. For a sampled one that difference says nothing (the
two tokens are neighbours by id, not by likelihood): what counts is how far the distribution function and the edges of
the filters have to move. It is exact without filters, and with them a bound from below.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastdecode_hpc.s_part.sampler import MIN_TEMPERATURE
from fastdecode_hpc.sequence import SamplingParams

FIRST_NATS = 1e-5  # where the search for a margin begins
BISECTIONS = 8  # of a factor 2: the margin is then known to 0.3 %
LEAST_U = 2.0**-54  # stands for 0, whose margin may be infinite


def choice_margin(logits: Tensor, params: SamplingParams, u: float, token: int, *, at_least: float = 0.0) -> float:
    """Margin of `token`, or `at_least` where it is below that (which takes less time to find).

    Parameters
    ----------
    logits : Tensor
        ``[vocab]``, finite, after penalties.
    params : SamplingParams
    u : float
        The row's random number.
    token : int
    at_least : float
        Nats.
    """
    if params.is_greedy:
        return max(at_least, float(logits.max() - logits[token]))
    draw = _Draw(logits, params, u, token)
    if math.isinf(at_least) or draw.explained_by(at_least):
        return at_least
    low, high = at_least, max(2 * at_least, FIRST_NATS)
    while not draw.explained_by(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if draw.explained_by(middle) else (middle, high)
    return high


class _Draw:
    """The drawing of one token, as inequalities between sums of probabilities that a change of the logits can move.

    Scores are logits over temperature, the best at 0, sorted; all sums are kept as logarithms.
    """

    def __init__(self, logits: Tensor, params: SamplingParams, u: float, token: int) -> None:
        wide = logits.double()
        self.temperature = max(params.temperature, MIN_TEMPERATURE)
        self.scores, ids = ((wide - wide.max()) / self.temperature).sort(descending=True, stable=True)
        self._ascending = self.scores.flip(0)
        vocab = len(self.scores)
        top_k = min(params.top_k or vocab, vocab)
        self.worst_in, self.best_out = self.scores[top_k - 1], self.scores[top_k] if top_k < vocab else -math.inf
        self.min_score = math.log(params.min_p) if params.min_p else -math.inf
        self.top_p_odds = math.log(params.top_p / (1 - params.top_p)) if params.top_p < 1 else None
        self.odds = _odds_of_best(self.scores[:top_k])
        self.is_token, self.is_before, self.is_after = ids == token, ids < token, ids > token
        self.log_u, self.log_rest = math.log(max(u, LEAST_U)), math.log1p(-u)

    def explained_by(self, margin: float) -> bool:
        """Whether logits that differ by up to `margin`, one against another, may choose the token."""
        shift = margin / self.temperature
        may, must = self._may_be_kept(shift), self._must_be_kept(shift)
        if not (may & self.is_token).any():
            return False
        # Chosen is the first token at which the running sum, in order of ids, is above u times the whole.
        reached = self._log_sum(may & ~self.is_after) + self.log_rest + shift
        passed = self._log_sum(must & self.is_before) + self.log_rest
        return (
            reached >= self._log_sum(must & self.is_after) + self.log_u
            and passed <= self._log_sum(may & ~self.is_before) + self.log_u + shift
        )

    def _may_be_kept(self, shift: float) -> Tensor:
        """Tokens that some change of the scores by `shift`, one against another, leaves in all filters."""
        kept = (self.scores >= self.worst_in - shift) & (self.scores >= self.min_score - shift)
        if self.top_p_odds is not None:
            num_better = self._count_above(self.scores + shift, or_equal=False)
            kept &= self._odds(num_better) - shift < self.top_p_odds
        return kept

    def _must_be_kept(self, shift: float) -> Tensor:
        """Tokens that every such change leaves in all filters."""
        kept = (self.scores > self.best_out + shift) & (self.scores >= self.min_score + shift)
        if self.top_p_odds is not None:
            num_better = self._count_above(self.scores - shift, or_equal=True) - 1  # not itself
            kept &= self._odds(num_better) + shift < self.top_p_odds
        return kept

    def _count_above(self, bounds: Tensor, *, or_equal: bool) -> Tensor:
        return len(self.scores) - torch.searchsorted(self._ascending, bounds, right=not or_equal)

    def _odds(self, num_best: Tensor) -> Tensor:
        return self.odds[num_best.clamp(max=len(self.odds) - 1)]

    def _log_sum(self, mask: Tensor) -> float:
        """Logarithm of the sum of probabilities, up to a factor that all sums have."""
        return float(self.scores.masked_fill(~mask, -math.inf).logsumexp(0))


def _odds_of_best(scores: Tensor) -> Tensor:
    """For n = 0, 1, ...: log of the mass of the n best over that of the others; ``[len(scores) + 1]``."""
    none = scores.new_full((1,), -math.inf)
    best = torch.cat((none, scores.logcumsumexp(0)))
    others = torch.cat((scores.flip(0).logcumsumexp(0).flip(0), none))
    return best - others
