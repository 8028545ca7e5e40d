"""Builds this rank's part of the system and runs requests through it.

Every rank of a job makes an `Engine` and calls the same methods: rank 0 feeds and reads, the others
work until that run's stop plans and return.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fastdecode_hpc import host, startup
from fastdecode_hpc.config import ConfigError, RunConfig, parse_kv_dtype
from fastdecode_hpc.files import OutputError
from fastdecode_hpc.intake import noise_of
from fastdecode_hpc.launch import check_alone, check_process_manager, detect, final_code, speaks
from fastdecode_hpc.log import set_up_logging
from fastdecode_hpc.model_files import resolve_model
from fastdecode_hpc.results import Completion, Hooks, RunStats
from fastdecode_hpc.sequence import Request, SamplingParams, Sequence
from fastdecode_hpc.setup import Hello, RankSetup, Setup, decide_setup, passing_on_host, weights_on_host
from fastdecode_hpc.startup import Dismissed
from fastdecode_hpc.transport.clocks import Clocks
from fastdecode_hpc.verify import Verdict, Verification, tolerance_nats

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from fastdecode_hpc.advice import ThreadCores
    from fastdecode_hpc.model_shape import ModelConfig
    from fastdecode_hpc.r_part.worker import RWorker
    from fastdecode_hpc.s_part.base import BaseSPart
    from fastdecode_hpc.s_part.kinds import SPartKind
    from fastdecode_hpc.schedule.row_tiles import TileSizes
    from fastdecode_hpc.schedule.worker_costs import WorkerCost
    from fastdecode_hpc.tokenizer import Tokenizer
    from fastdecode_hpc.transport.base import REnd, SEnd
    from fastdecode_hpc.transport.mpi import World
    from fastdecode_hpc.transport.mpi_comms import WireShape
    from fastdecode_hpc.transport.mpi_progress import Progress
    from fastdecode_hpc.transport.mpi_r_end import MpiREnd
    from fastdecode_hpc.transport.slow_link import SlowLink


def connect(run: RunConfig) -> World | None:
    """Join the other ranks, or None where one process runs both parts.

    Raises
    ------
    ConfigError
        If more than one rank is asked for outside a launcher.
    """
    launched = detect()
    if not run.allow_oversubscribe:
        check_alone(launched, run.ranks)
    if launched.kind == "none" and (run.ranks or 1) > 1:
        raise ConfigError(
            f"ranks is {run.ranks} but this process was not started by mpirun or srun; use "
            f"'fastdecode generate --ranks {run.ranks}', or start the program with mpirun -n {run.ranks}"
        )
    if launched.kind == "none" or launched.size == 1:
        return None
    from fastdecode_hpc.transport.mpi import init_mpi, library_description

    check_process_manager(launched, library_description())
    return init_mpi(run.watchdog_s)


def run_as_rank(run: RunConfig, work: Callable[[World | None], int]) -> int:
    """Join the other ranks, do this rank's work, and leave MPI together; the exit code.

    A mistake that the ranks found while they agreed is said once, by rank 0.
    """
    world = connect(run)
    set_up_logging(0 if world is None else world.rank)
    try:
        code = work(world)
    except ConfigError as error:
        if speaks():  # of N worlds of one rank, each would
            print(f"fastdecode: {error}", file=sys.stderr)
        code = 2
    except OutputError as error:
        print(f"fastdecode: {error}", file=sys.stderr)
        code = 1
    except Dismissed as end:
        code = end.code
    if world is None:
        return code
    world.finalize()
    return final_code(code, world.size)


class Engine:
    """The part of a job that runs on this rank.

    Parameters
    ----------
    run : RunConfig
    world : World, optional
        All ranks; by default found by `connect`.
    preflight : callable, optional
        Called with the model's path on rank 0 before anything is loaded; its `ConfigError` or `Dismissed` ends all
        ranks in order.
    stop_requested : callable, optional
        Whether this process has been asked to end early.
    given_kv : bool
        For measurements of decode: compute no prompts, their K and V are what the cache's memory holds.
    verifies : bool
        Leave memory for `verify` beside the KV cache.
    weights_of : Engine, optional
        Use this one's weights: of the same model, types, device and threads.
    on_load : callable, optional
        Called with bytes of weights in place and their total.
    slow_links : mapping of int to SlowLink, optional
        For measurements and tests: let the links of these R-workers, by rank, be slower than they are.

    Raises
    ------
    ConfigError
        On rank 0, for what any rank found wrong.
    Dismissed
        On the other ranks in that case.
    """

    def __init__(
        self,
        run: RunConfig | None = None,
        *,
        world: World | None = None,
        preflight: Callable[[Path], None] = lambda model: None,
        stop_requested: Callable[[], bool] = lambda: False,
        given_kv: bool = False,
        verifies: bool = False,
        weights_of: Engine | None = None,
        on_load: Callable[[int, int], None] | None = None,
        slow_links: Mapping[int, SlowLink] | None = None,
    ) -> None:
        self.run_config = run if run is not None else RunConfig()
        self.world = world if world is not None else connect(self.run_config)
        self._owns_world = world is None and self.world is not None
        self.rank = self.world.rank if self.world is not None else 0
        self.stop_requested = stop_requested
        self.model_path: Path | None = None
        self.tokenizer: Tokenizer | None = None
        self.clocks = Clocks([(0.0, 0.0)], 0.0)  # of all ranks, on rank 0
        self.t_load_s = 0.0
        self.all_layers = 0  # of the model, on rank 0
        self._kind: SPartKind  # on rank 0
        self._preflight = preflight
        self._given_kv, self._verifies = given_kv, verifies
        self._slow_links = slow_links or {}
        self._start_costs: dict[int, WorkerCost] = {}  # on rank 0
        self._s_part: BaseSPart | None = None if weights_of is None else weights_of._s_part
        self.setup = startup.agree(self.run_config, self.world, detect(), isas=_available_isas, decide=self._decide)
        self._build(on_load)

    @property
    def is_s_rank(self) -> bool:
        """Whether this process runs the S-Part: it alone reads requests and gets results."""
        return self.rank == 0

    @property
    def me(self) -> RankSetup:
        return self.setup.ranks[self.rank]

    def device(self) -> tuple[str, int]:
        """What the S-Part runs on, and the bytes of memory of its own that this has; on rank 0."""
        from fastdecode_hpc.s_part.build import device_memory

        assert self._s_part is not None
        if self._s_part.device.type == "cpu":
            return f"CPU of {self.me.host}, {self.me.threads} threads", 0
        return device_memory(self._s_part.device)

    def row_tiles(self) -> tuple[TileSizes, TileSizes]:
        """Row counts that layers of the S-Part run in, and its logits; on rank 0."""
        assert self._s_part is not None
        return self._s_part.layer_tiles, self._s_part.head_tiles

    # ---- building ----------------------------------------------------------------------------------

    def _decide(self, hellos: list[Hello]) -> Setup:
        run = self.run_config
        self.model_path = resolve_model(run.model)
        self._preflight(self.model_path)
        host.undo_openmp_binding()  # for torch's OpenMP runtime, which may be another than the kernels'
        from fastdecode_hpc.s_part.build import choose_device
        from fastdecode_hpc.s_part.kinds import find_kind

        host.undo_openmp_binding()  # for the threads that torch and CUDA start later
        self._kind = find_kind(run, self.model_path)
        model = self._cut(self._kind.read_model())
        device, known = choose_device(run.device).type, self._kind.weights_bytes(model)
        passing = passing_on_host(run, model, device, known, verifies=self._verifies)
        on_host = weights_on_host(run, model, device, known)
        setup = decide_setup(run, model, hellos, weights_bytes=on_host, passing_bytes=passing, device=device)
        if run.profile is not None:
            from fastdecode_hpc.planner.start import start_costs

            self._start_costs = start_costs(run, model, setup.owners)
        return setup

    def _cut(self, model: ModelConfig) -> ModelConfig:
        """The model, or as many of its first layers as the options ask for."""
        self.all_layers = model.num_layers
        wanted = self.run_config.num_layers
        if wanted is None or wanted == model.num_layers:
            return model
        if wanted > model.num_layers:
            raise ConfigError(f"num_layers is {wanted}; this model has {model.num_layers} layers")
        logger.warning("only %d of the model's %d layers are run: the text means nothing", wanted, model.num_layers)
        return dataclasses.replace(model, num_layers=wanted)

    def _build(self, on_load: Callable[[int, int], None] | None) -> None:
        """Make the KV partition or load the weights; what goes wrong on rank 0 ends all ranks in order."""
        problem: ConfigError | None = None
        try:
            self.setup = startup.tell_placement(self.world, self.setup, self._settle())
            if self.is_s_rank:
                self._load(on_load)
        except ConfigError as error:
            problem = error
        if self.world is not None:
            problem = self.world.bcast(problem)
        if problem is not None:
            raise problem if self.is_s_rank else Dismissed()
        if self.setup.model.attention_sinks:
            self._share_sinks()
        if self.world is not None:  # not before loading, which may take minutes: clocks of hosts drift apart
            self.clocks = Clocks(self.world.align_clocks() or (), time.perf_counter())

    def _share_sinks(self) -> None:
        """Give the kernels what weights the attention has; collective."""
        sinks = None if self._s_part is None else self._s_part.all_sinks()
        if self.world is not None:
            sinks = self.world.bcast(sinks)
        if self.me.num_blocks:
            assert sinks is not None
            self._attention.set_sinks(sinks)

    def _load(self, on_load: Callable[[int, int], None] | None) -> None:
        def tell(done: int, total: int) -> None:
            if self.world is not None:
                self.world.control.alive()
            if on_load is not None:
                on_load(done, total)

        assert self.model_path is not None
        started = time.perf_counter()
        self.tokenizer = load_tokenizer(self.model_path)
        self._s_part = self._s_part or self._kind.build(
            self.setup.model,
            threads=self.me.threads,
            max_context_len=self.setup.max_context_len,
            progress=tell,
        )
        self.t_load_s = time.perf_counter() - started

    def _settle(self) -> ThreadCores | ConfigError:
        """Make the KV partition and bind its threads; the cores that each may run on, or what is wrong."""
        if self.me.isa is not None:
            from fastdecode_hpc.isa import select_isa

            select_isa(self.me.isa)
        try:
            self._make_partition()
        except ConfigError as error:
            return error
        return self._place_threads()

    def _make_partition(self) -> None:
        if not self.me.num_blocks:
            return
        from fastdecode_hpc.r_part.attention import DecodeAttention
        from fastdecode_hpc.r_part.kv_cache import KVPartition

        try:
            self._partition = KVPartition(self.setup.layout, self.me.num_blocks, num_threads=self.me.threads)
        except (MemoryError, OSError) as error:
            raise ConfigError(self._no_room(error)) from None
        self._attention = DecodeAttention(
            self._partition,
            num_heads=self.setup.model.num_heads,
            wire_dtype=self.run_config.wire_dtype,
            num_threads=self.me.threads,
        )

    def _no_room(self, error: Exception) -> str:
        layout, blocks = self.setup.layout, self.me.num_blocks
        sizes = [group.block_bytes(layout.block_size) for group in layout.groups]
        total = host.format_bytes(sum(count * size for count, size in zip(blocks, sizes, strict=True)))
        terms = " + ".join(
            f"{count} blocks of {host.format_bytes(size)}" for count, size in zip(blocks, sizes, strict=True)
        )
        return (
            f"rank {self.rank} on {self.me.host} cannot reserve {total} for its KV cache ({terms}): {error}; "
            f"{host.describe_address_space()}; lower --kv-memory-bytes, or raise the limit"
        )

    def _place_threads(self) -> ThreadCores:
        """Bind the kernels' threads where that was decided; the cores that each may run on, read back."""
        if not self.me.num_blocks:
            return ()
        from fastdecode_hpc.r_part.attention import pin_threads, thread_cores

        if self.me.pin_cores:
            try:
                pin_threads(self.me.pin_cores)
            except OSError as error:
                logger.warning("threads stay unbound: %s", error)
        return thread_cores(self.me.threads)

    def close(self) -> None:
        """Leave MPI, if this engine joined it; collective. Nothing can be run afterwards."""
        if self._owns_world and self.world is not None:
            self.world.finalize()
        self._owns_world = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:  # with an error the abort hook ends all ranks; a collective call could hang
            self.close()

    # ---- running -----------------------------------------------------------------------------------

    def generate(
        self, prompts: Iterable[str | list[int] | Request], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete prompts.

        Parameters
        ----------
        prompts : iterable of str, list of int, or Request
            Texts, token ids, or whole requests (whose own settings count).
        params : SamplingParams, optional
            Settings of texts and token ids; greedy by default.

        Returns
        -------
        list of Completion
            In the order of the prompts, on rank 0; empty on the other ranks, which must call this too.
        """
        requests = [_as_request(index, prompt, params) for index, prompt in enumerate(prompts)]
        done: dict[int, Completion] = {}
        self.run(iter(requests), Hooks(lambda completion: done.__setitem__(id(completion.request), completion)))
        stopped = ("stopped", "the run was stopped before this request was finished")
        return [done.get(id(r), Completion(r, error=stopped)) for r in requests] if self.is_s_rank else []

    def run(self, requests: Iterator[Request], hooks: Hooks, config: RunConfig | None = None) -> RunStats | None:
        """Run requests as they come, reporting each completion as it ends; collective.

        Parameters
        ----------
        config : RunConfig, optional
            Of this run, where it has another schedule or a smaller batch than the engine was made for.

        Returns
        -------
        RunStats or None
            None on ranks other than 0.
        """
        if self.is_s_rank:
            from fastdecode_hpc.run import Run

            assert self._s_part is not None
            run = Run(
                self.setup,
                config or self.run_config,
                self._s_part,
                self.tokenizer,
                hooks,
                self.stop_requested,
                given_kv=self._given_kv,
                start_costs=self._start_costs,
            )
            stats = run.run(requests, self._make_s_end())
            stats.kv_huge_pages = self._huge_page_shares()
            return stats
        self.work()
        return None

    def verify(self, completions: Iterable[Completion]) -> Verification:
        """Recompute what a run has generated with a plain reference, token by token, and compare.

        On rank 0 and not collective: the others may wait in `close`, or for their next run, meanwhile. Completions with
        an error are left out, as is the rest once this process has been asked to end.

        Returns
        -------
        Verification
            With a verdict for each choice of each request.
        """
        from fastdecode_hpc.s_part.reference import Reference
        from fastdecode_hpc.s_part.wire import dtype_name

        assert self._s_part is not None
        run, reference = self.run_config, Reference(self._s_part)
        types = (dtype_name(self._s_part.dtype), run.wire_dtype, *parse_kv_dtype(run.kv_dtype))
        found = Verification(tolerance_nats(types))
        finished = (completion for completion in completions if completion.error is None)
        for request, seq in ((c.request, seq) for c in finished for seq in _sequences(c, run.seed)):
            if self.world is not None:
                self.world.control.alive()  # the other ranks wait meanwhile
            if self.stop_requested():
                break
            found.verdicts.append(Verdict(request.index, request.custom_id, seq.choice, reference.compare(seq)))
        return found

    def work(self) -> None:
        """Be an R-worker for one run; ranks other than 0 call this or `run`."""
        end = self._make_r_end()
        self._make_r_worker(end).run()
        end.close()
        self._huge_page_shares()

    def _huge_page_shares(self) -> dict[int, float]:
        """Share of each rank's KV memory in use that lies on huge pages, at rank 0; collective."""
        mine = self._partition.huge_page_share() if self.me.num_blocks else None
        shares = [mine] if self.world is None else self.world.gather(mine, "last figures")
        return {rank: share for rank, share in enumerate(shares or ()) if share is not None}

    def _make_r_worker(self, r_end: REnd) -> RWorker:
        from fastdecode_hpc.r_part.worker import RWorker

        return RWorker(
            r_end,
            self._partition,
            self._attention,
            num_layers=self.setup.model.num_layers,
            num_slots=self.run_config.num_slots,
            num_threads=self.me.threads,
            wire_dtype=self.run_config.wire_dtype,
            stop_requested=self.stop_requested,
        )

    def _make_r_end(self) -> MpiREnd:
        from fastdecode_hpc.transport.mpi_r_end import MpiREnd

        assert self.world is not None
        return MpiREnd(self.world, self._wire_shape(), self._progress(), self._slow_links.get(self.rank))

    def _make_s_end(self) -> SEnd:
        """The S-worker's end of a new run; in one process with an R-worker behind it."""
        if self.world is None:
            from fastdecode_hpc.transport.local import make_local

            s_end, r_end = make_local(self.setup.model.num_layers, self.run_config.watchdog_s)
            s_end.drive(self._make_r_worker(r_end).stages())
            return s_end
        from fastdecode_hpc.transport.mpi_s_end import MpiSEnd

        return MpiSEnd(self.world, self._wire_shape(), self._progress(), self.clocks)

    def _progress(self) -> Progress:
        from fastdecode_hpc.transport.mpi_progress import Progress

        assert self.world is not None
        return Progress(
            self.world.control,
            wait=self.me.wait,
            use_thread=self.me.use_progress_thread,
            thread_cores=self.me.spare_cores,
        )

    def _wire_shape(self) -> WireShape:
        from fastdecode_hpc.transport.base import WIRE_NUMPY
        from fastdecode_hpc.transport.mpi_comms import WireShape

        run, model = self.run_config, self.setup.model
        return WireShape(
            num_layers=model.num_layers,
            num_slots=run.num_slots,
            max_rows=-(-run.max_batch_size // run.num_slots),
            qkv_size=model.qkv_size,
            q_size=model.q_size,
            kv_size=model.kv_size,
            dtype=WIRE_NUMPY[run.wire_dtype],
        )


def _available_isas() -> tuple[str, ...]:
    """Instruction sets that this rank's kernels may use: all it has, or the one that ``FASTDECODE_ISA`` forces."""
    from fastdecode_hpc.isa import ISA_VARIABLE, active_isa, available_isas

    return (active_isa(),) if os.environ.get(ISA_VARIABLE) else available_isas()


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The model's tokenizer; None for a folder without one, which then takes token ids only."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if path.is_dir() and not any((path / name).exists() for name in names):
        return None
    from fastdecode_hpc.tokenizer import Tokenizer

    return Tokenizer.load(path)


def _as_request(index: int, prompt: str | list[int] | Request, params: SamplingParams | None) -> Request:
    if isinstance(prompt, Request):
        return prompt
    return Request(index=index, custom_id=None, prompt=prompt, params=params or SamplingParams())


def _sequences(completion: Completion, run_seed: int) -> Iterator[Sequence]:
    """The sequences that a completion's choices came from, as they ended."""
    request = completion.request
    for number, choice in enumerate(completion.choices):
        seed, noise_key = noise_of(request, choice.prompt_ids, run_seed)
        yield Sequence(
            seq_id=number,
            index=request.index,
            prompt_ids=choice.prompt_ids,
            params=request.params,
            max_new_tokens=len(choice.token_ids),
            choice=number,
            seed=seed,
            noise_key=noise_key,
            output_ids=choice.token_ids,
            logprobs=choice.logprobs or [],
        )
