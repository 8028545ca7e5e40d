"""``bench fidelity``: the figures of real caches against transformers, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastdecode_hpc.bench.fidelity import measure
from fastdecode_hpc.cli import run_command
from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.s_part.build import build_native
from fastdecode_hpc.s_part.weights import read_model_config
from tiny_models import load_reference, make_checkpoint, reference_logits

CONTEXT = 48
TEXT = "".join(f"{n} bottles of beer, take {n * n % 97} down and pass it on; " for n in range(60))
BOS = 1


def save_tokenizer(folder: Path, *, bos: bool) -> None:
    """A tokenizer of bytes, ids from 3 on, as a file of the model folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": BOS, "</s>": 2, **{letter: 3 + place for place, letter in enumerate(letters)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@pytest.fixture(autouse=True)
def settings_of_the_process(monkeypatch):
    """The command is run in this process: what it sets for its own is put back."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("fastdecode_hpc.log.set_up_logging", lambda rank: None)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def checkpoint(request, tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", request.param)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("text") / "model")
    save_tokenizer(folder, bos=True)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def random_windows(num_windows: int, context: int = CONTEXT) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 320, (num_windows, context))


def reference_nll(checkpoint: Path, windows: np.ndarray) -> np.ndarray:
    """What transformers says of every token but each window's first: [num_windows, context - 1]."""
    model = load_reference(checkpoint)
    rows = [
        F.cross_entropy(reference_logits(model, ids)[:-1], torch.tensor(ids[1:]), reduction="none")
        for ids in windows.tolist()
    ]
    return torch.stack(rows).double().numpy()


def measure_tiny(checkpoint: Path, windows: np.ndarray, kv_dtypes: list[str]):
    config = RunConfig(model=str(checkpoint), dtype="fp32", batch_invariant=False)
    model = read_model_config(checkpoint)
    s_part = build_native(config, model, checkpoint, threads=1, max_context_len=windows.shape[1])
    return measure(s_part, windows, kv_dtypes, threads=2, block_size=16)


def test_fp32_gives_the_likelihoods_of_transformers(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "fastdecode_hpc.bench.fidelity.BATCH_TOKENS", 2 * CONTEXT
    )  # three batches, the last a short one
    windows = random_windows(5)
    expected = reference_nll(checkpoint, windows)
    (case,) = measure_tiny(checkpoint, windows, ["fp32"])
    assert case.num_tokens == expected.size == 5 * (CONTEXT - 1)
    assert case.mean_nll == pytest.approx(expected.mean(), abs=1e-4)
    assert case.perplexity == pytest.approx(math.exp(expected.mean()), rel=1e-4)
    assert (case.perplexity_change, case.perplexity_change_se, case.top1_agreement) == (0, 0, 1)


def test_narrow_types_differ_as_much_as_their_rounding(checkpoint: Path) -> None:
    fp32, fp16, bf16 = measure_tiny(checkpoint, random_windows(5), ["fp32", "fp16", "bf16"])
    assert 0 < fp16.max_logit_difference < bf16.max_logit_difference < 8
    assert 0 < abs(fp16.perplexity_change) < 1e-2
    assert 0 < fp16.perplexity_change_se < bf16.perplexity_change_se
    assert fp16.top1_agreement > 0.97
    assert fp32.bytes_per_token == 2 * fp16.bytes_per_token == 2 * bf16.bytes_per_token > 0


def test_every_token_sees_its_own_window_only(checkpoint: Path) -> None:
    windows = random_windows(3)
    alone = [measure_tiny(checkpoint, windows[i : i + 1], ["fp16"])[0].mean_nll for i in range(3)]
    (together,) = measure_tiny(checkpoint, windows, ["fp16"])
    assert together.mean_nll == pytest.approx(np.mean(alone), abs=1e-5)


def fidelity(*args: object) -> int:
    return run_command(["bench", "fidelity", *map(str, args)])


def test_the_command_prints_a_table_and_writes_json(text_model: Path, text: Path, tmp_path: Path, capsys) -> None:
    result = tmp_path / "fidelity.json"
    code = fidelity(
        "--model", text_model, "--text", text, "--context", CONTEXT, "--max-tokens", 300, "--threads", 1,
        "--kv-dtypes", "fp16", "bf16", "fp32", "--json", result,
    )  # fmt: skip
    assert code == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[2:]] == ["fp32", "fp16", "bf16"]
    content = json.loads(result.read_text())
    assert list(tmp_path.glob(".fidelity*")) == []
    assert content["machine"]["threads"] == 1
    assert content["machine"]["isa"]
    assert [case["name"] for case in content["cases"]] == ["fp32", "fp16", "bf16"]
    for case in content["cases"]:
        assert case["kv_dtype"] == case["name"]
        assert case["num_tokens"] == 300 // (CONTEXT - 1) * (CONTEXT - 1)
        assert case["perplexity"] == pytest.approx(math.exp(case["mean_nll"]))
        assert 0 < case["top1_agreement"] <= 1
    fp32, fp16, _ = content["cases"]
    assert fp16["perplexity_change"] == pytest.approx(fp16["perplexity"] / fp32["perplexity"] - 1, abs=1e-9)
    # Every window begins with the BOS that the tokenizer puts before a text, and then goes on in the text.
    ids = [
        3 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(c) for c in TEXT.replace(" ", "Ġ")[: 6 * (CONTEXT - 1)]
    ]
    windows = np.hstack([np.full((6, 1), BOS), np.array(ids).reshape(6, CONTEXT - 1)])
    assert fp32["mean_nll"] == pytest.approx(reference_nll(text_model, windows).mean(), abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--text", "missing.txt"), "plain UTF-8 text"),
        (("--text", "empty.txt"), "longer text"),
        (("--text", "short.txt"), "lower --context"),
        (("--text", "latin1.txt"), "plain UTF-8 text"),
        (("--max-tokens", 20), "raise the first or lower the second"),
        (("--max-tokens", 0), "at least 1"),
        (("--context", 1), "at least 2"),
        (("--context", 513), "at most 512"),
        (("--threads", 0), "at least 1"),
        (("--kv-dtypes", "fp16", "int9"), "'int9'"),
        (("--json", "nowhere/out.json"), "make it first"),
        (("--model", "nowhere"), "smollm2"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(
    flags: tuple, hint: str, text_model: Path, text: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("too short")
    Path("latin1.txt").write_bytes("é".encode("latin-1") * 100)
    assert fidelity("--model", text_model, "--text", text, "--context", CONTEXT, *flags) == 2
    assert hint in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(checkpoint: Path, text: Path, capsys) -> None:
    assert fidelity("--model", checkpoint, "--text", text) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_more_ranks_are_refused(text_model: Path, text: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert fidelity("--model", text_model, "--text", text) == 2
    assert "one process" in capsys.readouterr().err
