"""The batch scripts on a real Slurm of three nodes: they finish, stop, go on, fail and refuse as documented."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import pytest

from slurm_jobs import ROOT, SMALL, read_texts, write_prompts

OPTIONS = " ".join(SMALL)
SHORT, LONG = (12, 12), (24, 300)  # prompts, tokens each
ONE_A_NODE = ("--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=1")
PLACES = {"single_node": ("--cpus-per-task=1",), "homogeneous": ONE_A_NODE, "requeue": ONE_A_NODE}


def test_every_script_finishes_the_demo_and_gives_the_texts_of_one_process(submit, tmp_path, answers) -> None:
    write_prompts(tmp_path / "prompts.jsonl", *SHORT)
    for script, options in PLACES.items():
        job = submit(script, *options, output=f"{script}.jsonl", fastdecode_options=OPTIONS)
        assert job.wait() == 0, job.log
        assert read_texts(tmp_path / f"{script}.jsonl") == answers(*SHORT)
        (path,) = tmp_path.glob(f"{script}.jsonl.{job.number}*.h5")
        with h5py.File(path) as report:
            assert len(json.loads(report.attrs["ranks"])) == 3
            assert json.loads(report.attrs["slurm"])["SLURM_JOB_ID"] == job.number


def changed(script: str, folder: Path, *changes: tuple[str, str]) -> str:
    """A copy of a script, with what can't be given from outside replaced."""
    text = (ROOT / "slurm" / f"{script}.sbatch").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{script}.sbatch"
    path.write_text(text)
    return str(path)


def test_components_of_a_heterogeneous_job_are_one_world(submit, tmp_path, answers) -> None:
    write_prompts(tmp_path / "prompts.jsonl", *SHORT)
    small = [("--cpus-per-task=16", "--cpus-per-task=1"), ("--cpus-per-task=32", "--cpus-per-task=1"),
             ("--ntasks-per-node=2", "--ntasks-per-node=1")]  # fmt: skip
    script = changed("gpu_plus_cpu_nodes", tmp_path, *small)
    job = submit("", script, output="out.jsonl", fastdecode_options=OPTIONS)
    assert job.wait() == 0, job.log
    assert read_texts(tmp_path / "out.jsonl") == answers(*SHORT)
    assert job.log.count("R-worker") == 2


def test_a_stopped_job_is_queued_again_and_ends_as_if_it_had_run_through(submit, tmp_path, answers) -> None:
    write_prompts(tmp_path / "prompts.jsonl", *LONG)
    job = submit("requeue", *ONE_A_NODE, output="out.jsonl", fastdecode_options=OPTIONS)
    status = tmp_path / "out.jsonl.status.json"
    job.wait_for(lambda: status.exists() and json.loads(status.read_text())["state"] == "running")
    job.wait_for(lambda: "requests," in job.log)  # it has begun some
    job.signal("USR1")
    job.wait_for(lambda: job.field("Restarts") == "1")
    first = json.loads(status.read_text())
    assert (first["state"], first["exit_code"]) == ("stopped early, resumable", 75)
    assert first["remaining_requests"] > 0
    job.start_again()
    assert job.wait(240) == 0, job.log
    assert read_texts(tmp_path / "out.jsonl") == answers(*LONG)
    assert "SIGUSR1" in job.log
    reports = sorted(path.name for path in tmp_path.glob("*.h5"))
    assert reports == [f"out.jsonl.{job.number}-{turn}.h5" for turn in range(2)]


def test_a_job_ends_in_order_before_its_time_is_over(submit, tmp_path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 64, 1000)
    job = submit("single_node", "--cpus-per-task=1", "--time=1", "--signal=USR1@40",
                 output="out.jsonl", fastdecode_options=OPTIONS)  # fmt: skip
    assert job.wait() == 75, job.log
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped early, resumable", "SIGUSR1")
    assert status["remaining_requests"] > 0


@pytest.mark.slow
def test_a_job_that_reaches_its_limit_without_a_warning_is_resumable_too(submit, tmp_path) -> None:
    """Slurm sends TERM, and KILL KillWait seconds later."""
    write_prompts(tmp_path / "prompts.jsonl", 64, 2000)
    script = changed("single_node", tmp_path, ("#SBATCH --signal=USR1@120\n", ""))
    job = submit("", "--cpus-per-task=1", "--time=1", script, output="out.jsonl", fastdecode_options=OPTIONS)
    job.wait(180)
    assert job.field("JobState") == "TIMEOUT"
    status = json.loads((tmp_path / "out.jsonl.status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped early, resumable", "SIGTERM")


def test_a_killed_r_worker_ends_the_job_in_seconds_with_its_rank_in_the_log(submit, tmp_path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", 64, 1000)
    job = submit("homogeneous", *ONE_A_NODE, output="out.jsonl", fastdecode_options=OPTIONS)
    status = tmp_path / "out.jsonl.status.json"
    job.wait_for(lambda: status.exists())
    job.kill_rank(2)
    assert job.wait(20) != 0
    assert "task 2: Killed" in job.log


def test_a_plugin_that_the_library_cannot_understand_is_refused_with_the_hint(submit, tmp_path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", *SHORT)
    job = submit("homogeneous", *ONE_A_NODE, output="out.jsonl", fastdecode_options=OPTIONS, fastdecode_mpi="pmix")
    assert job.wait(30) == 2
    assert job.log.count("Use srun --mpi=pmi2") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_processes_that_each_run_alone_are_refused_with_the_hint(submit, tmp_path) -> None:
    write_prompts(tmp_path / "prompts.jsonl", *SHORT)
    job = submit("homogeneous", *ONE_A_NODE, output="out.jsonl", fastdecode_options=OPTIONS, fastdecode_mpi="none")
    assert job.wait(30) == 2
    assert job.log.count("sees a world of 1: each process runs alone. Use srun --mpi=pmi2") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_open_mpi_under_the_wrong_plugin_is_refused_and_under_the_right_one_runs(submit, tmp_path) -> None:
    python = ROOT / ".venv-openmpi" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no environment with Open MPI")
    doctor = f"env OMPI_MCA_btl=self,sm,tcp {python} -m fastdecode_hpc doctor --quick --threads 1"
    alone = submit("", "--nodes=2", "--ntasks=2", "--wrap", f"srun -K --mpi=pmi2 {doctor}")
    assert alone.wait(60) == 2
    assert alone.log.count("Use srun --mpi=pmix (") == 1
    together = submit("", "--nodes=2", "--ntasks=2", "--wrap", f"srun -K --mpi=pmix {doctor}")
    assert together.wait(60) == 0, together.log
    assert "srun --mpi=pmix, for Open MPI" in together.log


def test_a_job_whose_ranks_share_cores_or_that_forgot_srun_is_refused(submit, tmp_path) -> None:
    """The nodes of this Slurm are one machine, so its ranks are on the same cores: there, for once, by intent."""
    write_prompts(tmp_path / "prompts.jsonl", *SHORT)
    crowded = submit("homogeneous", *ONE_A_NODE, output="out.jsonl", fastdecode_options="--threads 64")
    assert crowded.wait(60) == 2
    for words in ("placed badly", "rank 2 ", "fewer cores than threads", "--allow-oversubscribe"):
        assert words in crowded.log
    command = f"{sys.executable} -m fastdecode_hpc generate --input prompts.jsonl --output out.jsonl"
    alone = submit("", "--ntasks=3", "--wrap", command)
    assert alone.wait(30) == 2
    assert "was not started by srun" in alone.log


def test_the_doctor_examines_a_job_of_two_nodes(submit, tmp_path) -> None:
    command = f"{sys.executable} -m fastdecode_hpc doctor --threads 1 --json {tmp_path / 'd.json'}"
    job = submit("", "--nodes=2", "--ntasks=2", "--wrap", f"srun -K --mpi=pmi2 {command}")
    code = job.wait(60)
    assert (tmp_path / "d.json").exists(), job.log
    told = json.loads((tmp_path / "d.json").read_text())
    assert (code == 2) == (told["verdict"] == "problem"), job.log
    by_check = {one["check"]: one for one in told["findings"]}
    assert by_check["launcher"]["text"] == "srun started 2 processes, and MPI sees 2"
    assert by_check["Slurm plugin"]["verdict"] == "ok"
    assert [speed["rank"] for speed in told["speeds"]] == [1]


def test_the_parts_of_a_sweep_are_merged_into_one_comparison(submit, tmp_path) -> None:
    sweep = "--batch-sizes 2,4 --contexts 32,64 --new-tokens 8 --num-layers 2 --rounds 1"
    job = submit("sweep_array", "--array=0-1", "--cpus-per-task=1", sweep=sweep,
                 fastdecode_options="--allow-oversubscribe --threads 1 --kv-memory-bytes 64M")  # fmt: skip
    command = f"{sys.executable} -m fastdecode_hpc report merge sweep-0.h5 sweep-1.h5 -o all.h5"
    done = submit("", f"--dependency=afterok:{job.number}", "--kill-on-invalid-dep=yes", "--wrap", command)
    assert done.wait(180) == 0, job.log + done.log
    lines = done.log.splitlines()
    assert len(lines) == 1 + 4
    assert {line.split()[0] for line in lines[1:]} == {"3"}
    with h5py.File(tmp_path / "all.h5") as file:
        assert file.attrs["kind"] == "sweep"
