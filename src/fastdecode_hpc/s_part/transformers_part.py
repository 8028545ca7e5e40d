"""An S-Part that runs transformers' own code for a model, halted wherever that asks for attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.base import BaseSPart
from fastdecode_hpc.s_part.row_tiles import RowTiles
from fastdecode_hpc.s_part.suspended import Suspended
from fastdecode_hpc.s_part.transformers_model import ATTENTION

CHECK_TOKENS = 8
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""By which logits may differ from those of the model's own attention, as a share of the largest."""


class TransformersSPart(BaseSPart):
    """A causal model of transformers.

    Each row of a pass is a batch entry of one token at a place of its own, in prefill too: nothing but attention sees
    other tokens, which `check` makes sure of.

    Parameters
    ----------
    config : ModelConfig
    model : Module
        With its head, made with `transformers_model.ATTENTION`, on `device`.
    dtype : torch.dtype
    """

    can_be_recorded = False  # what a model's code does between two attentions isn't known

    def __init__(self, config: ModelConfig, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.layer_tiles, self.head_tiles = RowTiles(), RowTiles()
        self._model, self._base, self._prefix = model, model.base_model, model.base_model_prefix

    def make_pass(self, max_rows: int) -> TransformersPass:
        return TransformersPass(self)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode(), head_alone(self._model, self._prefix):
            logits: Tensor = self._model(inputs_embeds=hidden[:, None], use_cache=False).logits
        return logits[:, 0].float()

    def plain(self) -> TransformersSPart:
        """Itself: in the run's own type."""
        return self

    def hidden_states(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Input of the head, ``[num_rows, hidden_size]``; halts at each attention (`transformers_model.ATTENTION`)."""
        outputs = self._base(input_ids=token_ids[:, None], position_ids=positions[:, None], use_cache=False)
        hidden: Tensor = outputs.last_hidden_state[:, 0]
        return hidden

    def check(self) -> None:
        """Compare a short text with what the model gives when it computes attention itself.

        Raises
        ------
        ConfigError
            If they differ: then tokens meet elsewhere than in attention, or attention is told what isn't known here.
        """
        ids = torch.arange(CHECK_TOKENS, device=self.device) * 37 % self.config.vocab_size
        with torch.inference_mode():
            ours = self._logits_of_text(ids)
            self._model.set_attn_implementation("eager")
            try:
                theirs = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
            finally:
                self._model.set_attn_implementation(ATTENTION)
        # One expert chosen otherwise may change a token, so most of them count.
        error = float((ours - theirs).abs().amax(dim=1).median() / theirs.abs().max())
        if not error <= TOLERANCES[self.dtype]:
            raise ConfigError(
                f"{type(self._model).__name__} can't be run with its attention elsewhere: logits of a short text "
                f"differ by {error:.2g} of the largest from those that it gives alone; its tokens meet outside "
                "attention too, or attention depends on what R-workers aren't told"
            )

    def _logits_of_text(self, ids: Tensor) -> Tensor:
        config, rows = self.config, self.make_pass(len(ids))
        rows.start(ids, torch.arange(len(ids), device=self.device), len(ids))
        for layer in range(config.num_layers):
            q, k, v = rows.pre_attention(layer, len(ids)).split([config.q_size, config.kv_size, config.kv_size], dim=1)
            rows.post_attention(layer, self.prefill_attention(layer, q, k, v, 0))
        return self.logits(rows.hidden)


class TransformersPass:
    """Rows of a `TransformersSPart` (`s_part.base.Pass`): a suspended forward pass."""

    hidden: Tensor

    def __init__(self, s_part: TransformersSPart) -> None:
        self._s_part, self._last_layer = s_part, s_part.config.num_layers - 1
        self._forward: Suspended | None = None
        self._o: Tensor | None = None

    def start(self, token_ids: Tensor, positions: Tensor, num_rows: int) -> None:
        assert len(token_ids) == num_rows, (len(token_ids), num_rows)
        self._forward = Suspended(partial(self._s_part.hidden_states, token_ids, positions))
        self._o = None

    def pre_attention(self, layer: int, num_rows: int) -> Tensor:
        qkv = self._resume()
        assert self._forward is not None and not self._forward.is_done, f"the model ends before layer {layer}"
        return qkv

    def post_attention(self, layer: int, o: Tensor) -> None:
        self._o = o  # the rest of a layer is in one piece with what comes before the next attention
        if layer == self._last_layer:
            self.hidden = self._resume()
            assert self._forward is not None and self._forward.is_done, f"the model goes on after layer {layer}"

    def _resume(self) -> Tensor:
        assert self._forward is not None
        with torch.inference_mode():
            result: Tensor = self._forward.resume(self._o)
        return result


class _GivenHidden(torch.nn.Module):  # type: ignore[misc]
    """Stands in for a model without its head, and gives what comes in."""

    @property
    def decoder(self) -> _GivenHidden:
        """Some heads ask for the decoder inside."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **options: Any) -> _Outputs:
        return _Outputs(inputs_embeds)


class _Outputs:
    """What a model without its head gives, of which heads want more than they use."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


@contextmanager
def head_alone(model: Any, prefix: str) -> Iterator[None]:
    """The model's own head, with its scales and caps: what it is given as embeddings goes straight there."""
    base = model._modules[prefix]
    model._modules[prefix] = _GivenHidden()
    try:
        yield
    finally:
        model._modules[prefix] = base
