"""What a request takes off or adds to single logits before a token is chosen: its bias and its penalties.

All rows of a block go together as pairs of row and token, so the number of operations on the device doesn't depend on
how many rows there are. A row's tokens are counted as they come (`TokenCounts`), never again from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fastdecode_hpc.sequence import Sequence

Put = Callable[[Tensor], Tensor]  # brings a small host tensor to the device of the logits


def adjust(logits: Tensor, seqs: list[Sequence], put: Put) -> None:
    """Apply the bias, the repetition penalty, the frequency penalty and the presence penalty, in this order.

    Order and meaning are those of vLLM; bias, frequency and presence also those of the OpenAI API. With x a logit and
    c how often its token stands in the output (prompts don't count)::

        x += logit_bias                                             of the tokens that have one
        x  = x / repetition if x > 0 else x * repetition            of all tokens in prompt or output
        x -= frequency * c + presence * (c > 0)

    Parameters
    ----------
    logits : Tensor
        ``[num_rows, vocab] float32``; changed in place.
    seqs : list of Sequence
        One a row.
    put : callable
    """
    _add_bias(logits, seqs, put)
    _penalise(logits, seqs, put)


def _add_bias(logits: Tensor, seqs: list[Sequence], put: Put) -> None:
    biased = [row for row, seq in enumerate(seqs) if seq.params.logit_bias]
    if not biased:
        return
    tables = [_bias_table(seqs[row].params.logit_bias) for row in biased]
    numbers = np.repeat(biased, [len(table) for table in tables])
    rows, tokens, bias = put(torch.from_numpy(np.column_stack((numbers, np.concatenate(tables))))).unbind(dim=1)
    flat, places = _places(logits, rows, tokens)
    flat.index_copy_(0, places, flat.index_select(0, places) + bias.to(logits.dtype))


@functools.lru_cache(maxsize=1024)
def _bias_table(logit_bias: tuple[tuple[int, float], ...]) -> np.ndarray:
    """``[num_tokens, 2] float64``, which holds ids exactly; kept, for it is the same at every step."""
    return np.array(logit_bias, np.float64)


def _penalise(logits: Tensor, seqs: list[Sequence], put: Put) -> None:
    penalised = [row for row, seq in enumerate(seqs) if seq.params.has_penalties]
    counts = [seqs[row].count_tokens() for row in penalised]
    lengths = [len(count.ids) for count in counts]
    if not any(lengths):
        return
    pairs = np.empty((3, sum(lengths)), np.intc)
    pairs[0] = np.repeat(penalised, lengths)
    np.concatenate([count.ids for count in counts], out=pairs[1])
    np.concatenate([count.num_generated for count in counts], out=pairs[2])
    rows, tokens, generated = put(torch.from_numpy(pairs)).unbind()
    # All rows, so that a row's number finds its own; what isn't penalised is not looked at.
    settings = torch.tensor(
        [[s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty] for s in seqs]
    )
    repetition, frequency, presence = put(settings).t().index_select(1, rows)
    flat, places = _places(logits, rows, tokens)
    values = flat.index_select(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.index_copy_(0, places, values - (frequency * generated + presence * (generated > 0)))


def _places(logits: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits in one line, and where the pairs are in it; a CPU is much slower with two indices."""
    return logits.view(-1), rows.long() * logits.shape[1] + tokens.long()
