"""How many R-workers, what batch, which schedule: from a profile, before any machine is booked."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np

from fastdecode_hpc.config import DTYPE_BYTES, ConfigError, RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.costs import Costs, wire_row_bytes
from fastdecode_hpc.planner.lengths import Lengths, check_lengths
from fastdecode_hpc.planner.population import Population
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.planner.prompts import PromptWork
from fastdecode_hpc.planner.room import Room
from fastdecode_hpc.planner.steady import SteadyStep, steady_step, weighted
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.schedule.load_stabilizing import choose_interval
from fastdecode_hpc.schedule.shares import Shares
from fastdecode_hpc.setup import KV_SHARE

ENOUGH = 0.97  # of the most tokens/s that any batch gives: a larger batch than needed only adds latency
PAYS = 0.05  # by how much one more socket must raise tokens/s
HURTS = 0.005
SIZES_AN_OCTAVE = 3  # batches that are tried between one and its double


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be planned for.

    Attributes
    ----------
    lengths : tuple of Lengths
        Of the job's sequences, or of some that are like them.
    latency_target_s : float, optional
        Longest time that any sequence may decode.
    price_s, price_r : float, optional
        Of rank 0's machine and of a socket, an hour.
    r_memory_bytes : float, optional
        Memory of a socket, if other than the profile's.
    """

    lengths: tuple[Lengths, ...]
    latency_target_s: float | None = None
    price_s: float | None = None
    price_r: float | None = None
    r_memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What is best with a number of R-workers, and what it gives.

    Attributes
    ----------
    num_workers, batch_size : int
    tokens_per_s : float
    step : SteadyStep
        Mean over the steps of a run.
    peak_step_s : float
        Of the longest step: at the end of a batch that started together, or the same as any under the
        load-stabilizing schedule.
    limited_by : str
        ``S-Part``, ``R-Part`` or ``network``, whichever is busy for longest; or why no larger batch was taken, which
        would give more: ``KV memory``, ``latency target``, ``rows measured``.
    cost_per_million : float or None
        Price of a million tokens.
    """

    num_workers: int
    batch_size: int
    tokens_per_s: float
    step: SteadyStep
    peak_step_s: float
    limited_by: str
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class GpuOnly:
    """An engine that keeps the KV cache on rank 0's device, at its best: no step lost, no memory wasted."""

    batch_size: int
    tokens_per_s: float
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A proposal, and the table that it is chosen from.

    Attributes
    ----------
    best : Choice
    choices : list of Choice
        For 1 R-worker and up; numbers with which nothing fits are left out.
    stops_paying_at, hurts_at : int or None
        First number of R-workers that gives hardly more tokens/s than one less, and first that gives less.
    mean_load : float
        Tokens read in a step, averaged over layers and steps.
    start_interval, load_limit : int
        Of the load-stabilizing schedule; see `Population` for the limit.
    balance_workers : float
        R-workers with which both parts take equally long at the proposed batch (the paper's equation 11).
    transfer_ratio : float
        KV bytes read over bytes sent, of all rows of a step.
    gpu_only : GpuOnly or None
        None where the profile does not know the device's memory and bandwidth.
    """

    best: Choice
    choices: list[Choice]
    stops_paying_at: int | None
    hurts_at: int | None
    mean_load: float
    start_interval: int
    load_limit: int
    balance_workers: float
    transfer_ratio: float
    gpu_only: GpuOnly | None


class Planner:
    """Plans runs of one model on one profile.

    Parameters
    ----------
    profile : Profile
    model : ModelConfig
    config : RunConfig
        Types, slots and schedule count.
    wish : Wish

    Attributes
    ----------
    population : Population
    layout : KVLayout
    room : Room

    Raises
    ------
    ConfigError
        If the sequences are longer than the model allows, or the profile has no R-workers of their own.
    """

    def __init__(self, profile: Profile, model: ModelConfig, config: RunConfig, wish: Wish) -> None:
        check_lengths(wish.lengths, model)
        if profile.is_one_process:
            raise ConfigError(
                f"profile {profile.name} was measured in one process, in which nothing overlaps; calibrate with at "
                "least two ranks to plan for R-workers"
            )
        self.profile, self.model, self.config, self.wish = profile, model, config, wish
        self.population = Population(wish.lengths)
        self._costs = Costs(profile, model, config, num_workers=1)
        self.layout: KVLayout = self._costs.layout
        self._tables = self._costs.read_tables(self.population.longest)
        self._phases = self.population.phases(self._tables, starts_together=config.schedule == "greedy")
        self._loads = self.layout.loads(np.arange(self.population.longest + 1)) / model.num_layers
        self.room = Room(profile, model, self.layout, self.population, wish.r_memory_bytes)
        self._prompts = PromptWork(self._costs, config, self.population)

    def plan(self, max_workers: int = 16) -> Plan:
        """The best choice of each number of R-workers up to `max_workers`, and the one to take."""
        found = [self.choose(count) for count in range(1, max_workers + 1)]
        choices = [choice for choice in found if choice is not None]
        if not choices:
            raise ConfigError(self.room.refusal())
        best = self._best(choices)
        interval = choose_interval(
            self.population.mean_steps,
            max_batch_size=best.batch_size,
            spread=self.config.num_slots * best.num_workers,
        )
        return Plan(
            best,
            choices,
            stops_paying_at=_first_gain_below(choices, PAYS),
            hurts_at=_first_gain_below(choices, -HURTS),
            start_interval=interval,
            mean_load=best.batch_size * self.population.mean_of_rows(self._loads),
            load_limit=self.population.load_limit(self._loads, best.batch_size, interval),
            balance_workers=self._balance(best),
            transfer_ratio=self._transfer_ratio(),
            gpu_only=self.gpu_only(),
        )

    def shares(self, choice: Choice) -> Shares:
        """What each R-worker gets of the load, and why."""
        costs = Costs(self.profile, self.model, self.config, num_workers=choice.num_workers)
        return costs.shares(choice.batch_size / self.config.num_slots, self.population.mean_context)

    def sequences(self, choice: Choice) -> dict[int, int]:
        """How many each R-worker gets of the batch, by rank."""
        costs = Costs(self.profile, self.model, self.config, num_workers=choice.num_workers)
        room, context_len = self.room.of_each(choice.num_workers), self.population.mean_context
        dealt = costs.deal_batch(choice.batch_size, self.config.num_slots, context_len, room)
        return dict(zip(costs.owners, np.sum(dealt, axis=0).tolist(), strict=True))

    def choose(self, num_workers: int) -> Choice | None:
        """The best batch for so many R-workers; None if not one sequence fits."""
        by_memory = self.room.of_all(num_workers)
        if not by_memory:
            return None
        # Beyond the rows that were measured nobody knows what the S-Part takes.
        known = self.config.num_slots * int(self.profile.s_part.layer.x[-1])
        sizes = _batch_sizes(min(by_memory, known))
        tried = [self._evaluate(num_workers, size) for size in sizes]
        in_time = [choice for choice in tried if self._is_in_time(choice)]
        longest = self.population.longest_steps
        if not in_time:
            raise ConfigError(
                f"a latency target of {self.wish.latency_target_s:g} s is too short: the {longest} steps of the "
                f"longest sequence take {tried[0].step.step_s * longest:.3g} s with {num_workers} R-workers"
            )
        most = max(choice.tokens_per_s for choice in in_time)
        chosen = next(choice for choice in in_time if choice.tokens_per_s >= ENOUGH * most)
        if chosen is not in_time[-1]:
            return chosen
        why = "KV memory" if by_memory <= known else "rows measured"
        return dataclasses.replace(chosen, limited_by=why if len(in_time) == len(tried) else "latency target")

    def gpu_only(self) -> GpuOnly | None:
        """What an engine would give that keeps the cache on the device."""
        device = self.profile.s_part
        if not device.memory_bytes or not device.read_bandwidth:
            return None
        weights = self.model.num_weights * DTYPE_BYTES["fp16"]
        room = KV_SHARE * device.memory_bytes - weights
        batch = int(room // self._row_bytes)
        if batch < 1:
            return GpuOnly(0, 0.0, None)
        read = batch * self._row_bytes / device.read_bandwidth
        step = self.model.num_layers * self._costs.s_layer(batch) + read + self._prompts.step_s(batch, batch)
        rate = batch * self.population.tokens_a_row / step
        return GpuOnly(batch, rate, self._price(rate, 0))

    @property
    def _row_bytes(self) -> float:
        """Bytes of K and V that a row reads in a step, mean over rows."""
        tables = zip(self.layout.main_groups, self._tables, strict=True)
        return sum(len(group.layers) * self.population.mean_of_rows(table) for group, table in tables)

    def _evaluate(self, num_workers: int, batch_size: int) -> Choice:
        steps = [(phase.weight, self._steady(num_workers, batch_size, phase.reads)) for phase in self._phases]
        mean = weighted(steps)
        rate = batch_size * self.population.tokens_a_row / mean.step_s
        return Choice(
            num_workers,
            batch_size,
            rate,
            mean,
            max(step.step_s for _, step in steps),
            mean.limited_by,
            self._price(rate, num_workers),
        )

    def _steady(self, num_workers: int, batch_size: int, reads: Ordered[float]) -> SteadyStep:
        together = self.config.num_slots * num_workers if self.config.schedule == "load-stabilizing" else 1
        return steady_step(
            self.profile,
            self.model,
            self.config,
            num_workers=num_workers,
            batch_size=batch_size,
            context_len=self.population.mean_context,
            reads=reads,
            room=self.room.of_each(num_workers),
            prefill_s=self._prompts.step_s(batch_size, together),
            prefill_bytes=self._prompts.step_bytes(batch_size),
        )

    def _transfer_ratio(self) -> float:
        """As `transfer_ratio`, over the rows of a step."""
        return self._row_bytes / (self.model.num_layers * wire_row_bytes(self.model, self.config.wire_dtype))

    def _is_in_time(self, choice: Choice) -> bool:
        target = self.wish.latency_target_s
        return target is None or choice.step.step_s * self.population.longest_steps <= target

    def _best(self, choices: list[Choice]) -> Choice:
        """The cheapest, or without prices the last one whose socket pays."""
        if choices[0].cost_per_million is not None:
            return min(choices, key=lambda choice: choice.cost_per_million or math.inf)
        wasted = _first_gain_below(choices, PAYS)
        return next((choice for choice in choices if choice.num_workers + 1 == wasted), choices[-1])

    def _balance(self, choice: Choice) -> float:
        return choice.num_workers * choice.step.r_part / choice.step.s_part

    def _price(self, tokens_per_s: float, num_workers: int) -> float | None:
        if self.wish.price_s is None or self.wish.price_r is None:
            return None
        an_hour = self.wish.price_s + num_workers * self.wish.price_r
        return an_hour / (tokens_per_s * 3600) * 1e6


def _first_gain_below(choices: Ordered[Choice], gain: float) -> int | None:
    """First number of R-workers whose tokens/s over those of one less do not reach `gain`."""
    for before, choice in itertools.pairwise(choices):
        if choice.tokens_per_s < before.tokens_per_s * (1 + gain):
            return choice.num_workers
    return None


def _batch_sizes(largest: int) -> list[int]:
    """Batches to try, increasing: some in each octave, and the largest."""
    count = math.ceil(SIZES_AN_OCTAVE * math.log2(largest)) if largest > 1 else 0
    sizes = {round(2 ** (i / SIZES_AN_OCTAVE)) for i in range(count)}
    return sorted({size if size < 16 else size // 8 * 8 for size in sizes} | {largest})
