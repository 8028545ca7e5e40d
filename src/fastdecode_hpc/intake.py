"""From a request to a sequence that can run: tokenising, the limits of model and cache, what was clamped."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.sequence import Request, Sequence


class RequestFailure(Exception):
    """A request cannot be run; its record carries `code` and the message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TokenizerLike(Protocol):
    """What is needed of `tokenizer.Tokenizer`."""

    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]: ...


@dataclass(slots=True)
class Accepted:
    """A request on its way: its sequence and what its record should mention."""

    request: Request
    seq: Sequence
    notes: list[str] = field(default_factory=list)


class Intake:
    """Turns requests into sequences.

    Parameters
    ----------
    tokenizer : TokenizerLike or None
        None allows prompts of token ids only.
    placement : Placement
    vocab_size : int
        Of the model: a token id at or above it is refused.
    max_context_len : int
        Longest prompt plus output.
    seed : int
        Of requests that bring none.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike | None,
        placement: Placement,
        *,
        vocab_size: int,
        max_context_len: int,
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.placement = placement
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.seed = seed
        self._num_made = 0

    def accept(self, request: Request) -> Accepted:
        """Tokenise and check.

        Raises
        ------
        RequestFailure
            With the numbers and the way out.
        """
        prompt_ids = self._tokenise(request)
        self._check_ids(prompt_ids)
        room = self.max_context_len - len(prompt_ids)
        if room < 1:
            raise RequestFailure(
                "prompt_too_long",
                f"the prompt has {len(prompt_ids)} tokens; at most {self.max_context_len - 1} leave room for one "
                f"new token in a context of {self.max_context_len}",
            )
        asked = request.params.max_new_tokens
        notes = [f"max_new_tokens clamped from {asked} to {room}"] if asked > room else []
        seq = self._make_sequence(request, prompt_ids, min(asked, room))
        self._check_capacity(seq)
        return Accepted(request, seq, notes)

    def _make_sequence(self, request: Request, prompt_ids: list[int], max_new_tokens: int) -> Sequence:
        self._num_made += 1
        return Sequence(
            seq_id=self._num_made,
            index=request.index,
            prompt_ids=prompt_ids,
            params=request.params,
            max_new_tokens=max_new_tokens,
            seed=self.seed if request.params.seed is None else request.params.seed,
        )

    def _tokenise(self, request: Request) -> list[int]:
        if isinstance(request.prompt, list):
            return list(request.prompt)
        if self.tokenizer is None:
            raise RequestFailure("no_tokenizer", "this run has no tokenizer: give the prompt as a list of token ids")
        try:
            if request.messages is not None:
                return self.tokenizer.encode_messages(request.messages)
            assert isinstance(request.prompt, str)
            return self.tokenizer.encode_prompt(request.prompt)
        except ConfigError:
            raise
        except ValueError as error:  # tokenizer.PromptError, which has a code
            raise RequestFailure(getattr(error, "code", "invalid_prompt"), str(error)) from None

    def _check_ids(self, prompt_ids: Seq[int]) -> None:
        if not prompt_ids:
            raise RequestFailure("empty_prompt", "the prompt has no tokens; give at least one")
        worst = max(prompt_ids)
        if worst >= self.vocab_size or min(prompt_ids) < 0:
            bad = worst if worst >= self.vocab_size else min(prompt_ids)
            raise RequestFailure("invalid_token", f"token id {bad} is outside the vocabulary 0..{self.vocab_size - 1}")

    def _check_capacity(self, seq: Sequence) -> None:
        if self.placement.fits_ever(seq.max_context_len):
            return
        layout = self.placement.layout
        largest = max(
            sum(n * g.block_bytes(layout.block_size) for n, g in zip(blocks, layout.groups, strict=True))
            for blocks in self.placement.capacity.values()
        )
        raise RequestFailure(
            "kv_too_small",
            f"prompt ({seq.prompt_len} tokens) plus output ({seq.max_new_tokens}) need "
            f"{layout.bytes_for(seq.max_context_len)} bytes of KV cache, and the largest R-worker holds {largest}; "
            "raise --kv-memory-bytes or lower max_new_tokens",
        )
