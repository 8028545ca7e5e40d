"""The shapes that are measured, as data; which belong together; how they are cut to fit the memory. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode_hpc.config import ConfigError, RunConfig, check_at_least
from fastdecode_hpc.host import format_bytes
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.schedule.kv_layout import KVLayout, make_layout

REFERENCE_DTYPE = "fp16"
CACHE_MULTIPLE = 8  # KV and read buffer are at least this times the last-level cache
MAX_LAYERS = 1024

Contexts = tuple[tuple[int, int], ...]  # (sequences, tokens each), the newest token included


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of decode attention."""

    name: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    contexts: Contexts

    @property
    def num_sequences(self) -> int:
        return sum(count for count, _ in self.contexts)

    @property
    def num_tokens(self) -> int:
        """Tokens whose K and V one call reads."""
        return sum(count * tokens for count, tokens in self.contexts)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [tokens for count, tokens in self.contexts for _ in range(count)]

    @property
    def shape(self) -> str:
        """The shape for people; what cases must share to be compared."""
        sequences = " + ".join(f"{count}x{tokens}" for count, tokens in self.contexts)
        return f"{sequences}, {self.num_heads}/{self.num_kv_heads} heads x {self.head_dim}"

    def layout(self, num_layers: int = 1) -> KVLayout:
        """The KV layout of a model of this shape."""
        model = ModelConfig(
            vocab_size=1,
            hidden_size=1,
            intermediate_size=1,
            num_layers=num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_context_len=max(self.lengths),
        )
        return make_layout(model, block_size=RunConfig().block_size, kv_dtype=self.kv_dtype)

    @property
    def call_bytes(self) -> int:
        """K and V that one call (all sequences, one layer) has to read."""
        group = self.layout().groups[0]
        return sum(count * group.row_bytes(tokens) for count, tokens in self.contexts)

    @property
    def memory_bytes(self) -> int:
        """What one layer takes in memory: whole blocks."""
        layout = self.layout()
        return sum(count * layout.bytes_for(tokens) for count, tokens in self.contexts)


def _heads(kv_dtype: str, suffix: str, contexts: Contexts, num_kv_heads: int = 32) -> Case:
    return Case(f"{kv_dtype}-{suffix}", kv_dtype, 32, num_kv_heads, 128, contexts)


_USUAL = ((32, 2048),)
CASES = (
    _heads("fp16", "mha", _USUAL),
    _heads("bf16", "mha", _USUAL),
    _heads("int8", "mha", _USUAL),
    _heads("int4", "mha", _USUAL),
    _heads("fp16", "gqa4", _USUAL, 8),
    _heads("int8", "gqa4", _USUAL, 8),
    _heads("int4", "gqa4", _USUAL, 8),
    _heads("fp16", "gqa8", _USUAL, 4),
    Case("fp16-gqa3", "fp16", 9, 3, 64, _USUAL),
    _heads("fp16", "short", ((256, 128),)),
    _heads("fp16", "long", ((1, 131072),), 8),
    _heads("fp16", "ragged", ((1, 30000), (200, 50)), 8),
)


def is_known(kv_dtype: str) -> bool:
    """Whether the KV cache of this version has the type."""
    try:
        RunConfig(kv_dtype=kv_dtype)
    except ConfigError:
        return False
    return True


def choose_cases(names: Sequence[str] = ()) -> list[Case]:
    """The cases of these names; without names all whose type is known.

    Raises
    ------
    ConfigError
        If there is no case of a name, or its type isn't known.
    """
    by_name = {case.name: case for case in CASES if is_known(case.kv_dtype)}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"there is no case {name!r}; there are {', '.join(by_name)}")
    return [case for name, case in by_name.items() if not names or name in names]


def custom_case(
    *, kv_dtype: str, num_heads: int, num_kv_heads: int | None, head_dim: int, batch: int, context: int
) -> Case:
    """A case of the user's own; by default each query head has a KV head.

    Raises
    ------
    ConfigError
        If such heads or such a type can't be.
    """
    check_at_least("batch", batch, 1)
    check_at_least("context", context, 2)
    RunConfig(kv_dtype=kv_dtype)
    case = Case("custom", kv_dtype, num_heads, num_kv_heads or num_heads, head_dim, ((batch, context),))
    case.layout()
    return case


def group_cases(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases of one shape together: they are measured in one interleaved run, fp16 first, added where it lacks."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.shape, []).append(case)
    return [_with_reference(group) for group in groups.values()]


def _with_reference(group: list[Case]) -> list[Case]:
    reference = [case for case in group if case.kv_dtype == REFERENCE_DTYPE]
    others = [case for case in group if case.kv_dtype != REFERENCE_DTYPE]
    return (reference or [reference_of(others[0])]) + others


def reference_of(case: Case) -> Case:
    """The fp16 case of the same shape."""
    known = {other.shape: other.name for other in CASES if other.kv_dtype == REFERENCE_DTYPE}
    name = known.get(case.shape, f"{case.name}-{REFERENCE_DTYPE}")
    return dataclasses.replace(case, name=name, kv_dtype=REFERENCE_DTYPE)


@dataclass(frozen=True, slots=True)
class SizedCase:
    """A case and the layers over which it cycles, so that no call finds its KV in a cache."""

    case: Case
    num_layers: int
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """KV in memory."""
        return self.case.call_bytes * self.num_layers


def fit_group(
    group: Sequence[Case], *, cache_bytes: int, memory_bytes: int, num_copies: float = 0.0
) -> list[SizedCase]:
    """Give the cases of a group enough layers; where one layer is too large, halve the contexts of all.

    Parameters
    ----------
    cache_bytes : int
        Last-level cache.
    memory_bytes : int
        What all cases together may take; each gets an equal part.
    num_copies : float
        How many parts others take.

    Raises
    ------
    ConfigError
        If not even one sequence of two tokens fits.
    """
    part_bytes = int(memory_bytes / (len(group) + num_copies))
    cases = list(group)
    while max(case.memory_bytes for case in cases) > part_bytes:
        if cases[0].num_tokens <= 2:
            raise ConfigError(
                f"case {group[0].name} does not fit the {format_bytes(memory_bytes)} of memory that there are for it; "
                "give the job more memory"
            )
        cases = [dataclasses.replace(case, contexts=halved(case.contexts)) for case in cases]
    sized = [SizedCase(case, _num_layers(case, cache_bytes, part_bytes)) for case in cases]
    return [_noted(one, asked, cache_bytes) for one, asked in zip(sized, group, strict=True)]


def _num_layers(case: Case, cache_bytes: int, part_bytes: int) -> int:
    wanted = math.ceil(CACHE_MULTIPLE * cache_bytes / case.call_bytes)
    return max(1, min(wanted, MAX_LAYERS, part_bytes // case.memory_bytes))


def halved(contexts: Contexts) -> Contexts:
    """Half the sequences of each length; where there is one of each, half the tokens."""
    if any(count > 1 for count, _ in contexts):
        return tuple((max(1, count // 2), tokens) for count, tokens in contexts)
    return tuple((count, max(1, tokens // 2)) for count, tokens in contexts)


def _noted(sized: SizedCase, asked: Case, cache_bytes: int) -> SizedCase:
    notes = []
    if sized.case.contexts != asked.contexts:
        notes.append(f"{asked.name} was cut to fit the memory: {asked.shape} asked, {sized.case.shape} measured")
    if sized.num_bytes < CACHE_MULTIPLE * cache_bytes:
        notes.append(
            f"{asked.name} reads {format_bytes(sized.num_bytes)} of KV, less than {CACHE_MULTIPLE} times the "
            f"last-level cache ({format_bytes(cache_bytes)}): its figures are partly those of the cache"
        )
    return dataclasses.replace(sized, notes=tuple(notes))


def split_names(text: str) -> list[str]:
    """Names that a flag gives with commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]
