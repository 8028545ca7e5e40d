"""What rank 0 decides for all ranks from what each of them has: threads, instruction set, KV budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from fastdecode_hpc.affinity import pin_plan
from fastdecode_hpc.config import DTYPE_BYTES, INT8_WEIGHT_BYTES, ConfigError, RunConfig
from fastdecode_hpc.host import HostInfo, format_bytes, format_cores
from fastdecode_hpc.launch import Launch
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.schedule.kv_layout import KVLayout, make_layout
from fastdecode_hpc.schedule.worker_costs import told_costs

ISAS_BEST_FIRST = ("avx512bf16", "avx512", "avx2", "neon", "scalar")
KV_SHARE = 0.85  # of the memory that is left, for KV; the rest is for buffers, Python and surprises
ROPE_TABLE_COPIES = 3  # of cosines and sines, while they are made
S_PART_RESERVE = 1 << 30  # bytes for rank 0's activations, logits and libraries


@dataclass(frozen=True, slots=True)
class Hello:
    """What one rank has, as it tells rank 0."""

    rank: int
    host: HostInfo
    launch: Launch
    threads: int | None  # asked for by flag or environment
    isas: tuple[str, ...]  # of its kernels
    version: str
    error: str | None = None
    isa_error: str | None = None  # why it has none of those
    binding: str = ""  # what the environment tells OpenMP about binding threads
    library: str = ""  # of MPI; empty: one process without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs, and as what."""

    rank: int
    role: str  # S-worker | R-worker | both
    host: str
    threads: int
    cores: tuple[int, ...]
    numa_nodes: tuple[int, ...] = ()  # of its cores; empty: unknown
    huge_pages: str = ""  # its host's mode; empty: unknown
    gpus: int = 0  # that it may use

    @property
    def holds_kv(self) -> bool:
        return self.role != "S-worker"

    @property
    def where(self) -> str:
        """Its place in the style of xthi."""
        numa = f"  numa {format_cores(self.numa_nodes)}" if self.numa_nodes else ""
        return (
            f"rank {self.rank:<3} {self.host}  {self.role}  threads {self.threads}  "
            f"cores {format_cores(self.cores)}{numa}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup(Place):
    """What rank 0 has decided for one rank."""

    isa: str | None  # of its kernels; None: they attend to nothing
    kv_bytes: int
    num_blocks: tuple[int, ...]
    wait: str  # spin | sleep
    use_progress_thread: bool
    start_s: float  # from process start to its hello
    pin_cores: tuple[int, ...] = ()  # thread |-> core; empty: threads are left where they are
    numa_memory_bytes: int | None = None  # that could still be taken on its NUMA nodes; None: unknown
    pinned: bool = False  # each thread has a core of its own, as read back; known at rank 0

    @property
    def line(self) -> str:
        """The line printed at start."""
        pinned = "  pinned" if self.pinned else ""
        kv = f"  kv {format_bytes(self.kv_bytes)}" if self.kv_bytes else ""
        isa = f"  isa {self.isa}" if self.isa else ""
        gpu = f"  gpus {self.gpus}" if self.gpus and self.role != "R-worker" else ""
        return f"{self.where}{pinned}{isa}{kv}{gpu}"

    @property
    def spare_cores(self) -> tuple[int, ...]:
        """Cores that no thread is bound to: where a thread that is started later should run."""
        return tuple(core for core in self.cores if core not in self.pin_cores) or self.cores


@dataclass(frozen=True, slots=True)
class Setup:
    """What every rank needs to know to build its part."""

    model: ModelConfig
    layout: KVLayout
    max_context_len: int
    ranks: tuple[RankSetup, ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """Ranks that hold KV."""
        return tuple(rank.rank for rank in self.ranks if rank.num_blocks)


def decide_setup(
    run: RunConfig,
    model: ModelConfig,
    hellos: list[Hello],
    *,
    weights_bytes: int,
    passing_bytes: int = 0,
    device: str = "cpu",
) -> Setup:
    """Rank 0's decision for all ranks; pure.

    Parameters
    ----------
    weights_bytes : int
        Memory of the weights on rank 0's host (0 where they go to a GPU).
    passing_bytes : int
        What they need there beside it for a time (`passing_on_host`).
    device : str
        Of the S-Part. On a CPU the attention of prompts is rank 0's kernels' work.

    Raises
    ------
    ConfigError
        If sizes, instruction sets or memory don't fit, with the arithmetic.
    """
    if run.ranks is not None and run.ranks != len(hellos):
        raise ConfigError(
            f"--ranks is {run.ranks} but {len(hellos)} were started; leave --ranks out under mpirun or srun, "
            "or give it the same number"
        )
    if run.pin_threads and len(hellos) == 1:
        raise ConfigError(
            "--pin-threads needs R-workers of their own, and this is one process; start at least 2 ranks, "
            "or leave it out"
        )
    told_costs(run.r_worker_weights, tuple(range(1, len(hellos))) or (0,))
    layout = make_layout(model, block_size=run.block_size, kv_dtype=run.kv_dtype)
    max_context_len = choose_max_context_len(run, model)
    _check_buffers(run, model, hellos[0])
    _check_model(model, hellos[0], weights_bytes, passing_bytes, max_context_len)
    isas = choose_isas(run, [hello for hello in hellos if device == "cpu" or place_of(hello, hellos).holds_kv])
    taken = weights_bytes + passing_bytes
    ranks = tuple(_decide_rank(run, hello, hellos, layout, max_context_len, isas, taken) for hello in hellos)
    return Setup(model, layout, max_context_len, ranks)


def choose_max_context_len(run: RunConfig, model: ModelConfig) -> int:
    """Longest prompt plus output of a run.

    Raises
    ------
    ConfigError
        If the one asked for leaves no room, or is more than the model was made for.
    """
    if run.max_context_len is None:
        return model.max_context_len
    if run.max_context_len < 2:
        raise ConfigError(f"max_context_len is {run.max_context_len}; a prompt and an output need at least 2")
    if run.max_context_len > model.max_context_len:
        raise ConfigError(
            f"max_context_len is {run.max_context_len}; this model was made for at most {model.max_context_len}"
        )
    return run.max_context_len


def _check_buffers(run: RunConfig, model: ModelConfig, hello: Hello) -> None:
    """Refuse a batch whose rows alone fill rank 0's memory."""
    row_bytes = (model.qkv_size + model.q_size) * DTYPE_BYTES[run.wire_dtype] + 4 * model.hidden_size
    needed = row_bytes * run.max_batch_size
    if needed > hello.host.memory_bytes // 2:
        raise ConfigError(
            f"max_batch_size is {run.max_batch_size}: its rows alone take {format_bytes(needed)} on rank 0, and "
            f"{hello.host.host} has {format_bytes(hello.host.memory_bytes)}; lower it"
        )


def _check_model(
    model: ModelConfig, hello: Hello, weights_bytes: int, passing_bytes: int, max_context_len: int
) -> None:
    """Refuse a model that rank 0's memory cannot hold, before anything is allocated."""
    tables = 1 if model.windowed_rope_theta is None else 2
    table_bytes = ROPE_TABLE_COPIES * 4 * tables * model.rotated * max_context_len
    if weights_bytes + passing_bytes + table_bytes > hello.host.memory_bytes:
        passing = f", while they are loaded or verified {format_bytes(passing_bytes)} more," if passing_bytes else ""
        raise ConfigError(
            f"the model's weights take {format_bytes(weights_bytes)}{passing} and its table of {max_context_len} "
            f"positions {format_bytes(table_bytes)}, and {hello.host.host} has "
            f"{format_bytes(hello.host.memory_bytes)}; take a host with more memory, a smaller --dtype, "
            "--weight-dtype int8 or a shorter --max-context-len"
        )


def _decide_rank(
    run: RunConfig,
    hello: Hello,
    hellos: list[Hello],
    layout: KVLayout,
    max_context_len: int,
    isas: Mapping[int, str],
    weights_bytes: int,
) -> RankSetup:
    place = place_of(hello, hellos)
    alone, holds_kv = len(hellos) == 1, place.holds_kv
    neighbours = [other for other in hellos if _share_cores(other, hello)]
    cores = {core for other in neighbours for core in other.host.cores}
    num_threads = sum(threads_of(other, hellos) for other in neighbours)
    kv_bytes = kv_budget(run, hello, hellos, weights_bytes) if holds_kv else 0
    return RankSetup(
        **{spec.name: getattr(place, spec.name) for spec in fields(place)},
        isa=isas.get(hello.rank),
        kv_bytes=kv_bytes,
        num_blocks=_blocks(run, layout, kv_bytes, max_context_len, hello) if holds_kv else (),
        wait=run.wait if run.wait != "auto" else ("spin" if num_threads <= len(cores) else "sleep"),
        use_progress_thread=not alone and len(cores) >= num_threads + len(neighbours),
        start_s=hello.host.age_s,
        numa_memory_bytes=hello.host.numa_memory_bytes,
        pin_cores=_pin_cores(run, hello, hellos) if hello.rank > 0 else (),
    )


def place_of(hello: Hello, hellos: list[Hello]) -> Place:
    """Where a rank runs, and what its part of the work is."""
    role = "both" if len(hellos) == 1 else ("R-worker" if hello.rank > 0 else "S-worker")
    here = hello.host
    return Place(
        rank=hello.rank,
        role=role,
        host=here.host,
        threads=threads_of(hello, hellos),
        cores=here.cores,
        numa_nodes=here.numa_nodes,
        huge_pages=here.huge_pages,
        gpus=here.gpus,
    )


def _pin_cores(run: RunConfig, hello: Hello, hellos: list[Hello]) -> tuple[int, ...]:
    """The core of each thread of an R-worker; rank 0 is never bound, torch's threads would inherit that."""
    shared = {
        core for other in hellos if other is not hello and _share_cores(other, hello) for core in other.host.cores
    }
    own = tuple(core for core in hello.host.cores if core not in shared)
    threads = threads_of(hello, hellos)
    plan = pin_plan(threads, own, hello.host.siblings, wanted=run.pin_threads, binding=hello.binding)
    if run.pin_threads and not plan:
        count = f"{threads} thread{'s' if threads > 1 else ''}"
        raise ConfigError(
            f"rank {hello.rank} on {hello.host.host} cannot bind {count}: of its cores "
            f"{format_cores(hello.host.cores)} it has {len(own)} for itself; give each rank cores of its own "
            "(srun --cpu-bind=cores, mpirun --map-by numa --bind-to numa), lower --threads or leave --pin-threads out"
        )
    return plan


def _blocks(run: RunConfig, layout: KVLayout, kv_bytes: int, max_context_len: int, hello: Hello) -> tuple[int, ...]:
    blocks = layout.split_budget(kv_bytes, max_context_len, run.max_batch_size)
    if min(blocks) < 1:
        # As `split_budget` has it: the copies of recent tokens are those of at least one long sequence.
        held = dict(zip(layout.groups, layout.worst_case(max_context_len), strict=True))
        one = sum(
            group.block_bytes(layout.block_size) * (held[group] if group.is_recent else 1) for group in layout.groups
        )
        copies = "" if layout.groups == layout.main_groups else ", with a copy of one sequence's recent tokens,"
        raise ConfigError(
            f"rank {hello.rank} on {hello.host.host} may use {format_bytes(kv_bytes)} for KV, and one block of "
            f"{layout.block_size} tokens{copies} takes {format_bytes(one)}; give it more memory, raise "
            "--kv-memory-bytes or lower --block-size"
        )
    return blocks


def _share_cores(a: Hello, b: Hello) -> bool:
    return a.host.host == b.host.host and bool(set(a.host.cores) & set(b.host.cores))


def threads_of(hello: Hello, hellos: list[Hello]) -> int:
    """Threads of a rank: what it asked for, else its part of the physical cores it shares with other ranks."""
    if hello.threads is not None:
        return hello.threads
    sharing = sum(_share_cores(other, hello) for other in hellos)
    return max(1, hello.host.num_physical_cores // sharing)


def best_isa(isas: tuple[str, ...]) -> str:
    """The fastest of these instruction sets."""
    return next(isa for isa in ISAS_BEST_FIRST if isa in isas)


def choose_isas(run: RunConfig, attending: Sequence[Hello]) -> dict[int, str]:
    """The instruction set of each rank whose kernels attend, by rank.

    It is one for all of them, unless each is to use its own best: a row then has the same bits wherever it is computed.

    Raises
    ------
    ConfigError
        If a rank lacks the one asked for, or has none that it may use.
    """
    for hello in attending:
        if hello.isa_error is not None:
            raise ConfigError(hello.isa_error)
        if run.isa is not None and run.isa not in hello.isas:
            raise ConfigError(
                f"rank {hello.rank} on {hello.host.host} has no {run.isa}; it has {', '.join(hello.isas)}: name one "
                "that all ranks have, or leave --isa out"
            )
    if run.isa is None and run.isa_per_rank:
        return {hello.rank: best_isa(hello.isas) for hello in attending}
    return dict.fromkeys((hello.rank for hello in attending), run.isa or _best_common_isa(attending))


def _best_common_isa(hellos: Sequence[Hello]) -> str:
    common = set.intersection(*(set(hello.isas) for hello in hellos))
    if not common:
        offers = "; ".join(f"rank {hello.rank}: {', '.join(hello.isas)}" for hello in hellos)
        raise ConfigError(
            f"the ranks have no instruction set in common ({offers}); set FASTDECODE_ISA alike, or give --isa-per-rank"
        )
    return best_isa(tuple(common))


def kv_budget(run: RunConfig, hello: Hello, hellos: list[Hello], weights_bytes: int) -> int:
    """Bytes of KV for one rank: as told, or its share of what its host, and its NUMA nodes, have left.

    Raises
    ------
    ConfigError
        If what was told is more than the host has left, with the arithmetic.
    """
    alone = len(hellos) == 1
    here = [other for other in hellos if other.host.host == hello.host.host]
    reserve = weights_bytes + S_PART_RESERVE if any(other.rank == 0 for other in here) else 0
    num_workers = sum(alone or other.rank > 0 for other in here)
    left = max(0, min(other.host.memory_bytes for other in here) - reserve)
    if run.kv_memory_bytes is None:
        return int(min(left / num_workers, _local_share(hello, here, reserve)) * KV_SHARE)
    if run.kv_memory_bytes * num_workers > left:
        raise ConfigError(
            f"--kv-memory-bytes is {format_bytes(run.kv_memory_bytes)} for each of {num_workers} R-workers on "
            f"{hello.host.host}, which has {format_bytes(left)} left for KV (weights and rank 0's own needs "
            "taken off); lower it, or leave it out to use what is there"
        )
    return run.kv_memory_bytes


def _local_share(hello: Hello, here: list[Hello], reserve: int) -> float:
    """A rank's part of what is left on its own NUMA nodes: KV beyond it would lie at another socket."""
    nodes, local = set(hello.host.numa_nodes), hello.host.numa_memory_bytes
    if local is None:
        return float("inf")
    beside = [other for other in here if nodes & set(other.host.numa_nodes)]
    if any(other.rank == 0 for other in beside):
        local -= reserve
    return max(0, local) / sum(other.rank > 0 or other is hello for other in beside)


def weights_on_host(run: RunConfig, model: ModelConfig, device: str, known: int | None = None) -> int:
    """Bytes of host memory that the weights will take.

    A head in floats that is the embedding is there twice, packed and not; one in 8 bits is the embedding. `known` is
    what they take on `device`, where sizes don't say it.

    Raises
    ------
    ConfigError
        If weights can't be of the type that is asked for there.
    """
    if device != "cpu":
        if run.weight_dtype != "auto":
            raise ConfigError(
                f"weight_dtype is {run.weight_dtype} and the S-Part is on a GPU, where weights are of its dtype; leave "
                "it out, or use --device cpu"
            )
        return 0
    if known is not None:
        return known
    float_bytes = _float_bytes(run)
    head = model.vocab_size * model.embedding_width
    if run.weight_dtype == "auto":
        return (model.num_weights + (head if model.tie_embeddings else 0)) * float_bytes
    packed = model.num_layers * model.layer_weights + head
    return int(packed * INT8_WEIGHT_BYTES) + (model.num_weights - packed) * float_bytes


def passing_on_host(
    run: RunConfig, model: ModelConfig, device: str, known: int | None = None, *, verifies: bool = False
) -> int:
    """Bytes of host memory that are needed for a time beside `weights_on_host`.

    While weights are loaded: the head or one layer as they were read, beside what they are packed into. While a run is
    verified: in float32 the head, and one layer, of whose experts one. Where transformers made the S-Part (`known`), it
    is one matrix that is packed, and the reference is the S-Part itself.
    """
    if device != "cpu":
        return 0
    head = model.vocab_size * model.embedding_width
    if known is not None:
        return head * _float_bytes(run)
    loading = max(head, model.layer_weights) * _float_bytes(run)
    verifying = DTYPE_BYTES["fp32"] * (head + model.attention_weights + model.mlp_weights)
    return max(loading, verifying if verifies else 0)


def _float_bytes(run: RunConfig) -> int:
    """Of an element of weights on a CPU that are not in 8 bits."""
    return DTYPE_BYTES["fp32" if run.dtype == "auto" else run.dtype]
