"""Penalties, seeds and verification by sampling, against loops and against SGLang's own sampler."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative import eagle_utils
from torch import Tensor

from sglang_oasis.seams import logit_processors, running_batch
from sglang_oasis.seams.sampling import _sample_from_probs
from sglang_oasis.serving.cpu_platform import speculative as ops
from sglang_oasis.serving.sampling import verification
from sglang_oasis.serving.sampling.history import RequestThen, output_tokens, show
from sglang_oasis.serving.sampling.penalties import penalise, recount
from sglang_oasis.serving.sampling.seeds import draw, seeds_of
from sglang_oasis.serving.sampling.verification import LooksBack, verify

VOCABULARY, EOS = 11, 9
FILTERS = {"temperature": 1.0, "top_k": 2**30, "top_p": 1.0, "min_p": 0.0, "sampling_seed": None}
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


def request(said: list[int] | None = None, **sampling: Any) -> Any:
    params = SimpleNamespace(**{**FILTERS, **PENALTIES, "stop_token_ids": None, "custom_params": None, **sampling})
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS)
    return SimpleNamespace(
        sampling_params=params,
        output_ids=array("q", said or []),
        origin_input_ids=array("q", [1, 2]),
        eos_token_ids=None,
        tokenizer=tokenizer,
        finished=lambda: False,
    )


class Batch:
    """As far as penalizers look; they refer to it weakly."""

    def __init__(self, requests: list[Any]) -> None:
        self.reqs, self.device = requests, "cpu"


def orchestrator_of(requests: list[Any]) -> tuple[Any, Any]:
    """SGLang's, and its batch."""
    batch = Batch(requests)
    kinds = {
        penaltylib.BatchedFrequencyPenalizer,
        penaltylib.BatchedMinNewTokensPenalizer,
        penaltylib.BatchedPresencePenalizer,
        penaltylib.BatchedRepetitionPenalizer,
    }
    return penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, kinds), batch


def penalised_by_loops(logits: list[float], said: list[int], params: Any) -> list[float]:
    expected = []
    for token, logit in enumerate(logits):
        times = said.count(token)
        logit -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
        if token == EOS and len(said) < params.min_new_tokens:
            logit = -float("inf")
        if times:
            logit = logit * params.repetition_penalty if logit < 0 else logit / params.repetition_penalty
        expected.append(logit)
    return expected


HISTORIES = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=12), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(
    said=HISTORIES,
    some=st.fixed_dictionaries(
        {
            "frequency_penalty": st.sampled_from([0.0, 0.5, -1.0]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.5, 0.5]),
            "min_new_tokens": st.integers(0, 8),
        }
    ),
    seed=st.integers(0, 1000),
)
def test_penalties_follow_from_the_tokens(said: list[list[int]], some: dict[str, Any], seed: int) -> None:
    """Whatever the penalizers were fed before; every other request has none."""
    requests = [request(**(some if row % 2 == 0 else {})) for row in range(len(said))]
    orchestrator, _batch = orchestrator_of(requests)
    logits = torch.randn((len(said), VOCABULARY), generator=torch.Generator().manual_seed(seed))
    expected = [
        penalised_by_loops(row, tokens, one.sampling_params)
        for row, tokens, one in zip(logits.tolist(), said, requests, strict=True)
    ]
    if orchestrator.is_required:
        for _ in range(3):
            orchestrator.cumulate_output_tokens(torch.full((len(said),), 4))
        recount(orchestrator, [array("q", tokens) for tokens in said])
        penalise(orchestrator, logits)
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_sglang_has_no_other_penalizers() -> None:
    """A new one would need its state to be set, too."""
    from sglang_oasis.serving.sampling.penalties import _SET

    named = {name for name in vars(penaltylib) if name.startswith("Batched") and name.endswith("Penalizer")}
    assert set(_SET) == named


def step(requests: list[Any], extend: bool, speculates: bool, **result: Any) -> tuple[Any, Any]:
    mode = SimpleNamespace(is_extend=lambda: extend)
    batch = SimpleNamespace(
        reqs=requests, forward_mode=mode, spec_algorithm=SimpleNamespace(is_none=lambda: not speculates)
    )
    defaults = {"copy_done": None, "accept_lens": None, "speculative_output_stride": None}
    return batch, SimpleNamespace(**{**defaults, "speculative_num_draft_tokens": 3, **result})


def histories(batch: Any, *unprocessed: Any) -> list[list[int]]:
    return [tokens.tolist() for tokens in output_tokens(batch, unprocessed)]


def test_tokens_that_are_not_processed_yet_count() -> None:
    a, b, c = request([1, 2]), request([5]), request()
    running, _ = step([a, b], extend=False, speculates=False)
    decoded = step([b, c, a], False, False, next_token_ids=torch.tensor([7, 8, 9]))
    assert histories(running, decoded) == [[1, 2, 9], [5, 7]]
    verified = step(
        [b, a], False, True, next_token_ids=torch.tensor([1, 2, 3, 4, 5, 6]), accept_lens=torch.tensor([2, 3])
    )
    assert histories(running, verified) == [[1, 2, 4, 5, 6], [5, 1, 2]]
    prefilled = step([b], True, True, next_token_ids=torch.tensor([6]), accept_lens=torch.tensor([1]))
    assert histories(running, prefilled) == [[1, 2], [5, 6]]
    assert histories(running) == [[1, 2], [5]]
    assert a.output_ids.tolist() == [1, 2]


def test_a_chunk_of_a_prompt_gives_no_token() -> None:
    one = request()
    second_chunk, _ = step([one], extend=True, speculates=False)
    assert histories(second_chunk, step([one], True, False, next_token_ids=torch.tensor([3]))) == [[]]


def test_processors_see_the_request_as_it_then_is() -> None:
    one = request([1], custom_params={"__req__": None, "kept": 5})
    one.sampling_params.custom_params["__req__"] = one
    for said in ([1, 2], [1, 2, 3]):
        show([one, request()], [array("q", said), array("q")])
        seen = one.sampling_params.custom_params["__req__"]
        assert isinstance(seen, RequestThen)
        assert [*seen.origin_input_ids, *seen.output_ids] == [1, 2, *said]
    assert one.output_ids.tolist() == [1]


def info_of(requests: list[Any], **fields: Any) -> SamplingBatchInfo:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(one.sampling_params, name) for one in requests], dtype=dtype)

    return SamplingBatchInfo(
        temperatures=column("temperature", torch.float32).unsqueeze(1),
        top_ps=column("top_p", torch.float32),
        top_ks=column("top_k", torch.int32),
        min_ps=column("min_p", torch.float32),
        sampling_seed=seeds_of(requests, "cpu", torch.Generator()),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=VOCABULARY,
        device="cpu",
        **fields,
    )


def assert_distributed(tokens: Tensor, probs: Tensor) -> None:
    """Pearson's chi-squared, at most the mean and six standard deviations; a token without probability never comes."""
    counts = torch.bincount(tokens.long(), minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    expected = probs.double() / probs.sum() * len(tokens)
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = max(int(possible.sum()) - 1, 1)
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


def filtered(probs: Tensor, info: SamplingBatchInfo) -> Tensor:
    """What SGLang's sampler leaves of probabilities [T, V]."""
    _, ordered, index, _ = sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), info.top_ks, info.top_ps, info.min_ps, True, None, None, return_filtered_probs=True
    )
    return torch.zeros_like(probs).scatter_(1, index.long(), ordered)


@pytest.mark.parametrize(
    "some", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.4}, {"top_k": 6, "top_p": 0.8, "min_p": 0.1}]
)
def test_seeds_draw_from_the_samplers_distribution(some: dict[str, Any]) -> None:
    """Over seeds at one position, and over positions with one seed."""
    n = 4000
    probs = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)).softmax(-1).expand(n, -1)
    for seeds, positions in ((range(n), [9] * n), ([3] * n, range(n))):
        info = info_of([request(**some, sampling_seed=seed) for seed in seeds])
        assert_distributed(draw(probs, info, torch.tensor([*positions])), filtered(probs, info)[0])


def test_a_seed_gives_the_same_token_whatever_is_beside_it() -> None:
    probs = torch.randn((3, VOCABULARY), generator=torch.Generator().manual_seed(1)).softmax(-1)
    requests = [request(sampling_seed=-(2**63)), request(), request(sampling_seed=2**63 - 1)]
    positions = torch.tensor([4, 5, 6])
    together = draw(probs, info_of(requests), positions)
    for row in (0, 2):
        alone = draw(probs[row : row + 1], info_of(requests[row : row + 1]), positions[row : row + 1])
        assert alone.tolist() == [together[row]]
    assert seeds_of([request()], "cpu", torch.Generator()) is None


@pytest.fixture
def verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets SGLang's verification and sampler run outside a server, seeds in place."""
    original = sglang_sampler.Sampler._sample_from_probs
    seeded = functools.partial(_sample_from_probs, original)
    monkeypatch.setattr(sglang_sampler.Sampler, "_sample_from_probs", lambda *args: seeded(*args))
    spec = SimpleNamespace(speculative_use_rejection_sampling=False)
    monkeypatch.setattr(eagle_utils, "get_spec", lambda: spec)
    monkeypatch.setattr(eagle_utils, "verify_tree_greedy_func", ops.verify_tree_greedy)
    monkeypatch.setattr(
        sglang_sampler, "get_exec", lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    )
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    )
    sampler = sglang_sampler.Sampler.__new__(sglang_sampler.Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = None
    sampler.enable_deterministic = sampler.use_log_softmax_logprob = sampler.use_ascend_backend = False
    monkeypatch.setattr(verification, "_sampler", lambda: sampler)


def verified(
    logits: Tensor, drafts: list[list[int]], info: SamplingBatchInfo, looks_back: LooksBack | None = None
) -> tuple[list[list[int]], Tensor]:
    """Accepted tokens of each chain [n, m - 1] with the one behind them, and the logits [n * m, V] that were left."""
    n, m = len(drafts), len(drafts[0]) + 1
    chains = torch.tensor([[0, *chain] for chain in drafts])
    verify_input = SimpleNamespace(
        draft_token=chains.flatten(),
        draft_token_num=m,
        max_tree_depth=m,
        tree_topk=1,
        positions=torch.arange(m).repeat(n) + 20,
        retrieve_index=torch.arange(n * m).view(n, m),
        retrieve_next_token=torch.tensor([*range(1, m), -1]).repeat(n, 1),
        retrieve_next_sibling=torch.full((n, m), -1),
    )
    mode = SimpleNamespace(is_idle=lambda: False)
    batch = SimpleNamespace(seq_lens=torch.full((n,), 20), sampling_info=info, device="cpu", forward_mode=mode)
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    predict, lengths, index = verify(eagle_utils.eagle_sample, looks_back, verify_input, batch, output)
    assert batch.sampling_info is info
    tokens = [predict[row[:length].long()].tolist() for row, length in zip(index, lengths.tolist(), strict=True)]
    return tokens, output.next_token_logits


@pytest.mark.usefixtures("verifies")
@pytest.mark.parametrize("some", [{}, {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1}])
def test_sampled_tokens_are_distributed_as_without_speculation(some: dict[str, Any]) -> None:
    """The first token whatever is drafted, and the second where the first draft was accepted."""
    n, draft = 6000, 3
    torch.manual_seed(0)
    logits = torch.randn((3, VOCABULARY), generator=torch.Generator().manual_seed(2)) * 1.5
    info = info_of([request(**some)] * n)
    tokens, left = verified(logits.repeat(n, 1), [[draft, 2]] * n, info)
    assert torch.equal(left, logits.repeat(n, 1))  # log-probabilities come from them
    probs = filtered((logits / some.get("temperature", 1)).softmax(-1), info_of([request(**some)] * 3))
    assert_distributed(torch.tensor([chain[0] for chain in tokens]), probs[0])
    accepted = [chain for chain in tokens if len(chain) > 1]
    assert all(chain[0] == draft for chain in accepted)
    assert_distributed(torch.tensor([chain[1] for chain in accepted]), probs[1])


@pytest.mark.usefixtures("verifies")
def test_min_p_of_one_is_greedy() -> None:
    logits = torch.randn((4, VOCABULARY), generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    info = info_of([request(temperature=3.0, min_p=1.0)])
    assert verified(logits, [best[:3]], info)[0] == [best]
    wrong = (best[1] + 1) % VOCABULARY
    assert verified(logits, [[best[0], wrong, best[2]]], info)[0] == [best[:2]]


@pytest.mark.usefixtures("verifies")
@pytest.mark.parametrize("seed", [None, 5])
def test_a_place_where_every_token_is_forbidden_stops_nobody(seed: int | None) -> None:
    logits = torch.full((6, VOCABULARY), -torch.inf)
    logits[0, 4] = logits[3:, 7] = 0
    tokens, _ = verified(logits, [[3, 3], [7, 7]], info_of([request(sampling_seed=seed)] * 2))
    assert tokens == [[4], [7, 7, 7]]


@pytest.mark.usefixtures("verifies")
def test_seeded_chains_are_those_without_speculation() -> None:
    """Right drafts or wrong ones, each token is the one that its position draws."""
    logits = torch.randn((4, VOCABULARY), generator=torch.Generator().manual_seed(3))
    one = request(sampling_seed=12, top_p=0.9)
    alone = [
        int(draw((logits[place : place + 1]).softmax(-1), info_of([one]), torch.tensor([20 + place])))
        for place in range(4)
    ]
    assert verified(logits, [alone[:3]], info_of([one]))[0] == [alone]
    for place in range(3):
        drafts = [*alone[:3]]
        drafts[place] = (drafts[place] + 1) % VOCABULARY
        assert verified(logits, [drafts], info_of([one]))[0] == [alone[: place + 1]]


@pytest.mark.usefixtures("verifies")
def test_penalties_count_the_drafts_before_a_place() -> None:
    """Without them each row's best token is 6, 7 or 8 again; with them each comes once."""
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 6], logits[:, 7], logits[:, 8] = 3.0, 2.0, 1.0
    one = request([8], presence_penalty=5.0)
    orchestrator, _batch = orchestrator_of([one])
    looks_back = LooksBack([one], [one.output_ids], orchestrator, processes=False)
    info = dataclasses.replace(info_of([one]), is_all_greedy=True)
    tokens, left = verified(logits, [[6, 7, 0]], info, looks_back)
    assert tokens == [[6, 7, 0, 1]]
    assert left[:, 6:9].tolist() == [[3, 2, -4], [-2, 2, -4], [-2, -3, -4], [-2, -3, -4]]
    assert verified(logits, [[6, 6, 6]], info, looks_back)[0] == [[6, 7]]


class NextAfterLast:
    """Forces the successor of the last token."""

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        for row, one in enumerate(params):
            logits[row] = -torch.inf
            logits[row, (one["__req__"].output_ids[-1] + 1) % VOCABULARY] = 0
        return logits


@pytest.mark.usefixtures("verifies")
def test_processors_run_at_each_place_with_the_drafts_before_it() -> None:
    requests = [request([4]), request([7], custom_params={"__req__": None})]
    requests[1].sampling_params.custom_params["__req__"] = requests[1]
    entry = ProcessorEntry(processor=NextAfterLast(), rows=[1], indices=torch.tensor([1]))
    info = info_of(
        requests,
        has_custom_logit_processor=True,
        custom_params=[None, requests[1].sampling_params.custom_params],
        custom_logit_processor={1: entry},
    )
    looks_back = LooksBack(requests, [one.output_ids for one in requests], None, processes=True)
    logits = torch.full((6, VOCABULARY), -torch.inf)
    logits[:3, 5] = 0
    logits[3:, 1] = 0
    assert verified(logits, [[5, 5], [8, 9]], info, looks_back)[0] == [[5, 5, 5], [8, 9, 10]]
    assert verified(logits, [[5, 5], [8, 3]], info, looks_back)[0] == [[5, 5, 5], [8, 9]]


class Fails:
    """Writes first."""

    def __call__(self, logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        logits.fill_(7)
        raise KeyError("token_ids")


def test_a_processor_that_fails_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request([4], custom_params={}), request([5]), request([6], custom_params={})]
    for one in requests:
        one.to_finish = None
    show_all = {"__req__": requests[2]}
    entries = {
        1: ProcessorEntry(processor=Fails(), rows=[0], indices=torch.tensor([0])),
        2: ProcessorEntry(processor=NextAfterLast(), rows=[2], indices=torch.tensor([2])),
    }
    info = info_of(requests, custom_params=[{}, None, show_all], custom_logit_processor=entries)
    running = LooksBack(requests, [one.output_ids for one in requests], None, processes=True)
    monkeypatch.setattr(running_batch, "_running", running)
    logits = torch.zeros(3, VOCABULARY)
    logit_processors._apply(sglang_sampler.apply_custom_logit_processor, logits, info)
    assert requests[0].to_finish.message == (
        "The custom logit processor Fails failed (KeyError: 'token_ids'): check its custom_params."
    )
    assert [one.to_finish for one in requests[1:]] == [None, None]
    assert logits[:2].tolist() == [[0.0] * VOCABULARY] * 2
    assert logits[2].argmax() == 7


def test_what_is_no_processor_is_refused() -> None:
    for serialized in ("", "{}", "no JSON", '{"callable": "00"}', DisallowedTokensLogitsProcessor.to_str()[:-9]):
        with pytest.raises(ValueError, match="custom_logit_processor cannot be loaded"):
            logit_processors.check_custom_logit_processor(serialized)
    logit_processors.check_custom_logit_processor(DisallowedTokensLogitsProcessor.to_str())


def test_a_row_that_was_freed_before_its_batch_ran_is_given_up_again() -> None:
    """SGLang processes the earlier result first where a grammar wants it, and that may finish a request."""
    requests = [request([1]), request([2])]
    orchestrator, _batch = orchestrator_of(requests)
    info = info_of(requests, penalizer_orchestrator=orchestrator)
    events: list[Any] = []
    pool = SimpleNamespace(_aux_cache=SimpleNamespace(free=events.append))
    scheduler = SimpleNamespace(req_to_token_pool=pool, random_seed=1)
    batch = SimpleNamespace(reqs=requests, sampling_info=info, device="cpu", req_pool_indices=torch.tensor([5, 9]))

    def run(_scheduler: Any, _batch: Any) -> None:
        events.append("ran")
        requests[0].finished = lambda: True  # this one's row is freed later, by SGLang

    requests[1].finished = lambda: True
    running_batch._run_batch(run, scheduler, batch)
    assert events == ["ran", 9]
