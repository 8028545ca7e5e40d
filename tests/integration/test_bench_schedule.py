"""`fastdecode bench schedule` on two ranks."""

import json
import sys
from pathlib import Path

from launching import run_limited
from tiny_models import make_checkpoint

FASTDECODE = [sys.executable, "-m", "fastdecode_hpc"]


def test_overlap_is_measured_on_two_ranks(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    output = tmp_path / "figures.json"
    command = ["bench", "schedule", "--model", str(model), "--batch", "4", "--steps", "4", "--threads", "1"]
    done = run_limited([*FASTDECODE, *command, "--json", str(output)], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["name"]: row for row in json.loads(output.read_text())["cases"]}
    assert set(rows) == {"balanced", "r-heavy", "s-heavy", "one-mini-batch"}
    for row in rows.values():
        assert 0 < row["pipeline_efficiency"] <= 1.001
        assert 0.5 < row["bound"] <= 1.001
        assert row["exposed_transport"] >= 0
        assert row["tokens_per_s"] > 0
    assert rows["balanced"]["context"] == rows["one-mini-batch"]["context"]
    assert "speedup_over_one_mini_batch" in rows["balanced"]
    assert "balanced:" in done.stdout


def test_mistakes_are_told_before_ranks_start(tmp_path: Path) -> None:
    for flags, text in ((["--model", str(tmp_path)], "config.json"), (["--cases", "nope"], "balanced")):
        done = run_limited([*FASTDECODE, "bench", "schedule", *flags], timeout=60)
        assert done.returncode == 2
        assert text in done.stderr
