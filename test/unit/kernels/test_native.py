"""Building and loading the C++ kernels: once per version of sources and flags, and plain torch where that fails."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi.cpp

from sglang_oasis.kernels import compiled
from sglang_oasis.kernels.cpu import native


@pytest.fixture(autouse=True)
def nothing_loaded_nor_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_attempted", False)
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    for name in ("CXX", "SGLANG_OASIS_CPU_KERNELS", "SGLANG_OASIS_CPU_CFLAGS"):
        monkeypatch.delenv(name, raising=False)


class Compiler:
    """In the place of tvm_ffi's: remembers its calls, and fails while `error` is set."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.environment: dict[str, str] = {}

    def __call__(self, name: str, *, build_directory: str, **arguments: Any) -> str:
        self.calls.append(arguments)
        self.environment = dict(os.environ)
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
        "The CPU kernels cannot be used, so plain torch is used, which is much slower: "
        f"there is no C++ compiler ({missing}); install g++, or set CXX to one."
    ]
    assert native.load() is None
    assert len(complaints(caplog)) == 1


@pytest.fixture
def gcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of the compiler."""
    program = tmp_path / "gcc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return program


def test_what_does_not_compile_is_not_tried_again_in_every_process(
    compiler: Compiler, gcc: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.error = RuntimeError("ninja exited with status 1\nerror: it is Tuesday\nand more")
    for _ in range(2):
        native.unload()  # as if the process were another one
        assert native.load() is None
    assert len(compiler.calls) == 1
    said = complaints(caplog)
    cannot_be_used = "The CPU kernels cannot be used, so plain torch is used, which is much slower"
    assert said[0] == f"{cannot_be_used}: error: it is Tuesday."
    (failure,) = (compiled.places("kernels")[0]).glob("*/failed.json")
    assert said[1] == f"{cannot_be_used}: error: it is Tuesday (not tried again; delete {failure} to try again)."
    failure.unlink()
    compiler.error = None
    assert native.build().exists()


@pytest.mark.parametrize("change", ["compiler", "flags", "sources"])
def test_a_failure_is_forgotten_when_what_is_compiled_changes(
    compiler: Compiler, gcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    sources = tmp_path / "cpu"
    shutil.copytree(native.source_folder(), sources)
    monkeypatch.setattr(native, "source_folder", lambda: sources)
    compiler.error = RuntimeError("error: it is Tuesday")
    assert native.load() is None
    compiler.error = None
    if change == "compiler":
        gcc.write_text("#!/bin/sh\n# the next version\n")
    elif change == "flags":
        monkeypatch.setenv("SGLANG_OASIS_CPU_CFLAGS", "-O1")
    else:
        (sources / "args.h").write_text("")
    library = native.build()
    assert len(compiler.calls) == 2
    assert not (library.parent / "failed.json").exists()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("c++: fatal error: Killed signal terminated program cc1plus"),
        RuntimeError("/tmp/x.s: fatal error: error writing to file: No space left on device"),
        FileNotFoundError(2, "No such file or directory", "ninja"),
    ],
)
def test_what_the_machine_was_short_of_is_no_fault_of_the_sources(
    compiler: Compiler, gcc: Path, error: Exception
) -> None:
    compiler.error = error
    assert native.load() is None
    compiler.error = None
    assert native.build().exists()


def test_an_interrupted_build_leaves_nothing_behind(compiler: Compiler, gcc: Path) -> None:
    compiler.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        native.load()
    assert sorted(path.name for path in compiled.places("kernels")[0].glob("*/*")) == ["lock"]


def test_a_cached_library_needs_neither_a_compiler_nor_a_cache_that_can_be_written(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = native.build()

    def read_only(part: str, needs: int) -> Path:
        raise AssertionError("nothing is to be written")

    monkeypatch.setattr(compiled, "writable_folder", read_only)
    monkeypatch.setattr(compiled, "_find", lambda program: None)
    assert native.build() == built


def test_a_cache_that_cannot_be_written_is_replaced_for_kernels(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    built = native.build()
    assert built.is_relative_to(tmp_path / "tmp" / f"sglang-oasis-{os.getuid()}" / "kernels")
    assert native.build() == built
    assert len(compiler.calls) == 1


def test_a_build_takes_no_more_jobs_than_there_is_cpu_time_for(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(compiled, "usable_cpus", lambda: 3)
    native.build()
    assert compiler.environment["MAX_JOBS"] == "3"
    assert "MAX_JOBS" not in os.environ


def test_a_path_with_spaces_and_quotes_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real compiler, of sources that are quickly compiled."""
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    odd = tmp_path / "it's a (path) $HOME"
    (odd / "src").mkdir(parents=True)
    (odd / "src" / "half.h").write_text("inline int half(int x) { return x / 2; }\n")
    (odd / "src" / "one.cpp").write_text('#include "half.h"\nextern "C" int one() { return half(3); }\n')
    monkeypatch.setenv("OASIS_CACHE", str(odd / "cache"))
    from tvm_ffi.cpp import extension

    (odd / "ffi").symlink_to(Path(extension.find_include_path()).parent)
    for name, part in (
        ("find_include_path", "include"),
        ("find_dlpack_include_path", "include"),
        ("find_libtvm_ffi", f"lib/{Path(extension.find_libtvm_ffi()).name}"),
    ):
        monkeypatch.setattr(extension, name, lambda part=part: str(odd / "ffi" / part))
    library = compiled.build(compiled.Recipe("odd", "odd kernels", (odd / "src",)))
    assert ctypes.CDLL(str(library)).one() == 1


def test_the_environment_can_leave_the_kernels_out(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_OASIS_CPU_KERNELS", "0")
    assert native.load() is None
    assert not compiler.calls
    assert complaints(caplog) == [
        "SGLANG_OASIS_CPU_KERNELS is 0: plain torch replaces the CPU kernels, which is much slower."
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
    other = tmp_path / "clang++"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
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
