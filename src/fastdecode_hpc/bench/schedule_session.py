"""The runs of ``fastdecode bench schedule`` on the ranks of one job: rank 0 decides, the others follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdecode_hpc.bench.schedule_figures import Window, full_steps
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.host import format_bytes
from fastdecode_hpc.planner.costs import wire_row_bytes
from fastdecode_hpc.results import Completion, Hooks
from fastdecode_hpc.schedule.kv_layout import make_layout
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.timing import StepTimes
from fastdecode_hpc.transport.slow_link import SlowLink

if TYPE_CHECKING:
    from fastdecode_hpc.transport.mpi import World

SETTLING_STEPS = 3  # after all sequences have started
PROBE_STEPS = 8
NUM_PROBES = 6
START_CONTEXT = 256
MARGIN_STEPS = 2 * SETTLING_STEPS + 2  # of a steady run, beside those that count

NOT_OF_S_PART = (
    "kv_dtype", "kv_memory_bytes", "block_size", "num_slots", "max_batch_size", "max_prefill_tokens",
    "prefill_chunk_tokens", "schedule", "start_interval", "load_limit", "r_worker_weights",
)  # fmt: skip

Lengths = tuple[int, int]  # tokens of a prompt, and of its output
SlowLinks = tuple[tuple[int, SlowLink], ...]  # ranks, and what their links are made


@dataclass(slots=True)
class Recording:
    """What a run told.

    Attributes
    ----------
    steps : list of StepTimes
        Of all slots.
    t_started_s, t_finished_s : list of float
        First token and end of each sequence, in the order in which they ended, since the run's start.
    num_layers, num_slots : int
    keeps_stages : bool
        Keep the times of the stages, which are many.
    """

    num_layers: int
    num_slots: int
    steps: list[StepTimes] = field(default_factory=list)
    t_started_s: list[float] = field(default_factory=list)
    t_finished_s: list[float] = field(default_factory=list)
    keeps_stages: bool = False

    def add_step(self, times: StepTimes) -> None:
        """Take a step's times."""
        if not self.keeps_stages:
            times.stages = None
        self.steps.append(times)

    def complete(self, completion: Completion) -> None:
        """Take a sequence's times."""
        if completion.error is not None:
            raise RuntimeError(f"a sequence cannot be run: {completion.error[1]}")
        self.t_started_s.append(completion.t_first_token_s)
        self.t_finished_s.append(completion.t_finished_s)

    def window(self, first: int, stop: int) -> Window:
        """The steps from `first` until `stop`, which must have begun."""
        return Window.of(self.steps, first, stop, num_layers=self.num_layers, num_slots=self.num_slots)


class ScheduleSession:
    """Engines of several options on all ranks, and runs of given lengths on them.

    Parameters
    ----------
    world : World or None
        None: one process, in which nothing overlaps.
    max_batch_size : int, optional
        Runs with as many sequences or fewer share an engine, and so its KV cache.
    """

    def __init__(self, world: World | None, max_batch_size: int | None = None) -> None:
        self.world, self.max_batch_size = world, max_batch_size
        self._engines: dict[tuple[RunConfig, bool, SlowLinks], Engine] = {}

    def first_engine(self, run: RunConfig) -> Engine:
        """The engine of these options, for what they decide; all ranks call this together."""
        return self._engine(run, given_kv=True)

    def check_room(self, run: RunConfig, what: str, num_sequences: int, num_tokens: int) -> None:
        """Raise `ConfigError` unless so many sequences of so many tokens fit model and KV cache, all at once.

        Parameters
        ----------
        run : RunConfig
            Its type of the cache counts; there must be an engine, of whatever type.
        what : str
            What they are for, in the message.
        """
        setup = next(iter(self._engines.values())).setup  # rank 0 alone can't make another
        longest = setup.max_context_len
        if num_tokens > longest:
            raise ConfigError(f"{what}: sequences of {num_tokens} tokens; this model takes at most {longest}")
        layout = make_layout(setup.model, block_size=run.block_size, kv_dtype=run.kv_dtype)
        need, owners = layout.bytes_for(num_tokens + 1), [setup.ranks[owner] for owner in setup.owners]
        room = sum(rank.kv_bytes // need for rank in owners)
        if room < num_sequences:
            raise ConfigError(
                f"{what}: {num_sequences} sequences of {num_tokens} tokens at once need "
                f"{format_bytes(need * num_sequences)} of KV cache; the R-workers have "
                f"{format_bytes(sum(rank.kv_bytes for rank in owners))}, which {room} of them fit"
            )

    def follow(self) -> None:
        """Be an R-worker for every run that rank 0 makes; returns after its `end`."""
        assert self.world is not None
        while (told := self.world.bcast()) is not None:
            self._engine(*told).work()

    def end(self) -> None:
        """Let the other ranks go."""
        if self.world is not None:
            self.world.bcast(None)

    def decode(
        self,
        run: RunConfig,
        lengths: Sequence[Lengths],
        *,
        given_kv: bool = True,
        keep_stages: bool = False,
        slow_links: SlowLinks = (),
    ) -> Recording:
        """Run sequences of these lengths, all of which are there from the start.

        Parameters
        ----------
        given_kv : bool
            Compute no prompts.
        keep_stages : bool
            Keep the times of each stage, of a short run.
        slow_links : tuple of (int, SlowLink)
            R-workers whose links are to be slower than they are.
        """
        if self.world is not None:
            self.world.bcast((run, given_kv, slow_links))
        engine = self._engine(run, given_kv, slow_links)
        recording = Recording(engine.setup.model.num_layers, run.num_slots, keeps_stages=keep_stages)
        requests = (
            Request(index, None, [1] * prompt_len, params=SamplingParams(max_new_tokens=new, ignore_eos=True))
            for index, (prompt_len, new) in enumerate(lengths)
        )
        engine.run(requests, Hooks(recording.complete, on_step=recording.add_step), run)
        return recording

    def steady(self, run: RunConfig, context: int, num_steps: int, *, batch_size: int | None = None) -> Window:
        """Steps of a full batch, or of `batch_size` sequences, that all have about `context` tokens."""
        new, batch_size = num_steps + MARGIN_STEPS, batch_size or run.max_batch_size
        prompt_len = max(1, context - new // 2)
        recording = self.decode(run, [(prompt_len, new)] * batch_size, keep_stages=True)
        first, last = full_steps(recording.steps, batch_size)
        return recording.window(first + SETTLING_STEPS, last)

    def find_context(self, run: RunConfig, r_over_s: float, num_steps: int = PROBE_STEPS) -> int:
        """Context at which attention takes `r_over_s` times as long as the S-Part, or as near as the model allows.

        Parameters
        ----------
        num_steps : int
            Steps that are to be run with it.
        """
        self.decode(run, [(1, SETTLING_STEPS)] * run.max_batch_size)  # warms up
        context = min(START_CONTEXT, self._longest(run, num_steps))
        for _ in range(NUM_PROBES):
            context = self.adjust(run, context, r_over_s, self.steady(run, context, PROBE_STEPS), num_steps)
        return context

    def adjust(self, run: RunConfig, context: int, r_over_s: float, window: Window, num_steps: int) -> int:
        """A better context than the one that gave `window`: attention's time is nearly proportional to it."""
        wanted = context * r_over_s * window.t_s_part / max(window.t_r_part, 1e-9)
        return max(1, min(round(wanted), self._longest(run, num_steps)))

    def _longest(self, run: RunConfig, num_steps: int) -> int:
        """Longest context of a steady run that fits the model."""
        max_context_len = self._engine(run, given_kv=True).setup.max_context_len
        return max(1, max_context_len - max(num_steps, PROBE_STEPS) - MARGIN_STEPS)

    def num_owners(self, run: RunConfig) -> int:
        """R-workers, of a run that has been made."""
        return len(self._engine(run, given_kv=True).setup.owners)

    def row_bytes(self, run: RunConfig) -> int:
        """Bytes of q, k, v and o of a row in a layer, of a run that has been made."""
        return wire_row_bytes(self._engine(run, given_kv=True).setup.model, run.wire_dtype)

    def rank_lines(self) -> list[str]:
        """Where the ranks run."""
        engine = next(iter(self._engines.values()))
        return [rank.line for rank in engine.setup.ranks]

    def _engine(self, run: RunConfig, given_kv: bool, slow_links: SlowLinks = ()) -> Engine:
        """The engine of these options, whatever schedule and shares; all ranks make it together."""
        run = dataclasses.replace(
            run, schedule="greedy", start_interval=None, load_limit=None, r_worker_weights="equal", profile=None
        )
        if self.max_batch_size is not None:
            run = dataclasses.replace(run, max_batch_size=self.max_batch_size)
        key = run, given_kv, slow_links
        if key not in self._engines:
            same = (engine for other, engine in self._engines.items() if _same_s_part(other[0], run))
            self._engines[key] = Engine(
                run, world=self.world, given_kv=given_kv, weights_of=next(same, None), slow_links=dict(slow_links)
            )
        return self._engines[key]


def _same_s_part(a: RunConfig, b: RunConfig) -> bool:
    """Whether two runs differ only in what the S-Part does not see."""
    return a == dataclasses.replace(b, **{name: getattr(a, name) for name in NOT_OF_S_PART})
