"""Steps of a full batch that has settled, and what they spend their time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.clock import PipelineClock
from fastdecode_hpc.planner.costs import Costs
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.planner.walk import Walk
from fastdecode_hpc.schedule.pipeline import pipeline
from fastdecode_hpc.timing import StepTimes

SETTLING_STEPS, COUNTED_STEPS = 3, 3
WALKED_LAYERS = (4, 8)  # a step grows with layers along a straight line, once it has settled


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """One step of all slots, in seconds.

    Attributes
    ----------
    step_s : float
    s_part, r_part, network : float
        How long in it the S-worker, the busiest R-worker, and rank 0's link are at work.
    """

    step_s: float
    s_part: float
    r_part: float
    network: float

    @property
    def limited_by(self) -> str:
        """What is busy for longest."""
        shares = {"S-Part": self.s_part, "R-Part": self.r_part, "network": self.network}
        return max(shares, key=lambda name: shares[name])


def steady_step(
    profile: Profile,
    model: ModelConfig,
    config: RunConfig,
    *,
    num_workers: int,
    batch_size: int,
    context_len: float,
    room: Sequence[int] | None = None,
    prefill_s: float = 0.0,
) -> SteadyStep:
    """A step of `batch_size` sequences with `context_len` tokens each, the newest counted.

    Parameters
    ----------
    room : sequence of int, optional
        As of `Costs.deal_batch`.
    prefill_s : float
        What the S-worker spends on prompts in a step.
    """
    few, more = (min(layers, model.num_layers) for layers in WALKED_LAYERS)
    step = _walk(profile, replace(model, num_layers=more), config, num_workers, batch_size, context_len, room)
    if more < model.num_layers:
        less = _walk(profile, replace(model, num_layers=few), config, num_workers, batch_size, context_len, room)
        step = _extrapolate(less, step, (model.num_layers - more) / (more - few))
    return SteadyStep(
        # Prompts are computed between stages: they cost what the S-Part has not idled anyhow.
        max(step.step_s, min(step.step_s, step.s_part) + prefill_s),
        step.s_part + prefill_s,
        step.r_part,
        step.network,
    )


def _extrapolate(less: SteadyStep, more: SteadyStep, factor: float) -> SteadyStep:
    names = ("step_s", "s_part", "r_part", "network")
    return SteadyStep(*(getattr(more, n) + factor * (getattr(more, n) - getattr(less, n)) for n in names))


def _walk(
    profile: Profile,
    model: ModelConfig,
    config: RunConfig,
    num_workers: int,
    batch_size: int,
    context_len: float,
    room: Sequence[int] | None,
) -> SteadyStep:
    costs = Costs(profile, model, config, num_workers=num_workers)
    clock = PipelineClock(profile, num_workers=num_workers, num_slots=config.num_slots)
    walk = Walk(costs, clock, num_slots=config.num_slots)
    dealt = costs.deal_batch(batch_size, config.num_slots, context_len, room)
    rows = [int(counts.sum()) for counts in dealt]
    slots = [costs.even_slot_times(counts, context_len) if counts.any() else None for counts in dealt]
    begun: list[float] = []
    for stage in pipeline(model.num_layers, config.num_slots):
        if stage.layer == 0:
            walk.end_step(stage)
            if stage.slot == 0:
                begun.append(clock.s_free)
                if len(begun) > SETTLING_STEPS + COUNTED_STEPS:
                    break
            walk.begin_step(stage, slots[stage.slot], StepTimes(stage.step, stage.slot, 0.0, rows[stage.slot], 0, 0))
        walk.visit(stage)
    present = [times for times in slots if times is not None]
    num_layers = model.num_layers
    s_part = sum(num_layers * (t.s_layer + t.s_stage) + t.s_head + t.s_turn for t in present)
    r_part = np.zeros(num_workers)
    for t in present:
        r_part += t.r_turn + num_layers * t.r_stage
        for group, own in zip(costs.layout.main_groups, t.r_layers, strict=True):
            r_part += len(group.layers) * own
    per_byte = 1.0 / profile.network.s_bytes_per_s
    out = sum(float(t.qkv_bytes.sum()) for t in present) * num_layers * per_byte
    back = sum(float(t.out_bytes.sum()) for t in present) * num_layers * per_byte
    network = out + back if profile.network.is_blocking else max(out, back)
    if profile.network.is_blocking:
        s_part, r_part = s_part + network, r_part + network
    return SteadyStep(
        (begun[-1] - begun[SETTLING_STEPS]) / COUNTED_STEPS, float(s_part), float(r_part.max()), float(network)
    )
