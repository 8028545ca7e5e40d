"""The one home of transformers in the S-Part: its configurations, its models, and the attention that these call.

Its models look their attention up in a table by name. Two names are ours: under one a model halts
(`s_part.suspended`) and hands over q, k and v; under the other, for dry runs, it is told what is asked for.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.s_part.suspended import halt

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.auto import AutoHfQuantizer
except ImportError as error:
    raise ConfigError(f"s_part 'transformers' needs transformers 5 or later: {error}") from error

logger = logging.getLogger(__name__)

ATTENTION = "fastdecode"
DRY_RUN = "fastdecode_dry_run"

# Called with an attention module, query, key, value [num_rows, heads, num_tokens, head_dim], the mask that `SeenTokens`
# stands for, and keyword arguments; gives [num_rows, num_tokens, heads, head_dim].
AskedAttention = Callable[..., Tensor]


class SeenTokens:
    """In a dry run it stands for a mask, and keeps the function that would have made it."""

    def __init__(self, mask_function: Callable[..., Tensor]) -> None:
        self.mask_function = mask_function


def read_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """The configuration of a causal model.

    Raises
    ------
    ConfigError
        If transformers doesn't know the model, or only the folder's own code does and that isn't trusted.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # of whatever kind: code and values come from the folder
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"the model {folder} needs Python code that its folder brings; read it, and let it run by "
                "--trust-remote-code"
            ) from error
        raise ConfigError(f"transformers {transformers.__version__} cannot read the model {folder}: {error}") from error
    config.use_cache = config.output_attentions = config.output_hidden_states = False
    return config


def first_layers(config: Any, num_layers: int) -> Any:
    """The configuration of a model's first layers."""
    config = copy.deepcopy(config)
    if num_layers != config.num_hidden_layers:
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None) is not None:
                setattr(config, name, getattr(config, name)[:num_layers])
        config.num_hidden_layers = num_layers
    return config


def empty_model(config: Any, *, trust_remote_code: bool) -> Any:
    """The model without memory for its weights (on the meta device), for a dry run.

    Raises
    ------
    ConfigError
        If there is no such model, or it doesn't look its attention up.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._experts_implementation = "batched_mm"  # the one whose shapes don't depend on what a token is
    with torch.device("meta"):
        model = _made(config, attention="eager", dtype=torch.float32, trust_remote_code=trust_remote_code)
    if not model._supports_attention_backend:
        raise ConfigError(
            f"{type(model).__name__} of transformers {transformers.__version__} computes its attention itself "
            "(_supports_attention_backend is not set), so it can't be given to R-workers"
        )
    model.set_attn_implementation(DRY_RUN)
    return model.eval()


def dummy_model(config: Any, *, dtype: torch.dtype, device: torch.device, seed: int, trust_remote_code: bool) -> Any:
    """The model with random weights, as transformers starts a training."""
    torch.manual_seed(seed)
    return _made(config, attention=ATTENTION, dtype=dtype, trust_remote_code=trust_remote_code).to(device, dtype).eval()


def load_model(
    folder: Path,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    progress: Callable[[int, int], None],
) -> Any:
    """The model with the weights of its safetensors.

    Parameters
    ----------
    progress : callable
        Called before each parameter with the number of those that are in place, and of all.

    Raises
    ------
    ConfigError
        If they don't fit.
    """
    quantised = getattr(config, "quantization_config", None) is not None
    place = {"device_map": {"": str(device)}} if quantised else {}  # such weights can't be moved or converted later
    try:
        with _counted(progress):
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=copy.deepcopy(config),
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **place,
            )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ConfigError(f"transformers {transformers.__version__} cannot load {folder}: {error}") from error
    missing = [*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])]
    if missing:
        raise ConfigError(f"the checkpoint {folder} lacks {', '.join(sorted(missing)[:8])}")
    return model.eval() if quantised else model.to(device).eval()


@contextmanager
def _counted(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Tell of what transformers would show a bar for; its first versions have no hook for that, and nothing is told."""
    set_hook = getattr(transformers.utils.logging, "set_tqdm_hook", lambda hook: None)

    def told(items: Sequence[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            progress(number, len(items))
            yield item

    def hook(make_bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return make_bar(told(*args), **options) if len(args) == 1 else make_bar(*args, **options)

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


def check_quantisation(config: Any, device: torch.device, forms: str) -> None:
    """Raise `ConfigError` unless transformers can run the checkpoint's quantisation, if it has one, on this machine.

    `forms` are the ways out, in words.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return
    try:
        quantiser = AutoHfQuantizer.from_config(given, pre_quantized=True)
        quantiser.validate_environment(dtype=torch.float32, device_map={"": str(device)})
    except Exception as error:  # whatever the library of the method says
        method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
        raise ConfigError(
            f"the model is quantised ({getattr(method, 'value', method)}), which transformers "
            f"{transformers.__version__} can't run here: {' '.join(str(error).split())}; take {forms}"
        ) from error


def be_quiet() -> None:
    """No progress bars and reports of transformers on standard error: rank 0 has its own."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def ask(attention: AskedAttention) -> None:
    """What models that were made with `DRY_RUN` call from now on."""
    AttentionInterface.register(DRY_RUN, lambda *inputs, **options: (attention(*inputs, **options), None))


def _made(config: Any, *, attention: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    try:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} has no causal model for this config.json: {error}"
        ) from error
    return model


def _halt(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one token of each row, ``[num_rows, heads, 1, head_dim]``, by whoever resumes the model."""
    o = halt(torch.cat([x.flatten(1) for x in (query, key, value)], dim=1))
    return o.to(query.dtype).unflatten(1, (1, query.shape[1], -1)), None


def _keep_mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> SeenTokens:
    return SeenTokens(mask_function)


# Under `ATTENTION` there is no mask, so none is made. A model is made only for names that are there already.
AttentionInterface.register(ATTENTION, _halt)
AttentionInterface.register(DRY_RUN, _halt)
AttentionMaskInterface.register(DRY_RUN, _keep_mask)
