#!/usr/bin/env bash
# From a fresh machine to completions: sets up .venv, then runs 24 real prompts on SmolLM2-135M over three ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh

mkdir -p out
.venv/bin/fastdecode generate --ranks 3 --input examples/prompts.jsonl --output out/demo.jsonl --overwrite \
  --report out/demo.h5 "$@"
echo
.venv/bin/python - <<'PYTHON'
import json

for line in open("out/demo.jsonl", encoding="utf-8"):
    record = json.loads(line)
    text = record.get("text", record.get("error", {}).get("message", ""))
    print(f"[{record['index']:>2}] {record.get('finish_reason') or 'error':<6} {text[:100]!r}")
PYTHON
echo
echo "records: out/demo.jsonl   figures: out/demo.h5 (.venv/bin/fastdecode report show out/demo.h5)"
