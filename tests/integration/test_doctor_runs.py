"""The doctor on this machine: alone, without MPI, and on several ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from launching import clean_env, fastdecode, is_open_mpi, run_limited, run_ranks

HEAVY = """
import sys
from fastdecode_hpc.cli import run_command
code = run_command(["doctor", "--no-mpi", "--quick"])
print(code, sorted({"torch", "mpi4py", "transformers"} & set(sys.modules)))
"""


def checks(path: Path) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for one in json.loads(path.read_text())["findings"]:
        found.setdefault(one["check"], []).append(one)
    return found


def test_one_process_is_examined_without_starting_mpi(tmp_path: Path) -> None:
    done = fastdecode("doctor", "--quick", "--json", tmp_path / "d.json", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = checks(tmp_path / "d.json")
    assert ("Open MPI" if is_open_mpi() else "MPICH") in found["MPI library"][0]["text"]
    assert found["MPI library"][0]["text"].partition("(")[2].startswith("/")
    assert "mpiexec" in found["launcher"][0]["text"] or "mpirun" in found["launcher"][0]["text"]
    assert found["thread level"][0]["text"] in ("SERIALIZED", "MULTIPLE")
    assert str(tmp_path) in found["output folder"][0]["text"]
    assert done.stdout.splitlines()[-1].startswith("0 problems, ")
    assert not list(tmp_path.glob(".*"))


def test_without_mpi_nothing_heavy_is_loaded() -> None:
    done = run_limited([sys.executable, "-c", HEAVY], timeout=60, env=clean_env(MPI4PY_LIBMPI="/nonexistent"))
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_no_mpi_library_is_a_problem(tmp_path: Path) -> None:
    done = fastdecode("doctor", "--quick", env=clean_env(MPI4PY_LIBMPI="/nonexistent/libmpi.so"))
    assert done.returncode == 2
    assert "problem  MPI library" in done.stdout


def test_ranks_are_compared_and_measured(tmp_path: Path) -> None:
    arguments = ["-m", "fastdecode_hpc", "doctor", "--threads", "1", "--json", str(tmp_path / "d.json")]
    done = run_ranks(3, arguments, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "d.json").read_text())
    assert [place["role"] for place in told["places"]] == ["S-worker", "R-worker", "R-worker"]
    assert [speed["rank"] for speed in told["speeds"]] == [1, 2]
    assert all(speed["read_bytes_per_s"] > 1e8 and speed["link_bytes_per_s"] > 1e6 for speed in told["speeds"])
    found = checks(tmp_path / "d.json")
    assert found["launcher"][0]["text"] == "mpirun started 3 processes, and MPI sees 3"
    assert found["ranks"][0]["verdict"] == "ok"
    crowded = len(os.sched_getaffinity(0)) < 3
    assert ("were started on the same cores" in done.stdout) == crowded
    assert done.stdout.count("MPI library") <= 2  # rank 0 alone tells


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    assert fastdecode("doctor", "--no-mpi", "--ranks", "2").returncode == 2
    done = fastdecode("doctor", "--no-mpi", "--quick", "--folder", "/proc")
    assert (done.returncode, "nothing can be written in /proc" in done.stdout) == (2, True)
    done = fastdecode("doctor", "--folder", tmp_path / "none")
    assert done.returncode == 2
    assert "is no folder" in done.stderr
