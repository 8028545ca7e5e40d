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
    command += ["--cases", "balanced,r-heavy,s-heavy,one-mini-batch"]
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
    for flags, text in (
        (["--cases", "nope"], "balanced"),
        (["--plot", "picture.nope"], "png"),
        (["--plot", "picture.png", "--cases", "balanced"], "greedy-equal-2"),
        (["--batch", "1"], "at least 2"),
        (["--cases", "slow-link", "--ranks", "2"], "must be 3 or more"),
        (["--empty-stages", "--cases", "balanced"], "leave out --cases"),
        (["--empty-stages", "--plot", "picture.png"], "leave out --cases"),
    ):
        done = run_limited([*FASTDECODE, "bench", "schedule", *flags], timeout=60)
        assert done.returncode == 2
        assert text in done.stderr


def test_generations_are_measured_under_both_schedules(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    output, plot = tmp_path / "figures.json", tmp_path / "picture.png"
    cases = "greedy-equal-2,load-stabilizing-equal-2,load-stabilizing-ragged-1"
    command = ["bench", "schedule", "--model", str(model), "--batch", "8", "--threads", "1", "--cases", cases]
    command += ["--new-tokens", "40"]
    done = run_limited([*FASTDECODE, *command, "--json", str(output), "--plot", str(plot)], timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["name"]: row for row in json.loads(output.read_text())["cases"]}
    assert list(rows) == cases.split(",")
    level = rows["load-stabilizing-equal-2"]
    # A sequence that changes slots misses a step and ends a step later.
    assert level["mean_load"] <= level["peak_load"] <= 1.05 * level["load_bound"]
    # All at once the batch ends with 8 x 47 tokens, in micro-batches with at most 266: whatever the speed.
    assert rows["greedy-equal-2"]["peak_load"] > 1.3 * level["peak_load"]
    for figure in ("peak_step_over_greedy", "speedup_over_greedy", "speedup_over_greedy_with_cold_start"):
        assert level[figure] > 0
        assert figure not in rows["load-stabilizing-ragged-1"]  # greedy with one slot was not asked for
    assert plot.stat().st_size > 10_000


def test_a_slow_link_is_measured_with_shares_both_ways(tmp_path: Path) -> None:
    model, output = make_checkpoint(tmp_path / "model", "llama"), tmp_path / "figures.json"
    command = ["bench", "schedule", "--model", str(model), "--batch", "12", "--threads", "1", "--ranks", "3"]
    done = run_limited([*FASTDECODE, *command, "--cases", "slow-link", "--json", str(output)], timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(output.read_text())["cases"]
    assert (row["num_workers"], row["slower"]) == (2, 5)
    assert min(row["speedup_over_equal"], row["tokens_per_s_equal"], row["tokens_per_s_auto"]) > 0
    assert 0 <= row["share_of_slow"] < 1
    assert "slow-link: 12 at once, link of R-worker 2 5 times slower: equal shares" in done.stdout


def test_a_long_prompt_is_computed_beside_decode(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", max_position_embeddings=8192)
    command = ["bench", "schedule", "--model", str(model), "--batch", "4", "--threads", "1", "--cases", "prefill"]
    done = run_limited([*FASTDECODE, *command], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "prefill: a prompt of 4096 beside 3 in decode" in done.stdout


def test_the_loop_itself_is_measured_without_other_ranks() -> None:
    done = run_limited([*FASTDECODE, "bench", "schedule", "--empty-stages"], timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "us a stage" in done.stdout
