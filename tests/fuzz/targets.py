"""What is fuzzed: each target takes the bytes of one file and raises where the program would fall over.

Used by `run.py` (coverage-guided) and by the property tests (hypothesis).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import tiny_files
from fastdecode_hpc.batch.requests import RequestError, read_requests
from fastdecode_hpc.batch.resume import load_recorded
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.gguf_header import read_gguf_header
from fastdecode_hpc.gguf_tokenizer import build_gguf_tokenizer
from fastdecode_hpc.model_config import read_hf_config
from fastdecode_hpc.s_part.checkpoint import read_model_config
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.safetensors_file import SafetensorsCheckpoint
from fastdecode_hpc.sequence import Request, SamplingParams

REQUESTS = b"\n".join(
    json.dumps(line).encode()
    for line in (
        {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"]},
        {"prompt": [1, 2, 3], "custom_id": "ids", "logprobs": 2, "ignore_eos": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "naïve 日本"}]}], "id": "chat"},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 4}},
    )
)  # fmt: skip
RECORDS = b"".join(
    json.dumps(record).encode() + b"\n"
    for record in (
        {"index": 0, "custom_id": "a", "text": "some text", "finish_reason": "stop", "usage": {"prompt_tokens": 3}},
        {"index": 2, "custom_id": None, "error": {"code": "bad", "message": "why"}, "content_hash": "0123456789abcdef"},
        {"index": 1, "custom_id": "b", "text": "", "finish_reason": "length", "content_hash": "fedcba9876543210"},
    )
)


def fuzz_requests(path: Path) -> None:
    """Every line that is not blank gives one item."""
    items = list(read_requests(path, SamplingParams()))
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    assert len(items) == sum(1 for line in data.split(b"\n") if line.strip())
    assert all(isinstance(item, Request | RequestError) for item in items)


def fuzz_resume(path: Path) -> None:
    """Either the file is refused and left alone, or a torn last line is cut off and every record is known."""
    before = path.read_bytes()
    try:
        recorded = load_recorded(path)
    except ConfigError:
        assert path.read_bytes() == before
        return
    after = path.read_bytes()
    cut = before.removeprefix(after)
    assert before.startswith(after)
    assert cut.count(b"\n") <= 1 and not _is_json(cut)
    assert after == b"" or after.endswith(b"\n")
    assert len(recorded) == after.count(b"\n")
    assert all(json.loads(line)["index"] in recorded for line in after.split(b"\n")[:-1])


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return line.endswith(b"\n")


def fuzz_gguf(path: Path) -> None:
    """Model, tensors and tokenizer of a GGUF file."""
    file = GGUFFile(path)
    for name, shape in file.shapes.items():
        file.read(name, 0, 1 if len(shape) == 1 else shape[0])
    assert file.shapes == {} or file.dtype in ("fp32", "fp16", "bf16")
    for read in (lambda: read_model_config(path), lambda: build_gguf_tokenizer(read_gguf_header(path).metadata)):
        with suppress(ConfigError):
            read()


def fuzz_safetensors(path: Path) -> None:
    """Tensors of ``model.safetensors``."""
    checkpoint = SafetensorsCheckpoint(path.parent)
    for name, shape in checkpoint.shapes.items():
        if shape and 0 not in shape:
            checkpoint.read(name, 0, 1 if len(shape) == 1 else shape[0])
    assert checkpoint.shapes == {} or checkpoint.dtype in ("fp32", "fp16", "bf16")


def fuzz_index(path: Path) -> None:
    """``model.safetensors.index.json`` beside one shard."""
    shard = path.with_name("model-00001-of-00001.safetensors")
    if not shard.exists():
        shard.write_bytes(tiny_files.safetensors_file())
    SafetensorsCheckpoint(path.parent)


def fuzz_config(path: Path) -> None:
    """``config.json``."""
    read_hf_config(path.parent)


class Target(NamedTuple):
    """A reader, the name of its file, and a valid one to start from."""

    read: Callable[[Path], None]
    file_name: str
    seed: bytes


TARGETS = {
    "requests": Target(fuzz_requests, "in.jsonl", REQUESTS),
    "resume": Target(fuzz_resume, "out.jsonl", RECORDS),
    "gguf": Target(fuzz_gguf, "model.gguf", tiny_files.gguf_file()),
    "safetensors": Target(fuzz_safetensors, "model.safetensors", tiny_files.safetensors_file()),
    "index": Target(fuzz_index, "model.safetensors.index.json", tiny_files.index_file()),
    "config": Target(fuzz_config, "config.json", tiny_files.config_file()),
}


def run_target(name: str, data: bytes, folder: Path) -> None:
    """Let a target read these bytes; a refusal that names the file is as good as success."""
    target = TARGETS[name]
    path = folder / name / target.file_name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    try:
        target.read(path)
    except ConfigError as error:
        assert str(folder) in str(error), f"the file is not named: {error}"
