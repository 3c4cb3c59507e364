"""Functions import only what is slow or absent elsewhere; import-linter checks everything else about imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang_oasis

PACKAGE = Path(sglang_oasis.__file__).parent
OPTIONAL = {"sglang", "flashinfer", "tvm_ffi", "prometheus_client", "fastapi", "matplotlib", "rich"}
"""Packages that are absent from some machines, or that must not be loaded before SGLang does."""
OURS = {
    ("plugin.py", "seams"): "a process without our flags loads no hooks",
    ("plugin.py", "serving"): "nor the CPU platform",
    ("seams/activation.py", "seams"): "they are loaded when a server asks for our backends",
    ("seams/speculation.py", "serving"): "SGLang's speculative workers are loaded with it",
    ("serving/cpu_platform/cpu.py", "serving"): "the same",
    ("serving/engines.py", "kernels"): "it loads Triton, which a CPU need not have",
}
HEAVY = {"reference_model.py"}
"""A command that answers at once when there is nothing to do."""


def imported_by_functions(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom):
                    yield inner.module or ""
                elif isinstance(inner, ast.Import):
                    yield from (alias.name for alias in inner.names)


def test_a_function_imports_only_what_is_slow_or_absent_elsewhere() -> None:
    used = set()
    for file in PACKAGE.rglob("*.py"):
        name = str(file.relative_to(PACKAGE))
        for module in imported_by_functions(file):
            root, *below = module.split(".")
            if root == sglang_oasis.__name__:
                used.add((name, below[0]))
            elif name not in HEAVY:
                assert root in OPTIONAL, f"{name} imports {module} in a function"
    assert used == set(OURS)
