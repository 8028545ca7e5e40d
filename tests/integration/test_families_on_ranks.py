"""Every family from prompt to text, over real caches, kernels and ranks, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launching import run_ranks
from tiny_models import FAMILIES, load_reference, make_checkpoint, random_prompt, reference_logits

PROGRAM = Path(__file__).with_name("families_program.py")
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 33, 70)]  # past every window, and several chunks
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("families")
    return [make_checkpoint(folder / name, name) for name in FAMILIES]


@pytest.mark.parametrize("ranks", [1, 3])
def test_greedy_tokens_are_those_of_transformers(checkpoints: list[Path], ranks: int, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.json", tmp_path / "out.json"
    prompts.write_text(json.dumps(PROMPTS))
    done = run_ranks(ranks, [str(PROGRAM), str(prompts), str(output), *map(str, checkpoints)], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(output.read_text())
    assert list(results) == list(FAMILIES)
    assert [path.name for path in checkpoints if not is_greedy(path, results[path.name])] == []


def is_greedy(checkpoint: Path, texts: list[list[int]]) -> bool:
    """Whether each token is the most likely one after those before it: then the texts are the greedy ones."""
    model = load_reference(checkpoint)
    return all(
        len(tokens) == NUM_TOKENS
        and tokens == reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
        for prompt, tokens in zip(PROMPTS, texts, strict=True)
    )
