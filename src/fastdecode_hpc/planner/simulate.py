"""A run without a machine: the engine's own schedule, on a profile's clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.planner.clock import PipelineClock
from fastdecode_hpc.planner.costs import Costs
from fastdecode_hpc.planner.lengths import Lengths, check_lengths
from fastdecode_hpc.planner.profile import Profile
from fastdecode_hpc.planner.walk import Walk
from fastdecode_hpc.schedule.pipeline import Stage, pipeline
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.schedule.prompts import GivenPrompts, PromptQueue, stage_share
from fastdecode_hpc.schedule.scheduler import Scheduler, make_scheduler
from fastdecode_hpc.sequence import SamplingParams, Sequence
from fastdecode_hpc.timing import StepTimes

_GREEDY = SamplingParams(ignore_eos=True)


@dataclass(slots=True)
class SimulatedRun:
    """What a simulated run would tell.

    Attributes
    ----------
    steps : list of StepTimes
        Of all slots.
    num_layers, num_slots : int
    output_tokens, num_sequences : int
    wall_s : float
    """

    num_layers: int
    num_slots: int
    steps: list[StepTimes] = field(default_factory=list)
    output_tokens: int = 0
    num_sequences: int = 0
    wall_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s if self.wall_s else 0.0


class Simulation:
    """Simulates one run.

    Parameters
    ----------
    profile : Profile
    model : ModelConfig
    config : RunConfig
        With `r_worker_weights` auto the run goes on with the speeds that it finds, as a real one does.
        `kv_memory_bytes` counts where it is given; by default there is more memory than is ever needed.
    num_workers : int
        R-workers; they are ranks 1 and up, also where one process runs both parts.
    given_kv : bool
        Prompts take no time.
    jitter, seed : float, int
        As of `PipelineClock`.
    max_steps : int, optional
        End after so many steps.
    knows_profile : bool
        With `r_worker_weights` auto: shares begin as the profile has them, not equal.
    """

    def __init__(
        self,
        profile: Profile,
        model: ModelConfig,
        config: RunConfig,
        *,
        num_workers: int,
        given_kv: bool = False,
        jitter: float = 0.0,
        seed: int = 0,
        max_steps: int | None = None,
        knows_profile: bool = True,
    ) -> None:
        if profile.is_one_process and num_workers > 1:
            raise ConfigError(
                f"profile {profile.name} was measured in one process; it is good for 1 R-worker, not {num_workers}"
            )
        self.config, self.max_steps = config, max_steps
        self.costs = Costs(profile, model, config, num_workers=num_workers)
        clock = PipelineClock(profile, num_workers=num_workers, num_slots=config.num_slots, jitter=jitter, seed=seed)
        self.clock, self.walk = clock, Walk(self.costs, clock, num_slots=config.num_slots)
        self.shares = self.costs.shares(config.max_batch_size / config.num_slots, knows_profile=knows_profile)
        self._placement = Placement(
            self.costs.layout, dict.fromkeys(self.costs.owners, self._blocks()), self.shares.costs
        )
        self._prompts: PromptQueue | GivenPrompts = GivenPrompts()
        if not given_kv:
            self._prompts = PromptQueue(
                self.costs.layout,
                chunk_tokens=config.prefill_chunk_tokens,
                max_batch_tokens=config.max_prefill_tokens,
            )
        self._actual: dict[int, int] = {}  # seq_id |-> tokens of its output

    def _blocks(self) -> tuple[int, ...]:
        """KV blocks of an R-worker, for each group of the layout."""
        layout, config = self.costs.layout, self.config
        if config.kv_memory_bytes is None:
            return (2**62,) * len(layout.groups)
        return layout.split_budget(config.kv_memory_bytes, self.costs.model.max_context_len, config.max_batch_size)

    def check_fit(self, lengths: Ordered[Lengths]) -> None:
        """Raise `ConfigError` for a sequence that the model or the cache can never take."""
        check_lengths(lengths, self.costs.model)
        for number, entry in enumerate(lengths, start=1):
            if not self._placement.fits_ever(entry.longest + 1):
                raise ConfigError(
                    f"sequence {number} may have {entry.longest} tokens, which no R-worker's KV cache can hold; raise "
                    "--kv-memory-bytes"
                )

    def run(self, lengths: Iterable[Lengths]) -> SimulatedRun:
        """Run sequences of these lengths, all of which are there from the start."""
        result = SimulatedRun(self.walk.num_layers, self.config.num_slots)
        scheduler = make_scheduler(self.config, self._placement, self._sequences(lengths), self._prompts)
        stopped: set[int] = set()
        for stage in pipeline(self.walk.num_layers, self.config.num_slots):
            if len(stopped) == self.config.num_slots:
                break
            if stage.layer == 0:
                self._turn(stage, scheduler, result, stopped)
            self.walk.visit(stage)
            share = stage_share(self._prompts, stage, num_layers=self.walk.num_layers, num_slots=self.config.num_slots)
            self._run_units(stage, scheduler, result, share)
        result.wall_s = self.clock.s_free
        return result

    def _sequences(self, lengths: Iterable[Lengths]) -> Iterator[Sequence]:
        for seq_id, entry in enumerate(lengths):
            self._actual[seq_id] = entry.output_len
            yield Sequence(seq_id, seq_id, range(entry.prompt_len), _GREEDY, entry.bound)  # type: ignore[arg-type]

    def _turn(self, stage: Stage, scheduler: Scheduler, result: SimulatedRun, stopped: set[int]) -> None:
        """End the slot's step and begin its next."""
        record = self.walk.end_step(stage)
        if record is not None:
            result.steps.append(record)
            self.shares.observe(record)
            self._placement.costs = self.shares.costs
            self._take_tokens(stage, scheduler, result)
        if stage.step == self.max_steps:
            stopped.add(stage.slot)
        if stage.slot in stopped:
            return
        self._run_units(stage, scheduler, result, self._prompts.num_pending)
        content = scheduler.begin(stage)
        if content is None:
            stopped.add(stage.slot)
            return
        batch = content.batch
        times = self.costs.slot_times(batch.context_lens, batch.owners - 1) if len(batch) else None
        self.walk.begin_step(stage, times, scheduler.begin_times(content, self.clock.s_free))

    def _take_tokens(self, stage: Stage, scheduler: Scheduler, result: SimulatedRun) -> None:
        batch = scheduler.batches[stage.slot]
        result.output_tokens += len(batch)
        ended = [seq for seq in batch.seqs if self._take_token(seq)]
        batch.grow()
        for seq in ended:
            scheduler.ended(seq)
        batch.remove(ended) if ended else None
        result.num_sequences += len(ended)

    def _take_token(self, seq: Sequence) -> bool:
        """Append a token; whether it is the sequence's last."""
        seq.output_ids.append(0)
        return len(seq.output_ids) >= self._actual[seq.seq_id]

    def _run_units(self, stage: Stage, scheduler: Scheduler, result: SimulatedRun, count: int) -> None:
        for seq in self._run(stage, min(count, self._prompts.num_pending)):
            result.output_tokens += 1
            if self._take_token(seq):
                scheduler.ended(seq)
                result.num_sequences += 1
            else:
                scheduler.admission.prefilled(seq)

    def _run(self, stage: Stage, count: int) -> Iterator[Sequence]:
        """Run listed prompts; the sequences whose prefill is complete."""
        for _ in range(count):
            if isinstance(self._prompts, GivenPrompts):
                yield self._prompts.take()
            else:
                unit = self._prompts.take()
                self.walk.run_unit(stage, unit, self._prompts)
                yield from unit.ended
