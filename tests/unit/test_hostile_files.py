"""Files that lie: each is refused by name, whatever it claims, and never takes more than its size is worth."""

from __future__ import annotations

import json
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

from targets import REQUESTS, TARGETS, run_target

import tiny_files as tiny
from fastdecode_hpc.batch.requests import RequestError, read_requests
from fastdecode_hpc.bounded import run_bounded
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.gguf_header import read_gguf_header
from fastdecode_hpc.gguf_tokenizer import build_gguf_tokenizer
from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.s_part.gguf_file import GGUFFile
from fastdecode_hpc.s_part.weights import load_weights, read_model_config
from fastdecode_hpc.sequence import SamplingParams
from tiny_files import ARRAY, BOOL, F32, STRING, U32, U64

HUGE = (2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
MIB = 1 << 20


def bounded(work: Any) -> Any:
    """What `work` returns; it may take on 256 MiB, far from what these files claim, and must not hang."""
    return run_bounded(work, seconds=30, memory_bytes=256 * MIB)


def load(path: Path) -> Any:
    """Everything that is made of a model's files, but the tokenizer."""
    return bounded(lambda: load_weights(path, read_model_config(path), dtype=torch.float32, device=torch.device("cpu")))


def refuse(path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        load(path)
    assert str(path) in str(raised.value)


@pytest.fixture(autouse=True, scope="module")
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the libraries take their memory before it is bounded; also: these files are good."""
    path = tmp_path_factory.mktemp("warm") / "model.gguf"
    path.write_bytes(tiny.gguf_file())
    load(path)
    build_gguf_tokenizer(read_gguf_header(path).metadata)
    load(write_folder(tmp_path_factory.mktemp("warm")))


def write_folder(folder: Path, *, config: bytes | None = None, weights: bytes | None = None) -> Path:
    (folder / "config.json").write_bytes(tiny.config_file() if config is None else config)
    (folder / "model.safetensors").write_bytes(tiny.safetensors_file() if weights is None else weights)
    return folder


# -- GGUF


def with_metadata(**changes: Any) -> bytes:
    return tiny.gguf_file(tiny.gguf_metadata(**changes))


def with_tensor(place: int, name: str | bytes, shape: Any, offset: int | None = None, kind: int = 0) -> bytes:
    """The tiny model with another description of one of its tensors."""
    tensors = tiny.gguf_tensors()
    own = sum(tiny.size_of(shape) for *_, shape in tiny.TENSORS[:place])
    tensors[place] = tiny.gguf_tensor(name, shape, own if offset is None else offset, kind)
    return tiny.gguf_file(tensors=tensors)


def array_of(kind: int, count: int) -> bytes:
    """A key with an array that claims a length, and holds nothing."""
    return tiny.gguf_string("x") + struct.pack("<IIQ", ARRAY, kind, count)


GGUF_CASES: list[tuple[bytes, str]] = [
    (b"", "cannot mmap an empty file"),
    (b"GGUF", "damaged or cut-off"),
    (tiny.gguf_file(extra=tiny.gguf_string("deep") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10**5,
                    num_pairs=19), "damaged or cut-off"),
    (tiny.gguf_file(extra=array_of(77, 2**60), num_pairs=19), "unknown GGUF type 77"),
    *((tiny.gguf_file(extra=array_of(kind, count), num_pairs=19), "damaged or cut-off|unknown GGUF type 17")
      for kind in (0, 4, 6, 7, 8, 9, 12) for count in HUGE),
    *((tiny.gguf_file(num_pairs=count), "damaged or cut-off|unknown GGUF type|twice") for count in HUGE),
    *((tiny.gguf_file(num_tensors=count), "damaged or cut-off|dimensions") for count in HUGE),
    *((tiny.gguf_file(extra=struct.pack("<Q", count), num_pairs=19), "damaged or cut-off") for count in HUGE),
    (tiny.gguf_file(extra=tiny.gguf_string(b"\xff\xfe") + struct.pack("<II", U32, 1), num_pairs=19), "damaged"),
    (tiny.gguf_file(extra=tiny.gguf_string("llama.block_count") + struct.pack("<II", U32, 1), num_pairs=19), "twice"),
    *((with_metadata(general__alignment=value), r"general\.alignment .* must be a power of 2")
      for value in ((U32, 0), (U32, 3), (U64, 2**40), (F32, 32.0), (STRING, "x"), (ARRAY, (U32, [32])), (BOOL, True))),
    (with_tensor(0, "token_embd.weight", ()), "0 dimensions"),
    (with_tensor(0, "token_embd.weight", (1, 1, 1, 16, 16)), "5 dimensions"),
    (with_tensor(0, "token_embd.weight", [1] * 50_000), "50000 dimensions"),
    (with_tensor(0, "token_embd.weight", (0, 16)), "no dimension may be 0"),
    (with_tensor(0, "token_embd.weight", (16, 0)), "no dimension may be 0"),
    (with_tensor(0, "token_embd.weight", (2**63, 2**63)), "incomplete, copy it again"),
    (with_tensor(0, "token_embd.weight", (2**64 - 1,) * 4), "incomplete, copy it again"),
    (with_tensor(0, "token_embd.weight", (16, 16), 2**64 - 1), "incomplete, copy it again"),
    (with_tensor(0, "token_embd.weight", (16, 16), 2**40), "incomplete, copy it again"),
    (with_tensor(0, "token_embd.weight", (16, 16), 64), "overlap"),
    (with_tensor(0, "token_embd.weight", (16, 16), kind=4), "GGUF type 4, which can't be read"),
    (with_tensor(0, "token_embd.weight", (16, 16), kind=24), "GGUF type 24, which can't be read"),
    (with_tensor(0, "token_embd.weight", (16, 16), kind=2**32 - 1), "which can't be read"),
    (with_tensor(0, "token_embd.weight", (16, 17), kind=2), "not a multiple of its block"),
    (with_tensor(0, "blk.0.attn_q.weight", (16, 16), 0), "twice"),
    (with_tensor(11, "model.layers.0.self_attn.q_proj.weight", (16, 16)), "unknown tensors model.layers.0.self_attn"),
    (with_tensor(11, "a\0b\x1b[2J", (16, 16)), r"unknown tensors a\\x00b\\x1b\[2J"),
    (with_tensor(11, b"\xff", (16, 16)), "damaged or cut-off"),
    (with_tensor(11, "x" * 100_000, (16, 16)), "unknown tensors xxx"),
    (tiny.gguf_file(tensors=[]), "vocab_size is 0"),
    (tiny.gguf_file(tensors=[*tiny.gguf_tensors(), tiny.gguf_tensor("rope_freqs.weight", (2**20,), 9920)],
                    data_bytes=9920 + 4 * 2**20), r"rope_freqs.weight of shape \[1048576\]; it must be \[4\]"),
    (tiny.gguf_file(tensors=[*tiny.gguf_tensors(), tiny.gguf_tensor("rope_freqs.weight", (4,), 9920)], data_bytes=9936),
     "not the llama3 scaling"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), GGUF_CASES, ids=range(len(GGUF_CASES)))
def test_gguf_files_that_lie(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    refuse(path, words)


def test_every_value_of_a_gguf_file_may_be_wrong(tmp_path: Path) -> None:
    """Every key, missing or with a value of each type: a model or a refusal that names the file."""
    path = tmp_path / "model.gguf"
    values = [None, (STRING, ""), (STRING, "9" * 50), (U32, 0), (U32, 2**32 - 1), (U64, 2**64 - 1), (5, -1),
              (F32, float("nan")), (F32, float("inf")), (F32, -1.0), (BOOL, True), (ARRAY, (U32, [])),
              (ARRAY, (U32, [1, 2])), (ARRAY, (STRING, ["a"])), (ARRAY, (ARRAY, [(U32, [1])]))]  # fmt: skip
    keys = [*tiny.gguf_metadata(), "llama.attention.key_length", "llama.attention.value_length", "llama.vocab_size",
            "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear", "llama.expert_count",
            "llama.attention.sliding_window", "tokenizer.ggml.pre", "tokenizer.ggml.merges",
            "tokenizer.ggml.eot_token_id", "tokenizer.ggml.add_bos_token"]  # fmt: skip
    for key in keys:
        for value in values:
            path.write_bytes(with_metadata(**{key.replace(".", "__"): value}))
            for read in (read_model_config, lambda path: build_gguf_tokenizer(read_gguf_header(path).metadata)):
                try:
                    bounded(lambda read=read: read(path))
                except ConfigError as error:
                    assert str(path) in str(error) or "the GGUF file" in str(error)


def test_pieces_of_a_vocabulary_have_a_longest_one() -> None:
    """All ways to cut each piece are tried: a million characters would take hours."""
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a" * 10**6],
                "tokenizer.ggml.scores": [0.0] * 4, "tokenizer.ggml.token_type": [2, 3, 3, 1]}  # fmt: skip
    with pytest.raises(ConfigError, match="a piece of 1000000 characters"):
        bounded(lambda: build_gguf_tokenizer(metadata))


# -- safetensors


def described(**info: Any) -> bytes:
    whole = {"dtype": "F32", "shape": [16, 16], "data_offsets": [0, 1024], **info}
    return tiny.safetensors_file(tiny.safetensors_header(token_embd_weight=whole))


SAFETENSORS_CASES: list[tuple[bytes, str]] = [
    (b"", "not a whole safetensors file"),
    *((tiny.safetensors_file(header_bytes=count), "a header of .* bytes") for count in HUGE),
    (tiny.safetensors_file(header_bytes=10), "not a whole safetensors file"),
    (tiny.safetensors_file(b"[]"), "must hold an object"),
    (tiny.safetensors_file(b"null"), "must hold an object"),
    (tiny.safetensors_file(b"\xff\xfe{\0}\0"), "not a whole safetensors file"),
    (tiny.safetensors_file(b"[" * 10**5), "nested too deeply"),
    (tiny.safetensors_file(b'{"a": ' * 10**5), "nested too deeply"),
    (tiny.safetensors_file(b'{"a": {}, "a": {}}'), "'a' is given twice"),
    (tiny.safetensors_file(b'{"a": ' + b"9" * 5000 + b"}"), "not a whole safetensors file"),
    (tiny.safetensors_file({"a": None}), "tensor a .* described as None"),
    (tiny.safetensors_file({"a": []}), r"tensor a .* described as \[\]"),
    (tiny.safetensors_file({"a": {}}), "must have a dtype, a shape"),
    (tiny.safetensors_file({"a\0\x1b[2J": 1}), r"a\\x00\\x1b\[2J"),
    (described(dtype=None), "has type None"),
    (described(dtype=["F32"]), r"has type \['F32'\]"),
    (described(dtype="I32"), "has type I32"),
    (described(shape=None), "described as"),
    (described(shape="16"), "described as"),
    (described(shape=[16.0, 16]), "described as"),
    (described(shape=[True, 256]), "described as"),
    (described(shape=[-16, -16]), "described as"),
    (described(shape=[2**63, 2]), "described as"),
    (described(shape=[1] * 9), "described as"),
    (described(shape=[2**62] * 8), "which is not its shape"),
    (described(shape=[]), "which is not its shape"),
    (described(shape=[256]), r"wrongly shaped tensors model\.embed_tokens\.weight \[256\]"),
    (described(shape=[0, 16], data_offsets=[0, 0]), "wrongly shaped"),
    (described(data_offsets=None), "described as"),
    (described(data_offsets=[0]), "described as"),
    (described(data_offsets=[0, 1024, 1]), "described as"),
    (described(data_offsets=[-8, 1016]), "described as"),
    (described(data_offsets=[1024, 0]), "which is not its shape"),
    (described(data_offsets=[2**62, 2**62 + 1024]), "incomplete, copy it again"),
    (described(data_offsets=[64, 1088]), "overlap"),
    (described(shape=[2**40, 16], data_offsets=[0, 2**46]), "incomplete, copy it again"),
    (tiny.safetensors_file(data_bytes=9919), "incomplete, copy it again"),
    (tiny.safetensors_file({}), "lacks tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), SAFETENSORS_CASES, ids=range(len(SAFETENSORS_CASES)))
def test_safetensors_files_that_lie(tmp_path: Path, data: bytes, words: str) -> None:
    refuse(write_folder(tmp_path, weights=data), words)


def test_tensors_may_not_share_bytes(tmp_path: Path) -> None:
    """Else a file of any size could describe weights of any other."""
    info = {"dtype": "F32", "shape": [16, 16], "data_offsets": [0, 1024]}
    refuse(write_folder(tmp_path, weights=tiny.safetensors_file({f"t{i}": info for i in range(1000)})), "overlap")


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must hold an object"),
        (b"[" * 10**5, "nested too deeply"),
        (b"{}", "weight_map None"),
        (b'{"weight_map": []}', r"weight_map \[\]"),
        (b'{"weight_map": {}}', r"weight_map \{\}"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "'a' is given twice"),
        (tiny.index_file(x=1), "tensor x in 1"),
        (tiny.index_file(x=None), "tensor x in None"),
        (tiny.index_file(x=["a"]), r"tensor x in \['a'\]"),
        (tiny.index_file(x="../other/model.safetensors"), "must be a file in"),
        (tiny.index_file(x="sub/../../model.safetensors"), "must be a file in"),
        (tiny.index_file(x="/etc/passwd"), "must be a file in"),
        (tiny.index_file(x=""), "1 of 2 shards are missing"),
        (tiny.index_file(x="."), "1 of 2 shards are missing"),
        (tiny.index_file(x="a\0b"), r"shards are missing .*a\\x00b"),
        (tiny.index_file(x="\ud800"), r"shards are missing .*\\ud800"),
        (tiny.index_file(x="y" * 5000), "shards are missing"),
        (tiny.index_file(x="pytorch_model.bin"), "not a whole safetensors file"),
        (tiny.index_file(x="config.json"), "not a whole safetensors file"),
        (tiny.index_file(x="./model-00001-of-00001.safetensors"), "is in both"),
    ],
)
def test_indexes_that_lie(tmp_path: Path, index: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(tiny.config_file())
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(tiny.safetensors_file())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    refuse(tmp_path, words)


def test_shards_may_be_links(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub, where a folder of links stands beside the files."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1a2b").write_bytes(tiny.safetensors_file())
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_bytes(tiny.config_file())
    (folder / "model-00001-of-00001.safetensors").symlink_to("../blobs/1a2b")
    (folder / "model.safetensors.index.json").write_bytes(tiny.index_file())
    assert load(folder).embedding.shape == (16, 16)


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "config.json").write_bytes(tiny.config_file())
    data = pickle.dumps(_Evil(marker))
    pickle.loads(data)
    marker.unlink()  # so it would be seen
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    refuse(tmp_path, r"pytorch_model\.bin\) are not read: .* save_pretrained")
    (tmp_path / "model.safetensors").write_bytes(data)
    refuse(tmp_path, "not a whole safetensors file")
    assert not marker.exists()


def test_no_code_of_a_model_is_run(tmp_path: Path) -> None:
    from fastdecode_hpc.tokenizer import Tokenizer

    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    classes = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil")
    write_folder(tmp_path, config=tiny.config_file(auto_map={**classes, "AutoTokenizer": ["evil.Evil", "evil.Evil"]}))
    load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}})
    )
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
    assert not marker.exists()


# -- config.json

WRONG_VALUES = ["null", "true", "false", "0", "-1", "1.5", "1e999", "-Infinity", "NaN", "1" + "0" * 400, str(2**63),
                '""', '"9"', '"' + "x" * 5000 + '"', "[]", "[null]", "[1, 2]", "[[1]]", "{}", '{"a": {"b": 1}}',
                '{"rope_type": "linear", "factor": "x"}', '{"rope_type": "linear", "factor": -1}',
                '{"rope_type": "llama3", "factor": 1e999, "low_freq_factor": 1, "high_freq_factor": 4}',
                '{"rope_type": ["default"]}', '{"rope_theta": NaN}', '{"quant_method": []}', '"\\ud800"']  # fmt: skip
CONFIG_KEYS = [*tiny.CONFIG, "rope_parameters", "quantization_config", "partial_rotary_factor", "sliding_window"]


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_every_value_of_a_configuration_may_be_wrong(tmp_path: Path, family: str) -> None:
    for key in CONFIG_KEYS:
        for value in WRONG_VALUES:
            text = json.dumps({**tiny.CONFIG, "architectures": [family], key: "@"}).replace('"@"', value)
            (tmp_path / "config.json").write_text(text)
            try:
                model = bounded(lambda: read_model_config(tmp_path))
                assert isinstance(model, ModelConfig)
            except ConfigError as error:
                assert str(tmp_path / "config.json") in str(error)
                assert len(str(error)) < 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must hold an object"),
        (b'"x"', "must hold an object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[" * 10**6, "nested too deeply"),
        (b'{"vocab_size": 16, "vocab_size": 32}', "'vocab_size' is given twice"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (tiny.config_file(vocab_size=True), "vocab_size True; it must be a whole number"),
        (tiny.config_file(hidden_size="16"), "hidden_size '16'; it must be a whole number"),
        (tiny.config_file(num_hidden_layers=2**40), "num_layers is .*at most 4096"),
        (tiny.config_file(max_position_embeddings=2**40), "max_context_len is .*at most 16777216"),
        (tiny.config_file(rms_norm_eps=float("nan")), "rms_norm_eps nan; it must be a number"),
        (tiny.config_file(rope_theta=-1), "rope_theta is -1.0; it must be a number above 0"),
        (tiny.config_file(eos_token_id=["2"]), r"eos_token_id \['2'\]; it must be a token id"),
        (tiny.config_file(rope_scaling="linear"), "rope_scaling 'linear'; it must be an object"),
        (tiny.config_file(vocab_size=2**24, hidden_size=2**20, num_hidden_layers=4096), "lacks tensors|wrongly shaped"),
    ],
)
def test_configurations_that_lie(tmp_path: Path, text: bytes, words: str) -> None:
    """The last one describes 300 TB: the files' tensors are looked at before memory is taken."""
    refuse(write_folder(tmp_path, config=text), words)


def test_files_that_are_far_too_large_are_not_read(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with (tmp_path / "config.json").open("ab") as file:
        file.truncate(1 << 40)  # takes no space
    refuse(tmp_path, "larger than")
    (tmp_path / "config.json").write_bytes(tiny.config_file())
    with (tmp_path / "generation_config.json").open("wb") as file:
        file.truncate(1 << 40)
    refuse(tmp_path, "larger than")
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(tiny.gguf_file(extra=tiny.gguf_string("x") + struct.pack("<IIQ", ARRAY, 0, 2**38), num_pairs=19))
        file.truncate(1 << 40)
    refuse(path, "damaged or cut-off")


def test_files_that_may_not_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_open(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    write_folder(tmp_path)
    (tmp_path / "model.gguf").write_bytes(tiny.gguf_file())
    monkeypatch.setattr(Path, "open", refuse_to_open)
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError, match=r"cannot be read: .*Permission denied"):
            read_model_config(path)


def test_messages_are_short_and_cannot_control_a_terminal() -> None:
    text = str(ConfigError("\x1b[2J\x07\u202e" + "x" * 10**6 + "the way out"))
    assert len(text) < 5000 and text.endswith("the way out")
    assert text.startswith(r"\x1b[2J\x07\u202e")
    assert str(ConfigError("naïve 日本 ▁\n")) == "naïve 日本 ▁\n"


# -- random damage

POSITIONS = st.integers(0, 2**16)
HUGE_WORDS = st.sampled_from([struct.pack(code, value) for value in (0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
                              for code in ("<Q", "<I") if value < 2 ** (8 * struct.calcsize(code))])  # fmt: skip
JSON_WORDS = st.sampled_from(
    [b"null", b"NaN", b"-1", b"1e999", b"9" * 30, b'"x"', b"[]", b"{}", b"[[", b"{", b'"', b"\\ud800"]
)
PIECES = st.binary(max_size=4) | HUGE_WORDS | JSON_WORDS
EDITS = st.lists(st.tuples(POSITIONS, st.integers(0, 8), PIECES), max_size=4)


def damage(data: bytes, edits: list[tuple[int, int, bytes]], keep: int | None) -> bytes:
    """Replace some bytes at some places by others, then cut the end off."""
    for position, length, piece in edits:
        place = position % (len(data) + 1)
        data = data[:place] + piece + data[place + length :]
    return data if keep is None else data[: keep % (len(data) + 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None)
@given(edits=EDITS, keep=st.none() | POSITIONS)
@example(edits=[], keep=None)
def test_damaged_files_are_read_or_refused(name: str, folder: Path, edits: Any, keep: int | None) -> None:
    bounded(lambda: run_target(name, damage(TARGETS[name].seed, edits, keep), folder))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_of_the_header_of_a_gguf_file(folder: Path, data: Any) -> None:
    """As above, with all of it where the counts, lengths and types are."""
    seed = TARGETS["gguf"].seed
    position = st.integers(0, len(seed) - len(tiny.weights()) - 1)
    edits = data.draw(st.lists(st.tuples(position, st.sampled_from([0, 1, 4, 8]), PIECES), min_size=1, max_size=3))
    bounded(lambda: run_target("gguf", damage(seed, edits, None), folder))


@settings(max_examples=100, deadline=None)
@given(line=st.integers(0, REQUESTS.count(b"\n")), edits=EDITS)
def test_a_damaged_line_leaves_the_other_requests_as_they_are(folder: Path, line: int, edits: Any) -> None:
    path = folder / "lines.jsonl"
    path.write_bytes(REQUESTS)
    whole = list(read_requests(path, SamplingParams()))
    lines = REQUESTS.split(b"\n")
    lines[line] = damage(lines[line], edits, None).replace(b"\n", b" ") + b"!"  # never blank, never good
    path.write_bytes(b"\n".join(lines))
    items = list(read_requests(path, SamplingParams()))
    assert isinstance(items[line], RequestError)
    assert items[:line] + items[line + 1 :] == whole[:line] + whole[line + 1 :]


def test_gguf_tensors_are_known_after_damage(tmp_path: Path) -> None:
    """The oracle of the cases above: undamaged, all tensors are there and have their values."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.gguf_file())
    file = GGUFFile(path)
    assert {name: shape for name, _, shape in tiny.TENSORS} == file.shapes
    assert (file.read("output_norm.weight", 0, 1) == 0.5).all()
