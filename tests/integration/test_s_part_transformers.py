"""The S-Part against transformers in float32, with the decode attention replaced by a plain float64 softmax."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_files import resolve_model
from fastdecode_hpc.model_shape import Experts, ModelConfig
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.reference import Reference
from fastdecode_hpc.s_part.weights import dummy_weights, load_weights, read_model_config
from tiny_models import FAMILIES, load_reference, make_checkpoint, random_prompt, reference_greedy, reference_logits

TOLERANCE = 1e-4
CPU = torch.device("cpu")
SMOLLM2_CASES = Path(__file__).parent.parent / "data" / "smollm2_f32_greedy.json"


def load_s_part(path: Path, *, dtype: torch.dtype = torch.float32, batch_invariant: bool = True) -> SPart:
    config = read_model_config(path)
    weights = load_weights(path, config, dtype=dtype, device=CPU)
    return SPart(config, weights, device=CPU, dtype=dtype, batch_invariant=batch_invariant)


class DenseDecoder:
    """One sequence: prefill through the S-Part's own attention, decode through `plain_attention`."""

    def __init__(self, s_part: SPart) -> None:
        self.s_part, self.config = s_part, s_part.config
        kv_size = self.config.kv_size
        self.keys = [torch.empty(0, kv_size) for _ in range(self.config.num_layers)]
        self.values = [torch.empty(0, kv_size) for _ in range(self.config.num_layers)]
        self.context_len = 0

    def prefill(self, token_ids: list[int]) -> Tensor:
        """Logits of a chunk's tokens."""
        return self._forward(token_ids, is_decode=False)

    def decode(self, token: int) -> Tensor:
        return self._forward([token], is_decode=True)[0]

    def _forward(self, token_ids: list[int], *, is_decode: bool) -> Tensor:
        s_part, config, start = self.s_part, self.config, self.context_len
        positions = torch.arange(start, start + len(token_ids))
        hidden = s_part.embed(torch.tensor(token_ids), positions)
        for layer in range(config.num_layers):
            qkv = s_part.pre_attention(layer, hidden, positions)
            q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=1)
            k = self.keys[layer] = torch.cat((self.keys[layer], k.float()))
            v = self.values[layer] = torch.cat((self.values[layer], v.float()))
            sinks = s_part.weights.layers[layer].sinks
            o = (
                plain_attention(config, layer, q, k, v, sinks)
                if is_decode
                else s_part.prefill_attention(layer, q, k, v, start)
            )
            hidden = s_part.post_attention(layer, hidden, o)
        self.context_len += len(token_ids)
        return s_part.logits(hidden)


def plain_attention(
    config: ModelConfig, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q k / sqrt(d)) v of the newest token, head by head in float64, scaled and capped as the model says."""
    window, cap = config.window_of(layer) or k.shape[0], config.attention_softcap
    scale = config.attention_scale or 1 / np.sqrt(config.head_dim)
    shape = (-1, config.num_kv_heads, config.head_dim)
    keys, values = (x[-window:].reshape(shape).double().numpy() for x in (k, v))
    group = config.num_heads // config.num_kv_heads
    heads = []
    for head, query in enumerate(q.reshape(config.num_heads, config.head_dim).double().numpy()):
        scores = keys[:, head // group] @ query * scale
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights, sink = np.exp(scores), 0.0 if sinks is None else np.exp(sinks[head].double().item())
        heads.append(weights @ values[:, head // group] / (weights.sum() + sink))
    return torch.from_numpy(np.concatenate(heads)[None])


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("chunks", [[45], [24, 16, 5]], ids=["one-chunk", "three-chunks"])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["tiles", "whole"])
def test_prefill_and_decode_equal_transformers(checkpoint: Path, chunks: list[int], batch_invariant: bool) -> None:
    reference = load_reference(checkpoint)
    prompt = random_prompt(sum(chunks))
    expected_ids = reference_greedy(reference, prompt, 25)
    expected = reference_logits(reference, prompt + expected_ids)

    decoder = DenseDecoder(load_s_part(checkpoint, batch_invariant=batch_invariant))
    starts = np.cumsum([0, *chunks])
    logits = torch.cat([decoder.prefill(prompt[i:j]) for i, j in itertools.pairwise(starts)])
    torch.testing.assert_close(logits, expected[: len(prompt)], atol=TOLERANCE, rtol=0)

    token_ids, last = [], logits[-1]
    for step in range(24):
        token_ids.append(int(last.argmax()))
        last = decoder.decode(token_ids[-1])
        torch.testing.assert_close(last, expected[len(prompt) + step], atol=TOLERANCE, rtol=0)
    assert [*token_ids, int(last.argmax())] == expected_ids
    assert decoder.context_len > (decoder.config.sliding_window or 0)


def test_the_plain_reference_equals_transformers(checkpoint: Path) -> None:
    prompt = random_prompt(45)
    ours = Reference(load_s_part(checkpoint, batch_invariant=False)).logits(prompt)
    torch.testing.assert_close(ours, reference_logits(load_reference(checkpoint), prompt), atol=TOLERANCE, rtol=0)


def test_half_types_of_every_family_run_close_to_float32(checkpoint: Path) -> None:
    prompt = random_prompt(3)
    expected = DenseDecoder(load_s_part(checkpoint)).prefill(prompt)
    logits = DenseDecoder(load_s_part(checkpoint, dtype=torch.bfloat16)).prefill(prompt)
    assert torch.isfinite(logits).all()
    assert (logits - expected).square().mean() < 0.1 * expected.square().mean()


def test_random_weights_of_every_family_give_finite_logits(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    weights = dummy_weights(config, dtype=torch.float32, device=CPU)
    s_part = SPart(config, weights, device=CPU, dtype=torch.float32, batch_invariant=False)
    logits = DenseDecoder(s_part).prefill(random_prompt(9))
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 100


def test_sharded_checkpoint_has_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "sharded")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama3-rope-scaled", {"rope_scaling": None}),
        ("linear-rope", {"rope_scaling": None}),
        ("mistral-window", {"sliding_window": None}),
        ("yarn-rope", {"rope_scaling": None}),
        ("phi3-long", {"rope_scaling": None}),
        ("qwen2-windows", {"full_layers": ()}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma2", {"attention_scale": None}),
        ("gemma2", {"logit_softcap": None}),
        ("gemma3", {"windowed_rope_theta": None}),
        ("granite", {"embedding_scale": 1.0}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"attention_scale": None}),
        ("granite", {"logit_divisor": 1.0}),
        ("gpt-neox", {"parallel": False}),
        ("qwen3-moe", {"experts": Experts(8, 1)}),
        ("qwen3-moe-shares", {"experts": Experts(8, 2)}),
    ],
)
def test_each_feature_is_seen_by_this_comparison(tmp_path: Path, family: str, change: dict[str, Any]) -> None:
    import dataclasses

    make_checkpoint(tmp_path, family)
    prompt = random_prompt(45)
    expected = reference_logits(load_reference(tmp_path), prompt)
    config = dataclasses.replace(read_model_config(tmp_path), **change)
    weights = load_weights(tmp_path, config, dtype=torch.float32, device=CPU)
    s_part = SPart(config, weights, device=CPU, dtype=torch.float32, batch_invariant=False)
    assert (DenseDecoder(s_part).prefill(prompt) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_run_close_to_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, "llama", initializer_range=0.05)
    prompt = random_prompt(20)
    expected = reference_logits(load_reference(tmp_path), prompt)
    decoder = DenseDecoder(load_s_part(tmp_path, dtype=dtype))
    logits = decoder.prefill(prompt)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)
    assert torch.isfinite(decoder.decode(5)).all()


@pytest.fixture(scope="module")
def smollm2() -> SPart:
    try:
        return load_s_part(resolve_model("smollm2"))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_smollm2_gives_the_recorded_logprobs(smollm2: SPart, index: int) -> None:
    case = json.loads(SMOLLM2_CASES.read_text())["cases"][index]
    steps, token_ids = case["steps"], case["greedy_ids"]
    num_decoded = 4  # the steps before them are teacher-forced in one pass, which is many times faster
    decoder = DenseDecoder(smollm2)
    logits = list(decoder.prefill(case["prompt_ids"] + token_ids[: -num_decoded - 1]))[len(case["prompt_ids"]) - 1 :]
    logits += [decoder.decode(token) for token in token_ids[-num_decoded - 1 : -1]]
    assert len(logits) == len(steps) == len(token_ids)
    for row, step, token in zip(logits, steps, token_ids, strict=True):
        top_ids, expected = zip(*step["top5"], strict=True)
        np.testing.assert_allclose(row.double().log_softmax(-1)[list(top_ids)].numpy(), expected, atol=1e-3)
        assert int(row.argmax()) == step["token"] == token
