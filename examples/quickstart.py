"""Serves the reference model with lookahead KV, asks two questions about a long document, and shows the memory use.

    python examples/quickstart.py [--document-tokens 6000] [further flags for sglang.launch_server ...]

The second question repeats the document, so most of its prompt comes from the prefix cache. Host memory keeps every
token; the device holds only the blocks that decoding needs.
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
from openai import OpenAI, OpenAIError
from openai.types import CompletionUsage
from rich.progress import BarColumn
from rich.table import Table
from server_process import Server, ServerError, Teller, console, running_server, watched
from tokenizers import Tokenizer

from sglang_oasis.cache import CacheError, writable_folder
from sglang_oasis.reference_model import ReferenceModelError, reference_model_path

BUDGET_TOKENS = 1024
CHUNK_TOKENS = 256
"""Tokens of a prompt that are read at a time; progress is shown after each chunk."""
TOPICS = ("exceptions", "try", "raise", "context-managers", "with", "naming", "import", "class", "execmodel", "objects")
SAMPLE_TOPIC = "operator-summary"
QUESTIONS = (
    "What does the try statement do, and what is the finally clause for?",
    "What is a class in Python?",
)


class QuickstartError(Exception):
    """The quickstart cannot go on; the message is one sentence for the user."""


@dataclass(frozen=True)
class Answer:
    """The time, tokens and statistics of one answer.

    Attributes:
        first_token_s: seconds from sending the request to the first token of the answer.
        prompt_tokens: tokens of document, question and chat template.
        cached_tokens: how many of them were already in the prefix cache.
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
        flags = ["--model-path", str(model), "--served-model-name", model.name, "--enable-lookahead-kv"]
        flags += ["--lookahead-kv-budget-tokens", str(BUDGET_TOKENS), "--lookahead-kv-host-gb", "1"]
        flags += ["--max-running-requests", "4", "--chunked-prefill-size", str(CHUNK_TOKENS), "--enable-cache-report"]
        log = writable_folder("logs", 10_000_000) / "quickstart-server.log"
        with running_server([*flags, *server_flags], log) as server:
            say_what_to_expect(server, arguments.document_tokens)
            answers = [
                ask(server, document, question, arguments.document_tokens, arguments.answer_tokens)
                for question in QUESTIONS
            ]
            report(answers, read_stats(server))
    except (QuickstartError, ServerError, ReferenceModelError, CacheError, OpenAIError) as error:
        console.print(f"quickstart: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def build_document(model: Path, tokens: int) -> str:
    """Join chapters of Python's language reference, and cut them to a number of tokens."""
    text = "\n\n".join(f"# {name}\n\n{topics[name]}" for name in TOPICS)
    encoding = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text)
    if len(encoding) < tokens:
        raise QuickstartError(f"--document-tokens must be at most {len(encoding)}, got {tokens}.")
    return text[: encoding.offsets[tokens - 1][1]]


def say_what_to_expect(server: Server, document_tokens: int) -> None:
    """Measure with a short prompt how fast the server reads, and print an estimate."""
    began = time.monotonic()
    prompt = {"text": topics[SAMPLE_TOPIC][: 4 * CHUNK_TOKENS], "sampling_params": {"max_new_tokens": 1}}
    with Teller("Measuring how fast it reads") as teller, watched(server, lambda: teller.tell("")):
        answer = httpx.post(f"{server.url}/generate", json=prompt, timeout=None, trust_env=False).raise_for_status()
    rate = answer.json()["meta_info"]["prompt_tokens"] / (time.monotonic() - began)
    console.print(
        f"\nIt reads about {rate:,.0f} tokens/s, long texts more slowly: the first answer to {document_tokens:,} "
        f"tokens begins in {document_tokens / rate:,.0f} s or later, the second one much sooner. The model is small: "
        f"its answers are often wrong.",
        soft_wrap=True,
    )


def ask(server: Server, document: str, question: str, document_tokens: int, answer_tokens: int) -> Answer:
    """Ask about the document through the OpenAI API and stream the answer to the terminal."""
    console.print(f"\nQuestion: {question}", style="bold", markup=False)
    before = server.prefill()
    started = time.monotonic()
    teller = Teller("Reading", BarColumn(30), total=document_tokens)
    with watched(server, lambda: tell_progress(teller, server, before, document_tokens, started)):
        chunks = chat(server, f"{document}\n\n# Question\n\n{question}", answer_tokens)
        with teller:
            text, usage = next(chunks)
        first_token_s, stats = time.monotonic() - started, read_stats(server)
        console.print("Answer:   ", end="", style="bold")
        while usage is None:
            console.print(text, end="", markup=False, soft_wrap=True)
            text, usage = next(chunks)
        console.print()
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Answer(first_token_s, usage.prompt_tokens, cached or 0, stats)


def tell_progress(teller: Teller, server: Server, before: int, tokens: int, started: float) -> None:
    """Show how much of a prompt of `tokens` tokens the server has read."""
    read, seconds = min(server.prefill() - before, tokens), time.monotonic() - started
    left = f", {read / seconds:,.0f} tokens/s, {seconds * (tokens / read - 1):,.0f} s left" if read else ""
    teller.tell(f"{read:,} of {tokens:,} tokens{left}", read)


def chat(server: Server, prompt: str, answer_tokens: int) -> Iterator[tuple[str, CompletionUsage | None]]:
    """Yield the pieces of the answer as they arrive, then its token counts."""
    with httpx.Client(trust_env=False, timeout=None) as http:  # `watched` ends the wait if the server has stopped
        client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=http, timeout=None, max_retries=0)
        chunks = client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=answer_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            if chunk.usage is not None:
                yield "", chunk.usage
                return
            if text := "".join(choice.delta.content or "" for choice in chunk.choices):
                yield text, None
    raise QuickstartError("The server ended its answer early: see its log.")


def read_stats(server: Server) -> dict[str, Any]:
    """Return the statistics of the only rank: sums since the server started, and present sizes."""
    return server.get("/lookahead_kv/stats")["ranks"][0]


def report(answers: list[Answer], final_stats: dict[str, Any]) -> None:
    first, second = answers
    streaming = second.stats
    table = Table(title="\nWhat lookahead KV did", title_justify="left", show_header=False)
    tokens, sizes = streaming["host_tokens"], streaming["bytes"]
    megabytes = sizes["host_capacity"] * tokens["used"] / tokens["capacity"] / 1e6
    table.add_row("KV cache in host memory", f"{megabytes:,.0f} MB of {tokens['used']:,} tokens")
    table.add_row("Resident on the device", f"{sizes['resident'] / 1e6:,.0f} MB")
    table.add_row("Blocks fetched from host memory", f"{final_stats['counters']['blocks_fetched']:,}")
    table.add_row("Prefix-cache hits, 2nd question", f"{second.cached_tokens:,} of {second.prompt_tokens:,} tokens")
    table.add_row("Time to first token, 1st question", f"{first.first_token_s:.2f} s")
    table.add_row("Time to first token, 2nd question", f"{second.first_token_s:.2f} s")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
