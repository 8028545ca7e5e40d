"""A KV cache with room for exactly one sequence: everything is answered all the same, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launching import fastdecode, read_records, write_requests
from tiny_models import make_checkpoint, random_prompt

BLOCK_BYTES = 32 * 2 * 2 * 16 * 2 * 2  # tokens, layers, KV heads, head_dim, K and V, fp16
PROMPTS, NEW = (40, 33, 50, 39, 36, 40), 23  # all but the third take two blocks: prompt, output and one to spare


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama")


def answer(checkpoint: Path, folder: Path, ranks: int, kv_bytes: int) -> list[dict]:
    lines = [{"prompt": random_prompt(n, seed=n), "max_new_tokens": NEW, "return_token_ids": True} for n in PROMPTS]
    path, output = write_requests(folder / "in.jsonl", lines), folder / f"{kv_bytes}.jsonl"
    options = ["--ranks", ranks, "--threads", 1, "--kv-memory-bytes", kv_bytes, "--ignore-eos"]
    done = fastdecode("generate", "--model", checkpoint, "--input", path, "--output", output, *options, timeout=60)
    assert done.returncode in (0, 3), done.stderr
    return read_records(output)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_sequence_fits_and_one_request_never_does(checkpoint: Path, tmp_path: Path, ranks: int) -> None:
    roomy = answer(checkpoint, tmp_path, 1, 64 * BLOCK_BYTES)
    tight = answer(checkpoint, tmp_path, ranks, 2 * BLOCK_BYTES)
    assert [record.get("error", {}).get("code") for record in tight] == [None, None, "kv_too_small", None, None, None]
    assert f"need {3 * BLOCK_BYTES} bytes" in tight[2]["error"]["message"]
    for index in (0, 1, 3, 4, 5):
        assert len(tight[index]["token_ids"]) == NEW
        assert tight[index]["token_ids"] == roomy[index]["token_ids"]
