"""The words in which a family of decoders is described. A description is data: nothing here computes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REQUIRED = object()
"""In place of a default: config.json must have the value."""


@dataclass(frozen=True, slots=True)
class Key:
    """A value that config.json gives.

    Attributes
    ----------
    name : str
        Its key.
    default : Any
        What transformers assumes where the key is missing.
    choices : mapping, optional
        Our word for each value that can be computed; others are refused by name.
    power : float
        Of a number.
    newer : str
        What later versions of transformers call the key.
    """

    name: str
    default: Any = REQUIRED
    choices: Mapping[Any, Any] | None = None
    power: float = 1.0
    newer: str = ""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding, and how config.json tells its parameters."""

    theta: float = 10000.0  # default
    theta_key: str = "rope_theta"
    share: float = 1.0  # of a head's elements, by default
    share_key: str = ""  # empty: heads are rotated as a whole
    windowed_theta: float | None = None  # of layers with a window where these have parameters of their own
    windowed_key: str = "rope_local_base_freq"  # in files without parameters for each kind of layer
    longrope_names: tuple[str, ...] = ("longrope",)


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding-window attention, and how config.json tells which layers have it; all, where nothing is said.

    Attributes
    ----------
    default : int or None
        Where `sliding_window` is missing.
    enabled_by : str
        A flag without which there is no window.
    first : Key or None
        The first layer that has it.
    period : Key or None
        Every so many layers one sees all.
    """

    default: int | None = None
    enabled_by: str = ""
    first: Key | None = None
    period: Key | None = None


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """A mixture of experts, and how config.json tells its sizes."""

    count: Key
    per_token: Key
    normalised: bool | Key = True
    router_bias: bool = False


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What a checkpoint calls its tensors; ``.weight`` and ``.bias`` are left out.

    Attributes
    ----------
    prefix : str
        Put before all names but that of the head; checkpoints of the bare model lack it.
    layer : str
        Put before names of a layer, with its number in place of ``{}``.
    qkv : tuple of str
        Of q, k and v, or one for all.
    interleaved_qkv : bool
        Rows of one tensor for all are ordered by head, then q, k, v.
    permuted_qk : bool
        Rows of q and of k alternate between the halves of a head (interleaved rotary embedding).
    mlp_inputs : tuple of str
        Of gate and up, or one for both (or for up alone). With experts ``{}`` stands for an expert's number; without it
        one tensor holds all.
    is_transposed : bool
        Matrices of layers are ``[in, out]``.
    fused_experts : bool
        Of all experts there are tensors ``[experts, in, out]`` without an ending, with columns of gate and up in turn,
        and their biases, whose names end with ``_bias``.
    ignored : tuple of str
        Ends of names that mean nothing.
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    project_in: str = "project_in"
    project_out: str = "project_out"
    final_norm: str = "norm"
    head: str = "lm_head"
    layer: str = "layers.{}."
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    interleaved_qkv: bool = False
    permuted_qk: bool = False
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    mlp_inputs: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    sinks: str = "self_attn.sinks"
    is_transposed: bool = False
    fused_experts: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """How llama.cpp keeps a family.

    Attributes
    ----------
    architecture : str
    names : WeightNames
    values : mapping
        Fields of `ModelConfig` that are otherwise here than the family has them.
    scaled_by_width : int
        A number of layers: the model of so many scales scores by ``(hidden_size / heads) ** -0.5``, which its file
        doesn't say.
    truncates_yarn : bool
        Whether the ramp of a yarn scaling ends at whole frequencies, which files don't say.
    """

    architecture: str
    names: WeightNames
    values: Mapping[str, Any] = field(default_factory=dict)
    scaled_by_width: int = 0
    truncates_yarn: bool = True


@dataclass(frozen=True)
class Family:
    """One family of decoders.

    Attributes
    ----------
    name : str
        transformers' ``model_type``.
    architecture : str
        Its class, as config.json names it.
    models : str
        What people know of it.
    values : mapping
        Fields of `ModelConfig`: a `Key`, or what they always are. Fields that aren't named have their defaults.
    rotary : Rotary or None
        None: positions are learned.
    window : Window or None
    experts : ExpertKeys or None
    names : WeightNames
    computed : mapping
        Keys of config.json whose other values change the arithmetic in a way that isn't computed, with the values that
        are; the first is the default.
    gguf : GGUFForm or None
    """

    name: str
    architecture: str
    models: str
    values: Mapping[str, Any]
    rotary: Rotary | None = Rotary()
    window: Window | None = None
    experts: ExpertKeys | None = None
    names: WeightNames = WeightNames()
    computed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    gguf: GGUFForm | None = None
