"""Compiles kernels on the machine that uses them: once per version of sources, flags and tools, into a cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from sglang_oasis.cache import cache_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What a library is made of.

    Attributes:
        name: of the library.
        title: what to call it in messages.
        folders: all .cpp and .cu files of the first are compiled, and may include from the first and the others.
        cflags, cuda_cflags, ldflags: of the C++ compiler, of nvcc and of the linker.
        compiler: the program that must be there.
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


def source_folder(part: str) -> Path:
    """Sources of kernels, such as "csrc/cpu" or "triton": in the checkout, or where a wheel puts its data files."""
    checkout = Path(__file__).resolve().parents[3] / "sgl-kernel-ext" / part
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "sglang-oasis" / part


def build(recipe: Recipe) -> Path:
    """Compile a library unless the cache has it.

    Returns:
        The shared library.

    Raises:
        RuntimeError: it does not compile; the message is the compiler's.
    """
    import tvm_ffi.cpp

    folder = cache_folder() / "kernels" / recipe.key()
    library = folder / f"{recipe.name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not library.exists():
            if shutil.which(recipe.compiler):
                logger.warning("Building the %s into %s, once; takes up to a minute.", recipe.title, folder)
            with _environment(recipe):
                made = tvm_ffi.cpp.build(
                    recipe.name,
                    cpp_files=sorted(str(file) for file in recipe.folders[0].glob("*.cpp")),
                    cuda_files=sorted(str(file) for file in recipe.folders[0].glob("*.cu")),
                    extra_cflags=list(recipe.cflags),
                    extra_cuda_cflags=list(recipe.cuda_cflags),
                    extra_ldflags=list(recipe.ldflags),
                    extra_include_paths=[str(source) for source in recipe.folders],
                    build_directory=str(folder / "build"),
                )
            os.replace(made, library)
            shutil.rmtree(folder / "build")
    return library


def reason(error: Exception) -> str:
    """The line of a compiler's message that says what is wrong, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[-1]).rstrip(".")


@contextlib.contextmanager
def _environment(recipe: Recipe) -> Iterator[None]:
    """The recipe's variables, and the environment's ninja even when the environment is not activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    variables = {**dict(recipe.environment), "PATH": path}
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
