"""What is imported where, beyond what import-linter can see."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fastdecode_hpc

PACKAGE = Path(fastdecode_hpc.__file__).parent
ROOT = Path(__file__).parents[2]


def run_time_nodes(tree: ast.AST):
    """All nodes but those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from run_time_nodes(node)


def importers_of(name: str) -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in run_time_nodes(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                continue
            if any(imported == name or imported.startswith(f"{name}.") for imported in names):
                found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_each_heavy_dependency_has_one_home() -> None:
    assert importers_of("fastdecode_hpc._kernels") == {
        "isa.py",
        "r_part/attention.py",
        "s_part/row_kernels.py",
        "s_part/prompt_attention.py",
    }
    assert importers_of("mpi4py") == {"transport/mpi.py"}
    assert all(path.startswith("report/") for path in importers_of("h5py"))
    assert importers_of("matplotlib") == {"plot_style.py"}
    assert importers_of("transformers") == {"tokenizer.py", "s_part/transformers_model.py"}
    assert importers_of("greenlet") == {"s_part/suspended.py"}
    assert all(path.startswith("s_part/") for path in importers_of("torch") - {"bench/peers_torch.py"})
    assert importers_of("xllamacpp") == {"bench/peers_llamacpp.py"}


def modules_after(code: str) -> set[str]:
    code += "; import json, sys; print(json.dumps(sorted(name.split('.')[0] for name in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_an_r_worker_loads_no_torch() -> None:
    loaded = modules_after(
        "import fastdecode_hpc.engine, fastdecode_hpc.r_part.worker, fastdecode_hpc.transport.mpi_r_end"
    )
    assert "mpi4py" in loaded
    assert not loaded & {"torch", "transformers", "h5py", "gguf", "safetensors"}


def test_the_command_line_loads_nothing_heavy() -> None:
    loaded = modules_after("from fastdecode_hpc.cli import build_parser; build_parser()")
    assert not loaded & {"torch", "mpi4py", "numpy", "h5py", "transformers", "tqdm"}


def test_the_kernel_benchmark_loads_neither_torch_nor_mpi() -> None:
    loaded = modules_after("import fastdecode_hpc.bench.kernel_session")
    assert "numpy" in loaded
    assert not loaded & {"torch", "mpi4py", "h5py", "transformers", "xllamacpp"}


def test_every_module_is_named_in_the_architecture_page() -> None:
    page = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if path.name not in ("__init__.py", "__main__.py"):
            assert f"`{name}`" in page, f"docs/architecture.md does not name {name}"


@pytest.mark.parametrize("program", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.name)
def test_what_a_benchmark_imports_of_the_program_is_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastdecode_hpc"):
            if node.module == "fastdecode_hpc.bench.peers_llamacpp":
                continue  # needs a package that is in a peer's environment only
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
