"""Sequences of unequal lengths in a batch that is always full: what its rows read, hold and may come to read."""

from __future__ import annotations

import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.planner.lengths import Lengths
from fastdecode_hpc.schedule.kv_layout import KVLayout

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LIVES = 8  # mean lives of a sequence over which a batch that started together is followed
TICKS = 1024  # of the longest life
DEVIATIONS = 3  # of the load, that a limit leaves room for
LOOKED_AHEAD = 64  # places at which the expected load is looked at
# Gauss's rule of three points, over the loads of a run in increasing order.
GAUSS = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + math.sqrt(0.15), 5 / 18))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run.

    Attributes
    ----------
    weight : float
        Its share of the steps.
    reads : tuple of float
        What a row reads: a number for each layer group, in the units of the tables it was made from.
    """

    weight: float
    reads: tuple[float, ...]


class Population:
    """The sequences of a job, as they are found in a batch of B rows that never lacks any.

    Parameters
    ----------
    lengths : sequence of Lengths

    Raises
    ------
    ConfigError
        If no sequence decodes.

    Notes
    -----
    A sequence with a prompt of P tokens and O of output decodes for ``S = O - 1`` steps (its first token is prefill's),
    and reads ``P + a`` tokens in step ``a = 1 .. S``. Sequences start as others end, ``B / E[S]`` a step. Whoever looks
    at a row finds a long sequence more often than a short one, in proportion to S, and at any age alike. So the mean
    over rows of any f(context) is ::

        E_row[f] = sum_i sum_{a=1..S_i} f(P_i + a) / sum_i S_i

    With f the context that is ``(E[P S] + E[S (S + 1)] / 2) / E[S]``: E[S^2] / 2 E[S] for short prompts, which is half
    the length only where all are equal. It takes the place of S / 2 in the paper's equations 6 and 9 to 11. A window
    and a quantised cache have an f of their own. A reservation does not grow, so rows hold ``E[S need] / E[S]``
    (equation 9), and what may come from a start or an end, the load's limit (equation 6), is ::

        B (E_row[context] + F / 2) + M + 3 sqrt(B / E[S] * sum_a Var_i((P_i + a) [a <= S_i]))

    The root is 0 for equal lengths. Where outputs may become longer than they do, the load that is expected counts
    rows to their bounds: then B E_row is replaced by its maximum over the steps to come.
    """

    def __init__(self, lengths: Ordered[Lengths]) -> None:
        decoding = [entry for entry in lengths if entry.output_len > 1]
        if not decoding:
            raise ConfigError("every output is 1 token long, which prefill gives: nothing decodes, nothing is to plan")
        self.lengths = list(lengths)
        self.prompt_lens: Ints = np.array([entry.prompt_len for entry in decoding], np.int64)
        self.steps: Ints = np.array([entry.output_len - 1 for entry in decoding], np.int64)
        self.bounds: Ints = np.array([entry.bound - 1 for entry in decoding], np.int64)  # of steps

    @cached_property
    def mean_steps(self) -> float:
        """Decode steps of a sequence that decodes."""
        return float(self.steps.mean())

    @property
    def longest_steps(self) -> int:
        return int(self.steps.max())

    @property
    def is_even(self) -> bool:
        """Whether all sequences run equally long."""
        return bool(self.steps.min() == self.steps.max())

    @cached_property
    def mean_context(self) -> float:
        """Tokens in the cache of a row, the newest counted."""
        return self.mean_of_rows(np.arange(self.longest + 1))

    @cached_property
    def longest(self) -> int:
        """Most tokens that a row reads, at its bound."""
        return int((self.prompt_lens + self.bounds).max())

    @cached_property
    def starts_a_row(self) -> float:
        """Sequences that start for each row in each step, those counted that end with their prefill."""
        return len(self.lengths) / float(self.steps.sum())

    @cached_property
    def tokens_a_row(self) -> float:
        """Tokens of output for each row and step: one, and prefill's."""
        return sum(entry.output_len for entry in self.lengths) / float(self.steps.sum())

    def mean_of_rows(self, table: npt.NDArray[np.int64] | Floats) -> float:
        """Mean over rows of a function of the context, which stands in `table` from 0 tokens on."""
        total = np.cumsum(table)
        last = self.prompt_lens + self.steps
        return float((total[last] - total[self.prompt_lens]).sum() / self.steps.sum())

    def mean_blocks(self, layout: KVLayout) -> Floats:
        """Blocks that a row has reserved in each group of the layout, ``[num_groups]``."""
        totals = self.prompt_lens + self.bounds + 2  # all of the output, and a spare token
        found, places = np.unique(totals, return_inverse=True)
        needs = np.array([layout.worst_case(total) for total in found.tolist()], np.float64)
        return np.asarray(np.average(needs[places], axis=0, weights=self.steps), np.float64)

    def phases(self, tables: Ordered[Ints], *, starts_together: bool) -> list[Phase]:
        """What rows read in a run: phases with their weights, and where the load changes the heaviest step, weight 0.

        Parameters
        ----------
        tables : sequence of int64 arrays
            For each layer group what a context reads, from 0 tokens on.
        starts_together : bool
            All rows start in the first step, and others as those end; else ages are mixed from the first.
        """
        if not starts_together:
            return [Phase(1.0, tuple(map(self.mean_of_rows, tables)))]
        run = self._run(tables)
        order = np.argsort(run.sum(axis=1), kind="stable")
        found = [(weight, run[order[int(place * len(order))]]) for place, weight in GAUSS]
        return [Phase(weight, tuple(reads.tolist())) for weight, reads in (*found, (0.0, run[order[-1]]))]

    def _run(self, tables: Ordered[Ints]) -> Floats:
        """What a row reads on average in each tick of a run that starts together, ``[ticks, num_tables]``.

        Starts follow from ends: ``n(t) = sum_k n(t - k) share of those that live k ticks``.
        """
        width = -(-self.longest_steps // TICKS)  # steps of a tick
        lives = np.maximum(1, np.rint(self.steps / width)).astype(np.int64)
        ticks = max(int(lives.max()), int(lives.max()) if self.is_even else round(LIVES * float(lives.mean())))
        share = np.bincount(lives) / len(lives)
        starts = np.zeros(ticks)
        starts[0] = 1.0
        for tick in range(1, ticks):
            back = min(tick, len(share) - 1)
            starts[tick] = starts[tick - back : tick] @ share[back:0:-1]
        by_age = np.zeros((len(tables), int(lives.max())))
        pairs, counts = np.unique(np.stack([self.prompt_lens, lives]), axis=1, return_counts=True)
        for (prompt_len, life), count in zip(pairs.T.tolist(), counts.tolist(), strict=True):
            last = prompt_len + life * width
            for own, table in zip(by_age, tables, strict=True):
                seen = table[np.minimum(np.arange(prompt_len + 1, last + 1), len(table) - 1)]
                own[:life] += count * seen.reshape(life, width).mean(axis=1)
        return np.stack([np.convolve(starts, own / len(lives))[:ticks] for own in by_age], axis=1)

    def describe(self) -> str:
        """Lengths in words."""
        prompts, outputs = ([getattr(entry, name) for entry in self.lengths] for name in ("prompt_len", "output_len"))
        if len({*zip(prompts, outputs, strict=True)}) == 1:
            return f"{prompts[0]} + {outputs[0]} tokens a sequence"
        count = len(self.lengths)
        return (
            f"{count} lengths: {sum(prompts) / count:.1f} + {sum(outputs) / count:.1f} tokens a sequence, the longest "
            f"{max(entry.longest for entry in self.lengths)}; a row reads {self.mean_context:.1f} on average"
        )

    def load_limit(self, table: Floats, batch_size: int, interval: int) -> int:
        """A load that the load-stabilizing schedule stays below, in the units of `table`; see the class."""
        starts = batch_size / self.mean_steps
        spread = DEVIATIONS * math.sqrt(starts * self._variance(table))
        expected = batch_size * (self._expected_peak(table) + self._growth(table) * interval / 2)
        return math.ceil(expected + spread) + math.ceil(starts * interval)

    def _growth(self, table: Floats) -> float:
        """By how much a step makes a row's load larger, on average."""
        last = self.prompt_lens + self.steps
        return float((table[last] - table[self.prompt_lens]).sum() / self.steps.sum())

    def _expected_peak(self, table: Floats) -> float:
        """A row's share of the load that is expected at most, if all that run go on to their bounds."""
        total, top = np.cumsum(table), len(table) - 1
        peak = 0.0
        for ahead in np.unique(np.linspace(0, self.bounds.max(), LOOKED_AHEAD).astype(np.int64)).tolist():
            stop = np.minimum(self.steps + ahead, self.bounds)
            first = np.minimum(ahead, stop)
            load = total[np.minimum(self.prompt_lens + stop, top)] - total[np.minimum(self.prompt_lens + first, top)]
            peak = max(peak, float(load.sum() / self.steps.sum()))
        return peak

    def _variance(self, table: Floats) -> float:
        """Of a sequence's load at an age, summed over ages."""
        if self.is_even and self.prompt_lens.min() == self.prompt_lens.max():
            return 0.0
        by_age, squares = np.zeros((2, self.longest_steps))
        for prompt_len, steps in zip(self.prompt_lens.tolist(), self.steps.tolist(), strict=True):
            own = table[prompt_len + 1 : prompt_len + steps + 1]
            by_age[:steps] += own
            squares[:steps] += own * own
        return float((squares / len(self.steps) - (by_age / len(self.steps)) ** 2).sum())
