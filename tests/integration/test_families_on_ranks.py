"""Every family from prompt to text, over real caches, kernels and ranks, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launching import run_ranks
from tiny_models import FAMILIES, MORE_OTHERS, OTHERS, load_reference, make_checkpoint, random_prompt, reference_logits

PROGRAM = Path(__file__).with_name("families_program.py")
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 33, 70)]  # past every window, and several chunks
NUM_TOKENS = 64
# Native ones run by transformers' code too: with experts, windows, caps, learned positions, changing rotations.
BOTH = ["llama", "mixtral", "gemma2", "gpt2", "opt-350m", "phi3-long", "dynamic-rope"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("s_part", "names"),
    [
        pytest.param("native", list(FAMILIES), id="native"),
        pytest.param("transformers", [*OTHERS, *BOTH], id="transformers"),
        pytest.param("transformers", [*MORE_OTHERS], id="transformers-more", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_transformers(s_part: str, names: list[str], ranks: int, tmp_path: Path) -> None:
    checkpoints = [make_checkpoint(tmp_path / name, name) for name in names]
    prompts, output = tmp_path / "prompts.json", tmp_path / "out.json"
    prompts.write_text(json.dumps(PROMPTS))
    done = run_ranks(ranks, [str(PROGRAM), str(prompts), str(output), s_part, *map(str, checkpoints)], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(output.read_text())
    assert list(results) == names
    assert [path.name for path in checkpoints if not is_greedy(path, results[path.name])] == []


def is_greedy(checkpoint: Path, texts: list[list[int]]) -> bool:
    """Whether each token is the most likely one after those before it: then the texts are the greedy ones."""
    model = load_reference(checkpoint)
    return all(
        len(tokens) == NUM_TOKENS
        and tokens == reference_logits(model, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
        for prompt, tokens in zip(PROMPTS, texts, strict=True)
    )
