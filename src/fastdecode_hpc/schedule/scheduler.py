"""What one step of one slot consists of: the decisions of rank 0 that the S-worker and the simulator share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.schedule.admission import Admission
from fastdecode_hpc.schedule.load_stabilizing import Greedy, LoadStabilizing, Starts
from fastdecode_hpc.schedule.mini_batch import MiniBatch
from fastdecode_hpc.schedule.pipeline import Stage
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.schedule.prompts import Prompts, Unit
from fastdecode_hpc.sequence import Sequence
from fastdecode_hpc.timing import StepTimes


@dataclass(frozen=True, slots=True)
class StepContent:
    """One step of one slot.

    Attributes
    ----------
    step : int
    batch : MiniBatch
        Its rows.
    new, finished : list of int
        Ids of sequences that decode for the first time, and of those whose KV can go.
    units : list of Unit
        Pieces of prompts that are to be run before the slot's next step.
    loads : Counter
        Token-layers that each R-worker reads, by its rank.
    """

    step: int
    batch: MiniBatch
    new: list[int]
    finished: list[int]
    units: list[Unit]
    loads: Counter[int]

    @property
    def prefill_token_layers(self) -> int:
        return sum(unit.num_tokens for unit in self.units)


class Scheduler:
    """Decides who runs in which step, from who has ended and who waits.

    Parameters
    ----------
    admission : Admission
    prompts : Prompts
    max_prefill_tokens : int
        Prompt tokens that may pass all layers in one step, over all slots.

    Attributes
    ----------
    batches : list of MiniBatch
        Of all slots.
    on_admitted : callable
        Told of each sequence that goes into prefill; may be set.
    """

    def __init__(
        self,
        admission: Admission,
        prompts: Prompts,
        *,
        max_prefill_tokens: int,
    ) -> None:
        self.admission = admission
        self.prompts = prompts
        self.batches = [MiniBatch(slot) for slot in range(admission.num_slots)]
        self.layout = admission.placement.layout
        self._prefill_budget = max(1, max_prefill_tokens * self.layout.num_layers // admission.num_slots)
        self.on_admitted: Callable[[Sequence], None] = lambda seq: None
        self._finished: list[Sequence] = []  # ended since the last plan

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended; its place is given on with the next step, whose plan frees its KV."""
        self._finished.append(seq)

    def begin(self, stage: Stage) -> StepContent | None:
        """The slot's next step; None if nothing runs and nothing waits any more."""
        finished = self._release_finished(stage.step)
        if self.admission.is_done():
            return None
        batch = self.batches[stage.slot]
        new = self.admission.refill(batch, self.batches, stage.step)
        units = self.prompts.list_units(self._prefill_budget, lambda: self._admit(stage.step))
        loads = batch.loads_by_owner(self.layout)
        return StepContent(stage.step, batch, [seq.seq_id for seq in new], finished, units, loads)

    def begin_times(self, content: StepContent, t_start: float) -> StepTimes:
        """The record of a step that begins at `t_start`: what it holds, no times yet."""
        num_layers, loads = self.layout.num_layers, content.loads
        return StepTimes(
            content.step,
            content.batch.slot,
            t_start,
            num_rows=len(content.batch),
            load_tokens=loads.total() // num_layers,
            prefill_tokens=content.prefill_token_layers // num_layers,
            rank_loads={rank: loads[rank] // num_layers for rank in self.admission.placement.owners},
            rank_rows=content.batch.rows_by_owner(),
        )

    def _admit(self, step: int) -> Sequence | None:
        seq = self.admission.admit(step)
        if seq is not None:
            self.on_admitted(seq)
        return seq

    def _release_finished(self, step: int) -> list[int]:
        """Sequences whose KV this step's plan frees. Only from here on may others be promised their blocks."""
        finished, self._finished = self._finished, []
        for seq in finished:
            self.admission.finished(seq, step)
        return [seq.seq_id for seq in finished]


def make_scheduler(
    config: RunConfig, placement: Placement, arrivals: Iterator[Sequence], prompts: Prompts
) -> Scheduler:
    """The scheduler that the options ask for."""
    admission = Admission(
        placement,
        arrivals,
        make_starts(config, placement),
        max_batch_size=config.max_batch_size,
        num_slots=config.num_slots,
    )
    return Scheduler(admission, prompts, max_prefill_tokens=config.max_prefill_tokens)


def make_starts(config: RunConfig, placement: Placement) -> Starts:
    """The schedule of starts that the options ask for."""
    if config.schedule == "greedy":
        return Greedy(config.max_batch_size)
    return LoadStabilizing(
        placement.layout,
        max_batch_size=config.max_batch_size,
        start_interval=config.start_interval,
        load_limit=config.load_limit,
        spread=config.num_slots * len(placement.owners),
    )
