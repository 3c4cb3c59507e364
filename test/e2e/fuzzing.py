"""Requests as nobody means them: valid ones, in which some fields have a wrong range, size, shape or type."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import requests
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from urllib3.exceptions import ReadTimeoutError

from sglang_oasis.testing.server import Server

ANSWER_TIMEOUT = 4.0
"""Seconds until the client goes: to ask for much is no fault, and the server has to clean up behind it."""
VOCABULARY = 49152


class Call(NamedTuple):
    """One request.

    Attributes:
        path: the endpoint.
        body: what becomes its JSON, in which NaN, infinities and lone surrogates are allowed.
    """

    path: str
    body: Any

    def send(self, server: Server, timeout: float = ANSWER_TIMEOUT) -> requests.Response | None:
        """The answer; None if the client went before it came."""
        try:
            return requests.post(
                f"{server.url}{self.path}",
                data=json.dumps(self.body),
                headers={"Content-Type": "application/json"},
                timeout=timeout,
            )
        except requests.ReadTimeout:
            return None
        except requests.ConnectionError as error:  # so `requests` names a timeout behind an answer's first bytes
            if isinstance(error.args[0], ReadTimeoutError):
                return None
            raise


# --- values ---

EDGES = [VOCABULARY - 1, VOCABULARY, 100_000, 2**31 - 1, 2**31, 2**62, 2**63, -(2**63), 2**64, 10**30]
INTEGERS = st.one_of(st.sampled_from([0, -1, 1, 2, 7, 64, *EDGES]), st.integers(-5, 70))
EDGE_FLOATS = [1e-6, 1e-46, 5e-324, 1e38, 1e39, 1e308, -1e308, math.nan, math.inf, -math.inf]
FLOATS = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, *EDGE_FLOATS]), st.floats(0, 2), INTEGERS)
PATTERNS = [
    *("(((", "a{99999999999}", "[^a]*", "(?P<a>.)(?P=a)", "\\", "(?i)ab|", "a{0,60000}", "((a{1,99}){1,99}){1,99}"),
    *("(" * 2000 + ")" * 2000, "a|" * 500, "[a-z]+@[a-z]+"),
]
GRAMMARS = [
    *("{", "{}", "true", "[]", "null", "1", '{"type": "strang"}', '{"$ref": "#"}', '{"$ref": "#/nowhere"}'),
    *('{"type": "object", "properties": {"a": {"$ref": "#"}}}', '{"enum": []}', '{"pattern": "((("}', '{"anyOf": []}'),
    *(
        '{"type": "array", "minItems": 1e9}',
        '{"type": "string", "maxLength": -1}',
        '{"type": "integer", "minimum": 1e99}',
    ),
    *("root ::= root", 'root ::= "a" root', "root ::=", 'root ::= "a"{2,1}', "root ::= [^]", "$$ANY$$", "[" * 600),
    *('{"type": "structural_tag"}', '{"structures": [], "triggers": []}', '{"type": "structural_tag", "format": {}}'),
]
STRANGE = ["", " ", "a", "\x00", "\ud800", "\U0001f600", "</s>", "<|im_start|>", "a" * 100_000, "x " * 900]
TEXTS = st.one_of(st.sampled_from(STRANGE), st.sampled_from([*PATTERNS, *GRAMMARS]), st.text(max_size=20))
SCALARS = st.one_of(st.none(), st.booleans(), FLOATS, TEXTS)
NESTED = st.sampled_from([3, 70, 400]).map(lambda depth: json.loads("[" * depth + "]" * depth))
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=4),
    st.lists(st.lists(INTEGERS, max_size=3), max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=3),
    NESTED,
)


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """JSON values that pass for `annotation`, at the edges of what it allows."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        return INTEGERS if annotation is int else FLOATS
    if annotation is str:
        return TEXTS
    if annotation is type(None):
        return st.none()
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(of_type, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is typing.Annotated:
        return of_type(arguments[0])
    if origin in (list, set) and arguments:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is dict and arguments:
        return st.dictionaries(st.one_of(TEXTS, INTEGERS.map(str)), of_type(arguments[1]), max_size=3)
    return VALUES


SPECIAL = {
    **{name: st.sampled_from(PATTERNS) for name in ("regex", "stop_regex")},
    **{name: st.sampled_from(GRAMMARS) for name in ("json_schema", "ebnf", "structural_tag")},
    "logit_bias": st.dictionaries(INTEGERS.map(str), FLOATS, max_size=3),
    "response_format": st.fixed_dictionaries(
        {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"name": TEXTS, "schema": VALUES})}
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": VALUES}
        ),
        max_size=2,
    ),
    "session_params": st.fixed_dictionaries(
        {}, optional={"id": TEXTS, "rid": TEXTS, "offset": INTEGERS, "replace": st.booleans(), "x": TEXTS}
    ),
}
Change = Callable[[dict[str, Any]], dict[str, Any]]


def changes(fields: dict[str, Any], most: int = 2) -> st.SearchStrategy[Change]:
    """What sets up to `most` of the fields (name -> annotation): three times out of four to a value of its type."""

    def value(name: str) -> st.SearchStrategy[tuple[str, Any]]:
        typed = SPECIAL[name] if name in SPECIAL else of_type(fields[name])
        return st.tuples(st.just(name), st.integers(0, 3).flatmap(lambda kind: typed if kind else VALUES))

    pairs = st.lists(st.sampled_from(sorted(fields)).flatmap(value), min_size=1, max_size=most)
    return pairs.map(lambda pairs: lambda body: {**body, **dict(pairs)})


# --- endpoints ---

SAMPLING: dict[str, Any] = {"max_new_tokens": 4}
SAMPLING_FIELDS = typing.get_type_hints(SamplingParams)
GENERATE_FIELDS = typing.get_type_hints(GenerateReqInput)
LOGPROB_FIELDS = {
    name: GENERATE_FIELDS[name] for name in ("top_logprobs_num", "logprob_start_len", "token_ids_logprob")
}
PROMPTS = st.one_of(
    st.sampled_from([{"text": "Once upon a time"}, {"input_ids": [5, 6, 7]}]),
    st.sampled_from([{"text": ["a b", "c"]}, {"input_ids": [[5], [6]]}]),
    TEXTS.map(lambda text: {"text": text}),
    st.lists(INTEGERS, max_size=4).map(lambda ids: {"input_ids": ids}),
)


@st.composite
def generate(draw: st.DrawFn) -> Call:
    """POST /generate: strange sampling, strange fields, strange prompts or strange log-probabilities."""
    body = {"text": "Once upon a time", "sampling_params": SAMPLING}
    strange = draw(st.sampled_from(["sampling", "sampling", "fields", "fields", "prompt", "logprobs", "both", "each"]))
    if strange in ("prompt", "both"):
        body = {**draw(PROMPTS), "sampling_params": SAMPLING}
    if strange in ("sampling", "both"):
        body["sampling_params"] = draw(changes(SAMPLING_FIELDS))(SAMPLING)
    if strange == "each":
        each = st.lists(changes(SAMPLING_FIELDS, 1).map(lambda change: change(SAMPLING)), max_size=3)
        body = {"text": ["a b", "c"], "sampling_params": draw(each)}
    if strange in ("fields", "both"):
        body = draw(changes(GENERATE_FIELDS))(body)
    if strange == "logprobs":
        body = draw(changes(LOGPROB_FIELDS))({**body, "return_logprob": True})
    return Call("/generate", body)


MESSAGES = [{"role": "user", "content": "Say hello."}]
MODEL = {"model": "default"}
OPENAI: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": ({**MODEL, "messages": MESSAGES, "max_tokens": 4}, protocol.ChatCompletionRequest),
    "/v1/completions": ({**MODEL, "prompt": "Once upon", "max_tokens": 4}, protocol.CompletionRequest),
    "/v1/embeddings": ({**MODEL, "input": "a b"}, protocol.EmbeddingRequest),
    "/v1/classify": ({**MODEL, "input": "a b"}, protocol.ClassifyRequest),
    "/v1/score": ({**MODEL, "query": "a", "items": ["b"], "label_token_ids": [1]}, protocol.ScoringRequest),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, protocol.V1RerankReqInput),
    "/v1/tokenize": ({**MODEL, "prompt": "a"}, protocol.TokenizeRequest),
    "/v1/detokenize": ({**MODEL, "tokens": [1]}, protocol.DetokenizeRequest),
}


@st.composite
def openai(draw: st.DrawFn) -> Call:
    """An OpenAI endpoint."""
    path = draw(st.sampled_from([*["/v1/chat/completions", "/v1/completions"] * 4, *OPENAI]))
    body, model = OPENAI[path]
    fields = {name: field.annotation for name, field in model.model_fields.items()}
    return Call(path, draw(changes(fields))(body))


CONTROL: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "x", "abort_all": False},
    "/open_session": {"capacity_of_str_len": 10, "session_id": "s", "streaming": False, "timeout": 1.0},
    "/close_session": {"session_id": "s"},
    "/start_profile": {"num_steps": 1, "activities": ["CPU"], "start_step": None, "profile_by_stage": False},
    "/stop_profile": {},
    "/set_internal_state": {"server_args": {"pp_max_micro_batch_size": 1}},
    "/configure_logging": {"log_level": "info", "log_requests_level": 0},
    "/get_weights_by_name": {"name": "model.norm.weight", "truncate_size": 3},
    "/weights_checker": {"action": "checksum", "selector": "all"},
    "/update_weights_from_disk": {"model_path": "nowhere", "load_format": "auto"},
    "/begin_weight_update": {"selector": "all"},
    "/end_weight_update": {},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"], "selector": "all"},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
    "/update_weight_version": {"new_version": "2", "abort_all_requests": False},
    "/release_memory_occupation": {"tags": None},
    "/resume_memory_occupation": {"tags": None},
    "/start_expert_distribution_record": {},
    "/load_lora_adapter": {"lora_name": "x", "lora_path": "y"},
    "/parse_function_call": {"text": "a", "tools": [], "tool_call_parser": "qwen25"},
    "/separate_reasoning": {"text": "a", "reasoning_parser": "deepseek-r1"},
    "/v1/messages": {**MODEL, "messages": MESSAGES, "max_tokens": 4},
    "/api/generate": {**MODEL, "prompt": "a", "stream": False, "options": {"num_predict": 4}},
}


@st.composite
def control(draw: st.DrawFn) -> Call:
    """What administers the server, and the endpoints of other APIs; each value replaced by one of its type or any."""
    path = draw(st.sampled_from(sorted(CONTROL)))
    body = CONTROL[path]
    fields = {name: Any if value is None else type(value) for name, value in body.items()}
    return Call(path, draw(changes(fields, 1))(body) if fields else body)


calls = st.one_of(generate(), generate(), openai(), control())
