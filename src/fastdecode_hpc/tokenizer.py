"""Text to token ids and back: prompts, chat messages, and stop strings in the output.

The only place where transformers' tokenizers are used; nothing here knows of models or devices.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fastdecode_hpc.bounded import run_bounded
from fastdecode_hpc.config import ConfigError, naming, show
from fastdecode_hpc.files import read_json_object

_MAX_CONTINUATION_BYTES: Final = 3
_TEMPLATE_S: Final = 10.0
_TEMPLATE_BYTES: Final = 512 << 20
_MAX_CHAT_CHARS: Final = 64 << 20  # as of an input line
_MAX_ERROR_CHARS: Final = 500
_METASPACE: Final = "\u2581"  # how SentencePiece writes a space


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE (GPT-2) writes bytes: printable ones as they are, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_alphabet()


class PromptError(ValueError):
    """A prompt cannot be turned into tokens; `code` is the error record's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Tokenizer:
    """A model's tokenizer.

    Parameters
    ----------
    backend
        A tokenizer of the transformers library.
    eos_token_ids : tuple of int
        Tokens that end a generation.

    Attributes
    ----------
    eos_token_ids : tuple of int
        Tokens that end a generation.
    vocab_size : int
        Ids run from 0 to below this; the model's own may be larger (padding).
    continuation_ids : frozenset of int
        Tokens that stand for one byte inside a UTF-8 character.
    """

    def __init__(self, backend: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        vocab = backend.get_vocab()
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(vocab.values()) + 1
        self.continuation_ids = _continuation_ids(vocab)
        self._silent_ids = _silent_ids(backend)
        self._backend = backend
        self._rust = getattr(backend, "backend_tokenizer", None)
        self._bos = _added_bos(backend)
        self._is_byte_level = "ByteLevel" in str(getattr(self._rust, "decoder", None))

    @property
    def bos_token_id(self) -> int | None:
        """The token that is put before a text; None where there is none."""
        return self._bos

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a model folder or of a ``.gguf`` file, from local files only.

        Raises
        ------
        ConfigError
            When there is none, or one that cannot be built.
        """
        path = Path(path)
        if not path.exists():
            raise ConfigError(f"the model {path} is neither a folder nor a file")
        with naming(path):
            try:
                return cls._load_gguf(path) if path.is_file() else cls._load_folder(path)
            except BaseException as error:  # the libraries raise whatever the file at fault led to
                if isinstance(error, ConfigError) or not _is_failure(error):
                    raise
                raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error

    @classmethod
    def _load_gguf(cls, path: Path) -> Tokenizer:
        from transformers import PreTrainedTokenizerFast

        from fastdecode_hpc.gguf_header import read_gguf_header
        from fastdecode_hpc.gguf_tokenizer import build_gguf_tokenizer

        built = build_gguf_tokenizer(read_gguf_header(path).metadata)
        backend = PreTrainedTokenizerFast(
            tokenizer_object=built.backend,
            chat_template=built.chat_template,
            clean_up_tokenization_spaces=False,
            **built.named_tokens,
        )
        return cls(backend, built.eos_token_ids)

    @classmethod
    def _load_folder(cls, path: Path) -> Tokenizer:
        backend = _load_pretrained(path)
        return cls(backend, _folder_eos_token_ids(path, backend))

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of plain text, after one BOS where the tokenizer adds it.

        Text that spells a special token becomes that token.

        Raises
        ------
        PromptError
            When the text cannot be tokenized or gives no token.
        """
        return self._tokenize(text, add_special_tokens=True)

    def encode_messages(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a chat, written by the model's template and open for the assistant's answer.

        Raises
        ------
        PromptError
            When there is no template or it refuses the messages (with its own words), and as for `encode_prompt`.
        """
        # The template itself writes the special tokens.
        return self._tokenize(self.apply_template(messages), add_special_tokens=False)

    def apply_template(self, messages: list[dict[str, Any]]) -> str:
        """Return a chat as the text that the model reads.

        Notes
        -----
        A template is a program that came with the model. It runs in jinja's sandbox, which keeps it from everything
        but the messages, for 10 s and in 512 MiB at most. Powers (``**``) are refused, because one of huge numbers can
        neither be interrupted nor needs memory. What is not bounded is a product of numbers of millions of digits.
        """
        if not self._backend.chat_template:
            raise PromptError("no_chat_template", "the model has no chat template; give a prompt instead of messages")
        try:
            return run_bounded(lambda: self._render(messages), seconds=_TEMPLATE_S, memory_bytes=_TEMPLATE_BYTES)
        except MemoryError:
            words = f"it needs more than {_TEMPLATE_BYTES >> 20} MiB of memory"
        except Exception as error:  # a template may raise anything
            words = str(error)[:_MAX_ERROR_CHARS] or type(error).__name__
        raise PromptError("chat_template", f"the chat template refused the messages: {words}")

    def _render(self, messages: list[dict[str, Any]]) -> str:
        _check_template(self._backend.chat_template)
        text = str(self._backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if len(text) > _MAX_CHAT_CHARS:
            raise ValueError(f"they became {len(text)} characters; at most {_MAX_CHAT_CHARS} can be read")
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        if self._rust is not None:  # the same text without the checks that the wrapper makes for each call
            return str(self._rust.decode(list(ids), skip_special_tokens=True))
        return str(self._backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def token_bytes(self, token: int) -> bytes:
        """Bytes of text that a token stands for; a character may be spread over several tokens.

        Special tokens stand for their name; an id that is no token for nothing.
        """
        name = self._backend.convert_ids_to_tokens(token) if token < self.vocab_size else None
        if name is None:
            return b""
        if token in self._silent_ids:
            return str(name).encode("utf-8", "replace")
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        if self._is_byte_level and all(character in _BYTE_OF_CHARACTER for character in name):
            return bytes(_BYTE_OF_CHARACTER[character] for character in name)
        return str(name).replace(_METASPACE, " ").encode("utf-8", "replace")

    def is_silent(self, token: int) -> bool:
        """Whether a token is left out of text."""
        return token in self._silent_ids or token >= self.vocab_size

    def stream(self, stop: tuple[str, ...] = ()) -> TextStream:
        """Start the text of one sequence, which ends before the first of the `stop` strings."""
        return TextStream(self, stop)

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
            ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except UnicodeEncodeError as error:
            message = f"the prompt holds half of a surrogate pair at character {error.start}, which is no character"
            raise PromptError("unencodable_prompt", message) from None
        except BaseException as error:  # a tokenizer without a token for unknown text, for one
            if not _is_failure(error):
                raise
            raise PromptError("unencodable_prompt", f"the tokenizer cannot encode the prompt: {error}") from None
        if self._bos is not None:
            ids = _with_single_bos(ids, self._bos)
        if not ids:
            raise PromptError("empty_prompt", "the prompt has no tokens; there is nothing to continue")
        return ids


class TextStream:
    """The text of one sequence as it grows, watched for stop strings.

    Notes
    -----
    A push decodes only the newest tokens, as many as a stop string could span: a token of text is at least one byte.
    What they show is a suspicion, because they may start inside a character; it is then checked in the whole text.
    So the cost of a token depends on the length of the stop strings and not on that of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        longest = max((len(text.encode("utf-8", "surrogatepass")) for text in stop), default=0)
        self._window = longest + 1  # some decoders strip a space from the start of what they are given
        self._newest: deque[int] = deque(maxlen=self._window + _MAX_CONTINUATION_BYTES)  # tokens of text only
        self._ids: list[int] = []
        self._text: str | None = None  # the final text, once a stop string was found

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self._text is not None

    @property
    def text(self) -> str:
        """The text so far, cut before the first stop string."""
        return self._tokenizer.decode(self._ids) if self._text is None else self._text

    def push(self, token: int) -> bool:
        """Add a token; return True when the text holds a complete stop string (later tokens are ignored)."""
        if self.is_stopped:
            return True
        self._ids.append(token)
        if self._stop and not self._tokenizer.is_silent(token):
            self._newest.append(token)
            if self._find_stop(self._decode_newest()) is not None:
                self._cut()
        return self.is_stopped

    def _decode_newest(self) -> str:
        ids = list(self._newest)
        start = max(0, len(ids) - self._window)
        # Bytes as tokens are decoded as a run, and all of it is lost where it starts inside a character.
        while start > 0 and ids[start] in self._tokenizer.continuation_ids:
            start -= 1
        return self._tokenizer.decode(ids[start:])

    def _cut(self) -> None:
        text = self._tokenizer.decode(self._ids)
        end = self._find_stop(text)
        if end is not None:
            self._text = text[:end]

    def _find_stop(self, text: str) -> int | None:
        """Where the first stop string starts."""
        return min((start for stop in self._stop if (start := text.find(stop)) >= 0), default=None)


def _is_failure(error: BaseException) -> bool:
    """Whether a library failed; a panic of the tokenizers library, which is written in Rust, is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _check_template(template: Any) -> None:
    """Refuse what no bound holds for."""
    for source in template.values() if isinstance(template, dict) else (template,):
        if _has_power(source):
            raise ValueError("it has a power (**), which is not supported")


@lru_cache(maxsize=8)
def _has_power(source: str) -> bool:
    import jinja2

    before = ""
    for _, kind, text in jinja2.Environment().lex(source):
        if (kind, text) == ("operator", "**") and before not in ("(", ","):  # there it unpacks a mapping
            return True
        if kind != "whitespace":
            before = text
    return False


def _load_pretrained(path: Path) -> Any:
    # AutoTokenizer rebuilds some tokenizers from their class and loses what tokenizer.json says (how SmolLM2 splits
    # digits); it also imports torch. So it only converts the formats from before tokenizer.json.
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _folder_eos_token_ids(path: Path, backend: Any) -> tuple[int, ...]:
    """The ids that end a generation, by the tokenizer and by the model's generation settings."""
    ids = [backend.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            value = read_json_object(path / name).get("eos_token_id")
            listed = value if isinstance(value, list) else [value]
            if not all(token is None or (type(token) is int and token >= 0) for token in listed):
                raise ConfigError(
                    f"{path / name} has eos_token_id {show(value)}; it must be a token id or a list of them"
                )
            ids += listed
            break
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _added_bos(backend: Any) -> int | None:
    """The BOS that the tokenizer puts before a text, or None."""
    bos = backend.bos_token_id
    return bos if bos is not None and backend.encode("a")[:1] == [bos] else None


def _with_single_bos(ids: list[int], bos: int) -> list[int]:
    """Drop what a text that itself starts with BOS has too many of."""
    num_leading = next((place for place, token in enumerate(ids) if token != bos), len(ids))
    return ids[max(0, num_leading - 1) :]


def _silent_ids(backend: Any) -> frozenset[int]:
    """Tokens that decoding leaves out."""
    added = backend.added_tokens_decoder.items()
    return frozenset(backend.all_special_ids) | {index for index, token in added if token.special}


def _continuation_ids(vocab: dict[str, int]) -> frozenset[int]:
    """Tokens that stand for a byte inside a UTF-8 character, in vocabularies that have bytes as tokens."""
    names = (f"<0x{byte:02X}>" for byte in range(0x80, 0xC0))
    return frozenset(vocab[name] for name in names if name in vocab)
