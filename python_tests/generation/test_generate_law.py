"""The law of what `generate` emits, on a table model whose logits are bit-equal in any batch."""

from __future__ import annotations

import pytest
import torch
from generate_models import TableModel, joint_law, seeded_prompts, tables

import specdec_ext
from specdec_ext import ops
from specdec_ext.decoding import Draft, GenerationError
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters.model import ModelDrafter

ALPHA = 1e-9
DRAWS = 20_000
PROMPT = [1, 2]
LENGTH = 3


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Return the p-value of a chi-square test; cells that expect fewer than 10 draws are pooled.

    With 64 cells and 20,000 draws at alpha = 1e-9, a law at chi-square divergence 0.01 (a TV of
    about 0.04 if spread evenly) is found with probability above 0.999.
    """
    order = law.argsort()
    expected, counts = counts.sum() * law[order], counts[order].double()
    pooled = int((expected.cumsum(0) < 10).sum()) + 1
    expected = torch.cat([expected[:pooled].sum()[None], expected[pooled:]])
    counts = torch.cat([counts[:pooled].sum()[None], counts[pooled:]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def p_value(
    target: TableModel,
    draft,
    temperature: float = 1.0,
    *,
    prompt: list[int] = PROMPT,
    length: int = LENGTH,
    draws: int = DRAWS,
    **options,
) -> float:
    """Generate ``draws`` times ``length`` tokens and test their joint law."""
    sequences, _ = specdec_ext.generate(
        target,
        draft,
        torch.tensor([prompt]).repeat(draws, 1),
        max_new_tokens=length,
        temperature=temperature,
        seeds=torch.arange(draws) * 7919,
        eos_token_id=(),
        **options,
    )
    vocabulary = target.config.vocab_size
    code = torch.zeros(draws, dtype=torch.int64)
    for token in sequences[:, len(prompt) :].unbind(1):
        code = code * vocabulary + token
    law = joint_law(target, prompt, length, temperature)
    return chi_square(torch.bincount(code, minlength=len(law)), law)


def test_coupled_tokens_follow_the_targets_law():
    target, draft = tables(4, noise=1.0)
    assert p_value(target, draft, gamma=2, rule="coupled") > ALPHA


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_joint_law(rule, gamma, temperature):
    target, draft = tables(4)
    assert p_value(target, draft, temperature, rule=rule, gamma=gamma) > ALPHA


def test_joint_law_of_plain_decoding():
    target, _ = tables(4)
    assert p_value(target, None) > ALPHA


@pytest.mark.thorough
def test_joint_law_with_a_smaller_and_with_a_larger_draft_vocabulary():
    target, _ = tables(4)
    for vocabulary in (3, 6):
        _, draft = tables(vocabulary, seed=1)
        assert p_value(target, draft, gamma=2) > ALPHA


def test_filters_bind_both_models():
    """top-k 2 leaves two tokens a row: nothing else is emitted, and their law is renormalised."""
    target, draft = tables(4)
    cut = target.table.clone()
    cut[cut < cut.topk(2, -1).values[..., 1:]] = -torch.inf
    filtered = TableModel(cut)
    prompts = torch.tensor([PROMPT]).repeat(DRAWS, 1)
    sequences, statistics = specdec_ext.generate(
        target, draft, prompts, max_new_tokens=2, temperature=1.0, top_k=2, gamma=2, seeds=5
    )
    law = joint_law(filtered, PROMPT, 2)
    counts = torch.bincount(sequences[:, 2] * 4 + sequences[:, 3], minlength=16)
    assert counts[law == 0].sum() == 0
    assert chi_square(counts[law > 0], law[law > 0]) > ALPHA
    assert statistics.accepted > 0


class WrongDrafter(ModelDrafter):
    """Draws from another law than the one it passes on (field note A.3)."""

    def propose(self, gamma, positions, go_on=None):
        tokens, logits, *_ = super().propose(gamma, positions)
        return Draft(tokens, None if logits is None else 2 * logits)


def test_control_draft_law_that_was_not_sampled():
    target, draft = tables(4)
    assert p_value(target, WrongDrafter(draft), gamma=2) < ALPHA


def test_control_coins_reused_from_round_to_round(monkeypatch):
    target, draft = tables(4)
    for name in ("verify", "sample"):
        original = getattr(ops, name)

        def stuck(*args, original=original, positions, **kwargs):
            return original(*args, positions=torch.zeros_like(positions), **kwargs)

        monkeypatch.setattr(ops, name, stuck)
    assert p_value(target, draft, gamma=1) < ALPHA


class GreedyDrafter(ModelDrafter):
    """Proposes its most likely token, and passes on a soft law as if it had drawn from it."""

    def _draw(self, logits, positions, i):
        return logits.argmax(-1, keepdim=True)


def test_control_greedy_draft_with_a_soft_law():
    target, draft = tables(4)
    assert p_value(target, GreedyDrafter(draft), gamma=1) < ALPHA


class PointMassDrafter(GreedyDrafter):
    """Proposes its most likely token, and says that it drew nothing."""

    def propose(self, gamma, positions, go_on=None):
        return Draft(super().propose(gamma, positions).tokens)


def test_joint_law_with_a_deterministic_drafter():
    target, draft = tables(4)
    assert p_value(target, PointMassDrafter(draft), gamma=2) > ALPHA


class StoppingDrafter(ModelDrafter):
    """Ends its draft behind an odd token, or behind an unlikely one."""

    def propose(self, gamma, positions, go_on=None):
        def may_go_on(tokens, logits):
            return (tokens % 2 == 0) & (logits.softmax(-1).amax(-1) > 0.3)

        return super().propose(gamma, positions, may_go_on)


class DroppingDrafter(ModelDrafter):
    """Ends its draft before an odd token, which it has seen."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions)
        return draft._replace(tokens=torch.where(draft.tokens % 2 == 0, draft.tokens, -1))


def test_a_draft_may_end_behind_a_token_that_it_keeps():
    target, draft = tables(4)
    assert p_value(target, StoppingDrafter(draft), gamma=3) > ALPHA


@pytest.mark.thorough
def test_control_draft_that_ends_before_a_token_that_it_has_seen():
    target, draft = tables(4)
    assert p_value(target, DroppingDrafter(draft), gamma=1) < ALPHA


@pytest.mark.thorough
@pytest.mark.parametrize("batch_mask", [False, True])
def test_control_rejected_tokens_left_in_the_cache(monkeypatch, batch_mask):
    """One too many slot kept: the law is wrong, or the table model sees that positions are."""
    target, draft = tables(4)
    rollback = CachedModel.rollback

    def lax(self, drop):
        fewer = [max(n - 1, 0) for n in drop.host]
        device = drop.device if batch_mask else (drop.device - 1).clamp(min=0)
        rollback(self, Counts(fewer, device))

    monkeypatch.setattr(CachedModel, "rollback", lax)
    try:
        assert p_value(target, draft, gamma=2) < ALPHA
    except GenerationError as error:
        assert error.status[0] == 1


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_the_target_as_its_own_draft_is_always_accepted(rule, options):
    """Bit-equal laws: h = 1 everywhere. Any slip of the draft's cache or filters would show."""
    target, _ = tables(5)
    prompts = torch.randint(0, 5, (50, 3), generator=torch.Generator().manual_seed(0))
    _, statistics = specdec_ext.generate(
        target, target, prompts, max_new_tokens=25, gamma=4, temperature=0.7, seeds=3, rule=rule,
        **options,
    )  # fmt: skip
    assert statistics.accepted_of_tested == 1.0
    assert statistics.conditional_acceptance == [1.0] * 4
    assert statistics.tokens_per_target_call == 5.0
    assert statistics.histogram == [0, 0, 0, 0, 250]


def check_batch_mates(rule):
    """What a request gets in a batch is what it gets alone."""
    target, draft = tables(6, noise=0.7)
    prompts, mask, seeds = seeded_prompts(12, 6)
    limits = [3 + 2 * row for row in range(12)]
    options = {"gamma": 3, "rule": rule, "lenience": 0.7, "pad_token_id": 0}
    temperature = [0.0, 0.5, 1.0, 1.5] * 3
    together, statistics = specdec_ext.generate(
        target, draft, prompts, attention_mask=mask, max_new_tokens=limits, seeds=seeds,
        temperature=temperature, **options,
    )  # fmt: skip
    for row in range(12):
        alone, _ = specdec_ext.generate(
            target, draft, prompts[row : row + 1, row % 5 :], max_new_tokens=limits[row],
            seeds=seeds[row : row + 1], temperature=temperature[row], **options,
        )  # fmt: skip
        new = together[row, 5:]
        assert torch.equal(new[: limits[row]], alone[0, 5 - row % 5 :])
        assert (new[limits[row] :] == 0).all()
    assert statistics.new_tokens == limits


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "lenient", "typical", "top_beta"])
def test_output_does_not_depend_on_batch_mates(rule):
    check_batch_mates(rule)


class GuessingDrafter:
    """Proposes anything, with no law, from randomness that nobody else sees."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary, self.calls = vocabulary, 0
        self.generator = torch.Generator().manual_seed(seed)

    def start(self, requests) -> None:
        assert requests.coupled and requests.domain == 3 and not requests.needs_law

    def propose(self, gamma, positions, go_on=None):
        shape = (positions.shape[0], gamma)
        return Draft(torch.randint(-1, self.vocabulary, shape, generator=self.generator))

    def commit(self, tokens, accepted) -> None:
        pass

    def select(self, rows, indices) -> None:
        pass


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8, "temperature": 0.7}], ids=str)
def test_coupled_output_does_not_depend_on_the_draft(options):
    """Equal to plain decoding, token for token, for any drafter, gamma and batch."""
    target, draft = tables(6, noise=0.7)
    prompts = torch.randint(0, 6, (5, 4), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompts)
    mask[3, :2] = 0
    seeds = torch.tensor([1, -7, 2**62, 0, 5])
    limits = [12, 9, 15, 11, 1]

    def run(drafter, rows=slice(None), **more):
        return specdec_ext.generate(
            target, drafter, prompts[rows], attention_mask=mask[rows], seeds=seeds[rows],
            max_new_tokens=limits[rows], rule="coupled", pad_token_id=0,
            **{"temperature": 1.0, **options, **more},
        )  # fmt: skip

    # Plain decoding by sample itself, at absolute positions.
    filters = {"temperature": 1.0, **options}
    expected = torch.zeros(5, 4 + max(limits), dtype=torch.int64)
    expected[:, :4] = prompts
    for b in range(5):
        for i in range(4, 4 + limits[b]):
            row = target.table[expected[b, i - 2], expected[b, i - 1]][None]
            position = torch.tensor([i - 4]) + mask[b].sum()
            drawn = ops.sample(row, seeds=seeds[b : b + 1], positions=position, domain=3, **filters)
            expected[b, i] = drawn.tokens[0]
    assert torch.equal(run(None).sequences, expected)
    kept = {}
    for name, drafter in (("draft", draft), ("target", target), ("guess", GuessingDrafter(6))):
        for gamma in (1, 2, 5):
            found = run(drafter, gamma=gamma)
            assert torch.equal(found.sequences, expected), (name, gamma)
        kept[name] = found.statistics.accepted_of_tested
    assert kept["target"] == 1.0 and kept["draft"] > kept["guess"]
    for b in range(5):
        alone = run(draft, slice(b, b + 1), gamma=3).sequences
        assert torch.equal(alone[0], expected[b, : alone.shape[1]])


def test_coupled_at_temperature_zero_is_greedy():
    target, draft = tables(6, noise=0.7)
    prompts = torch.tensor([[1, 2, 3], [4, 5, 0]])
    runs = [
        specdec_ext.generate(target, draft, prompts, max_new_tokens=9, rule=rule).sequences
        for rule in ("coupled", "block", "greedy")
    ]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_seeds_and_generator():
    target, draft = tables(8)
    prompts = torch.tensor([[1, 2, 3]] * 6)

    def run(**options):
        return specdec_ext.generate(
            target, draft, prompts, max_new_tokens=12, temperature=1.0, **options
        ).sequences

    assert torch.equal(run(seeds=4), run(seeds=4))
    assert torch.equal(run(seeds=4), run(seeds=[4, 5, 6, 7, 8, 9]))
    assert torch.equal(run(seeds=4), run(seeds=torch.arange(4, 10)))
    assert not torch.equal(run(seeds=4), run(seeds=5))
    assert len(run(seeds=4).unique(dim=0)) == 6  # one prompt, six continuations
    same = [run(generator=torch.Generator().manual_seed(9)) for _ in range(2)]
    assert torch.equal(*same)
    generator = torch.Generator().manual_seed(9)
    assert torch.equal(run(generator=generator), same[0])
    assert not torch.equal(run(generator=generator), same[0])
    torch.manual_seed(3)
    default = run()
    torch.manual_seed(3)
    assert torch.equal(run(), default)


def test_greedy_leaves_the_default_generator_alone():
    target, draft = tables(4)
    before = torch.get_rng_state()
    specdec_ext.generate(target, draft, torch.tensor([[1]]), max_new_tokens=4)
    assert torch.equal(torch.get_rng_state(), before)
