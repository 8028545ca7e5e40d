"""The command line end to end on a tiny checkpoint, as a shell sees it: records, exit codes, status, report."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from launching import clean_env, fastdecode, mpiexec, read_records, run_limited, write_requests
from tiny_models import load_reference, make_checkpoint, random_prompt, reference_greedy

SMALL = ("--kv-memory-bytes", "4M", "--wire-dtype", "fp32", "--kv-dtype", "fp32", "--ignore-eos")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llama")


def requests(count: int, **fields) -> list[dict]:
    return [
        {"custom_id": f"r{i}", "prompt": random_prompt(3 + 5 * i % 40, seed=i), "return_token_ids": True, **fields}
        for i in range(count)
    ]


def generate(folder: Path, checkpoint: Path, lines: list[dict] | Path, *options: object, **limits):
    path = lines if isinstance(lines, Path) else write_requests(folder / "in.jsonl", lines)
    return fastdecode(
        "generate", "--model", checkpoint, "--input", path, "--output", folder / "out.jsonl", *SMALL, *options, **limits
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_line_gets_one_record(checkpoint: Path, tmp_path: Path, ranks: int) -> None:
    lines = [*requests(12, max_new_tokens=9), {"prompt": []}, {"prompt": [1], "temperature": -1}]
    path = write_requests(tmp_path / "in.jsonl", lines)
    path.write_text(path.read_text() + "\n{broken\n" + '{"prompt": [999999]}\n')
    done = generate(tmp_path, checkpoint, path, "--ranks", ranks, "--report", tmp_path / "run.h5")
    assert done.returncode == 3, done.stderr
    records = read_records(tmp_path / "out.jsonl")
    assert [record["index"] for record in records] == list(range(16))
    model = load_reference(checkpoint)
    for record, line in zip(records[:12], lines, strict=False):
        assert record["custom_id"] == line["custom_id"]
        assert record["token_ids"] == reference_greedy(model, line["prompt"], 9)
        assert record["finish_reason"] == "length"
        assert record["usage"] == {"prompt_tokens": len(line["prompt"]), "completion_tokens": 9}
    assert all("error" in record for record in records[12:])
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert (status["exit_code"], status["num_requests"], status["num_errors"]) == (3, 16, 4)
    check_report(tmp_path / "run.h5", ranks, output_tokens=12 * 9)
    # One line a rank, as it is told where it is.
    told = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert len(told) == ranks
    assert "threads" in told[-1] and "isa" in told[-1] and "kv" in told[-1]


def check_report(path: Path, ranks: int, output_tokens: int) -> None:
    with h5py.File(path) as file:
        assert file.attrs["schema_version"] == 2
        assert len(json.loads(file.attrs["ranks"])) == ranks
        assert file["summary/output_tokens"][()] == output_tokens
        steps = {name: data[:] for name, data in file["steps"].items()}
        assert {data.attrs["units"] for data in file["steps"].values()} == {"1", "s", "tokens"}
        busy = steps["num_rows"] > 0
        assert steps["num_rows"].sum() == output_tokens - 12  # every sequence's first token comes from its prefill
        assert (steps["t_s_part"][busy] > 0).all()
        assert (steps["t_r_part"][busy] > 0).all()
        assert (steps["t_transport"] >= 0).all() and (steps["t_wait"] >= 0).all()
        if ranks > 1:
            assert (steps["t_transport"][busy] > 0).all()
        assert (steps["t_end"] >= steps["t_start"]).all()
        owners = [1, 2] if ranks == 3 else [0]
        assert sorted(int(name) for name in file["ranks"] if "t_r_part" in file["ranks"][name]) == owners
        together = np.max([file[f"ranks/{rank}/t_r_part"][:] for rank in owners], axis=0)
        assert together == pytest.approx(steps["t_r_part"])
        # What was freed is there again at the end.
        free = file[f"ranks/{owners[0]}/free_blocks"][:]
        assert free.max() > free.min()
        assert sorted(file["requests/index"][:]) == list(range(16))
        assert file["requests/failed"][:].sum() == 4
    shown = fastdecode("report", "show", path)
    assert shown.returncode == 0
    assert "decode_tokens_per_s" in shown.stdout and "t_r_part" in shown.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_too_many_errors_end_with_4(checkpoint: Path, tmp_path: Path, ranks: int) -> None:
    lines = [{"prompt": []}] * 5 + requests(3, max_new_tokens=4)
    done = generate(tmp_path, checkpoint, lines, "--ranks", ranks, "--max-errors", 2)
    assert done.returncode == 4, done.stderr
    assert sum("error" in record for record in read_records(tmp_path / "out.jsonl")) == 3


def test_all_good_is_0_and_a_finished_output_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    lines = requests(3, max_new_tokens=4)
    assert generate(tmp_path, checkpoint, lines).returncode == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    assert generate(tmp_path, checkpoint, lines, "--ranks", 2).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert generate(tmp_path, checkpoint, lines, "--overwrite").returncode == 0
    assert read_records(tmp_path / "out.jsonl") == [json.loads(line) for line in sorted(
        before.decode().splitlines(), key=lambda line: json.loads(line)["index"])]  # fmt: skip


def test_an_output_made_otherwise_is_refused_and_kept(checkpoint: Path, tmp_path: Path) -> None:
    lines = requests(2, max_new_tokens=2)
    assert generate(tmp_path, checkpoint, lines).returncode == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    done = generate(tmp_path, checkpoint, lines, "--seed", 3, "--temperature", 0.5, "--ranks", 2)
    refused_by_all_ranks(done, "seed was 0, now it is 3; temperature was 0.0, now it is 0.5")
    assert "--overwrite" in done.stderr
    (tmp_path / "out.jsonl.job.json").unlink()
    refused_by_all_ranks(generate(tmp_path, checkpoint, lines), "out.jsonl.job.json, which says how it was made")
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kv-dtype", "fp12"], "fp12"),
        (["--ranks", "0"], "ranks"),
        (["--ranks", "100000"], "one R-worker a socket"),
        (["--block-size", "12"], "multiple of 8"),
        (["--input", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--output", "/nowhere/out.jsonl"], "/nowhere"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--kv-memory-bytes", "1K"], "block"),
        (["--kv-memory-bytes", "plenty"], "plenty"),
        (["--temperature", "nan"], "temperature"),
        (["--max-context-len", "1000000"], "max_context_len"),
        (["--max-context-len", "1"], "at least 2"),
        (["--kv-memory-bytes", "9000G"], "left for KV"),
        (["--max-batch-size", "1000000000"], "rows alone take"),
        (["--max-errors", "-1"], "at least 0"),
        (["--output", "-"], "standard output"),
        (["--device", "cuda"], "GPU"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_usage_errors_are_2_and_say_what_is_wrong_once(
    checkpoint: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    refused_by_all_ranks(generate(tmp_path, checkpoint, requests(1), *options), said)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "nan"], "temperature"),  # found by every rank
        (["--model", "/nowhere"], "/nowhere"),  # by rank 0
        (["--isa", "neon"], "has no neon" if platform.machine() == "x86_64" else "avx2"),  # by the R-workers
    ],
)
def test_usage_errors_end_all_ranks(checkpoint: Path, tmp_path: Path, options: list[str], said: str) -> None:
    if platform.machine() != "x86_64" and "--isa" in options:
        options = ["--isa", "avx2"]
    refused_by_all_ranks(generate(tmp_path, checkpoint, requests(1), "--ranks", 3, *options), said)


def refused_by_all_ranks(done: subprocess.CompletedProcess, said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sum("fastdecode: " in line for line in done.stderr.splitlines()) == 1


def test_ranks_that_contradict_the_launcher_are_2(checkpoint: Path, tmp_path: Path) -> None:
    path = write_requests(tmp_path / "in.jsonl", requests(1))
    command = [*mpiexec(2), sys.executable, "-m", "fastdecode_hpc", "generate", "--model", str(checkpoint)]
    command += ["--input", str(path), "--output", str(tmp_path / "out.jsonl"), "--ranks", "3"]
    done = run_limited(command, timeout=60)
    assert done.returncode == 2
    assert "--ranks is 3 but 2 were started" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (1, signal.SIGUSR1),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(3, signal.SIGUSR1, marks=pytest.mark.slow),
        (3, signal.SIGTERM),
    ],
)
def test_a_signal_stops_with_75_and_resume_answers_the_rest(
    checkpoint: Path, tmp_path: Path, ranks: int, name: signal.Signals
) -> None:
    lines = requests(400, max_new_tokens=40)
    path = write_requests(tmp_path / "in.jsonl", lines)
    command = [sys.executable, "-m", "fastdecode_hpc", "generate", "--model", str(checkpoint), "--input", str(path)]
    command += ["--output", str(tmp_path / "out.jsonl"), *SMALL, "--ranks", str(ranks), "--max-batch-size", "8"]
    process = subprocess.Popen(command, env=clean_env(), stderr=subprocess.PIPE, text=True)
    wait_for_records(tmp_path / "out.jsonl", 5, process)
    process.send_signal(name)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    some = read_records(tmp_path / "out.jsonl")
    assert 5 <= len(some) < 400
    assert json.loads((tmp_path / "out.jsonl.status.json").read_text())["state"] == "stopped early, resumable"
    done = generate(tmp_path, checkpoint, path, "--ranks", ranks)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "out.jsonl")
    assert [record["custom_id"] for record in records] == [line["custom_id"] for line in lines]
    assert [record for record in records if record in some] == some


def wait_for_records(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_row_is_the_same_wherever_it_stands(checkpoint: Path, tmp_path: Path) -> None:
    """Shuffled, in other batches, over other ranks: tokens and log-probabilities, bit by bit."""
    prompt = random_prompt(9, seed=1)
    lines = [{"custom_id": f"r{i}", "prompt": random_prompt(3 + i, seed=i), "temperature": 0.9} for i in range(8)]
    lines += [{"custom_id": f"same{i}", "prompt": prompt, "temperature": 0.9} for i in range(3)]
    lines += [{"custom_id": f"seeded{i}", "prompt": prompt, "temperature": 0.9, "seed": i // 2} for i in range(4)]
    lines = [line | {"max_tokens": 12, "logprobs": 2, "return_token_ids": True} for line in lines]
    rows = []
    for number, (order, options) in enumerate(
        [
            (lines, ["--ranks", 1]),
            (lines[::-1], ["--ranks", 3, "--max-batch-size", 4, "--schedule", "load-stabilizing"]),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = generate(folder, checkpoint, order, *options, "--threads", 1)
        assert done.returncode == 0, done.stderr
        records = read_records(folder / "out.jsonl")
        rows.append({record["custom_id"]: (record["token_ids"], record["logprobs"]) for record in records})
    assert rows[0] == rows[1]
    tokens = {name: tuple(ids) for name, (ids, _) in rows[0].items()}
    assert len({tokens["same0"], tokens["same1"], tokens["same2"]}) == 3  # equal prompts, each its own numbers
    assert tokens["seeded0"] == tokens["seeded1"] != tokens["seeded2"] == tokens["seeded3"]


def test_help_and_version_need_neither_mpi_nor_torch(tmp_path: Path) -> None:
    for name in ("mpi4py", "torch", "h5py", "transformers", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
    env = clean_env()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    for option in ("--help", "--version"):
        assert fastdecode(option, env=env).returncode == 0
    assert fastdecode("generate", "--help", env=env).returncode == 0


def test_standard_input_is_read_whole_before_the_run(checkpoint: Path, tmp_path: Path) -> None:
    path = write_requests(tmp_path / "in.jsonl", requests(3, max_new_tokens=4))
    command = [sys.executable, "-m", "fastdecode_hpc", "generate", "--model", str(checkpoint), "--input", "-"]
    command += ["--output", str(tmp_path / "out.jsonl"), *SMALL]
    with path.open() as file:
        done = subprocess.run(command, env=clean_env(), stdin=file, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(read_records(tmp_path / "out.jsonl")) == 3


def test_an_empty_input_is_a_finished_job(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    assert generate(tmp_path, checkpoint, tmp_path / "in.jsonl", "--ranks", 2).returncode == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_resume_refuses_an_output_of_another_input(checkpoint: Path, tmp_path: Path) -> None:
    assert generate(tmp_path, checkpoint, requests(4, max_new_tokens=2)).returncode == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    others = [{**line, "custom_id": f"x{i}"} for i, line in enumerate(requests(4, max_new_tokens=2))]
    for lines in (others, requests(2, max_new_tokens=2)):
        done = generate(tmp_path, checkpoint, lines, "--ranks", 2)
        assert done.returncode == 2, done.stderr
        assert "belongs to another input" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_files_must_differ(checkpoint: Path, tmp_path: Path) -> None:
    path = write_requests(tmp_path / "in.jsonl", requests(2))
    before = path.read_bytes()
    done = generate(tmp_path, checkpoint, path, "--output", path, "--overwrite")
    assert done.returncode == 2
    assert "different files" in done.stderr
    for report in (path, tmp_path / "out.jsonl"):
        assert generate(tmp_path, checkpoint, path, "--report", report).returncode == 2
    assert path.read_bytes() == before


def test_an_output_that_fails_after_the_start_ends_all_ranks(checkpoint: Path, tmp_path: Path) -> None:
    path = write_requests(tmp_path / "in.jsonl", requests(2))
    # Passes the check before the run, as root may write anywhere, and fails when it is opened.
    done = generate(tmp_path, checkpoint, path, "--ranks", 3, "--output", "/proc/fastdecode.jsonl", timeout=60)
    assert done.returncode == 2, done.stderr
    assert "/proc/fastdecode.jsonl cannot be written" in done.stderr


def test_a_report_that_cannot_be_written_costs_no_records(checkpoint: Path, tmp_path: Path) -> None:
    done = generate(tmp_path, checkpoint, requests(4, max_new_tokens=2), "--report", "/proc/fastdecode.h5")
    assert done.returncode == 0, done.stderr
    assert len(read_records(tmp_path / "out.jsonl")) == 4
    assert "HDF5_USE_FILE_LOCKING=FALSE" in done.stderr


def test_a_full_disk_ends_the_run_with_1_and_what_is_written_is_whole(checkpoint: Path, tmp_path: Path) -> None:
    path, output = write_requests(tmp_path / "in.jsonl", requests(40, max_new_tokens=8)), tmp_path / "out.jsonl"
    # A limit on the size of files stands for a disk that is full.
    code = "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500)); "
    code += "runpy.run_module('fastdecode_hpc', run_name='__main__')"
    command = [sys.executable, "-c", code, "generate", "--model", str(checkpoint), *SMALL, "--max-batch-size", "4"]
    done = run_limited([*command, "--input", str(path), "--output", str(output)], timeout=60)
    assert done.returncode == 1, done.stderr
    assert f"fastdecode: {output} cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    *whole, torn = output.read_bytes().split(b"\n")
    assert whole and len(torn) < 2 * len(whole[0])
    assert len({json.loads(line)["index"] for line in whole}) == len(whole)


def test_a_resumed_job_remembers_its_failures(checkpoint: Path, tmp_path: Path) -> None:
    lines = [{"prompt": []}, *requests(3, max_new_tokens=2)]
    assert generate(tmp_path, checkpoint, lines).returncode == 3
    done = generate(tmp_path, checkpoint, lines)
    assert done.returncode == 3
    assert len(read_records(tmp_path / "out.jsonl")) == 4
    assert generate(tmp_path, checkpoint, lines, "--max-errors", 0).returncode == 3


def test_a_signal_while_standard_input_is_open_stops_the_job(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fastdecode_hpc", "generate", "--model", str(checkpoint), "--input", "-"]
    command += ["--output", str(tmp_path / "out.jsonl"), *SMALL, "--ranks", "2"]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(command, env=clean_env(), stdin=subprocess.PIPE, stderr=log)
    assert process.stdin is not None
    process.stdin.write(json.dumps(requests(1)[0]).encode() + b"\n")
    process.stdin.flush()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".fastdecode-*")):  # the copy has been begun
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 75, (tmp_path / "log").read_text()
    process.stdin.close()
    assert not list(tmp_path.glob(".fastdecode-*"))
