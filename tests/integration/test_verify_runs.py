"""Finished requests beside a plain reference: that is right, sound runs agree with it, corrupted ones are found."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.job import Job
from fastdecode_hpc.job_files import JobFiles
from fastdecode_hpc.r_part.attention import DecodeAttention
from fastdecode_hpc.s_part import reference
from fastdecode_hpc.s_part.model import SPart
from fastdecode_hpc.s_part.reference import Reference
from fastdecode_hpc.s_part.weights import load_weights, read_model_config
from fastdecode_hpc.sequence import Request, SamplingParams
from fastdecode_hpc.signals import StopRequest
from launching import fastdecode, read_records, write_requests
from tiny_models import FAMILIES, load_reference, make_checkpoint, random_prompt, reference_logits

CPU = torch.device("cpu")
FP32 = {"wire_dtype": "fp32", "kv_dtype": "fp32"}
LENGTH = 24
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3},
    "filtered": {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.3},
    "both": {"temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "n": 2},
}


# ---- the reference -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def make_reference(path: Path, dtype: torch.dtype) -> Reference:
    config = read_model_config(path)
    weights = load_weights(path, config, dtype=dtype, device=CPU)
    return Reference(SPart(config, weights, device=CPU, dtype=dtype, batch_invariant=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16-weights"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in-pieces"])
def test_the_reference_is_that_of_transformers_in_float32(
    family: Path, dtype: torch.dtype, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut:  # pieces that borders of windows and prompts don't meet
        monkeypatch.setattr(reference, "LAYER_ROWS", 13)
        monkeypatch.setattr(reference, "SCORE_VALUES", 4 * 45 * 3)
    model = load_reference(family)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(dtype))
    prompt = random_prompt(45)
    torch.testing.assert_close(
        make_reference(family, dtype).logits(prompt), reference_logits(model, prompt), atol=1e-4, rtol=0
    )


def test_attention_of_a_long_text_is_computed_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    softmax = torch.Tensor.softmax

    def counted(x: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, x.numel())
        return softmax(x, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", counted)
    monkeypatch.setattr(reference, "SCORE_VALUES", 1 << 14)
    make_reference(make_checkpoint(tmp_path, "llama"), torch.float32).logits(random_prompt(500))
    assert 1 << 12 < largest <= 1 << 14


# ---- runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), request.param)


def make_engine(checkpoint: Path, **options) -> Engine:
    fixed = {"kv_memory_bytes": 4 << 20, "threads": 1, "prefill_chunk_tokens": 32, "seed": 11}
    return Engine(RunConfig(model=str(checkpoint), **{**fixed, **FP32, **options}))


def make_requests(**fields) -> list[Request]:
    """One request of each kind of settings, with prompts of one to several chunks."""
    lengths = (3, 17, 33, 70, 45)
    return [
        Request(
            10 * i, None, random_prompt(length, seed=i),
            params=SamplingParams(**{"max_new_tokens": LENGTH, "ignore_eos": True, "logprobs": 2, **values, **fields}),
        )
        for i, (length, values) in enumerate(zip(lengths, SETTINGS.values(), strict=True))
    ]  # fmt: skip


def test_a_sound_run_agrees(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    found = engine.verify(engine.generate(make_requests()))
    assert [(v.index, v.choice) for v in found.verdicts] == [(0, 0), (10, 0), (20, 0), (30, 0), (40, 0), (40, 1)]
    assert [(v.comparison.num_tokens, v.comparison.num_differing) for v in found.verdicts] == [(LENGTH, 0)] * 6
    assert found.logprob_error is not None and found.logprob_error < found.tolerance == 1e-3


def test_several_prompts_of_one_request_each_have_their_own(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    params = SamplingParams(max_new_tokens=8, temperature=1.0, n=2, ignore_eos=True)
    prompts = [random_prompt(20, seed=1), random_prompt(9, seed=2)]
    (completion,) = engine.generate([Request(4, None, prompts, params=params)])
    assert [choice.prompt_ids for choice in completion.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    found = engine.verify([completion])
    assert [(v.choice, v.is_exact) for v in found.verdicts] == [(i, True) for i in range(4)]


@pytest.mark.parametrize("options", [
    {"wire_dtype": "fp16", "kv_dtype": "fp16"}, {"wire_dtype": "bf16"}, {"kv_dtype": "int8"}, {"dtype": "bf16"},
    {"kv_dtype": "k=int8,v=int4"},
], ids=str)  # fmt: skip
def test_rounding_is_not_taken_for_corruption(checkpoint: Path, options: dict[str, str]) -> None:
    engine = make_engine(checkpoint, **options)
    found = engine.verify(engine.generate(make_requests(max_new_tokens=100)))
    assert found.num_wrong == 0, list(found.lines())
    assert found.logprob_error > 0


@pytest.mark.parametrize("place", [0, 7, LENGTH - 1])
@pytest.mark.parametrize("kind", SETTINGS)
def test_one_wrong_token_is_found(checkpoint: Path, kind: str, place: int) -> None:
    engine = make_engine(checkpoint)
    request = make_requests(logprobs=None)[list(SETTINGS).index(kind)]
    (completion,) = engine.generate([request])
    choice = completion.choices[-1]
    choice.token_ids[place] = 0 if choice.token_ids[place] > 160 else 319  # far away also for who adds up by id
    found = engine.verify([completion])
    *others, wrong = (verdict.comparison for verdict in found.verdicts)
    assert wrong.first.position == place and wrong.first.token == choice.token_ids[place]
    assert wrong.first.margin > 1
    assert all(comparison.num_differing == 0 for comparison in others)
    assert found.num_wrong == 1


def spoil_attention(monkeypatch: pytest.MonkeyPatch, *, from_position: int, factor: float) -> None:
    """Make the R-Part give too small an output for rows from a position on."""
    attend = DecodeAttention.attend

    def spoilt(self, layer, work, qkv, out, piece, lse=None) -> None:
        attend(self, layer, work, qkv, out, piece, lse)
        if piece == work.num_pieces - 1:
            out[np.asarray(work.positions) >= from_position] *= factor

    monkeypatch.setattr(DecodeAttention, "attend", spoilt)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_wrong_attention_is_found_where_it_begins(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, float]
) -> None:
    engine = make_engine(checkpoint)
    prompt, params = random_prompt(40), SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, logprobs=0, **settings)
    spoil_attention(monkeypatch, from_position=40 + 4, factor=0.0)  # the row of output token 4 gives token 5
    (completion,) = engine.generate([Request(0, None, prompt, params=params)])
    comparison = engine.verify([completion]).verdicts[0].comparison
    assert comparison.first.position == 5
    assert comparison.margin > 1 and comparison.logprob_error > 1
    assert comparison.num_differing > 5


def test_wrong_attention_that_changes_no_token_shows_in_recorded_logprobs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=0)
    spoil_attention(monkeypatch, from_position=0, factor=0.99)
    (completion,) = engine.generate([Request(0, None, random_prompt(40), params=params)])
    found = engine.verify([completion])
    assert found.margin < 1e-3 < found.logprob_error
    assert found.num_wrong == 1


def test_completions_with_errors_are_left_out_and_a_stop_ends_it(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    done = engine.generate([random_prompt(5), [], random_prompt(6, seed=1)], SamplingParams(max_new_tokens=4))
    assert [v.index for v in engine.verify(done).verdicts] == [0, 2]
    engine.stop_requested = lambda: True
    assert engine.verify(done).verdicts == []


# ---- jobs ----------------------------------------------------------------------------------------------


def write_lines(folder: Path) -> Path:
    """12 good lines of all kinds, three bad ones among them."""
    good = [
        {"custom_id": f"r{i}", "prompt": random_prompt(3 + 7 * i, seed=i), "max_new_tokens": 6 + i, **values}
        for i, values in enumerate([{k: v for k, v in s.items() if k != "n"} for s in SETTINGS.values()] * 3)
    ][:12]
    return write_requests(folder / "in.jsonl", [*good[:4], {"prompt": []}, *good[4:], {"prompt": [9**9]}, {}])


@pytest.mark.parametrize(("ranks", "asked", "checked"), [(1, 100, 12), (2, 5, 5)])
def test_a_job_tells_in_log_and_status(tmp_path: Path, ranks: int, asked: int, checked: int) -> None:
    done = fastdecode(
        "generate", "--model", make_checkpoint(tmp_path / "model", "mistral-window"),
        "--input", write_lines(tmp_path), "--output", tmp_path / "out.jsonl",
        "--ranks", ranks, "--kv-memory-bytes", "4M", "--wire-dtype", "fp32", "--kv-dtype", "fp32", "--ignore-eos",
        "--verify", asked,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert len(read_records(tmp_path / "out.jsonl")) == 15
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    found = status["verify"]
    assert (found["requests"], found["wrong_requests"], found["differing_tokens"]) == (checked, 0, 0)
    assert f"verify: {checked} requests, {found['tokens']} tokens: all agree" in done.stderr.splitlines()


def test_a_corrupted_job_says_so_and_keeps_its_exit_code(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastdecode_hpc")
    job = Job(JobFiles(str(write_lines(tmp_path)), tmp_path / "out.jsonl", verify=12), RunConfig(), StopRequest())
    job.check(checkpoint)
    spoil_attention(monkeypatch, from_position=60, factor=0.0)
    assert job.run(make_engine(checkpoint)) == 3  # as without --verify: three lines hold no request
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert status["exit_code"] == 3
    found = status["verify"]
    assert 0 < found["wrong_requests"] < found["requests"] == 12
    assert found["largest_margin"] > 1
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in told if text.startswith("verify: request ")]) == found["wrong_requests"]
    assert told[-1].startswith(f"verify: WARNING: {found['wrong_requests']} of 12 requests differ")


def test_the_number_of_requests_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--verify is -1; it must be at least 0"):
        JobFiles(str(write_lines(tmp_path)), tmp_path / "out.jsonl", verify=-1).check()
