"""Chat templates that attack: each is that request's error, and reaches neither the host nor all of its memory."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from fastdecode_hpc import tokenizer as tokenizer_module
from fastdecode_hpc.bounded import run_bounded
from fastdecode_hpc.gguf_tokenizer import build_gguf_tokenizer
from fastdecode_hpc.tokenizer import PromptError, Tokenizer

DATA = Path(__file__).parents[1] / "data"
METADATA = json.loads((DATA / "gguf_tokenize.json").read_text(encoding="utf-8"))["sentencepiece_metadata"]
USER = [{"role": "user", "content": "hi"}]
MIB = 1 << 20


@pytest.fixture(scope="module")
def built() -> Any:
    return build_gguf_tokenizer(METADATA)


def render(built: Any, template: str, messages: list[dict[str, Any]] = USER) -> str:
    backend = PreTrainedTokenizerFast(tokenizer_object=built.backend, chat_template=template, **built.named_tokens)
    return Tokenizer(backend).apply_template(messages)


def refuse(built: Any, template: str, words: str | None = None) -> str:
    with pytest.raises(PromptError, match=words) as raised:
        render(built, template)
    assert raised.value.code == "chat_template"
    assert len(str(raised.value)) < 1000
    return str(raised.value)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    yield
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


ESCAPES = [
    "''.__class__.__mro__", "''.__class__.__base__.__subclasses__()", "''['__class__']", "''|attr('__class__')",
    "messages.__class__", "self.__init__.__globals__", "cycler.__init__.__globals__.os.popen('touch MARKER').read()",
    "lipsum.__globals__['os'].system('touch MARKER')", "namespace.__init__.__globals__", "raise_exception.__globals__",
    "raise_exception.__globals__['json'].codecs.open('MARKER', 'w')", "strftime_now.__code__",
    "(messages|map(attribute='__class__')|first).__mro__", "'{0.__class__.__mro__}'.format('')",
    "'{0.__class__}'.format_map({'0': ''})", "open('MARKER', 'w')", "__import__('os').system('touch MARKER')",
    "import_module('os')", "os.system('touch MARKER')", "messages.append({})", "messages[0].update(role='system')",
    "messages.clear()", "[].__class__.__base__", "dict.__class__", "loop", "self._TemplateReference__context",
]  # fmt: skip


@pytest.mark.parametrize("expression", ESCAPES)
def test_templates_reach_nothing_but_the_messages(
    built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    """An error, or text without anything in it; what is left undefined is written as nothing."""
    monkeypatch.chdir(tmp_path)
    messages = json.loads(json.dumps(USER))
    try:
        text = render(built, "{{ " + expression + " }}", messages)
    except PromptError as error:
        assert error.code == "chat_template"
    else:
        assert not any(word in text for word in ("class", "<function", "module", "0x")), text
    assert messages == USER
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("statement", ["include '/etc/passwd'", "import '/etc/passwd' as x", "extends '/etc/passwd'"])
def test_templates_read_no_files(built: Any, statement: str) -> None:
    refuse(built, "{% " + statement + " %}")


GREEDY = [
    "{{ 'a' * 10000000000 }}",
    "{{ 'a' * 1000000000 * 10 }}",
    "{{ [0] * 10000000000 }}",
    "{{ (['a' * 1000000] * 100000)|join }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'a'.center(10000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '1'.zfill(10000000000) }}",
    "{{ 'a\t'.expandtabs(2000000000) }}",
    "{{ 'a'|center(10000000000) }}",
    "{{ 'a'|indent(10000000000, true) }}",
    "{{ messages|batch(10000000000, 0)|list }}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1, 2]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}{{ n.x }}",
    "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
]  # fmt: skip


@pytest.mark.parametrize("template", GREEDY)
def test_memory_is_bounded(built: Any, template: str) -> None:
    refuse(built, template, r"it needs more than 512 MiB of memory|characters; at most|too large|too long")


def test_text_is_bounded(built: Any) -> None:
    refuse(built, "{% for i in range(70) %}{{ 'a' * 1000000 }}{% endfor %}", "70000000 characters; at most 67108864")


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=0) %}{% for i in range(99999) %}{% for j in range(99999) %}{% set n.x = j %}{% endfor %}"
    "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ lipsum(n=100000000) }}",
    "{% for a in range(99999) %}{{ (range(99999)|sum) and '' }}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_time_is_bounded(built: Any, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(tokenizer_module, "_TEMPLATE_S", 0.3)
    refuse(built, template, "it took more than 0.3 s|it needs more than")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ range(10**9) }}", "power"),
        ("{{ 9**9**9 }}", "power"),
        ("{{ messages[0]['content']|length ** 100000000 }}", "power"),
        ("{% set x = 9 %}{{ (x)\n  **\n  x }}", "power"),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", None),
        ("{{ " + "[" * 3000 + "]" * 3000 + " }}", None),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, None),
        ("{{ " + "not " * 100_000 + "1 }}", None),
        ("{{ raise_exception('a' * 10000000) }}", "aaaa"),
        ("{{ raise_exception(messages) }}", "role"),
        ("{% endfor %}", "endfor"),
        ("{{ '\ud800' }}{{ undefined.x }}", None),
    ],
)
def test_other_attacks_are_errors(built: Any, template: str, words: str | None) -> None:
    refuse(built, template, words)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ dict(**{'a': 1}) }}", "{'a': 1}"),
        ("{{ '**' }} ** {# 2 ** 2 #}", "** ** "),
        ("{{ ' ' * 3 }}{{ 2 * 3 }}", "   6"),
        ("{{ messages|tojson }}", '[{"role": "user", "content": "hi"}]'),
    ],
)
def test_what_templates_do_is_allowed(built: Any, template: str, text: str) -> None:
    assert render(built, template) == text


# -- the bounds themselves


def test_work_within_the_bounds_is_done() -> None:
    assert run_bounded(lambda: len(bytearray(64 * MIB)), seconds=10, memory_bytes=128 * MIB) == 64 * MIB


def test_errors_of_the_work_come_out() -> None:
    with pytest.raises(ZeroDivisionError):
        run_bounded(lambda: 1 / 0, seconds=10, memory_bytes=64 * MIB)


def test_memory_over_the_bound_is_refused() -> None:
    program = f"""
from fastdecode_hpc.bounded import run_bounded
try:
    run_bounded(lambda: bytearray({256 * MIB}), seconds=10, memory_bytes={128 * MIB})
except MemoryError:
    print("refused", len(bytearray({256 * MIB})))
"""  # in a process that holds nothing in reserve
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", str(256 * MIB)]


def test_an_interruption_that_is_swallowed_comes_again() -> None:
    swallowed = 0

    def work() -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                while True:
                    time.sleep(0.01)
            except TimeoutError:
                swallowed += 1
        while True:
            time.sleep(0.01)

    with pytest.raises(TimeoutError):
        run_bounded(work, seconds=0.05, memory_bytes=64 * MIB)
    assert swallowed == 2


def test_other_threads_are_bounded_in_memory_only() -> None:
    found: list[Any] = []

    def work() -> None:
        found.append(run_bounded(lambda: time.sleep(0.05) or "done", seconds=0.01, memory_bytes=64 * MIB))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["done"]
