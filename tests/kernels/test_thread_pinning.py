"""The kernels' threads are where they are said to be. Each case runs in a process of its own: masks stay narrowed."""

import json
import os
import subprocess
import sys

import pytest

from launching import clean_env

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="binding two threads needs two cores")
START = "import json, os, sys; from fastdecode_hpc import host; cores = sorted(os.sched_getaffinity(0))\n"


def run_python(code: str, **env: str):
    command = [sys.executable, "-c", START + code]
    done = subprocess.run(command, env=clean_env(**env), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_two_cores
def test_bound_threads_stay_on_their_cores_through_teams_of_one() -> None:
    masks = run_python("""
import numpy as np
from fastdecode_hpc.r_part.attention import make_cache_view, pin_threads, thread_cores
from fastdecode_hpc.schedule.kv_layout import LayerGroup
masks = [thread_cores(2)]
pin_threads((cores[1], cores[0]))
masks.append(thread_cores(2))
group = LayerGroup((0,), 1, 8, "fp16", "fp16")
view = make_cache_view(np.zeros(1 << 20, np.uint8), group, 8)
view.touch(0, 1 << 20, 2)
view.touch(0, 1 << 20, 1)
masks.append(thread_cores(2))
print(json.dumps([cores, *masks]))
""")
    cores, before, bound, after = masks
    assert before == [cores, cores]
    assert bound == after == [[cores[1]], [cores[0]]]


@needs_two_cores
@pytest.mark.parametrize("first", ["", "import torch; torch.rand(300, 300) @ torch.rand(300, 300)\n"])
def test_openmp_binding_leaves_the_team_two_cores(first: str) -> None:
    code = """
from fastdecode_hpc.affinity import num_usable_cores
from fastdecode_hpc.r_part.attention import thread_cores
import torch
masks, main = thread_cores(2), os.sched_getaffinity(0)
host.undo_openmp_binding({})
kept = os.sched_getaffinity(0) == main
host.undo_openmp_binding()
widened = sorted(os.sched_getaffinity(0))
print(json.dumps([masks, num_usable_cores(masks), len(main), kept, widened, cores, host.look().cores]))
"""
    masks, usable, num_main, kept, widened, cores, known = run_python(
        first + code, OMP_PROC_BIND="true", OMP_PLACES="cores", OMP_NUM_THREADS="2"
    )
    assert usable == 2
    assert sorted(core for mask in masks for core in mask) == cores[:2]
    assert num_main == 1  # OpenMP has bound the main thread
    assert kept  # without such a variable a narrow mask is somebody's wish
    assert widened == known == cores


@needs_two_cores
def test_places_on_one_core_are_seen() -> None:
    code = """
from fastdecode_hpc.affinity import num_usable_cores
from fastdecode_hpc.r_part.attention import thread_cores
print(json.dumps(num_usable_cores(thread_cores(2))))
"""
    core = min(os.sched_getaffinity(0))
    assert run_python(code, OMP_PROC_BIND="true", OMP_PLACES=f"{{{core}}}") == 1
    assert run_python(code) == 2


def test_cores_that_are_not_there_are_refused() -> None:
    told = run_python("""
from fastdecode_hpc.r_part.attention import pin_threads, thread_cores
told = []
for wrong in (-1, 1 << 20, 8191):
    try:
        pin_threads([wrong])
    except (OSError, ValueError) as error:
        told.append(str(error))
pin_threads([])
print(json.dumps([told, thread_cores(1) == (tuple(cores),)]))
""")
    texts, untouched = told
    assert "core -1 of thread 0 is not between 0 and 8191" in texts[0]
    assert "core 1048576" in texts[1]
    assert "thread 0 cannot be bound to core 8191" in texts[2]
    assert untouched
