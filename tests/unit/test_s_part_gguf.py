"""GGUF files, written with the gguf package, against their safetensors twins."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_shape import ModelConfig, RopeScaling
from fastdecode_hpc.s_part import rope
from fastdecode_hpc.s_part.weights import (
    LayerWeights,
    Weights,
    checkpoint_dtype,
    load_weights,
    read_model_config,
)
from gguf_twins import GGUF_CASES, add_sizes, make_q4_gguf, write_twin
from load_peak import measure_load_peak
from tiny_models import make_checkpoint

CPU = torch.device("cpu")
F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, index, *middle, kind = name.split(".")
        return f"blk.{index}.{LAYER_NAMES['.'.join(middle)]}.{kind}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order of rows in which llama.cpp keeps Q and K."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType],
    extra: dict[str, Any] | None = None,
) -> dict[str, np.ndarray]:
    """Write tensors in the given types (default F32); return what a reader must get back."""
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    writer.add_token_list([f"token{i}" for i in range(2000)])  # long enough to be skipped
    writer.add_token_types([1] * 2000)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_bos_token_id(1)
    for key, value in (extra or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ](key, value)
    expected = {}
    for name, value in tensors.items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        kind = types.get(name, F32)
        raw = quantize(interleave(value, heads) if heads else value, kind)
        writer.add_tensor(name if name == "rope_freqs.weight" else gguf_name(name), raw, raw_dtype=kind)
        expected[name] = dequantize(quantize(value, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}


def load(path: Path) -> Weights:
    return load_weights(path, read_model_config(path), dtype=torch.float32, device=CPU)


def all_tensors(weights: Weights) -> list[torch.Tensor]:
    inner = [tensor for layer in weights.layers for tensor in layer.tensors()]
    return [weights.embedding, *inner, weights.final_norm, weights.lm_head]


@pytest.mark.parametrize("family", ["llama", "tied", "biases"])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1])
def test_gguf_equals_its_safetensors_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, chunk_bytes: int
) -> None:
    monkeypatch.setattr("fastdecode_hpc.s_part.weights._CHUNK_BYTES", chunk_bytes)
    make_checkpoint(tmp_path, family)
    config = read_model_config(tmp_path)
    kinds = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "MXFP4", "F32")
    tensors = read_tensors(tmp_path)
    matrices = [name for name, value in tensors.items() if value.ndim == 2]
    types = {name: gguf.GGMLQuantizationType[kinds[i % len(kinds)]] for i, name in enumerate(matrices)}
    twin = write_gguf(tmp_path / "model.gguf", config, tensors, types)

    save_file({name: torch.from_numpy(value) for name, value in twin.items()}, tmp_path / "model.safetensors")
    pairs = zip(all_tensors(load(tmp_path / "model.gguf")), all_tensors(load(tmp_path)), strict=True)
    assert all(torch.equal(ours, expected) for ours, expected in pairs)


@pytest.mark.parametrize("name", GGUF_CASES)
def test_every_form_equals_its_safetensors_twin(tmp_path: Path, name: str) -> None:
    family, overrides = GGUF_CASES[name]
    config = write_twin(make_checkpoint(tmp_path, family, **overrides), tmp_path / "model.gguf")
    ours = read_model_config(tmp_path / "model.gguf")
    assert rounded(ours, norm=config.norm) == rounded(config)
    added = 1.0 if config.norm != ours.norm else 0.0  # the file keeps weights of norms that are kept less 1 elsewhere
    names = [*LayerWeights.__slots__]
    for mine, theirs in zip(load(tmp_path / "model.gguf").layers, load(tmp_path).layers, strict=True):
        for field in names:
            expected = getattr(theirs, field)
            expected = expected + added if field.endswith("norm") and expected is not None else expected
            assert (getattr(mine, field) is None) == (expected is None), field
            assert expected is None or torch.equal(getattr(mine, field), expected), field


def rounded(config: ModelConfig, **changes: object) -> dict[str, Any]:
    """The fields of a model, numbers as float32 keeps them; a scale of scores in full."""
    values = dataclasses.asdict(config) | {"attention_scale": config.score_scale, "eos_token_ids": (2,)} | changes
    return as_float32(values)


def as_float32(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_float32(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_float32(item) for item in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def test_rows_of_q_and_k_are_permuted_in_the_file(tmp_path: Path) -> None:
    rows = np.arange(16.0)[:, None]
    assert interleave(rows, 2)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.fixture
def twin(tmp_path: Path) -> tuple[Path, ModelConfig, dict[str, np.ndarray]]:
    make_checkpoint(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    return tmp_path / "model.gguf", read_model_config(tmp_path), read_tensors(tmp_path)


Twin = tuple[Path, ModelConfig, dict[str, np.ndarray]]


def test_config_of_gguf_equals_the_twins(twin: Twin) -> None:
    path, config, tensors = twin
    write_gguf(path, config, tensors, {})
    ours = read_model_config(path)
    assert ours.norm_eps == pytest.approx(config.norm_eps, rel=1e-6)
    expected = dataclasses.replace(config, norm_eps=ours.norm_eps, eos_token_ids=(2, 5))
    assert ours == expected


def test_llama3_scaling_is_recovered_from_its_divisors(twin: Twin) -> None:
    path, config, tensors = twin
    scaling = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    plain = rope.rope_frequencies(config)
    divisors = (plain / rope.scale_frequencies(plain, scaling)).numpy()
    assert len(set(np.round(divisors, 3))) > 2  # kept, blended and divided frequencies
    write_gguf(path, config, {**tensors, "rope_freqs.weight": divisors}, {})
    assert read_model_config(path).rope_scaling == scaling
    load(path)


def test_other_divisors_are_refused(twin: Twin) -> None:
    path, config, tensors = twin
    write_gguf(path, config, {**tensors, "rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}, {})
    with pytest.raises(ConfigError, match="which is not the llama3 scaling"):
        read_model_config(path)


def test_divisors_of_one_change_nothing(twin: Twin) -> None:
    path, config, tensors = twin
    write_gguf(path, config, {**tensors, "rope_freqs.weight": np.ones(8, np.float32)}, {})
    assert read_model_config(path).rope_scaling is None


def test_linear_scaling_and_window_are_read(twin: Twin) -> None:
    path, config, tensors = twin
    extra = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 32,
    }
    write_gguf(path, config, tensors, {}, extra)
    ours = read_model_config(path)
    assert ours.rope_scaling == RopeScaling("linear", 4.0)
    assert ours.sliding_window == 32


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_log_multiplier": 0.1,
            },
            "yarn_log_multiplier to 0.1; only 0 is supported",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.5},
            "a yarn scaling with factor 0.5; it must be above 1",
        ),
        ({"llama.expert_count": 8}, r"lacks llama\.expert_used_count"),
        ({"llama.expert_shared_count": 1}, r"sets llama\.expert_shared_count"),
        ({"llama.attention.key_length": 32}, "rope.dimension_count 16 and heads of 32"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale"),
    ],
)
def test_unsupported_features_are_refused_by_name(twin: Twin, extra: dict[str, Any], message: str) -> None:
    path, config, tensors = twin
    write_gguf(path, config, tensors, {}, extra)
    with pytest.raises(ConfigError, match=message):
        read_model_config(path)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba'; of GGUF files llama, qwen2"):
        read_model_config(tmp_path / "model.gguf")


def test_missing_and_unknown_tensors_are_named(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config, tensors = twin
    monkeypatch.setitem(LAYER_NAMES, "mlp.up_proj", "ffn_upper")
    write_gguf(path, config, tensors, {})
    with pytest.raises(ConfigError, match=r"lacks tensors .*blk\.0\.ffn_up\..*unknown tensors blk\.0\.ffn_upper"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 200, 30_000, -100])
def test_a_file_cut_short_is_refused(twin: Twin, keep: int) -> None:
    path, config, tensors = twin
    write_gguf(path, config, tensors, {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"damaged or cut-off|incomplete, copy it again|cannot mmap an empty file"):
        read_model_config(path)


def test_other_versions_are_refused(twin: Twin) -> None:
    path, config, tensors = twin
    write_gguf(path, config, tensors, {})
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 1)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="GGUF version 1; little-endian versions 2 and 3"):
        read_model_config(path)


@pytest.mark.parametrize(("kind", "name"), [("F32", "fp32"), ("BF16", "bf16"), ("F16", "fp16"), ("Q4_0", "fp16")])
def test_dtype_of_a_checkpoint(twin: Twin, kind: str, name: str) -> None:
    path, config, tensors = twin
    types = {key: gguf.GGMLQuantizationType[kind] for key, value in tensors.items() if value.ndim == 2}
    write_gguf(path, config, tensors, types)
    assert checkpoint_dtype(path) == name


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux /proc")
def test_peak_memory_of_loading_q4_as_float32(tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_layers=4, num_heads=12, num_kv_heads=4,
        head_dim=64, max_context_len=512,
    )  # fmt: skip
    make_q4_gguf(tmp_path / "model.gguf", config)
    ratio = measure_load_peak(tmp_path / "model.gguf")
    print(f"peak of loading is {ratio:.3f} x the weights")
    assert 0.95 < ratio < 1.2
