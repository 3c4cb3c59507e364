"""One request for every kind of sampling parameter, and for some of them together."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from sglang_oasis.testing.server import Server
from test.e2e.small_pool import text

TOKENS = 24
PROMPT = text(300, 100)
DISALLOWED = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
NO_REPEAT = {"custom_logit_processor": DeepseekOCRNoRepeatNGramLogitProcessor.to_str()}
SEEDED = {"temperature": 1.5, "sampling_seed": 7}

# Name -> sampling parameters, other fields of the request.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "min_p of one": ({"temperature": 3, "min_p": 1.0}, {}),
    "seed": (SEEDED, {}),
    "seed, top_k, top_p and min_p": ({**SEEDED, "temperature": 3, "top_k": 40, "top_p": 0.8, "min_p": 0.02}, {}),
    "negative seed": ({"temperature": 0.9, "sampling_seed": -(2**63)}, {}),
    "frequency_penalty": ({"frequency_penalty": 2}, {}),
    "presence_penalty": ({"presence_penalty": 2}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.3}, {}),
    "rewards": ({"frequency_penalty": -0.3, "presence_penalty": -0.5, "repetition_penalty": 0.8}, {}),
    "penalties and a seed": (
        {**SEEDED, "frequency_penalty": 0.4, "presence_penalty": 0.6, "repetition_penalty": 1.2, "min_p": 0.05},
        {},
    ),
    "logit_bias": ({"logit_bias": {"28": -100, "198": 4.5}}, {}),
    "logit_bias and frequency_penalty": ({"logit_bias": {"28": 30}, "frequency_penalty": 2}, {}),
    "stop_regex": ({"stop_regex": "n[a-d], "}, {}),
    "ignore_eos": ({"logit_bias": {"2": 100}, "ignore_eos": True}, {}),
    "end of text": ({"logit_bias": {"2": 100}}, {}),
    "end of text, later": ({"logit_bias": {"2": 100}, "min_new_tokens": 9}, {}),
    "grammar and frequency_penalty": ({"regex": "[a-d ]{8}", "frequency_penalty": 2}, {}),
    "grammar and a seed": ({"ebnf": 'root ::= ("yes" | "no" | " ")+ "."', **SEEDED}, {}),
    "disallowed tokens": ({"custom_params": {"token_ids": [28, 198, 216, 260]}}, DISALLOWED),
    "disallowed tokens, seed": ({**SEEDED, "custom_params": {"token_ids": [28, 198, 216, 260]}}, DISALLOWED),
    "no token twice": ({"custom_params": {"ngram_size": 1, "window_size": 1000}}, NO_REPEAT),
    "no pair twice": ({"custom_params": {"ngram_size": 2, "window_size": 1000}}, NO_REPEAT),
    "special tokens": ({"logit_bias": {"0": 100}, "ignore_eos": True, "skip_special_tokens": False}, {}),
}


def ask(server: Server, name: str) -> dict[str, Any]:
    sampling, fields = CASES[name]
    return server.generate(PROMPT, max_new_tokens=TOKENS, sampling=sampling, return_logprob=True, **fields)
