"""What a request may say: a value that would end a scheduler is refused by name, and nothing else is."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_oasis.errors import RequestRefused
from sglang_oasis.seams.request_rules import check_answers, check_labels, check_sampling, check_tokenized

VOCABULARY, WIDTH, CONTEXT = 100, 8, 10**6
TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: list(text))


def tokenized(sampling: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    """A request that is fine but for these fields, as SGLang hands it to the scheduler."""
    params = SamplingParams(**{"max_new_tokens": 4, **(sampling or {})})
    params.normalize(TOKENIZER)
    return TokenizedGenerateReqInput(
        **{
            "input_text": "",
            "input_ids": array("q", [5, 6, 7]),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
            **fields,
        }
    )


def refusal(sampling: dict[str, Any] | None = None, **fields: Any) -> str | None:
    """The sentence with which a request is refused; None if it is not."""
    try:
        check_sampling(sampling or {}, SamplingParams)
        check_tokenized(tokenized(sampling, **fields), VOCABULARY, WIDTH, CONTEXT)
    except RequestRefused as error:
        sentence = str(error)
        assert sentence.endswith(".")
        assert "\n" not in sentence
        return sentence
    return None


FINE_SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1e-6, "top_k": -1, "top_p": 1, "min_p": 1},
    {"top_k": VOCABULARY + 1},
    {"stop_token_ids": [0, VOCABULARY - 1, None]},
    {"stop_regex": ["a+", "b"], "stop": "c"},
    {"logit_bias": {"5": -1e9, "6": 100}},
    {"custom_params": {"anything": [1, "a"]}},
    {"max_new_tokens": None, "n": None, "min_new_tokens": 10_000},
    {"repetition_penalty": 2, "frequency_penalty": -2.0},
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature must be between 0 and 3.4e+38, got nan."),
    ({"temperature": math.inf}, "temperature must be between 0 and 3.4e+38, got inf"),
    ({"temperature": "hot"}, "temperature 'hot' is invalid: expected `float`, got `str`."),
    ({"temperature": [1]}, "temperature [1] is invalid: expected `float`, got `array`."),
    ({"top_k": 1.5}, "top_k 1.5 is invalid: expected `int`, got `float`."),
    ({"top_k": True}, "top_k True is invalid: expected `int`, got `bool`."),
    ({"top_k": 2**31}, "top_k must be between 1 and 1073741824, got 2147483648."),
    ({"min_new_tokens": 2**40}, "min_new_tokens must be between 0 and 2147483647, got 1099511627776."),
    ({"max_new_tokens": 2**70}, "max_new_tokens must be an integer of 64 bits, got 1180591620717411303424."),
    ({"repetition_penalty": 1e-30}, "repetition_penalty must be between 1e-06 and 2, got 1e-30."),
    ({"logit_bias": {"5": math.nan}}, "logit_bias of token 5 must be between -1e+30 and 1e+30, got nan."),
    ({"logit_bias": {5: 1.0}}, "logit_bias {5: 1.0} is invalid: expected `str`, got `int`"),
    ({"stop_token_ids": [VOCABULARY]}, f"each token in stop_token_ids must be between 0 and 99, got {VOCABULARY}."),
    ({"stop_token_ids": [-1]}, "each token in stop_token_ids must be between 0 and 99, got -1"),
    ({"stop_regex": "((("}, "stop_regex '(((' is invalid: missing ), unterminated subpattern at position 2."),
    ({"stop_regex": ["a", "\\"]}, "stop_regex '\\\\' is invalid: bad escape (end of pattern) at position 0."),
    ({"stop_regex": "a{99999999999}"}, "stop_regex 'a{99999999999}' is invalid: the repetition number is too large"),
    ({"stop": [5]}, "stop [5] is invalid: expected `str`"),
    ({"json_schema": {"type": "object"}}, "json_schema {'type': 'object'} is invalid: expected `str | null`"),
    ({"regex": ["a" * 100]}, f"regex ['{'a' * 58}... is invalid: expected `str | null`"),
]
FINE_FIELDS: list[dict[str, Any]] = [
    {"top_logprobs_num": VOCABULARY},
    {"logprob_start_len": 0, "top_logprobs_num": 5},
    {"input_ids": None, "input_embeds": [[0.5] * WIDTH]},
    {"input_ids": array("q", [0, VOCABULARY - 1])},
    {"priority": -5, "extra_key": "tenant"},
]
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": array("q")}, "The prompt must have at least one token"),
    ({"input_ids": array("q", [5, VOCABULARY])}, "each token in input_ids must be between 0 and 99, got 100."),
    ({"input_ids": array("q", [5, -1])}, "each token in input_ids must be between 0 and 99, got -1"),
    (
        {"input_ids": None, "input_embeds": [[0.5] * (WIDTH - 1)]},
        "input_embeds must be one row or more of 8 numbers, got 1 rows of [7] numbers.",
    ),
    (
        {"input_ids": None, "input_embeds": []},
        "input_embeds must be one row or more of 8 numbers, got 0 rows of [] numbers.",
    ),
    ({"top_logprobs_num": VOCABULARY + 1}, "top_logprobs_num must be between 0 and 100, got 101."),
    ({"top_logprobs_num": -1}, "top_logprobs_num must be between 0 and 100, got -1."),
    ({"logprob_start_len": -2}, "logprob_start_len must be between -1 and 2147483647, got -2."),
    ({"priority": 1.5}, "priority 1.5 is invalid: expected `int | null`, got `float`."),
    ({"stream": "yes"}, "stream 'yes' is invalid: expected `bool`, got `str`."),
    ({"token_indices_to_pool": [3]}, "token_indices_to_pool must be between 0 and 2, got 3."),
    ({"positional_embed_overrides": {"x": 1}}, "positional_embed_overrides {'x': 1} is invalid: "),
]


@pytest.mark.parametrize("sampling", FINE_SAMPLING)
def test_sampling_that_can_be_served_is_not_refused(sampling: dict[str, Any]) -> None:
    assert refusal(sampling) is None


@pytest.mark.parametrize(("sampling", "sentence"), BAD_SAMPLING)
def test_sampling_that_would_end_a_scheduler_is_refused(sampling: dict[str, Any], sentence: str) -> None:
    assert sentence in str(refusal(sampling))


@pytest.mark.parametrize("fields", FINE_FIELDS)
def test_fields_that_can_be_served_are_not_refused(fields: dict[str, Any]) -> None:
    assert refusal(**fields) is None


@pytest.mark.parametrize(("fields", "sentence"), BAD_FIELDS)
def test_fields_that_would_end_a_scheduler_are_refused(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in str(refusal(**fields))


def test_logprobs_are_bounded_by_their_number() -> None:
    def refused(new: int | None, number: int, n: int = 1, **fields: Any) -> str:
        return str(refusal({"max_new_tokens": new, "n": n}, top_logprobs_num=number, **fields))

    assert refused(10**5, 41) == "None"
    assert "top_logprobs_num must be at most 41 at 100000 positions, got 42" in refused(10**5, 42)
    assert refused(10**5, 42, return_logprob=False) == "None"
    assert refused(10**5, 20, n=100) == "None"
    assert "top_logprobs_num must be at most 20 at 10000000 positions, got 21" in refused(10**5, 21, n=100)
    assert "at 999997 positions" in refused(None, 21)  # the context less the prompt
    assert "at 1000000 positions" in refused(None, 21, logprob_start_len=0)


@pytest.mark.parametrize(
    ("request_", "highest"), [({"text": "a"}, 4096), ({"text": ["a", "b"]}, 2048), ({"input_ids": [[1], [2]]}, 2048)]
)
def test_answers_are_bounded_before_any_is_set_up(request_: dict[str, Any], highest: int) -> None:
    from sglang_oasis.seams.request_validation import _normalize

    def normalized(n: Any) -> list[int]:
        reached: list[int] = []
        _normalize(lambda request: reached.append(1), GenerateReqInput(**request_, sampling_params={"n": n}))
        return reached

    assert normalized(highest) == normalized(None) == [1]
    for n in (highest + 1, 0, -1, "2", 1.5):
        with pytest.raises(RequestRefused, match=r"^n (must be|.* is invalid)"):
            normalized(n)


def test_the_first_of_several_settings_says_how_many_answers() -> None:
    check_answers(2, [{"n": 2}, {"n": 2}])
    check_answers(1, None)
    check_answers(1, [])
    with pytest.raises(RequestRefused):
        check_answers(2, [{"n": 10**9}, {"n": 10**9}])


def test_labels_are_those_of_the_metrics() -> None:
    check_labels(None, ())
    check_labels({"tenant": "a"}, ("tenant",))
    with pytest.raises(RequestRefused, match=r"custom_labels must be labels of .*, got 'x'"):
        check_labels({"x": "a"}, ("tenant",))
