"""Real texts for measurements, from sources on every machine with Python: language reference and standard library.

A text is a list of token ids. Those of `decoded_texts` end in the tokens that count as decode steps; in a conversation
they are the beginning of the last answer. The EAGLE-3 head was trained neither on the reference nor on these modules.
"""

from __future__ import annotations

import importlib
import inspect
import pydoc
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.holes import HOLE, fill_holes
from sglang_oasis.testing.corpus import Tokenizer, real_text_tokens

PACKAGE_MODULES = ("unittest.mock", "http.cookiejar", "urllib.request", "xml.dom.minidom")
QUOTED = (
    ("json.detect_encoding", "asyncio.wait"),
    ("email.utils.make_msgid", "urllib.parse.unquote"),
    ("urllib.parse.urlsplit", "json.detect_encoding"),
    ("asyncio.wait", "email.utils.make_msgid"),
)
"""Pairs of functions that an agent reads and quotes much later."""
NUMBERED = ("Oslo", "Lima", "Cairo", "Tokyo", "Paris", "Delhi", "Rome", "Quito", "Dublin", "Hanoi", "Accra", "Madrid")
"""The subjects of the needles."""
HAYSTACKS_FROM = 40_000
"""Token of the language reference where the haystacks begin, behind the windows that are read as prose."""


def prose(tokenizer: Tokenizer, windows: int, context: int) -> list[list[int]]:
    """Return consecutive pieces of the Python language reference."""
    tokens = real_text_tokens(tokenizer, windows * context)
    return [tokens[i * context : (i + 1) * context] for i in range(windows)]


def code(tokenizer: Tokenizer, windows: int, context: int, modules: Sequence[str]) -> list[list[int]]:
    """Return the beginnings of large modules of Python's standard library."""
    if windows > len(modules):
        raise ValueError(f"windows must be at most {len(modules)}, the number of source files, got {windows}")
    return [source(tokenizer, name)[:context] for name in modules[:windows]]


def source(tokenizer: Tokenizer, name: str) -> list[int]:
    """Return the source of a module, or of an object in a module."""
    return tokenizer.encode(inspect.getsource(pydoc.locate(name)))  # type: ignore[arg-type]


def transcripts(tokenizer: Any, windows: int, context: int, steps: int) -> list[list[int]]:
    """Return conversations of an agent with a user and tools; the answer quotes two tool results from far back.

    The tools' results are real outputs on this machine: a folder, functions, a manual page, a source file.
    """
    return [_transcript(tokenizer, *QUOTED[i], PACKAGE_MODULES[i], context, steps) for i in range(windows)]


def _transcript(tokenizer: Any, first: str, second: str, module: str, context: int, steps: int) -> list[int]:
    folder = first.split(".", 1)[0]
    calls = [
        (f"ls {folder}", "\n".join(sorted(p.name for p in Path(_file(folder)).parent.iterdir()))),
        (f"source {first}", inspect.getsource(pydoc.locate(first))),  # type: ignore[arg-type]
        (f"pydoc {module}", HOLE),
        (f"source {second}", inspect.getsource(pydoc.locate(second))),  # type: ignore[arg-type]
        (f"cat {module.replace('.', '/')}.py", HOLE),
    ]
    messages = [
        {"role": "system", "content": "You answer questions about Python. Your tools are ls, source, pydoc and cat."},
        {"role": "user", "content": f"Read {first} and {second}, and get to know {module}."},
    ]
    for call, result in calls:
        messages += [{"role": "assistant", "content": f"<tool_call>{call}</tool_call>"}]
        messages += [{"role": "tool", "content": result}]
    messages += [{"role": "user", "content": f"Thank you. Now quote the beginnings of {first} and of {second}."}]
    manual = pydoc.plain(pydoc.render_doc(importlib.import_module(module)))
    fillers = [tokenizer.encode(manual), source(tokenizer, module)]
    half, cut = steps // 2, tokenizer.encode("...\n```\n\n")
    answer = _quotation(tokenizer, first)[: half - len(cut)] + cut + _quotation(tokenizer, second)[: steps - half]
    return _filled(tokenizer, messages, fillers, answer, context)


def _quotation(tokenizer: Tokenizer, name: str) -> list[int]:
    return tokenizer.encode(f"`{name}` begins:\n\n```python\n") + source(tokenizer, name)


def _file(module: str) -> str:
    file = importlib.import_module(module).__file__
    assert file is not None
    return file


def needles(tokenizer: Any, windows: int, context: int, steps: int) -> list[list[int]]:
    """Return texts with seven-digit numbers at even distances, all asked for at the end, in another order.

    The text is the language reference. The answer names one number after another, so what matters changes often.
    """
    reference = real_text_tokens(tokenizer, HAYSTACKS_FROM + windows * context)[HAYSTACKS_FROM:]
    haystacks = [reference[i * context : (i + 1) * context] for i in range(windows)]
    return [_needles(tokenizer, haystack, random.Random(i), context, steps) for i, haystack in enumerate(haystacks)]


def _needles(tokenizer: Any, haystack: list[int], chance: random.Random, context: int, steps: int) -> list[int]:
    facts = {name: f"The secret number of {name} is {chance.randrange(10**6, 10**7)}." for name in NUMBERED}
    asked = chance.sample(NUMBERED, len(NUMBERED))
    question = f"What are the secret numbers of {', '.join(asked)}? Name them in this order."
    text = f"\n\n{HOLE}\n\n".join(facts.values())
    messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
    size = context // (len(NUMBERED) - 1)
    fillers = [haystack[start : start + size] for start in range(0, size * (len(NUMBERED) - 1), size)]
    answer = tokenizer.encode(" ".join(facts[name] for name in asked))[:steps]
    return _filled(tokenizer, messages, fillers, answer, context)


def _filled(
    tokenizer: Any, messages: list[dict[str, str]], fillers: Sequence[list[int]], answer: list[int], context: int
) -> list[int]:
    """Return the conversation up to the answer, `context` tokens in all; the fillers share its holes evenly."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def cut(hole: int, start: int, end: int) -> list[int]:
        return fillers[hole][: end - start]

    return fill_holes(tokenizer.encode, prompt, context - len(answer), cut) + answer


DECODED_TEXTS: Mapping[str, Callable[[Any, int, int, int], list[list[int]]]] = {
    "prose": lambda tokenizer, windows, context, steps: prose(tokenizer, windows, context),
    "code": lambda tokenizer, windows, context, steps: code(tokenizer, windows, context, PACKAGE_MODULES),
    "agent": transcripts,
    "needles": needles,
}
"""Kinds of text: (tokenizer, windows, context, steps) -> texts of `context` tokens, the last `steps` decoded."""
