"""An agent's transcript: the last answer quotes what a tool has printed long before."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import email
import html
import http
import importlib
import json
import logging
import multiprocessing
import sqlite3
import unittest
import urllib
import xml
from functools import cache
from pathlib import Path
from random import Random
from types import ModuleType

from benchmark.holes import HOLE
from benchmark.quality.documents import ASKED, Draft, Question, Task

QUESTIONS = 10
PACKAGES: tuple[ModuleType, ...] = (
    *(asyncio, collections, concurrent.futures, email, html, http, importlib, json, logging, multiprocessing, sqlite3),
    *(unittest, urllib, xml),
)
SYSTEM = "You are a helpful assistant. You may call the tools list_files and read_file."


@cache
def _listing(package: ModuleType) -> list[tuple[str, int]]:
    """Name and size of the source files of a package, as they are on this machine."""
    folder = Path(str(package.__file__)).parent
    return sorted((file.name, file.stat().st_size) for file in folder.glob("*.py") if file.stat().st_size)


def write(chance: Random, document: int, facts: int) -> Draft:
    packages = chance.sample(PACKAGES, min(len(PACKAGES), max(2, facts // 3)))
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Get to know these packages. I will ask about their files later."},
    ]
    questions = []
    for package in packages:
        name, listing = package.__name__, _listing(package)
        listed = chance.sample(listing, min(6, len(listing)))
        call = json.dumps({"name": "list_files", "arguments": {"folder": name}})
        read = json.dumps({"name": "read_file", "arguments": {"path": f"{name}/notes.txt"}})
        messages += [
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {
                "role": "user",
                "content": "Result of list_files:\n" + "\n".join(f"{size} {file}" for file, size in listed),
            },
            {"role": "assistant", "content": f"<tool_call>{read}</tool_call>"},
            {"role": "user", "content": f"Result of read_file:\n{HOLE}"},
        ]
        questions += [
            Question(
                f"When you called list_files for {name}, how many bytes did {file} have?",
                f"list_files printed for {name} that the size of {file} in bytes is",
                (str(size),),
            )
            for file, size in listed
        ]
    messages += [
        {"role": "assistant", "content": "I have read all of it."},
        {"role": "user", "content": ASKED},
    ]
    return Draft(messages, chance.sample(questions, min(QUESTIONS, len(questions))))


TASKS = (Task("agent quotes a tool", write, output=12),)
