"""Compiles kernels on the machine that uses them: once per version of sources, flags and tools, into a cache folder.

A failed build is recorded there too, so that other processes do not repeat it.
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
"""Upper bound on the bytes of disk space that a build takes."""
PASSING = re.compile("No space left|Cannot allocate memory|memory exhausted|out of memory|Killed")
"""Compiler messages about a lack of memory or disk space; such a build may succeed the next time."""


@dataclass(frozen=True)
class Recipe:
    """How to build a library.

    Attributes:
        name: of the library.
        title: name of the library in messages.
        folders: all .cpp and .cu files of the first folder are compiled; all folders are searched for headers.
        cflags, cuda_cflags, ldflags: flags of the C++ compiler, of nvcc and of the linker.
        compiler: the program that must be installed, optionally with arguments.
        environment: variables that are set during the build.
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
        """A key that changes whenever anything changes that affects the library."""
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
        """Return the paths of the programs that compile the library.

        Raises:
            RuntimeError: the compiler is not installed.
        """
        compiler, host_compiler = (_find(name) for name in (self.compiler, os.environ.get("CXX", "c++")))
        if compiler is None:
            raise RuntimeError(f"there is no C++ compiler ({self.compiler}); install g++, or set CXX to one")
        return [compiler] if host_compiler is None else [compiler, host_compiler]


def _find(program: str) -> Path | None:
    """Return the path of a program, which may be followed by arguments, as in "ccache g++"; None if it is absent."""
    found = shutil.which(program) or shutil.which(next(iter(program.split()), ""))
    return None if found is None else Path(found).resolve()


def source_folder(part: str) -> Path:
    """Return a folder of kernel sources ("csrc/cpu", "triton"): in the checkout, or among a wheel's data files."""
    checkout = Path(__file__).resolve().parents[3] / "sgl-kernel-ext" / part
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "sglang-oasis" / part


def build(recipe: Recipe) -> Path:
    """Compile a library unless it is in the cache.

    A build that failed is not repeated before the sources, the flags or the compiler change.

    Returns:
        The shared library.

    Raises:
        RuntimeError: the library does not compile; the message is that of the compiler.
        CacheError: there is not enough disk space for it.
    """
    part, file = f"kernels/{recipe.key()}", f"{recipe.name}.so"
    for place in places(part):  # also a folder that cannot be written
        if (place / file).exists():
            return place / file
    tools = recipe.find_tools()
    folder = writable_folder(part, BYTES)
    library, failure = folder / file, Failure(folder / "failed.json", tools)
    with FileLock(folder / "lock"):
        if not library.exists():  # another process may have built it meanwhile
            failure.repeat()
            logger.warning("Building the %s once, into %s; this takes up to a minute.", recipe.title, folder)
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
    """The record of a failed build, kept beside the path of the library.

    Attributes:
        file: the file that holds the record.
        tools: the programs that compile; the record becomes invalid when one of them is updated.
    """

    file: Path
    tools: list[Path]

    def repeat(self) -> None:
        """Raise the recorded error again, if there is one for these tools.

        Raises:
            RuntimeError: the build has failed before with these tools.
        """
        try:
            kept = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return
        if kept["tools"] == self._versions():
            raise RuntimeError(f"{kept['message']} (not tried again; delete {self.file} to try again)")

    def remember(self, error: Exception) -> None:
        """Record the error, unless the cause was a temporary lack of memory or disk space."""
        if not PASSING.search(str(error)):
            self.file.write_text(json.dumps({"tools": self._versions(), "message": reason(error)}))

    def _versions(self) -> list[list[str | int]]:
        found = [(tool, tool.stat()) for tool in self.tools]
        return [[str(tool), file.st_size, file.st_mtime_ns] for tool, file in found]


def reason(error: Exception) -> str:
    """Return the line of a compiler's message that names the error, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[-1]).rstrip(".")


@contextlib.contextmanager
def _environment(recipe: Recipe) -> Iterator[None]:
    """Set the recipe's variables, and put the Python environment's ninja on PATH even if it is not activated."""
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
    """Make tvm_ffi 0.1 escape spaces in the paths that it writes into ninja's commands."""
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
    """Escape the path of a file for the inputs of a ninja rule."""
    return re.sub(r"([$ ])", r"$\1", str(path.resolve()))


def _for_shell(path: str) -> str:
    """Escape a path within a part of a shell command, where quotes cannot be put around the whole part."""
    return re.sub(r"([^\w/.,:=@%+-])", r"\\\1", path).replace("$", "$$")
