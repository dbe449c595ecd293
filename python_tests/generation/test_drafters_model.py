"""Drafters made of models: early exit, and hierarchies with what they roll back and draw from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from generate_models import TableModel, pair, prompts, seeded_prompts, tables
from test_generate_law import ALPHA, p_value
from test_generate_models import RAGGED, greedy
from test_policies import Nosy
from torch import nn

import specdec_ext
from specdec_ext import ops
from specdec_ext.decoding import Draft, LookupDrafter, StackedDrafter
from specdec_ext.decoding.drafters.early_exit import EarlyExitDrafter, first_layers
from specdec_ext.decoding.drafters.hierarchy import HierarchicalDrafter
from specdec_ext.decoding.drafters.model import ModelDrafter

NEW = 20


@pytest.fixture(scope="module")
def levels() -> list[TableModel]:
    """Return a target, a medium, a small and a tiny model over three tokens."""
    target, medium = tables(3)
    return [target, medium, tables(3, seed=3)[1], tables(3, seed=4)[1]]


class LikelyDrafter:
    """Proposes what a table finds most likely, from a text it keeps; it cannot take tokens back."""

    calls = 0

    def __init__(self, model: TableModel) -> None:
        self.table = model.table
        self.starts = 0

    def start(self, requests) -> None:
        mask = requests.attention_mask
        mask = torch.ones_like(requests.input_ids) if mask is None else mask
        self.starts += 1
        self.text = [
            ids[kept.bool()].tolist() for ids, kept in zip(requests.input_ids, mask, strict=True)
        ]

    def propose(self, gamma, positions, go_on=None):
        tokens = torch.empty(len(self.text), gamma, dtype=torch.int64)
        for b, text in enumerate(self.text):
            known = [0, *text]
            for i in range(gamma):
                known.append(int(self.table[known[-2], known[-1]].argmax()))
                tokens[b, i] = known[-1]
        return Draft(tokens)

    def commit(self, tokens, accepted) -> None:
        for text, row, n in zip(self.text, tokens.tolist(), accepted.host, strict=True):
            text += row[: n + 1]

    def select(self, rows, indices) -> None:
        self.text = [self.text[i] for i in indices]


# --- the law of what comes out ----------------------------------------------------------------


HIERARCHIES = {
    "rounds": lambda medium, small, tiny: HierarchicalDrafter(medium, small, 2),
    "token": lambda medium, small, tiny: HierarchicalDrafter(medium, small, 2, rule="token"),
    "refill": lambda medium, small, tiny: HierarchicalDrafter(medium, small, 3, refill=True),
    "three": lambda medium, small, tiny: HierarchicalDrafter(
        medium, HierarchicalDrafter(small, tiny, 1), 2
    ),
    "deterministic": lambda medium, small, tiny: HierarchicalDrafter(
        medium, LikelyDrafter(small), 2
    ),
}


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("kind", HIERARCHIES)
def test_joint_law(levels, kind, rule):
    target, *others = levels
    draws = 2_000 if kind == "deterministic" else 8_000  # it drafts in Python
    drafter = HIERARCHIES[kind](*others)
    assert p_value(target, drafter, gamma=3, length=4, draws=draws, rule=rule) > ALPHA


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"rule": "coupled"}], ids=str)
def test_joint_law_of_three_levels(levels, options):
    target, *others = levels
    drafter = HIERARCHIES["three"](*others)
    assert p_value(target, drafter, gamma=3, length=4, draws=8_000, **options) > ALPHA


class Stopping(HierarchicalDrafter):
    """Ends its draft behind a 1, or behind an unlikely token."""

    def propose(self, gamma, positions, go_on=None):
        def may_go_on(tokens, logits):
            self.asked += 1
            return (tokens != 1) & (logits.softmax(-1).amax(-1) > 0.4)

        self.asked = 0
        draft = super().propose(gamma, positions, may_go_on)
        ended = (draft.tokens < 0).long().cumsum(1) > 0
        assert self.asked == max(draft.tokens.shape[1] - 1, 0) or draft.tokens.shape[1] == gamma - 1
        assert torch.equal(draft.tokens < 0, ended)
        assert not (draft.tokens[:, :-1] == 1)[(draft.tokens >= 0)[:, 1:]].any()
        return draft


def test_a_hierarchy_may_end_its_draft_behind_a_token_that_it_keeps(levels):
    target, medium, small, _ = levels
    drafter = Stopping(medium, small, 1)
    assert p_value(target, drafter, gamma=3, length=4, draws=8_000) > ALPHA


@pytest.mark.thorough
def test_joint_law_under_a_policy(levels):
    target, medium, small, _ = levels
    drafter = HierarchicalDrafter(medium, small, 2)
    assert p_value(target, drafter, length=5, gamma=Nosy(), draws=10_000) > ALPHA


def test_a_medium_model_that_fails_costs_its_proposals_only(levels):
    target, medium, small, _ = levels
    broken = medium.table.clone()
    broken[:, 1] = torch.nan
    drafter = HierarchicalDrafter(TableModel(broken), small, 2)
    assert p_value(target, drafter, gamma=3, length=4, draws=8_000) > ALPHA


class SharedCoins(HierarchicalDrafter):
    """Draws what it draws from the coins that the target's verification uses, too."""

    def start(self, requests) -> None:
        super().start(requests)
        self._level = replace(self._level, stream=requests.stream)
        self.draft.start(self._level)

    def _keys(self, positions, number, found):
        return positions + found.lengths.device


class RepeatedCoins(HierarchicalDrafter):
    """Keys a round by where it begins: what a rejected round drew comes again."""

    def _keys(self, positions, number, found):
        return positions + found.lengths.device


class SmallLaw(HierarchicalDrafter):
    """Passes the rows of the small model where the medium one kept its tokens."""

    def _verify(self, logits, draft, lengths, positions):
        burst = super()._verify(logits, draft, lengths, positions)
        logits[:, : draft.tokens.shape[1]] = draft.logits
        return burst


class AsPrinted(HierarchicalDrafter):
    """Algorithm 3 as printed: the first refilled token comes from p, not from the residual."""

    def _verify(self, logits, draft, lengths, positions):
        tokens, accepted = super()._verify(logits, draft, lengths, positions)
        end = accepted.long()[:, None]
        rows = logits.take_along_dim(end[..., None], 1)[:, 0]
        keys = {"seeds": self._level.seeds, "positions": positions, "stream": self._level.stream}
        drawn = ops.sample(rows, **keys, domain=1, **self._level.filters).tokens
        return tokens.scatter(1, end, drawn[:, None]), accepted


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(
    ("wrong", "refill"), [(SharedCoins, False), (SmallLaw, False), (AsPrinted, True)]
)
def test_controls_of_the_law(levels, wrong, refill, rule):
    target, medium, small, _ = levels
    drafter = wrong(medium, small, 2, rule=rule, refill=refill)
    assert p_value(target, drafter, gamma=2, draws=8_000, rule=rule) < ALPHA


@pytest.mark.thorough
def test_control_coins_that_come_again():
    """The block rule alone sees them: it looks at what lies behind the tokens that it keeps."""
    target, medium = tables(3)
    small = tables(3, seed=3)[1]
    drafter = RepeatedCoins(medium, small, 1)
    assert p_value(target, drafter, gamma=2, length=5, draws=50_000) < ALPHA


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_models_accept_everything_on_every_level(temperature):
    """Bit-equal laws: any slip of a cache, a filter or a row on any level would show."""
    target, _ = tables(5)
    drafter = HierarchicalDrafter(target, HierarchicalDrafter(target, target, 1), 3)
    ids = torch.randint(0, 5, (7, 3), generator=torch.Generator().manual_seed(0))
    _, statistics = specdec_ext.generate(
        target, drafter, ids, max_new_tokens=36, gamma=8, temperature=temperature, top_k=3, seeds=3,
        eos_token_id=(),
    )  # fmt: skip
    assert statistics.accepted_of_tested == 1.0
    assert statistics.rounds == 4
    # Eight tokens: two bursts of 3 + 1. Three tokens: two bursts of 1 + 1.
    assert drafter.calls_by_level == [4 * 2, 4 * 4, 4 * 4]
    assert drafter.calls == statistics.draft_calls == 40


@pytest.mark.parametrize("refill", [False, True])
def test_caches_when_the_level_above_rejects(refill):
    """The small model is the medium one, so the latter accepts all, whatever the target takes."""
    target, medium = tables(5, noise=1.5)
    drafter = HierarchicalDrafter(medium, medium, 2, refill=refill)
    ids, mask = prompts([1, 4, 2, 1, 3, 4], vocabulary=5)
    _, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=40, gamma=5, seeds=1,
        temperature=1.0, eos_token_id=(), pad_token_id=0, rule="token",
    )  # fmt: skip
    assert 0.2 < statistics.accepted_of_tested < 0.8
    medium_calls, small_calls = drafter.calls_by_level
    full = statistics.rounds - 4  # near the end fewer are drafted
    assert full * (3 if refill else 2) <= medium_calls <= statistics.rounds * (3 if refill else 2)
    assert full * (2 if refill else 4) <= small_calls


def test_caches_when_the_medium_model_rejects(levels):
    """The medium model is the target, so that the target takes all, ragged as the bursts are."""
    target, _, small, tiny = levels
    for drafter in (
        HierarchicalDrafter(target, small, 3),
        HierarchicalDrafter(target, HierarchicalDrafter(small, tiny, 2), 3, refill=True),
    ):
        ids, mask = prompts([1, 4, 2, 1, 3, 4], vocabulary=3)
        _, statistics = specdec_ext.generate(
            target, drafter, ids, attention_mask=mask, max_new_tokens=[24, 12, 24, 24, 17, 24],
            gamma=5, temperature=1.0, seeds=1, eos_token_id=(), pad_token_id=0,
        )  # fmt: skip
        assert statistics.accepted_of_tested == 1.0
        assert statistics.rounds == 4
        assert drafter.calls_by_level[0] > 2 * statistics.rounds  # the medium model did reject


def test_a_drafter_that_cannot_take_tokens_back_is_started_again():
    """It proposes the medium model's own greedy tokens only if it knows the text."""
    target, medium = tables(5)
    likely = LikelyDrafter(medium)
    drafter = HierarchicalDrafter(medium, likely, 2)
    ids, mask = prompts([1, 4, 2], vocabulary=5)
    text = [row[start:].tolist() for row, start in zip(ids, mask.argmax(1), strict=True)]
    limits = [31, 20, 31]

    def follow(bursts):
        for burst in bursts:
            text[burst.request] += burst.tokens
        ends = zip(text, [1, 4, 2], limits, strict=True)
        running = [row for row, start, limit in ends if len(row) < start + limit]
        assert not running or likely.text == running

    sequences, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=limits, gamma=6,
        eos_token_id=(), pad_token_id=0, on_round=follow,
    )  # fmt: skip
    plain, _ = specdec_ext.generate(
        target, None, ids, attention_mask=mask, max_new_tokens=limits, pad_token_id=0,
        eos_token_id=(),
    )  # fmt: skip
    assert torch.equal(sequences, plain)
    assert 0 < statistics.accepted_of_tested < 1
    assert drafter.calls_by_level[0] <= 2 * statistics.rounds  # bursts of three, always
    assert likely.starts == statistics.rounds  # the last round has no successor


class Knowing:
    """Proposes up to two of the true tokens for some requests in some rounds, else nothing."""

    calls = 0

    def __init__(self, truth) -> None:
        self.truth, self.used = truth, 0

    def start(self, requests) -> None:
        self.rows = torch.arange(len(self.truth))

    def propose(self, gamma, positions, go_on=None):
        columns = positions[:, None] + torch.arange(min(gamma, 2))
        known = self.truth[self.rows[:, None], columns.clamp(max=self.truth.shape[1] - 1)]
        helps = (self.rows + positions // 3) % 2 == 0
        self.used += int(helps.sum())
        return Draft(torch.where(helps[:, None], known, -1))

    def commit(self, tokens, accepted) -> None:
        pass

    def observe(self, tokens, gained) -> None:
        pass

    def select(self, rows, indices) -> None:
        self.rows = self.rows[rows]


@pytest.mark.parametrize("kind", ["model", "hierarchy", "restarted"])
def test_a_hierarchy_hears_of_rounds_in_which_others_drafted(kind):
    """All its models are the target: what they propose is accepted if they know the whole text."""
    target, _ = tables(9)
    below = {
        "model": target,
        "hierarchy": HierarchicalDrafter(target, target, 1),
        "restarted": LikelyDrafter(target),
    }[kind]
    ids = torch.tensor([[1, 2], [0, 7], [8, 2], [0, 5]])
    options = {"max_new_tokens": [60, 60, 41, 60], "eos_token_id": (), "pad_token_id": 0}
    truth = specdec_ext.generate(target, None, ids, **options).sequences
    first = Knowing(truth)
    hierarchy = HierarchicalDrafter(target, below, 2)
    found, statistics = specdec_ext.generate(
        target, StackedDrafter(first, hierarchy), ids, gamma=4, **options
    )
    assert torch.equal(found, truth)
    assert statistics.accepted_of_tested == 1.0
    # Two bursts of 2 + 1 tokens a round (28), and 6 calls to take in what was told unevenly; 39
    # where the level below was not told.
    assert hierarchy.calls_by_level[0] <= 2.5 * statistics.rounds
    assert 0 < first.used < statistics.request_calls


@pytest.mark.parametrize("rule", ["block", "token", "coupled", "typical"])
@pytest.mark.parametrize("refill", [False, True])
def test_output_does_not_depend_on_batch_mates(rule, refill):
    target, medium = tables(6, noise=0.7)
    small, tiny = tables(6, seed=1)
    ids, mask, seeds = seeded_prompts(6, 6)
    limits = [3, 17, 8, 12, 20, 6]
    temperature = [0.0, 0.5, 1.0, 1.5, 1.0, 1.0]

    def run(rows, **options):
        inner = HierarchicalDrafter(small, tiny, 2, refill=refill)
        return specdec_ext.generate(
            target, HierarchicalDrafter(medium, inner, 3, refill=refill), ids[rows], gamma=5,
            attention_mask=mask[rows], max_new_tokens=limits[rows], seeds=seeds[rows],
            temperature=temperature[rows], rule=rule, pad_token_id=0, eos_token_id=(),
        ).sequences  # fmt: skip

    together = run(slice(None))
    for row in range(6):
        alone = run(slice(row, row + 1))
        assert torch.equal(together[row, : 5 + limits[row]], alone[0])


def test_coupled_proposals_are_those_of_the_medium_model_alone():
    """One race decides on every level, so no small model changes what is accepted."""
    target, medium = tables(6, noise=0.7)
    _, small = tables(6, seed=1)
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])

    def run(drafter):
        return specdec_ext.generate(
            target, drafter, ids, max_new_tokens=30, gamma=4, temperature=1.0, seeds=3,
            rule="coupled", eos_token_id=(),
        )  # fmt: skip

    alone, levels = run(medium), run(HierarchicalDrafter(medium, small, 3))
    assert torch.equal(alone.sequences, levels.sequences)
    assert alone.statistics.histogram == levels.statistics.histogram


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"gamma": 0}, ValueError, r"gamma must be in \[1, 65534\], got 0"),
        ({"gamma": 2.0}, TypeError, "gamma must be an int or a GammaPolicy, got float"),
        ({"rule": "lenient"}, ValueError, "rule must be 'block' or 'token', got 'lenient'"),
    ],
)
def test_arguments_of_a_hierarchy(levels, arguments, error, text):
    with pytest.raises(error, match=text):
        HierarchicalDrafter(levels[1], levels[2], **arguments)


# --- Hugging Face models ----------------------------------------------------------------------


EXITS = ("llama", "mistral_window", "gpt2", "gpt_neox", "bloom_alibi")


def drafters(target, medium, small):
    yield EarlyExitDrafter(target, 1)
    yield HierarchicalDrafter(medium, small, 2)
    yield HierarchicalDrafter(medium, first_layers(target, 1), 4, refill=True)
    yield HierarchicalDrafter(medium, HierarchicalDrafter(small, first_layers(target, 1), 2), 3)


@pytest.mark.parametrize("lengths", [[7], RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("architecture", EXITS)
def test_greedy_equals_plain_generate(architecture, lengths):
    target, medium = pair(architecture, noise=0.02)
    _, small = pair(architecture, noise=0.05)
    ids, mask = prompts(lengths)
    plain = greedy(target, ids, mask, NEW)
    for drafter in drafters(target, medium, small):
        sequences, statistics = specdec_ext.generate(
            target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, gamma=4
        )
        assert torch.equal(sequences, plain)
        assert 0 < statistics.accepted_of_tested < 1


def test_positions_up_to_the_last_one_of_the_model():
    """GPT-2 has 128 positions, and no level passes them."""
    target, medium = pair("gpt2", noise=0.02)
    ids, mask = prompts([110, 104, 108])
    limits = [18, 10, 14]
    drafter = HierarchicalDrafter(
        medium, HierarchicalDrafter(medium, first_layers(target, 1), 2), 3
    )
    sequences, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=limits, gamma=5, pad_token_id=0
    )
    expected = greedy(target, ids, mask, 18)
    for row, limit in enumerate(limits):
        assert torch.equal(sequences[row, : 110 + limit], expected[row, : 110 + limit])
    assert statistics.new_tokens == limits


NORMS = {
    "llama": lambda model: model.model.norm,
    "gpt2": lambda model: model.transformer.ln_f,
    "gpt_neox": lambda model: model.gpt_neox.final_layer_norm,
    "bloom_alibi": lambda model: model.transformer.ln_f,
}


@pytest.mark.parametrize("architecture", NORMS)
def test_first_layers_are_those_of_the_model_and_leave_it_alone(architecture):
    model, _ = pair(architecture)
    ids, _ = prompts([9, 9])
    parts = dict(model.named_modules())
    with torch.inference_mode():
        whole = model(ids, output_hidden_states=True)
        first = first_layers(model, 1)
        exit_ = model.get_output_embeddings()(NORMS[architecture](model)(whole.hidden_states[1]))
        assert torch.equal(first(ids).logits, exit_)
        assert torch.equal(first_layers(model, 2)(ids).logits, whole.logits)
        assert torch.equal(model(ids).logits, whole.logits)
    owned = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in first.parameters()} < owned
    after = dict(model.named_modules())
    assert list(after) == list(parts)
    assert all(after[name] is parts[name] for name in parts)


def test_first_layers_follow_the_models_weights():
    model, _ = pair()
    first = first_layers(model, 1)
    ids, _ = prompts([5])
    before = first(ids).logits
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    model.bfloat16()
    assert first(ids).logits.dtype == torch.bfloat16
    assert not torch.equal(first(ids).logits.double(), before)


class Headless(nn.Module):
    """A model with layers, in no list that is known."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        self.head = nn.Linear(2, 2)

    def get_output_embeddings(self):
        return self.head


def test_models_without_an_early_exit_are_refused():
    model, _ = pair()
    with pytest.raises(TypeError, match="must be a Hugging Face causal model, got TableModel"):
        EarlyExitDrafter(tables(3)[0], 1)
    with pytest.raises(TypeError, match="LlamaModel has no language-model head"):
        first_layers(model.model, 1)
    with pytest.raises(TypeError, match="Headless must have one list of 2 layers, got none"):
        first_layers(Headless(model.config), 1)
    for layers in (0, 3):
        with pytest.raises(ValueError, match=rf"layers must be in \[1, 2\].*got {layers}"):
            first_layers(model, layers)
    with pytest.raises(TypeError, match="layers must be an int, got float"):
        first_layers(model, 1.0)
    model.model.forward = model.model.forward
    with pytest.raises(TypeError, match="the forward of LlamaModel is wrapped"):
        first_layers(model, 1)


def test_the_medium_models_draft_law_is_that_of_a_forward_without_cache(monkeypatch):
    """What is passed on is the medium model's row after exactly what was proposed before it."""
    target, medium = pair(noise=0.05)
    _, small = pair(noise=0.1)
    ids, mask = prompts([3, 6, 1])
    text = [row[start:].tolist() for row, start in zip(ids, mask.argmax(1), strict=True)]
    inner = HierarchicalDrafter(small, ModelDrafter(first_layers(target, 1)), 2)
    drafter = HierarchicalDrafter(medium, inner, 2)
    propose, drafts = drafter.propose, []

    def recording(*args):
        drafts.append(propose(*args))
        return drafts[-1]

    monkeypatch.setattr(drafter, "propose", recording)
    limits = [25, 18, 22]
    ends = [len(row) + limit for row, limit in zip(text, limits, strict=True)]
    compared = 0

    def follow(bursts):
        nonlocal compared
        tokens, rows, *_ = drafts[-1]
        for i, burst in enumerate(bursts):
            known = text[burst.request]
            length = int((tokens[i] >= 0).sum())
            assert length == min(5, ends[burst.request] - len(known) - 1)
            if length:
                whole = torch.tensor([known + tokens[i, :length].tolist()])
                fresh = medium(whole).logits[0, len(known) - 1 : -1].float()
                torch.testing.assert_close(rows[i, :length], fresh, rtol=1e-5, atol=1e-5)
            compared += length
            known += burst.tokens

    specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=limits, gamma=5, temperature=1.0,
        top_k=20, eos_token_id=(), seeds=1, on_round=follow,
    )  # fmt: skip
    assert compared > 80


def test_a_hierarchy_cannot_go_on_behind_others_tokens(levels):
    drafter = HierarchicalDrafter(levels[1], levels[2])
    with pytest.raises(TypeError, match="HierarchicalDrafter cannot go on behind others' tokens"):
        StackedDrafter(LookupDrafter(), drafter, continued=True)


def test_a_stack_drafts_for_a_hierarchy():
    target, medium = tables(3)
    small = tables(3, seed=3)[1]
    drafter = HierarchicalDrafter(medium, StackedDrafter(LookupDrafter(), small))
    assert p_value(target, drafter, gamma=3, length=4, draws=2_000) > ALPHA
