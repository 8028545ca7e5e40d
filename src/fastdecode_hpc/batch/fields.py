"""What the fields of one input line mean: from a JSON object to a `Request`.

Two kinds of lines: the program's own (``prompt`` or ``messages``, settings beside them) and OpenAI batch lines
(``custom_id``, ``method``, ``url``, ``body``). A field that would change the result is either used or refused.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from fastdecode_hpc.sequence import Prompt, Request, SamplingParams

MAX_TOKEN_ID: Final = 2**31 - 1

_LENGTH_NAMES = ("max_new_tokens", "max_tokens", "max_completion_tokens")
_PLAIN_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                   "frequency_penalty", "n", "seed", "logprobs")  # fmt: skip
_SETTINGS = (*_LENGTH_NAMES, *_PLAIN_SETTINGS, "logit_bias", "stop", "ignore_eos", "return_token_ids")
OWN_FIELDS: Final = ("prompt", "messages", "custom_id", "id", *_SETTINGS)
BATCH_FIELDS: Final = ("custom_id", "method", "url", "body")

CHAT_ENDPOINT: Final = "/v1/chat/completions"
COMPLETIONS_ENDPOINT: Final = "/v1/completions"
ENDPOINTS: Final = {CHAT_ENDPOINT: "messages", COMPLETIONS_ENDPOINT: "prompt"}  # and the field with the input

MAX_PROMPTS: Final = 1024  # of one line

# Body fields that say nothing about the text to generate; but for the model's name they are noted as ignored.
_LABELS = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                     "parallel_tool_calls", "stream_options"})  # fmt: skip
# Body fields that would change the text, with the values that leave it as it is (null always does).
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",),
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


def is_batch_line(obj: dict[str, Any]) -> bool:
    """Whether an input object is, or is meant to be, an OpenAI batch line."""
    return any(name in obj for name in ("body", "url", "method"))


def build_request(obj: dict[str, Any], index: int, line: int, defaults: SamplingParams) -> Request:
    """Turn one input object into a `Request`.

    Raises
    ------
    FieldError
        Naming the field, its value and what is possible.
    """
    _check_custom_id(obj)
    if is_batch_line(obj):
        return _build_batch_request(obj, index, line, defaults)
    _check_known("field", obj, OWN_FIELDS)
    return _build(obj, obj, index, line, defaults)


def _build(
    obj: dict[str, Any], content: dict[str, Any], index: int, line: int, defaults: SamplingParams, **extra: Any
) -> Request:
    prompt, messages = _read_input(content)
    return Request(
        index=index,
        custom_id=find_custom_id(obj),
        prompt=prompt,
        messages=messages,
        params=_read_params(content, defaults),
        line=line,
        return_token_ids=_read_bool(content, "return_token_ids", False),
        **extra,
    )


# -- OpenAI batch lines


def _build_batch_request(obj: dict[str, Any], index: int, line: int, defaults: SamplingParams) -> Request:
    """Check the envelope and read the body's fields under the program's own meaning."""
    _check_known("field of a batch line", obj, BATCH_FIELDS)
    body = obj.get("body")
    if not isinstance(body, dict):
        raise FieldError("invalid_field", f"body is {_show(body)}; it must be an object")
    if obj.get("method", "POST") != "POST":
        raise FieldError("invalid_field", f"method is {_show(obj['method'])}; it must be 'POST'")
    endpoint = _read_endpoint(obj, body)
    is_chat = ENDPOINTS[endpoint] == "messages"
    _check_body_fields(body, (ENDPOINTS[endpoint], *_SETTINGS, *(("top_logprobs",) if is_chat else ())))
    ignored = [name for name in body if name in _LABELS and name != "model" and body[name] is not None]
    return _build(
        obj,
        _with_whole_logprobs(body) if is_chat else body,
        index,
        line,
        defaults,
        endpoint=endpoint,
        model=body["model"] if isinstance(body.get("model"), str) else None,
        notes=(f"ignored: {', '.join(ignored)}",) if ignored else (),
    )


def _read_endpoint(obj: dict[str, Any], body: dict[str, Any]) -> str:
    """The line's url or, without one, what the body itself looks like."""
    url = obj.get("url")
    if url is None:
        return CHAT_ENDPOINT if "messages" in body else COMPLETIONS_ENDPOINT
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise FieldError("unsupported_field", f"url is {_show(url)}; it must be one of {', '.join(ENDPOINTS)}")
    return url


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


def _check_custom_id(obj: dict[str, Any]) -> None:
    if obj.get("custom_id") is not None and obj.get("id") is not None:
        raise FieldError("invalid_field", "the line has both custom_id and id; give one")
    value = obj.get("custom_id", obj.get("id"))
    if value is not None and (not isinstance(value, str) or not value):
        raise FieldError("invalid_field", f"custom_id is {_show(value)}; it must be a non-empty string")


def _read_input(content: dict[str, Any]) -> tuple[Prompt | list[Prompt] | None, list[dict[str, Any]] | None]:
    prompt, messages = content.get("prompt"), content.get("messages")
    if prompt is not None and messages is not None:
        raise FieldError("invalid_field", "the line has both prompt and messages; give one")
    if messages is not None:
        return None, _read_messages(messages)
    if prompt is None:
        raise FieldError("missing_field", "the line has no prompt and no messages; give one")
    return _read_prompts(prompt), None


def _read_prompts(prompt: Any) -> Prompt | list[Prompt]:
    """A text, token ids, or a list of either."""
    if not isinstance(prompt, list) or not any(isinstance(item, str | list) for item in prompt):
        return _read_prompt("prompt", prompt)
    if len(prompt) > MAX_PROMPTS:
        raise FieldError("invalid_field", f"prompt is a list of {len(prompt)}; at most {MAX_PROMPTS} may share a line")
    return [_read_prompt(f"prompt[{position}]", item) for position, item in enumerate(prompt)]


def _read_prompt(where: str, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise FieldError(
            "invalid_field", f"{where} is {_show(prompt)}; it must be a string, a list of token ids or a list of these"
        )
    if not prompt:
        raise FieldError("empty_prompt", f"{where} is an empty list; there is no token to continue")
    for position, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            message = f"{where}[{position}] is {_show(token)}; a list as prompt must hold token ids"
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
    if content.get("logit_bias") is not None:
        given["logit_bias"] = _read_logit_bias(content["logit_bias"])
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


def _read_logit_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """Token ids stand as strings, as JSON has no other keys."""
    if not isinstance(bias, dict):
        raise FieldError(
            "invalid_field", f'logit_bias is {_show(bias)}; it must be an object such as {{"50256": -100}}'
        )
    for token in bias:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
            raise FieldError("invalid_field", f"logit_bias has the key {_show(token)}; keys must be token ids")
    return tuple((int(token), value) for token, value in bias.items())


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
