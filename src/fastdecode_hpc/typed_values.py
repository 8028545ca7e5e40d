"""Values that a model's files give, each checked for its type when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastdecode_hpc.config import ConfigError, show

_LARGEST_NUMBER = 2**63 - 1


class TypedValues(Mapping[str, Any]):
    """A mapping of names to values of any type.

    Parameters
    ----------
    path : Path
        The file they stand in.
    values : mapping
        A value None counts as absent.
    what : str
        Put before names in messages.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], what: str = "") -> None:
        self.path, self._what = path, what
        self._values = {name: value for name, value in values.items() if value is not None}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def full_name(self, name: str) -> str:
        """A name as messages have it."""
        return f"{self._what}{name}"

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0; without a default it must be there."""
        value = self._get(name, default)
        if not _is_whole(value) or not 0 <= value <= _LARGEST_NUMBER:
            raise self._refuse(name, value, "a whole number of at least 0")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(name, default)
        if not (_is_whole(value) or isinstance(value, float)) or not abs(value) < float("inf"):
            raise self._refuse(name, value, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self._refuse(name, value, "a number") from None

    def flag(self, name: str) -> bool:
        """True or false; false where it is absent."""
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise self._refuse(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._refuse(name, value, "a string")
        return value

    def inner(self, name: str) -> TypedValues:
        """The values of an object; none where it is absent."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self._refuse(name, value, "an object")
        return TypedValues(self.path, value, f"{self._what}{name}.")

    def objects(self, name: str) -> list[TypedValues]:
        """The objects of a list; none where it is absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self._refuse(name, value, "a list of objects")
        return [TypedValues(self.path, item, f"{self._what}{name}[{place}].") for place, item in enumerate(value)]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; none where it is absent."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._refuse(name, value, "a list of strings")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self._get(name, None)
        if not isinstance(value, list):
            raise self._refuse(name, value, "a list of numbers")
        inner = TypedValues(self.path, {str(place): item for place, item in enumerate(value)}, f"{self._what}{name}.")
        return tuple(inner.number(str(place)) for place in range(len(value)))

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one or as a list of them; none where it is absent."""
        value = self._get(name, [])
        listed = value if isinstance(value, list) else [value]
        if not all(_is_whole(token) and 0 <= token <= _LARGEST_NUMBER for token in listed):
            raise self._refuse(name, value, "a token id or a list of them")
        return tuple(listed)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name, default)
        if value is None:
            raise ConfigError(f"{self.path} lacks {self._what}{name}")
        return value

    def _refuse(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.path} has {self._what}{name} {show(value)}; it must be {wanted}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
