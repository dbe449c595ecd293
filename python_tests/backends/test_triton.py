"""The Triton backend, written for its interpreter: few requests, every rule and option.

What other files say about all backends it joins by conftest's INTERPRETED, on a GPU as a whole.
"""

from __future__ import annotations

import importlib
import math
from importlib.util import find_spec

import pytest
import torch
from conftest import CPU, REFERENCE, TRITON, f64
from test_parity import RULES, VARIANTS
from test_tree import one_tree, quiet

import specdec_ext
from specdec_ext import ops
from specdec_ext.testing import (
    TreeCase,
    assert_tokens_match,
    assert_trees_match,
    chain_as_tree,
    exact_law,
    exact_tree_law,
    make_case,
    toy_models,
)

if not find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl
from test_philox import KNOWN_ANSWERS

from specdec_ext._fake import FAKES
from specdec_ext.triton.laws import LAW_FIELDS
from specdec_ext.triton.philox import philox4x32_10
from specdec_ext.triton.race import exponential_noise

OPERATORS = torch.ops.specdec_triton


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def moved(value):
    return value.to(TRITON.device) if isinstance(value, torch.Tensor) else value


def compare(case):
    """Equal to the reference, or excused, which is rare; and equal in everything to itself."""
    excused = assert_tokens_match(
        TRITON.run(case), REFERENCE.run(case), case, tolerance=TRITON.tolerance
    )
    assert excused == 0


# ---- parity -------------------------------------------------------------------------------------

# Every variant with two rules, every rule with a third of the variants.
PAIRS = [
    (variant, RULES[(turn + half) % 6]) for turn, variant in enumerate(VARIANTS) for half in (0, 3)
]


@pytest.mark.parametrize("variant, rule", PAIRS)
def test_verify(variant, rule):
    compare(make_case(31, rule=rule, **{"batch": 4, **VARIANTS[variant]}))


OPTIONS = [
    dict(rule="lenient", lenience=0.3),
    dict(rule="lenient", lenience=0.1, full_accept_probs=True),
    dict(rule="top_beta", beta=1),
    dict(rule="top_beta", beta=2, tau=0.1),
    dict(rule="top_beta", beta=17, tau=50.0, full_accept_probs=True),
    dict(rule="top_beta", tau=0.0),
    dict(rule="typical", epsilon=0.3, delta=0.9),
    dict(rule="typical", epsilon=5.0, delta=0.2),
    dict(rule="typical", delta=9.0, full_accept_probs=True, raw_logprobs=True),
    dict(rule="token", full_accept_probs=True, draft_filters=True),
    dict(rule="block", full_accept_probs=True, raw_logprobs=True, draft="probs"),
    dict(rule="greedy", full_accept_probs=True, raw_logprobs=True),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    compare(make_case(32, batch=5, **options))


@pytest.mark.thorough
def test_more_columns_than_a_step_takes():
    # 16 columns are looked at together: drafts of 15, 16 and 40 end, or go on, at a border.
    for gamma, rule in ((15, "token"), (16, "block"), (40, "block"), (33, "lenient")):
        case = make_case(
            33, batch=2, gamma=gamma, rule=rule, vocab=4,
            filters=False, masks=False, ragged=False, greedy_rows=False,
        )  # fmt: skip
        # The draft is the target: all is accepted, or all up to a token far down.
        target = case.inputs["target_logits"]
        draft = target[:, :gamma].clone()
        tokens = target[:, :gamma].argmax(2)
        draft[1, gamma - 2] = torch.where(torch.arange(4) == tokens[1, gamma - 2], 9.0, -9.0)
        target[1, gamma - 2, tokens[1, gamma - 2]] = -9.0
        changed = case.replace(draft_logits=draft, draft_tokens=tokens)
        result = TRITON.run(changed)
        assert result.num_accepted.tolist() == [gamma, gamma - 2]
        assert assert_tokens_match(result, REFERENCE.run(changed), changed) == 0


@pytest.mark.parametrize("rule", ["block", "typical"])
def test_rows_that_overflow_their_lists(rule):
    # Thousands of logits within a hair of each other: selections go through the row itself.
    case = make_case(34, batch=3, gamma=1, vocab=5000, rule=rule, ragged=False, masks=False)
    flat = {k: v * 1e-3 for k, v in case.inputs.items() if k in ("target_logits", "draft_logits")}
    params = dict(
        temperature=torch.tensor([1.0, 0.7, 1.3]),
        top_k=torch.tensor([3000, 0, 0]),
        top_p=torch.tensor([0.9, 0.8, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.9985]),
    )
    compare(case.replace(**flat, **params))


# ---- nothing depends on company, place or splits ------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["block", "token", "typical"])
def test_alone_or_in_a_batch(rule):
    case = make_case(35, batch=4, gamma=2, vocab=5003, rule=rule, draft_filters=True, philox=True)
    together = TRITON.run(case)
    order = [2, 0, 3, 1, 2]
    same(TRITON.run(case.select(order)), [output[order] for output in together])
    for b in (0, 3):
        same(TRITON.run(case.select([b])), [output[[b]] for output in together])


@pytest.mark.thorough
@pytest.mark.parametrize("programs", [7, 4096])
def test_splits_change_nothing(monkeypatch, programs):
    launch = importlib.import_module("specdec_ext.triton.launch")
    case = make_case(36, batch=2, gamma=2, vocab=13_001, draft_filters=True)
    row, u = case.inputs["target_logits"][:, 0], case.inputs["uniforms"][:, 0]
    params = {k: case.inputs[k] for k in ("temperature", "top_k", "top_p", "min_p")}

    def everything():
        return (
            *TRITON.run(case),
            *TRITON.row_law(row, **params),
            *TRITON.sample(row, u, **params),
            TRITON.acceptance(row, row.flip(-1), **params),
        )

    monkeypatch.setattr(launch, "PROGRAMS", 1)
    expected = everything()
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    assert launch.tiling(13_001).splits(2) > 1
    same(everything(), expected)


def test_vocabularies_and_their_tiles():
    tiling = importlib.import_module("specdec_ext.triton.launch").tiling
    assert [tuple(tiling(v)) for v in (1, 128, 129, 4096, 4097)] == [
        (128, 1), (128, 1), (256, 1), (4096, 1), (4096, 2),
    ]  # fmt: skip
    assert tuple(tiling(7, 9001)) == (4096, 3)


# ---- exact laws ---------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rule, vocab, gamma, options",
    [
        ("token", 3, 1, {}),
        ("block", 2, 2, {}),
        ("token", 2, 1, dict(as_probs=True)),
        ("block", 3, 1, dict(temperature=0.5)),
    ],
    ids=str,
)
def test_emitted_law_is_the_targets(rule, vocab, gamma, options):
    # Steps are found on multiples of 2^-14: a bias of more than a few of them would be seen.
    target, draft = toy_models(41, vocab, gamma)
    law = exact_law(TRITON.verify, target, draft, rule=rule, bits=14, **options)
    assert law.tv < 3e-4
    assert abs(float(law.num_accepted.sum()) - 1) < 1e-9


@pytest.mark.thorough
def test_exact_law_sees_a_wrong_q():
    # The q that is passed is not the law that was sampled.
    target, draft = toy_models(41, 3, 1)

    def wrong(*args, draft_logits, **kwargs):
        return TRITON.verify(*args, draft_logits=draft_logits / 2, **kwargs)

    assert exact_law(wrong, target, draft, rule="token", bits=14).tv > 0.03


# ---- randomness ---------------------------------------------------------------------------------


@triton.jit
def encrypt(words, answers, count, BLOCK: tl.constexpr):
    """Philox on a table of [count, 6] words."""
    row = tl.arange(0, BLOCK)
    inside = row < count
    base = words + row * 6
    c0 = tl.load(base, mask=inside, other=0).to(tl.uint64)
    c1 = tl.load(base + 1, mask=inside, other=0).to(tl.uint64)
    c2 = tl.load(base + 2, mask=inside, other=0).to(tl.uint64)
    c3 = tl.load(base + 3, mask=inside, other=0).to(tl.uint64)
    k0 = tl.load(base + 4, mask=inside, other=0).to(tl.uint64)
    k1 = tl.load(base + 5, mask=inside, other=0).to(tl.uint64)
    c0, c1, c2, c3 = philox4x32_10(k1 << 32 | k0, c0, c1, c2, c3)
    tl.store(answers + row * 4, c0.to(tl.int64), mask=inside)
    tl.store(answers + row * 4 + 1, c1.to(tl.int64), mask=inside)
    tl.store(answers + row * 4 + 2, c2.to(tl.int64), mask=inside)
    tl.store(answers + row * 4 + 3, c3.to(tl.int64), mask=inside)


def test_philox_known_answers():
    words = torch.tensor([[*counter, *key] for counter, key, _ in KNOWN_ANSWERS])
    words = words.to(TRITON.device)
    answers = torch.zeros(len(words), 4, dtype=torch.int64, device=TRITON.device)
    encrypt[(1,)](words, answers, len(words), BLOCK=triton.next_power_of_2(len(words)))
    assert answers.tolist() == [list(expected) for _, _, expected in KNOWN_ANSWERS]


@pytest.mark.thorough
def test_seeds_equal_their_uniforms():
    case = make_case(42, batch=4, gamma=3, rule="token", philox=True, stream=255)
    coins = TRITON.uniforms(case.inputs["seeds"], case.inputs["positions"], 4, stream=255)
    given = case.replace(seeds=None, positions=None, uniforms=coins)
    same(TRITON.run(given), TRITON.run(case))
    strided = case.replace(
        seeds=torch.stack([case.inputs["seeds"]] * 3, 1)[:, 1],
        positions=torch.stack([case.inputs["positions"]] * 2, 1)[:, 0],
    )
    same(TRITON.run(strided), TRITON.run(case))


# ---- the last draw ------------------------------------------------------------------------------


def test_equal_laws_leave_no_residual():
    # p = q to the last bit, and a rejected token that the residual would exclude: drawn from p.
    row = torch.randn(1, 1, 300, generator=torch.Generator().manual_seed(0))
    case = make_case(43, batch=1, gamma=1, vocab=300, filters=False, greedy_rows=False)
    for u in (0.1, 0.6):
        # One token has q = 1 and p = 1: the coin 1 - 2^-53 still accepts it, so reject elsewhere.
        twice = case.replace(
            target_logits=row.expand(1, 2, 300),
            draft_logits=row,
            draft_tokens=torch.tensor([[5]]),
            draft_lengths=None,
            temperature=None,
            uniforms=f64([[1 - 2**-53, u]]),
            rule="lenient",
            lenience=1.0,
        )
        compare(twice)


def test_residual_weights_that_are_all_rounded_to_zero():
    # Where a residual has no weight, by rounding or because the laws are equal, the target's law is
    # what is left.
    verify = importlib.import_module("specdec_ext.triton.verify")
    launch = importlib.import_module("specdec_ext.triton.launch")
    probs = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]], device=TRITON.device)
    rows = launch.rows_of(probs.log())
    laws = launch.compute_laws(launch.tiling(4), launch.batch_of(rows, launch.NO_SAMPLING), 1)
    assert laws.shape == (1, LAW_FIELDS.value)
    for u, expected in ((0.3, 0), (0.6, 1), (0.9, 3)):
        task = f64([[0, 1, 1.0, 0.0, 2, u]]).to(TRITON.device)
        sums = torch.zeros(1, 1, dtype=torch.int64, device=TRITON.device)
        accepted = torch.zeros(1, dtype=torch.int32, device=TRITON.device)
        tokens = torch.full((1, 1), -1, device=TRITON.device)
        logprobs = torch.zeros(1, 1, device=TRITON.device)
        launch.launch(
            verify.draw_last_tokens,
            1,
            *(rows, verify.NO_BATCH.rows, verify.Laws(laws, None), task, verify.NO_CHILDREN),
            *(sums, accepted, tokens, logprobs, 0, 1),
            RACED=False,
            TILE=128,
        )
        assert tokens.tolist() == [[expected]]
        assert logprobs.item() == pytest.approx(float(probs[0, 0, expected].log()), abs=1e-6)


# ---- masks, reduced vocabularies, races ---------------------------------------------------------


def random_words(seed, *shape):
    """Masks that allow three tokens of four; the first row allows none."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (2, *shape), generator=generator).to(torch.int32)
    words = words[0] | words[1]
    words.flatten(0, -2)[0] = 0
    return words


def booleans(words, vocab):
    """[..., W] words as [..., V] booleans."""
    return (words[..., None] >> torch.arange(32) & 1).bool().flatten(-2)[..., :vocab]


def hidden(values, allowed, fill):
    """`values` with `fill` where a token is not allowed, or is none."""
    allowed = torch.nn.functional.pad(allowed, (0, values.shape[-1] - allowed.shape[-1]))
    return torch.where(allowed, values, fill)


def agree(name, *args, **kwargs):
    """What Triton returns, after a comparison with the CPU's operator."""
    results = [getattr(backend, name)(*args, **kwargs) for backend in (TRITON, CPU)]
    got, expected = ([r] if isinstance(r, torch.Tensor) else r for r in results)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    return results[0]


MASKED = [
    dict(rule="block", draft_filters=True),
    dict(rule="token", draft="probs", packed=True, full_accept_probs=True),
    dict(rule="lenient", draft_vocab=90, raw_logprobs=True),
    dict(rule="top_beta", tau=9.0, dtype=torch.bfloat16),
    dict(rule="typical"),
    dict(rule="coupled", philox=True, packed=True),
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", MASKED, ids=str)
def test_masks_hide_as_minus_infinity_does(options):
    # 71 tokens: the third word is a part. What it hides may be anything.
    case = make_case(46, batch=3, gamma=2, vocab=71, **options)
    words = random_words(46, 3, 3, 3)
    allowed = booleans(words, 71)
    anything, nothing = dict(allowed_mask=words), {}
    for name, fill in (
        ("target_logits", -torch.inf),
        ("draft_logits", -torch.inf),
        ("draft_probs", 0),
    ):
        rows = case.inputs.get(name)
        if rows is None:
            continue
        masks = allowed if name == "target_logits" else allowed[:, :2]
        if rows.dim() == 2:  # packed: whose mask is it?
            index = case.inputs["target_rows" if name == "target_logits" else "draft_rows"]
            masks = torch.empty(len(rows), 71, dtype=torch.bool).index_put_((index,), masks)
        anything[name] = hidden(rows, masks, torch.nan)
        nothing[name] = hidden(rows, masks, fill)
    result = agree("verify", **case.replace(**anything).inputs)
    same(TRITON.run(case.replace(**nothing)), result)
    assert result.status[0] & 1 and not (result.status & 1).all()


def test_masked_rows():
    generator = torch.Generator().manual_seed(47)
    rows = torch.randn(3, 70, generator=generator)
    words = random_words(47, 3, 6)[:, 1:4]  # any row stride
    filters = dict(temperature=torch.tensor([1.0, 0.6, 0.0]), top_k=torch.tensor([0, 9, 0]))
    noise = dict(seeds=torch.arange(3) - 1, positions=torch.tensor([5, -1, 2**62]), stream=7)
    anything = hidden(rows, booleans(words, 70), torch.nan)
    nothing = hidden(rows, booleans(words, 70), -torch.inf)
    mask = dict(allowed_mask=words)
    law = agree("row_law", anything, **filters, **mask)
    same(TRITON.row_law(nothing, **filters), law)
    assert law.argmax[0] == -1
    for domain in (2, 3):
        drawn = agree("sample", anything, **noise, **filters, domain=domain, draft_index=4, **mask)
        same(TRITON.sample(nothing, **noise, **filters, domain=domain, draft_index=4), drawn)
    found = agree("acceptance", anything, anything.flip(0), **filters, **mask)
    assert found.isnan().tolist() == [True, False, True]


MAPPED = [
    dict(rule="block", draft_filters=True, allowed_mask=random_words(48, 4, 3, 3)),
    dict(rule="block", draft="probs", id_dtype=torch.int32),
    dict(rule="token", kinds="mixed"),
    dict(rule="lenient", packed=True, allowed_mask=random_words(49, 4, 3, 3)),
]


@pytest.mark.thorough
@pytest.mark.parametrize("options", MAPPED, ids=lambda options: "-".join(map(str, options)))
def test_reduced_vocabularies(options):
    # The draft's row at 50 tokens, in any order, is the same row with nothing at the others.
    words = options.get("allowed_mask")
    drawn = {name: value for name, value in options.items() if name != "allowed_mask"}
    case = make_case(48, batch=4, gamma=2, vocab=71, **drawn).replace(allowed_mask=words)
    drafted = case.inputs["draft_tokens"].unique()
    others = torch.randperm(71, generator=torch.Generator().manual_seed(48))
    drafted = drafted[drafted >= 0]
    ids = torch.cat([others[~torch.isin(others, drafted)], drafted])[-50:]
    name = "draft_probs" if "draft_probs" in case.inputs else "draft_logits"
    rows = case.inputs[name][..., ids]
    spread = torch.full_like(case.inputs[name], 0.0 if name == "draft_probs" else -torch.inf)
    spread[..., ids] = rows
    result = agree("verify", **case.replace(draft_token_ids=ids, **{name: rows}).inputs)
    plain = TRITON.run(case.replace(**{name: spread}))
    for field in ("tokens", "num_accepted", "status"):
        assert torch.equal(getattr(result, field), getattr(plain, field))
    assert 0 < result.num_accepted.sum() < 8


def test_reduced_rows():
    generator = torch.Generator().manual_seed(49)
    target, rows = torch.randn(4, 71, generator=generator), torch.randn(4, 40, generator=generator)
    ids = torch.randperm(71, generator=generator)[:40].to(torch.int32)
    spread = torch.full((4, 71), -torch.inf)
    spread[:, ids] = rows
    sampling = dict(temperature=torch.tensor([1.0, 0.7, 0.0, 1.0]))
    theirs = dict(draft_temperature=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    mask = random_words(49, 4, 3)
    own = dict(draft_token_ids=torch.stack([ids, ids + 99], 1)[:, 0])  # any stride
    found = agree("acceptance", target, rows, **sampling, **theirs, allowed_mask=mask, **own)
    plain = TRITON.acceptance(target, spread, **sampling, **theirs, allowed_mask=mask)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0, equal_nan=True)
    noise = dict(seeds=torch.arange(4), positions=torch.arange(4))
    # Two words of a mask, and no token from 64 on; a race is that of the tokens.
    drawn = agree("sample", rows, **noise, **sampling, domain=3, allowed_mask=mask[:, :2], **own)
    spread[:, 64:] = -torch.inf
    assert torch.equal(
        drawn.tokens,
        TRITON.sample(spread, **noise, **sampling, domain=3, allowed_mask=mask).tokens,
    )
    drawn = agree("sample", rows, **noise, **sampling, **own)
    places = TRITON.sample(rows, **noise, **sampling)
    assert torch.equal(drawn.tokens, ids[places.tokens].long())
    same(drawn[1:], places[1:])


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [71, "twice"])
def test_no_map(broken):
    case = make_case(50, batch=3, gamma=1, vocab=71, draft_vocab=5, rule="token", ragged=False)
    ids = torch.tensor([3, 70, 9, 8, 11])
    ids[4] = ids[0] if broken == "twice" else broken
    rows = dict(draft_token_ids=ids)
    result = agree("verify", **case.replace(**rows).inputs)
    assert (result.status & 8).bool().all()
    logits = case.inputs["draft_logits"][:, 0]
    assert agree("acceptance", case.inputs["target_logits"][:, 0], logits, **rows).isnan().all()
    # Without a draft row, and where the rule does not ask for the map.
    empty = case.replace(
        draft_tokens=torch.zeros(3, 0, dtype=torch.int64),
        target_logits=case.inputs["target_logits"][:, :1],
        draft_logits=case.inputs["draft_logits"][:, :0],
        uniforms=case.inputs["uniforms"][:, :1],
        **rows,
    )
    assert agree("verify", **empty.inputs).status.tolist() == [8, 8, 8]
    assert agree("verify", **empty.replace(rule="typical").inputs).status.tolist() == [0, 0, 0]


@pytest.mark.parametrize("wild, drawn", [(-1, False), (2**31, False), (2**31 - 1, True)])
def test_tokens_that_sample_cannot_return(wild, drawn):
    ids = torch.tensor([3, wild, 3, 4, 5])
    found = agree("sample", torch.zeros(2, 5), f64([0.3, 0.99]), draft_token_ids=ids)
    assert found.tokens.tolist() == ([wild, 5] if drawn else [-1, -1])
    assert found.logprobs.isnan().any() != drawn


def test_races_over_tiles():
    generator = torch.Generator().manual_seed(51)
    rows = torch.randn(2, 9001, generator=generator)
    ids = torch.randperm(12_000, generator=generator)[:9001]
    noise = dict(seeds=torch.tensor([-5, 2**62]), positions=torch.tensor([2**63 - 1, 0]), domain=3)
    agree("sample", rows, **noise, draft_index=2, stream=255)
    agree("sample", rows, **noise, draft_token_ids=ids, top_k=torch.tensor([2000, 0]))
    # A verify call races with the noise of its rows' positions.
    target = rows.unflatten(0, (1, 2))
    at = dict(seeds=noise["seeds"][:1], positions=noise["positions"][:1])
    first = TRITON.sample(rows[:1], **at, domain=3).tokens
    second = TRITON.sample(rows[1:], **at, domain=3, draft_index=1).tokens
    result = agree("verify", target, first[None], **at, rule="coupled")
    assert result.tokens.tolist() == [[*first.tolist(), *second.tolist()]]
    assert result.accept_probs.tolist() == [[1.0]]


def test_of_those_who_arrive_at_once_the_first_wins():
    race = importlib.import_module("specdec_ext.triton.race")
    launch = importlib.import_module("specdec_ext.triton.launch")
    times = torch.full((3, 150), torch.inf, dtype=torch.float64)
    times[0, [3, 70, 149]] = 2.0
    times[1, [64, 63, 100]] = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    times[2, 149] = 7.0
    winners = torch.arange(150, dtype=torch.int32).expand(3, 150) * 4096 + 5
    laws = torch.ones(3, LAW_FIELDS.value, dtype=torch.float64)
    laws = laws.to(TRITON.device)
    launch.launch(
        race.finish_races, 3, laws, moved(times), moved(winners.contiguous()), 150, num_warps=1
    )
    assert laws[:, -1].tolist() == [3 * 4096 + 5, 100 * 4096 + 5, 149 * 4096 + 5]


@triton.jit
def write_noise(words, noise, count, BLOCK: tl.constexpr):
    """Noise of a table of words."""
    row = tl.arange(0, BLOCK)
    inside = row < count
    found = exponential_noise(tl.load(words + row, mask=inside, other=0).to(tl.uint64))
    tl.store(noise + row, found, mask=inside)


def test_noise_is_log1p_to_a_few_ulp():
    launch = importlib.import_module("specdec_ext.triton.launch")
    generator = torch.Generator().manual_seed(52)
    words = [0, 1, 2, 3, 2**10, 2**11 + 1, 2**53, 2**63 - 1, 2**63, 2**64 - 2**11, 2**64 - 1]
    words += [2**k + 2 ** (k // 2) for k in range(2, 64)]
    words += [
        word % 2**64
        for word in torch.randint(-(2**63), 2**63 - 1, (400,), generator=generator).tolist()
    ]
    signed = torch.tensor([word - 2**64 if word >= 2**63 else word for word in words])
    noise = torch.zeros(len(words), dtype=torch.float64, device=TRITON.device)
    block = triton.next_power_of_2(len(words))
    launch.launch(write_noise, 1, moved(signed), noise, len(words), BLOCK=block)
    for word, found in zip(words, noise.tolist(), strict=True):
        u = min((float(word) + 0.5) * 2.0**-64, 1.0 - 2.0**-53)
        assert found == pytest.approx(-math.log1p(-u), rel=8e-16, abs=0)


# ---- trees --------------------------------------------------------------------------------------


def compare_trees(case):
    """Equal to the reference, and what it was."""
    result = TRITON.run_tree(case)
    assert assert_trees_match(result, REFERENCE.run_tree(case), case) == 0
    return result


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        dict(kinds="mixed", draft_filters=True, batch=6, gamma=4),
        dict(vocab=9001, dtype=torch.bfloat16, filters=False, batch=2, gamma=3, draft_vocab=5000),
    ],
    ids=str,
)
def test_a_chain_is_block_verification_to_the_bit(options):
    case = make_case(53, **options)
    chain, tree = TRITON.run(case), TRITON.run_tree(chain_as_tree(case))
    same([tree.accept_probs[:, 1:]], [chain.accept_probs])
    for name in ("tokens", "num_accepted", "logprobs", "status"):
        same([getattr(tree, name)], [getattr(chain, name)])


def star(kinds, tokens, q, p, rule):
    """A root with many children, none of which is accepted if it can be helped."""
    size = len(tokens) + 1
    parents, coins = [-1] + [0] * (size - 1), quiet(size)
    return one_tree(parents, [-1, *tokens], [0, *kinds], p, q, coins, rule=rule)


def crowded(tokens, mass, seed):
    """A law over 9,001 tokens, three tiles, with so much on those of a list."""
    weights = torch.rand(9001, generator=torch.Generator().manual_seed(seed)).double()
    weights[tokens] *= mass / (1 - mass) * weights.sum() / weights[tokens].sum()
    return (weights / weights.sum()).tolist()


# More than a search takes at once, all over the tiles.
MANY = [(k * 1237 + 4090) % 9001 for k in range(36)]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["traversal", "recursive"])
def test_many_children_without_replacement(rule):
    # The last one is drawn from so little of q that it is summed.
    case = star([2] * 37, [*MANY, 100], crowded(MANY, 0.99, 54), crowded([5], 0.1, 55), rule)
    result = compare_trees(case)
    assert result.num_accepted.item() == 0 and result.tokens[0, 0] not in [*MANY, 100]
    assert result.accept_probs[0, -1] == pytest.approx(0.2813, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("rule, fixed", [("traversal", 0.98), ("recursive", 0.4)])
def test_many_deterministic_children_beside_the_rest(rule, fixed):
    # Tokens repeat; what the rest has of q is summed or, where there is enough, a difference.
    tokens, kinds = [*MANY[:20], *MANY[10:], 777], [0] * 46 + [3]
    case = star(kinds, tokens, crowded(MANY, fixed, 54), crowded(MANY, 0.5, 55), rule)
    result = compare_trees(case)
    assert result.num_accepted.item() == 0 and result.tokens[0, 0] not in tokens
    probs = result.accept_probs[0, 1:]
    assert [k for k in range(47) if probs[k] == 0] == list(range(20, 30))
    assert probs[-1] == pytest.approx(0.5654, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["traversal", "recursive"])
def test_deep_trees(rule):
    # Two chains side by side, index by index; the first is accepted up to node 61, the second not.
    size = 131
    parents = torch.arange(size)[None] - 2
    parents[0, :3] = torch.tensor([-1, 0, 0])
    tokens = torch.arange(size)[None] % 2
    coins = torch.where(torch.arange(size)[None] < 61, 0.0, 1 - 2.0**-53).double()
    logits = torch.tensor([0.0, 1.0]).expand(1, size, 2)
    result = compare_trees(
        TreeCase(
            dict(target_logits=logits, tokens=tokens, parents=parents, uniforms=coins, rule=rule)
        )
    )
    assert result.num_accepted.item() == 31
    assert result.path[0, :31].tolist() == list(range(1, 62, 2))


@pytest.mark.thorough
def test_law_of_a_tree_is_the_targets():
    # A child from the rest, a deterministic one. Steps are found on multiples of 2^-10.
    parents, kinds = [-1, 0, 0], [0, 3, 0]
    target, draft = toy_models(55, 2, 1)
    law = exact_tree_law(TRITON.verify_tree, parents, kinds, target, draft, bits=10)
    assert law.tv < 4e-3
    assert abs(float(law.num_accepted.sum()) - 1) < 1e-9


# ---- operators ----------------------------------------------------------------------------------


def named(name, namespace="specdec"):
    return getattr(getattr(torch.ops, namespace), name).default


@pytest.mark.parametrize("name", FAKES)
def test_schemas_are_those_of_the_extension(name):
    own = str(named(name, "specdec_triton")._schema)
    assert own.removeprefix("specdec_triton::") == str(named(name)._schema).removeprefix(
        "specdec::"
    )


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("device", ["CUDA", "XPU"])
def test_devices_without_kernels_of_the_extension_are_served(name, device):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{name}", device)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec_triton::{name}", device)


def test_opcheck():
    # Accepted drafts, so that no output is NaN, which opcheck takes as different from itself.
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 3, 9, generator=generator, device="cpu")
    tokens, draft = target[:, :2].argmax(-1), target[:, :2].clone()
    seeds, coins = torch.arange(2), torch.zeros(2, 3, dtype=torch.float64)
    top_k = torch.tensor([2, 3])
    nodes, parents = torch.nn.functional.pad(tokens, (1, 0)), torch.tensor([[-1, 0, 1]] * 2)
    greedy = dict(seeds=seeds, positions=seeds, temperature=torch.zeros(2))
    calls = [
        ("row_law", (target[:, 0],), dict(top_k=top_k)),
        ("sample", (target[:, 0],), dict(seeds=seeds, positions=seeds, stream=3)),
        ("verify", (target, tokens, draft), dict(uniforms=coins)),
        ("verify", (target, tokens), dict(rule="top_beta", full_accept_probs=True)),
        ("verify_tree", (target, nodes, parents, target), greedy),
        ("acceptance", (target[:, 0], draft[:, 1]), dict(top_k=top_k)),
        ("uniforms", (seeds, seeds, 4), {}),
    ]
    for name, args, kwargs in calls:
        args = tuple(map(moved, args))
        kwargs = {key: moved(value) for key, value in kwargs.items()}
        torch.library.opcheck(named(name, "specdec_triton"), args, kwargs)


@pytest.mark.thorough
def test_fullgraph_equals_eager():
    def step(target, tokens, draft, seeds):
        result = specdec_ext.verify(
            target * 1.0, tokens, draft, seeds=seeds, positions=seeds, top_p=0.9, backend="triton"
        )
        return (*result, result.num_accepted + 1)

    torch.compiler.reset()
    inputs = make_case(44, batch=2, gamma=2, vocab=9, filters=False, ragged=False).inputs
    args = [inputs[k] for k in ("target_logits", "draft_tokens", "draft_logits")]
    args = [moved(value) for value in (*args, torch.arange(2))]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    same(compiled(*args), step(*args))


def test_backend_by_name():
    case = make_case(45, batch=3, gamma=2, vocab=9)
    inputs = {key: moved(value) for key, value in case.inputs.items()}
    result = specdec_ext.verify(**inputs, backend="triton")
    assert isinstance(result, ops.VerifyResult)
    assert assert_tokens_match(result, CPU.run(case), case) == 0
    with pytest.raises(ValueError, match="^verify: rule must be one of"):
        specdec_ext.verify(**{**inputs, "rule": "magic"}, backend="triton")


def test_gradients_do_not_pass():
    logits = torch.randn(2, 5, device=TRITON.device).requires_grad_()
    assert not any(output.requires_grad for output in OPERATORS.row_law(logits))
    assert not torch.ops.specdec._prepare_acceptance(logits, logits).requires_grad


# ---- where it is absent -------------------------------------------------------------------------

SCRIPT = """
import sys
MISSING = len(sys.argv) > 1
if MISSING:
    sys.modules["triton"] = None
import torch, specdec_ext
from specdec_ext import backend
imported = "triton" in sys.modules and not MISSING
print("imported", imported)
torch.cuda.is_available = torch.xpu.is_available = lambda: False
print("absent", backend.absences()["triton"])
row = torch.zeros(1, 4)
for call in (
    lambda: specdec_ext.row_law(row, backend="triton"),
    lambda: torch.ops.specdec_triton.row_law(row),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
print("auto", specdec_ext.row_law(row).argmax.item())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("missing", [False, True])
def test_absence(run_python, missing):
    done = run_python(SCRIPT, *["missing"] * missing, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    reason = "triton is not installed" if missing else "no GPU here"
    imported, absent, explicit, operator, auto = done.stdout.splitlines()
    assert imported == "imported False"  # the package does without it until an operator needs it
    assert absent.startswith(f"absent {reason}")
    assert explicit.startswith(f"ValueError row_law: backend 'triton' is absent: {reason}")
    expected = "is not installed" if missing else "needs GPU tensors, got cpu"
    assert operator.startswith("RuntimeError row_law: backend 'triton'") and expected in operator
    assert auto == "auto 0"


def test_same_words_as_the_cpu():
    # Arguments are checked by the same code; only the numbers of a message can differ.
    logits = torch.zeros(2, 4, 5)
    for call in (
        dict(target_logits=logits, draft_tokens=torch.zeros(3)),
        dict(target_logits=logits, draft_tokens=torch.zeros(2, 3, dtype=torch.int64)),
        dict(target_logits=logits[..., :0], draft_tokens=torch.zeros(2, 3, dtype=torch.int64)),
    ):
        words = []
        for backend in (CPU, TRITON):
            with pytest.raises(ValueError) as raised:
                backend.verify(**call)
            words.append(str(raised.value))
        assert words[0] == words[1]
