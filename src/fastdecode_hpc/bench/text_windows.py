"""A text file as windows of token ids, each of them a sequence of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import numpy as np

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.tokenizer import PromptError, Tokenizer

CHARS_PER_TOKEN = 8  # read at first; more where that was too little


def read_windows(path: Path, tokenizer: Tokenizer, *, context: int, max_tokens: int, bos: int | None) -> np.ndarray:
    """Cut the beginning of a text into windows; a rest that fills none is left out.

    Parameters
    ----------
    max_tokens : int
        Most tokens that count: all of a window but its first.
    bos : int or None
        Begins every window where the tokenizer puts it before a text.

    Returns
    -------
    np.ndarray
        [num_windows, context] int64

    Raises
    ------
    ConfigError
        If the text or `max_tokens` is too short for one window, or the file can't be read.
    """
    if max_tokens < context - 1:
        raise ConfigError(
            f"--max-tokens is {max_tokens}; one window of --context {context} counts {context - 1}: "
            "raise the first or lower the second"
        )
    most = max_tokens // (context - 1)
    try:
        with path.open(encoding="utf-8") as file:
            ids = _read_ids(file, tokenizer, most * context)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text {path} cannot be read ({error}); give a file of plain UTF-8 text") from None
    except PromptError as error:
        raise ConfigError(f"the text {path} cannot be used: {error}") from None
    lead = ids[:1] if ids[:1] == [bos] else []
    text = ids[len(lead) :]
    fresh = context - len(lead)  # tokens of the text in each window
    num_windows = min(most, len(text) // fresh)
    if num_windows == 0:
        raise ConfigError(
            f"the text {path} has {len(text)} tokens, and one window takes {fresh}; give a longer text or lower "
            f"--context (now {context})"
        )
    windows = np.array(text[: num_windows * fresh], np.int64).reshape(num_windows, fresh)
    return np.hstack([np.tile(np.array(lead, np.int64), (num_windows, 1)), windows])


def _read_ids(file: TextIO, tokenizer: Tokenizer, wanted: int) -> list[int]:
    """Ids of at least `wanted` tokens from the start of the text, or all: a corpus may be far larger."""
    text, size = "", CHARS_PER_TOKEN * wanted
    while piece := file.read(size):
        text += piece
        ids = tokenizer.encode_prompt(text)
        if len(ids) > wanted:  # one more, because the last one may be cut
            return ids
        size = len(text)
    return tokenizer.encode_prompt(text) if text.strip() else []
