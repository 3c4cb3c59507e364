"""Compiles kernels on the machine that uses them: once per version of sources, flags and tools, into a cache folder.

What does not compile is remembered there too, so that not every process tries again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from sglang_oasis.cache import places, writable_folder
from sglang_oasis.cpus import usable_cpus

logger = logging.getLogger(__name__)

BYTES = 100_000_000
"""Room that a build takes, generously."""
PASSING = re.compile("No space left|Cannot allocate memory|memory exhausted|out of memory|Killed")
"""What a compiler says when the machine was short of something; it may well succeed the next time."""


@dataclass(frozen=True)
class Recipe:
    """What a library is made of.

    Attributes:
        name: of the library.
        title: what to call it in messages.
        folders: all .cpp and .cu files of the first are compiled, and may include from the first and the others.
        cflags, cuda_cflags, ldflags: of the C++ compiler, of nvcc and of the linker.
        compiler: the program that must be there, perhaps with arguments.
        environment: variables that are set while it is compiled.
    """

    name: str
    title: str
    folders: tuple[Path, ...]
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    compiler: str = "c++"
    environment: tuple[tuple[str, str], ...] = ()

    def key(self) -> str:
        """Changes with everything that changes the library."""
        digest = hashlib.sha256()
        flags = (*self.cflags, *self.cuda_cflags, *self.ldflags)
        variables = (f"{name}={value}" for name, value in self.environment)
        tools = (version("apache-tvm-ffi"), platform.machine(), os.environ.get("CXX", ""), self.compiler)
        for part in (*flags, *variables, *tools):
            digest.update(part.encode() + b"\0")
        for file in (file for folder in self.folders for file in sorted(folder.iterdir()) if file.is_file()):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def find_tools(self) -> list[Path]:
        """The programs that compile it.

        Raises:
            RuntimeError: its compiler is not there.
        """
        compiler, host_compiler = (_find(name) for name in (self.compiler, os.environ.get("CXX", "c++")))
        if compiler is None:
            raise RuntimeError(f"there is no C++ compiler ({self.compiler}); install g++, or set CXX to one")
        return [compiler] if host_compiler is None else [compiler, host_compiler]


def _find(program: str) -> Path | None:
    """A program, perhaps with arguments behind it, such as "ccache g++"."""
    found = shutil.which(program) or shutil.which(next(iter(program.split()), ""))
    return None if found is None else Path(found).resolve()


def source_folder(part: str) -> Path:
    """Sources of kernels, such as "csrc/cpu" or "triton": in the checkout, or where a wheel puts its data files."""
    checkout = Path(__file__).resolve().parents[3] / "sgl-kernel-ext" / part
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "sglang-oasis" / part


def build(recipe: Recipe) -> Path:
    """Compile a library unless the cache has it.

    A library that did not compile is not tried again before its sources, flags or compiler change.

    Returns:
        The shared library.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
        CacheError: there is no room for it.
    """
    part, file = f"kernels/{recipe.key()}", f"{recipe.name}.so"
    for place in places(part):  # also one that cannot be written
        if (place / file).exists():
            return place / file
    tools = recipe.find_tools()
    folder = writable_folder(part, BYTES)
    library, failure = folder / file, Failure(folder / "failed.json", tools)
    with FileLock(folder / "lock"):
        if not library.exists():  # another process may have built it meanwhile
            failure.repeat()
            logger.warning("Building the %s into %s, once; takes up to a minute.", recipe.title, folder)
            try:
                os.replace(_compile(recipe, folder / "build"), library)
            except RuntimeError as error:
                failure.remember(error)
                raise
            finally:
                shutil.rmtree(folder / "build", ignore_errors=True)
            failure.file.unlink(missing_ok=True)
    return library


def _compile(recipe: Recipe, folder: Path) -> str:
    import tvm_ffi.cpp

    with _environment(recipe), _escaped_paths():
        return tvm_ffi.cpp.build(
            recipe.name,
            cpp_files=sorted(_for_ninja(file) for file in recipe.folders[0].glob("*.cpp")),
            cuda_files=sorted(_for_ninja(file) for file in recipe.folders[0].glob("*.cu")),
            extra_cflags=list(recipe.cflags),
            extra_cuda_cflags=list(recipe.cuda_cflags),
            extra_ldflags=list(recipe.ldflags),
            extra_include_paths=[_for_shell(str(source)) for source in recipe.folders],
            build_directory=str(folder),
        )


@dataclass(frozen=True)
class Failure:
    """What a compiler said when it failed, kept beside the place of the library.

    Attributes:
        file: where it is kept.
        tools: the programs that compile; an updated one is another.
    """

    file: Path
    tools: list[Path]

    def repeat(self) -> None:
        """Fail as the last time.

        Raises:
            RuntimeError: this compiler has failed.
        """
        try:
            kept = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return
        if kept["tools"] == self._versions():
            raise RuntimeError(f"{kept['message']} (not tried again; delete {self.file} to do so)")

    def remember(self, error: Exception) -> None:
        """Keep what is wrong, unless the machine was only short of something."""
        if not PASSING.search(str(error)):
            self.file.write_text(json.dumps({"tools": self._versions(), "message": reason(error)}))

    def _versions(self) -> list[list[str | int]]:
        found = [(tool, tool.stat()) for tool in self.tools]
        return [[str(tool), file.st_size, file.st_mtime_ns] for tool, file in found]


def reason(error: Exception) -> str:
    """The line of a compiler's message that says what is wrong, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[-1]).rstrip(".")


@contextlib.contextmanager
def _environment(recipe: Recipe) -> Iterator[None]:
    """The recipe's variables, and the environment's ninja even when the environment is not activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    jobs = os.environ.get("MAX_JOBS", str(usable_cpus()))
    variables = {**dict(recipe.environment), "PATH": path, "MAX_JOBS": jobs}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _escaped_paths() -> Iterator[None]:
    """Let tvm_ffi 0.1 put its own paths into ninja's commands such that a space does not end them."""
    from tvm_ffi.cpp import extension

    finders = {name: getattr(extension, name) for name in dir(extension) if name.startswith("find_")}
    for name, find in finders.items():
        setattr(extension, name, lambda find=find: _for_shell(find()))
    try:
        yield
    finally:
        for name, find in finders.items():
            setattr(extension, name, find)


def _for_ninja(path: Path) -> str:
    """A file among the inputs of a rule."""
    return re.sub(r"([$ ])", r"$\1", str(path.resolve()))


def _for_shell(path: str) -> str:
    """A part of a command, with nothing around it that quotes would be in the way of."""
    return re.sub(r"([^\w/.,:=@%+-])", r"\\\1", path).replace("$", "$$")
