"""What a run has generated, recomputed plainly.

One sequence at a time, prompt and output in one pass, layer by layer, in float32, the attention written out as products
and a softmax: no R-worker, no KV cache, no kernel, no rounding to wire or cache types, no mini-batch, tile or graph.
With the run it shares the weights, the arithmetic of a layer's two halves and the sampler.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fastdecode_hpc.s_part.base import BaseSPart, Pass
from fastdecode_hpc.s_part.layers import softmax_with_sinks
from fastdecode_hpc.s_part.margins import choice_margin
from fastdecode_hpc.s_part.sampler import Sampled, choose, pack, random_numbers, unpack
from fastdecode_hpc.sequence import Sequence
from fastdecode_hpc.verify import Comparison, Difference

LAYER_ROWS = 256  # rows that pass the halves of a layer at once
LOGIT_ROWS = 64  # rows whose logits are held at once
SCORE_VALUES = 1 << 24  # attention scores held at once, float32


class Reference:
    """A model, computed plainly on the device of an S-Part: in float32 where that can be made so, else in its own type.

    Beside that one's weights it needs memory for a sequence's hidden states and one layer's keys and values, and, where
    the weights are of another type or packed, for the head and one layer in float32, of whose experts for one matrix.

    Parameters
    ----------
    s_part : BaseSPart
    """

    def __init__(self, s_part: BaseSPart) -> None:
        self._model, self._device = s_part.plain(), s_part.device

    def compare(self, seq: Sequence) -> Comparison:
        """Set a finished sequence beside what the reference would have chosen, given the run's tokens before.

        Parameters
        ----------
        seq : Sequence
            With its prompt, settings, seed, output, and log-probabilities if the run recorded them.
        """
        result, state = Comparison(num_tokens=len(seq.output_ids)), _state_at_start(seq)
        with torch.inference_mode():
            hidden = _hidden_states(self._model, seq.prompt_ids + seq.output_ids[:-1])[seq.prompt_len - 1 :]
            for rows in _blocks(len(seq.output_ids), LOGIT_ROWS):
                for logits in self._model.logits(hidden[rows]):
                    self._compare_token(seq, state, logits, result)
                    state.output_ids.append(seq.output_ids[len(state.output_ids)])
        return result

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits at every position of a text: ``[num_tokens, vocab_size]`` float32, so for short ones."""
        with torch.inference_mode():
            return self._model.logits(_hidden_states(self._model, token_ids))

    def _compare_token(self, seq: Sequence, state: Sequence, logits: Tensor, result: Comparison) -> None:
        """Compare the run's next token with the reference's, which follows `state`."""
        place = len(state.output_ids)
        given = seq.output_ids[place]
        if seq.logprobs:
            error = abs(seq.logprobs[place].logprob - self._logprob(state, logits.clone(), given))
            result.add_logprob_error(math.inf if math.isnan(error) else error)
        wanted = self._choose(state, logits)  # bias and penalties are in `logits` from here on
        if wanted.is_finite and wanted.token == given:
            return
        margin = self._margin(state, logits, given, result.margin) if wanted.is_finite else math.inf
        own, best = logits.log_softmax(dim=-1)[[given, wanted.token]].tolist()
        result.add(Difference(place, given, wanted.token, own, best, margin))

    def _choose(self, state: Sequence, logits: Tensor) -> Sampled:
        choices = choose(logits[None], [state], lambda x: x.to(self._device))
        return unpack(pack([choices]).tolist(), [state])[0]

    def _logprob(self, state: Sequence, logits: Tensor, token: int) -> float:
        """Log-probability of a token, as a run reports it; `logits` are changed."""
        params = dataclasses.replace(state.params, logprobs=0)
        forced = dataclasses.replace(state, params=params, forced_ids=(*state.output_ids, token))
        reported = self._choose(forced, logits).logprob
        return math.nan if reported is None else reported.logprob

    def _margin(self, state: Sequence, logits: Tensor, token: int, at_least: float) -> float:
        number = float(random_numbers([state])[0])
        return choice_margin(logits, state.params, number, token, at_least=at_least)


def _state_at_start(seq: Sequence) -> Sequence:
    """The sequence as it was before its first token."""
    params = dataclasses.replace(seq.params, logprobs=None)
    return dataclasses.replace(seq, params=params, output_ids=[], logprobs=[], forced_ids=())


def _hidden_states(model: BaseSPart, token_ids: list[int]) -> Tensor:
    """Input of the head for every token: ``[num_tokens, hidden_size]``."""
    ids = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    parts = [(rows, model.make_pass(rows.stop - rows.start)) for rows in _blocks(len(ids), LAYER_ROWS)]
    for rows, part in parts:
        part.start(ids[rows], positions[rows], rows.stop - rows.start)
    for layer in range(model.config.num_layers):
        _run_layer(model, layer, parts)
    return torch.cat([part.hidden for _, part in parts])


def _run_layer(model: BaseSPart, layer: int, parts: list[tuple[slice, Pass]]) -> None:
    """Take all tokens through one layer."""
    sizes = [model.config.q_size, model.config.kv_size, model.config.kv_size]
    k, v = (torch.empty(parts[-1][0].stop, size, device=model.device) for size in sizes[1:])
    for rows, part in parts:
        qkv = part.pre_attention(layer, rows.stop - rows.start).float()
        q, k[rows], v[rows] = qkv.split(sizes, dim=1)
        part.post_attention(layer, _attention(model, layer, q, k[: rows.stop], v[: rows.stop]))


def _attention(model: BaseSPart, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the newest tokens of one sequence over all of it, itself included.

    Parameters
    ----------
    q : Tensor
        ``[num_queries, q_size]``, of the last positions.
    k, v : Tensor
        ``[num_tokens, kv_size]``
    """
    config, sinks = model.config, model.sinks(layer)
    start, window, cap = len(k) - len(q), config.window_of(layer), config.attention_softcap
    k, v = (x.unflatten(1, (config.num_kv_heads, config.head_dim)) for x in (k, v))
    out = torch.empty_like(q)
    for rows in _blocks(len(q), max(1, SCORE_VALUES // (config.num_heads * len(k)))):
        first = 0 if window is None else max(0, start + rows.start + 1 - window)
        keys = slice(first, start + rows.stop)
        heads = q[rows].unflatten(1, (config.num_kv_heads, -1, config.head_dim))
        scores = torch.einsum("qhgd,khd->hgqk", heads, k[keys]) * config.score_scale
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        age = torch.arange(start + rows.start, start + rows.stop, device=q.device)[:, None] - torch.arange(
            keys.start, keys.stop, device=q.device
        )
        hidden = age < 0 if window is None else (age < 0) | (age >= window)
        weights = softmax_with_sinks(scores.masked_fill_(hidden, -math.inf), sinks)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, v[keys]).flatten(1)
    return out


def _blocks(total: int, size: int) -> Iterator[slice]:
    for first in range(0, total, size):
        yield slice(first, min(first + size, total))
