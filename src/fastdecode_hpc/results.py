"""What a run gives back: a completion for each request, totals, and the hooks through which it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastdecode_hpc.sequence import Choice, Request, TokenLogprob
from fastdecode_hpc.timing import StepTimes

if TYPE_CHECKING:
    from fastdecode_hpc.schedule.shares import Shares


@dataclass(slots=True)
class Completion:
    """What came of one request; `error` is its code and message where nothing usable did."""

    request: Request
    choices: list[Choice] = field(default_factory=list)  # of all prompts, in order
    prompt_tokens: int = 0
    notes: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None
    owner: int = -1  # rank that held the K and V of all choices; -1: unknown, or several
    t_read_s: float = 0.0  # since the run's start, as the other times
    t_admitted_s: float = 0.0
    t_first_token_s: float = 0.0
    t_finished_s: float = 0.0

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self._first.token_ids

    @property
    def finish_reason(self) -> str | None:
        """Of the first choice."""
        return self._first.finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Of the first choice."""
        return self._first.logprobs

    @property
    def _first(self) -> Choice:
        return self.choices[0] if self.choices else Choice()


@dataclass(slots=True)
class RunStats:
    """Totals of one run at rank 0. Only real tokens count: prompts as tokenised, tokens that were kept."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0  # of requests that were prefilled
    output_tokens: int = 0
    decode_tokens: int = 0  # output tokens that came out of decode steps: all but each sequence's first
    t_tokenise_s: float = 0.0
    t_prefill_s: float = 0.0
    t_run_s: float = 0.0
    num_saturated: int = 0
    stopped: bool = False
    shares: Shares | None = None  # of the R-workers, as they were at the end
    kv_huge_pages: dict[int, float] = field(default_factory=dict)  # by R-worker: share of its KV memory in use

    def of_ranks(self) -> dict[int, dict[str, Any]]:
        """What is to be told of each R-worker as a whole, by name."""
        found: dict[int, dict[str, Any]] = {rank: {"kv_huge_pages": x} for rank, x in self.kv_huge_pages.items()}
        if self.shares is not None:
            for rank, share in self.shares.ideal().items():
                cost = asdict(self.shares.costs[rank]) if self.shares.has_seconds else {}
                told = {"wanted_share": share, "shares_from": self.shares.source, **cost}
                found[rank] = found.get(rank, {}) | told
        return found

    def summary(self, load_s: float) -> dict[str, tuple[float, str]]:
        """Figures by name, each with its unit."""
        decode_s = max(self.t_run_s - self.t_prefill_s - self.t_tokenise_s, 1e-9)
        figures = {
            "load_time": (load_s, "s"),
            "tokenise_time": (self.t_tokenise_s, "s"),
            "prefill_time": (self.t_prefill_s, "s"),
            "run_time": (self.t_run_s, "s"),
            "num_requests": (self.num_requests, "1"),
            "num_errors": (self.num_errors, "1"),
            "prompt_tokens": (self.prompt_tokens, "tokens"),
            "output_tokens": (self.output_tokens, "tokens"),
            "prefill_tokens_per_s": (self.prompt_tokens / max(self.t_prefill_s, 1e-9), "tokens/s"),
            "decode_tokens_per_s": (self.decode_tokens / decode_s, "tokens/s"),
            "end_to_end_tokens_per_s": (self.output_tokens / max(self.t_run_s, 1e-9), "tokens/s"),
            "num_saturated": (self.num_saturated, "1"),
        }
        if self.kv_huge_pages:
            figures["kv_huge_pages"] = (min(self.kv_huge_pages.values()), "1")
        return figures


@dataclass(slots=True)
class Hooks:
    """What a run tells its caller, on rank 0."""

    on_completion: Callable[[Completion], None]
    on_token: Callable[[], None] = lambda: None
    on_step: Callable[[StepTimes], None] = lambda times: None
    stop_requested: Callable[[], bool] = lambda: False
    # Of a run that was stopped: a request that is not answered yet, and the tokens of each of its choices.
    on_parked: Callable[[Request, list[Sequence[int]]], None] = lambda request, choices: None
