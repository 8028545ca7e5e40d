"""Which share of the load each R-worker should carry, and why: its attention's speed and its link's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

import numpy as np

from fastdecode_hpc.schedule.speeds import LinkSpeeds, Turns, WorkerSpeeds
from fastdecode_hpc.schedule.worker_costs import WorkerCost, ideal_shares, told_costs
from fastdecode_hpc.timing import RankTimes, StepTimes

UNLIKE, ALIKE = 1.5, 1.25  # slowest over fastest link, above and below which they count as unlike and as alike
EVERY = 32  # steps of slots, between two looks at what they told
TELLS_FROM = 0.05  # difference of a share from an equal one that is worth a word
MAX_TOLD = 4  # R-workers
TELL_FACTOR = 1.1  # times the fastest's, from which attention or a link is named as the reason

EQUAL, TOLD, PROFILE, MEASURED = "equal", "told", "profile", "measured"  # where shares come from

_FIGURES = attrgetter("load_tokens", "num_rows", "t_r_part", "t_link")


class Shares:
    """What each R-worker's work costs, as far as a run knows: as told, from a profile, then as measured.

    Parameters
    ----------
    text : str
        ``--r-worker-weights``.
    owners : tuple of int
        Ranks of the R-workers.
    num_layers : int
    back_ratio : float
        Bytes of a row's output over those of its q, k, v.
    start : mapping of int to WorkerCost, optional
        Of a profile.
    latencies : mapping of int to float, optional
        Seconds of a short message to each, as far as known.
    num_rows, context_len : float
        Rows of a mini-batch and what each reads, as far as known before the first step.

    Notes
    -----
    What can be seen of a link is when q, k, v are at an R-worker that looks. The way back is taken to be as fast: its
    messages end together, when the last one is there. Links of which nothing was seen yet are what the profile says, or
    without one as fast as the fastest.

    Links that are about alike are left out, as rows cost the same everywhere then. Costs change slowly, belong to the
    machine rather than to the shares, and count for sequences to come, as none ever moves: shares can't swing.
    """

    def __init__(
        self,
        text: str,
        owners: tuple[int, ...],
        *,
        num_layers: int,
        back_ratio: float,
        start: Mapping[int, WorkerCost] | None = None,
        latencies: Mapping[int, float] | None = None,
        num_rows: float = 1.0,
        context_len: float = 1.0,
    ) -> None:
        self.source = EQUAL
        self.costs = told_costs(text, owners)
        self._owners, self._measures = owners, text == "auto"
        self._num_layers, self._back_ratio = num_layers, back_ratio
        self._start = dict(start or {}) if self._measures else {}
        self._speeds = WorkerSpeeds(len(owners))
        self._links = LinkSpeeds([(latencies or {}).get(rank, 0.0) for rank in owners])
        self._turns = Turns()
        self._are_unlike = False
        self._expected = num_rows, context_len
        self._rows = self._tokens = self._steps = 0.0  # so far, of all R-workers together
        self._num_observed = 0
        self._waiting: list[Mapping[int, RankTimes]] = []  # of steps that were observed and do not count yet
        if self.costs:
            self.source = TOLD
        elif self._start:
            self._update()

    def observe(self, times: StepTimes) -> None:
        """Take what a step of a slot tells.

        It counts after 1, 2, 4, ... steps, then after every `EVERY`: costs change slowly, and there may be hundreds of
        R-workers.
        """
        self._num_observed += 1
        self._steps += bool(times.num_rows)
        if times.ranks:
            self._waiting.append(times.ranks)
        if self._num_observed % EVERY == 0 or self._num_observed & (self._num_observed - 1) == 0:
            self.update()

    def update(self) -> None:
        """Take in what was observed and did not count yet."""
        if not self._waiting:
            return
        figures = np.array(
            [[_FIGURES(ranks[rank]) for rank in self._owners] for ranks in self._waiting], np.float64
        )  # [num_steps, num_workers, 4]
        self._waiting.clear()
        tokens, rows, t_r_part, t_link = np.moveaxis(figures, 2, 0)
        self._tokens += float(tokens.sum())
        self._rows += float(rows.sum())
        if self._measures:
            self._speeds.add(tokens, t_r_part)
            for turns in self._turns.take(rows, t_link):
                self._links.add(*turns)
            self._update()

    @property
    def has_seconds(self) -> bool:
        """Whether costs are in seconds."""
        return bool(self.costs) and self.source in (PROFILE, MEASURED)

    def ideal(self) -> dict[int, float]:
        """Shares to which the costs lead, for mini-batches as they were so far on average; they add up to 1."""
        self.update()
        costs = self.costs or dict.fromkeys(self._owners, WorkerCost())
        context_len = self._tokens / self._rows if self._rows else self._expected[1]
        return ideal_shares(costs, self._mean_rows() * len(costs), max(1.0, context_len))

    def describe(self) -> str:
        """The R-workers whose share should not be an equal one, least first, and why; empty where there are none."""
        shares = self.ideal()
        unequal = sorted((share, rank) for rank, share in shares.items() if abs(share * len(shares) - 1) >= TELLS_FROM)
        if not unequal:
            return ""
        told = [f"rank {rank} {share:.1%}{self._why(rank)}" for share, rank in unequal[:MAX_TOLD]]
        more = len(unequal) - len(told)
        return f"{self.source}: {', '.join(told)}" + (f" and {more} more" if more else "")

    def _why(self, rank: int) -> str:
        if self.source == TOLD:
            return ""
        least = min(cost.token_s for cost in self.costs.values())
        rows = self._mean_rows()
        fastest = min(cost.link_s(rows) for cost in self.costs.values())
        slow = self.costs[rank].token_s / least, self.costs[rank].link_s(rows) / fastest if fastest else 1.0
        words = [
            f"{what} {factor:.1f} times as long as the fastest"
            for what, factor in zip(("attention", "link"), slow, strict=True)
            if factor >= TELL_FACTOR
        ]
        return f" ({', '.join(words)})" if words else ""

    def _update(self) -> None:
        own, links = self._speeds.token_s(), self._links_known()
        measured = bool(own)
        token_s = (
            dict(zip(self._owners, own, strict=True))
            if own
            else {rank: cost.token_s for rank, cost in self._start.items()}
        )
        if links and self._differ(links):
            measured |= links is not self._start
            token_s = token_s or dict.fromkeys(self._owners, self._speeds.mean_token_s())
            self.costs = {rank: replace(links[rank], token_s=token_s[rank]) for rank in self._owners}
        else:
            self.costs = {rank: WorkerCost(seconds) for rank, seconds in token_s.items()}
        self.source = (MEASURED if measured else PROFILE) if self.costs else EQUAL

    def _links_known(self) -> dict[int, WorkerCost]:
        """Costs of links, attention left aside: as measured, before that from the profile."""
        seen = self._links.known()
        if not seen:
            return self._start
        both_ways = 1 + self._back_ratio
        costs = {
            self._owners[place]: WorkerCost(0.0, self._num_layers * both_ways * row_s, self._num_layers * 2 * latency)
            for place, (latency, row_s) in seen.items()
        }
        rows = self._mean_rows()
        fastest = min(costs.values(), key=lambda cost: cost.link_s(rows))
        return {rank: costs.get(rank, self._start.get(rank, fastest)) for rank in self._owners}

    def _differ(self, links: Mapping[int, WorkerCost]) -> bool:
        """Whether some link is slower than another one; what was found before takes more to be changed."""
        rows = self._mean_rows()
        seconds = [cost.link_s(rows) for cost in links.values()]
        self._are_unlike = max(seconds) > (ALIKE if self._are_unlike else UNLIKE) * min(seconds)
        return self._are_unlike

    def _mean_rows(self) -> float:
        """Rows of an R-worker in a step of a slot, were they dealt out evenly."""
        rows = self._rows / self._steps if self._rows else self._expected[0]
        return max(1.0, rows / len(self._owners))
