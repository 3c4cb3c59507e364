"""Building and loading the C++ kernels: once per version of sources and flags, and plain torch where that fails."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi.cpp

from sglang_oasis.ops import native


@pytest.fixture(autouse=True)
def nothing_loaded_nor_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_attempted", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "SGLANG_OASIS_CPU_KERNELS", "SGLANG_OASIS_CPU_CFLAGS"):
        monkeypatch.delenv(name, raising=False)


class Compiler:
    """In the place of tvm_ffi's: remembers its calls, and fails while `error` is set."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def __call__(self, name: str, *, build_directory: str, **arguments: Any) -> str:
        self.calls.append(arguments)
        library = Path(build_directory) / f"{name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        if self.error is not None:
            raise self.error
        library.write_text(str(len(self.calls)))
        return str(library)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(tvm_ffi.cpp, "build", made)
    return made


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings that something is missing."""
    records = [record for record in caplog.records if record.name == native.__name__]
    assert all(record.levelno == logging.WARNING for record in records)
    return [record.getMessage() for record in records if not record.getMessage().startswith("Building")]


def test_without_a_compiler_one_warning_says_so_and_plain_torch_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = str(tmp_path / "no-such-compiler")
    monkeypatch.setenv("CXX", missing)
    assert native.load() is None
    assert native.kernels() is None
    assert complaints(caplog) == [
        "The CPU kernels cannot be used, plain torch does it, much slower: "
        f"there is no C++ compiler ({missing}); install g++, or set CXX to one."
    ]
    assert native.load() is None
    assert len(complaints(caplog)) == 1


def test_sources_that_do_not_compile_leave_a_warning_and_a_cache_that_is_tried_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "true")  # there is a compiler
    compiler.error = RuntimeError("ninja exited with status 1\nerror: it is Tuesday")
    assert native.load() is None
    assert len(complaints(caplog)) == 1
    assert "error: it is Tuesday" in complaints(caplog)[0]
    compiler.error = None
    assert native.build().exists()


def test_the_environment_can_leave_the_kernels_out(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_OASIS_CPU_KERNELS", "0")
    assert native.load() is None
    assert not compiler.calls
    assert complaints(caplog) == [
        "SGLANG_OASIS_CPU_KERNELS is 0: plain torch does the work of the CPU kernels, much slower."
    ]


def test_a_library_is_built_once(compiler: Compiler) -> None:
    first = native.build()
    assert native.build() == first
    assert len(compiler.calls) == 1
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == []


def test_other_sources_flags_or_compilers_make_another_library(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "cpu"
    shutil.copytree(native.source_folder(), sources)
    monkeypatch.setattr(native, "source_folder", lambda: sources)
    libraries = [native.build()]
    header = sources / "args.h"
    header.write_text(header.read_text() + "\n")
    libraries.append(native.build())
    monkeypatch.setenv("SGLANG_OASIS_CPU_CFLAGS", "-fsanitize=thread -O1")
    libraries.append(native.build())
    monkeypatch.setenv("CXX", "clang++")
    libraries.append(native.build())
    assert len({*libraries}) == len(compiler.calls) == len(libraries)
    assert compiler.calls[0]["extra_cflags"] == list(native.CFLAGS)
    assert compiler.calls[2]["extra_cflags"] == [*native.CFLAGS, "-fsanitize=thread", "-O1"]
    assert compiler.calls[2]["extra_ldflags"] == ["-fsanitize=thread", "-O1"]
    monkeypatch.delenv("CXX")
    assert native.build() == libraries[2]
    assert len(compiler.calls) == len(libraries)


def test_every_source_is_compiled(compiler: Compiler) -> None:
    native.build()
    compiled = {Path(file).name for file in compiler.calls[0]["cpp_files"]}
    assert compiled == {file.name for file in native.source_folder().glob("*.cpp")}
    assert {"bindings.cpp", "dispatch.cpp", "kernels_baseline.cpp"} <= compiled
