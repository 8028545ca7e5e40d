"""Known text through the S-Part, with the attention computed elsewhere: how well a model predicts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.device import as_rows
from fastdecode_hpc.transport.base import Rows

LOGIT_ROWS = 256  # logits held at once for each of two passes: [256, vocab_size] float32

# Called with a layer and its rows [q|k|v] [num_rows, qkv_size]; gives o [num_rows, q_size]; both float32.
Attend = Callable[[int, Rows], Rows]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """How one pass predicted each counted token; arrays of ``[num_tokens]``."""

    nll: np.ndarray  # float64, negative log-likelihood of the token, nats
    top1: np.ndarray  # int64, the token that was the most likely one
    logit_error: np.ndarray  # float64, largest |difference| of any logit from the first pass


def forced_pass(s_part: BaseSPart, windows: np.ndarray, attend: Attend) -> Tensor:
    """Hidden states of all tokens of some windows, layer by layer.

    Parameters
    ----------
    windows : np.ndarray
        ``[num_windows, context]`` int64 token ids; each window is a sequence of its own that starts at position 0.
    attend : callable
        Attention of every row over its own window, itself and older tokens; rows are in the order of `windows`.

    Returns
    -------
    Tensor
        ``[num_windows, context, hidden_size]``, input of the head.
    """
    num_windows, context = windows.shape
    positions = torch.arange(context, device=s_part.device).repeat(num_windows)
    rows = s_part.make_pass(len(positions))
    rows.start(torch.from_numpy(windows.reshape(-1)).to(s_part.device), positions, len(positions))
    for layer in range(s_part.config.num_layers):
        qkv = rows.pre_attention(layer, len(positions))
        o = attend(layer, as_rows(qkv.float().cpu().contiguous()))
        rows.post_attention(layer, torch.from_numpy(o).to(s_part.device))
    return rows.hidden.unflatten(0, (num_windows, context))


def score_passes(s_part: BaseSPart, windows: np.ndarray, passes: Sequence[Tensor]) -> list[TokenScores]:
    """Score every token of the windows but each window's first; logits are made once and never kept.

    Parameters
    ----------
    windows : np.ndarray
        ``[num_windows, context]`` int64
    passes : sequence of Tensor
        Results of `forced_pass` for these windows; the first is what the others are compared with.

    Returns
    -------
    list of TokenScores
        One for each pass; tokens in the order of the text.
    """
    targets = torch.from_numpy(windows[:, 1:].reshape(-1)).to(s_part.device)
    states = [hidden[:, :-1].flatten(0, 1) for hidden in passes]
    parts: list[list[Tensor]] = [[] for _ in passes]
    with torch.inference_mode():
        for start in range(0, len(targets), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            chunk = (s_part.logits(state[rows]) for state in states)
            for scores, part in zip(parts, _score_chunk(chunk, targets[rows]), strict=True):
                scores.append(part)
    return [_as_scores(torch.cat(scores, dim=1)) for scores in parts]


def _score_chunk(chunk: Iterator[Tensor], targets: Tensor) -> Iterator[Tensor]:
    """For each pass ``[3, num_rows]`` float64: negative log-likelihood, most likely token, largest difference."""
    first: Tensor | None = None
    for logits in chunk:
        first = logits if first is None else first
        nll = F.cross_entropy(logits, targets, reduction="none")
        error = (logits - first).abs().amax(dim=1)
        yield torch.stack((nll.double(), logits.argmax(dim=1).double(), error.double()))


def _as_scores(scores: Tensor) -> TokenScores:
    nll, top1, logit_error = scores.cpu().numpy()
    return TokenScores(nll, top1.astype(np.int64), logit_error)
