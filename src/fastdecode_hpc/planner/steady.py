"""Steps of a full batch that has settled, and what they spend their time on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.clock import PipelineClock
from fastdecode_hpc.planner.costs import Costs, kv_rates
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


@dataclass(frozen=True, slots=True)
class _Rows:
    num_workers: int
    batch_size: int
    context_len: float
    reads: Sequence[float]
    room: Sequence[int] | None


def steady_step(
    profile: Profile,
    model: ModelConfig,
    config: RunConfig,
    *,
    num_workers: int,
    batch_size: int,
    context_len: float,
    reads: Sequence[float] = (),
    room: Sequence[int] | None = None,
    prefill_s: float = 0.0,
    prefill_bytes: float = 0.0,
) -> SteadyStep:
    """A step of `batch_size` sequences with `context_len` tokens each, the newest counted.

    Parameters
    ----------
    reads : sequence of float, optional
        As of `Costs.even_slot_times`, of the whole model's layout.
    room : sequence of int, optional
        As of `Costs.deal_batch`.
    prefill_s : float
        What the S-worker spends on prompts in a step.
    prefill_bytes : float
        K and V of prompts that leave for R-workers in a step, all layers.
    """
    few, more = (min(layers, model.num_layers) for layers in WALKED_LAYERS)
    rows = _Rows(num_workers, batch_size, context_len, reads, room)
    if len({model.window_of(layer) for layer in range(model.num_layers)}) > 1:
        step = _walk(profile, model, config, rows)  # some layers read more than others: no straight line
    else:
        step = _walk(profile, replace(model, num_layers=more), config, rows)
        if more < model.num_layers:
            less = _walk(profile, replace(model, num_layers=few), config, rows)
            factor = (model.num_layers - more) / (more - few)
            step = weighted([(1 + factor, step), (-factor, less)])
    sent_s = prefill_bytes / profile.network.s_bytes_per_s
    shares = [prefill_bytes / num_workers / rates.bytes_per_s for rates in kv_rates(profile, config, num_workers)]
    s_part = step.s_part + prefill_s + (sent_s if profile.network.is_blocking else 0.0)
    r_part, network = step.r_part + max(shares), step.network + sent_s
    # Prompts are computed, sent and stored between stages: they cost what a part has not idled anyhow.
    spare_s = max(0.0, step.step_s - step.s_part)
    return SteadyStep(
        max(step.step_s + max(0.0, s_part - step.s_part - spare_s), r_part, network), s_part, r_part, network
    )


def weighted(steps: Iterable[tuple[float, SteadyStep]]) -> SteadyStep:
    """The sum of steps, each times a weight."""
    found = list(steps)
    return SteadyStep(
        *(sum(weight * getattr(step, spec.name) for weight, step in found) for spec in fields(SteadyStep))
    )


def _walk(profile: Profile, model: ModelConfig, config: RunConfig, rows: _Rows) -> SteadyStep:
    num_workers, num_slots = rows.num_workers, config.num_slots
    costs = Costs(profile, model, config, num_workers=num_workers)
    clock = PipelineClock(profile, num_workers=num_workers, num_slots=num_slots)
    walk = Walk(costs, clock, num_slots=num_slots)
    dealt = costs.deal_batch(rows.batch_size, num_slots, rows.context_len, rows.room)
    counts = [int(own.sum()) for own in dealt]
    slots = [costs.even_slot_times(own, rows.context_len, rows.reads) if own.any() else None for own in dealt]
    begun: list[float] = []
    for stage in pipeline(model.num_layers, num_slots):
        if stage.layer == 0:
            walk.end_step(stage)
            if stage.slot == 0:
                begun.append(clock.s_free)
                if len(begun) > SETTLING_STEPS + COUNTED_STEPS:
                    break
            walk.begin_step(stage, slots[stage.slot], StepTimes(stage.step, stage.slot, 0.0, counts[stage.slot], 0, 0))
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
