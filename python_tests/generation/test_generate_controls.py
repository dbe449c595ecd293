"""Mistakes planted in the loop: the checks that the loop passes must find each (field notes A)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from generate_models import TableModel, TableWithStates, pair, prompts, tables
from test_generate_edges import (
    check_criteria,
    check_stop_sequences,
    check_stop_strings,
    law_of,
    never_the_next,
    sampled,
)
from test_generate_interface import check_example_by_hand
from test_generate_law import ALPHA, check_batch_mates, chi_square
from test_generate_models import RAGGED, check_limit, check_stop_tokens, greedy

import specdec_ext
from specdec_ext import ops
from specdec_ext.decoding import (
    GenerationError,
    LookupDrafter,
    Statistics,
    chain_generation,
    stats,
)
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.chain_generation import ChainGeneration, last_tokens
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.drafting import allowed
from specdec_ext.decoding.processors import Processors
from specdec_ext.decoding.stopping import Stops

pytestmark = pytest.mark.thorough

NEW = 24


# --- checks that are only here ------------------------------------------------------------------


def check_greedy(drafter=None):
    """Rows are those of transformers; one request alone, and a ragged batch."""
    target, draft = pair(noise=0.02)
    total = Statistics(4)
    for lengths in ([7], RAGGED):
        ids, mask = prompts(lengths)
        found, statistics = specdec_ext.generate(
            target, drafter or draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4,
            eos_token_id=(), pad_token_id=0,
        )  # fmt: skip
        assert torch.equal(found, greedy(target, ids, mask, NEW))
        total += statistics
    assert total.rejected > 0
    assert drafter or total.accepted > 0


def check_request_calls():
    """A request has in a batch the rounds that it has alone: its own acceptance counts."""
    target, draft = tables(6, noise=0.7)
    ids = torch.randint(0, 6, (6, 3), generator=torch.Generator().manual_seed(2))
    run = partial(specdec_ext.generate, target, draft, max_new_tokens=NEW, gamma=3)
    together = run(ids)
    alone = [run(ids[b : b + 1]) for b in range(6)]
    assert torch.equal(together.sequences, torch.cat([found.sequences for found in alone]))
    for name in ("request_calls", "drafted", "accepted", "rejected"):
        counts = [getattr(found.statistics, name) for found in alone]
        assert getattr(together.statistics, name) == sum(counts)
    assert together.statistics.rounds == max(found.statistics.rounds for found in alone)


def check_counts_alike():
    """Plain and speculative decoding of the same text count the same tokens, the EOS included."""
    target, draft = pair(noise=0.02)
    ids, mask = prompts([6, 3, 5])
    whole = greedy(target, ids, mask, NEW)[:, 6:]
    options = {
        "attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": whole[1, 6].item(),
        "pad_token_id": 66,
    }  # fmt: skip
    ends = [next((n for n, t in enumerate(r, 1) if t == whole[1, 6]), NEW) for r in whole]
    assert min(ends) < max(ends)
    for drafter in (None, draft, LookupDrafter()):
        _, statistics = specdec_ext.generate(target, drafter, ids, **options)
        assert statistics.new_tokens == ends and statistics.emitted == sum(ends)
        kinds = statistics.accepted + statistics.rejected + statistics.bonus
        assert kinds == statistics.emitted
        assert drafter is not None or statistics.tokens_per_target_call == 1


class ReadsStates(ModelDrafter):
    """Wants the target's states of the prompts, which are run alone for it."""

    reads_features = True

    def take_features(self, features, tokens, gained):
        assert features.shape[1] > 0


def check_times(monkeypatch):
    """On a clock that models alone move, by a second a token: whose call it is, in its phase.

    What is run of the prompts alone is no part of decoding; what rides on the first round is.
    """
    for reads in (False, True):
        target, draft = tables(6, noise=0.7)
        target = TableWithStates(target.table)
        models, now, spent = {"target": target, "draft": draft}, [0.0], {"target": [], "draft": []}

        def spend(name, models=models, now=now, spent=spent):
            spent[name].append(models[name].fed[-1][1])
            now[0] += spent[name][-1]

        ids = torch.randint(0, 6, (1, 40), generator=torch.Generator().manual_seed(3))
        drafter = ReadsStates(draft) if reads else draft
        specdec_ext.generate(target, drafter, ids, max_new_tokens=2)  # models are asked only once
        for name, model in models.items():
            model.register_forward_hook(lambda *_, name=name, spend=spend: spend(name))
        monkeypatch.setattr(
            stats, "time", SimpleNamespace(perf_counter=lambda now=now: float(now[0]))
        )
        _, statistics = specdec_ext.generate(target, drafter, ids, max_new_tokens=NEW, gamma=3)
        assert spent["draft"][0] == 40  # the last token is what it drafts from
        assert spent["target"][:2] == [39, 4] if reads else spent["target"][0] == 39 + 4
        alone = 39 if reads else 0
        rounds = {name: sum(calls) for name, calls in spent.items()}
        rounds["target"] -= alone
        assert statistics.rounds == len(spent["target"]) - reads
        assert statistics.seconds == {"prefill": alone, "verify": 0.0, "rest": 0.0, **rounds}
        assert statistics.decode_seconds == sum(rounds.values())
        assert statistics.tokens_per_second == NEW / sum(rounds.values())


class SharedRows(TableModel):
    """Gives one row for every slot of every request, and no memory to each: a broadcast view."""

    def forward(self, input_ids, **options):
        super().forward(input_ids, **options)
        kept = options.get("logits_to_keep") or input_ids.shape[1]
        return SimpleNamespace(logits=self.table[:1, :1].expand(len(input_ids), kept, -1))


def check_law_under_a_processor_that_writes():
    """Two tokens' joint law; a row that others share must stay as the model gave it."""
    target, _ = tables(5)
    row = target.table[0, 0].clone()
    target, draft = SharedRows(row.expand(5, 5, 5).clone()), tables(5)[1]
    law = law_of(target, [never_the_next], 2, 1.0)
    counts = sampled(target, draft, 2, temperature=1.0, gamma=2, logits_processor=never_the_next)
    assert counts[law == 0].sum() == 0
    assert chi_square(counts[law > 0], law[law > 0]) > ALPHA
    assert torch.equal(target.table[0, 0], row)


CHECKS = {
    "greedy": check_greedy,
    "request calls": check_request_calls,
    "counts alike": check_counts_alike,
    "processor that writes": check_law_under_a_processor_that_writes,
    "greedy lookup": lambda: check_greedy(LookupDrafter()),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_loop_passes(name):
    CHECKS[name]()


def test_times(monkeypatch):
    check_times(monkeypatch)


@pytest.fixture(autouse=True, scope="module")
def tried():
    """The loop tries a class of models once: before anything is planted."""
    check_greedy()
    check_batch_mates("block")


def must_fail(check, *arguments, by=AssertionError):
    with pytest.raises(by):
        check(*arguments)


# --- A.7: caches --------------------------------------------------------------------------------


def test_full_ids_fed_again_with_a_cache(monkeypatch):
    prefill, forward = CachedModel.prefill, CachedModel.forward

    def keep(self, input_ids, attention_mask, *, rides=False):
        self.prompt = input_ids
        prefill(self, input_ids, attention_mask)

    def again(self, tokens, *, last_only=False):
        whole = torch.cat([self.prompt[: len(tokens)], tokens], 1)
        return forward(self, whole, last_only=last_only)[:, -tokens.shape[1] :]

    monkeypatch.setattr(CachedModel, "prefill", keep)
    monkeypatch.setattr(CachedModel, "forward", again)
    must_fail(check_greedy)


# --- A.12: ends ---------------------------------------------------------------------------------


def keep_the_burst(kept):
    """Plant: a request ends with the burst in which it met a stop."""

    def wrong(self, prompt, before, burst, b=0):
        return None if kept(self, prompt, before, burst, b) is None else len(burst)

    return wrong


def look_at_the_last(kept):
    """Plant: stops are looked for when a burst has ended."""

    def wrong(self, prompt, before, burst, b=0):
        return len(burst) if kept(self, prompt, before + burst[:-1], burst[-1:], b) else None

    return wrong


STOPPING = {
    "tokens": check_stop_tokens,
    "sequences": lambda: check_stop_sequences("chain"),
    "strings": check_stop_strings,
    "criteria": lambda: check_criteria("chain"),
}


@pytest.mark.parametrize("plant", [keep_the_burst, look_at_the_last])
@pytest.mark.parametrize("kind", STOPPING)
def test_tokens_behind_an_end(monkeypatch, kind, plant):
    monkeypatch.setattr(Stops, "kept", plant(Stops.kept))
    must_fail(STOPPING[kind])


@pytest.mark.parametrize("new", [2, 5, 11])
def test_overshoot(monkeypatch, new):
    """By up to gamma: drafts are as long as ever, and the last burst is kept whole."""

    def emitted(self, b, outcome):
        return outcome.tokens[: outcome.accepted + 1]

    def roomy(self):
        return allowed(self.policy, self.drafter, [1000] * len(self.running))

    monkeypatch.setattr(ChainGeneration, "_allowed", roomy)
    monkeypatch.setattr(ChainGeneration, "_emitted", emitted)
    must_fail(check_limit, new)


def test_statistics_not_cut_with_the_output(monkeypatch):
    append = ChainGeneration._append

    def wrong(self, i, outcome, length, accept_probs):
        found = append(self, i, outcome, length, accept_probs)
        missing = min(outcome.accepted, length) - found.accepted  # accepted behind the end
        for n in range(found.accepted, found.accepted + missing):
            self.statistics.tested[n] += 1
            self.statistics.passed[n] += 1
        return found

    monkeypatch.setattr(ChainGeneration, "_append", wrong)
    must_fail(check_stop_tokens)
    must_fail(check_example_by_hand)


def test_caches_not_cut_with_the_output(monkeypatch):
    monkeypatch.setattr(CachedModel, "rollback", lambda self, *args, **how: None)
    must_fail(check_greedy)


# --- A.13: processors that write ------------------------------------------------------------------


def test_processors_write_into_the_models_rows(monkeypatch):
    class Unprotected(Processors):
        def chain(self, running, drafted, logits, **how):
            for b, draft in enumerate(drafted):
                for i in range(logits.shape[1]):
                    ids = torch.tensor([self._texts.text(b) + draft[:i]])
                    self._given[0](ids, logits[b, i, None])
            return logits

    monkeypatch.setattr(chain_generation, "Processors", Unprotected)
    must_fail(check_law_under_a_processor_that_writes)


# --- A.15: batches --------------------------------------------------------------------------------


def test_the_shortest_rows_acceptance_for_all(monkeypatch):
    """The text stays: what shows is that rows have more rounds than alone."""
    verify = ops.verify

    def shortest(*args, **kwargs):
        found = verify(*args, **kwargs)
        fewest = found.num_accepted.min()
        behind = torch.arange(found.tokens.shape[1]) > fewest
        return found._replace(
            tokens=found.tokens.masked_fill(behind, -1),
            num_accepted=fewest.expand(len(found.tokens)).clone(),
        )

    monkeypatch.setattr(ops, "verify", shortest)
    check_greedy()
    must_fail(check_request_calls)


def test_seeds_of_batch_slots(monkeypatch):
    """Who leaves the batch changes what the others draw."""
    keep = ChainGeneration._keep

    def wrong(self, indices):
        seeds = self.seeds
        rows = keep(self, indices)
        self.seeds = seeds[: len(indices)]
        return rows

    monkeypatch.setattr(ChainGeneration, "_keep", wrong)
    must_fail(check_batch_mates, "block")


def test_padding_that_is_seen(monkeypatch):
    """What stands before a prompt depends on the longest one of the batch."""
    prefill = CachedModel.prefill
    monkeypatch.setattr(
        CachedModel, "prefill", lambda self, ids, mask, **how: prefill(self, ids, None, **how)
    )
    must_fail(check_batch_mates, "block", by=GenerationError)  # the table model gives NaN there
    must_fail(check_greedy)


def test_empty_slots_reach_the_embedding(monkeypatch):
    """A lookup that has nothing to propose for a row leaves -1 there."""

    class Unclamped(torch.Tensor):
        def clamp(self, *args, **kwargs):
            return self.as_subclass(torch.Tensor)

    call = CachedModel._call
    monkeypatch.setattr(
        CachedModel, "_call",
        lambda self, tokens, **how: call(self, tokens.as_subclass(Unclamped), **how),
    )  # fmt: skip
    must_fail(CHECKS["greedy lookup"], by=IndexError)


def test_empty_slots_are_taken_for_the_last_token(monkeypatch):
    """The last column of the verified tokens is -1 in every row that rejected."""

    def last(history, last, width):
        end = Counts([history.shape[1] - 1] * len(last.host), last.device)
        return last_tokens(history, end, width)

    monkeypatch.setattr("specdec_ext.decoding.chain_generation.last_tokens", last)
    must_fail(check_greedy)


# --- A.16: statistics -----------------------------------------------------------------------------


def test_acceptance_rate_by_drafted_tokens(monkeypatch):
    rate = property(lambda self: self.accepted / self.drafted)
    monkeypatch.setattr(Statistics, "accepted_of_tested", rate)
    must_fail(check_example_by_hand)


def test_bonus_tokens_counted_as_accepted(monkeypatch):
    accepted = property(lambda self: self.emitted - (sum(self.tested) - sum(self.passed)))
    monkeypatch.setattr(Statistics, "accepted", accepted)
    must_fail(check_example_by_hand)


def test_prefill_in_the_time_of_decoding(monkeypatch):
    whole = property(lambda self: sum(self.seconds.values()))
    with monkeypatch.context() as planted:
        planted.setattr(Statistics, "decode_seconds", whole)
        must_fail(check_times, planted)
    start = stats.Clock.start
    monkeypatch.setattr(
        stats.Clock, "start",
        lambda self, phase: start(self, "target" if phase == "prefill" else phase),
    )  # fmt: skip
    must_fail(check_times, monkeypatch)


@pytest.mark.parametrize("kind", ["padding counted", "end not counted"])
def test_the_baselines_tokens_counted_differently(monkeypatch, kind):
    result = ChainGeneration.result

    def wrong(self):
        sequences, statistics = result(self)
        if statistics.drafted == 0:  # plain decoding
            width = sequences.shape[1] - self.settings.prompts.shape[1]
            statistics.new_tokens = [
                width if kind == "padding counted" else n - (b in self.ended)
                for b, n in enumerate(statistics.new_tokens)
            ]
        return sequences, statistics

    monkeypatch.setattr(ChainGeneration, "result", wrong)
    must_fail(check_counts_alike)
