"""`generate` on tiny Hugging Face models: greedy equality, caches, compaction, controls."""

from __future__ import annotations

import pytest
import torch
from generate_models import ARCHITECTURES, pair, prompts, tables
from transformers import GPT2Config, GPT2LMHeadModel

import specdec_ext
from specdec_ext import ops
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.layers import GrowingLayer

NEW = 30
RAGGED = [7, 4, 1, 7, 5]


def greedy(model, ids, mask, new: int = NEW, **options) -> torch.Tensor:
    """Return what `model.generate` makes of each row."""
    return model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0, **options
    )


@pytest.mark.parametrize("lengths", [[7], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_plain_generate(architecture, lengths):
    target, draft = pair(architecture)
    ids, mask = prompts(lengths)
    sequences, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4
    )
    assert torch.equal(sequences, greedy(target, ids, mask))
    assert 0 < statistics.accepted_of_tested < 1  # the comparison saw rejections and acceptances
    plain, statistics = specdec_ext.generate(
        target, None, ids, attention_mask=mask, max_new_tokens=NEW
    )
    assert torch.equal(plain, sequences)
    assert statistics.tokens_per_target_call == 1.0
    assert statistics.rounds == NEW


@pytest.mark.parametrize("gamma", [1, 2, 7])
@pytest.mark.parametrize("lengths", [[6, 6, 6], RAGGED], ids=["even", "ragged"])
def test_greedy_equality_at_any_gamma(gamma, lengths):
    target, draft = pair(noise=0.015)
    ids, mask = prompts(lengths, seed=gamma)
    given = None if min(lengths) == max(lengths) else mask
    sequences, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=given, max_new_tokens=NEW, gamma=gamma
    )
    assert torch.equal(sequences, greedy(target, ids, mask))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention):
    target, draft = pair()
    for model in (target, draft):
        model.float().set_attn_implementation(attention)  # eager's softmax is float32 throughout
    ids, mask = prompts(RAGGED)
    sequences, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=3
    )
    assert torch.equal(sequences, greedy(target, ids, mask))


@pytest.mark.parametrize("lengths", [[5], [5, 2, 4]])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_padding_that_all_prompts_share(lengths, dtype):
    target, draft = pair()
    ids, mask = prompts(lengths)
    plain = greedy(target, ids, mask)
    ids, mask = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(mask, (3, 0))
    sequences, _ = specdec_ext.generate(
        target, draft, ids, attention_mask=mask.to(dtype), max_new_tokens=NEW, gamma=3
    )
    assert torch.equal(sequences[:, :8], ids)
    assert torch.equal(sequences[:, 3:], plain)


def test_a_draft_of_another_architecture_and_vocabulary():
    target, _ = pair("llama")
    draft = GPT2LMHeadModel(
        GPT2Config(vocab_size=80, n_embd=16, n_layer=1, n_head=2, n_positions=128)
    ).eval()  # more tokens than the target, and in float32
    ids, mask = prompts(RAGGED)
    for temperature in (0.0, 1.0):
        sequences, statistics = specdec_ext.generate(
            target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=3,
            temperature=temperature, seeds=0, eos_token_id=(), pad_token_id=0,
        )  # fmt: skip
        assert statistics.new_tokens == [NEW] * 5
        assert int(sequences.max()) < 67
        if temperature == 0:
            assert torch.equal(sequences, greedy(target, ids, mask))


LONG = prompts([100, 90, 98])
LIMITS = [28, 10, 20]


def up_to_position_128(target, draft):
    """The new tokens of long prompts; a row at its limit comes to have no position left."""
    ids, mask = LONG
    sequences, statistics = specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=LIMITS, gamma=5, pad_token_id=0
    )
    assert statistics.new_tokens == LIMITS
    for row, limit in enumerate(LIMITS):
        assert (sequences[row, 100 + limit :] == 0).all()
    return [row[100 : 100 + limit].tolist() for row, limit in zip(sequences, LIMITS, strict=True)]


def test_positions_up_to_the_last_one_of_the_model():
    """GPT-2 has 128 positions; a row at its limit is fed beside rows that still draft."""
    target, draft = pair("gpt2", noise=0.02)
    expected = greedy(target, *LONG, 28)
    for row, tokens in enumerate(up_to_position_128(target, draft)):
        assert tokens == expected[row, 100 : 100 + LIMITS[row]].tolist()


# --- stopping ---------------------------------------------------------------------------------


def check_stop_tokens():
    """Any token of a greedy continuation may be the stop token; nothing may follow it."""
    target, draft = pair(noise=0.01)
    ids, mask = prompts(RAGGED)
    plain = greedy(target, ids, mask)
    inside, outside = 0, 0
    for stop in plain[:, 7:].unique().tolist()[::4]:
        bursts = []
        sequences, statistics = specdec_ext.generate(
            target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4,
            eos_token_id=stop, pad_token_id=0, on_round=bursts.extend,
        )  # fmt: skip
        expected = greedy(target, ids, mask, eos_token_id=stop)
        assert torch.equal(sequences, expected)
        for burst in bursts:
            if burst.tokens[-1] == stop:
                inside += burst.accepted == len(burst.tokens)
                outside += burst.accepted < len(burst.tokens)
            assert stop not in burst.tokens[:-1]
        check(statistics, bursts)
    assert inside > 2 and outside > 2  # both kinds of end were seen


@pytest.mark.thorough
def test_stop_tokens_anywhere_in_a_burst():
    check_stop_tokens()


def check(statistics, bursts) -> None:
    """Recount the statistics from the bursts."""
    assert statistics.emitted == sum(len(burst.tokens) for burst in bursts)
    assert statistics.emitted == sum(statistics.new_tokens)
    assert statistics.accepted == sum(burst.accepted for burst in bursts)
    assert statistics.rejected == sum(burst.replaced is not None for burst in bursts)
    assert statistics.request_calls == len(bursts) == sum(statistics.histogram)
    for n, count in enumerate(statistics.histogram):
        assert count == sum(burst.accepted == n for burst in bursts)
    assert statistics.emitted == statistics.accepted + statistics.rejected + statistics.bonus


def test_several_stop_tokens_and_the_models_own():
    target, draft = pair()
    ids, mask = prompts([5, 5])
    plain = greedy(target, ids, mask)
    stops = [plain[0, 5 + 9].item(), plain[1, 5 + 4].item()]
    expected = greedy(target, ids, mask, eos_token_id=stops)
    given = specdec_ext.generate(target, draft, ids, max_new_tokens=NEW, eos_token_id=stops)
    assert torch.equal(given.sequences, expected)
    target.generation_config.eos_token_id = stops
    own = specdec_ext.generate(target, draft, ids, max_new_tokens=NEW)
    assert torch.equal(own.sequences, expected)
    none = specdec_ext.generate(target, draft, ids, max_new_tokens=NEW, eos_token_id=())
    assert torch.equal(none.sequences, plain)


def check_limit(new):
    """All rows get so many tokens, and no slot is computed for more."""
    target, draft = pair(noise=0.01)
    ids, mask = prompts([4, 3])
    limits = dict(max_new_tokens=new, gamma=4)
    specdec_ext.generate(target, draft, ids, attention_mask=mask, **limits)  # tries the models
    fed = []
    target.register_forward_pre_hook(
        lambda model, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    sequences, statistics = specdec_ext.generate(target, draft, ids, attention_mask=mask, **limits)
    # No slot past the last token is computed: of the prompt and a draft that leaves room for the
    # target's own token, then one for each token that may still be emitted.
    assert fed[:1] == ([4 + min(4, new - 1)] if new else [])
    assert all(tokens <= new - 1 for tokens in fed[1:])
    assert sequences.shape == (2, 4 + new)
    assert statistics.new_tokens == [new, new]
    assert torch.equal(sequences, greedy(target, ids, mask, max(new, 1))[:, : 4 + new])


@pytest.mark.parametrize("new", [0, 1, 2, 3, 4, 5, 6, 11])
def test_max_new_tokens_is_met_and_never_passed(new):
    check_limit(new)


# --- caches -----------------------------------------------------------------------------------


def test_draft_logits_equal_those_of_a_forward_without_cache(monkeypatch):
    """After every round, full acceptance included, the draft sees exactly what was committed."""
    target, draft = pair(noise=0.01)
    ids, mask = prompts(RAGGED)
    text = [row[start:].tolist() for row, start in zip(ids, mask.argmax(1), strict=True)]
    full_lengths = [len(row) + 100 for row in text]
    original, rounds = ops.verify, []

    def verify(logits, tokens, draft_logits, **kwargs):
        result = original(logits, tokens, draft_logits, **kwargs)
        rounds.append((logits, tokens, draft_logits, result.num_accepted))
        return result

    monkeypatch.setattr(ops, "verify", verify)

    def follow(bursts):
        logits, tokens, draft_logits, accepted = rounds[-1]
        for i, burst in enumerate(bursts):
            known = text[burst.request]
            length = min(tokens.shape[1], full_lengths[burst.request] - len(known) - 1)
            whole = torch.tensor([known + tokens[i, :length].tolist()])
            fresh = draft(whole).logits[0, len(known) - 1 : -1].float()
            torch.testing.assert_close(draft_logits[i, :length], fresh, rtol=1e-5, atol=1e-5)
            fresh = target(whole).logits[0, len(known) - 1 :].float()
            torch.testing.assert_close(logits[i, : length + 1], fresh, rtol=1e-5, atol=1e-5)
            text[burst.request] += burst.tokens

    specdec_ext.generate(
        target, draft, ids, attention_mask=mask, max_new_tokens=100, gamma=3, temperature=1.0,
        top_k=20, seeds=1, on_round=follow,
    )  # fmt: skip
    full = [(accepted == 3).tolist() for _, _, _, accepted in rounds]
    assert sum(any(f) and not all(f) for f in full) > 5  # some rows lacked two tokens, others one


def test_no_forward_beyond_gamma_a_round():
    """Full acceptance costs the draft no call of its own."""
    target, _ = tables(5)
    _, statistics = specdec_ext.generate(
        target, target, torch.tensor([[1, 2]]), max_new_tokens=24, gamma=5
    )
    assert statistics.rounds == 4
    assert statistics.draft_calls == 4 * 5


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1.0])
def test_compaction_changes_nothing_but_the_slots(monkeypatch, share):
    monkeypatch.setattr(CachedModel.__init__, "__kwdefaults__", {"room": 0, "compact_above": share})
    target, draft = pair()
    ids, mask = prompts(RAGGED)
    limits = dict(max_new_tokens=60, gamma=4)
    specdec_ext.generate(target, draft, ids, attention_mask=mask, **limits)  # tries the models
    compactions = 0
    gather = GrowingLayer.gather

    def counting(self, index):
        nonlocal compactions
        compactions += 1
        gather(self, index)

    monkeypatch.setattr(GrowingLayer, "gather", counting)
    sequences, _ = specdec_ext.generate(target, draft, ids, attention_mask=mask, **limits)
    assert torch.equal(sequences, greedy(target, ids, mask, 60))
    assert (compactions == 0) == (share == 1.0)


def test_the_cache_stays_small(monkeypatch):
    """Holes never make up more than a quarter of the slots, whatever the rows accept."""
    target, draft = tables(6, noise=1.5)
    slots = []
    rollback = CachedModel.rollback

    def watched(self, drop):
        rollback(self, drop)
        slots.append((self.slots, max(self.lengths)))

    monkeypatch.setattr(CachedModel, "rollback", watched)
    specdec_ext.generate(
        target, draft, torch.randint(0, 6, (16, 4)), max_new_tokens=60, gamma=6, temperature=1.0,
        seeds=0,
    )  # fmt: skip
    assert max(have / need for have, need in slots) <= 1 / 0.75
    assert max(have / need for have, need in slots) > 1.1


def test_one_request_has_neither_mask_nor_position_ids():
    target, draft = pair()
    seen = []
    for model in (target, draft):
        model.register_forward_pre_hook(
            lambda model, args, kwargs: seen.append(set(kwargs)), with_kwargs=True
        )
    ids, mask = prompts([5, 9])
    specdec_ext.generate(target, draft, ids[:1], attention_mask=mask[:1], max_new_tokens=9)
    assert seen and not any(keys & {"attention_mask", "position_ids"} for keys in seen)


def test_requests_that_end_leave_the_batch():
    target, draft = tables(5)
    for _ in range(2):  # the first time the model is also asked how its rows may lie
        target.fed.clear()
        specdec_ext.generate(
            target, draft, torch.tensor([[1, 2]] * 3), max_new_tokens=[2, 6, 12], gamma=2
        )
    batches = [batch for batch, _ in target.fed]
    assert batches == sorted(batches, reverse=True) and set(batches) == {3, 2, 1}


# --- mistakes that must show (field note A.7) -----------------------------------------------------


def outcome(target, draft, ids, mask):
    """Return the greedy sequences and the acceptance rate, or the error."""
    try:
        sequences, statistics = specdec_ext.generate(
            target, draft, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4
        )
    except (specdec_ext.decoding.GenerationError, IndexError, RuntimeError) as error:
        return error
    return sequences, statistics.accepted_of_tested


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("lengths", [[7], RAGGED], ids=["one", "ragged"])
def test_control_crop_off_by_one(monkeypatch, off, lengths):
    target, draft = pair()
    ids, mask = prompts(lengths)
    right = outcome(target, draft, ids, mask)
    rollback = CachedModel.rollback

    def wrong(self, drop):
        moved = [max(n + off, 0) for n in drop.host]
        rollback(self, Counts(moved, (drop.device + off).clamp(min=0)))

    monkeypatch.setattr(CachedModel, "rollback", wrong)
    found = outcome(target, draft, ids, mask)
    assert isinstance(found, Exception) or not torch.equal(found[0], right[0])


def test_control_rejected_slots_zeroed_instead_of_masked(monkeypatch):
    target, draft = pair()
    ids, mask = prompts(RAGGED)
    right = outcome(target, draft, ids, mask)
    forward = CachedModel.forward

    def zeroed(self, tokens, *, last_only=False):
        if self._mask is not None:
            holes = self._mask[:, : self.slots] == 0
            for layer in self.cache.layers:
                layer.keys.masked_fill_(holes[:, None, :, None], 0)
                layer.values.masked_fill_(holes[:, None, :, None], 0)
            self._mask[:, : self.slots] = 1
        return forward(self, tokens, last_only=last_only)

    monkeypatch.setattr(CachedModel, "forward", zeroed)
    found = outcome(target, draft, ids, mask)
    assert isinstance(found, Exception) or not torch.equal(found[0], right[0])


def test_control_last_draft_token_never_run(monkeypatch):
    """The draft skips a token after full acceptance: the output stays, the acceptance falls."""
    target, _ = pair()
    ids, mask = prompts([7])
    commit = ModelDrafter.commit

    def forgetful(self, tokens, accepted):
        commit(self, tokens, accepted)
        self._missing = self._missing[:, -1:]

    monkeypatch.setattr(ModelDrafter, "commit", forgetful)
    sequences, rate = outcome(target, target, ids, mask)
    assert torch.equal(sequences, greedy(target, ids, mask))
    assert rate < 1.0
