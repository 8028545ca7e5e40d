"""What records depend on beside their own lines: the model's files and the options that change results.

It stands in a file beside the output, so that a later run goes on with that output only if it would write the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

from fastdecode_hpc.config import ConfigError, RunConfig
from fastdecode_hpc.files import write_json
from fastdecode_hpc.sequence import SamplingParams

# Options that change what a request is answered. Others, such as ranks or batch size, may differ when a run goes on.
RESULT_OPTIONS: Final = ("load_format", "s_part", "num_layers", "dtype", "weight_dtype", "wire_dtype", "kv_dtype",
                         "max_context_len", "overlong", "merge_system", "seed")  # fmt: skip
SMALL_FILE_BYTES: Final = 64 << 20  # read whole; of larger ones both ends, where headers and last tensors are
END_BYTES: Final = 1 << 20
_MODEL_FILES: Final = (".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja", ".py")

Fingerprint = dict[str, dict[str, Any]]  # "model": digests by file; "options" and "sampling": values by name


def take_fingerprint(run: RunConfig, defaults: SamplingParams, model: Path, *, auto_id: bool) -> Fingerprint:
    """What the results of a run depend on.

    Parameters
    ----------
    run : RunConfig
    defaults : SamplingParams
        Of lines that bring no settings.
    model : Path
        Folder or file.
    auto_id : bool
        Whether lines are given ids.
    """
    files = [model] if model.is_file() else sorted(file for file in model.iterdir() if file.suffix in _MODEL_FILES)
    if run.load_format == "dummy":
        files = [file for file in files if file.name == "config.json"]
    options = {name: getattr(run, name) for name in RESULT_OPTIONS}
    return {
        "model": {file.name: _digest(file) for file in files},
        "options": {**options, "auto_id": auto_id},
        "sampling": json.loads(json.dumps(dataclasses.asdict(defaults))),  # tuples become lists, as they read back
    }


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= SMALL_FILE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(END_BYTES))
            file.seek(-END_BYTES, os.SEEK_END)
            digest.update(file.read())
    return f"{size} bytes, {digest.hexdigest()}"


def save_fingerprint(path: Path, fingerprint: Fingerprint) -> None:
    """Write it to a file that is there completely or not at all."""
    write_json(path, fingerprint)


def check_fingerprint(path: Path, fingerprint: Fingerprint, output: Path) -> None:
    """Refuse to go on with an output that was made otherwise.

    Raises
    ------
    ConfigError
        Listing what differs.
    """
    way_out = "use the same, name another output, or replace this one (--overwrite)"
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"the output {output} exists, and {path.name}, which says how it was made, is missing; name another "
            "output, or replace this one (--overwrite)"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, which says how the output was made, cannot be read: {error}; {way_out}") from None
    if differences := _differences(saved, fingerprint):
        raise ConfigError(f"the output {output} was made otherwise: {'; '.join(differences)}. To go on, {way_out}")


def _differences(saved: Any, current: Fingerprint) -> list[str]:
    if not isinstance(saved, dict):
        saved = {}
    found = []
    for part, values in current.items():
        before = saved.get(part)
        before = before if isinstance(before, dict) else {}
        for name in sorted({*before, *values}):
            if before.get(name) != values.get(name):
                found.append(_difference(part, name, before.get(name), values.get(name)))
    return found


def _difference(part: str, name: str, before: Any, now: Any) -> str:
    if part == "model":
        state = "is new" if before is None else "is gone" if now is None else "has changed"
        return f"the model's {name} {state}"
    return f"{name} was {before!r}, now it is {now!r}"
