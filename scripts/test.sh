#!/usr/bin/env bash
# From a fresh machine to every test: lint, unit, kernels, whole runs, MPI on MPICH and once on Open MPI.
#   scripts/test.sh          the usual counts
#   scripts/test.sh --slurm  and the batch scripts under a real Slurm that it starts, as root (scripts/slurm_test.sh)
#   scripts/test.sh --all    the long counts as well, and Slurm
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh test

slow=(-m "not slow")
[ "${1:-}" = --all ] && slow=()
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

section() { printf '\n== %s\n' "$1"; }

section "lint"
.venv/bin/ruff check src tests examples
.venv/bin/ruff format --check --quiet src tests examples
.venv/bin/mypy --no-error-summary
.venv/bin/lint-imports >/dev/null || .venv/bin/lint-imports
PATH=$PWD/.venv/bin:$PATH cython-lint cython/*.pyx

section "unit, kernels, whole runs, faults (the last two start their own ranks on MPICH)"
.venv/bin/python -m pytest tests --ignore=tests/mpi --quiet "${slow[@]}"

# Every rank prints a report of its own; the first failure on any rank ends the job.
mpi_tests() {
  local python=$1
  shift
  env -u OMP_NUM_THREADS timeout 600 "$@" "$python" -m pytest tests/mpi --with-mpi --quiet -p no:cacheprovider "${slow[@]}"
}
for ranks in 2 3 4; do
  section "MPI tests, $ranks ranks, MPICH"
  mpi_tests .venv/bin/python .venv/bin/mpiexec -n "$ranks"
done

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi OMPI_MCA_osc=^ucx
export OMPI_MCA_mpi_yield_when_idle=1
section "MPI tests, 3 ranks, Open MPI"
mpi_tests .venv-openmpi/bin/python .venv-openmpi/bin/mpiexec --oversubscribe --bind-to none -n 3
section "whole runs and faults, Open MPI"
.venv-openmpi/bin/python -m pytest tests/integration/test_identity.py tests/faults -k "not mistral and not (test_resume and (budget or killed))" --quiet -p no:cacheprovider "${slow[@]}"
if [ "${1:-}" = --all ] || [ "${1:-}" = --slurm ]; then
  section "batch scripts under Slurm"
  if [ "$(id -u)" = 0 ] && { command -v slurmctld >/dev/null || command -v apt-get >/dev/null; }; then
    scripts/slurm_test.sh --install -m "${slow[1]:-}"
  else
    echo "Slurm's daemons need root and, where they are missing, apt-get: left out"
  fi
fi
if [ "${1:-}" = --all ]; then
  section "fuzzing, 20 s a target"
  # No part of the usual set-up: its wheel is large, and not there for every platform.
  if .venv/bin/pip install --quiet 'atheris>=3.0'; then
    scripts/fuzz.sh 20
  else
    echo "there is no atheris for this platform: left out"
  fi
fi
printf '\nall tests passed\n'
