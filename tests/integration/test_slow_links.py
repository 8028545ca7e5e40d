"""One of three R-workers on a slow link: it gets fewer sequences, and every token is as it was."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

from fastdecode_hpc.model_config import read_model_shape
from launching import run_ranks
from tiny_models import make_checkpoint, random_prompt

PROGRAM = Path(__file__).with_name("slow_links_program.py")
ROW_S = 0.012  # of q, k, v of a row on the slow link; far above what the other links take, on a busy machine too
OPTIONS = {"max_batch_size": 12, "wire_dtype": "fp32", "kv_dtype": "fp32"}


def links(folder: Path) -> dict[str, list[float]]:
    """Two links that take no time, and a slow one."""
    row_bytes = 4 * read_model_shape(make_checkpoint(folder / "model", "llama")).qkv_size
    return {"1": [1e9, 0.0], "2": [1e9, 0.0], "3": [row_bytes / ROW_S, 0.0]}


def run(folder: Path, ranks: int, cases: list) -> list[dict]:
    checkpoint = folder / "model"
    rng = random.Random(5)
    prompts = [(random_prompt(rng.randint(4, 20), seed=index), 12 + index % 9) for index in range(72)]
    files = [folder / name for name in ("prompts.json", f"out-{ranks}.json", "cases.json")]
    files[0].write_text(json.dumps(prompts))
    files[2].write_text(json.dumps(cases))
    done = run_ranks(ranks, [str(PROGRAM), str(checkpoint), *map(str, files)], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(files[1].read_text())


def rows_of(steps: list[dict]) -> Counter[str]:
    rows: Counter[str] = Counter()
    for step in steps:
        rows.update(step)
    return rows


def test_the_slow_one_gets_less_and_tokens_stay(tmp_path: Path) -> None:
    slow = links(tmp_path)
    cases = [[OPTIONS, slow], [{**OPTIONS, "r_worker_weights": "equal"}, slow]]
    (alone,) = run(tmp_path, 1, [[OPTIONS, {}]])
    aware, equal = run(tmp_path, 4, cases)
    assert len(alone["tokens"]) == 72
    assert alone["tokens"] == aware["tokens"] == equal["tokens"]

    half = len(aware["rows"]) // 2
    late, early = rows_of(aware["rows"][half:]), rows_of(aware["rows"][: half // 4])
    assert early["3"] >= 0.2 * early.total()  # nothing was known when the first ones were placed
    assert late["3"] < 0.5 * min(late["1"], late["2"])
    assert aware["shares"]["3"] < 0.5 * min(aware["shares"]["1"], aware["shares"]["2"])
    assert "rank 3 " in aware["told"] and "link" in aware["told"]

    rows = rows_of(equal["rows"])
    assert rows["3"] > 0.25 * rows.total()
    assert equal["told"] == ""


def test_what_is_measured_of_a_link_is_what_it_takes(tmp_path: Path) -> None:
    """Seen by both ends, with one slot and with two that queue up: what its rows take, and no less."""
    options, slow = {**OPTIONS, "r_worker_weights": "equal"}, links(tmp_path)
    for found in run(tmp_path, 4, [[{**options, "num_slots": slots}, slow] for slots in (1, 2)]):
        pairs = zip(found["links"], found["rows"], strict=True)
        seen = [link["3"] / rows["3"] for link, rows in pairs if not math.isnan(link["3"])]
        assert len(seen) > 10
        assert sorted(seen)[len(seen) // 2] >= 0.9 * ROW_S
