"""`fastdecode bench kernel` refuses what it can't do before it measures anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fastdecode_hpc.bench import kernel_session
from fastdecode_hpc.cli import run_command
from fastdecode_hpc.config import ConfigError
from fastdecode_hpc.files import check_writable, write_json

LLAMA = ["--compare", "llamacpp"]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch) -> None:
    def refuse(settings):
        raise AssertionError("measuring began")

    monkeypatch.setattr(kernel_session, "KernelSession", refuse)


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--cases", "fp16-mha,nonsense"], "there is no case 'nonsense'; there are fp16-mha"),
        (["--cases", "fp16-mha", "--batch", "4"], "--cases and a shape of your own (--batch) contradict each other"),
        (["--num-heads", "6", "--num-kv-heads", "4"], "6 heads and 4 KV heads"),
        (["--kv-dtype", "fp7"], "kv_dtype is 'fp7'"),
        (["--rounds", "4"], "rounds is 4; it must be a whole number of at least 5"),
        (["--threads", "0"], "threads is 0; it must be a whole number of at least 1"),
        (["--seed", "-1"], "seed is -1"),
        (["--compare", "torch,numpy"], "--compare has 'numpy'; it takes torch and llamacpp"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at; make it first"),
        (["--json", "/"], "is a folder; name a file"),
    ],
)
def test_what_cannot_be_done_is_refused_with_code_2(flags: list[str], message: str, capsys) -> None:
    assert run_command(["bench", "kernel", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "is_installed,flags,message",
    [
        (False, [], "needs the package xllamacpp: pip install xllamacpp"),
        (True, ["--model", "/some/folder"], "--model is '/some/folder'; llama.cpp reads .gguf files"),
        (True, ["--compare-batch", "0"], "compare-batch is 0"),
        (True, ["--compare-context", "50"], "--compare-context is 50; 7 rounds decode 72 tokens"),
    ],
)
def test_a_comparison_with_llamacpp_needs_its_package_and_a_gguf_file(
    is_installed: bool, flags: list[str], message: str, capsys, monkeypatch
) -> None:
    find_spec = importlib.util.find_spec
    found = {"xllamacpp": is_installed or None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: found.get(name, False) or find_spec(name))
    assert run_command(["bench", "kernel", *LLAMA, *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_instruction_set_of_another_processor_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr("fastdecode_hpc.isa.available_isas", lambda: ("scalar",))
    assert run_command(["bench", "kernel", "--isa", "avx2"]) == 2
    assert "instruction set 'avx2' is not available; here are: scalar" in capsys.readouterr().err


def test_json_files_appear_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    check_writable(path)
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert path.read_text() == '{\n  "a": 2\n}\n'
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        check_writable(tmp_path)
