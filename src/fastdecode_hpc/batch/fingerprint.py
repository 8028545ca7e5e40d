"""What records depend on beside their own lines: the model's files and the options that change results.

It stands in a file beside the output, so that a later run goes on with that output only if it would write the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fastdecode_hpc.config import ConfigError, RunConfig, differences, option_defaults
from fastdecode_hpc.files import write_json
from fastdecode_hpc.sequence import SamplingParams

# Options that change what a request is answered. Others, such as ranks or batch size, may differ when a run goes on.
RESULT_OPTIONS: Final = ("load_format", "s_part", "trust_remote_code", "num_layers", "dtype", "weight_dtype",
                         "wire_dtype", "kv_dtype", "max_context_len", "overlong", "merge_system", "seed")  # fmt: skip
SMALL_FILE_BYTES: Final = 64 << 20  # read whole; of larger ones both ends, where headers and last tensors are
END_BYTES: Final = 1 << 20
_MODEL_FILES: Final = (".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja")
_CODE: Final = ".py"  # counts where it is run

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
    suffixes = (*_MODEL_FILES, _CODE) if run.trust_remote_code else _MODEL_FILES
    files = [model] if model.is_file() else sorted(file for file in model.iterdir() if file.suffix in suffixes)
    if run.load_format == "dummy":
        files = [file for file in files if file.name == "config.json"]
    options = {name: getattr(run, name) for name in RESULT_OPTIONS}
    return {
        "model": {file.name: _digest(file) for file in files},
        "options": {**options, "auto_id": auto_id},
        "sampling": _as_saved(defaults),
    }


def _as_saved(sampling: SamplingParams) -> dict[str, Any]:
    """As it reads back: tuples become lists."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(sampling)))
    return values


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
    lacking = [part for part in fingerprint if not isinstance(saved, dict) or not isinstance(saved.get(part), dict)]
    if lacking:
        raise ConfigError(f"{path}, which says how the output was made, lacks {', '.join(lacking)}; {way_out}")
    if found := _differences(saved, fingerprint):
        raise ConfigError(f"the output {output} was made otherwise: {'; '.join(found)}. To go on, {way_out}")


def _differences(saved: Fingerprint, current: Fingerprint) -> list[str]:
    return [
        *_changed_files(saved["model"], current["model"], counts_code=current["options"]["trust_remote_code"]),
        *differences(saved["options"], current["options"], {**option_defaults(), "auto_id": False}),
        *differences(saved["sampling"], current["sampling"], _as_saved(SamplingParams())),
    ]


def _changed_files(saved: dict[str, Any], current: dict[str, Any], *, counts_code: bool) -> Iterator[str]:
    """Earlier builds kept digests of code that was not run, too."""
    for name in sorted({*saved, *current}):
        if name.endswith(_CODE) and not counts_code:
            continue
        before, now = saved.get(name), current.get(name)
        if before != now:
            yield f"the model's {name} {'is new' if before is None else 'is gone' if now is None else 'has changed'}"
