"""What the fields of one input line mean: from a JSON object to a `Request`.

Two kinds of lines: the program's own (``prompt`` or ``messages``, settings beside them) and OpenAI batch lines
(``custom_id``, ``method``, ``url``, ``body``). A field that would change the result is either used or refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from fastdecode_hpc.sequence import Request, SamplingParams

MAX_TOKEN_ID: Final = 2**31 - 1

_LENGTH_NAMES = ("max_new_tokens", "max_tokens", "max_completion_tokens")
_PLAIN_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "logprobs")
_SETTINGS = (*_LENGTH_NAMES, *_PLAIN_SETTINGS, "stop", "ignore_eos", "return_token_ids")
OWN_FIELDS: Final = ("prompt", "messages", "custom_id", "id", *_SETTINGS)
BATCH_FIELDS: Final = ("custom_id", "method", "url", "body")

_ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}

# Body fields that say nothing about the text to generate.
_LABELS = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                     "parallel_tool_calls", "stream_options"})  # fmt: skip
# Body fields that would change the text, with the values that leave it as it is (null always does).
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
    "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip

_MESSAGE_FIELDS = ("role", "content", "name", "reasoning_content")
# Message fields that replies of chat services carry, mostly empty.
_EMPTY_MESSAGE_FIELDS = ("tool_calls", "function_call", "tool_call_id", "refusal", "audio", "annotations")


class FieldError(ValueError):
    """A field cannot be used; `code` is the error record's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def find_custom_id(obj: dict[str, Any]) -> str | None:
    """The line's id where it has a usable one, whatever else is wrong with the line."""
    value = obj.get("custom_id", obj.get("id"))
    return value if isinstance(value, str) and value else None


def build_request(obj: dict[str, Any], index: int, line: int, defaults: SamplingParams) -> Request:
    """Turn one input object into a `Request`.

    Raises
    ------
    FieldError
        Naming the field, its value and what is possible.
    """
    is_batch_line = any(name in obj for name in ("body", "url", "method"))
    content = _open_batch_line(obj) if is_batch_line else obj
    if not is_batch_line:
        _check_known("field", obj, OWN_FIELDS)
    _check_custom_id(obj, required=is_batch_line)
    prompt, messages = _read_input(content)
    return Request(
        index=index,
        custom_id=find_custom_id(obj),
        prompt=prompt,
        messages=messages,
        params=_read_params(content, defaults),
        line=line,
        return_token_ids=_read_bool(content, "return_token_ids", False),
    )


# -- OpenAI batch lines


def _open_batch_line(obj: dict[str, Any]) -> dict[str, Any]:
    """Check the envelope and return the body's fields under the program's own meaning."""
    _check_known("field of a batch line", obj, BATCH_FIELDS)
    body = obj.get("body")
    if not isinstance(body, dict):
        raise FieldError("invalid_field", f"body is {_show(body)}; it must be an object")
    if obj.get("method", "POST") != "POST":
        raise FieldError("invalid_field", f"method is {_show(obj['method'])}; it must be 'POST'")
    input_name = _read_endpoint(obj, body)
    is_chat = input_name == "messages"
    _check_body_fields(body, (input_name, *_SETTINGS, *(("top_logprobs",) if is_chat else ())))
    return _with_whole_logprobs(body) if is_chat else body


def _read_endpoint(obj: dict[str, Any], body: dict[str, Any]) -> str:
    """The name of the body's input field, by the line's url or, without one, by the body itself."""
    url = obj.get("url")
    if url is None:
        return "messages" if "messages" in body else "prompt"
    if not isinstance(url, str) or url not in _ENDPOINTS:
        raise FieldError("unsupported_field", f"url is {_show(url)}; it must be one of {', '.join(_ENDPOINTS)}")
    return _ENDPOINTS[url]


def _check_body_fields(body: dict[str, Any], used: tuple[str, ...]) -> None:
    """Refuse what would change the result and is not implemented; let pass what would not."""
    _check_known("field of body", body, (*used, *sorted(_LABELS), *_NEUTRAL_VALUES))
    for name, neutral in _NEUTRAL_VALUES.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, known) for known in neutral):
            choices = " or ".join(repr(known) for known in (*neutral, None)).replace("None", "null")
            message = f"{name} is {_show(value)}, which is not supported; leave it out or set it to {choices}"
            raise FieldError("unsupported_field", message)


def _is_same(value: Any, known: Any) -> bool:
    # In Python True == 1, but a flag in the place of a number is a mistake.
    return bool(value == known) and isinstance(value, bool) == isinstance(known, bool)


def _with_whole_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """Chat bodies split `logprobs` in a flag and a number; join them."""
    wanted = _read_bool(body, "logprobs", False)
    top = body.get("top_logprobs")
    if top and not wanted:
        raise FieldError("invalid_field", f"top_logprobs is {_show(top)}; it needs logprobs to be true")
    settings = {name: value for name, value in body.items() if name not in ("logprobs", "top_logprobs")}
    return {**settings, "logprobs": 0 if top is None else top} if wanted else settings


# -- ids and input


def _check_custom_id(obj: dict[str, Any], *, required: bool) -> None:
    if obj.get("custom_id") is not None and obj.get("id") is not None:
        raise FieldError("invalid_field", "the line has both custom_id and id; give one")
    value = obj.get("custom_id", obj.get("id"))
    if value is None and required:
        raise FieldError("missing_field", "custom_id is missing; a batch line needs one")
    if value is not None and (not isinstance(value, str) or not value):
        raise FieldError("invalid_field", f"custom_id is {_show(value)}; it must be a non-empty string")


def _read_input(content: dict[str, Any]) -> tuple[str | list[int] | None, list[dict[str, Any]] | None]:
    prompt, messages = content.get("prompt"), content.get("messages")
    if prompt is not None and messages is not None:
        raise FieldError("invalid_field", "the line has both prompt and messages; give one")
    if messages is not None:
        return None, _read_messages(messages)
    if prompt is None:
        raise FieldError("missing_field", "the line has no prompt and no messages; give one")
    return _read_prompt(prompt), None


def _read_prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise FieldError("invalid_field", f"prompt is {_show(prompt)}; it must be a string or a list of token ids")
    if not prompt:
        raise FieldError("empty_prompt", "prompt is an empty list; there is no token to continue")
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            message = f"prompt[{position}] is {_show(token)}; a list as prompt must hold token ids"
            raise FieldError("invalid_field", message)
    return prompt


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise FieldError("invalid_field", f"messages is {_show(messages)}; it must be a list of objects")
    if not messages:
        raise FieldError("empty_prompt", "messages is an empty list; there is nothing to continue")
    return [_read_message(f"messages[{position}]", message) for position, message in enumerate(messages)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise FieldError("invalid_field", f"{where} is {_show(message)}; it must be an object with role and content")
    for name in _EMPTY_MESSAGE_FIELDS:
        if message.get(name):
            raise FieldError("unsupported_field", f"{where}.{name} is not supported; leave it out")
    _check_known(f"field of {where}", message, (*_MESSAGE_FIELDS, *_EMPTY_MESSAGE_FIELDS))
    kept = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    for name in ("role", "name", "reasoning_content"):
        value = kept.get(name, "" if name == "role" else "-")
        if not isinstance(value, str) or (name == "role" and not value):
            raise FieldError("invalid_field", f"{where}.{name} is {_show(message.get(name))}; it must be a string")
    return {**kept, "content": _read_content(f"{where}.content", message.get("content"))}


def _read_content(where: str, content: Any) -> str:
    """A message's text; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError("invalid_field", f"{where} is {_show(content)}; it must be a string or a list of text parts")
    return "".join(_read_part(f"{where}[{position}]", part) for position, part in enumerate(content))


def _read_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise FieldError(
            "unsupported_field", f"{where} is of type {_show(kind)}; only parts of type 'text' can be used"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise FieldError("invalid_field", f"{where}.text is {_show(text)}; it must be a string")
    return text


# -- sampling settings


def _read_params(content: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    length_name, length = _read_length(content)
    given = {name: content[name] for name in _PLAIN_SETTINGS if content.get(name) is not None}
    if length is not None:
        given["max_new_tokens"] = length
    if content.get("stop") is not None:
        given["stop"] = _read_stop(content["stop"])
    if content.get("ignore_eos") is not None:
        given["ignore_eos"] = _read_bool(content, "ignore_eos", False)
    try:
        return dataclasses.replace(defaults, **given) if given else defaults
    except ValueError as error:
        raise FieldError("invalid_field", str(error).replace("max_new_tokens", length_name, 1)) from None


def _read_length(content: dict[str, Any]) -> tuple[str, Any]:
    """The output limit and the name it was given under; all names of one line must agree."""
    given = [(name, content[name]) for name in _LENGTH_NAMES if content.get(name) is not None]
    if not given:
        return "max_new_tokens", None
    if any(not _is_same(value, given[0][1]) for _, value in given):
        listed = ", ".join(f"{name} is {_show(value)}" for name, value in given)
        raise FieldError("invalid_field", f"{listed}; these are names of one setting, give one")
    return given[0]


def _read_stop(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, list):
        raise FieldError("invalid_field", f"stop is {_show(stop)}; it must be a string or a list of strings")
    return tuple(stop)


def _read_bool(content: dict[str, Any], name: str, default: bool) -> bool:
    value = content.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise FieldError("invalid_field", f"{name} is {_show(value)}; it must be true or false")
    return value


# -- helpers


def _check_known(what: str, obj: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in obj if name not in known]
    if unknown:
        names = ", ".join(_show(name) for name in unknown[:5])
        raise FieldError("unknown_field", f"unknown {what}: {names}; known are {', '.join(known)}")


def _show(value: Any) -> str:
    """A value as part of a message: short, as JSON would spell the simple ones."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
