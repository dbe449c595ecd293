"""Decoding heads: the law of what is emitted, greedy equality, trees, saving, training."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import wrong_laws
from enumerated_drafts import Round, check_lossless
from generate_models import TableWithStates, pair, prompts, tables
from test_encoder_decoder import encoded, inputs_of, models, plain, start
from test_generate_law import ALPHA, PROMPT, p_value
from transformers import AutoModel

import specdec_ext
from specdec_ext.decoding import (
    BanditDrafter,
    ConfidenceStop,
    GrownTree,
    HeadsDrafter,
    LookupDrafter,
    StackedDrafter,
    StaticTree,
)
from specdec_ext.decoding.trees import draft_top_k
from specdec_ext.models.heads import (
    BlockwiseHeads,
    BlockwiseHeadsConfig,
    MedusaHeads,
    MedusaHeadsConfig,
)
from specdec_ext.models.heads_training import heads_loss

NEW = 20
RAGGED = [6, 1, 3, 5]
LIMITS = [NEW, NEW - 5, NEW - 1, NEW - 3]
LENGTH, DRAWS = 3, 3_000
REDUCED = (3, 0, 2)
KINDS = {
    "medusa": functools.partial(MedusaHeads.from_target, num_layers=2),
    "medusa, one projection": functools.partial(MedusaHeads.from_target, shared_projection=True),
    "blockwise": functools.partial(BlockwiseHeads.from_target, intermediate_size=24),
}
SHAPES = {
    "chain": {"gamma": 4},
    "tree": {"tree": StaticTree.from_widths((3, 2, 1), "top_k"), "rule": "target_only"},
    "drawn tree": {"tree": StaticTree.from_widths((2, 2))},
    "grown": {"tree": GrownTree(8, 3, beam=2)},
}
# Of the tests' models with 67 tokens, in an order of their own.
SOME_TOKENS = torch.arange(67).flip(0)[::2]


# ---- the law of what is emitted ------------------------------------------------------------------


@functools.cache
def table_and_heads(vocabulary: int = 3, heads: int = 3, known: tuple[int, ...] | None = None):
    """Return a target over few tokens, and heads with laws of their own that depend on its rows.

    The heads propose all tokens, or ``known``, in that order.
    """
    target = TableWithStates(tables(vocabulary)[0].table)
    torch.manual_seed(1)
    config = MedusaHeadsConfig(
        hidden_size=vocabulary, vocab_size=vocabulary, num_heads=heads,
        draft_vocab_size=None if known is None else len(known),
    )  # fmt: skip
    made = MedusaHeads(config).eval()
    if known is not None:
        made.draft_token_ids.copy_(torch.tensor(known))
    target.last_position = len(PROMPT) + LENGTH - 1
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=1.5)
    laws = made(target.table[0]).softmax(-1)
    assert (laws[0] - laws[1]).abs().max() > 0.1 and (laws[:, 0] - laws[:, 1]).abs().max() > 0.1
    return target, made


def law_of(drafter, **options) -> float:
    """Return the p-value of the law of a few tokens: of several rounds, each on another state."""
    return p_value(table_and_heads()[0], drafter, length=LENGTH, draws=DRAWS, **options)


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("gamma", [3, 1, 7])  # more than there are heads
def test_joint_law_of_chains(rule, gamma, temperature):
    drafter = HeadsDrafter(table_and_heads()[1])
    assert law_of(drafter, temperature=temperature, rule=rule, gamma=gamma) > ALPHA


@pytest.mark.parametrize(
    "options", [{"top_k": 2}, {"draft_temperature": 0.5}, {"rule": "coupled"}], ids=str
)
def test_joint_law_under_filters_and_of_the_race(options):
    drafter = HeadsDrafter(table_and_heads()[1])
    if "top_k" not in options:
        assert law_of(drafter, gamma=3, **options) > ALPHA
        return
    target = table_and_heads()[0]
    cut = target.table.clone()
    cut[cut < cut.topk(2, -1).values[..., 1:]] = -torch.inf
    ids = torch.tensor([[1, 2]]).repeat(DRAWS, 1)
    found, statistics = specdec_ext.generate(
        target, drafter, ids, max_new_tokens=1, temperature=1.0, seeds=1, gamma=2, **options
    )
    law = cut[1, 2].softmax(-1)
    rates = torch.bincount(found[:, 2], minlength=3) / DRAWS
    assert (rates[law == 0] == 0).all() and (rates - law).abs().max() < 0.06
    assert statistics.new_tokens == [1] * DRAWS


def test_joint_law_in_a_stack_and_under_a_policy():
    _, heads = table_and_heads()
    stack = StackedDrafter(LookupDrafter(min_match=2), HeadsDrafter(heads))
    assert law_of(stack, gamma=3) > ALPHA
    assert law_of(HeadsDrafter(heads), gamma=ConfidenceStop(3, 0.4)) > ALPHA


class AnotherRow(wrong_laws.AnotherRow, HeadsDrafter):
    """Passes on the row of another token than each was drawn from."""


class StateBeside(HeadsDrafter):
    """Reads the state one token too early, wherever there is one."""

    def take_features(self, features, tokens, gained):
        super().take_features(features.roll(1, 1), tokens, gained)


class OtherRequest(HeadsDrafter):
    """Draws from the state of the next request, and passes on the row of its own."""

    def propose(self, gamma, positions, go_on=None):
        own = super().propose(gamma, positions, go_on)
        self._state = self._state.roll(1, 0)
        return own._replace(tokens=super().propose(gamma, positions, go_on).tokens)


def test_control_a_head_that_passes_on_another_row():
    assert law_of(AnotherRow(table_and_heads()[1]), gamma=2) < ALPHA


def test_control_tokens_from_another_requests_state():
    assert law_of(OtherRequest(table_and_heads()[1]), gamma=1) < ALPHA


def test_states_one_position_off_leave_the_law_alone():
    """The law that is passed on is the one of the state that was read, whichever that is."""
    assert law_of(StateBeside(table_and_heads()[1]), gamma=3) > ALPHA


class FirstHead(HeadsDrafter):
    """Passes on the first head's law for all tokens."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        return draft._replace(logits=draft.logits[:, :1].expand_as(draft.logits))


def enumerated(kind, drafter=HeadsDrafter, **options) -> Round:
    """Return a round of random heads over three tokens, to be enumerated."""
    sizes = {"hidden_size": 4, "vocab_size": 3, "num_heads": 2}
    torch.manual_seed(8)  # heads that differ much, and whose drafts are accepted now and then
    if kind == "medusa":
        heads = MedusaHeads(MedusaHeadsConfig(**sizes))
    else:
        heads = BlockwiseHeads(BlockwiseHeadsConfig(**sizes, intermediate_size=6))
    for parameter in heads.double().eval().parameters():
        torch.nn.init.normal_(parameter)
    state = torch.randn(1, 1, 4, dtype=torch.float64)
    return Round(lambda rows: drafter(heads), 3, features=state, **options)


@pytest.mark.every("kind")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_exact_law(monkeypatch, kind, rule, temperature):
    """Heads are independent given the state: their laws are the q of every lossless rule."""
    check_lossless(enumerated(kind, temperature=temperature).law(monkeypatch, rule))


@pytest.mark.parametrize("wrong", [AnotherRow, FirstHead])
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_control_exact_law_of_heads_with_anothers_law(monkeypatch, kind, rule, wrong):
    assert enumerated(kind, wrong).law(monkeypatch, rule).tv > 1e-2


TREES = {
    "top_k": (StaticTree.from_widths((3, 2, 1), "top_k"), "target_only"),
    "uneven": (StaticTree((-1, 0, 0, 0, 1, 1, 3), "top_k"), "traversal"),
    "drawn": (StaticTree.from_widths((2, 2)), "traversal"),
    "iid": (StaticTree.from_widths((2, 2), "iid"), "recursive"),
    "rest": (StaticTree.from_widths((1, 3), "rest"), "traversal"),
    "coupled": (StaticTree.from_widths((2, 2), "coupled"), "coupled"),
    "grown": (GrownTree(6, 3, beam=2), "target_only"),
}


@pytest.mark.parametrize("name", TREES)
def test_joint_law_of_trees(name):
    tree, rule = TREES[name]
    assert law_of(HeadsDrafter(table_and_heads()[1]), tree=tree, rule=rule) > ALPHA


class AnotherLaw(HeadsDrafter):
    """Says of drawn children that they come from another row than they do."""

    def propose_tree(self, positions):
        draft = super().propose_tree(positions)
        return draft._replace(logits=draft.logits.flip(-1))


def test_control_a_tree_that_passes_on_another_row():
    drafter = AnotherLaw(table_and_heads()[1])
    assert law_of(drafter, tree=TREES["drawn"][0], rule="traversal") < ALPHA


def test_nodes_of_a_top_k_tree():
    """Level by level the likeliest tokens of that level's head, under every node alike."""
    target, heads = table_and_heads()
    tree, seen = StaticTree((-1, 0, 0, 0, 1, 1, 3), "top_k"), []

    class Watching(HeadsDrafter):
        def propose_tree(self, positions):
            seen.append((self._state, super().propose_tree(positions)))
            return seen[-1][1]

    specdec_ext.generate(
        target, Watching(heads), torch.tensor([[1, 2, 0]]), max_new_tokens=8, tree=tree,
        temperature=1.0, seeds=0,
    )  # fmt: skip
    for state, draft in seen:
        with torch.inference_mode():
            best = heads(state)[0].argsort(-1, descending=True)
        expected = [*best[0, :3], *best[1, :2], best[1, 0]]
        assert draft.tokens[0, 1:].tolist() == expected
        assert draft.logits is None and not draft.kinds.any()


def test_a_top_k_tree_with_more_children_than_tokens():
    laws = torch.tensor([[[0.0, 1.0]], [[0.0, -torch.inf]]])
    tree = StaticTree.from_widths((3,), "top_k")
    draft = draft_top_k(tree, torch.tensor([7, 8]), laws, {})
    assert draft.tokens.tolist() == [[7, 1, 0, -1], [8, 0, -1, -1]]


# ---- reduced vocabularies ------------------------------------------------------------------------


def some_heads():
    """Return a target over four tokens, and heads over three of them."""
    return table_and_heads(4, known=REDUCED)


def law_of_some(drafter, **options) -> float:
    """Return the p-value of the law of a few tokens that such heads drafted."""
    return p_value(some_heads()[0], drafter, length=LENGTH, draws=DRAWS, **options)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_joint_law_of_heads_over_some_tokens(rule):
    assert law_of_some(HeadsDrafter(some_heads()[1]), rule=rule, gamma=3) > ALPHA


def test_joint_law_of_heads_over_some_tokens_under_a_policy():
    """A policy reads probabilities by token: of other entries it would stop elsewhere."""
    seen = []

    class Watched(ConfidenceStop):
        def _bound(self, tokens, logits):
            bound = super()._bound(tokens, logits)
            seen.append((tokens, logits, bound))
            return bound

    drafter = HeadsDrafter(some_heads()[1])
    assert law_of_some(drafter, gamma=Watched(3, 0.4)) > ALPHA
    for tokens, logits, bound in seen:
        kept = tokens >= 0
        assert logits.shape[1] == 4 and (logits[:, 1] == -torch.inf).all()
        own = logits.softmax(-1)[kept, tokens[kept]]
        assert (bound[kept] - own).abs().max() < 1e-6 and own.min() > 0


@pytest.mark.parametrize("name", TREES)
def test_joint_law_of_trees_over_some_tokens(name):
    tree, rule = TREES[name]
    assert law_of_some(HeadsDrafter(some_heads()[1]), tree=tree, rule=rule) > ALPHA


class AnotherMap(wrong_laws.AnotherMap, HeadsDrafter):
    """Says of its law that its entries are other tokens than were drawn."""


def test_control_heads_over_some_tokens_that_name_others():
    assert law_of_some(AnotherMap(some_heads()[1]), gamma=2) < ALPHA


def enumerated_some(drafter=HeadsDrafter) -> Round:
    """Return a round of heads over three of four tokens, to be enumerated."""
    heads = copy.deepcopy(some_heads()[1]).double()
    state = 0.5 * torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(2)).double()
    return Round(lambda rows: drafter(heads), 4, features=state, token_ids=torch.tensor(REDUCED))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_exact_law_of_heads_over_some_tokens(monkeypatch, rule):
    check_lossless(enumerated_some().law(monkeypatch, rule))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_control_exact_law_of_heads_over_some_tokens(monkeypatch, rule):
    assert enumerated_some(AnotherRow).law(monkeypatch, rule).tv > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_heads_over_some_tokens_begin_as_the_targets_own(tmp_path, kind):
    target, inputs = pair()[0], {"input_ids": torch.tensor([[4, 5, 6]])}
    whole = KINDS[kind](target, 3, inputs=inputs)
    heads = KINDS[kind](target, 3, inputs=inputs, draft_token_ids=SOME_TOKENS)
    states = torch.randn(2, 32, dtype=torch.float64)
    assert (heads(states) - whole(states)[..., SOME_TOKENS]).abs().max() < 1e-12
    heads.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.draft_token_ids, SOME_TOKENS)
    assert torch.equal(again(states), heads(states))


@pytest.mark.parametrize(
    "shape, company",
    [*((shape, "alone") for shape in SHAPES), ("chain", "stack"), ("chain", "bandit")],
)
def test_tokens_of_plain_decoding_of_heads_over_some_tokens(shape, company):
    target, _ = pair()
    ids, mask = prompts(RAGGED)
    heads = KINDS["blockwise"](target, 4, inputs={"input_ids": ids}, draft_token_ids=SOME_TOKENS)
    drafter = HeadsDrafter(heads)
    if company == "stack":
        drafter = StackedDrafter(LookupDrafter(), drafter)
    if company == "bandit":
        drafter = BanditDrafter(LookupDrafter(), drafter, costs=[0.0, 0.1])
    options = {"attention_mask": mask, "max_new_tokens": LIMITS, "seeds": 1}
    plain, _ = specdec_ext.generate(target, None, ids, **options)
    found, statistics = specdec_ext.generate(target, drafter, ids, **options, **SHAPES[shape])
    assert torch.equal(found, plain) and statistics.rejected > 0


# ---- greedy, token by token ----------------------------------------------------------------------


def trained(kind, target, count, inputs, states, logits, mask):
    """Make heads, and fit them to what the target finds likeliest, at most places of some texts."""
    known = torch.rand(states.shape[:2], generator=torch.Generator().manual_seed(5)) < 0.8
    mask = known if mask is None else mask * known
    heads = KINDS[kind](target, count, inputs=inputs).requires_grad_(True)
    optimizer = torch.optim.Adam(heads.parameters(), lr=2e-2)
    losses = []
    for _ in range(40 if count < 10 else 15):
        loss, _ = heads_loss(heads, states, 30 * logits, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    return heads.eval()


@functools.cache
def causal_heads(name: str, kind: str, count: int = 4):
    """Return a random target and heads that know what it makes of the tests' prompts."""
    target, _ = pair(name)
    ids, mask = prompts(RAGGED)
    texts, _ = specdec_ext.generate(
        target, None, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=()
    )
    mask = torch.nn.functional.pad(mask, (0, NEW), value=1)
    read = {
        "input_ids": texts,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    with torch.no_grad():
        output = target(**read, output_hidden_states=True)
    states = output.hidden_states[-1]
    return target, trained(kind, target, count, read, states, output.logits, mask)


@functools.cache
def encoded_heads(name: str, kind: str, count: int = 4):
    """Return a random encoder-decoder, its inputs, and heads that know its texts."""
    target, _ = models(name)
    inputs = inputs_of(name)
    texts, _ = specdec_ext.generate(
        encoded(target, **inputs), None, start(3), max_new_tokens=NEW, eos_token_id=()
    )
    read = {**inputs, "decoder_input_ids": texts}
    with torch.no_grad():
        output = target(**read, output_hidden_states=True)
    states = output.decoder_hidden_states[-1]
    return target, inputs, trained(kind, target, count, read, states, output.logits, None)


@pytest.mark.every("shape")
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [RAGGED, [4], [1]], ids=["ragged", "one", "one token"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_equals_plain_decoding(name, lengths, shape, static):
    """Rows accept different numbers of tokens and end at different times, one without a state."""
    target, heads = causal_heads(name, "medusa")
    ids, mask = prompts(lengths)
    limits = LIMITS[: len(lengths)]
    plain, _ = specdec_ext.generate(target, None, ids, attention_mask=mask, max_new_tokens=limits)
    drafter = HeadsDrafter(heads)
    found, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=limits, static_cache=static,
        **SHAPES[shape],
    )  # fmt: skip
    assert torch.equal(found, plain) and statistics.rejected > 0
    if len(lengths) > 1:  # of a single text these untrained heads may foresee nothing
        assert statistics.accepted > 0
    # One call of all heads a round; none in the first one where no row has a state yet, nor in a
    # last one that has no room for a draft token.
    assert drafter.calls == statistics.draft_calls
    assert statistics.rounds - 2 <= drafter.calls <= statistics.rounds - (max(lengths) == 1)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_greedy_equals_plain_decoding_behind_an_encoder(name, kind, shape):
    target, inputs, heads = encoded_heads(name, kind)
    limits = [NEW, NEW - 7, NEW - 2]
    found, statistics = specdec_ext.generate(
        encoded(target, **inputs), HeadsDrafter(heads), start(3), max_new_tokens=limits,
        eos_token_id=2, **SHAPES[shape],
    )  # fmt: skip
    assert statistics.accepted > 0 and statistics.rejected > 0
    with torch.inference_mode():
        for b, (row, limit) in enumerate(zip(found.tolist(), limits, strict=True)):
            right = plain(target, inputs, b)[: 1 + limit]
            assert row[: len(right)] == right and not any(row[len(right) :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [10, 25])
def test_many_heads(kind, count):
    target, heads = causal_heads("llama", kind, count)
    states = torch.randn(2, 32, dtype=torch.float64)
    assert heads(states).shape == (2, count, 67)
    assert (heads(states, count=3) - heads(states)[:, :3]).abs().max() < 1e-12
    ids, mask = prompts(RAGGED)
    options = {"attention_mask": mask, "max_new_tokens": 40}
    plain, _ = specdec_ext.generate(target, None, ids, **options)
    found, statistics = specdec_ext.generate(
        target, HeadsDrafter(heads), ids, gamma=count, **options
    )
    assert torch.equal(found, plain)
    assert len(statistics.histogram) == count + 1 and statistics.accepted > 0


@pytest.mark.parametrize("drafting", ["stack", "bandit", "coupled", "processor"])
def test_greedy_and_coupled_in_company(drafting):
    """Beside other drafters, and where the noise is shared: the tokens of plain decoding."""
    from transformers import RepetitionPenaltyLogitsProcessor

    target, heads = causal_heads("llama", "blockwise")
    ids, mask = prompts(RAGGED)
    options = {"attention_mask": mask, "max_new_tokens": LIMITS}
    drafter = HeadsDrafter(heads)
    if drafting == "stack":
        drafter = StackedDrafter(LookupDrafter(), drafter)
    if drafting == "bandit":
        drafter = BanditDrafter(LookupDrafter(), drafter, costs=[0.0, 0.1])
        options["seeds"] = 1
    if drafting == "coupled":
        options |= {"rule": "coupled", "temperature": 0.9, "seeds": 2}
    if drafting == "processor":
        options["logits_processor"] = RepetitionPenaltyLogitsProcessor(1.3)
    plain, _ = specdec_ext.generate(target, None, ids, **options)
    found, statistics = specdec_ext.generate(target, drafter, ids, **options)
    assert torch.equal(found, plain) and statistics.accepted > 0


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_typical_acceptance(kind):
    """What stands as accepted is more probable than Medusa's threshold, by one pass of the target;
    what replaces a draft token replaces one that is not."""
    target, heads = causal_heads("llama", kind)
    ids, _ = prompts([5])
    epsilon, delta, bursts = 0.2, 0.5, []
    found, statistics = specdec_ext.generate(
        target, HeadsDrafter(heads), ids, max_new_tokens=60, temperature=0.8, seeds=3,
        rule="typical", epsilon=epsilon, delta=delta, on_round=bursts.extend,
    )  # fmt: skip
    with torch.no_grad():
        laws = (target(input_ids=found).logits[0, ids.shape[1] - 1 :] / 0.8).softmax(-1)
    entropy = -(laws * laws.log()).sum(-1)
    threshold = torch.minimum(torch.full_like(entropy, epsilon), delta * (-entropy).exp())
    place = 0
    for burst in bursts:
        for token, accepted in zip(burst.tokens, burst.flags, strict=True):
            assert not accepted or laws[place, token] > threshold[place] * (1 - 1e-5)
            place += 1
        if burst.replaced is not None:
            assert laws[place - 1, burst.replaced] <= threshold[place - 1] * (1 + 1e-5)
    assert statistics.accepted > 0 and statistics.rejected > 0


# ---- the heads themselves ------------------------------------------------------------------------


def test_medusa_heads_are_the_formula():
    torch.manual_seed(0)
    config = MedusaHeadsConfig(hidden_size=3, vocab_size=5, num_heads=2, projection_bias=True)
    heads = MedusaHeads(config).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    state = torch.randn(3, dtype=torch.float64)
    for k in range(2):
        inner = heads.weights[0, k] @ state + heads.biases[0, k]
        hidden = state + inner * torch.sigmoid(inner)
        expected = heads.projections[k] @ hidden + heads.projection_biases[k]
        assert (heads(state)[k] - expected).abs().max() < 1e-12


def test_blockwise_heads_are_the_formula():
    torch.manual_seed(0)
    config = BlockwiseHeadsConfig(hidden_size=3, vocab_size=5, num_heads=2, intermediate_size=4)
    heads = BlockwiseHeads(config).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    state = torch.randn(3, dtype=torch.float64)
    for k in range(2):
        rows = slice(4 * k, 4 * k + 4)
        units = (heads.inner.weight[rows] @ state + heads.inner.bias[rows]).clamp(min=0)
        hidden = state + heads.weights[k] @ units + heads.biases[k]
        assert (heads(state)[k] - heads.projection.weight @ hidden).abs().max() < 1e-12


@pytest.mark.every("kind")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "t5", "bart"])
def test_heads_begin_as_the_targets_own(name, kind):
    """T5 scales its states where embeddings are tied; BART's head adds what its logits have."""
    if name == "llama":
        target, inputs = pair()[0], {"input_ids": torch.tensor([[4, 5, 6]])}
    else:
        target, inputs = models(name)[0], inputs_of(name)
        inputs["decoder_input_ids"] = torch.tensor([[1, 5, 6, 7]] * 3)
    if name == "t5":
        target.config.tie_word_embeddings = target.config.scale_decoder_outputs = True
    heads = KINDS[kind](target, 3, inputs=inputs)
    with torch.no_grad():
        output = target(**inputs, output_hidden_states=True)
        states = getattr(output, "decoder_hidden_states", None) or output.hidden_states
        laws = heads(states[-1]).log_softmax(-1)
    assert (laws - output.logits.log_softmax(-1)[..., None, :]).abs().max() < 1e-6
    assert (heads.config.feature_scale == pytest.approx(0.25)) == (name == "t5")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(tmp_path, kind):
    target, heads = causal_heads("llama", kind)
    heads.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = type(heads).from_pretrained(tmp_path, dtype=torch.float64).eval()
    states = torch.randn(2, 32, dtype=torch.float64)
    assert torch.equal(again(states), heads(states))
    half = again.to(torch.bfloat16)
    assert half(states).dtype == torch.bfloat16
    ids, _ = prompts([4])
    plain, _ = specdec_ext.generate(target, None, ids, max_new_tokens=9)
    found, _ = specdec_ext.generate(target, HeadsDrafter(half), ids, max_new_tokens=9)
    assert torch.equal(found, plain)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(heads) and isinstance(loaded.make_drafter(), HeadsDrafter)


@pytest.mark.parametrize("tree", [None, StaticTree.from_widths([2, 1], "top_k")])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_taken_for_their_drafter(kind, tree):
    target, heads = causal_heads("llama", kind)
    ids, _ = prompts([4])
    told = {"max_new_tokens": 9, "tree": tree, "temperature": 1.0, "seeds": 5}
    told["rule"] = "block" if tree is None else "target_only"
    found = specdec_ext.generate(target, heads, ids, **told)
    expected = specdec_ext.generate(target, HeadsDrafter(heads), ids, **told)
    assert torch.equal(found.sequences, expected.sequences)
    of_each = [one.statistics.tokens_per_target_call for one in (found, expected)]
    assert of_each[0] == of_each[1]
    with pytest.raises(TypeError, match="draft must be a causal .*got"):
        specdec_ext.generate(target, type(heads), ids, **told | {"tree": None, "rule": "block"})


def test_the_loss_compares_with_the_right_rows():
    """Heads that are given the target's rows further on lose no more than those rows' entropy."""
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 5)

    class Cheating(MedusaHeads):
        """Untrained, they hand on the features, which say here which row of which text it is."""

        def project(self, hidden, head):
            text, place = hidden[:, :2].long().unbind(1)
            return logits[text, place + head + 1]

    heads = Cheating(MedusaHeadsConfig(hidden_size=3, vocab_size=5, num_heads=3))
    mask = torch.ones(2, 7)
    mask[1, 5:] = 0
    features = torch.cartesian_prod(*map(torch.arange, (2, 7, 1))).view(2, 7, 3).float()
    loss, by_head = heads_loss(heads, features, logits, mask, decay=0.5)
    law = logits.softmax(-1)
    entropy = -(law * law.log()).sum(-1)
    for k in range(3):
        here = (mask[:, : -k - 1] * mask[:, k + 1 :]).bool()
        assert by_head[k] == pytest.approx(entropy[:, k + 1 :][here].mean().item(), rel=1e-5)
    weights = torch.tensor([0.5, 0.25, 0.125])
    assert loss.item() == pytest.approx((weights * by_head).sum().item(), rel=1e-5)
    loss, short = heads_loss(heads, features[:, :2], logits[:, :2])
    assert short.isnan().tolist() == [False, True, True] and loss.isfinite()
    loss, none = heads_loss(heads, features, logits, torch.zeros(2, 7))
    loss.backward()
    assert loss == 0 and none.isnan().all()
    known = MedusaHeads(
        MedusaHeadsConfig(hidden_size=3, vocab_size=5, num_heads=3, draft_vocab_size=2)
    )
    known.draft_token_ids.copy_(torch.tensor([4, 1]))
    found = heads_loss(known, features, logits, mask)[0]
    assert torch.equal(found, heads_loss(known, features, logits[..., [4, 1]], mask)[0])
    assert not torch.equal(found, heads_loss(known, features, logits[..., [1, 4]], mask)[0])
    with pytest.raises(ValueError, match=r"V = 5 or \[B, n, Vd\] with Vd = 2, got \[2, 7, 3\]"):
        heads_loss(known, features, logits[..., :3], mask)
    for shape in ([2, 6], [2, 7, 1], [3, 7]):
        with pytest.raises(
            ValueError, match=rf"mask must be .*features, \[2, 7\], got \[{shape[0]}, "
        ):
            heads_loss(known, features, logits, torch.ones(shape))
    for other in (logits[:, :6], logits[:1], logits[0]):
        with pytest.raises(ValueError, match=r"target_logits must be \[B, n, V\] .*\[2, 7\], got"):
            heads_loss(known, features, other, mask)
    with pytest.raises(ValueError, match=r"features must be \[B, n, D\], got \[7, 3\]"):
        heads_loss(known, features[0], logits, mask)


def test_what_is_refused():
    target, heads = table_and_heads()
    with pytest.raises(TypeError, match="HeadsDrafter: heads must be decoding heads"):
        HeadsDrafter(target)
    ids = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="at most as deep as there are heads, 3, got depth 4"):
        tree = StaticTree.from_widths((1, 1, 1, 1))
        specdec_ext.generate(target, HeadsDrafter(heads), ids, tree=tree)
    with pytest.raises(ValueError, match="MedusaHeads: num_heads must be at least 1, got 0"):
        MedusaHeads(MedusaHeadsConfig(num_heads=0))
    with pytest.raises(ValueError, match="draft_vocab_size must be in .1, 9., got 10"):
        MedusaHeads(MedusaHeadsConfig(vocab_size=9, draft_vocab_size=10))
    with pytest.raises(TypeError, match="BlockwiseHeads: draft_token_ids must be an int64 tensor"):
        BlockwiseHeads.from_target(pair()[0], 2, inputs={"input_ids": ids}, draft_token_ids=[5, 1])
    for wrong in ([1, 1], [5, 67], [-1, 3]):
        with pytest.raises(ValueError, match="must be 2 distinct tokens in .0, 67.*got"):
            BlockwiseHeads.from_target(
                pair()[0], 2, inputs={"input_ids": ids}, draft_token_ids=torch.tensor(wrong)
            )
    with pytest.raises(TypeError, match="must have an output head"):
        MedusaHeads.from_target(pair()[0].model, 2, inputs={"input_ids": ids})
