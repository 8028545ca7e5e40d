"""Who started this process: environments recorded from real launchers, reduced to the variables that matter.

Recorded with Slurm 22.05, MPICH 5.0 and Open MPI 5.0, on three nodes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.launch import (
    Launch,
    batch_scheduler,
    check_alone,
    check_process_manager,
    check_world,
    detect,
    final_code,
    process_manager,
)
from fastdecode_hpc.mpiexec import Library, environment, find_library, find_mpiexec, short_name
from fastdecode_hpc.signals import StopRequest

MPICH, OPEN_MPI = "MPICH Version:      5.0.2", "Open MPI v5.0.11"


def step(rank: int, size: int, step_id: int = 0, **more: str) -> dict[str, str]:
    numbers = {"PROCID": rank, "STEP_ID": step_id, "STEP_NUM_TASKS": size}
    return {"SLURM_JOB_ID": "5", **{f"SLURM_{name}": str(number) for name, number in numbers.items()}, **more}


def pmi2(rank: int, size: int) -> dict[str, str]:
    return {"PMI_FD": "11", "PMI_JOBID": "5.0", "PMI_RANK": str(rank), "PMI_SIZE": str(size)}


def hydra(rank: int, size: int, on_this_node: int) -> dict[str, str]:
    names = {"PMI_FD": "5", "PMI_HOSTNAME": "n2", "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    return {**names, "MPI_LOCALNRANKS": str(on_this_node), "MPI_LOCALRANKID": "0"}


HET = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2"}

CASES = {
    "plain shell": ({"PATH": "/usr/bin"}, Launch("none")),
    # the batch shell has a rank, but no step
    "sbatch shell": (
        {"SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"},
        Launch("none"),
    ),
    "sbatch shell of a heterogeneous job": (
        {"SLURM_JOB_ID": "6", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", **HET},
        Launch("none"),
    ),
    "salloc shell": ({"SLURM_JOB_ID": "8", "SLURM_NTASKS": "3"}, Launch("none")),
    "salloc shell as interactive step": (step(0, 1, 4294967290, SLURM_PTY_PORT="45907"), Launch("none")),
    "srun --pty bash": (step(0, 1, SLURM_PTY_PORT="38759", **pmi2(0, 1)), Launch("none")),
    "srun -n3 under srun --pty bash": (step(1, 3, SLURM_PTY_PORT="38759"), Launch("srun", 1, 3)),
    "srun -n3 --mpi=pmi2": (step(1, 3, SLURM_MPI_TYPE="pmi2", **pmi2(1, 3)), Launch("srun", 1, 3)),
    "srun -n3 --mpi=pmix": (
        step(1, 3, 5, SLURM_MPI_TYPE="pmix", PMIX_RANK="1", PMIX_NAMESPACE="slurm.pmix.5.5"),
        Launch("srun", 1, 3),
    ),
    "srun -n3 --mpi=none": (step(2, 3, 3), Launch("srun", 2, 3)),
    # Slurm counts the tasks of all components in each of them
    "srun A : B": (
        step(2, 3, SLURM_HET_SIZE="2", **pmi2(2, 3)),
        Launch("srun", 2, 3, component=None, is_heterogeneous=True),
    ),
    "hetjob, srun --het-group=0,1, first": (
        step(0, 3, **HET, **pmi2(0, 3)),
        Launch("srun", 0, 3, component=0, is_heterogeneous=True),
    ),
    "hetjob, srun --het-group=0,1, last": (
        step(2, 3, **HET, **pmi2(2, 3)),
        Launch("srun", 2, 3, component=1, is_heterogeneous=True),
    ),
    "hetjob, srun --het-group=0": (step(0, 1, 3, **HET, **pmi2(0, 1)), Launch("srun", 0, 1)),
    "hetjob, srun --het-group=1": (step(1, 2, 4, **HET, **pmi2(1, 2)), Launch("srun", 1, 2)),
    "mpiexec of MPICH": (hydra(2, 3, 3), Launch("mpirun", 2, 3)),
    # its ranks see the step of Hydra's proxies: one task a node
    "mpiexec of MPICH in sbatch, 4 ranks on 3 nodes": (step(1, 3, 1) | hydra(3, 4, 1), Launch("mpirun", 3, 4)),
    "mpiexec of MPICH in a heterogeneous job": (step(0, 1, 7, **HET) | hydra(2, 3, 3), Launch("mpirun", 2, 3)),
    "mpiexec of Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
        Launch("mpirun", 1, 2),
    ),
    "mpiexec of Open MPI in sbatch": (
        step(0, 3) | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"},
        Launch("mpirun", 3, 4),
    ),
    "another process manager": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpirun", 1, 2)),
    "another PMIx server": ({"PMIX_RANK": "1"}, Launch("mpirun", 1, None)),
}


@pytest.mark.parametrize(("env", "expected"), CASES.values(), ids=CASES.keys())
def test_detect(env, expected):
    assert detect(env) == expected


def test_a_launchers_variable_that_is_no_number_is_an_error():
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS is 'three'"):
        detect({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "three"})


@pytest.mark.parametrize(
    "env",
    [
        step(0, 3, **pmi2(0, 3)),
        step(0, 3, **HET, **pmi2(0, 3)),
        step(0, 3, SLURM_HET_SIZE="2"),
        hydra(0, 3, 3),
        step(0, 1, 7) | hydra(0, 3, 3),
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},
        {"PMIX_RANK": "0"},
    ],
)
def test_a_world_of_what_the_launcher_started_is_accepted(env):
    check_world([detect(env)] * 3, 3, MPICH)


def test_outside_a_launcher_any_world_is_accepted():
    check_world([detect({})], 1, MPICH)


@pytest.mark.parametrize(("library", "plugin"), [(OPEN_MPI, "pmix"), (MPICH, "pmi2")])
def test_singletons_under_srun_are_refused_with_the_fitting_plugin(library, plugin):
    with pytest.raises(ConfigError) as error:
        check_world([detect(step(1, 3, **pmi2(1, 3)))], 1, library)
    assert "srun started 3 processes" in str(error.value)
    assert f"{' '.join(library.split())} sees a world of 1: each process runs alone" in str(error.value)
    assert f"srun --mpi={plugin}" in str(error.value)


def test_a_singleton_of_a_heterogeneous_step_is_refused():
    with pytest.raises(ConfigError, match="srun started 3 processes"):
        check_world([detect(step(0, 3, **HET))], 1, MPICH)


def test_singletons_under_another_librarys_mpiexec_are_refused():
    with pytest.raises(ConfigError, match=r"mpiexec started 3 .* another MPI library"):
        check_world([detect(hydra(0, 3, 3))], 1, OPEN_MPI)


def test_one_rank_with_another_opinion_is_enough():
    with pytest.raises(ConfigError, match="srun started 4 processes, but MPICH sees a world of 2"):
        check_world([detect(step(0, 2)), detect(step(1, 4))], 2, "MPICH")


@pytest.mark.parametrize(
    ("version", "family"),
    [
        (MPICH, "MPICH"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", "MPICH"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.6 (ANL base 3.4a2)", "MPICH"),
        (OPEN_MPI, "Open MPI"),
    ],
)
def test_family_of_a_library(version, family, tmp_path):
    assert Library(version, tmp_path / "libmpi.so").family == family


HYDRA_ANSWER, OPEN_MPI_ANSWER = "HYDRA build details:", "mpiexec (Open MPI) 5.0.11"


def make_mpiexec(folder, answer, name="mpiexec"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


def library_in(folder, version=MPICH):
    return Library(version, folder / "lib" / "openmpi" / "libmpi.so")


@pytest.mark.parametrize(("version", "answer"), [(MPICH, HYDRA_ANSWER), (OPEN_MPI, OPEN_MPI_ANSWER)])
def test_mpiexec_beside_the_library_comes_before_path(tmp_path, monkeypatch, version, answer):
    beside = make_mpiexec(tmp_path / "mpi" / "bin", answer)
    monkeypatch.setenv("PATH", str(make_mpiexec(tmp_path / "other", answer).parent), prepend=os.pathsep)
    assert find_mpiexec(library_in(tmp_path / "mpi", version)) == beside


def test_mpiexec_of_another_family_is_passed_over(tmp_path, monkeypatch):
    make_mpiexec(tmp_path / "mpi" / "bin", OPEN_MPI_ANSWER)
    make_mpiexec(tmp_path / "mpi" / "bin", "usage: mpiexec", "mpiexec.hydra")
    right = make_mpiexec(tmp_path / "mpi" / "bin", HYDRA_ANSWER, "mpiexec.mpich")
    assert find_mpiexec(library_in(tmp_path / "mpi")) == right


def test_no_mpiexec_of_the_library_is_an_error_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr("os.get_exec_path", list)
    monkeypatch.setattr("fastdecode_hpc.mpiexec._family_of_mpiexec", lambda path: "Open MPI")
    with pytest.raises(ConfigError, match=r"no mpiexec of MPICH .* --ranks 1"):
        find_mpiexec(library_in(tmp_path))


def test_no_mpi_library_is_an_error_with_the_way_out(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nonexistent/libmpi.so")
    with pytest.raises(ConfigError, match=r"cannot load an MPI library .*--ranks 1"):
        find_library()


def test_mpiexec_does_not_see_another_launchers_variables(monkeypatch):
    for name in ("PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALNRANKS", "PMIX_MCA_gds", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    env = environment("Open MPI", Path("/opt/mpi/bin/mpiexec"))
    assert {"PMIX_MCA_gds", "SLURM_JOB_ID"} <= env.keys()
    assert not {"PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALNRANKS"} & env.keys()
    assert env["PATH"].startswith("/opt/mpi/bin:")


@pytest.fixture
def stop():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    request = StopRequest()
    request.install()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_only_sets_the_flag(stop, name):
    assert not stop()
    os.kill(os.getpid(), getattr(signal, name))
    assert stop()
    assert stop.reason == name


def test_copies_of_one_signal_are_one_request_and_the_first_reason_stays(stop):
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert stop.reason == "SIGUSR1"


CONFIGURED = f"{MPICH}\nMPICH Device:       ch4:ucx ofi\nMPICH configure:    --with-device=ch4:ucx,ofi"
PMIX = {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"PATH": "/usr/bin", "PMI_FD": "5"}, ""),
        (step(1, 3, SLURM_MPI_TYPE="pmi2", **pmi2(1, 3)), "pmi2"),
        (step(1, 3, **PMIX), "pmix"),
        (step(1, 3, SLURM_MPI_TYPE="pmix_v4", PMIX_RANK="1"), "pmix"),
        (step(1, 3, SLURM_MPI_TYPE="none"), "none"),
        (step(1, 3), "none"),  # a Slurm that doesn't tell
        (step(1, 3, **pmi2(1, 3)), "pmi2"),
    ],
)
def test_the_process_manager_of_a_step(env, name):
    assert process_manager(env) == name


def test_a_library_that_cannot_understand_the_step_is_refused_before_it_starts():
    with pytest.raises(ConfigError, match=r"--mpi=pmix started 3 processes, but MPICH Version: 5\.0\.2 .*--mpi=pmi2"):
        check_process_manager(Launch("srun", 1, 3), CONFIGURED, step(1, 3, **PMIX))


@pytest.mark.parametrize(
    ("launch", "library", "env"),
    [
        (Launch("srun", 1, 3), CONFIGURED, step(1, 3, **pmi2(1, 3))),
        (Launch("srun", 0, 1), CONFIGURED, step(0, 1, **PMIX)),  # one process needs nobody
        (Launch("srun", 1, 3), f"{CONFIGURED} --with-pmix=/usr", step(1, 3, **PMIX)),
        (Launch("srun", 1, 3), MPICH, step(1, 3, **PMIX)),  # it doesn't tell, so it is not known
        (Launch("srun", 1, 3), OPEN_MPI, step(1, 3, **PMIX)),
        (Launch("mpirun", 1, 3), CONFIGURED, {**PMIX, **hydra(1, 3, 3)}),
    ],
)
def test_what_may_understand_the_step_is_tried(launch, library, env):
    check_process_manager(launch, library, env)


def test_one_process_of_a_job_of_several_tasks_is_refused():
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "3"}
    with pytest.raises(ConfigError, match=r"has 3 tasks, but this process was not started by srun.*--ranks 1"):
        check_alone(Launch("none"), None, job)
    check_alone(Launch("none"), 1, job)
    check_alone(Launch("none"), None, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"})
    check_alone(Launch("srun", 0, 3), None, job)
    check_alone(Launch("none"), None, {})


def test_the_batch_scheduler_is_known_by_its_job():
    assert batch_scheduler({"SLURM_JOB_ID": "7"}) == "Slurm"
    assert batch_scheduler({"PBS_JOBID": "7.host"}) == "PBS"
    assert batch_scheduler({"SLURM_CONF": "/etc/slurm.conf"}) == ""


@pytest.mark.parametrize(
    ("rank", "world_size", "code", "expected"),
    [
        (0, 0, 2, (2, True)),  # before MPI has started: the message must be out before anybody is ended
        (1, 0, 2, (0, False)),
        (0, 1, 2, (2, True)),  # one of N worlds of one rank
        (2, 1, 2, (0, False)),
        (0, 3, 2, (2, False)),  # ranks of one world leave together
        (1, 3, 1, (1, False)),
        (0, 0, 0, (0, False)),
    ],
)
def test_who_cannot_tell_the_others_lets_them_leave_first(monkeypatch, rank, world_size, code, expected):
    slept = []
    monkeypatch.setattr("fastdecode_hpc.launch.detect", lambda: Launch("srun", rank, 3))
    monkeypatch.setattr("fastdecode_hpc.launch.time.sleep", slept.append)
    assert (final_code(code, world_size), bool(slept)) == expected


def test_the_name_of_a_library_is_short():
    assert short_name(f"{MPICH}\nMPICH Device: ch4") == "MPICH Version: 5.0.2"
    assert short_name(f"{OPEN_MPI}, package: Open MPI user@host Distribution, ident: 5.0.11") == "Open MPI v5.0.11"
    assert short_name("") == ""
