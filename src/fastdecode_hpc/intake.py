"""From a request to a sequence that can run: tokenising, the limits of model and cache, what was clamped."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.sequence import Prompt, Request, Sequence


class RequestFailure(Exception):
    """A request cannot be run; its record carries `code` and the message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TokenizerLike(Protocol):
    """What is needed of `tokenizer.Tokenizer`."""

    @property
    def bos_token_id(self) -> int | None: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]: ...


@dataclass(slots=True)
class Accepted:
    """A request on its way: its sequences, one a choice, and what its record should mention."""

    request: Request
    seqs: list[Sequence]
    notes: list[str] = field(default_factory=list)
    num_ended: int = 0  # of the sequences
    t_read_s: float = 0.0  # since the run's start


class Intake:
    """Turns requests into sequences.

    Parameters
    ----------
    tokenizer : TokenizerLike or None
        None allows prompts of token ids only.
    placement : Placement or None
        Whose capacity bounds a sequence; None where no KV is held.
    vocab_size : int
        Of the model: a token id at or above it is refused.
    max_context_len : int
        Longest prompt plus output.
    seed : int
        Of requests that bring none.
    overlong : {"error", "truncate-left", "truncate-right"}
        What becomes of a prompt that leaves no room for a new token.
    merge_system : bool
        Where the chat template refuses a system message, put it before the first message of the user.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike | None,
        placement: Placement | None,
        *,
        vocab_size: int,
        max_context_len: int,
        seed: int,
        overlong: str = "error",
        merge_system: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.placement = placement
        self.vocab_size = vocab_size
        self.max_context_len = max_context_len
        self.seed = seed
        self.overlong = overlong
        self.merge_system = merge_system
        self._num_made = 0

    def accept(self, request: Request) -> Accepted:
        """Tokenise and check.

        Raises
        ------
        RequestFailure
            With the numbers and the way out.
        """
        notes = dict.fromkeys(request.notes)  # in order, each once
        prompts = [self._fit(ids, request.params.max_new_tokens, notes) for ids in self._tokenise(request, notes)]
        seqs: list[Sequence] = []
        for prompt_ids in prompts:
            asked, room = request.params.max_new_tokens, self.max_context_len - len(prompt_ids)
            if asked > room:
                notes[f"max_new_tokens clamped from {asked} to {room}"] = None
            for _ in range(request.params.n):
                seqs.append(self._make_sequence(request, prompt_ids, min(asked, room), len(seqs)))
            self._check_capacity(seqs[-1])
        self._check_bias(request)
        for known in filter(None, request.known_ids):
            self._check_ids(known)
        return Accepted(request, seqs, list(notes))

    def _make_sequence(self, request: Request, prompt_ids: list[int], max_new_tokens: int, choice: int) -> Sequence:
        self._num_made += 1
        seed, noise_key = noise_of(request, prompt_ids, self.seed)
        return Sequence(
            seq_id=self._num_made,
            index=request.index,
            prompt_ids=prompt_ids,
            params=request.params,
            max_new_tokens=max_new_tokens,
            choice=choice,
            seed=seed,
            noise_key=noise_key,
            forced_ids=request.known_ids[choice] if choice < len(request.known_ids) else (),
        )

    def _tokenise(self, request: Request, notes: dict[str, None]) -> Iterator[list[int]]:
        """Token ids of each prompt."""
        try:
            if request.messages is not None:
                yield self._encode_messages(request.messages, notes)
            for prompt in request.prompts:
                yield self._encode_prompt(prompt)
        except ConfigError:
            raise
        except ValueError as error:  # tokenizer.PromptError, which has a code
            raise RequestFailure(getattr(error, "code", "invalid_prompt"), str(error)) from None

    def _encode_prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, list):
            self._check_ids(prompt)
            return list(prompt)
        return self._known_tokenizer().encode_prompt(prompt)

    def _encode_messages(self, messages: list[dict[str, Any]], notes: dict[str, None]) -> list[int]:
        tokenizer = self._known_tokenizer()
        try:
            return tokenizer.encode_messages(messages)
        except ValueError:
            if not self.merge_system or (merged := merge_system(messages)) is None:
                raise
        notes["the system message was put before the first message of the user"] = None
        return tokenizer.encode_messages(merged)

    def _known_tokenizer(self) -> TokenizerLike:
        if self.tokenizer is None:
            raise RequestFailure("no_tokenizer", "this run has no tokenizer: give the prompt as a list of token ids")
        return self.tokenizer

    def _fit(self, ids: list[int], max_new_tokens: int, notes: dict[str, None]) -> list[int]:
        """The prompt, cut if it leaves no room for a token and may be cut."""
        self._check_ids(ids)
        longest = self.max_context_len - 1
        if len(ids) <= longest:
            return ids
        if self.overlong == "error":
            raise RequestFailure(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens; at most {longest} leave room for one new token in a context of "
                f"{self.max_context_len}; shorten it, or have it cut (--overlong truncate-left)",
            )
        kept = self.max_context_len - max(1, min(max_new_tokens, self.max_context_len // 2))
        notes[f"prompt cut from {len(ids)} to {kept} tokens ({self.overlong})"] = None
        if self.overlong == "truncate-right":
            return ids[:kept]
        bos = [] if self.tokenizer is None else [self.tokenizer.bos_token_id]
        head = ids[:1] if ids[:1] == bos else []
        return head + ids[len(ids) - kept + len(head) :]

    def _check_bias(self, request: Request) -> None:
        for token, _ in request.params.logit_bias:
            if token >= self.vocab_size:
                raise RequestFailure(
                    "invalid_token", f"logit_bias has token id {token}, outside the vocabulary 0..{self.vocab_size - 1}"
                )

    def _check_ids(self, prompt_ids: Seq[int]) -> None:
        if not prompt_ids:
            raise RequestFailure("empty_prompt", "the prompt has no tokens; give at least one")
        worst = max(prompt_ids)
        if worst >= self.vocab_size or min(prompt_ids) < 0:
            bad = worst if worst >= self.vocab_size else min(prompt_ids)
            raise RequestFailure("invalid_token", f"token id {bad} is outside the vocabulary 0..{self.vocab_size - 1}")

    def _check_capacity(self, seq: Sequence) -> None:
        if self.placement is None or self.placement.fits_ever(seq.max_context_len):
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


def noise_of(request: Request, prompt_ids: list[int], run_seed: int) -> tuple[int, int]:
    """Seed and key (64 bit) of the random numbers that a request's sequences draw.

    A seed of the request's own promises the same tokens for the same prompt wherever it stands; two prompts that share
    a seed still draw different numbers. With the run's seed, equal prompts must differ: the id tells them apart and,
    without one, the place in the input.
    """
    own, custom_id = request.params.seed, request.custom_id
    if own is not None:
        return own, _hash(array("q", prompt_ids).tobytes())
    return run_seed, request.index if custom_id is None else _hash(custom_id.encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Messages whose leading system message stands before the first one of the user; None where there are no such."""
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return None
    first = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return [first, *messages[2:]]
