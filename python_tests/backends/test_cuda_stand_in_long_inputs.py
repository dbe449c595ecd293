"""The CUDA kernels on the host, on more than a block keeps at once.

32 nodes of a chain are looked at together (kNodesAtOnce in csrc/cuda/chain_nodes.cuh): what comes
after them takes another round, in which the block rule may forget and look again. As many tiles of
a row are summed up together (kWaiting in csrc/cuda/scan.cuh).
"""

from __future__ import annotations

import math
import random

import fibres
import pytest
import torch

import specdec_ext  # noqa: F401
from specdec_ext.contract import CHAIN_RULES, VerifyResult
from specdec_ext.testing import assert_tokens_match, make_case

threads_of_a_block = pytest.mark.parametrize("threads", fibres.THREADS)
MANY = max(fibres.THREADS)  # so that a block's warps go their own ways


def assert_near(got, expected, atol=1e-6):
    """Compare outcomes: the same tokens, probabilities up to rounding."""
    for name in ("tokens", "num_accepted", "status"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
    for name in ("logprobs", "accept_probs"):
        a, b = getattr(got, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=1e-3, atol=atol, equal_nan=True)


@threads_of_a_block
@pytest.mark.parametrize("rule", ["block", "token", "lenient"])
@pytest.mark.parametrize("gamma", [31, 32, 70])
def test_deterministic_drafts_longer_than_a_look(threads, rule, gamma):
    # 32 nodes are looked at together: drafts end before and behind a border, or are accepted whole.
    options = dict(draft="none", filters=False, masks=False, ragged=False, greedy_rows=False)
    case = make_case(
        5, batch=6, gamma=gamma, vocab=1100, rule=rule, full_accept_probs=True, **options
    )
    target = case.inputs["target_logits"].mul_(0.1)
    tokens = target[:, :gamma].argmax(2)
    target[:, :gamma].scatter_(2, tokens[..., None], 12.0)  # p is about 0.99
    case.inputs["uniforms"][:, :gamma] = 1e-4
    ends = [gamma, gamma - 1, 0, 30, 15, gamma // 2]
    for b, end in enumerate(ends[1:], 1):
        target[b, end, tokens[b, end]] = -60.0
    case = case.replace(draft_tokens=tokens, temperature=torch.ones(6))
    expected = case.run(torch.ops.specdec.verify)
    assert expected.num_accepted.tolist() == ends
    assert_near(VerifyResult(*fibres.operators(threads).verify(**case.inputs)), expected)


@threads_of_a_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gamma", [31, 32, 70])
def test_sampled_drafts_longer_than_a_look(threads, dtype, gamma):
    # The draft's laws are near the target's, so that masses are asked for all along the chain; and
    # some tokens that the target hardly has, or a draft's law that is missing, end it.
    options = dict(draft="logits", filters=False, masks=False, ragged=False, greedy_rows=False)
    case = make_case(7, batch=8, gamma=gamma, vocab=1100, rule="block", **options)
    generator = torch.Generator().manual_seed(gamma)
    draft = case.inputs["draft_logits"].mul_(0.5)
    noise = torch.randn(draft.shape, generator=generator)
    target = case.inputs["target_logits"]
    target[:, :gamma] = draft + 0.1 * noise
    target[:, gamma] = noise[:, 0]
    tokens = draft.argmax(2)
    for b, end in enumerate([gamma - 1, 0, 30, 15, gamma // 2]):
        target[b, end, tokens[b, end]] = -60.0
    draft[5, gamma // 2] = math.nan
    target[6, gamma - 1] = math.nan
    given = dict(target_logits=target.to(dtype), draft_logits=draft.to(dtype), draft_tokens=tokens)
    case = case.replace(temperature=None, draft_temperature=None, draft_kinds=None, **given)
    expected = case.run(torch.ops.specdec.verify)
    asked = (expected.accept_probs > 0) & (expected.accept_probs < 1)
    assert asked.sum() > gamma and asked[:, 2 * gamma // 3 :].sum() > 4
    assert expected.status.tolist()[:6] == [0] * 5 + [4]
    for _ in range(6):
        uniforms = torch.rand(8, gamma + 1, generator=generator, dtype=torch.float64)
        case = case.replace(uniforms=uniforms)
        result = VerifyResult(*fibres.operators(threads).verify(**case.inputs))
        assert_near(result, case.run(torch.ops.specdec.verify), atol=1e-4)


@pytest.mark.every("kind")
@pytest.mark.parametrize("kind", ["greedy", "draft is the target", "top_k"])
@pytest.mark.parametrize("gamma", [33, 70])
def test_sampled_drafts_longer_than_a_look_that_ask_for_no_sums(kind, gamma):
    # No sum over tiles is asked for (or, with top_k, few: shortlists have the masses). Then blocks
    # do not meet before one looks at the first nodes once more.
    generator = torch.Generator().manual_seed(gamma)
    batch, vocab = 3, 300
    target = torch.randn(batch, gamma + 1, vocab, generator=generator)
    draft = target[:, :gamma].clone()
    given = dict(rule="block", temperature=torch.ones(batch))
    if kind == "greedy":
        given |= dict(temperature=torch.zeros(batch), draft_temperature=torch.ones(batch))
    if kind == "top_k":
        draft += 0.3 * torch.randn(draft.shape, generator=generator)
        given |= dict(top_k=torch.full((batch,), 20, dtype=torch.int32))
    tokens = (target[:, :gamma] if kind == "greedy" else draft).argmax(2)
    if kind == "greedy":  # the last is accepted whole
        for b, end in enumerate([gamma - 1, 31]):
            tokens[b, end] = (tokens[b, end] + 1) % vocab
    for seed in range(4):
        fibres.seed(MANY, seed)
        given["uniforms"] = torch.rand(batch, gamma + 1, generator=generator, dtype=torch.float64)
        expected = VerifyResult(*torch.ops.specdec.verify(target, tokens, draft, **given))
        assert (expected.accept_probs[:, 32:] > 0).any()
        result = fibres.operators(MANY).verify(target, tokens, draft, **given)
        assert_near(VerifyResult(*result), expected, atol=1e-4)


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", ["block", "token"])
def test_greedy_drafts_without_laws_longer_than_a_look(rule):
    # The token after an early end is known without a draw; its log-probability is 0.
    generator = torch.Generator().manual_seed(3)
    ends, gamma = [32, 33, 45, 69], 70
    target = torch.randn(len(ends), gamma + 1, 300, generator=generator)
    tokens = target[:, :gamma].argmax(2)
    for b, end in enumerate(ends):
        tokens[b, end] = (tokens[b, end] + 1) % 300
    uniforms = torch.rand(len(ends), gamma + 1, generator=generator, dtype=torch.float64)
    given = dict(rule=rule, temperature=torch.zeros(len(ends)), uniforms=uniforms)
    expected = VerifyResult(*torch.ops.specdec.verify(target, tokens, **given))
    assert expected.num_accepted.tolist() == ends
    for seed in range(4):
        fibres.seed(MANY, seed)
        result = VerifyResult(*fibres.operators(MANY).verify(target, tokens, **given))
        assert_near(result, expected)


def a_long_chain(seed):
    """Arguments of `verify`: any rule, draft and filters, requests that differ, broken tokens."""
    choose = random.Random(seed).choice
    generator = torch.Generator().manual_seed(seed)
    batch, gamma, vocab = choose([1, 3]), choose([31, 33, 45, 64, 70]), choose([97, 300, 2100])
    rule, laws = choose(["block", "block", *CHAIN_RULES]), choose(["none", "logits", "probs"])
    target = 2 * torch.randn(batch, gamma + 1, vocab, generator=generator)
    noise = torch.randn(batch, gamma, vocab, generator=generator)
    # Were they the same but for rounding, the block rule's probabilities would be rounding errors.
    draft = target[:, :gamma] + choose([0.1, 0.5]) * noise
    tokens = draft.argmax(2)
    for b in range(batch):
        end = choose(range(3 * gamma // 2))
        if end < gamma:
            tokens[b, end] = choose([int((tokens[b, end] + 1) % vocab), -1, vocab + 5])

    def each(values, dtype=torch.float32):
        return torch.tensor([choose(values) for _ in range(batch)], dtype=dtype)

    given = dict(target_logits=target, draft_tokens=tokens, rule=rule)
    given |= dict(temperature=each([0.0, 1.0, 0.3]), full_accept_probs=choose([False, True]))
    if laws == "logits":
        given |= dict(draft_logits=draft, draft_temperature=each([0.0, 1.0, 1.0]))
    if laws == "probs":
        given |= dict(draft_probs=draft.softmax(2))
    if choose([True, False]):
        given |= dict(top_k=each([0, 5, 20, 80], torch.int32))
    if choose([True, False, False]):
        given |= dict(top_p=each([1.0, 0.9, 0.3]))
    if rule == "coupled":
        return given | dict(seeds=torch.arange(batch) + seed, positions=torch.arange(batch))
    uniforms = torch.rand(batch, gamma + 1, generator=generator, dtype=torch.float64)
    return given | dict(uniforms=uniforms * choose([1, 0.01]))


@pytest.mark.every("seed")
@pytest.mark.parametrize("seed", range(60))
def test_any_long_chain(seed):
    given = a_long_chain(seed)
    expected = VerifyResult(*torch.ops.specdec.verify(**given))
    fibres.seed(MANY, seed)
    result = VerifyResult(*fibres.operators(MANY).verify(**given))
    assert_near(result, expected, atol=1e-2)  # the block rule sums rounding errors along a chain


@threads_of_a_block
def test_lists_over_more_tiles_than_a_block_keeps(threads):
    # So many rows that a block takes all tiles of one, which are of 512 entries for 32 threads.
    vocab = 40 * 16 * threads
    case = make_case(7, batch=16, gamma=5, vocab=vocab, rule="block", draft="lists", listed=64)
    expected = case.run(torch.ops.specdec.verify)
    result = VerifyResult(*fibres.operators(threads).verify(**case.inputs))
    assert_tokens_match(result, expected, case)
