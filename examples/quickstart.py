"""Serves the reference model with lookahead KV, asks two questions about one long document, shows what was kept where.

    python examples/quickstart.py [--document-tokens 6000] [further flags for sglang.launch_server ...]

The second question repeats the document, so most of its prompt comes from the prefix cache. Host memory keeps every
token; the device holds only the blocks that decoding needs.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from sglang_oasis.cache import cache_folder
from sglang_oasis.reference_model import ReferenceModelError, reference_model_path

BUDGET_TOKENS = 1024
TOPICS = ("exceptions", "try", "raise", "context-managers", "with", "naming", "import", "class", "execmodel", "objects")
QUESTIONS = (
    "What does the try statement do, and what is the finally clause for?",
    "What is a class in Python?",
)
START_TIMEOUT_S = 300
STOP_GRACE_S = 15

console = Console(highlight=False)


class QuickstartError(Exception):
    """One sentence for the user."""


@dataclass(frozen=True)
class Answer:
    """What one question cost.

    Attributes:
        first_token_s: seconds from sending the request to the first token of the answer.
        prompt_tokens: tokens of document, question and chat template.
        cached_tokens: how many of those the prefix cache held already.
        stats: the server's statistics while the answer was streaming.
    """

    first_token_s: float
    prompt_tokens: int
    cached_tokens: int
    stats: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document-tokens", type=int, default=6000, help="length of the document (default: 6000)")
    parser.add_argument("--answer-tokens", type=int, default=64, help="longest answer (default: 64)")
    arguments, server_flags = parser.parse_known_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        model = reference_model_path()
        document = build_document(model, arguments.document_tokens)
        with running_server(model, server_flags) as url, httpx.Client(base_url=url, trust_env=False) as http:
            console.print(f"\nReading {arguments.document_tokens:,} tokens; without a GPU, this takes up to a minute.")
            answers = [ask(http, document, question, arguments.answer_tokens) for question in QUESTIONS]
            report(answers, read_stats(http))
    except (QuickstartError, ReferenceModelError, OpenAIError) as error:
        console.print(f"quickstart: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build_document(model: Path, tokens: int) -> str:
    """Join chapters of Python's own language reference, cut to a number of tokens."""
    text = "\n\n".join(f"# {name}\n\n{topics[name]}" for name in TOPICS)
    encoding = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text)
    if len(encoding) < tokens:
        raise QuickstartError(f"The document has {len(encoding)} tokens; ask for no more with --document-tokens.")
    return text[: encoding.offsets[tokens - 1][1]]


@contextlib.contextmanager
def running_server(model: Path, flags: list[str]) -> Iterator[str]:
    """Run an SGLang server for the model; yield its address, and stop it whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(BUDGET_TOKENS)]
    command += ["--lookahead-kv-host-gb", "1", "--max-running-requests", "4", "--enable-cache-report", *flags]

    log = cache_folder() / "logs" / "quickstart-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(server, url, log)
            yield url
        except httpx.HTTPError as error:
            raise QuickstartError(f"The server failed ({error}); {telling_line(log)}") from error
        finally:
            stop(server)


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    started = time.monotonic()
    console.print(f"Starting SGLang (log: {log}) ", end="", markup=False, soft_wrap=True)
    while server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                console.print(f" ready after {time.monotonic() - started:.0f} s")
                return
        if time.monotonic() - started > START_TIMEOUT_S:
            console.print()
            raise QuickstartError(f"The server was not ready after {START_TIMEOUT_S} s; {telling_line(log)}")
        console.print(".", end="")
        time.sleep(1)
    console.print()
    raise QuickstartError(f"The server ended while starting; {telling_line(log)}")


def telling_line(log: Path) -> str:
    """Return the line of the log that most likely says what went wrong, and where the log is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "error: " in line or "Exception: " in line]
    return f"{log} says: {(errors or lines or ['nothing'])[-1]}"


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server's whole process group: politely first, then by force."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave it running
    console.print("\nStopping the server")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(STOP_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def ask(http: httpx.Client, document: str, question: str, answer_tokens: int) -> Answer:
    """Ask about the document through the OpenAI API and stream the answer to the terminal."""
    console.print(f"\nQuestion: {question}\nAnswer:   ", end="", style="bold", markup=False)
    client = OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", http_client=http, timeout=600, max_retries=0)
    started = time.monotonic()
    chunks = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": f"{document}\n\n# Question\n\n{question}"}],
        temperature=0,
        max_tokens=answer_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    first_token_s, stats, usage = 0.0, {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        text = "".join(choice.delta.content or "" for choice in chunk.choices)
        if text and not stats:
            first_token_s = time.monotonic() - started
            stats = read_stats(http)
        console.print(text, end="", markup=False, soft_wrap=True)
    console.print()
    if usage is None or not stats:
        raise QuickstartError("The server ended its answer early; look into its log.")
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Answer(first_token_s, usage.prompt_tokens, cached or 0, stats)


def read_stats(http: httpx.Client) -> dict[str, Any]:
    """Return the statistics of the only rank; they are sums since the server started, and sizes now."""
    response = http.get("/lookahead_kv/stats", timeout=60)
    response.raise_for_status()
    return response.json()["ranks"][0]


def report(answers: list[Answer], final_stats: dict[str, Any]) -> None:
    first, second = answers
    streaming = second.stats
    table = Table(title="\nWhat lookahead KV did", title_justify="left", show_header=False)
    table.add_row("Tokens held in host memory", f"{streaming['host_tokens']['used']:,}")
    table.add_row("Bytes resident on the device", f"{streaming['bytes']['resident']:,}")
    table.add_row("Blocks fetched from host memory", f"{final_stats['counters']['blocks_fetched']:,}")
    table.add_row("Prefix-cache hits, 2nd question", f"{second.cached_tokens:,} of {second.prompt_tokens:,} tokens")
    table.add_row("Time to first token, 1st question", f"{first.first_token_s:.2f} s")
    table.add_row("Time to first token, 2nd question", f"{second.first_token_s:.2f} s")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
