"""Alpha, the papers' acceptance rate: what the loop reports, and what policies are given for it."""

import math

import pytest
import torch
from generate_models import TableModel, tables

import specdec_ext
from specdec_ext import reference, theory
from specdec_ext.decoding import GradientAscent, HierarchicalDrafter, LookupDrafter, StackedDrafter
from specdec_ext.decoding.transfer import Transfer
from specdec_ext.decoding.trees import StaticTree

PROMPTS = torch.randint(0, 6, (3, 4), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seeds": 5, "eos_token_id": (), "pad_token_id": 0}


def run(target, draft, **options):
    given = {"max_new_tokens": 120, "gamma": 4, **SAMPLED, **options}
    return specdec_ext.generate(target, draft, PROMPTS, attention_mask=MASK, **given)


def overlap(target: TableModel, draft: TableModel, context) -> float:
    """Return sum_x min(p(x), q(x)) after two tokens, by the reference in float64."""
    rows = [model.table[context[0], context[1]] for model in (target, draft)]
    laws = [reference.law(row, temperature=0.9, top_p=0.9) for row in rows]
    return float(torch.minimum(*laws).sum())


def by_hand(target: TableModel, draft: TableModel, **options) -> tuple[float, int]:
    """Return the mean overlap at all tested draft tokens, found in the bursts, and their number."""
    bursts = []
    run(target, draft, on_round=bursts.extend, **options)
    texts = [[0, *ids[mask.bool()].tolist()] for ids, mask in zip(PROMPTS, MASK, strict=True)]
    found = []
    for burst in bursts:
        text = texts[burst.request]
        for i in range(burst.accepted + (burst.replaced is not None)):
            context = [*text, *burst.tokens[:i]][-2:]
            found.append(overlap(target, draft, context))
        text += burst.tokens
    return sum(found) / len(found), len(found)


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "typical", "lenient"])
def test_alpha_is_the_mean_overlap_where_drafts_were_tested(rule):
    target, draft = tables(6, noise=0.7)
    statistics = run(target, draft, rule=rule, measure_alpha=True).statistics
    mean, count = by_hand(target, draft, rule=rule)
    assert statistics.alpha_samples == count == statistics.accepted + statistics.rejected > 100
    assert statistics.alpha == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_measuring_changes_no_token(rule):
    target, draft = tables(6, noise=0.7)
    found = [run(target, draft, rule=rule, measure_alpha=m).sequences for m in (False, True)]
    assert torch.equal(*found)


def test_alpha_does_not_depend_on_the_rule_where_the_accepted_share_does():
    """Both are means over a thousand trials: standard errors under 0.02."""
    target, draft = tables(6, noise=1.0)
    options = {"max_new_tokens": 1000, "gamma": 7, "measure_alpha": True}
    block = run(target, draft, rule="block", **options).statistics
    token = run(target, draft, rule="token", **options).statistics
    assert block.alpha == pytest.approx(token.alpha, abs=0.02)
    assert token.accepted_of_tested == pytest.approx(token.alpha, abs=0.05)
    assert block.accepted_of_tested > block.alpha + 0.02
    # Equation 1 of Leviathan et al. with alpha says what the token rule emits in a call.
    promised = theory.expected_tokens(token.alpha, 7)
    assert token.tokens_per_target_call == pytest.approx(promised, rel=0.1)


@pytest.mark.parametrize("rule, known", [("token", True), ("block", False), ("coupled", False)])
def test_without_measuring_it_is_known_where_trials_tell(rule, known):
    statistics = run(*tables(6), rule=rule).statistics
    assert math.isnan(statistics.alpha) != known
    if known:
        assert statistics.alpha == statistics.accepted_of_tested


def test_greedy_and_deterministic_trials_tell():
    target, draft = tables(6, noise=0.7)
    greedy = run(target, draft, temperature=0.0, top_p=None, measure_alpha=True).statistics
    assert greedy.alpha == greedy.accepted_of_tested
    lookup = run(target, LookupDrafter(), rule="block", measure_alpha=True).statistics
    assert lookup.alpha == lookup.accepted_of_tested and lookup.alpha_samples > 0


class OneToken(LookupDrafter):
    """Copies one token, behind which a stack may go on."""

    def propose(self, gamma, positions, go_on=None):
        return super().propose(min(gamma, 1), positions)


@pytest.mark.parametrize("continued", [False, True])
def test_deterministic_tokens_beside_drawn_ones_are_no_samples(continued):
    """A draft that is deterministic throughout gives its trials, as it does alone in a batch."""
    target, draft = tables(6, noise=0.7)
    stacked = StackedDrafter(OneToken(), draft, continued=continued)
    statistics = run(target, stacked, rule="block", measure_alpha=True).statistics
    tested = statistics.accepted + statistics.rejected
    assert 0 < statistics.alpha < 1 and statistics.alpha_samples > 0
    assert (statistics.alpha_samples < tested) == continued


def test_statistics_add_up_and_go_to_json():
    some = run(*tables(6), measure_alpha=True).statistics
    both = some + some
    assert both.alpha == pytest.approx(some.alpha)
    assert both.alpha_samples == 2 * some.alpha_samples
    assert some.as_dict()["alpha"] == some.alpha
    assert run(*tables(6)).statistics.as_dict()["alpha"] is None


def test_trees_refuse():
    with pytest.raises(ValueError, match="measure_alpha is of chains, got a tree"):
        run(*tables(6), tree=StaticTree.from_widths([2, 1]), measure_alpha=True)


def test_a_rule_without_sampled_drafts_refuses():
    with pytest.raises(ValueError, match='measure_alpha must be False under the rule "top_beta"'):
        run(*tables(6), rule="top_beta", measure_alpha=True)


# --- policies -------------------------------------------------------------------------------------


class Watched(GradientAscent):
    """Keeps the samples that it is given."""

    def start(self, batch):
        super().start(batch)
        self.given = []

    def learn_alpha(self, samples):
        self.given += [value for row in samples for value in row]
        super().learn_alpha(samples)


@pytest.mark.parametrize("rule", ["block", "token", "coupled"])
def test_gradient_ascent_is_given_what_the_wall_time_equation_wants(rule):
    """The mean overlap under "block"; else whether each tested token was accepted."""
    target, draft = tables(6, noise=1.0)
    policy = Watched(c=0.05)
    statistics = run(target, draft, rule=rule, gamma=policy, max_new_tokens=400).statistics
    mean = sum(policy.given) / len(policy.given)
    assert len(policy.given) == statistics.accepted + statistics.rejected
    if rule == "block":
        assert mean == pytest.approx(statistics.alpha)
        assert mean < statistics.accepted_of_tested - 0.01
    else:
        assert set(policy.given) == {0.0, 1.0}
        assert mean == pytest.approx(statistics.accepted_of_tested)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_gradient_ascent_within_a_hierarchy(rule):
    target, draft = tables(6, noise=0.7)
    policy = Watched(c=0.05)
    run(target, HierarchicalDrafter(target, draft, policy, rule=rule))
    assert len(policy.given) > 50
    assert (set(policy.given) == {0.0, 1.0}) == (rule == "token")
    assert all(0 <= value <= 1 + 1e-6 for value in policy.given)


# --- drafts of the rule "top_beta" ----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_top_beta_drafts_the_arg_max(temperature):
    """As Xia et al. do (arXiv 2203.16487, eq. 7): a model accepts all of its own first choices."""
    target, _ = tables(6)
    options = {"rule": "top_beta", "beta": 1, "tau": 0.0, "temperature": temperature, "top_p": None}
    assert run(target, target, **options).statistics.accepted_of_tested == 1.0


# --- the round's transfer -------------------------------------------------------------------------


def test_transfer_gives_back_what_was_packed():
    nan, inf = float("nan"), float("inf")
    parts = (
        torch.tensor([[2**62, -1], [0, -(2**40)]]),
        torch.empty(2, 0, dtype=torch.int64),
        torch.tensor([[-0.5, nan, -inf], [1e-38, inf, 3.25]]),
        torch.tensor([7, 8], dtype=torch.int32),
        torch.tensor([0.1, -2.0]),
    )
    rows = Transfer.pack(*parts).unpack()
    assert [len(row) for row in rows] == [5, 5]
    for b, row in enumerate(rows):
        for part, found in zip(parts, row, strict=True):
            assert torch.equal(
                torch.tensor(found, dtype=part.dtype).nan_to_num(9.0), part[b].nan_to_num(9.0)
            )
            assert isinstance(found, list) == (part.dim() == 2)
