"""GGUF forms of the families against llama.cpp, a second author's reading of the same files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.sequence import Request, SamplingParams
from gguf_twins import GGUF_CASES, write_twin
from tiny_models import make_checkpoint, random_prompt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp")

PROMPT = random_prompt(40)
NUM_TOKENS = 24
END = 2  # which llama.cpp never chooses where ends are ignored


def llamacpp_tokens(path: Path) -> list[int]:
    """llama.cpp's greedy text, in float32."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx, params.n_gpu_layers = 1, 512, 0
    params.cpuparams.n_threads = 1
    params.fit_params, params.verbosity = False, -1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    answer = xllamacpp.Server(params).handle_completions(
        {"prompt": PROMPT, "n_predict": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "n_probs": 1}
    )
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]


def our_tokens(path: Path) -> list[int]:
    run = RunConfig(model=str(path), wire_dtype="fp32", kv_dtype="fp32", kv_memory_bytes=4 << 20, threads=1)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=((END, -100.0),))
    with Engine(run) as engine:
        (completion,) = engine.generate([Request(0, None, PROMPT, params=params)])
    return completion.token_ids


@pytest.mark.parametrize("name", GGUF_CASES)
def test_llamacpp_continues_alike(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    family, overrides = GGUF_CASES[name]
    write_twin(make_checkpoint(tmp_path, family, **overrides), tmp_path / "model.gguf")
    assert our_tokens(tmp_path / "model.gguf") == llamacpp_tokens(tmp_path / "model.gguf")
