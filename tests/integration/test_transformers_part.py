"""Models on transformers' own code, halted at each attention, against the same models as they are."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_files
from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.s_part import build, transformers_kind
from fastdecode_hpc.s_part.kinds import find_kind
from fastdecode_hpc.s_part.products import pack
from fastdecode_hpc.s_part.reference import Reference
from fastdecode_hpc.s_part.transformers_part import TransformersSPart
from fastdecode_hpc.sequence import SamplingParams
from fastdecode_hpc.validate import make_intake
from tiny_models import MORE_OTHERS, OTHERS, load_reference, make_checkpoint, random_prompt, reference_logits

TOLERANCE = 1e-4


def load(path: Path, **options: Any) -> TransformersSPart:
    kind = find_kind(RunConfig(model=str(path), s_part="transformers", **options), path)
    model = kind.read_model()
    s_part = kind.build(model, threads=1, max_context_len=model.max_context_len, progress=None)
    assert isinstance(s_part, TransformersSPart)
    return s_part


def logits_of_text(s_part: TransformersSPart, token_ids: list[int], sizes: list[int]) -> Iterator[Tensor]:
    """Logits of all tokens, in chunks of these sizes; gives way after each layer of a chunk."""
    config, start = s_part.config, 0
    keys = [torch.empty(0, config.kv_size) for _ in range(config.num_layers)]
    values, logits = list(keys), []
    rows = s_part.make_pass(max(sizes))
    for size in sizes:
        chunk = token_ids[start : start + size]
        rows.start(torch.tensor(chunk), torch.arange(start, start + size), size)
        for layer in range(config.num_layers):
            qkv = rows.pre_attention(layer, size)
            q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=1)
            keys[layer], values[layer] = torch.cat((keys[layer], k)), torch.cat((values[layer], v))
            yield logits  # others come between
            rows.post_attention(layer, s_part.prefill_attention(layer, q, keys[layer], values[layer], start))
        logits.append(s_part.logits(rows.hidden))
        start += size
    yield torch.cat(logits)


@pytest.mark.parametrize("name", [*OTHERS, *MORE_OTHERS, "gemma2", "phi3-long"])
def test_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name)
    s_part, reference = load(tmp_path), load_reference(tmp_path)
    texts = [random_prompt(45, seed=1), random_prompt(45, seed=2)]
    # Two texts at once, at different places: one in chunks, the other token by token after its first chunk.
    running = [logits_of_text(s_part, texts[0], [24, 16, 5]), logits_of_text(s_part, texts[1], [20, *[1] * 25])]
    last = [None, None]
    for number, turn in itertools.chain.from_iterable(((0, a), (1, b)) for a, b in itertools.zip_longest(*running)):
        last[number] = turn if turn is not None else last[number]
    for text, logits in zip(texts, last, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, text), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        Reference(s_part).logits(texts[0]), reference_logits(reference, texts[0]), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize(
    ("name", "windows", "scale", "softcap"),
    [
        ("cohere2", [16, 16, 16, None, 16], None, None),
        ("exaone4", [16, 16, 16, None, 16], None, None),
        ("gemma2", [16, None, 16, None], 20**-0.5, 3.0),
        ("granite", [None, None], 0.3, None),
    ],
)
def test_what_kernels_must_know_is_found_by_a_dry_run(
    name: str, windows: list[int | None], scale: float | None, softcap: float | None, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, name)
    (tmp_path / "model.safetensors").unlink()
    model = find_kind(RunConfig(s_part="transformers"), tmp_path).read_model()
    assert [model.window_of(layer) for layer in range(model.num_layers)] == windows
    assert (model.attention_scale, model.attention_softcap) == (scale, softcap)
    assert (model.num_heads, model.num_kv_heads, model.vocab_size, model.max_context_len) == (4, 2, 320, 512)
    assert model.eos_token_ids == (2,)


def test_weights_count_as_the_checkpoint_holds_them(tmp_path: Path) -> None:
    for name, twice in (("seed_oss", 0), ("cohere", 4 * 320 * 64)):  # a head that is the embedding is packed beside it
        folder = make_checkpoint(tmp_path / name, name)
        kind = find_kind(RunConfig(s_part="transformers"), folder)
        held = (folder / "model.safetensors").stat().st_size + twice
        assert held - 16384 < kind.weights_bytes(kind.read_model()) < held
        half = find_kind(RunConfig(s_part="transformers", dtype="bf16"), folder)
        assert 2 * half.weights_bytes(half.read_model()) == kind.weights_bytes(kind.read_model())


def test_the_first_layers_alone_are_the_model_of_so_many_layers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "cohere2")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tmp_path)
    config.layer_types, config.num_hidden_layers = config.layer_types[:2], 2
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    run = RunConfig(s_part="transformers", num_layers=2)
    kind = find_kind(run, tmp_path)
    model = dataclasses.replace(kind.read_model(), num_layers=2)
    s_part = kind.build(model, threads=1, max_context_len=512, progress=None)
    text = random_prompt(20)
    torch.testing.assert_close(
        Reference(s_part).logits(text), reference_logits(reference.eval(), text), atol=TOLERANCE, rtol=0
    )


def test_random_weights_and_half_types(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "smollm3")
    (tmp_path / "model.safetensors").unlink()
    for dtype in ("fp32", "bf16", "fp16"):
        logits = Reference(load(tmp_path, load_format="dummy", dtype=dtype)).logits(random_prompt(9))
        assert logits.dtype == torch.float32
        assert torch.isfinite(logits).all()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors"):
        load(tmp_path)


def test_loading_is_told_of_and_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "arcee")
    kind, told = find_kind(RunConfig(s_part="transformers"), tmp_path), []
    model = kind.read_model()
    kind.build(model, threads=1, max_context_len=512, progress=lambda done, total: told.append((done, total)))
    total = kind.weights_bytes(model)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({done for done, _ in told}) > 15  # parameter by parameter, as natively
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "1.mlp" not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight, model\.layers\.1\.mlp\.up"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load(tmp_path)


def test_loading_logs_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "TELL_EVERY_S", 0.0)
    make_checkpoint(tmp_path, "arcee")
    with caplog.at_level("INFO", logger=build.__name__):
        load(tmp_path)
    lines = [line for line in caplog.messages if line.startswith("weights: ")]
    assert len(lines) > 15
    assert re.fullmatch(r"weights: (.*) of \1 are in place", lines[-1])
    assert "Loading weights" not in capfd.readouterr().err  # the bar of transformers


@pytest.mark.parametrize("quantised", [False, True])
def test_the_shape_is_read_on_any_machine_from_no_weights(
    quantised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "cohere2")
    path = tmp_path / "config.json"
    if quantised:
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    plain = find_kind(RunConfig(s_part="transformers"), tmp_path).read_model()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as on a host with a GPU
    for name in ("choose_device", "choose_dtype", "SafetensorsCheckpoint"):
        monkeypatch.setattr(transformers_kind, name, lambda *args: pytest.fail("a device or weights were looked at"))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    for device in ("auto", "cpu", "cuda"):
        intake = make_intake(str(tmp_path), RunConfig(s_part="transformers", device=device))
        assert intake.vocab_size == plain.vocab_size
        assert find_kind(RunConfig(s_part="transformers", device=device), tmp_path).read_model() == plain


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_bytes_of_a_quantised_checkpoint_are_those_of_the_layers_that_are_run(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "cohere2")
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    tensors = {name.replace("model.", prefix): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    monkeypatch.setattr(transformers_kind.transformers_model, "check_quantisation", lambda *args: None)
    kind = find_kind(RunConfig(s_part="transformers"), tmp_path)
    model = kind.read_model()
    for num_layers in (1, 2, model.num_layers):
        kept = [t for name, t in tensors.items() if not any(f"layers.{i}." in name for i in range(num_layers, 9))]
        assert kind.weights_bytes(dataclasses.replace(model, num_layers=num_layers)) == sum(t.nbytes for t in kept)


def write_config(folder: Path, kind: str, **options: Any) -> Path:
    """A config.json as transformers writes it, without weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **options)
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", "t5 has cross-attention"),
        ("mllama", "mllama has cross-attention"),
        ("bart", "bart has cross-attention"),
        ("mamba", "mamba has state-space or other recurrent layers"),
        ("jamba", "jamba has state-space"),
        ("bamba", "bamba has state-space"),
        ("falcon_h1", "falcon_h1 has state-space"),
        ("granitemoehybrid", "granitemoehybrid has linear attention"),
        ("lfm2", "lfm2 has state-space"),
        ("qwen3_next", "qwen3_next has linear attention"),
        ("minimax", "minimax has linear attention"),
        ("deepseek_v2", r"deepseek_v2 has latent attention \(MLA\)"),
        ("deepseek_v3", r"deepseek_v3 has latent attention \(MLA\)"),
        ("minicpm3", r"minicpm3 has latent attention \(MLA\)"),
        ("llama4_text", "llama4_text has attention within chunks"),
        ("bloom", "bloom has ALiBi"),
        ("gemma3", "gemma3 has inputs other than text"),
        ("gpt_oss", "GptOssModel can't be run: its attention has sinks.*; the native S-Part runs it: leave out"),
        ("falcon", r"FalconForCausalLM of transformers .* computes its attention itself"),
        ("stablelm", r"StableLmForCausalLM of transformers .* computes its attention itself"),
        ("gemma4_text", "the model's layers differ in head_dim"),
        ("diffllama", "DiffLlamaModel can't be run"),
        ("bert", "BertModel can't be run"),
        ("vit", "model max_position_embeddings is None"),
    ],
)
def test_what_can_not_be_run_is_refused_by_name_without_its_weights(kind: str, message: str, tmp_path: Path) -> None:
    write_config(tmp_path, kind)
    with pytest.raises(ConfigError, match=message):
        find_kind(RunConfig(s_part="transformers", load_format="dummy"), tmp_path).read_model()


def test_weights_are_packed_where_that_is_of_use(tmp_path: Path) -> None:
    model = load(make_checkpoint(tmp_path, "cohere"))._model
    modules = [module for module in model.modules() if type(module) is torch.nn.Linear]
    packed = pack(torch.ones(16, 16))
    if isinstance(packed, torch.Tensor):
        assert {module.weight.is_mkldnn for module in modules} == {packed.is_mkldnn}
    else:  # beside the panels nothing is left of a weight but what it is of
        assert {(len(m.weight), m.weight.dtype, m.weight.device.type) for m in modules} == {(0, torch.float32, "cpu")}
        with pytest.raises(RuntimeError):
            torch.nn.functional.linear(torch.ones(1, modules[0].in_features), modules[0].weight)
    embedding = model.get_input_embeddings().weight
    assert not embedding.is_mkldnn and len(embedding)


def test_a_model_whose_tokens_meet_outside_attention_is_refused(tmp_path: Path) -> None:
    s_part = load(make_checkpoint(tmp_path, "arcee"))
    s_part.check()
    s_part._model.model.embed_tokens.register_forward_hook(lambda module, ids, x: x + x.cumsum(dim=1))
    with pytest.raises(
        ConfigError, match=r"ArceeForCausalLM can't be run with its attention elsewhere: logits .* differ"
    ):
        s_part.check()


def test_code_of_the_folder_is_run_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    make_checkpoint(tmp_path, "llama")
    reference = load_reference(tmp_path)
    path = tmp_path / "config.json"
    own = {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (tmp_path / "own_code.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'was_run')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(
        ConfigError, match="needs Python code that its folder brings; read it, and let it run by --trust"
    ):
        load(tmp_path)
    assert not (tmp_path / "was_run").exists()
    text = random_prompt(20)
    ours = Reference(load(tmp_path, trust_remote_code=True)).logits(text)
    torch.testing.assert_close(ours, reference_logits(reference, text), atol=TOLERANCE, rtol=0)
    assert (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"is quantised \(gptq\), which transformers .* can't run here: .*GPTQ"),
        ({"quant_method": "awq", "bits": 4}, r"is quantised \(awq\), .*AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"is quantised \(bitsandbytes\), .*bitsandbytes"),
        ({"quant_method": "mystery"}, r"is quantised \(mystery\), .*Unknown quantization type"),
    ],
)
def test_quantised_checkpoints_that_transformers_can_not_run_are_refused_before_weights(
    config: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gptq", "awq", "bnb_4bit"):  # as if nothing of what these need were installed
        module = importlib.import_module(f"transformers.quantizers.quantizer_{name}")
        for available in (name for name in vars(module) if name.startswith("is_") and name.endswith("_available")):
            monkeypatch.setattr(module, available, lambda *args: False)
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    kind = find_kind(RunConfig(s_part="transformers"), tmp_path)
    model = kind.read_model()
    with pytest.raises(ConfigError, match=message):
        kind.weights_bytes(model)
    with pytest.raises(ConfigError, match=message):
        kind.build(model, threads=1, max_context_len=512, progress=None)
    with pytest.raises(ConfigError, match=rf"has a quantization_config .*; with --s-part transformers: .*{message}"):
        find_kind(RunConfig(), tmp_path).read_model()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_quantised_by_bitsandbytes_is_run(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    make_checkpoint(tmp_path / "plain", "arcee", hidden_size=128, intermediate_size=256)
    given = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_type="nf4"
    )
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=given, dtype=torch.float32, device_map={"": "cpu"}
    ).save_pretrained(tmp_path / "quantised")
    s_part, text = load(tmp_path / "quantised"), random_prompt(20)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantised", dtype=torch.float32, attn_implementation="eager", device_map={"": "cpu"}
    )
    ours, theirs = Reference(s_part).logits(text), reference_logits(reference, text)
    assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()  # 8 bit: activations are rounded, by row
    plain = reference_logits(load_reference(tmp_path / "plain"), text)
    assert not torch.allclose(ours, plain, atol=1e-3)  # it is the quantised one that is run
    kind = find_kind(RunConfig(s_part="transformers"), tmp_path / "quantised")
    whole = find_kind(RunConfig(s_part="transformers"), tmp_path / "plain")
    assert kind.weights_bytes(kind.read_model()) < 0.8 * whole.weights_bytes(whole.read_model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2**62}, "model num_hidden_layers is 4611686018427387904; it must be a whole number of"),
        ({"max_position_embeddings": 2**40}, "model max_position_embeddings is 1099511627776"),
        ({"num_attention_heads": 0}, "transformers .* cannot read the model"),
        ({"hidden_size": "wide"}, "transformers .* cannot read the model"),
        ({"model_type": "no-such-model"}, "transformers .* cannot read the model"),
        ({"head_dim": 12}, "head_dim is 12; the attention kernels take multiples of 8"),
    ],
)
def test_wrong_values_are_configuration_errors(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, "arcee", hidden_size=64, num_hidden_layers=2, num_attention_heads=4) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        find_kind(RunConfig(s_part="transformers", load_format="dummy"), tmp_path).read_model()


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trust_remote_code is of s_part 'transformers'"):
        RunConfig(trust_remote_code=True)
    with pytest.raises(ConfigError, match="batch_invariant is of the native S-Part"):
        RunConfig(s_part="transformers", batch_invariant=True)
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_files.gguf_file())
    with pytest.raises(ConfigError, match=r"model\.gguf is a GGUF file, which the native S-Part reads; leave out"):
        find_kind(RunConfig(s_part="transformers"), path)
    path.write_bytes(tiny_files.gguf_file(tiny_files.gguf_metadata(**{"general.architecture": (8, "mamba")})))
    with pytest.raises(ConfigError, match=r"architecture 'mamba'; of GGUF files .* are read$"):
        find_kind(RunConfig(s_part="transformers"), path)


def test_a_run_is_verified_and_goes_on_after_one_that_was_stopped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "cohere2")
    asked = itertools.count()
    stopping = [True]
    run = RunConfig(
        model=str(tmp_path), s_part="transformers", wire_dtype="fp32", kv_dtype="fp32", kv_memory_bytes=4 << 20,
        threads=1, max_batch_size=4, prefill_chunk_tokens=16, max_prefill_tokens=16,
    )  # fmt: skip
    engine = Engine(run, stop_requested=lambda: stopping[0] and next(asked) > 6)
    prompts = [random_prompt(length, seed=length) for length in (3, 40, 70, 9, 21)]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    stopped = engine.generate(prompts, params)
    assert any(completion.error is not None for completion in stopped)
    stopping[0] = False
    done = engine.generate(prompts, params)
    assert [len(completion.token_ids) for completion in done] == [30] * 5
    found = engine.verify(done)
    assert (found.num_requests, found.num_wrong) == (5, 0)
    assert all(verdict.is_exact for verdict in found.verdicts)
