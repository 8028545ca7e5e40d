"""Answers to OpenAI batch lines, in the form of that API's batch output and response objects."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from fastdecode_hpc.batch.fields import CHAT_ENDPOINT
from fastdecode_hpc.sequence import Choice, Request, TokenLogprob

LEAST_LOGPROB: Final = -9999.0  # stands for minus infinity in this API


class Responses:
    """Makes output lines of OpenAI's batch form.

    Parameters
    ----------
    model : str
        Name of the model, for lines that give none.
    token_bytes : callable or None
        Bytes of text that a token stands for; None where there is no tokenizer.
    """

    def __init__(self, model: str, token_bytes: Callable[[int], bytes] | None) -> None:
        self._model = model
        self._token_bytes = token_bytes

    def record(self, request: Request, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """The output line of one request: index, id, custom_id, response and error."""
        is_chat = request.endpoint == CHAT_ENDPOINT
        number = f"{request.index}-{request.content_hash}"
        output_tokens = sum(len(choice.token_ids) for choice in choices)
        answers = [self._choice(is_chat, place, choice) for place, choice in enumerate(choices)]
        if request.return_token_ids:
            answers = [
                {**answer, "token_ids": choice.token_ids} for answer, choice in zip(answers, choices, strict=True)
            ]
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model or self._model,
            "choices": answers,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": prompt_tokens + output_tokens,
            },
        }
        return {
            "index": request.index,
            "id": f"batch_req_{number}",
            "custom_id": request.custom_id,
            "response": {"status_code": 200, "request_id": number, "body": body},
            "error": None,
        }

    def _choice(self, is_chat: bool, place: int, choice: Choice) -> dict[str, Any]:
        return self._chat_choice(place, choice) if is_chat else self._text_choice(place, choice)

    def _chat_choice(self, place: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            logprobs = {"content": [self._chat_logprob(item) for item in choice.logprobs], "refusal": None}
        return {
            "index": place,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _chat_logprob(self, item: TokenLogprob) -> dict[str, Any]:
        top = [self._token_logprob(token, logprob) for token, logprob in item.top]
        return {**self._token_logprob(item.token, item.logprob), "top_logprobs": top}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        data = None if self._token_bytes is None else list(self._token_bytes(token))
        return {"token": self._text(token), "bytes": data, "logprob": _finite(logprob)}

    def _text_choice(self, place: int, choice: Choice) -> dict[str, Any]:
        logprobs = None if choice.logprobs is None else self._text_logprobs(choice.logprobs)
        return {"index": place, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _text_logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._text(item.token) for item in items]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(item.logprob) for item in items],
            "top_logprobs": [{self._text(token): _finite(value) for token, value in item.top} for item in items],
            "text_offset": [0, *itertools.accumulate(map(len, tokens))][: len(tokens)],
        }

    def _text(self, token: int) -> str:
        """The token's text; without a tokenizer its id, as vLLM writes it."""
        return f"token_id:{token}" if self._token_bytes is None else self._token_bytes(token).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return max(float(value), LEAST_LOGPROB) if not math.isnan(value) else LEAST_LOGPROB
