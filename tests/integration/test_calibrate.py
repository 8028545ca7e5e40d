"""``calibrate`` on ranks of this machine writes a profile that ``plan`` and ``simulate`` take."""

import json
from pathlib import Path

import pytest

from fastdecode_hpc.config import RunConfig
from fastdecode_hpc.engine import Engine
from fastdecode_hpc.planner.profile import load_profile
from fastdecode_hpc.sequence import Request, SamplingParams
from launching import fastdecode, write_requests
from tiny_models import make_checkpoint, random_prompt

SMALL = ["--batch-sizes", "4,8", "--contexts", "64,128", "--kv-dtypes", "fp16,int8", "--prompts", "1x16,2x32,1x64",
         "--rounds", "3", "--steps", "4", "--threads", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_measured_profile_can_be_planned_with(checkpoint, tmp_path, ranks):
    path = tmp_path / "node.json"
    done = fastdecode("calibrate", "--model", checkpoint, "--ranks", ranks, "--output", path, *SMALL)
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(path))
    assert profile.source == "measured"
    assert all(sorted(part.rates) == ["fp16", "int8"] for part in profile.r_parts)
    assert len(profile.r_parts) == max(1, ranks - 1)
    assert all(part.read_bandwidth > 1e8 and part.memory_bytes > 0 for part in profile.r_parts)
    assert all(part.latency_s > 0 for part in profile.r_parts) == (ranks > 1)
    assert profile.s_part.layer.x == (2.0, 4.0)
    assert len(profile.residuals["steps"]) == 8
    assert "fp16, batch 8, context 128" in done.stdout
    planned = fastdecode("plan", "--model", checkpoint, "--profile", path, "--length", 100, "--max-r-workers", 2)
    assert planned.returncode == (0 if ranks > 1 else 2)
    assert "measured figures" in planned.stdout if ranks > 1 else "measured in one process" in planned.stderr
    simulated = fastdecode(
        "simulate", "--model", checkpoint, "--profile", path, "--length", 40, "--prompt-len", 10, "--r-workers", 1,
        "--max-batch-size", 8, "--kv-dtype", "int8", "--json", tmp_path / "sim.json",
    )  # fmt: skip
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads((tmp_path / "sim.json").read_text())["figures"]["output_tokens"] == 32 * 30
    lines = write_requests(tmp_path / "in.jsonl", [{"prompt": random_prompt(5, seed=i)} for i in range(6)])
    for count in (ranks, 2):  # a run begins with the shares of a profile of as many R-workers
        options = ["--ranks", count, "--threads", 1, "--max-new-tokens", 4, "--kv-memory-bytes", "2M", "--overwrite"]
        done = fastdecode(
            "generate", "--model", checkpoint, "--profile", path, "--input", lines, "--output", tmp_path / "out.jsonl",
            *options,
        )  # fmt: skip
        assert done.returncode == (0 if count == ranks or ranks == 1 else 2), done.stderr
    if ranks > 1:
        assert "2 R-workers, and this job has 1; calibrate with as many ranks" in done.stderr


@pytest.mark.parametrize("options", [("--s-part", "transformers"), ("--weight-dtype", "int8")], ids=lambda x: x[1])
def test_other_s_parts_are_measured_and_planned_for(checkpoint, tmp_path, options):
    path = tmp_path / "node.json"
    done = fastdecode("calibrate", "--model", checkpoint, "--ranks", 2, "--output", path, *SMALL, *options)
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(path))
    name = options[0].strip("-").replace("-", "_")
    assert profile.s_part_options == {"s_part": "native", "weight_dtype": "auto"} | {name: options[1]}
    plan = ["plan", "--model", checkpoint, "--profile", path, "--length", 100, "--max-r-workers", 1]
    planned = fastdecode(*plan)
    assert planned.returncode == 0, planned.stderr
    assert " ".join(options) in planned.stdout.splitlines()[-1]
    assert "of another model" not in planned.stdout
    assert fastdecode(*plan, options[0], "native" if name == "s_part" else "auto").returncode == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param(["--contexts", "64,9999"], "takes at most", marks=pytest.mark.slow),
        (["--prompts", "1x16,2x16,1x9999"], "--prompts has 1x9999"),
        (["--prompts", "1x16,2x16,32x16"], "up to the largest batch"),
        pytest.param(["--prompts", "1x16,2x16"], "at least three", marks=pytest.mark.slow),
        pytest.param(["--batch-sizes", "1,8"], "must be at least 2", marks=pytest.mark.slow),
        pytest.param(["--batch-sizes", "8"], "one value", marks=pytest.mark.slow),
        (["--kv-memory-bytes", "200K"], "of KV cache"),
        (["--kv-dtypes", "fp7"], "kv_dtype is 'fp7'"),
        pytest.param(["--rounds", "1"], "rounds", marks=pytest.mark.slow),
        (["--prompts", "4"], "no list such as"),
        pytest.param(["--num-layers", "99"], "this model has", marks=pytest.mark.slow),
        (["--num-layers", "99", "--ranks", "2"], "this model has"),
        (["--contexts", "64,9999", "--ranks", "3"], "takes at most"),
        (["--batch-sizes", "2,8", "--ranks", "3"], "must be at least 4"),
    ],
)
def test_mistakes_are_said(checkpoint, tmp_path, args, said):
    done = fastdecode("calibrate", "--model", checkpoint, "--ranks", 1, "--output", tmp_path / "p.json", *SMALL, *args)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_long_prompts_whose_kv_is_given_are_attended(tmp_path, kind, kv_dtype):
    folder = make_checkpoint(tmp_path / "model", kind)
    run = RunConfig(model=str(folder), kv_dtype=kv_dtype, threads=1, kv_memory_bytes=8 << 20, max_batch_size=4)
    with Engine(run, given_kv=True) as engine:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        done = engine.generate([Request(i, None, [1] * length, params=params) for i, length in enumerate((1, 63, 170))])
    assert [len(completion.token_ids) for completion in done] == [40, 40, 40]
