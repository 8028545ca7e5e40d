#!/usr/bin/env bash
# Runs the batch scripts under a real Slurm of three nodes on this machine, as root: starts it, tests, stops it again.
#   scripts/slurm_test.sh [--install] [PYTEST OPTIONS]     --install: bring Debian's Slurm where it is missing
#   -m ""     the long tests as well
set -euo pipefail
cd "$(dirname "$0")/.."
install=""
if [ "${1:-}" = --install ]; then install=$1; shift; fi

export FASTDECODE_SLURM_DIR=${FASTDECODE_SLURM_DIR:-$(mktemp -d /tmp/fastdecode-slurm.XXXXXX)}
export SLURM_CONF=$FASTDECODE_SLURM_DIR/slurm.conf
trap 'scripts/slurm_up.sh stop' EXIT
scripts/slurm_up.sh start $install

export UCX_NET_DEVICES=lo  # short addresses: Slurm's pmi2 loses what one of several devices takes now and then
export PATH=$PWD/.venv/bin:$PATH PYTHONPATH=$PWD/src:$PWD/tests TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
unset OMP_NUM_THREADS
[ $# -gt 0 ] || set -- -m "not slow"
# That plugin fails MPI_Init now and then all the same, before the program has a say: such a test is run again.
.venv/bin/python -m pytest tests/slurm --quiet -p no:cacheprovider --reruns 2 --only-rerun internal_Init_thread "$@"
