"""A model with weights in 8 bits: computed as with the values that are left, loaded within a layer's floats."""

from __future__ import annotations

import dataclasses
import json
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastdecode_hpc.config import INT8_WEIGHT_BYTES, ConfigError, RunConfig
from fastdecode_hpc.model_shape import Experts, ModelConfig
from fastdecode_hpc.s_part import wide_weights
from fastdecode_hpc.s_part.build import build_native
from fastdecode_hpc.s_part.int8_weights import Int8Weight
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.products import pack_part, unpacked
from fastdecode_hpc.s_part.reference import Reference
from fastdecode_hpc.s_part.weight_tensors import LayerWeights, Matrix, Weights
from fastdecode_hpc.s_part.weights import dummy_weights, load_weights, read_model_config
from fastdecode_hpc.setup import passing_on_host, weights_on_host
from gguf_twins import make_q4_gguf
from load_peak import can_build_within, measure_build_peak, random_state_dict
from tiny_models import make_checkpoint, random_prompt

CPU = torch.device("cpu")
MODEL = ModelConfig(320, 128, 256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, max_context_len=64)
MODELS = {
    "plain": MODEL,
    "tied": dataclasses.replace(MODEL, tie_embeddings=True),
    "experts": dataclasses.replace(MODEL, experts=Experts(4, 2)),
    "biases": dataclasses.replace(MODEL, attention_bias=True, output_bias=True, mlp_bias=True, gated=False),
}
models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def make_weights(config: ModelConfig, weight_dtype: str, dtype: torch.dtype = torch.float32) -> Weights:
    return dummy_weights(config, dtype=dtype, device=CPU, finish=partial(pack_part, weight_dtype=weight_dtype))


def make_s_part(config: ModelConfig, weights: Weights, *, batch_invariant: bool = False) -> SPart:
    dtype = weights.layers[0].attention_norm.dtype
    return SPart(config, weights, device=CPU, dtype=dtype, batch_invariant=batch_invariant)


def plain(weight: Matrix | list[Matrix] | None) -> torch.Tensor | None:
    if isinstance(weight, list):
        return torch.stack([unpacked(expert) for expert in weight])
    return None if weight is None else unpacked(weight)


def widened(weights: Weights) -> Weights:
    """The same values as plain tensors."""
    layers = [LayerWeights(*(plain(getattr(layer, name)) for name in layer.__slots__)) for layer in weights.layers]
    return Weights(unpacked(weights.embedding), layers, weights.final_norm, unpacked(weights.lm_head))


def logits_of(s_part: SPart, ids: list[int]) -> torch.Tensor:
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    hidden, config = s_part.embed(tokens, positions), s_part.config
    for layer in range(config.num_layers):
        q, k, v = s_part.pre_attention(layer, hidden, positions).split([config.q_size, *[config.kv_size] * 2], dim=1)
        hidden = s_part.post_attention(layer, hidden, s_part.prefill_attention(layer, q, k, v, 0))
    return s_part.logits(hidden)


def write_config(folder: Path, config: ModelConfig) -> None:
    """config.json of a Llama."""
    fields = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "max_position_embeddings": config.max_context_len, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))


@models
def test_logits_are_those_of_the_values_that_are_left(config: ModelConfig) -> None:
    weights, ids = make_weights(config, "int8"), random_prompt(40)
    got = logits_of(make_s_part(config, weights), ids)
    torch.testing.assert_close(got, logits_of(make_s_part(config, widened(weights)), ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(got, Reference(make_s_part(config, weights)).logits(ids), rtol=0, atol=1e-4)
    plain = logits_of(make_s_part(config, make_weights(config, "auto")), ids)
    assert 1e-4 < float((got - plain).abs().mean()) < 0.05  # rounded, not by much; an expert may be another


@models
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_is_what_the_set_up_reckons_with(config: ModelConfig, dtype: str) -> None:
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    weights = make_weights(config, "int8", torch_dtype)
    run = RunConfig(dtype=dtype, weight_dtype="int8")
    small = sum(
        value.numel() * value.element_size()
        for layer in weights.layers
        for name in layer.__slots__
        if name.endswith(("bias", "norm")) and (value := getattr(layer, name)) is not None
    )
    # Routers are in floats, in whole panels, which isn't reckoned.
    routers = sum(layer.router.nbytes for layer in weights.layers if layer.router is not None)
    if config.experts is not None:
        routers -= int(config.num_layers * config.experts.count * config.hidden_size * INT8_WEIGHT_BYTES)
    norm = weights.final_norm.numel() * torch_dtype.itemsize
    assert weights_on_host(run, config, "cpu") == weights.size_bytes - small - norm - routers
    floats = make_weights(config, "auto", torch_dtype).size_bytes
    assert weights.size_bytes < (0.5 if dtype == "fp32" else 0.7) * floats


def test_what_is_packed() -> None:
    tied, untied = make_weights(MODELS["tied"], "int8"), make_weights(MODEL, "int8")
    assert tied.embedding is tied.lm_head
    assert isinstance(untied.lm_head, Int8Weight) and isinstance(untied.embedding, torch.Tensor)
    mixture = make_weights(MODELS["experts"], "int8").layers[0]
    assert len(mixture.gate_up) == len(mixture.down) == 4
    assert all(isinstance(expert, Int8Weight) for expert in (*mixture.gate_up, *mixture.down))
    assert not isinstance(mixture.router, Int8Weight)


@models
def test_a_row_has_the_same_bits_in_any_batch(config: ModelConfig) -> None:
    for weight_dtype in ("auto", "int8"):
        s_part = make_s_part(config, make_weights(config, weight_dtype), batch_invariant=True)
        hidden, o = torch.randn(70, config.hidden_size), torch.randn(70, config.q_size)
        whole = s_part.post_attention(1, hidden, o)
        for first, last in ((0, 1), (1, 4), (4, 13), (13, 30), (30, 70)):
            part = s_part.post_attention(1, hidden[first:last], o[first:last])
            assert torch.equal(part, whole[first:last]), (weight_dtype, first)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "opt-350m", "gemma2"])
def test_checkpoints_of_families(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family)
    config, ids = read_model_config(path), random_prompt(30)
    run = RunConfig(model=str(path), device="cpu", weight_dtype="int8")
    s_part = build_native(run, config, path, threads=1, max_context_len=64)
    weights = load_weights(path, config, dtype=torch.float32, device=CPU)
    floats = SPart(config, weights, device=CPU, dtype=torch.float32, batch_invariant=False)
    exact = logits_of(floats, ids)
    got = logits_of(s_part, ids)
    assert float((got - exact).abs().mean()) < 0.02 * float(exact.abs().max())
    assert float((got - Reference(s_part).logits(ids)).abs().max()) < 1e-4 * float(exact.abs().max())


def test_a_layer_is_packed_before_the_next_one_is_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama-mha")
    config, seen = read_model_config(path), []

    def finish(part: Weights | LayerWeights) -> None:
        pack_part(part, "int8")
        seen.append(part)

    weights = load_weights(path, config, dtype=torch.float32, device=CPU, finish=finish)
    assert [id(part) for part in seen] == [id(part) for part in (weights, *weights.layers)]


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 24 layers, each 4 % of it."""
    config = ModelConfig(2048, 384, 768, 24, num_heads=6, num_kv_heads=2, head_dim=64, max_context_len=512)
    folder = tmp_path_factory.mktemp("deep")
    if request.param == "gguf":
        make_q4_gguf(folder / "model.gguf", config)
        return folder / "model.gguf"
    save_file({name: x.bfloat16() for name, x in random_state_dict(config).items()}, folder / "model.safetensors")
    write_config(folder, config)
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux /proc")
@pytest.mark.parametrize(("dtype", "weight_dtype"), [("fp32", "int8"), ("bf16", "int8"), ("bf16", "auto")])
def test_loading_takes_what_the_set_up_reckons_with(deep: Path, dtype: str, weight_dtype: str) -> None:
    config = read_model_config(deep)
    run = RunConfig(device="cpu", dtype=dtype, weight_dtype=weight_dtype)
    reckoned = weights_on_host(run, config, "cpu") + passing_on_host(run, config, "cpu")
    peak, held = measure_build_peak(deep, dtype, weight_dtype)
    print(f"peak {peak / 1e6:.1f} MB, weights {held / 1e6:.1f} MB, reckoned {reckoned / 1e6:.1f} MB")
    assert held <= peak < reckoned + (6 << 20)  # buffers of what is being read and packed
    assert peak < (0.5 if weight_dtype == "int8" else 0.6) * 4 * config.num_weights


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux /proc")
def test_a_model_that_fits_in_8_bits_only_is_loaded_where_memory_is_limited(deep: Path) -> None:
    config = read_model_config(deep)
    room = 2 * config.num_weights  # half of fp32
    assert can_build_within(room, deep, "fp32", "int8")
    assert not can_build_within(room, deep, "fp32", "auto")


@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_reference_widens_one_expert_at_a_time(
    weight_dtype: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most = 0, 0

    def widen(x: Matrix | None) -> torch.Tensor | None:
        nonlocal held, most
        wide = float32(x)
        if wide is not None and wide is not x:
            held, most = held + wide.nbytes, max(most, held + wide.nbytes)
            weakref.finalize(wide, free, wide.nbytes)
        return wide

    def free(num_bytes: int) -> None:
        nonlocal held
        held -= num_bytes

    float32 = wide_weights._float32
    monkeypatch.setattr(wide_weights, "_float32", widen)
    config = dataclasses.replace(MODEL, experts=Experts(16, 2), max_context_len=300)
    reference = Reference(make_s_part(config, make_weights(config, weight_dtype, dtype)))
    reference.logits(random_prompt(90))
    small = 4 * (config.experts.count + 8) * config.hidden_size  # the router, norms
    assert 0 < most <= 4 * (config.attention_weights + config.mlp_weights) + small
    assert most < 4 * config.layer_weights / 4


def test_on_a_gpu_they_are_refused() -> None:
    with pytest.raises(ConfigError, match="weight_dtype is int8 and the S-Part is on a GPU"):
        weights_on_host(RunConfig(weight_dtype="int8"), MODEL, "cuda")
    assert weights_on_host(RunConfig(), MODEL, "cuda") == 0
    assert passing_on_host(RunConfig(), MODEL, "cuda", verifies=True) == 0
    with pytest.raises(ConfigError, match="weight_dtype"):
        RunConfig(weight_dtype="int3")
