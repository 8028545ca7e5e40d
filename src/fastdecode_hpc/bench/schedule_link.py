"""What shares that follow the links are worth, where one R-worker has a slow one."""

from __future__ import annotations

import dataclasses
import sys

from fastdecode_hpc.bench.figures import Figures, add_spread
from fastdecode_hpc.bench.measure import Spread, ratios
from fastdecode_hpc.bench.schedule_lives import steady_window
from fastdecode_hpc.bench.schedule_session import Recording, ScheduleSession, SlowLinks
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.transport.slow_link import SlowLink

SLOW_LINK = "slow-link"
SLOWER = 5  # times, the link of the last R-worker
PROMPT_LEN, NEW_TOKENS, GENERATIONS = 128, 32, 4
PROBE_STEPS = 8
WAYS = ("equal", "auto")  # of --r-worker-weights


class SlowLinkCase:
    """Whole generations over links that the transport slows down, with equal shares and with those that follow links.

    Parameters
    ----------
    session : ScheduleSession
    run : RunConfig
    rounds : int

    Notes
    -----
    Through the links of all R-workers but the last one, q, k, v and o of an equal share pass in the time that a stage
    takes without: a link as fast as the rest of the machine. The last one is five times slower. The first generation is
    placed before anything has been measured and does not count.
    """

    def __init__(self, session: ScheduleSession, run: RunConfig, *, rounds: int) -> None:
        self.session, self.rounds = session, rounds
        self.run = dataclasses.replace(run, r_worker_weights="equal")

    def measure(self) -> Figures:
        """Tokens/s both ways and their ratio, round by round."""
        window = self.session.steady(self.run, PROMPT_LEN + NEW_TOKENS // 2, PROBE_STEPS)
        owners = self.session.num_owners(self.run)
        stage_s = window.step_s / (window.num_layers * window.num_slots)
        share_bytes = self.session.row_bytes(self.run) * self.run.max_batch_size / self.run.num_slots / owners
        links = self._links(owners, share_bytes / stage_s)
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        last: dict[str, Recording] = {}
        for index in range(self.rounds):
            for way in WAYS:
                last[way] = self._record(way, links)
                rates[way].append(steady_window(last[way]).tokens_per_s)
            print(f"bench: slow link, round {index + 1} of {self.rounds}", file=sys.stderr, flush=True)
        row: Figures = {"name": SLOW_LINK, "batch": self.run.max_batch_size, "num_workers": owners, "slower": SLOWER}
        row["stage_without_links_s"] = stage_s
        row["link_bytes_per_s"] = share_bytes / stage_s
        for way in WAYS:
            add_spread(row, f"tokens_per_s_{way}", Spread.of(rates[way]))
        row["share_of_slow"] = _share(last["auto"], owners)
        add_spread(row, "speedup_over_equal", ratios(rates["auto"], rates["equal"]))
        return row

    def _links(self, owners: int, bytes_per_s: float) -> SlowLinks:
        fast, slow = SlowLink(bytes_per_s), SlowLink(bytes_per_s / SLOWER)
        return (*((rank, fast) for rank in range(1, owners)), (owners, slow))

    def _record(self, way: str, links: SlowLinks) -> Recording:
        run = dataclasses.replace(self.run, r_worker_weights=way)
        lengths = [(PROMPT_LEN, NEW_TOKENS)] * (GENERATIONS * run.max_batch_size)
        return self.session.decode(run, lengths, slow_links=links)


def _share(recording: Recording, rank: int) -> float:
    """Of all rows those of one R-worker, after the first generation."""
    steps = steady_window(recording).steps
    return sum(step.rank_rows.get(rank, 0) for step in steps) / sum(step.num_rows for step in steps)
