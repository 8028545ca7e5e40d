"""What a peer's program and `compare.py` say to each other: a line of JSON for each cell, and one for its answer."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple


class Cell(NamedTuple):
    """So many sequences decode so many tokens each; `context` tokens are there at the middle of that."""

    batch: int
    context: int
    new_tokens: int
    seed: int = 0

    @property
    def prompt_len(self) -> int:
        return self.context - self.new_tokens // 2

    def most_tokens(self, step_tokens: int) -> int:
        """Tokens that a sequence must be allowed where a step takes so many prompt tokens: others start later."""
        return self.new_tokens + math.ceil(self.batch * self.prompt_len / step_tokens) + 1

    def prompts(self, vocab_size: int, count: int | None = None) -> list[list[int]]:
        """Random prompts, the same for every peer: the first `count` of the batch, by default all.

        A generator of its own and no library's: peers bring NumPy and torch in versions that may differ.
        """
        state, prompts = self.seed * 7919 + self.context * 31 + 1, []
        for _ in range(self.batch if count is None else min(count, self.batch)):
            prompt = []
            for _ in range(self.prompt_len):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                prompt.append((state >> 33) % (vocab_size - 1000) + 1000)  # special tokens come first
            prompts.append(prompt)
        return prompts


class Answer(NamedTuple):
    """What one run of a cell took.

    Attributes
    ----------
    decode_tokens_per_s : float
        While all sequences decoded.
    prefill_tokens_per_s : float
        Prompt tokens over the seconds until all computed prompts had a first token.
    tokens : list of int
        Generated for the first prompt; none where a peer tells text alone.
    """

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    tokens: list[int]


class StepClock:
    """Times an engine that is stepped by hand: until all sequences have a token, then until one has all of its own.

    Parameters
    ----------
    cell : Cell
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._steps = 0
        self._began = time.perf_counter()
        self._all_began = self._ended = 0.0

    def step_done(self, num_with_tokens: int) -> bool:
        """Whether enough steps were timed; call it after each step with the sequences that have begun to decode."""
        now = time.perf_counter()
        if not self._all_began:
            self._all_began = now if num_with_tokens == self._cell.batch else 0.0
        else:
            self._steps, self._ended = self._steps + 1, now
        return self._steps == self._cell.new_tokens - 1

    def answer(self, tokens: list[int]) -> Answer:
        """Rates."""
        decode = self._cell.batch * self._steps / (self._ended - self._all_began)
        prefill = self._cell.batch * self._cell.prompt_len / (self._all_began - self._began)
        return Answer(decode, prefill, tokens[: self._cell.new_tokens])


def serve(load: Callable[[dict[str, str], int], Callable[[Cell], Answer]]) -> None:
    """Answer cells until there are no more.

    Parameters
    ----------
    load : callable
        Takes paths of the model by form (``hf``, ``gguf``) and the number of threads; returns what runs a cell.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like
    run = load(json.loads(sys.argv[1]), int(sys.argv[2]))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = run(Cell(*json.loads(line)))._asdict()
        except Exception as error:  # whatever a peer raises is this cell's result
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
