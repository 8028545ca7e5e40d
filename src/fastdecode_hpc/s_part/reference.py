"""What a run has generated, recomputed plainly.

One sequence at a time, prompt and output in one pass, layer by layer, in float32, the attention written out as products
and a softmax: no R-worker, no KV cache, no kernel, no rounding to wire or cache types, no mini-batch, tile or graph.
With the run it shares the weights, the arithmetic of a layer's two halves and the sampler.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from fastdecode_hpc.s_part.layers import softmax_with_sinks
from fastdecode_hpc.s_part.margins import choice_margin
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.products import unpacked
from fastdecode_hpc.s_part.sampler import Sampled, choose, pack, random_numbers, unpack
from fastdecode_hpc.s_part.weights import LayerWeights, Weights
from fastdecode_hpc.sequence import Sequence
from fastdecode_hpc.verify import Comparison, Difference

LAYER_ROWS = 256  # rows that pass the halves of a layer at once
LOGIT_ROWS = 64  # rows whose logits are held at once
SCORE_VALUES = 1 << 24  # attention scores held at once, float32


class Reference:
    """A model, computed plainly in float32 on the device of an `SPart`.

    Beside that one's weights it needs memory for a sequence's hidden states and one layer's keys and values, and, where
    the weights are of another type, for one layer and the head in float32.

    Parameters
    ----------
    s_part : SPart
    """

    def __init__(self, s_part: SPart) -> None:
        self._config, self._device = s_part.config, s_part.device
        self._weights = _as_float32(s_part.weights)

    def compare(self, seq: Sequence) -> Comparison:
        """Set a finished sequence beside what the reference would have chosen, given the run's tokens before.

        Parameters
        ----------
        seq : Sequence
            With its prompt, settings, seed, output, and log-probabilities if the run recorded them.
        """
        result, state = Comparison(num_tokens=len(seq.output_ids)), _state_at_start(seq)
        with torch.inference_mode():
            model = self._model(seq.context_len)
            hidden = _hidden_states(model, seq.prompt_ids + seq.output_ids[:-1])[seq.prompt_len - 1 :]
            for rows in _blocks(len(seq.output_ids), LOGIT_ROWS):
                for logits in model.logits(hidden[rows]):
                    self._compare_token(seq, state, logits, result)
                    state.output_ids.append(seq.output_ids[len(state.output_ids)])
        return result

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits at every position of a text: ``[num_tokens, vocab_size]`` float32, so for short ones."""
        with torch.inference_mode():
            model = self._model(len(token_ids))
            return model.logits(_hidden_states(model, token_ids))

    def _model(self, num_positions: int) -> SPart:
        return SPart(
            self._config,
            self._weights,
            device=self._device,
            dtype=torch.float32,
            batch_invariant=False,
            max_positions=num_positions,
        )

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


def _hidden_states(model: SPart, token_ids: list[int]) -> Tensor:
    """Input of the head for every token: ``[num_tokens, hidden_size]`` float32."""
    ids = torch.tensor(token_ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    hidden = model.embed(ids, positions).float()
    for layer in range(model.config.num_layers):
        _run_layer(model, layer, hidden, positions)
    return hidden


def _run_layer(model: SPart, layer: int, hidden: Tensor, positions: Tensor) -> None:
    """Take all tokens through one layer, in place."""
    sizes = [model.config.q_size, model.config.kv_size, model.config.kv_size]
    k, v = (hidden.new_empty(len(hidden), size) for size in sizes[1:])
    for rows in _blocks(len(hidden), LAYER_ROWS):
        q, k[rows], v[rows] = model.pre_attention(layer, hidden[rows], positions[rows]).split(sizes, dim=1)
        o = _attention(model, layer, q, k[: rows.stop], v[: rows.stop])
        hidden[rows] = model.post_attention(layer, hidden[rows], o)


def _attention(model: SPart, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the newest tokens of one sequence over all of it, itself included.

    Parameters
    ----------
    q : Tensor
        ``[num_queries, q_size]``, of the last positions.
    k, v : Tensor
        ``[num_tokens, kv_size]``
    """
    config, sinks = model.config, model.weights.layers[layer].sinks
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


def _as_float32(weights: Weights) -> Weights:
    """The same weights in float32; layers only as long as they are used."""
    return Weights(
        weights.embedding,  # rows of it are widened when they are looked up
        _Layers(weights.layers),
        _float32(weights.final_norm),
        unpacked(weights.lm_head).float(),
        _float32(weights.positions),
        _float32(weights.project_in),
        _float32(weights.project_out),
    )


class _Layers(Ordered[LayerWeights]):
    """Layers that are widened when they are asked for; the last one stays."""

    def __init__(self, layers: Ordered[LayerWeights]) -> None:
        self._layers = layers
        self._last: tuple[int, LayerWeights] | None = None

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> LayerWeights:  # type: ignore[override]
        if self._last is None or self._last[0] != index:
            self._last = None  # free it first
            layer = self._layers[index]
            self._last = index, LayerWeights(*(_float32(getattr(layer, name)) for name in layer.__slots__))
        return self._last[1]


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else unpacked(x).float()
