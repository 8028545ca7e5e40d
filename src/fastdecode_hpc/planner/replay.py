"""What a profile says about the steps that a real run had: the same rows and loads, on the profile's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.clock import PipelineClock
from fastdecode_hpc.planner.costs import Costs, SlotTimes
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.planner.walk import Walk
from fastdecode_hpc.schedule.pipeline import pipeline
from fastdecode_hpc.timing import StepTimes


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One step of one slot, as a report has it.

    Attributes
    ----------
    step, slot, num_rows, prefill_tokens : int
    rank_loads : mapping of int to int
        Tokens that each R-worker read, by its rank.
    """

    step: int
    slot: int
    num_rows: int
    prefill_tokens: int
    rank_loads: Mapping[int, int]


def replay(profile: Profile, model: ModelConfig, config: RunConfig, loads: Iterable[StepLoad]) -> list[StepTimes]:
    """Times of the same steps.

    Parameters
    ----------
    loads : iterable of StepLoad
        In the order of a report: by step, then slot.

    Returns
    -------
    list of StepTimes
        One for each, in the same order.

    Notes
    -----
    A report has what each R-worker read, not its rows: these are taken to be as many for each token everywhere. Prompts
    are computed at the start of the step that lists them.
    """
    wanted = {(load.step, load.slot): load for load in loads}
    workers = sorted({rank for load in wanted.values() for rank in load.rank_loads})
    costs = Costs(profile, model, config, num_workers=len(workers))
    clock = PipelineClock(profile, num_workers=len(workers), num_slots=config.num_slots)
    walk = Walk(costs, clock, num_slots=config.num_slots)
    found: dict[tuple[int, int], StepTimes] = {}
    for stage in pipeline(model.num_layers, config.num_slots):
        if stage.layer == 0:
            ended = walk.end_step(stage)
            if ended is not None:
                found[ended.step, ended.slot] = ended
            if len(found) == len(wanted):
                break
            load = wanted.get((stage.step, stage.slot))
            if load is not None:
                record = StepTimes(stage.step, stage.slot, 0.0, load.num_rows, 0, load.prefill_tokens)
                walk.begin_step(stage, _slot_times(costs, load, workers), record)
                record.t_prefill = _prefill_s(costs, load.prefill_tokens, config.prefill_chunk_tokens)
                clock.work(record.t_prefill)
        walk.visit(stage)
    return [found[key] for key in wanted]


def _slot_times(costs: Costs, load: StepLoad, workers: list[int]) -> SlotTimes | None:
    total = sum(load.rank_loads.values())
    if not load.num_rows or not total:
        return None
    loads = np.array([load.rank_loads.get(rank, 0) for rank in workers])
    borders = np.rint(np.cumsum(loads) / total * load.num_rows).astype(np.int64)
    rows = np.diff(borders, prepend=0)
    owners = np.repeat(np.arange(len(workers)), rows)
    contexts = [
        np.diff(np.linspace(0, read, count + 1).astype(np.int64)) for read, count in zip(loads, rows, strict=True)
    ]
    return costs.slot_times(np.concatenate(contexts), owners)


def _prefill_s(costs: Costs, tokens: int, chunk_tokens: int) -> float:
    """Seconds of so many prompt tokens, which lie in whole chunks and a rest."""
    chunks, rest = divmod(tokens, chunk_tokens)
    return costs.prompts_s([chunk_tokens] * chunks + [rest] * (rest > 0), chunk_tokens)
