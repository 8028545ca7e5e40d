"""The shape of a decoder: its sizes, and what its layers are made of; checked once, then frozen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fastdecode_hpc.config import ConfigError, check_at_least, check_choice, check_positive

# Far above any model there is: sums and products of a few of them stay within 64 bits, and lists of layers short.
_LARGEST_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": 2**12,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "head_dim": 256,
    "max_context_len": 2**24,  # positions are exact in float32 up to here
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``linear`` divides every frequency by `factor`; ``llama3`` divides the low ones, keeps the high ones and blends in
    between (Llama 3.1); so does ``yarn``, with a ramp between two numbers of rotations; ``longrope`` divides each by a
    number of its own: by one of `divisors`, or of `long_divisors` where a run's longest context is beyond
    `original_max_position`. One set of numbers holds for a whole run: keys in the cache are never rotated anew.
    """

    kind: str  # linear | llama3 | yarn | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    attention_factor: float = 1.0  # of cosines and sines
    beta_fast: float = 32.0  # rotations in the trained context: frequencies with more are kept
    beta_slow: float = 1.0  # with fewer are divided
    truncate: bool = True  # the ramp's ends to whole frequencies
    divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice("rope scaling type", self.kind, ("linear", "llama3", "yarn", "longrope"))
        for name in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"):
            check_positive(f"rope scaling {name}", getattr(self, name))
        check_at_least("rope scaling original_max_position", self.original_max_position, 1)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not getattr(self, high) > getattr(self, low):
                raise ConfigError(
                    f"rope scaling {high} is {getattr(self, high)}; it must be above {low}, {getattr(self, low)}"
                )
        for divisor in (*self.divisors, *self.long_divisors):
            check_positive("a divisor of rope scaling", divisor)

    def for_context(self, max_context_len: int) -> RopeScaling:
        """The scaling of a run with contexts of up to `max_context_len` tokens, which has one set of divisors."""
        if not self.long_divisors:
            return self
        divisors = self.long_divisors if max_context_len > self.original_max_position else self.divisors
        return dataclasses.replace(self, divisors=divisors, long_divisors=())


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of MLPs of which each token passes a few."""

    count: int
    per_token: int
    normalised: bool = True  # the chosen ones' weights sum to 1
    router_bias: bool = False

    def __post_init__(self) -> None:
        check_at_least("model's number of experts", self.count, 1, 2**12)
        check_at_least("model's experts per token", self.per_token, 1, self.count)


_CHOICES = {
    "norm": ("rms", "rms-plus-one", "layer"),
    "norm_place": ("before", "after", "both", "sum"),
    "qk_norm": ("", "head", "row"),
    "activation": ("silu", "gelu", "gelu-tanh", "relu", "clamped-swiglu"),
}
_SCALES = ("embedding_scale", "residual_scale", "logit_divisor")
_OPTIONAL_NUMBERS = ("windowed_rope_theta", "attention_scale", "attention_softcap", "logit_softcap")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, as both parts need it: its sizes, and what its layers are made of (by default as Llama's)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert where there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False  # q, k, v projections
    output_bias: bool = False  # attention output projection
    mlp_bias: bool = False
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    architecture: str = "llama"  # name of its family's description
    norm: str = "rms"  # rms-plus-one: weights are kept less 1; layer: mean taken off, with a bias
    norm_place: str = "before"  # attention and MLP | after them | both | sum: of the residual sum
    qk_norm: str = ""  # none | head: of each head of q and k | row: over all heads at once
    activation: str = "silu"
    gated: bool = True  # MLP: activation(gate) * up; else activation(up)
    parallel: bool = False  # attention and MLP start from the same hidden states
    final_norm: bool = True
    rotary_dim: int | None = None  # elements of a head that are rotated; None: all; 0: none, positions are learned
    position_offset: int = 0  # row of position 0 among learned ones
    embedding_size: int | None = None  # of embedding and head, where projections lie between; None: hidden_size
    full_layers: tuple[int, ...] = ()  # those that see all, where there is a window
    windowed_rope_theta: float | None = None  # of layers with a window, which have no scaling then
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    attention_sinks: bool = False  # a learned score of each head that takes weight and has no value
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_divisor: float = 1.0
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name, largest in _LARGEST_SIZES.items():
            check_at_least(f"model {name}", getattr(self, name), 1, largest)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model has {self.num_heads} heads and {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 8:
            raise ConfigError(f"model head_dim is {self.head_dim}; the attention kernels take multiples of 8 up to 256")
        for name in ("norm_eps", "rope_theta", *_SCALES):
            check_positive(f"model {name}", getattr(self, name))
        for name in _OPTIONAL_NUMBERS:
            if getattr(self, name) is not None:
                check_positive(f"model {name}", getattr(self, name))
        for name, choices in _CHOICES.items():
            check_choice(f"model {name}", getattr(self, name), choices)
        if self.sliding_window is not None:
            check_at_least("model sliding_window", self.sliding_window, 1)
        check_at_least("model embedding_size", self.embedding_width, 1, _LARGEST_SIZES["hidden_size"])
        check_at_least("model position_offset", self.position_offset, 0, 2**10)
        if self.activation == "clamped-swiglu" and not self.gated:
            raise ConfigError("model activation is clamped-swiglu, which is of gated MLPs")
        self._check_rotation()
        for name in ("eos_token_ids", "full_layers"):
            for number in getattr(self, name):
                check_at_least(f"model {name}", number, 0)
        if self.bos_token_id is not None:
            check_at_least("model bos_token_id", self.bos_token_id, 0)

    def _check_rotation(self) -> None:
        rotated = self.rotated
        if not 0 <= rotated <= self.head_dim or rotated % 2:
            raise ConfigError(
                f"model rotary_dim is {self.rotary_dim}; it must be an even number of up to head_dim, {self.head_dim}"
            )
        for divisors in (self.rope_scaling.divisors, self.rope_scaling.long_divisors) if self.rope_scaling else ():
            if divisors and len(divisors) != rotated // 2:
                raise ConfigError(
                    f"the model's rope scaling has {len(divisors)} divisors; its {rotated} rotated elements need "
                    f"{rotated // 2}"
                )

    @property
    def q_size(self) -> int:
        """Elements of one row of q, and of one row of attention output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one row of k (or of v) in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Elements of one row ``[q|k|v]`` on the wire."""
        return self.q_size + 2 * self.kv_size

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated; 0: positions are learned."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0 where positions are rotated."""
        return 0 if self.rotated else self.max_context_len + self.position_offset

    @property
    def embedding_width(self) -> int:
        """Elements of a token's embedding."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def mlp_inputs(self) -> int:
        """Matrices of an MLP that read hidden states: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of a layer sees, itself included; None: all."""
        return None if layer in self.full_layers else self.sliding_window

    def for_context(self, max_context_len: int) -> ModelConfig:
        """The model of a run with contexts of up to `max_context_len` tokens (see `RopeScaling`)."""
        if self.rope_scaling is None:
            return self
        return dataclasses.replace(self, rope_scaling=self.rope_scaling.for_context(max_context_len))

    # Elements of matrices and of learned positions; biases and norms are left out.

    @property
    def attention_weights(self) -> int:
        """Of one layer: q, k, v and output projection."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size)

    @property
    def mlp_weights(self) -> int:
        """Of one MLP, or of one expert."""
        return (self.mlp_inputs + 1) * self.hidden_size * self.intermediate_size

    @property
    def layer_weights(self) -> int:
        """Of one layer, with all experts and their router."""
        if self.experts is None:
            return self.attention_weights + self.mlp_weights
        return self.attention_weights + self.experts.count * (self.mlp_weights + self.hidden_size)

    @property
    def active_weights(self) -> int:
        """Of one layer, those that one token passes."""
        if self.experts is None:
            return self.layer_weights
        passed = self.experts.per_token * self.mlp_weights + self.experts.count * self.hidden_size
        return self.attention_weights + passed

    @property
    def head_weights(self) -> int:
        """Of what gives logits."""
        return (self.vocab_size + self._projection) * self.embedding_width

    @property
    def num_weights(self) -> int:
        """Of the whole model."""
        inputs = self._projection if self.tie_embeddings else self.vocab_size + self._projection
        outside = self.head_weights + inputs * self.embedding_width + self.num_positions * self.hidden_size
        return self.num_layers * self.layer_weights + outside

    @property
    def _projection(self) -> int:
        """Columns of the projection between embedding and hidden states."""
        return 0 if self.embedding_size in (None, self.hidden_size) else self.hidden_size
