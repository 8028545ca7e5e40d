"""The default model: recorded greedy continuations of the same weights, at 1 and 3 ranks; stop strings; the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launching import fastdecode, read_records, write_requests

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "smollm2_f32_greedy.json").read_text())["cases"]
FP32 = ("--wire-dtype", "fp32", "--kv-dtype", "fp32", "--kv-memory-bytes", "512M")
# Where two tokens are as near as this, two programs in fp32 may choose differently; log-probabilities still agree.
THIN_MARGIN = 0.02
LOGPROB_TOLERANCE = 2e-3  # recorded with five digits, of another program's sums in fp32


@pytest.fixture(scope="module", params=[1, 3])
def golden_records(request, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("golden")
    lines = [
        {"prompt": case["prompt_ids"], "max_new_tokens": len(case["greedy_ids"]), "ignore_eos": True, "logprobs": 5,
         "return_token_ids": True}
        for case in GOLDEN
    ]  # fmt: skip
    path = write_requests(folder / "in.jsonl", lines)
    done = fastdecode(
        "generate", "--input", path, "--output", folder / "out.jsonl", "--ranks", request.param, *FP32, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return read_records(folder / "out.jsonl")


@pytest.mark.timeout(300)
def test_greedy_tokens_and_logprobs_are_the_recorded_ones(golden_records: list[dict]) -> None:
    assert len(golden_records) == len(GOLDEN)
    for record, case in zip(golden_records, GOLDEN, strict=True):
        for place, (token, want, step) in enumerate(
            zip(record["token_ids"], case["greedy_ids"], case["steps"], strict=True)
        ):
            got = dict(record["logprobs"][place]["top"])
            for other, logprob in step["top5"][:3]:
                assert got[other] == pytest.approx(logprob, abs=LOGPROB_TOLERANCE), (case["prompt"], place)
            if token != want:
                (first, best), (second, next_best) = step["top5"][:2]
                assert {token, want} == {first, second} and best - next_best < THIN_MARGIN, (case["prompt"], place)
                break  # from here on the texts differ, rightly


def test_few_cases_leave_the_recorded_text(golden_records: list[dict]) -> None:
    same = [record["token_ids"] == case["greedy_ids"] for record, case in zip(golden_records, GOLDEN, strict=True)]
    thin = [case["min_top1_margin"] < THIN_MARGIN for case in GOLDEN]
    assert all(equal or near for equal, near in zip(same, thin, strict=True))
    assert sum(same) >= len(GOLDEN) - 2


@pytest.mark.slow
def test_stop_strings_across_token_borders_and_chat(tmp_path: Path) -> None:
    prompt = "The capital of France is"  # " Paris.\n\nThe answer is: 2018-..." greedily
    lines = [
        {"prompt": prompt, "max_new_tokens": 24},
        {"prompt": prompt, "max_new_tokens": 24, "stop": "is.\n\nThe ans"},
        {"prompt": prompt, "max_new_tokens": 24, "stop": ["never there", " answer", "answer is"]},
        {"prompt": prompt, "max_new_tokens": 2},
        {"messages": [{"role": "user", "content": "Say hello."}], "max_new_tokens": 40},
    ]
    path = write_requests(tmp_path / "in.jsonl", lines)
    done = fastdecode("generate", "--input", path, "--output", tmp_path / "out.jsonl", *FP32, timeout=200)
    assert done.returncode == 0, done.stderr
    whole, across, list_, short, chat = read_records(tmp_path / "out.jsonl")
    assert whole["text"].startswith(" Paris.\n\nThe answer")
    assert (across["text"], across["finish_reason"]) == (" Par", "stop")
    assert across["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
    assert (list_["text"], list_["finish_reason"]) == (" Paris.\n\nThe", "stop")
    assert (short["text"], short["finish_reason"]) == (" Paris.", "length")
    assert "<|im_" not in chat["text"] and chat["text"].strip()
