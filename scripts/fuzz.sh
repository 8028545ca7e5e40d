#!/usr/bin/env bash
# Coverage-guided fuzzing of everything that reads files of others: each target for a while, in bounded memory.
#   scripts/fuzz.sh [SECONDS]     for each target; default 60
# An input that fails is left in build/fuzz/ and named; make it a case of tests/unit/test_hostile_files.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import atheris' 2>/dev/null; then
  echo "fuzz: atheris is not installed; install it: $python -m pip install 'atheris>=3.0'" >&2
  exit 2
fi
folder=$(mktemp -d "$([ -d /dev/shm ] && echo /dev/shm || echo /tmp)/fastdecode-fuzz.XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir -p build/fuzz
for target in requests resume gguf safetensors index config; do
  printf '\n== fuzz %s\n' "$target"
  OMP_NUM_THREADS=1 "$python" tests/fuzz/run.py "$target" "$folder" -max_total_time="${1:-60}" -timeout=10 \
    -rss_limit_mb=2048 -max_len=20000 -dict=tests/fuzz/words.dict -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/$target-" 2>&1 | grep -v "INFO: Instrumenting"
done
