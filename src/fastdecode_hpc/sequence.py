"""The words everything else uses: sampling settings, requests, sequences, mini-batches."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_LOGPROBS = 20
MAX_CHOICES = 128

Prompt = str | list[int]  # text or token ids


def _check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise `ValueError` unless `value` is a finite number in ``[low, high]`` (``(low, high]``)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if not is_number or value > high or value < low or value == math.inf or (open_low and value == low):
        bounds = f"{'above' if open_low else 'at least'} {low:g}"
        bounds += f" and at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name} is {value!r}; it must be a number {bounds}")


def _check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise `ValueError` unless `value` is an integer in ``[low, high]``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" + (f" and at most {high}" if high is not None else "")
        raise ValueError(f"{name} is {value!r}; it must be a whole number, {bounds}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued. The defaults are greedy.

    Parameters
    ----------
    max_new_tokens : int
        Most tokens to generate.
    temperature : float
        0 takes the most likely token; above 0 divides the logits before sampling.
    top_k, top_p, min_p
        Keep the `top_k` most likely tokens (0: all), then the smallest set of mass `top_p`, then those
        at least `min_p` times as likely as the most likely one.
    repetition_penalty : float
        Divides positive and multiplies negative logits of tokens seen in prompt or output.
    presence_penalty, frequency_penalty : float
        Taken off the logits of tokens in the output: the first once, the second as often as they are there.
    logit_bias : tuple of (int, float)
        Added to the logits of these tokens; -100 in effect bans one, 100 allows no other. A dict will do.
    n : int
        Outputs of each prompt.
    seed : int or None
        Key of the row's random numbers; None takes the run's.
    stop : tuple of str
        Generation ends before the first of these in the text.
    ignore_eos : bool
        Go on after an end-of-sequence token.
    logprobs : int or None
        Report the log-probability of each token and of this many most likely ones, as the model gives them: before
        bias, penalties, temperature and filters.

    Raises
    ------
    ValueError
        With the value and the allowed range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_whole("max_new_tokens", self.max_new_tokens, 1)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_whole("top_k", self.top_k, 0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Hashable, each token once, from a dict too.
        object.__setattr__(self, "logit_bias", tuple(dict(self.logit_bias).items()))
        for token, bias in self.logit_bias:
            _check_whole("a token of logit_bias", token, 0)
            _check_range(f"logit_bias of token {token}", bias, -100.0, 100.0)
        _check_whole("n", self.n, 1, MAX_CHOICES)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**64 - 1)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop is {list(self.stop)!r}; it must hold non-empty strings")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True)
class Request:
    """One input line that can be run: what to continue and how.

    Its answer has ``len(prompts) * params.n`` choices (one for `messages`, times n), those of the first prompt first.
    """

    index: int  # position among the non-blank lines of the input, from 0
    custom_id: str | None
    prompt: Prompt | list[Prompt] | None  # one or several; None where `messages` is given
    messages: list[dict[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    line: int = 0  # line number in the file, from 1
    return_token_ids: bool = False
    endpoint: str | None = None  # of an OpenAI batch line, which is answered in that API's form
    model: str | None = None  # as the batch line calls it
    content_hash: str = ""  # of the line
    notes: tuple[str, ...] = ()  # for the record: what of the line is ignored
    known_ids: tuple[tuple[int, ...], ...] = ()  # of each choice: tokens that an earlier run generated

    @property
    def is_batch_line(self) -> bool:
        """Whether it came, and is answered, in OpenAI's form."""
        return self.endpoint is not None

    @property
    def prompts(self) -> list[Prompt]:
        """Its prompts; empty where `messages` is given."""
        if self.prompt is None:
            return []
        if isinstance(self.prompt, str) or all(isinstance(token, int) for token in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one generated token and of the most likely ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenCounts:
    """Distinct tokens of a prompt and its output, kept up to date at the cost of one token a step.

    Attributes
    ----------
    ids : array of int
        The tokens, in the order of their first appearance.
    num_generated : array of int
        How often each stands in the output.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.ids = array("i", dict.fromkeys(prompt_ids))
        self.num_generated = array("i", [0]) * len(self.ids)
        self._places = {token: place for place, token in enumerate(self.ids)}
        self._num_counted = 0

    def catch_up(self, output_ids: list[int]) -> None:
        """Count the tokens that `output_ids`, which only grows, has more than last time."""
        for token in output_ids[self._num_counted :]:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.num_generated.append(0)
            self.num_generated[place] += 1
        self._num_counted = len(output_ids)


@dataclass(slots=True)
class Choice:
    """One output of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop | length
    logprobs: list[TokenLogprob] | None = None
    prompt_ids: list[int] = field(default_factory=list)  # that it goes on from, as tokenised


@dataclass(slots=True)
class Sequence:
    """One generation in progress: a choice of a request, its tokens and where its KV lives.

    `forced_ids` are tokens known beforehand: a rebuild prefills the prompt in the usual chunks and replays them as
    decode steps, so that every cached value is computed as it was the first time, and then goes on by itself.
    """

    seq_id: int
    index: int  # of the request
    prompt_ids: list[int]
    params: SamplingParams
    max_new_tokens: int  # clamped to the room that is left
    choice: int = 0
    seed: int = 0
    noise_key: int = 0  # with the seed: whose random numbers it draws, 64 bit
    forced_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    owner: int = -1  # rank of the R-worker that holds its KV
    finish_reason: str | None = None  # stop | length
    error: str | None = None
    t_admitted_s: float = 0.0
    t_first_token_s: float = 0.0
    t_finished_s: float = 0.0
    _counts: TokenCounts | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def context_len(self) -> int:
        """Tokens in the cache once the newest one has been appended."""
        return self.prompt_len + len(self.output_ids)

    @property
    def max_context_len(self) -> int:
        """Most tokens its cache may hold: the worst case plus one spare (a late stop string)."""
        return self.prompt_len + self.max_new_tokens + 1

    @property
    def forced_id(self) -> int | None:
        """The next token, if it is known beforehand."""
        place = len(self.output_ids)
        return self.forced_ids[place] if place < len(self.forced_ids) else None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def count_tokens(self) -> TokenCounts:
        """Its tokens that are penalised and how often each was generated; those of the prompt only for repetition."""
        if self._counts is None:
            self._counts = TokenCounts(self.prompt_ids if self.params.repetition_penalty != 1.0 else ())
        self._counts.catch_up(self.output_ids)
        return self._counts
