"""Plain sampling, our loop and transformers' assisted generation: one law of two tokens."""

from __future__ import annotations

import pytest
import torch
from generate_models import GROUPED, perturbed
from test_generate_edges import filtered
from test_generate_law import ALPHA, GreedyDrafter, chi_square
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.generation import utils as generation_utils

import specdec_ext
from specdec_ext.decoding.drafters.model import ModelDrafter

VOCABULARY = 6
PROMPT = [1, 4, 2]
FILTERS = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
DRAWS = 20_000  # of ours, in one batch
CALLS = 500  # of transformers', which has no batches there
# Power: the law has 14 pairs. A law whose odd pairs gain and whose even pairs lose, TV 0.22 in all,
# is found by 500 draws at alpha = 1e-9 with probability 0.99, by either test (300 simulations); by
# 250 draws one of TV 0.3. Field note A.3: a greedy draft passed off as sampled is off by 0.38.


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(3)
    target = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "vocab_size": VOCABULARY})).eval()
    draft = perturbed(target, 0.05)
    config = draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 2, "constant"
    config.assistant_confidence_threshold = 0.0
    return target, draft


@torch.no_grad()
def exact_law(target) -> torch.Tensor:
    """The law of the next two tokens, ``[V * V]``, from the model's own logits."""

    def law(text):
        row = target(torch.tensor([text])).logits[0, -1].double()
        return filtered(row / FILTERS["temperature"], FILTERS["top_k"], FILTERS["top_p"])

    first = law(PROMPT)
    return torch.cat([first[a] * law([*PROMPT, a]) for a in range(VOCABULARY)])


def count(tokens: torch.Tensor) -> torch.Tensor:
    """Count pairs of tokens ``[n, 2]``."""
    code = tokens[:, 0] * VOCABULARY + tokens[:, 1]
    return torch.bincount(code, minlength=VOCABULARY**2)


def ours(target, drafter, draws: int) -> torch.Tensor:
    found, statistics = specdec_ext.generate(
        target, drafter, torch.tensor([PROMPT]).repeat(draws, 1), max_new_tokens=3, gamma=2,
        seeds=torch.arange(draws) * 7919, eos_token_id=(), **FILTERS,
    )  # fmt: skip
    assert 0.2 < statistics.accepted_of_tested < 0.95
    return count(found[:, len(PROMPT) :][:, :2])


def theirs(target, draft, calls: int) -> torch.Tensor:
    """Three tokens are asked for, so that two are drafted; the first two are counted."""
    ids = torch.tensor([PROMPT])
    set_seed(7)
    found = [
        target.generate(
            ids, assistant_model=draft, do_sample=True, max_new_tokens=3, eos_token_id=None,
            pad_token_id=0, **FILTERS,
        )[0, len(PROMPT) :][:2]
        for _ in range(calls)
    ]  # fmt: skip
    return count(torch.stack(found))


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Against the exact law; a pair that it excludes is no matter of chance."""
    return 0.0 if counts[law == 0].any() else chi_square(counts[law > 0], law[law > 0])


def p_value_of_two(some: torch.Tensor, others: torch.Tensor) -> float:
    """Chi-square test that two samples have one law; cells that expect under 10 are pooled."""
    n, m = some.sum().double(), others.sum().double()
    rare = (some + others) * torch.minimum(n, m) / (n + m) < 10
    some, others = (
        torch.cat([sample[~rare], sample[rare].sum()[None]]).double() for sample in (some, others)
    )
    seen = some + others > 0
    some, others = some[seen], others[seen]
    statistic = ((some * (m / n).sqrt() - others * (n / m).sqrt()) ** 2 / (some + others)).sum()
    freedom = torch.tensor((len(some) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.thorough
def test_one_law(models):
    target, draft = models
    law = exact_law(target)
    ours_found, theirs_found = ours(target, draft, DRAWS), theirs(target, draft, CALLS)
    assert (law * CALLS > 10).sum() >= 8  # enough cells for the test to see something
    assert p_value(ours_found, law) > ALPHA
    assert p_value(theirs_found, law) > ALPHA
    assert p_value_of_two(ours_found, theirs_found) > ALPHA


@pytest.mark.thorough
def test_control_a_draft_law_that_was_not_sampled(models, monkeypatch):
    """As few draws as transformers gets find it in both loops, and between them."""
    target, draft = models
    law = exact_law(target)
    right = ours(target, ModelDrafter(draft), DRAWS)
    wrong = ours(target, GreedyDrafter(draft), CALLS)
    assert p_value(wrong, law) < ALPHA and p_value_of_two(right, wrong) < ALPHA
    sampling = generation_utils._speculative_sampling

    def planted(ids, candidate_logits, *others, **options):
        return sampling(ids, -candidate_logits.nan_to_num(neginf=-9.0), *others, **options)

    monkeypatch.setattr(generation_utils, "_speculative_sampling", planted)
    wrong = theirs(target, draft, CALLS // 2)
    assert p_value(wrong, law) < ALPHA and p_value_of_two(right, wrong) < ALPHA
