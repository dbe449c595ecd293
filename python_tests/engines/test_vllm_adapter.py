"""The adapter of vLLM on plain objects that stand for vLLM's; no vLLM is needed.

What is asked: that packed batches become the arguments of `specdec_ext.verify` that a loop without
packing would pass. Whether vLLM is as these objects say is test_vllm.py's question.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

import specdec_ext
from specdec_ext.contract import CHAIN_RULES
from specdec_ext.engines import vllm as plugin
from specdec_ext.engines.vllm import hooks, v1, v2
from specdec_ext.engines.vllm.layout import Layouts, make_layout
from specdec_ext.engines.vllm.requests import Facts, Requests, seed_of
from specdec_ext.engines.vllm.settings import Settings, parse_settings
from specdec_ext.testing import filtered_law

CPU = torch.device("cpu")
V = 11


# --- stand-ins ------------------------------------------------------------------------------------


@dataclass
class Metadata:
    """vLLM's SpecDecodeMetadata, as far as it is read."""

    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]

    @property
    def bonus_logits_indices(self) -> torch.Tensor:
        return torch.tensor([n + 1 for n in self.num_draft_tokens]).cumsum(0) - 1

    @property
    def target_logits_indices(self) -> torch.Tensor:
        bonus = set(self.bonus_logits_indices.tolist())
        rows = sum(self.num_draft_tokens) + len(self.num_draft_tokens)
        return torch.tensor([i for i in range(rows) if i not in bonus], dtype=torch.int64)


@dataclass
class Sampling:
    """vLLM's SamplingMetadata, as far as it is read."""

    temperature: torch.Tensor | None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    max_num_logprobs: int | None = None
    no_penalties: bool = True
    bad_words_token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    allowed_token_ids_mask: torch.Tensor | None = None
    logitsprocs: Any = field(default_factory=lambda: SimpleNamespace(non_argmax_invariant=[]))
    thinking_budget_state_holder: Any = None

    @property
    def all_greedy(self) -> bool:
        return self.temperature is None


class InnerSampler:
    """vLLM's Sampler: here a processor that forbids token 3 of rows after full acceptance."""

    def apply_logits_processors(self, logits, sampling, predict_bonus_token):
        assert predict_bonus_token
        logits[:, 3] = -torch.inf
        return logits

    @staticmethod
    def compute_logprobs(logits):
        return logits.log_softmax(-1)

    @staticmethod
    def gather_logprobs(logprobs, count, tokens):
        return logprobs.topk(count).values, logprobs.gather(-1, tokens[:, None])[:, 0]


class Base:
    """vLLM's RejectionSampler: here a processor that forbids token 3 of the other rows."""

    synthetic_mode = False
    is_processed_logprobs_mode = False
    is_logits_logprobs_mode = False

    def __init__(self, sampler, spec_config=None, device=None):
        self.sampler = sampler

    def forward(self, *arguments):
        return "vLLM's own"

    def apply_logits_processors(self, logits, sampling, metadata):
        logits[:, 3] = -torch.inf
        return logits


def sampler(rule: str = "block", **numbers: float) -> Any:
    return v1.sampler_class(Base, SimpleNamespace, Settings(rule, numbers))(InnerSampler())


class Batch:
    """A ragged batch, packed as vLLM has it and dense as `specdec_ext.verify` takes it."""

    def __init__(self, counts=(3, 0, 2, 1), seed=0, noise=0.7):
        generator = torch.Generator().manual_seed(seed)
        self.counts, self.size, self.gamma = list(counts), len(counts), max(counts)
        self.target = 2 * torch.randn(self.size, self.gamma + 1, V, generator=generator)
        wiggle = torch.randn(self.size, self.gamma, V, generator=generator)
        self.draft = self.target[:, : self.gamma] + noise * wiggle
        self.seeds = torch.randint(2**62, (self.size,), generator=generator)
        self.positions = torch.randint(1000, (self.size,), generator=generator)
        self.temperature = torch.tensor([0.8, 1.0, 0.0, 1.3, 0.5, 1.0][: self.size])
        self.draw()

    def draw(self, domain=2):
        rows = [
            specdec_ext.sample(
                self.draft[:, i],
                **dict(seeds=self.seeds, positions=self.positions, draft_index=i, domain=domain),
                temperature=self.temperature,
            ).tokens
            for i in range(self.gamma)
        ]
        empty = torch.empty(self.size, 0, dtype=torch.int64)
        self.tokens = torch.stack(rows, 1) if rows else empty

    @property
    def lengths(self):
        return torch.tensor(self.counts)

    def packed(self, dense: torch.Tensor, more: int) -> torch.Tensor:
        return torch.cat([row[: n + more] for row, n in zip(dense, self.counts, strict=True)])

    @property
    def metadata(self):
        return Metadata(self.packed(self.tokens, 0).to(torch.int32), self.counts)

    @property
    def logits(self):
        return self.packed(self.target, 1)

    def step(self, **given):
        return v1.Step(Facts(self.seeds), self.positions, **given)

    def laws(self):
        rows = torch.arange(self.size)[:, None] * self.gamma + torch.arange(self.gamma)
        return v1.DraftRows(self.draft.flatten(0, 1), rows, are_logits=True)

    def expected(self, rule, draft=None, **given):
        draft = {} if draft is None else {"draft_logits": draft}
        return specdec_ext.verify(
            self.target, self.tokens, **draft, draft_lengths=self.lengths, seeds=self.seeds,
            positions=self.positions, temperature=self.temperature, rule=rule, **given,
        ).tokens  # fmt: skip

    def forward(self, sampler, step, **sampling):
        sampler.specdec.step = step
        given = Sampling(self.temperature, **sampling)
        return sampler.forward(self.metadata, None, self.logits, given)


# --- settings -------------------------------------------------------------------------------------


def test_settings():
    assert parse_settings("") is None and parse_settings(" 0 ") is None
    assert parse_settings("block") == Settings("block")
    assert parse_settings("top_beta, beta=2, tau=0.5") == Settings(
        "top_beta", {"beta": 2, "tau": 0.5}
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("traversal", "must begin with one of block, token"),
        ("block,gamma=3", "parameters of rules are .* got 'gamma=3'"),
        ("lenient,lenience=high", "lenience must be a number, got 'high'"),
        ("top_beta,beta=2.5", "beta must be a number, got '2.5'"),
    ],
)
def test_settings_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(text)


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0], [1], [4, 4, 4], []])
def test_layout_finds_each_slot(counts):
    layout = make_layout(counts, CPU)
    gamma = max(counts, default=0)
    assert layout.target_rows.shape == (len(counts), gamma + 1)
    assert layout.lengths.tolist() == counts
    rows = [(b, i) for b, n in enumerate(counts) for i in range(n + 1)]
    drafted = [(b, i) for b, n in enumerate(counts) for i in range(n)]
    assert layout.owners.tolist() == [b for b, _ in rows]
    for b, n in enumerate(counts):
        for i in range(gamma + 1):
            assert rows[layout.target_rows[b, i]] == (b, min(i, n))
        for i in range(n):
            assert drafted[layout.draft_slots[b, i]] == (b, i)
    if drafted:
        assert 0 <= layout.draft_slots.min() and layout.draft_slots.max() < len(drafted)


def test_layouts_are_kept_and_forgotten():
    layouts = Layouts(capacity=2)
    one = layouts.of([1, 2], CPU)
    layouts.of([2, 1], CPU)
    assert layouts.of([1, 2], CPU) is one
    layouts.of([3], CPU)  # [2, 1] was used longest ago
    assert layouts.of([1, 2], CPU) is one
    assert layouts.of([2, 1], CPU).lengths.tolist() == [2, 1]


# --- requests -------------------------------------------------------------------------------------


def state(name, **params):
    given = {"seed": None, "min_p": 0.0, "structured_outputs": None, **params}
    return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(**given))


def test_seeds():
    assert seed_of("a", 7, 0) == 7
    assert seed_of("a", 2**64 - 1, 0) == -1
    drawn = {seed_of(name, None, engine) for name in "abc" for engine in (0, 1)}
    assert len(drawn) == 6 and all(-(2**63) <= s < 2**63 for s in drawn)


def test_facts_of_a_batch():
    requests = Requests(0, CPU)
    a, b = state("a", seed=5), state("b", seed=6, min_p=0.25, structured_outputs="grammar")
    facts = requests.facts([a])
    assert facts.seeds.tolist() == [5] and facts.min_p is None and facts.bound is None
    facts = requests.facts([b, a])
    assert facts.seeds.tolist() == [6, 5]
    assert facts.min_p.tolist() == [0.25, 0.0] and facts.bound.tolist() == [True, False]
    assert requests.facts([b, a]) is facts
    # Another request under a name that ended: what was kept is not its.
    assert requests.facts([b, state("a", seed=9)]).seeds.tolist() == [6, 9]


def test_drafts_are_not_verified_by_laws_of_another_round():
    drafts = v1.Outstanding()
    running = {"a", "b", "c"}
    assert drafts.rows(None, ["a", "b"], running) == [v1.CHOSEN, v1.CHOSEN]
    assert drafts.rows(["a", "b"], ["b", "a"], running) == [1, 0]
    assert drafts.rows(["b", "a"], ["a"], running) == [1]  # b waits, with tokens that were drawn
    assert drafts.rows(["a"], ["a", "b"], running) == [0, v1.LOST]
    # The last round was of greedy requests alone, so that there are no laws: a was in it, b not.
    assert drafts.rows(["a", "b"], ["a"], running) == [0]
    assert drafts.rows(None, ["a", "b"], running) == [v1.CHOSEN, v1.LOST]
    drafts.rows(["a", "b", "c"], [], running)
    assert drafts.rows(None, ["d"], {"d"}) == [v1.CHOSEN]
    assert drafts.rows(None, ["a"], {"d"}) == [v1.CHOSEN]  # the first a has ended


# --- V1: verification -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_every_rule_verifies_what_was_packed(rule):
    batch = Batch()
    numbers = {"lenient": {"lenience": 0.8}, "top_beta": {"beta": 2, "tau": 2.0}}.get(rule, {})
    output = batch.forward(sampler(rule, **numbers), batch.step(draft=batch.laws()))
    assert output.sampled_token_ids.dtype == torch.int32
    assert torch.equal(
        output.sampled_token_ids.long(), batch.expected(rule, batch.draft, **numbers)
    )
    assert output.logprobs_tensors is None


@pytest.mark.parametrize("seed", range(5))
def test_chosen_drafts(seed):
    batch = Batch(seed=seed)
    output = batch.forward(sampler(), batch.step())
    assert torch.equal(output.sampled_token_ids.long(), batch.expected("block"))


def test_filters_of_each_request():
    batch = Batch()
    top_k = torch.tensor([2, V, 4, 3], dtype=torch.int32)
    top_p, min_p = torch.tensor([0.9, 0.5, 1.0, 0.8]), torch.tensor([0.0, 0.1, 0.0, 0.3])
    step = batch.step()._replace(facts=Facts(batch.seeds, min_p))
    output = batch.forward(sampler(), step, top_k=top_k, top_p=top_p)
    expected = batch.expected("block", top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(output.sampled_token_ids.long(), expected)


def test_a_batch_without_drafts():
    batch = Batch(counts=(0, 0, 0))
    output = batch.forward(sampler(), batch.step())
    drawn = specdec_ext.sample(
        batch.target[:, 0], seeds=batch.seeds, positions=batch.positions,
        temperature=batch.temperature, domain=1,
    )  # fmt: skip
    assert output.sampled_token_ids[:, 0].tolist() == drawn.tokens.tolist()


def test_all_greedy():
    batch = Batch()
    ours = sampler()
    ours.specdec.step = batch.step()
    output = ours.forward(batch.metadata, None, batch.logits, Sampling(None))
    assert torch.equal(output.sampled_token_ids.long(), batch.expected("greedy"))


def test_the_profiling_run_has_no_requests():
    batch = Batch()
    probs = batch.packed(batch.draft.softmax(-1), 0)
    given = Sampling(batch.temperature)
    tokens = sampler().forward(batch.metadata, probs, batch.logits, given).sampled_token_ids
    assert tokens.shape == (4, 4)


def test_a_set_acceptance_rate_is_vllms_affair():
    ours = sampler()
    ours.synthetic_mode = True
    assert ours.forward(None, None, None, None) == "vLLM's own"
    assert not v1._is_ours(ours) and v1._is_ours(sampler())


PROCESSORS = {
    "penalties": {"no_penalties": False},
    "bad_words": {"bad_words_token_ids": {0: [[3]]}},
    "allowed": {"allowed_token_ids_mask": torch.zeros(4, V, dtype=torch.bool)},
    "min_tokens": {
        "logitsprocs": SimpleNamespace(non_argmax_invariant=[SimpleNamespace(min_toks={0: 1})])
    },
    "unknown": {"logitsprocs": SimpleNamespace(non_argmax_invariant=[object()])},
    "thinking": {
        "thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_work_on_copies_of_all_rows(name):
    batch = Batch()
    logits = batch.logits
    ours = sampler()
    ours.specdec.step = batch.step()
    given = Sampling(batch.temperature, **PROCESSORS[name])
    output = ours.forward(batch.metadata, None, logits, given)
    assert torch.equal(logits, batch.logits)
    batch.target[..., 3] = -torch.inf  # what the stand-in's processors do
    assert torch.equal(output.sampled_token_ids.long(), batch.expected("block"))


def test_nothing_is_copied_without_processors():
    batch = Batch()
    idle = SimpleNamespace(non_argmax_invariant=[SimpleNamespace(min_toks={})])
    holder = SimpleNamespace(has_tracked_requests=lambda: False)
    given = Sampling(batch.temperature, logitsprocs=idle, thinking_budget_state_holder=holder)
    logits = batch.logits
    assert sampler()._specdec_processed(batch.metadata, logits, given) is logits


@pytest.mark.parametrize("processed", [False, True])
def test_logprobs(processed):
    batch = Batch()
    ours = sampler()
    ours.is_processed_logprobs_mode = processed
    top_k = torch.full((4,), 4, dtype=torch.int32)
    output = batch.forward(ours, batch.step(), max_num_logprobs=2, top_k=top_k)
    likeliest, chosen = output.logprobs_tensors
    tokens = output.sampled_token_ids
    for b, n in enumerate(batch.counts):
        for i in range(n + 1):
            if tokens[b, i] < 0:
                continue
            row = batch.target[b, i]
            law = row.double().softmax(-1)
            if processed:  # vLLM takes T = 0 for 1 here
                law = filtered_law(row, float(batch.temperature[b]) or 1.0, top_k=4)
            slot = b * (batch.gamma + 1) + i
            assert chosen[slot].exp() == pytest.approx(float(law[tokens[b, i]]), abs=1e-5)
            assert likeliest[slot, 0].exp() == pytest.approx(float(law.max()), abs=1e-5)


def test_wrong_data_are_said_once(caplog, monkeypatch):
    monkeypatch.setattr(v1, "_warned", [])
    batch = Batch()
    batch.target[1] = torch.nan
    with caplog.at_level(logging.WARNING, "vllm.specdec_ext"):
        for _ in range(2):
            batch.forward(sampler(), batch.step())
    assert len(caplog.records) == 1 and "status" in caplog.text


# --- V1: what a step collects ---------------------------------------------------------------------


def runner(batch: Batch, names="abcd", last=None, laws=None, **params) -> Any:
    states = {
        name: state(name, seed=int(seed), **params.get(name, {}))
        for name, seed in zip(names, batch.seeds, strict=False)
    }
    return SimpleNamespace(
        rejection_sampler=sampler(),
        input_batch=SimpleNamespace(req_ids=list(names)),
        model_config=SimpleNamespace(seed=0),
        requests=states,
        device=CPU,
        seq_lens=torch.cat([batch.positions + batch.lengths, torch.zeros(3)]).to(torch.int32),
        _draft_probs=laws,
        _draft_prob_req_ids=last,
    )


def test_a_step_of_drawn_drafts():
    batch = Batch()
    order = [2, 0, 3, 1]  # the batch was rearranged since the round
    engine = runner(batch, last=["abcd"[b] for b in order], laws=batch.draft[order])
    engine.rejection_sampler.specdec.draws_logits = True
    step = v1.make_step(engine, batch.metadata)
    assert torch.equal(step.positions, batch.positions)
    assert step.kinds is None and step.lengths is None
    output = batch.forward(engine.rejection_sampler, step)
    assert torch.equal(output.sampled_token_ids.long(), batch.expected("block", batch.draft))


def test_a_step_of_probabilities():
    """A drafter whose tokens vLLM drew itself keeps probabilities."""
    batch = Batch()
    probs = (batch.draft / batch.temperature.clamp(min=0.1)[:, None, None]).softmax(-1)
    step = v1.make_step(runner(batch, last=list("abcd"), laws=probs), batch.metadata)
    output = batch.forward(sampler("token"), step)
    expected = specdec_ext.verify(
        batch.target, batch.tokens, draft_probs=probs, draft_lengths=batch.lengths, rule="token",
        seeds=batch.seeds, positions=batch.positions, temperature=batch.temperature,
    )  # fmt: skip
    assert torch.equal(output.sampled_token_ids.long(), expected.tokens)


def test_drafts_without_their_laws_do_not_count():
    batch = Batch()
    engine = runner(batch, last=list("abcd"), laws=batch.draft)
    engine.rejection_sampler.specdec.draws_logits = True
    engine.rejection_sampler.specdec.outstanding.rows(list("abcd"), ["b", "c", "d"], "abcd")
    engine._draft_prob_req_ids = ["b", "c", "d"]
    engine._draft_probs = batch.draft[1:]
    step = v1.make_step(engine, batch.metadata)
    assert step.lengths.tolist() == [0, 0, 2, 1]
    assert torch.equal(step.positions, batch.positions)


def test_tokens_chosen_under_a_grammar_are_said_to_be():
    batch = Batch()
    engine = runner(batch, last=list("abcd"), laws=batch.draft, c={"structured_outputs": "grammar"})
    engine.rejection_sampler.specdec.draws_logits = True
    step = v1.make_step(engine, batch.metadata)
    assert step.kinds.tolist() == [[1] * 3, [1] * 3, [0] * 3, [1] * 3]


# --- V1: drafting ---------------------------------------------------------------------------------


def test_coupled_drafts_race_on_the_targets_noise():
    """A draft that is the target itself is accepted whole, wherever the round is."""
    batch = Batch(counts=(3, 3, 3, 3), noise=0.0)
    draws = v1.Draws(Settings("coupled"), Facts(batch.seeds), batch.positions)
    batch.tokens = torch.stack(
        [draws.draw(batch.draft[:, i], Sampling(batch.temperature)) for i in range(3)], 1
    )
    output = batch.forward(sampler("coupled"), batch.step())
    assert torch.equal(output.sampled_token_ids[:, :3].long(), batch.tokens)


def test_draws_are_those_of_sample():
    batch = Batch(counts=(3, 3, 3, 3))
    draws = v1.Draws(Settings("block"), Facts(batch.seeds), batch.positions)
    one_by_one = [draws.draw(batch.draft[:, i], Sampling(batch.temperature)) for i in range(3)]
    assert torch.equal(torch.stack(one_by_one, 1), batch.tokens)
    # A drafter that gives all rows of a request at once.
    draws = v1.Draws(Settings("block"), Facts(batch.seeds), batch.positions)
    together = draws.draw(batch.draft.flatten(0, 1), Sampling(batch.temperature))
    assert torch.equal(together.view(4, 3), batch.tokens)


def test_draws_refuse_rows_that_do_not_divide():
    batch = Batch()
    draws = v1.Draws(Settings("block"), Facts(batch.seeds), batch.positions)
    with pytest.raises(ValueError, match=r"for B = 4 requests, got \[7, 11\]"):
        draws.draw(torch.zeros(7, V), Sampling(batch.temperature))


def test_under_a_grammar_the_likeliest_token_is_drafted():
    batch = Batch(counts=(3, 3, 3, 3))
    bound = torch.tensor([False, True, False, True])
    facts = Facts(batch.seeds, bound=bound)
    draws = v1.Draws(Settings("block"), facts, batch.positions)
    tokens = draws.draw(batch.draft[:, 0], Sampling(batch.temperature))
    assert torch.equal(tokens[bound], batch.draft[bound, 0].argmax(-1))
    assert torch.equal(tokens[~bound], batch.tokens[~bound, 0])
    races = v1.Draws(Settings("coupled"), facts, batch.positions)
    raced = races.draw(batch.draft[:, 0], Sampling(batch.temperature))
    batch.draw(domain=3)
    assert torch.equal(raced, batch.tokens[:, 0])


def test_a_draft_row_of_nan_gives_a_token():
    facts = Facts(torch.tensor([1]))
    draws = v1.Draws(Settings("block"), facts, torch.tensor([0]))
    assert draws.draw(torch.full((1, V), torch.nan), Sampling(torch.ones(1))).tolist() == [0]


class Proposer:
    """vLLM's drafter with a model: here one that has the same logits at every step."""

    _enable_probabilistic_draft_probs = True

    def __init__(self, logits):
        self.logits = logits

    def propose(
        self, num_speculative_tokens, common_attn_metadata, sampling_metadata,
        num_rejected_tokens_gpu=None,
    ):  # fmt: skip
        results = [
            self._sample_from_logits(self.logits, sampling_metadata)
            for _ in range(num_speculative_tokens)
        ]
        return torch.stack([tokens for tokens, _ in results], 1), results[0][1]

    def _sample_from_logits(self, logits, sampling_metadata):
        return torch.full((len(logits),), 7), "probabilities"


class OurProposer(Proposer):
    propose = v1._wrap_propose(Proposer.propose, Settings("coupled"))
    _sample_from_logits = v1._wrap_sample_from_logits(Proposer._sample_from_logits)


def test_a_round_begins_behind_what_was_emitted():
    batch = Batch(counts=(3, 3, 3, 3))
    engine = runner(batch)
    proposer = OurProposer(batch.draft[:, 0])
    rejected = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    given = dict(
        num_speculative_tokens=2, sampling_metadata=Sampling(batch.temperature),
        common_attn_metadata=SimpleNamespace(seq_lens=engine.seq_lens),
        num_rejected_tokens_gpu=rejected,
    )  # fmt: skip
    # Before the first step nobody has said whose drafter this is.
    assert proposer.propose(**given)[1] == "probabilities"
    v1.make_step(engine, batch.metadata)
    proposer.specdec_runner = engine
    tokens, laws = proposer.propose(**given)
    assert laws is proposer.logits and engine.rejection_sampler.specdec.draws_logits
    # The text before the step, 3 - rejected accepted tokens, and one more.
    positions = batch.positions + 3 - rejected + 1
    for i in range(2):
        expected = specdec_ext.sample(
            proposer.logits, seeds=batch.seeds, positions=positions + i, domain=3,
            temperature=batch.temperature,
        )  # fmt: skip
        assert torch.equal(tokens[:, i], expected.tokens)
    # A loop of another drafter draws by itself: these are probabilities.
    assert proposer._sample_from_logits(proposer.logits, given["sampling_metadata"])[1] != laws
    assert not engine.rejection_sampler.specdec.draws_logits


def test_min_p_is_refused_where_vllm_refuses_more():
    calls = []
    validate = v1._wrap_validate(lambda self, config: calls.append(config))
    config = SimpleNamespace(rejection_sample_method="standard")
    validate(SimpleNamespace(logit_bias=None, min_p=0.2), config)
    assert calls == []
    validate(SimpleNamespace(logit_bias={3: 1.0}, min_p=0.2), config)
    synthetic = SimpleNamespace(rejection_sample_method="synthetic")
    validate(SimpleNamespace(logit_bias=None, min_p=0.2), synthetic)
    assert calls == [config, synthetic]


# --- V2 -------------------------------------------------------------------------------------------


class Base2:
    """The V2 runner's RejectionSampler."""

    synthetic_conditional_rates = None
    watermark_key = None
    num_speculative_steps = 3

    def __init__(self, sampler):
        self.sampler = sampler

    def _verify(self, *arguments):
        return "vLLM's own"


class Processor:
    def __init__(self, name):
        self.used = np.zeros(6, bool)

    def apply(self, logits, context):
        if self.used[context.idx_mapping_np].any():
            logits[:, 3] = -torch.inf
        return logits


def state_of(values, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    return SimpleNamespace(gpu=tensor, np=tensor.numpy())


class Batch2(Batch):
    """The same batch, its requests in other slots of the runner's states."""

    slots = torch.tensor([4, 1, 0, 5])

    def states(self, **filters):
        def scattered(values, default, dtype):
            whole = torch.full((6,), default, dtype=dtype)
            whole[self.slots] = values.to(dtype)
            return SimpleNamespace(gpu=whole, np=whole.numpy())

        ones = torch.ones(4)
        return SimpleNamespace(
            vocab_size=V,
            seeds=scattered(self.seeds, 0, torch.int64),
            temperature=scattered(self.temperature, 0.0, torch.float32),
            top_k=scattered(filters.get("top_k", ones * V), V, torch.int32),
            top_p=scattered(filters.get("top_p", ones), 1.0, torch.float32),
            min_p=scattered(filters.get("min_p", 0 * ones), 0.0, torch.float32),
        )

    def verify(self, rule="block", draft=True, cut=None, processor=None, **filters):
        inner = SimpleNamespace(
            sampling_states=self.states(**filters),
            needs_logits_processing=np.ones(6, bool),
            logits_processors=[processor] if processor else [],
            thinking_budget_state=SimpleNamespace(enabled=False, apply=lambda *a: None),
            logprobs_mode="raw_logprobs",
            return_sampling_mask=False,
        )
        ours = v2.sampler_class(Base2, SimpleNamespace, Settings(rule))(inner)
        assert inner.specdec_sampler is ours
        first = torch.full((4, 1), 9)  # each request's last token stands before its drafts
        drafted = self.packed(torch.cat([first, self.tokens], 1), 1)
        verified = drafted.clone()
        if cut is not None:
            verified[cut:] = -1
        laws = torch.full((6, self.gamma, V), torch.nan)
        laws[self.slots] = self.draft
        owners = make_layout(self.counts, CPU).owners
        lane = torch.cat([torch.arange(n + 1) for n in self.counts])
        return ours._verify(
            self.logits,
            laws if draft else None,
            drafted,
            self.positions[owners] + lane - 1,
            torch.tensor([0, *[n + 1 for n in self.counts]]).cumsum(0).to(torch.int32),
            self.slots.to(torch.int32),
            self.slots.numpy(),
            self.slots[owners],
            lane,
            np.zeros(4),
            verified,
        )


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_v2_verifies_what_was_packed(rule):
    batch = Batch2()
    _, tokens, count = batch.verify(rule)
    expected = batch.expected(rule, batch.draft)
    assert torch.equal(tokens, expected)
    assert count.tolist() == (expected >= 0).sum(1).tolist()


def test_v2_filters_apply_to_the_target_alone():
    """The V2 runner's drafts are drawn with temperature, and without filters."""
    batch = Batch2()
    filters = dict(
        top_k=torch.tensor([2, V, 4, 3]), top_p=torch.tensor([0.9, 0.5, 1.0, 0.8]),
        min_p=torch.tensor([0.0, 0.1, 0.0, 0.3]),
    )  # fmt: skip
    _, tokens, _ = batch.verify(**filters)
    off = dict(draft_top_k=0, draft_top_p=1.0, draft_min_p=0.0)
    assert torch.equal(tokens, batch.expected("block", batch.draft, **filters, **off))


def test_v2_chosen_drafts():
    batch = Batch2()
    assert torch.equal(batch.verify(draft=False)[1], batch.expected("block"))


def test_v2_processors_work_on_copies():
    batch = Batch2()
    processor = Processor("any")
    idle = batch.verify(processor=processor)[1]
    assert torch.equal(idle, batch.expected("block", batch.draft))
    processor.used[1] = True
    logits, tokens, _ = batch.verify(processor=processor)
    assert torch.equal(logits, batch.logits)
    batch.target[..., 3] = -torch.inf
    assert torch.equal(tokens, batch.expected("block", batch.draft))


def test_v2_a_token_that_a_grammar_forbids_is_rejected_not_dropped():
    batch = Batch2(counts=(3, 3, 3, 3))
    cut = 2  # of the packed rows: from the first request's second draft token on
    batch.target[0, 1, batch.tokens[0, 1]] = -torch.inf
    _, tokens, _ = batch.verify(cut=cut)
    expected = batch.expected("block", batch.draft)
    assert torch.equal(tokens[0], expected[0])
    # Without a mask the same -1 ends the draft: it is a placeholder.
    batch = Batch2(counts=(3, 3, 3, 3))
    _, tokens, _ = batch.verify(cut=1)
    assert (tokens[0, 1:] == -1).all()


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_v2_draws_drafts_by_their_round(rule):
    batch = Batch2(counts=(3, 3, 3, 3))
    cached = []

    def gumbel_sample(
        logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting,
        logits_cache=None, logits_cache_col=None,
    ):  # fmt: skip
        cached.append(logits_cache)
        return torch.full((len(logits),), 7)

    draw = v2._wrap_gumbel_sample(gumbel_sample, Settings(rule))
    states, cache = batch.states(), torch.empty(6, 3, V)

    def drawn(slots, i, cache):
        return draw(
            batch.draft[: len(slots), i], slots, states.temperature.gpu, states.seeds.gpu,
            batch.positions[: len(slots)] - 1 + i, apply_temperature=True, is_drafting=True,
            logits_cache=cache, logits_cache_col=torch.tensor(i),
        )  # fmt: skip

    tokens = [drawn(batch.slots, i, cache) for i in range(3)]
    assert all(c is cache for c in cached) and len(cached) == 3
    for i in range(3):
        race = rule == "coupled"
        expected = specdec_ext.sample(
            batch.draft[:, i],
            seeds=batch.seeds,
            positions=batch.positions + i if race else batch.positions * 65536 + i,
            temperature=batch.temperature,
            domain=3 if race else 2,
        )
        assert torch.equal(tokens[i], expected.tokens)
    drawn(torch.tensor([-1, 0, 2, 3]), 0, cache)  # padding is drawn for, and read nowhere
    assert drawn(batch.slots, 0, None).tolist() == [7] * 4  # no law is kept: vLLM's affair


def test_v2_leaves_set_rates_and_watermarks_to_vllm():
    for name in ("synthetic_conditional_rates", "watermark_key"):
        base = type("Set", (Base2,), {name: 5})
        inner = SimpleNamespace()
        ours = v2.sampler_class(base, SimpleNamespace, Settings("block"))(inner)
        assert ours._verify(*range(11)) == "vLLM's own"
        assert not hasattr(inner, "specdec_sampler")


def test_v2_steps_without_drafts_go_the_same_way():
    call = v2._wrap_call(lambda self, logits, batch: "vLLM's own")
    batch = SimpleNamespace(idx_mapping_np=None)

    def inner(**given):
        whole = dict(get_logprobs_dims=lambda _: None, trace_replay_state=None)
        return SimpleNamespace(**{**whole, **given})

    ours = {"specdec_sampler": lambda logits, batch: "ours"}
    assert call(inner(), None, batch) == "vLLM's own"
    assert call(inner(**ours), None, batch) == "ours"
    assert call(inner(**ours, get_logprobs_dims=lambda _: (2, 0)), None, batch) == "ours"
    assert call(inner(**ours, get_logprobs_dims=lambda _: (0, 3)), None, batch) == "vLLM's own"
    assert call(inner(**ours, trace_replay_state=1), None, batch) == "vLLM's own"


# --- what is replaced, and where ------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    """Modules by the names of vLLM's, with every function that is looked at."""

    def module(name: str) -> Any:
        if name not in made:
            made[name] = types.ModuleType(name)
            monkeypatch.setitem(sys.modules, name, made[name])
        return made[name]

    made: dict[str, Any] = {}
    module("vllm").__version__ = hooks.VERSIONS[0] + ".0"
    for hook in hooks.HOOKS:
        owner = module(hook.module)
        *classes, last = hook.name.split(".")
        for name in classes:
            if not hasattr(owner, name):
                setattr(owner, name, type(name, (), {}))
            owner = getattr(owner, name)
        parameters = ", ".join(hook.parameters.split())
        found = eval(f"lambda {parameters}: None")  # noqa: S307
        old = getattr(owner, last, None)
        if isinstance(old, type):  # a class whose methods are hooks, too
            old.__init__ = eval(f"lambda self, {parameters}: None")
        else:
            setattr(owner, last, found)
    # What is replaced by name, in the modules that use it.
    module("vllm.v1.outputs").SamplerOutput = SimpleNamespace
    module("vllm.v1.worker.gpu.model_runner").RejectionSampler = None
    for name in list(made):  # import statements want the packages on the way
        parts = name.split(".")
        for i in range(1, len(parts)):
            parent = module(".".join(parts[:i]))
            parent.__path__ = []
            setattr(parent, parts[i], module(".".join(parts[: i + 1])))
    monkeypatch.setattr(plugin, "_registered", [])
    monkeypatch.setenv("SPECDEC_VLLM", "block")
    return made


def test_the_stand_in_fits(stand_in):
    assert hooks.mismatch() is None


def test_register_replaces_once(stand_in):
    runner = stand_in["vllm.v1.worker.gpu_model_runner"]
    before = runner.GPUModelRunner._sample
    plugin.register()
    once = runner.GPUModelRunner._sample
    assert once is not before and once.__wrapped__ is before
    assert runner.RejectionSampler.__name__ == "SpecdecRejectionSampler"
    second = stand_in["vllm.v1.worker.gpu.model_runner"]
    assert second.RejectionSampler.__name__ == "SpecdecRejectionSampler"
    plugin.register()
    assert runner.GPUModelRunner._sample is once


def test_register_does_nothing_unasked(stand_in, monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM", "0")
    before = stand_in["vllm.v1.worker.gpu_model_runner"].GPUModelRunner._sample
    plugin.register()
    assert stand_in["vllm.v1.worker.gpu_model_runner"].GPUModelRunner._sample is before


def test_register_says_what_is_wrong_with_the_variable(stand_in, monkeypatch):
    monkeypatch.setenv("SPECDEC_VLLM", "blok")
    with pytest.raises(ValueError, match="must begin with one of"):
        plugin.register()


def change_version(made):
    made["vllm"].__version__ = "0.99.1"


def change_signature(made):
    runner = made["vllm.v1.worker.gpu_model_runner"].GPUModelRunner
    runner._sample = lambda self, logits, metadata, more: None


def remove_function(made):
    del made["vllm.v1.worker.gpu.spec_decode.rejection_sampler"].RejectionSampler._verify


@pytest.mark.parametrize(
    "change, message",
    [
        (change_version, "version 0.99.1, where 0.32 is known"),
        (change_signature, r"_sample takes \(self, logits, metadata, more\)"),
        (remove_function, "_verify is not there"),
    ],
)
def test_another_vllm_is_left_alone(stand_in, caplog, change, message):
    import re

    change(stand_in)
    runner = stand_in["vllm.v1.worker.gpu_model_runner"].GPUModelRunner
    before = dict(vars(runner))
    with caplog.at_level(logging.INFO, "vllm.specdec_ext"):
        plugin.register()
        plugin.register()
    assert dict(vars(runner)) == before
    assert len(caplog.records) == 1 and re.search(message, caplog.text)


def test_importing_the_plugin_imports_no_vllm():
    code = "import sys, specdec_ext.engines.vllm.v1, specdec_ext.engines.vllm.v2\n"
    code += "assert 'vllm' not in sys.modules; specdec_ext.engines.vllm.register()\n"
    code += "assert 'vllm' not in sys.modules"
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    where.pop("SPECDEC_VLLM", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=where, cwd=ROOT)


def test_the_entry_point_names_register():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."vllm.general_plugins"]')[1].split("[")[0]
    module, _, name = section.split('"')[1].partition(":")
    assert getattr(__import__(module, fromlist=[name]), name) is plugin.register
