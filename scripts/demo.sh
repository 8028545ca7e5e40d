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

def answer(record):
    """Finish reason and text, of the program's own records and of those in OpenAI's form."""
    if record.get("error"):
        return "error", record["error"]["message"]
    if "response" not in record:
        return record["finish_reason"], record["text"]
    choice = record["response"]["body"]["choices"][0]
    return choice["finish_reason"], choice["message"]["content"] if "message" in choice else choice["text"]


for line in open("out/demo.jsonl", encoding="utf-8"):
    record = json.loads(line)
    reason, text = answer(record)
    print(f"[{record['index']:>2}] {reason:<6} {text[:100]!r}")
PYTHON
echo
echo "records: out/demo.jsonl   figures: out/demo.h5 (.venv/bin/fastdecode report show out/demo.h5)"
