"""The C++ check of the kernels (kernel_check.cpp): under sanitizers, and on processors that this machine is not."""

import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdecode_hpc.isa import available_isas

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "cython" / "kernels"
GCC = shutil.which("g++")
CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
IS_X86 = "x86" in platform.machine()
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
QUICK = "-Og"  # compiles the kernels in a fifth of the time of -O3
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
SIMDE = f"{AVX2} -Wno-psabi -I{Path(__file__).with_name('simde')}"  # AVX-512 computed with AVX2

pytestmark = pytest.mark.skipif(not GCC, reason="needs g++")
needs_cross = pytest.mark.skipif(
    not (CROSS and QEMU and shutil.which("cmake")),
    reason="needs cmake, aarch64-linux-gnu-g++ and qemu-aarch64 (g++-aarch64-linux-gnu, qemu-user)",
)


def compile_program(folder, flags, **sources):
    """The program kernel_check from these sources, each with flags of its own."""

    def compile_one(source):
        command = [GCC, "-std=c++17", "-ffp-contract=off", *flags.split(), *sources[source].split()]
        subprocess.run([*command, "-c", SOURCES / f"{source}.cpp", "-o", folder / f"{source}.o"], check=True)
        return folder / f"{source}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([GCC, *flags.split(), *objects, "-o", folder / "kernel_check"], check=True)
    return folder / "kernel_check"


def builds(folder, program, flags):
    (folder / "probe.cpp").write_text(program)
    command = [GCC, *flags.split(), folder / "probe.cpp", "-o", folder / "probe"]
    return subprocess.run(command, capture_output=True).returncode == 0


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


def check(isas, *command):
    """All cases hold, for each of these instruction sets."""
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases hold" in done.stdout
    assert all(f" {isa}" in done.stdout for isa in isas)


@pytest.fixture(scope="module")
def sanitised(tmp_path_factory):
    """The program, and the instruction sets that it runs: this machine's, and AVX-512 elsewhere if SIMDe is there."""
    folder = tmp_path_factory.mktemp("sanitised")
    if not builds(folder, "int main() {}", SANITIZERS):
        pytest.skip("needs a g++ with sanitizers")
    isas, dispatch, sources = ["scalar"], "", {"kernel_check": "", "attention_scalar": ""}
    if not IS_X86:
        isas, dispatch, sources = ["scalar", "neon"], "-DFD_HAVE_NEON", {**sources, "attention_neon": ""}
    elif "avx2" in available_isas():
        isas, dispatch, sources = ["scalar", "avx2"], "-DFD_HAVE_AVX2", {**sources, "attention_avx2": AVX2}
        if "avx512" in available_isas():
            isas.append("avx512")
            dispatch += " -DFD_HAVE_AVX512"
            sources["attention_avx512"] = AVX512
            if "avx512bf16" in available_isas():
                isas.append("avx512bf16")
                dispatch += " -DFD_HAVE_AVX512BF16"
                sources["attention_avx512bf16"] = f"{AVX512} -mavx512bf16"
        elif builds(folder, "#include <immintrin.h>\nint main() {}", SIMDE):
            isas.append("avx512")
            dispatch += " -DFD_HAVE_AVX512 -D__builtin_cpu_supports(feature)=true"
            sources["attention_avx512"] = SIMDE
    return compile_program(folder, f"{QUICK} {SANITIZERS}", dispatch=dispatch, **sources), isas


def test_sanitizers_find_nothing(sanitised):
    program, isas = sanitised
    check(isas, program, "40")


@pytest.mark.slow
def test_sanitizers_find_nothing_in_many_cases(sanitised):
    program, isas = sanitised
    check(isas, program, "120s", "1000")


def test_avx512_is_among_them(sanitised):
    if IS_X86 and "avx512" not in sanitised[1]:
        pytest.skip("needs SIMDe (libsimde-dev) on a processor with AVX2")


def build_for_aarch64(folder, *options):
    """The program as CMake builds it."""
    compilers = [f"-DCMAKE_CXX_COMPILER={CROSS}", f"-DCMAKE_C_COMPILER={CROSS.removesuffix('g++')}gcc"]
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static"]
    options = ["-DFD_PYTHON=OFF", "-DFD_KERNEL_CHECK=ON", *compilers, *target, *options]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True, capture_output=True)
    return folder / "cython" / "kernel_check"


@needs_cross
def test_neon_in_emulation(tmp_path):
    program = build_for_aarch64(tmp_path, "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={QUICK}")
    check(["scalar", "neon"], QEMU, program, "30")


@needs_cross
@pytest.mark.slow
def test_neon_as_it_is_released_in_emulation(tmp_path):
    check(["scalar", "neon"], QEMU, build_for_aarch64(tmp_path), "120s", "1000")


def test_a_wrong_kernel_is_found_and_its_case_can_be_run_alone(tmp_path):
    wrong = compile_program(tmp_path, QUICK, kernel_check="", dispatch="", attention_scalar="-Dlogf=log2f")
    found = run(wrong, "50", "7")
    assert found.returncode == 1
    seed = found.stdout.split(":")[0].removeprefix("seed ")
    assert re.search(r": scalar: row \d, query head 0, lse: .* instead of .*, allowed", found.stdout)
    assert "head_dim" in found.stdout.splitlines()[1]
    assert run(wrong, "1", seed).stdout == found.stdout
    for bad in (["none"], ["0"], ["-3"], ["1", "2", "3"], [""]):
        assert run(wrong, *bad).returncode == 2
