"""Many tiny requests: the memory of every rank and the length of the log don't grow with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launching import clean_env
from tiny_models import make_checkpoint

GROWTH = 1.05  # largest resident memory after the warm-up, over what it was then
WARM_UP = 0.3  # of the requests
MAX_LOG_LINES = 300


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(10_000, marks=pytest.mark.timeout(300)),
        pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
)
def test_memory_is_flat(tmp_path: Path, count: int) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    with (tmp_path / "in.jsonl").open("w") as file:
        for number in range(count):
            line = {"custom_id": f"request-{number}", "prompt": [number % 90 + 1, 5], "max_tokens": 2}
            file.write(json.dumps(line | ({"temperature": 9} if number % 1000 else {"temperature": -1})) + "\n")
    command = [sys.executable, "-m", "fastdecode_hpc", "generate", "--model", str(checkpoint), "--ranks", "2"]
    command += ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    command += ["--kv-memory-bytes", "16M", "--report", str(tmp_path / "run.h5")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=clean_env(), stderr=log, start_new_session=True)
    try:
        sizes = watch(process, tmp_path / "out.jsonl", count)
        assert process.wait() == 3
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == count
    assert len((tmp_path / "log").read_text().splitlines()) < MAX_LOG_LINES
    assert len(sizes) == 2  # ranks
    for warm, largest in sizes.values():
        assert largest <= GROWTH * warm, sizes


def watch(process: subprocess.Popen, output: Path, count: int) -> dict[int, tuple[int, int]]:
    """Of each rank: resident bytes at the end of the warm-up, and most of them since."""
    sizes: dict[int, tuple[int, int]] = {}
    root = psutil.Process(process.pid)
    record_bytes = 0
    while process.poll() is None:
        time.sleep(0.2)
        if output.exists() and not record_bytes and output.stat().st_size > 10_000:
            data = output.read_bytes()
            record_bytes = len(data) // data.count(b"\n")
        if not record_bytes or output.stat().st_size < WARM_UP * count * record_bytes:
            continue
        for child in root.children(recursive=True):
            try:
                if "generate" in child.cmdline() and "fastdecode_hpc" in child.cmdline() and not child.children():
                    now = child.memory_info().rss
                    warm, largest = sizes.get(child.pid, (now, now))
                    sizes[child.pid] = warm, max(largest, now)
            except psutil.NoSuchProcess:
                continue
    return sizes
