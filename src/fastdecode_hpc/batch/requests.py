"""Reading the input: one JSON object a line, each a `Request` or the reason why it is none.

No line can stop the run. Lines end at a newline byte only, so that other line separators may stand in a prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from fastdecode_hpc.batch.fields import FieldError, build_request, find_custom_id, is_batch_line
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.sequence import Request, SamplingParams

MAX_LINE_BYTES: Final = 64 * 2**20
MAX_MESSAGE_CHARS: Final = 1000

_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_COUNT_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class RequestError:
    """An input line that cannot be run; it becomes an error record."""

    index: int  # position among the non-blank lines of the input, from 0
    line: int  # line number in the file, from 1
    custom_id: str | None
    code: str
    message: str
    is_batch_line: bool = False  # of OpenAI's form
    content_hash: str = ""  # of the line


def read_requests(
    path: str | Path, defaults: SamplingParams, *, auto_id: bool = False
) -> Iterator[Request | RequestError]:
    """Yield one item for each non-blank line of a JSONL file.

    Parameters
    ----------
    path : str or Path
        The input file; ``-`` is the standard input.
    defaults : SamplingParams
        Settings of lines that do not bring their own.
    auto_id : bool
        Give lines without a `custom_id` one, and make repeated ones unique; by default a second use is the second
        line's error.

    Yields
    ------
    Request or RequestError
        In the order of the lines.

    Raises
    ------
    ConfigError
        When the file cannot be opened; nothing that stands in it raises.
    """
    ids = _Ids(auto_id)
    with _open_input(path) as file:
        for index, (line, data) in enumerate(_numbered_lines(file)):
            yield ids.check(_read_line(data, index, line, defaults))


def count_requests(path: str | Path) -> int | None:
    """Count the non-blank lines of the input, or return None for the standard input."""
    if str(path) == "-":
        return None
    with _open_input(path) as file:
        return sum(1 for _ in _numbered_lines(file))


@contextmanager
def _open_input(path: str | Path) -> Iterator[BinaryIO]:
    if str(path) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = Path(path).open("rb", buffering=_COUNT_BYTES)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"the input {path} cannot be read: {error.strerror}") from None
    with file:
        yield file


def _numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each non-blank line; one that is too long is cut after the limit."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if _is_too_long(data):
            _skip_rest_of_line(file)
        elif number == 1:
            data = data.removeprefix(_BOM)
        if data.strip():
            yield number, data


def _is_too_long(data: bytes) -> bool:
    return len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")


def _skip_rest_of_line(file: BinaryIO) -> None:
    while (data := file.readline(_COUNT_BYTES)) and not data.endswith(b"\n"):
        pass


def _read_line(data: bytes, index: int, line: int, defaults: SamplingParams) -> Request | RequestError:
    obj: dict[str, Any] = {}
    content_hash = hashlib.blake2b(data.strip(), digest_size=8).hexdigest()
    try:
        obj, problem = _parse_object(data)
        if problem is not None:
            raise problem
        request = build_request(obj, index, line, defaults)
        request.content_hash = content_hash
        return request
    except FieldError as error:
        code, message = error.code, str(error)
    except RecursionError:  # from the parser, or from showing a deeply nested value in a message
        code, message = "invalid_json", "the JSON is nested too deeply"
    return RequestError(
        index,
        line,
        _if_encodable(find_custom_id(obj)),
        code,
        _shorten(f"line {line}: {message}"),
        is_batch_line(obj),
        content_hash,
    )


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[: MAX_MESSAGE_CHARS - 3]}..."


def _parse_object(data: bytes) -> tuple[dict[str, Any], FieldError | None]:
    """Return the line's object and, where JSON's leniency hides one, a problem with it."""
    if _is_too_long(data):
        raise FieldError("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"byte 0x{data[error.start]:02x} at position {error.start} of the line is not UTF-8"
        raise FieldError("invalid_utf8", message) from None
    value, problem = _parse_json(text)
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
        raise FieldError("not_an_object", f"the line holds {kind}; it must hold a JSON object")
    if problem is None and _SURROGATE_ESCAPE.search(text):
        problem = _find_lone_surrogate(value)
    return value, problem


def _parse_json(text: str) -> tuple[Any, FieldError | None]:
    """Parse strictly: Python's parser takes NaN and lets the last of equal keys win."""
    problems: list[FieldError] = []

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        obj = dict(pairs)
        if len(obj) < len(pairs):
            problems.append(FieldError("duplicate_key", f"the key {_first_repeated(pairs)!r} is given twice"))
        return obj

    def note_constant(name: str) -> float:
        problems.append(FieldError("invalid_json", f"{name} is not a JSON number"))
        return 0.0

    try:
        value = json.loads(text, object_pairs_hook=build_object, parse_constant=note_constant)
    except json.JSONDecodeError as error:
        raise FieldError("invalid_json", f"not valid JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # a number with thousands of digits
        raise FieldError("invalid_json", f"not usable JSON: {error}") from None
    return value, problems[0] if problems else None


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    return key


def _find_lone_surrogate(obj: dict[str, Any]) -> FieldError | None:
    for name, value in obj.items():
        if not all(_is_encodable(text) for text in (name, *_strings_in(value))):
            shown = name.encode("utf-8", "backslashreplace").decode()
            message = f"{shown} holds half of a surrogate pair (\\ud800 to \\udfff alone), which is no character"
            return FieldError("lone_surrogate", message)
    return None


def _strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included, without recursion."""
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Iterable):
            pending.extend(item)
            if isinstance(item, dict):
                pending.extend(item.values())


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _if_encodable(custom_id: str | None) -> str | None:
    return custom_id if custom_id is not None and _is_encodable(custom_id) else None


class _Ids:
    """The ids used so far."""

    def __init__(self, auto_id: bool) -> None:
        self._auto_id = auto_id
        self._seen = _HashTable()

    def check(self, item: Request | RequestError) -> Request | RequestError:
        """The item; with an id of its own, or as an error where its id cannot be used."""
        if self._auto_id and isinstance(item, Request):
            self._make_unique(item)
        if item.custom_id is None:
            is_missing = isinstance(item, Request) and item.is_batch_line
            return (
                _refused(item, "missing_field", "custom_id is missing; a batch line needs one") if is_missing else item
            )
        if self._seen.add(item.custom_id):
            return item
        return _refused(item, "duplicate_custom_id", f"custom_id {item.custom_id!r} was used by an earlier line")

    def _make_unique(self, request: Request) -> None:
        """Ids from the line's index, which a resumed run finds again."""
        given = request.custom_id
        if given is not None and given not in self._seen:
            return
        request.custom_id = f"row-{request.index}" if given is None else f"{given}-{request.index}"
        while request.custom_id in self._seen:
            request.custom_id += "+"
        if given is not None:
            request.notes += (
                f"custom_id {given!r} was used by an earlier line; this one became {request.custom_id!r}",
            )


class _HashTable:
    """A set of texts as 64-bit hashes, with open addressing: at most 24 bytes a text, where a set of Python takes 100.

    Two of a million texts are taken for one with a probability of 1 in 40 million.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * 1024))  # 0: empty; their number is a power of two
        self._count = 0

    def __contains__(self, text: str) -> bool:
        return self._slots[self._find(_hash(text))] != 0

    def add(self, text: str) -> bool:
        """Add a text; whether it is new."""
        value = _hash(text)
        place = self._find(value)
        if self._slots[place]:
            return False
        self._slots[place] = value
        self._count += 1
        if 3 * self._count > 2 * len(self._slots):
            self._grow()
        return True

    def _find(self, value: int) -> int:
        """Where a value is, or belongs."""
        mask = len(self._slots) - 1
        place = value & mask
        while self._slots[place] not in (0, value):
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        values, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in filter(None, values):
            self._slots[self._find(value)] = value


def _hash(text: str) -> int:
    return hash(text) & 0xFFFFFFFFFFFFFFFF or 1


def _refused(item: Request | RequestError, code: str, message: str) -> RequestError:
    message = _shorten(f"line {item.line}: {message}; --auto-id gives such lines ids of their own")
    return RequestError(item.index, item.line, item.custom_id, code, message, item.is_batch_line, item.content_hash)
