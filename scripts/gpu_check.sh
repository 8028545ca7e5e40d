#!/usr/bin/env bash
# Tests and measures the S-Part on a machine with a GPU, in at most 8 minutes and without a network.
#   scripts/gpu_check.sh [WHEELS]
# python3 (or $PYTHON) must have torch, mpi4py, numpy, cython, pytest, pytest-timeout and transformers; cmake and a C++
# compiler must be there. WHEELS is a folder of what else is to be installed, into an environment of its own, such as
#   pip download --no-deps -d WHEELS mpich cython-cmake
# Exit codes: 0 all well; 1 something failed; 2 there is no GPU, or the kernels can't be built.
set -euo pipefail
wheels=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: $python has no torch that sees a GPU; run this on a machine with one (set PYTHON to another" \
    "Python, or check CUDA_VISIBLE_DEVICES)" >&2
  exit 2
fi

# An environment that takes all but the wheels from $python.
own=.venv-gpu
rm -rf "$own"
"$python" -m venv --without-pip "$own"
site=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import site, sysconfig
for path in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]):
    print(f"import site; site.addsitedir({path!r})")' >"$site/system_packages.pth"
if [ -n "$wheels" ]; then
  "$python" -m pip --python "$own/bin/python" install --quiet --ignore-installed --no-index --no-deps "$wheels"/*.whl
fi

# cmake finds cython, and the tests their mpiexec, on the path.
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export PYTHONPATH=$PWD/src PATH=$PWD/$own/bin:$scripts:$PATH
if ! "$own/bin/python" -c 'import fastdecode_hpc.r_part.attention' 2>/dev/null; then
  echo "gpu_check: building the kernels"
  if ! (timeout 40 cmake -S . -B build/gpu -DPython_EXECUTABLE="$PWD/$own/bin/python" &&
    timeout 80 cmake --build build/gpu --parallel && cmake --install build/gpu --prefix src) >build-gpu.log 2>&1; then
    tail -n 20 build-gpu.log >&2
    echo "gpu_check: the kernels can't be built; is cython-cmake among the wheels?" >&2
    exit 2
  fi
fi
exec "$own/bin/python" benchmarks/gpu_check.py
