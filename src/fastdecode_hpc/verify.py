"""`--verify`: which finished requests are recomputed, and what is said of the outcome; pure."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")

TOLERANCE_NATS = {"fp32": 1e-3, "fp16": 0.1, "bf16": 1.0, "int8": 1.0, "int4": 6.0}
"""Per type of S-Part, wire or cache: 2.5 to 20 times the largest error of a log-probability that was measured.

Largest error and margin over 2400 tokens of a tiny random model whose logits lie far apart (tests/tiny_models.py), and
errors of SmolLM2-135M over 288 to 1024 tokens: fp32 2e-5, 0; 5e-5. fp16 0.04, 0.007; 0.007. bf16 (wire and cache) 0.2,
0.13; 0.02. int8 0.4, 0.3; 0.08. int4 was not measured so: it changes the likeliest token 8 times as often as int8
(docs/fidelity.md), so it has about 8 times the measured error of int8, times 2. Corruption is far above: a zeroed
attention output or a foreign token gives several nats.
"""


def tolerance_nats(dtypes: Collection[str]) -> float:
    """Largest margin and log-probability error that rounding to these types explains."""
    return max(TOLERANCE_NATS[dtype] for dtype in dtypes)


class Reservoir(Generic[T]):
    """Keeps a uniform sample of all items that are offered, however many come.

    Each item draws a number from (seed, index) and the smallest stay: so which ones these are depends neither on the
    order in which they come nor on how many ranks the run has.

    Parameters
    ----------
    size : int
        Most items that are kept.
    seed : int
        Another seed is another sample.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._heap: list[tuple[float, int, T]] = []  # (-drawn number, -index, item): the largest number on top

    def offer(self, index: int, item: T) -> None:
        """Offer an item; `index` names it."""
        drawn = random.Random(self.seed << 64 | index).random()
        heapq.heappush(self._heap, (-drawn, -index, item))
        if len(self._heap) > self.size:
            heapq.heappop(self._heap)

    @property
    def items(self) -> list[T]:
        """The sample so far, by index."""
        return [item for _, _, item in sorted(self._heap, key=lambda entry: -entry[1])]


@dataclass(frozen=True, slots=True)
class Difference:
    """An output token that the reference would not have chosen."""

    position: int  # among the output's tokens, from 0
    token: int  # of the run
    reference_token: int
    logprob: float  # of the run's token in the reference, natural logarithm, after penalties
    reference_logprob: float  # of the reference's token in the reference
    margin: float  # nats: how wrong logits must be, one against another, to explain the run's token

    def __str__(self) -> str:
        return (
            f"at position {self.position}: token {self.token}, reference {self.reference_token} "
            f"(log-probabilities {self.logprob:.4f} and {self.reference_logprob:.4f}), margin {self.margin:.2g} nats"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None."""
        return {name: _number(getattr(self, name)) for name in self.__slots__}


@dataclass(slots=True)
class Comparison:
    """One output beside the reference, which was given the run's own tokens at every position."""

    num_tokens: int
    num_differing: int = 0
    first: Difference | None = None
    largest: Difference | None = None  # of the largest margin
    logprob_error: float | None = None  # largest, of the run's recorded log-probabilities; None: it recorded none

    @property
    def margin(self) -> float:
        """The largest one; 0 where all tokens agree."""
        return 0.0 if self.largest is None else self.largest.margin

    def add(self, difference: Difference) -> None:
        """Count a difference; they come in order of position."""
        self.num_differing += 1
        self.first = self.first or difference
        if self.largest is None or difference.margin > self.largest.margin:
            self.largest = difference

    def add_logprob_error(self, error: float) -> None:
        """Take account of one recorded log-probability."""
        self.logprob_error = max(error, self.logprob_error or 0.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one choice of a request."""

    index: int  # of the request
    custom_id: str | None
    choice: int
    comparison: Comparison

    @property
    def is_exact(self) -> bool:
        """Whether every token is the reference's."""
        return self.comparison.num_differing == 0

    def agrees(self, tolerance: float) -> bool:
        """Whether rounding explains whatever differs; `tolerance` in nats."""
        return max(self.comparison.margin, self.comparison.logprob_error or 0.0) <= tolerance

    def __str__(self) -> str:
        found, name = self.comparison, "" if self.custom_id is None else f", custom_id {self.custom_id!r}"
        text = f"request {self.index} (choice {self.choice}{name}): "
        text += f"{found.num_differing} of {found.num_tokens} tokens differ"
        if found.first is not None and found.largest is not None:
            text += f", the first {found.first}"
            if found.largest is not found.first:
                text += f"; the largest margin {found.largest}"
        if found.logprob_error is not None:
            text += f"; recorded log-probabilities are off by up to {found.logprob_error:.2g} nats"
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.comparison
        return {
            "index": self.index,
            "custom_id": self.custom_id,
            "choice": self.choice,
            "tokens": found.num_tokens,
            "differing_tokens": found.num_differing,
            "logprob_error": _number(found.logprob_error),
            "first": None if found.first is None else found.first.as_dict(),
            "largest": None if found.largest is None else found.largest.as_dict(),
        }


@dataclass(slots=True)
class Verification:
    """The verdicts of a run."""

    tolerance: float  # nats
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return len({verdict.index for verdict in self.verdicts})

    @property
    def margin(self) -> float:
        """The largest of all, nats."""
        return max((verdict.comparison.margin for verdict in self.verdicts), default=0.0)

    @property
    def logprob_error(self) -> float | None:
        """The largest of all, nats; None where no log-probabilities were recorded."""
        errors = [v.comparison.logprob_error for v in self.verdicts if v.comparison.logprob_error is not None]
        return max(errors, default=None)

    @property
    def num_wrong(self) -> int:
        """Requests with a choice that rounding does not explain."""
        return len({verdict.index for verdict in self.verdicts if not verdict.agrees(self.tolerance)})

    def lines(self) -> Iterator[tuple[bool, str]]:
        """What to log: whether it is a warning, and the text. A line for each choice that differs, then the whole."""
        for verdict in self.verdicts:
            is_wrong = not verdict.agrees(self.tolerance)
            if is_wrong or not verdict.is_exact:
                yield is_wrong, f"verify: {verdict}"
        yield self.num_wrong > 0, f"verify: {self._summary()}"

    def _summary(self) -> str:
        if not self.verdicts:
            return "no request was recomputed"
        if self.num_wrong:
            errors = (
                "" if self.logprob_error is None else f", the largest log-probability error {self.logprob_error:.2g}"
            )
            return (
                f"WARNING: {self.num_wrong} of {self.num_requests} requests differ by more than rounding explains "
                f"({self.tolerance:g} nats); the largest margin is {self.margin:.2g} nats{errors}"
            )
        count = sum(verdict.comparison.num_tokens for verdict in self.verdicts)
        text = f"{self.num_requests} requests, {count} tokens: all agree"
        num_ties = sum(verdict.comparison.num_differing for verdict in self.verdicts)
        if num_ties:
            text += (
                f", but for {num_ties} near-ties (largest margin {self.margin:.2g} nats; rounding explains "
                f"up to {self.tolerance:g})"
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "requests": self.num_requests,
            "tokens": sum(verdict.comparison.num_tokens for verdict in self.verdicts),
            "tolerance": self.tolerance,
            "wrong_requests": self.num_wrong,
            "differing_tokens": sum(verdict.comparison.num_differing for verdict in self.verdicts),
            "largest_margin": _number(self.margin),
            "logprob_error": _number(self.logprob_error),
            "differences": [verdict.as_dict() for verdict in self.verdicts if not self._is_clean(verdict)],
        }

    def _is_clean(self, verdict: Verdict) -> bool:
        return verdict.is_exact and verdict.agrees(self.tolerance)


def _number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
