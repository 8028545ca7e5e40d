"""Building a tokenizer from a GGUF file's metadata, which describes it in llama.cpp's terms.

Only what is known to give the same ids as llama.cpp is built; anything else is refused by name, because a wrong
pre-tokenizer makes a model quietly worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fastdecode_hpc.config import ConfigError, show
from fastdecode_hpc.gguf_header import GGUFMetadata

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types
_MAX_PIECE_CHARS = 1000  # all ways to cut a piece are tried
_STRING, _FLAG, _ID = "a string", "true or false", "a token id"
_STRINGS, _NUMBERS = "a list of strings", "a list of numbers"
_KINDS = {
    "tokenizer.chat_template": _STRING,
    "tokenizer.ggml.model": _STRING,
    "tokenizer.ggml.pre": _STRING,
    "tokenizer.ggml.tokens": _STRINGS,
    "tokenizer.ggml.merges": _STRINGS,
    "tokenizer.ggml.scores": _NUMBERS,
    "tokenizer.ggml.token_type": _NUMBERS,
    "tokenizer.ggml.add_bos_token": _FLAG,
    "tokenizer.ggml.add_space_prefix": _FLAG,
} | {f"tokenizer.ggml.{role}_token_id": _ID for role in ("bos", "eos", "unknown", "eot", "eom")}
_ADVICE = "give a folder with config.json, safetensors and tokenizer.json instead"

# Control tokens that end a generation whatever the metadata names as end of sequence.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>",
               "<end_of_turn>", "<｜end▁of▁sentence｜>")  # fmt: skip

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut before the merges are applied."""

    patterns: tuple[str, ...]  # each cuts the pieces that the one before left
    ignore_merges: bool = False  # a piece that is a token stays whole
    adds_bos: bool = False  # unless the file says otherwise


_DIGITS_ALONE = _Splitting((r"\p{N}", _GPT2_SPLIT))
_GPT2 = _Splitting((_GPT2_SPLIT,))
_LLAMA3 = _Splitting((_LLAMA3_SPLIT,), ignore_merges=True, adds_bos=True)
_QWEN2 = _Splitting((_QWEN2_SPLIT,))
_SPLITTINGS = {
    "smollm": _DIGITS_ALONE,
    "starcoder": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "command-r": _DIGITS_ALONE,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "dbrx": _Splitting((_LLAMA3_SPLIT,)),
    "gpt-4o": _Splitting((_GPT4O_SPLIT,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Splitting((_TEKKEN_SPLIT,), ignore_merges=True, adds_bos=True),
    "default": _Splitting(_DEFAULT_SPLITS),
}


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """A tokenizer and the roles of its tokens."""

    backend: Tokenizer
    named_tokens: dict[str, str]  # bos_token, eos_token, unk_token: those the file has
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def build_gguf_tokenizer(metadata: GGUFMetadata) -> GGUFTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises
    ------
    ConfigError
        When the file has no tokenizer, or one of a kind that is not known here.
    """
    _check_types(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS or not metadata.get("tokenizer.ggml.tokens"):
        raise ConfigError(f"the GGUF file's tokenizer is {kind!r}, known are {', '.join(_BUILDERS)}; {_ADVICE}")
    backend, roles, adds_bos = _BUILDERS[kind](metadata)
    _add_special_tokens(backend, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {f"{role}_token": tokens[index] for role, index in roles.items() if 0 <= index < len(tokens)}
    if "bos_token" in named and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        backend.post_processor = _bos_first(named["bos_token"], roles["bos"])
    return GGUFTokenizer(backend, named, _eos_token_ids(metadata, roles), metadata.get("tokenizer.chat_template"))


def _check_types(metadata: GGUFMetadata) -> None:
    """Raise unless what the file says of its tokenizer is of the kind it must be."""
    for key, kind in _KINDS.items():
        value = metadata.get(key)
        if value is not None and not _is_of(kind, value):
            raise ConfigError(f"the GGUF file has {key} {show(value)}; it must be {kind}; {_ADVICE}")


def _is_of(kind: str, value: Any) -> bool:
    if kind in (_STRINGS, _NUMBERS):
        items = str if kind == _STRINGS else (int, float)
        return isinstance(value, list) and all(isinstance(item, items) for item in value)
    return type(value) is {_STRING: str, _FLAG: bool, _ID: int}[kind]


_Built = tuple[Tokenizer, dict[str, int], bool]  # tokenizer, ids of bos, eos, unk; whether BOS is added by default


def _build_byte_level(metadata: GGUFMetadata) -> _Built:
    """The ``gpt2`` kind: merges over bytes, after splitting by patterns."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITTINGS:
        known = ", ".join(_SPLITTINGS)
        raise ConfigError(
            f"the GGUF file's pre-tokenizer (tokenizer.ggml.pre) is {name!r}, known are {known}; {_ADVICE}"
        )
    splitting = _SPLITTINGS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    backend = Tokenizer(BPE(vocab=_vocab(metadata), merges=merges, ignore_merges=splitting.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, _roles(metadata, {}), splitting.adds_bos


def _build_sentencepiece(metadata: GGUFMetadata) -> _Built:
    """The ``llama`` kind: pieces with scores, spaces written as ``▁``, unknown characters as bytes."""
    roles = _roles(metadata, {"bos": 1, "eos": 2, "unk": 0})
    tokens = metadata["tokenizer.ggml.tokens"]
    if not 0 <= roles["unk"] < len(tokens):
        raise ConfigError(f"the GGUF file's unknown token is {roles['unk']} of {len(tokens)} tokens; {_ADVICE}")
    unk_token = tokens[roles["unk"]]
    model = BPE(
        vocab=_vocab(metadata), merges=_implied_merges(metadata), unk_token=unk_token, fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        parts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(parts)
    return backend, roles, True


_BUILDERS: dict[str, Callable[[GGUFMetadata], _Built]] = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}


def _vocab(metadata: GGUFMetadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _implied_merges(metadata: GGUFMetadata) -> list[tuple[str, str]]:
    """The merges behind SentencePiece's scores: best piece first, each from every pair that gives it."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ConfigError(f"the GGUF file's tokenizer has {len(tokens)} tokens and no score for each; {_ADVICE}")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"the GGUF file has {len(tokens)} tokens and the types of {len(types)}; {_ADVICE}")
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    best_first = sorted(normal, key=lambda token: -normal[token])
    return [pair for piece in best_first for pair in _pairs(piece, normal)]


def _pairs(piece: str, pieces: dict[str, float]) -> Iterator[tuple[str, str]]:
    if len(piece) > _MAX_PIECE_CHARS:
        raise ConfigError(
            f"the GGUF file's tokenizer has a piece of {len(piece)} characters, {show(piece)}; at most "
            f"{_MAX_PIECE_CHARS} are possible; {_ADVICE}"
        )
    for cut in range(1, len(piece)):
        left, right = piece[:cut], piece[cut:]
        if left in pieces and right in pieces:
            yield left, right


def _roles(metadata: GGUFMetadata, defaults: dict[str, int]) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown"}
    found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(role)) for role, key in keys.items()}
    return {role: index for role, index in found.items() if index is not None}


def _add_special_tokens(backend: Tokenizer, metadata: GGUFMetadata) -> None:
    """Let text that spells a control or user-defined token become that one token."""
    typed = list(zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False))
    control = [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind == _CONTROL]
    user_defined = [AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(user_defined)


def _bos_first(token: str, token_id: int) -> processors.TemplateProcessing:
    # The template is given as a list: a token may hold the characters that a written template is split at.
    return processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, token_id)]
    )


def _eos_token_ids(metadata: GGUFMetadata, roles: dict[str, int]) -> tuple[int, ...]:
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    typed = zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False)
    spelled = [index for index, (token, kind) in enumerate(typed) if kind == _CONTROL and token in _END_TOKENS]
    ids = [roles.get("eos"), *named, *spelled]
    return tuple(dict.fromkeys(index for index in ids if index is not None))
