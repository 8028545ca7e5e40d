"""How long a step takes at best under the pipeline's order, given what its stages take. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode_hpc.schedule.pipeline import Stage, pipeline

SETTLING_STEPS = 16  # after which steps take as long as those before, but for what one part is still ahead
COUNTED_STEPS = 16


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the stages of one slot take, in seconds.

    Attributes
    ----------
    s_layer : float
        `post_attention` of a layer and `pre_attention` of the next.
    s_turn : float
        What the stage between two steps takes beyond that: logits, sampling, the plan.
    r_layer : float
        Attention of one layer, of the slowest R-worker.
    """

    s_layer: float
    s_turn: float
    r_layer: float


def best_step_time(slots: list[StageTimes], num_layers: int, *, message_s: float = 0.0) -> float:
    """Seconds of one step of all slots when the pipeline has settled.

    Parameters
    ----------
    slots : list of StageTimes
    num_layers : int
    message_s : float
        What a message takes one way.

    Notes
    -----
    Both parts walk `pipeline` in order; a stage begins when the part is free and what it needs has arrived. So the
    S-Part of a slot waits for its own attention only, and a part idles where its stage is shorter than what it waits
    for.
    """
    s_free = r_free = 0.0
    out_at = [0.0] * len(slots)  # when the output of each slot's last attention is at the S-worker
    begun: list[float] = []  # of each step
    for stage in pipeline(num_layers, len(slots)):
        if stage.layer == 0 and stage.slot == 0:
            begun.append(max(s_free, out_at[0]))
            if len(begun) > SETTLING_STEPS + COUNTED_STEPS:
                break
        times = slots[stage.slot]
        s_free = max(s_free, out_at[stage.slot]) + _s_time(times, stage)
        r_free = max(r_free, s_free + message_s) + times.r_layer
        out_at[stage.slot] = r_free + message_s
    settled = (begun[-1] - begun[SETTLING_STEPS]) / COUNTED_STEPS
    s_part = sum(num_layers * times.s_layer + times.s_turn for times in slots)
    r_part = sum(num_layers * times.r_layer for times in slots)
    return max(settled, s_part, r_part)


def _s_time(times: StageTimes, stage: Stage) -> float:
    return times.s_layer + (times.s_turn if stage.layer == 0 else 0.0)
