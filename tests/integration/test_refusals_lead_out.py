"""A model that is refused is told of what runs it, and of nothing that is refused in turn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.families.known import BY_NAME
from fastdecode_hpc.s_part import transformers_model
from fastdecode_hpc.s_part.kinds import find_kind

METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp8": {"quant_method": "fp8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "unknown": {"quant_method": "mystery"},
}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 64, "vocab_size": 320, "max_position_embeddings": 256}  # fmt: skip
TYPES = (
    "llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral", "opt", "gpt2",  # native, all but OPT as GGUF too
    "cohere", "glm4", "phi", "qwen2_moe",  # on transformers' code
    "falcon", "stablelm", "gemma4_text", "diffllama",  # on neither, for what their code does
    "mamba", "deepseek_v3", "bloom", "t5",  # on neither, by name
)  # fmt: skip
MACHINES = ("as it is", "with all libraries", "with none")


def write_config(folder: Path, kind: str, method: str) -> Path:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(kind, **SIZES)
    values = json.loads(config.to_json_string())
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "OtherForCausalLM")]
    given = METHODS[method]
    values.update({} if given is None else {"quantization_config": given})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refusal(folder: Path, s_part: str) -> str:
    """What stands against a model before its weights are looked at; empty: nothing."""
    try:
        kind = find_kind(RunConfig(s_part=s_part), folder)
        kind.read_model()
        if s_part == "transformers":
            kind.check_machine()
    except ConfigError as error:
        return str(error)
    return ""


def ways_out(text: str, s_part: str) -> set[str]:
    """Options and forms that a refusal recommends, each under the S-Part that it is recommended for."""
    found = set()
    for clause in re.split(r"; (?=with --s|without --s|--s-part|the native S-Part runs)", text):
        asked = s_part
        if clause.startswith(("--s-part transformers runs it", "with --s-part transformers: ")):
            asked = "transformers"
        if clause.startswith(("the native S-Part runs it", "without --s-part transformers: ")):
            asked = "native"
        if " runs it" in clause:
            found.add(f"{asked} as it is")
        if "an unquantised safetensors checkpoint" in clause:
            found.add(f"{asked} unquantised")
        if "a GGUF file" in clause:
            found.add(f"{'native' if 'without --s-part transformers' in clause else asked} GGUF")
    return found


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", TYPES)
def test_no_refusal_names_what_is_refused(
    kind: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if machine != "as it is":
        monkeypatch.setattr(transformers_model, "AutoHfQuantizer", Quantisers(machine == "with all libraries"))
    folders = {method: write_config(tmp_path / method, kind, method) for method in METHODS}
    found = {(method, s_part): refusal(folder, s_part)
             for method, folder in folders.items() for s_part in ("native", "transformers")}  # fmt: skip
    can_be_run = not all(found["none", s_part] for s_part in ("native", "transformers"))
    for (method, s_part), text in found.items():
        assert "\n" not in text
        ways = ways_out(text, s_part)
        assert bool(ways) == bool(text and can_be_run), (method, s_part, text)
        for way in ways:
            asked, form = way.split(" ", 1)
            if form == "GGUF":
                assert asked == "native", (method, s_part, text)
                assert BY_NAME[kind].gguf is not None, (method, s_part, text)
            else:
                assert not found["none" if form == "unquantised" else method, asked], (method, s_part, text)


class Quantisers:
    """Stands in for transformers' table of quantisations: all can be run, or none."""

    def __init__(self, can_be_run: bool) -> None:
        self._can_be_run = can_be_run

    def from_config(self, given: Any, **options: Any) -> Quantisers:
        return self

    def validate_environment(self, **options: Any) -> None:
        if not self._can_be_run:
            raise ImportError("a library is missing")


def test_gpt_oss_as_it_is_published_is_told_of_the_forms_that_run(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "gpt_oss", "mxfp4")
    forms = "take a GGUF file or an unquantised safetensors checkpoint"
    for s_part in ("native", "transformers"):
        text = refusal(folder, s_part)
        assert forms in text
        assert "runs it" not in text
        assert "\n" not in text
