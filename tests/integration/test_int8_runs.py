"""Whole runs of the default model with weights in 8 bits: alike on one and three ranks, and as a reference has it."""

from __future__ import annotations

import json
from pathlib import Path

from launching import fastdecode, read_records, write_requests

OPTIONS = ("--weight-dtype", "int8", "--kv-memory-bytes", "256M", "--threads", "1")
PROMPTS = ("The capital of France is", "Once upon a time there was", "def fibonacci(n):", "1, 2, 3, 4, 5,")


def test_text_does_not_depend_on_ranks_and_agrees_with_the_reference(tmp_path: Path) -> None:
    lines = [{"prompt": prompt, "max_new_tokens": 16, "return_token_ids": True} for prompt in PROMPTS]
    path, texts = write_requests(tmp_path / "in.jsonl", lines), []
    for ranks in (1, 3):
        out = tmp_path / f"out{ranks}.jsonl"
        done = fastdecode(
            "generate", "--input", path, "--output", out, "--ranks", ranks, "--verify", 4, *OPTIONS, timeout=280
        )
        assert done.returncode == 0, done.stderr
        texts.append([record["token_ids"] for record in read_records(out)])
        status = json.loads(Path(f"{out}.status.json").read_text())
        assert status["verify"]["wrong_requests"] == 0
        assert status["verify"]["tokens"] > 16
    assert texts[0] == texts[1]
    done = fastdecode("generate", "--input", path, "--output", out, "--ranks", 1, timeout=60)
    assert done.returncode == 2
    assert "weight_dtype was 'int8', now it is 'auto'" in done.stderr
