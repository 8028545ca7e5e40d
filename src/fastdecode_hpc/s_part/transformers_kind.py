"""Makes an S-Part of a model's code in transformers: its shape by a dry run, its weights, a check that all fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fastdecode_hpc.config import DTYPE_BYTES, ConfigError, RunConfig, check_at_least, naming
from fastdecode_hpc.families.config_json import eos_ids, forms_to_take
from fastdecode_hpc.families.refused import KindError, reason_to_refuse
from fastdecode_hpc.files import read_json_object
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part import transformers_model
from fastdecode_hpc.s_part.build import choose_device, choose_dtype, load_timed
from fastdecode_hpc.s_part.checkpoint import read_model_config
from fastdecode_hpc.s_part.dry_run import Asked, dry_run, pin_rotations
from fastdecode_hpc.s_part.packed_modules import pack_modules, tied_head_weights
from fastdecode_hpc.s_part.safetensors_file import SafetensorsCheckpoint
from fastdecode_hpc.s_part.transformers_part import TransformersSPart, head_alone
from fastdecode_hpc.s_part.wire import TORCH_DTYPES
from fastdecode_hpc.typed_values import TypedValues

MAX_LAYERS = 2**12  # far above any model, as `model_shape` has it
MAX_CONTEXT = 2**24


class TransformersKind:
    """Any causal model whose code in transformers looks its attention up (`s_part.kinds.SPartKind`).

    Parameters
    ----------
    run : RunConfig
    path : Path
        Folder with config.json.
    """

    def __init__(self, run: RunConfig, path: Path) -> None:
        if path.suffix == ".gguf":
            read_model_config(path)  # the native S-Part may refuse it
            raise ConfigError(f"{path} is a GGUF file, which the native S-Part reads; leave out --s-part transformers")
        if run.weight_dtype != "auto":
            raise ConfigError(
                f"weight_dtype is {run.weight_dtype}, which the native S-Part has; leave it out with --s-part "
                "transformers"
            )
        self._run, self._path, self._trust = run, path, run.trust_remote_code
        with naming(path / "config.json"):
            self._raw = read_json_object(path / "config.json")
            reason = reason_to_refuse(self._raw)
            if reason:
                raise ConfigError(f"the model {self._raw.get('model_type')} has {reason}")
        transformers_model.be_quiet()
        self._config = transformers_model.read_config(path, trust_remote_code=self._trust)

    def read_model(self) -> ModelConfig:
        try:
            return self.read_alone()
        except KindError as error:
            raise ConfigError(f"{error}; {_natively(self._path)}") from error

    def read_alone(self) -> ModelConfig:
        """As `read_model`; `KindError` where the native S-Part may run the model."""
        longest = self._longest()
        model = self._empty(self._config)
        pin_rotations(model.modules(), longest)
        with naming(self._path / "config.json"):
            asked = dry_run(model.base_model, self._config.num_hidden_layers, longest)
            return self._as_shape(asked, _vocab_size(model, asked.hidden_size), longest)

    def check_machine(self) -> None:
        """Raise `ConfigError` where weights of this kind can't be run on this machine; none are read."""
        if self._is_quantised:
            forms = forms_to_take(self._raw, gguf="a GGUF file without --s-part transformers")
            transformers_model.check_quantisation(self._config, self._device, forms)

    def weights_bytes(self, model: ModelConfig) -> int:
        self.check_machine()
        if self._is_quantised:
            return SafetensorsCheckpoint(self._path).bytes_of(self._counts(model))
        empty = self._empty(self._first_layers(model))
        num_weights: int = sum(parameter.numel() for parameter in empty.parameters())
        if self._device.type == "cpu":
            num_weights += tied_head_weights(empty)  # it is there twice, packed and not
        return num_weights * DTYPE_BYTES[self._dtype]

    def build(
        self,
        model: ModelConfig,
        *,
        threads: int,
        max_context_len: int,
        progress: Callable[[int, int], None] | None,
    ) -> TransformersSPart:
        torch.set_num_threads(threads)
        total = self.weights_bytes(model)
        with load_timed(progress) as tell:
            loaded = self._load(model, lambda done, count: tell(total * done // count, total))
            pack_modules(loaded, partial(tell, total, total))
        pin_rotations(loaded.modules(), max_context_len)
        s_part = TransformersSPart(model, loaded, device=self._device, dtype=TORCH_DTYPES[self._dtype])
        s_part.check()
        return s_part

    # What depends on the machine is asked for when weights are about to be loaded: whoever wants the shape alone may be
    # elsewhere.

    @cached_property
    def _device(self) -> torch.device:
        return choose_device(self._run.device)

    @cached_property
    def _dtype(self) -> str:
        has_checkpoint = self._run.load_format != "dummy"
        return choose_dtype(self._run.dtype, self._device, self._path if has_checkpoint else None)

    @property
    def _is_quantised(self) -> bool:
        return self._run.load_format != "dummy" and getattr(self._config, "quantization_config", None) is not None

    def _load(self, model: ModelConfig, progress: Callable[[int, int], None]) -> Any:
        config, dtype = self._first_layers(model), TORCH_DTYPES[self._dtype]
        if self._run.load_format == "dummy":
            return transformers_model.dummy_model(
                config, dtype=dtype, device=self._device, seed=self._run.seed, trust_remote_code=self._trust
            )
        SafetensorsCheckpoint(self._path)  # damaged files are told as they are by the native S-Part
        return transformers_model.load_model(
            self._path, config, dtype=dtype, device=self._device, trust_remote_code=self._trust, progress=progress
        )

    def _counts(self, model: ModelConfig) -> Callable[[str], bool]:
        """Whether a tensor, by its name, is of the layers that `model` has, or of none."""
        if model.num_layers == self._config.num_hidden_layers:
            return lambda name: True
        whole = self._empty(self._config)
        names = [{name for name, _ in each.named_modules()} for each in (whole, self._empty(self._first_layers(model)))]
        left_out = names[0] - names[1]
        left_out |= {name.removeprefix(f"{whole.base_model_prefix}.") for name in left_out}  # of a bare model's files
        return lambda name: left_out.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format))

    def _first_layers(self, model: ModelConfig) -> Any:
        return transformers_model.first_layers(self._config, model.num_layers)

    def _empty(self, config: Any) -> Any:
        return transformers_model.empty_model(config, trust_remote_code=self._trust)

    def _longest(self) -> int:
        """The longest context that the model was made for; numbers that a dry run could not bear are refused."""
        largest = {"num_hidden_layers": MAX_LAYERS, "max_position_embeddings": MAX_CONTEXT}
        sizes = {name: getattr(self._config, name, None) for name in largest}
        with naming(self._path / "config.json"):
            for name, value in sizes.items():
                check_at_least(f"model {name}", value, 1, largest[name])
        longest = sizes["max_position_embeddings"]
        assert isinstance(longest, int)
        return longest

    def _as_shape(self, asked: Asked, vocab_size: int, longest: int) -> ModelConfig:
        config, given = self._config, TypedValues(self._path / "config.json", self._raw)
        head_dim, scale = asked.common("head_dim"), asked.common("scale")
        window, full_layers = asked.windows()
        bos = given.ids("bos_token_id")
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=asked.hidden_size,
            intermediate_size=4 * asked.hidden_size,  # what is between layers' attention nobody but the model knows
            num_layers=len(asked.layers),
            num_heads=asked.common("num_heads"),
            num_kv_heads=asked.common("num_kv_heads"),
            head_dim=head_dim,
            max_context_len=longest,
            tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            sliding_window=window,
            full_layers=full_layers,
            eos_token_ids=eos_ids(self._path, given),
            bos_token_id=bos[0] if bos else None,
            architecture=str(config.model_type),
            rotary_dim=0,  # positions are the model's own affair: no table of ours
            attention_scale=None if scale == head_dim**-0.5 else scale,
            attention_softcap=asked.common("softcap"),
        )


def _natively(path: Path) -> str:
    """What the native S-Part says of a model."""
    try:
        read_model_config(path)
    except ConfigError as error:
        told = str(error).removeprefix(f"{path / 'config.json'}: ")
        return f"without --s-part transformers: {told}"
    return "the native S-Part runs it: leave out --s-part transformers"


def _vocab_size(model: Any, hidden_size: int) -> int:
    """Logits that the head gives."""
    try:
        with torch.inference_mode(), head_alone(model, model.base_model_prefix):
            outputs = model(inputs_embeds=torch.empty(1, 1, hidden_size, device="meta"), use_cache=False)
            return int(outputs.logits.shape[-1])
    except Exception as error:  # its code is not ours
        raise ConfigError(
            f"the head of {type(model).__name__} can't be run alone: {type(error).__name__}: {error}"
        ) from error
