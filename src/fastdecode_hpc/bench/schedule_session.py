"""The runs of ``fastdecode bench schedule`` on the ranks of one job: rank 0 decides, the others follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from fastdecode_hpc.bench.schedule_figures import Window, full_steps, solve_context
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.results import Completion, Hooks
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes

if TYPE_CHECKING:
    from fastdecode_hpc.transport.mpi import World

SETTLING_STEPS = 3  # after all sequences have started
PROBE_STEPS = 12


class ScheduleSession:
    """Engines with one and with two slots on all ranks, and runs of given lengths on them.

    Parameters
    ----------
    run : RunConfig
        Its `num_slots` does not count.
    world : World or None
        None: one process, in which nothing overlaps.
    slot_counts : sequence of int
        Engines to make.
    """

    def __init__(self, run: RunConfig, world: World | None, slot_counts: Sequence[int]) -> None:
        self.world = world
        self.engines = {
            count: Engine(dataclasses.replace(run, num_slots=count), world=world, given_kv=True)
            for count in slot_counts
        }
        self.batch = run.max_batch_size
        setup = next(iter(self.engines.values())).setup
        self.num_layers, self.max_context_len = setup.model.num_layers, setup.max_context_len

    def follow(self) -> None:
        """Be an R-worker for every run that rank 0 makes; returns after its `end`."""
        assert self.world is not None
        while (num_slots := self.world.bcast()) is not None:
            self.engines[num_slots].work()

    def end(self) -> None:
        """Let the other ranks go."""
        if self.world is not None:
            self.world.bcast(None)

    def decode(self, num_slots: int, lengths: Sequence[tuple[int, int]]) -> list[StepTimes]:
        """Decode sequences of these prompt and output lengths; the prompts' K and V are given.

        Returns
        -------
        list of StepTimes
            Of all steps of all slots.
        """
        engine = self.engines[num_slots]
        steps: list[StepTimes] = []
        if self.world is not None:
            self.world.bcast(num_slots)
        requests = (
            Request(index, None, [1] * prompt_len, params=SamplingParams(max_new_tokens=new, ignore_eos=True))
            for index, (prompt_len, new) in enumerate(lengths)
        )
        engine.run(requests, Hooks(_refuse_errors, on_step=steps.append))
        return steps

    def steady(self, num_slots: int, context: int, num_steps: int) -> Window:
        """Steps of a full batch whose sequences all have about `context` tokens."""
        new = num_steps + 2 * SETTLING_STEPS + 2
        prompt_len = min(max(1, context - new // 2), self.max_context_len - new - 1)
        steps = self.decode(num_slots, [(prompt_len, new)] * self.batch)
        first, last = full_steps(steps, self.batch)
        return self.window(steps, num_slots, first + SETTLING_STEPS, last)

    def window(self, steps: Sequence[StepTimes], num_slots: int, first: int, stop: int) -> Window:
        return Window.of(steps, first, stop, num_layers=self.num_layers, num_slots=num_slots)

    def find_context(self, r_over_s: float, *, low: int = 64, high: int = 1024) -> int:
        """Context at which attention takes `r_over_s` times as long as the S-Part."""
        high = max(low + 1, min(high, self.max_context_len // 2))
        probes, s_part = [], []
        for context in (low, high, low, high, low, high):
            window = self.steady(2, context, PROBE_STEPS)
            probes.append((context, window.t_r_part / window.num_steps))
            s_part.append(window.t_s_part / window.num_steps)
        at = {end: median(seconds for context, seconds in probes if context == end) for end in (low, high)}
        return solve_context((low, at[low]), (high, at[high]), r_over_s * median(s_part))


def _refuse_errors(completion: Completion) -> None:
    if completion.error is not None:
        raise RuntimeError(f"a sequence cannot be run: {completion.error[1]}")
