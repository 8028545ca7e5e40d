"""Where the tensors of a file lie: each inside it, none over another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fastdecode_hpc.config import ConfigError


class Place(NamedTuple):
    """Bytes of one tensor, from the start of its file."""

    begin: int
    end: int
    name: str


def check_places(path: Path, places: Iterable[Place]) -> None:
    """Refuse a file that is cut short or whose tensors share bytes.

    Without shared bytes a checkpoint takes memory in proportion to its files, whatever their headers claim.

    Raises
    ------
    ConfigError
        Naming the tensor at fault.
    """
    file_bytes = path.stat().st_size
    before = Place(0, 0, "")
    for place in sorted(places):
        if place.end > file_bytes:
            raise ConfigError(
                f"{path} has {file_bytes} bytes, but tensor {place.name} ends at {place.end}; "
                "it is incomplete, copy it again"
            )
        if place.begin < before.end:
            raise ConfigError(
                f"the tensors {before.name} and {place.name} in {path} overlap at byte {place.begin}; "
                "it is damaged, copy it again"
            )
        before = place
