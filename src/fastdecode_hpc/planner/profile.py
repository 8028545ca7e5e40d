"""What a machine does in how long, as a file: measured by ``fastdecode calibrate``, or built from published figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, check_positive, naming, show
from fastdecode_hpc.files import read_json_object, write_json
from fastdecode_hpc.model_shape import Experts, ModelConfig, RopeScaling
from fastdecode_hpc.planner.curve import Curve
from fastdecode_hpc.typed_values import TypedValues

FORMAT = 1
OWN_CORES, WITH_RANK_0 = 0, 1  # core groups
MEASURED, PUBLISHED = "measured", "published"
PROFILES = Path(__file__).with_name("profiles")  # named ones, all of them published


@dataclass(frozen=True)
class SPartProfile:
    """Rank 0.

    Attributes
    ----------
    name : str
        The device.
    kind, weight_dtype : str
        What computed the model, and the type of its matrices, as ``--s-part`` and ``--weight-dtype`` take them.
    layer : Curve
        Rows that are computed, padding counted, to seconds of both halves of a layer of the profile's model.
    launch_s : float
        What of this does not grow with the model.
    head : Curve
        The same of logits and sampling.
    layer_tiles, head_tiles : tuple of int
        Row counts that the program runs these in, others being padded to them; none: any count.
    turn : Curve
        Rows of a mini-batch to seconds between two steps of a slot beside that: tokens, plan, reports, and what the
        first layers take longer than the others, with caches full of the head.
    stage : Curve
        Rows to seconds of a stage outside of its body: the loop, posting messages.
    chunk_s, chunk_piece_s, chunk_token_s, chunk_pair_s : float
        A chunk of prompts in one layer: for itself, for each prompt in it, for each token, for each pair of a query and
        a key it sees.
    memory_bytes, read_bandwidth : float
        Of the device, for comparison with keeping the KV cache there; 0: unknown.
    """

    name: str
    layer: Curve
    kind: str = "native"
    weight_dtype: str = "auto"
    launch_s: float = 0.0
    head: Curve = field(default_factory=lambda: Curve((1.0,), (0.0,)))
    layer_tiles: tuple[int, ...] = ()
    head_tiles: tuple[int, ...] = ()
    turn: Curve = field(default_factory=lambda: Curve((1.0,), (0.0,)))
    stage: Curve = field(default_factory=lambda: Curve((1.0,), (0.0,)))
    chunk_s: float = 0.0
    chunk_piece_s: float = 0.0
    chunk_token_s: float = 0.0
    chunk_pair_s: float = 0.0
    memory_bytes: float = 0.0
    read_bandwidth: float = 0.0

    @property
    def has_chunks(self) -> bool:
        """Whether prompts were measured."""
        return bool(self.chunk_s or self.chunk_piece_s or self.chunk_token_s or self.chunk_pair_s)


@dataclass(frozen=True)
class KVRates:
    """Attention over a cache of one type in one layer: ``call_s + pairs * pair_s + bytes / bytes_per_s``.

    A pair is a row and one of its KV heads.
    """

    bytes_per_s: float
    call_s: float = 0.0
    pair_s: float = 0.0


@dataclass(frozen=True)
class RPartProfile:
    """One R-worker and its link to rank 0.

    Attributes
    ----------
    name : str
        The processor, or the host.
    rates : mapping of str to KVRates
        By type of the cache, as ``--kv-dtype`` takes it.
    turn : Curve
        Rows of this worker in a slot to seconds at the start of a step.
    stage : Curve
        Rows to seconds of a stage beside attention and waits.
    latency_s, link_bytes_per_s : float
    memory_bytes, read_bandwidth : float
        0: unknown.
    threads : int
    core_group : int
        0: cores of its own. 1: those of rank 0. Above: workers with the same number share their cores.
    """

    name: str
    rates: Mapping[str, KVRates]
    turn: Curve = field(default_factory=lambda: Curve((1.0,), (0.0,)))
    stage: Curve = field(default_factory=lambda: Curve((1.0,), (0.0,)))
    latency_s: float = 0.0
    link_bytes_per_s: float = float("inf")
    memory_bytes: float = 0.0
    read_bandwidth: float = 0.0
    threads: int = 0
    core_group: int = OWN_CORES


@dataclass(frozen=True)
class NetworkProfile:
    """What all links share.

    Attributes
    ----------
    s_bytes_per_s : float
        Of rank 0's adapter, each way.
    switch_bytes_per_s : float
        Of a switch that carries both directions; infinite where it never limits.
    is_blocking : bool
        Messages keep sender and receivers busy, so that nothing covers them.
    """

    s_bytes_per_s: float = float("inf")
    switch_bytes_per_s: float = float("inf")
    is_blocking: bool = False


@dataclass(frozen=True)
class Profile:
    """A machine: rank 0 and its R-workers.

    Attributes
    ----------
    name : str
    source : str
        ``measured`` or ``published``.
    model : ModelConfig
        That was measured; other models are scaled from it.
    s_part : SPartProfile
    r_parts : tuple of RPartProfile
        One each R-worker; further ones are like these, in turn.
    network : NetworkProfile
    notes : tuple of str
        Where the figures come from, what was assumed.
    residuals : mapping
        Of a measured profile: relative error of the fit at each point, by name.
    """

    name: str
    source: str
    model: ModelConfig
    s_part: SPartProfile
    r_parts: tuple[RPartProfile, ...]
    network: NetworkProfile = NetworkProfile()
    notes: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    residuals: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_one_process(self) -> bool:
        """Whether both parts were measured on the same cores, where nothing overlaps."""
        return any(part.core_group == WITH_RANK_0 for part in self.r_parts)

    @property
    def s_part_options(self) -> dict[str, str]:
        """Options of a run whose S-Part is the one that was measured."""
        return {"s_part": self.s_part.kind, "weight_dtype": self.s_part.weight_dtype}

    def check_s_part(self, asked: Mapping[str, str | None]) -> None:
        """Raise unless these options of a run, None where one wasn't given, are of the S-Part that was measured.

        Raises
        ------
        ConfigError
            Naming the option, with the way out.
        """
        for name, measured in self.s_part_options.items():
            if asked.get(name) not in (None, measured):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} is {asked[name]}, and profile {self.name} was measured with {measured}; take a profile of "
                    f"fastdecode calibrate {flag} {asked[name]}"
                )

    def r_part(self, index: int) -> RPartProfile:
        """Of R-worker `index`, from 0."""
        return self.r_parts[index % len(self.r_parts)]


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile as JSON."""
    write_json(path, {"format": FORMAT, **_plain(dataclasses.asdict(profile))})


def find_profile(name: str) -> Path:
    """The file of this name, or of the published profile of that name.

    Raises
    ------
    ConfigError
        If there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    path = PROFILES / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in PROFILES.glob("*.json")))
        raise ConfigError(
            f"there is no profile {show(name)}; name a file that fastdecode calibrate wrote, or one of: {known}"
        )
    return path


def load_profile(name: str) -> Profile:
    """The profile in a file, or the published one of that name.

    Raises
    ------
    ConfigError
        If there is none, or the file holds something else.
    """
    path = find_profile(name)
    with naming(path):
        return _profile(TypedValues(path, read_json_object(path)))


def _profile(values: TypedValues) -> Profile:
    if values.get("format") != FORMAT:
        raise ConfigError(f"its format is {show(values.get('format'))}; this version reads {FORMAT}")
    source = values.text("source", "")
    if source not in (MEASURED, PUBLISHED):
        raise ConfigError(f"its source is {show(source)}; it must be {MEASURED} or {PUBLISHED}")
    parts = values.objects("r_parts")
    if not parts:
        raise ConfigError("it has no R-workers (r_parts)")
    return Profile(
        name=values.text("name", values.path.stem),
        source=source,
        model=model_of(values.inner("model")),
        s_part=_build(SPartProfile, values.inner("s_part")),
        r_parts=tuple(_r_part(part) for part in parts),
        network=_build(NetworkProfile, values.inner("network")),
        notes=values.texts("notes"),
        machine=dict(values.inner("machine")),
        residuals=dict(values.inner("residuals")),
    )


def model_of(values: TypedValues) -> ModelConfig:
    """The model whose fields stand in a JSON file.

    Raises
    ------
    ConfigError
        If one is missing or wrong.
    """
    fields = {spec.name for spec in dataclasses.fields(ModelConfig)}
    given: dict[str, Any] = {name: value for name, value in values.items() if name in fields}
    given["eos_token_ids"] = values.ids("eos_token_ids")
    try:
        if "rope_scaling" in given:
            given["rope_scaling"] = RopeScaling(**_with_tuples(values.inner("rope_scaling")))
        if "experts" in given:
            given["experts"] = Experts(**values.inner("experts"))
        return ModelConfig(**_with_tuples(given))
    except TypeError as error:
        raise ConfigError(f"its model is incomplete: {error}") from None


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as the tuples that they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _r_part(values: TypedValues) -> RPartProfile:
    rates = values.inner("rates")
    if not rates:
        raise ConfigError(f"R-worker {show(values.get('name'))} has no rates")
    by_dtype = {name: _build(KVRates, rates.inner(name)) for name in rates}
    part: RPartProfile = _build(RPartProfile, values, rates=by_dtype)
    return part


def _build(cls: Any, values: TypedValues, **given: Any) -> Any:
    """An instance of a dataclass of numbers, texts, flags and curves."""
    for spec in dataclasses.fields(cls):
        if spec.name in given or (spec.name not in values and not _is_needed(spec)):
            continue
        if spec.type == "Curve":
            given[spec.name] = _curve(values.inner(spec.name))
        elif spec.type == "tuple[int, ...]":
            given[spec.name] = _tiles(values, spec.name)
        elif spec.type == "str":
            given[spec.name] = values.text(spec.name, "")
        elif spec.type == "bool":
            given[spec.name] = values.flag(spec.name)
        elif spec.type == "int":
            given[spec.name] = values.whole(spec.name)
        else:
            given[spec.name] = _seconds_or_rate(values, spec.name)
    return cls(**given)


def _is_needed(spec: Any) -> bool:
    return spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING


def _seconds_or_rate(values: TypedValues, name: str) -> float:
    value = values.number(name)
    if name.endswith("per_s"):
        check_positive(name, value)
    elif value < 0:
        raise ConfigError(f"{name} is {value}; it must not be negative")
    return value


def _curve(values: TypedValues) -> Curve:
    return Curve(values.numbers("x"), values.numbers("seconds"))


def _tiles(values: TypedValues, name: str) -> tuple[int, ...]:
    sizes = tuple(map(int, values.numbers(name)))
    if any(b <= a for a, b in zip((0, *sizes), sizes, strict=False)):
        raise ConfigError(f"{name} is {sizes}; row counts must increase from above 0")
    return sizes


def _plain(value: Any) -> Any:
    """As JSON has it; an infinite rate is left out, which is its default."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item != float("inf")}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
