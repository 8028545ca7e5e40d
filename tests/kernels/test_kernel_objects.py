"""The compiled objects: no instruction set leaks into another's file."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_isa_leak.sh"
COMPILER = shutil.which("g++")

needs_tools = pytest.mark.skipif(
    not (COMPILER and shutil.which("objdump") and shutil.which("cmake")), reason="needs g++, objdump and cmake"
)
only_x86 = pytest.mark.skipif("x86" not in platform.machine(), reason="x86 instructions")
pytestmark = needs_tools

PLAIN = "int plain(int x) { return x + 1; }"
WIDE = "void add(float* a) { for (int i = 0; i < 64; ++i) a[i] += 1.0f; }"
WEAK = """
template <class T> struct S { static int f(); };
template <class T> int S<T>::f() { return 1; }
int g() { return S<int>::f(); }
"""
EAGER = "extern int value(); int at_load = value();"


def compile_objects(folder, **sources):
    """Objects NAME.cpp.o from (source, flags)."""
    for name, (source, *flags) in sources.items():
        (folder / f"{name}.cpp").write_text(source)
        subprocess.run([COMPILER, "-c", *flags, folder / f"{name}.cpp", "-o", folder / f"{name}.cpp.o"], check=True)


def check(folder):
    return subprocess.run([SCRIPT, *folder], capture_output=True, text=True)


def test_no_leak_in_the_build():
    run = check([])
    assert run.returncode == 0, run.stderr
    assert "objects are clean" in run.stdout


def test_clean_objects_pass(tmp_path):
    compile_objects(tmp_path, dispatch=(PLAIN, "-O3"), attention_scalar=(WIDE, "-O3"))
    assert check([tmp_path]).returncode == 0


@only_x86
@pytest.mark.parametrize(
    "name,planted,message",
    [
        ("attention_scalar", (WIDE, "-O3", "-mavx2"), "attention_scalar.cpp.o has AVX instructions"),
        ("dispatch", (WIDE, "-O1", "-mavx"), "dispatch.cpp.o has AVX instructions"),
        ("attention_avx2", (WIDE, "-O3", "-mavx512f", "-mprefer-vector-width=512"), "has AVX-512 instructions"),
        ("attention_avx2", (WEAK, "-O0", "-mavx2"), "has weak symbols"),
        ("attention_avx2", (EAGER, "-mavx2"), "runs code when it is loaded"),
    ],
)
def test_planted_leaks_are_found(tmp_path, name, planted, message):
    compile_objects(tmp_path, **{"dispatch": (PLAIN,), "attention_scalar": (PLAIN,), name: planted})
    run = check([tmp_path])
    assert run.returncode == 1
    assert message in run.stderr


def test_missing_objects_are_no_success(tmp_path):
    run = check([tmp_path])
    assert run.returncode == 1
    assert "no object of dispatch" in run.stderr
