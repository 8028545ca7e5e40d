"""What a run is asked to do: data types and run options, checked once, then frozen; checks that others share.

Holds no mechanism and imports nothing heavy, so that every rank and every tool can read it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
QUANTISED_DTYPES = ("int8", "int4")
SCHEDULES = ("greedy", "load-stabilizing")
WEIGHT_WORDS = ("auto", "equal")
S_PARTS = ("native", "transformers")
WEIGHT_DTYPES = ("auto", "int8")
INT8_WEIGHT_BYTES = 1 + 8 / 32  # of a matrix in 8 bits: a code, and a share of an fp32 scale and offset
INT4_GROUP = 32  # values along head_dim that share a scale and a minimum

_MAX_MESSAGE_CHARS = 4000
_MAX_SHOWN_CHARS = 80
_UNKNOWN = object()  # no value of any option


class ConfigError(ValueError):
    """A value the user gave cannot be used; the message says which values can. Exit code 2.

    Messages quote names and values from files that may hold anything, so their text is of bounded length and has no
    characters that control a terminal.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > _MAX_MESSAGE_CHARS:
            half = _MAX_MESSAGE_CHARS // 2
            text = f"{text[:half]} ... {text[-half:]}"
        return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def show(value: Any) -> str:
    """A value as part of a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of the file at fault before a `ConfigError` that lacks it."""
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def parse_kv_dtype(text: str) -> tuple[str, str]:
    """Types of K and V from ``int8`` (both) or ``k=int8,v=int4``.

    Raises
    ------
    ConfigError
        If a type is unknown or one of the two is missing.
    """
    choices = (*DTYPE_BYTES, *QUANTISED_DTYPES)
    parts = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not parts:
        parts = {"k": text, "v": text}
    if set(parts) != {"k", "v"} or text.count(",") > 1 or not set(parts.values()) <= set(choices):
        raise ConfigError(
            f"kv_dtype is {text!r}; it must be one of {', '.join(choices)}, or name both, such as k=int8,v=int4"
        )
    return parts["k"], parts["v"]


def parse_weights(text: str) -> tuple[float, ...]:
    """Shares of the R-workers from ``1,1,0.5``.

    Raises
    ------
    ConfigError
        Unless all are positive numbers.
    """
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(
            f"r_worker_weights is {text!r}; it must be {' or '.join(WEIGHT_WORDS)}, or positive numbers such as 1,1,0.5"
        )
    return weights


def split_kv_dtypes(text: str) -> list[str]:
    """A list of cache types: ``fp16,int8,k=int8,v=int4`` has three.

    Raises
    ------
    ConfigError
        If one of them is none.
    """
    found: list[str] = []
    for part in text.split(","):
        pairs = found and "=" in part and found[-1].count("=") == 1 and "," not in found[-1]
        found[-1:] = [f"{found[-1]},{part}"] if pairs else [*found[-1:], part]
    for kv_dtype in found:
        parse_kv_dtype(kv_dtype)
    return found


def kv_token_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one token's K (or V) of one KV head in the cache, scales included."""
    if dtype == "int8":
        return head_dim + 4  # one fp32 scale
    if dtype == "int4":
        return -(-head_dim // INT4_GROUP) * (INT4_GROUP // 2 + 4)  # an fp16 scale and an fp16 minimum a group
    return head_dim * DTYPE_BYTES[dtype]


def check_at_least(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `low` (and at most `high`)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")
        raise ConfigError(f"{name} is {show(value)}; it must be a whole number of {bounds}")


def check_positive(name: str, value: Any) -> None:
    """Raise `ConfigError` unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {show(value)}; it must be a number above 0")


def _option(default: Any, text: str, **extra: Any) -> Any:
    """A `RunConfig` field with the help text that the command line shows."""
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Everything a run can be told, with its default; the command line's flags are these fields."""

    model: str = _option("smollm2", "folder with config.json and safetensors, a .gguf file, or the name smollm2")
    load_format: str = _option(
        "auto", "auto: the model's own weights; dummy: random ones, of which only config.json is read",
        choices=("auto", "dummy"),
    )  # fmt: skip
    s_part: str = _option(
        "native",
        "what computes the model: native, the families that 'fastdecode models' lists; transformers, other causal "
        "models too, on transformers' own code",
        choices=S_PARTS,
    )
    trust_remote_code: bool = _option(False, "with --s-part transformers: run the code that the model's folder brings")
    num_layers: int | None = _option(
        None, "run the first N layers only, to measure or to calibrate: the text means nothing; default: all"
    )
    ranks: int | None = _option(
        None, "number of processes, rank 0 counted: 1 runs both parts in one process without MPI"
    )
    device: str = _option("auto", "where the S-Part runs", choices=("auto", "cpu", "cuda"))
    dtype: str = _option(
        "auto",
        "type of the S-Part; auto: fp32 on a CPU, the checkpoint's own on a GPU",
        choices=("auto", *DTYPE_BYTES),
    )
    weight_dtype: str = _option(
        "auto",
        "type of the S-Part's matrices; auto: as --dtype; int8: 8 bits with scale and offset for each 32, on a CPU",
        choices=WEIGHT_DTYPES,
    )
    cuda_graphs: str = _option(
        "auto",
        "replay the stages of decode as CUDA graphs; auto: where the S-Part is on a GPU",
        choices=("auto", "off"),
    )
    wire_dtype: str = _option("fp16", "type of q, k, v and o on the wire", choices=tuple(DTYPE_BYTES))
    kv_dtype: str = _option(
        "fp16", "type of the KV cache: fp32, fp16, bf16, int8, int4, or both as k=int8,v=int4", metavar="TYPE"
    )
    num_slots: int = _option(2, "mini-batches that alternate between S-Part and R-Part; 1: no overlap")
    max_batch_size: int = _option(256, "most sequences in decode at once, over all slots")
    max_prefill_tokens: int = _option(512, "most prompt tokens that pass all layers between two decode steps")
    prefill_chunk_tokens: int = _option(256, "longest piece of a prompt that passes a layer at once")
    max_context_len: int | None = _option(None, "longest prompt plus output; default: the model's own limit")
    overlong: str = _option(
        "error",
        "a prompt that leaves no room for a new token fails, or is cut: of its start, of its end",
        choices=("error", "truncate-left", "truncate-right"),
    )
    merge_system: bool = _option(
        False, "where the chat template refuses a system message, put it before the user's first message"
    )
    schedule: str = _option(
        "greedy",
        "when prefilled sequences start to decode: as soon as they can, or so that the load of each step stays level",
        choices=SCHEDULES,
    )
    start_interval: int | None = _option(
        None, "load-stabilizing: steps from one micro-batch to the next; default: from batch size and lengths"
    )
    load_limit: int | None = _option(
        None,
        "load-stabilizing: most tokens that a step may read if all run to their bounds, averaged over layers; default: "
        "none, the pace levels the load",
    )
    r_worker_weights: str = _option(
        "auto",
        "share of the load of each R-worker: auto (by measured speed of attention and link), equal, or a number "
        "for each, e.g. 1,1,0.5",
        metavar="SHARES",
    )
    profile: str | None = _option(
        None,
        "r_worker_weights auto: file of fastdecode calibrate on these ranks, whose figures count until the run has "
        "measured its own; default: equal shares until then",
        metavar="FILE",
    )
    block_size: int = _option(32, "tokens in one block of the KV cache")
    kv_memory_bytes: int | None = _option(
        None,
        "KV cache of each R-worker, e.g. 40G; default: its share of the memory this process may use",
        metavar="SIZE",
    )
    threads: int | None = _option(
        None, "threads of each rank; default: OMP_NUM_THREADS, SLURM_CPUS_PER_TASK, or this rank's cores"
    )
    pin_threads: bool | None = _option(
        None,
        "bind each thread of an R-worker to a core of its own; default: where the rank shares no cores with others "
        "and OpenMP has not been told how to bind",
    )
    allow_oversubscribe: bool = _option(
        False,
        "run even where ranks are placed badly: on the same cores, with fewer cores than threads, over several NUMA "
        "nodes; default: such a job is refused under a batch scheduler, and warned elsewhere",
    )
    wait: str = _option(
        "auto",
        "how a rank waits for another: spin answers at once, sleep leaves the core to others; auto: spin where its "
        "host has a core for every thread",
        choices=("auto", "spin", "sleep"),
    )
    isa: str | None = _option(
        None, "instruction set of the kernels; default: FASTDECODE_ISA, or the best that all ranks have",
        choices=("scalar", "avx2", "avx512", "avx512bf16", "neon"),
    )  # fmt: skip
    isa_per_rank: bool = _option(False, "let each rank use its own best instruction set")
    batch_invariant: bool | None = _option(
        None, "make a row's bits independent of its batch; default: on for a native S-Part on a CPU"
    )
    watchdog_s: float = _option(300.0, "seconds that a wait for another rank may take before the job is ended")
    seed: int = _option(0, "seed of rows that bring none")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            choices, value = spec.metadata.get("choices"), getattr(self, spec.name)
            if choices and value is not None:
                check_choice(spec.name, value, choices)
        parse_kv_dtype(self.kv_dtype)
        for name in ("num_slots", "max_batch_size", "max_prefill_tokens", "block_size"):
            check_at_least(name, getattr(self, name), 1)
        if self.r_worker_weights not in WEIGHT_WORDS:
            parse_weights(self.r_worker_weights)
        if self.profile is not None and self.r_worker_weights != "auto":
            raise ConfigError(
                f"profile is {show(self.profile)}, which r_worker_weights auto starts with; it is "
                f"{self.r_worker_weights}: leave one of the two out"
            )
        for name in ("start_interval", "load_limit"):
            if getattr(self, name) is not None and self.schedule != "load-stabilizing":
                raise ConfigError(f"{name} is of the load-stabilizing schedule; the schedule is {self.schedule}")
        for name in (
            "num_layers",
            "ranks",
            "max_context_len",
            "kv_memory_bytes",
            "threads",
            "start_interval",
            "load_limit",
        ):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        if self.s_part == "native" and self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code is of s_part 'transformers'; s_part is 'native', which runs no such code"
            )
        if self.s_part != "native" and self.batch_invariant:
            raise ConfigError(
                f"batch_invariant is of the native S-Part; s_part is {self.s_part!r}, whose rows may be rounded "
                "otherwise in another batch"
            )
        if self.prefill_chunk_tokens < 8 or self.prefill_chunk_tokens % 8:
            raise ConfigError(f"prefill_chunk_tokens is {self.prefill_chunk_tokens}; it must be a multiple of 8")
        if self.block_size % 8:
            raise ConfigError(f"block_size is {self.block_size}; it must be a multiple of 8")
        if not self.watchdog_s > 0:
            raise ConfigError(f"watchdog_s is {self.watchdog_s}; it must be above 0")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}; it must be between 0 and 2**64 - 1")

    def as_dict(self) -> dict[str, Any]:
        """The effective options as plain values, for the report."""
        return dataclasses.asdict(self)


def option_defaults() -> dict[str, Any]:
    """The default of every option of a run, as plain values."""
    return RunConfig().as_dict()


def differences(before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """How values that a file keeps differ from those of now, a sentence each.

    A name that one side lacks was not there when it was written, so what it names was as it is by default. A name
    without a default is of another version: it is told.

    Parameters
    ----------
    before, now, defaults : mapping
        Values by name.
    """
    found = []
    for name in sorted({*before, *now}):
        values = [{**defaults, **side}.get(name, _UNKNOWN) for side in (before, now)]
        if values[0] != values[1]:
            old, new = ("unknown" if value is _UNKNOWN else show(value) for value in values)
            end = "this version of the program does not have it" if values[1] is _UNKNOWN else f"now it is {new}"
            found.append(f"{name} was {old}, {end}")
    return found
