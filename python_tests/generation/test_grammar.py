"""`generate(grammar=...)`: the law under a small grammar, matchers that go back, errors."""

from __future__ import annotations

import pytest
import torch
from generate_models import TableModel, TableWithStates, tables
from grammars import (
    CLOSE,
    END,
    LETTER,
    OPEN,
    SIZE,
    Nested,
    NotRolledBack,
    allowed_after,
    allowed_tables,
    by_the_text,
    masked_law,
)
from test_generate_law import ALPHA, chi_square
from test_heads import table_and_heads
from transformers import RepetitionPenaltyLogitsProcessor

import specdec_ext
from specdec_ext.decoding import (
    GenerationError,
    GrownTree,
    HierarchicalDrafter,
    LookupDrafter,
    NgramDrafter,
    StackedDrafter,
    StaticTree,
    UniformDrafter,
)
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.grammar_masks import GrammarMasks, hidden
from specdec_ext.models.eagle import EagleHead, EagleHeadConfig
from specdec_ext.testing.exact import exact_law, toy_models

PROMPT = [2, 1]
LENGTH = 4
DRAWS = 1500
WIDE = 6  # a vocabulary padded behind the grammar's tokens
TEXTS = [[OPEN, LETTER, CLOSE, END] * 4]
TREES = {
    "static": StaticTree.from_widths((2, 2, 1)),
    "iid": StaticTree.from_widths((2, 1), "iid"),
    "top k": StaticTree.from_widths((3, 2), "top_k"),
    "rest": StaticTree.from_widths((3, 1), "rest"),
    "grown": GrownTree(nodes=8, depth=3, beam=3),
}


class Unmasked(ModelDrafter):
    """Draws from the model's own rows, whatever a grammar allows."""

    def start(self, requests):
        from dataclasses import replace

        super().start(replace(requests, process=None))


def small(vocabulary, seed=3):
    return tables(vocabulary, seed=seed)[1]


def random_head(vocabulary):
    torch.manual_seed(4)
    config = EagleHeadConfig(
        hidden_size=vocabulary, intermediate_size=8, num_attention_heads=vocabulary // 2,
        vocab_size=vocabulary,
    )  # fmt: skip
    head = EagleHead(config).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


def with_states(vocabulary):
    """Return the target of `tables`, as heads need it."""
    return TableWithStates(tables(vocabulary)[0].table)


DRAFTERS = {
    "none": lambda v: None,
    "model": lambda v: tables(v)[1],
    "unmasked": lambda v: Unmasked(tables(v)[1]),
    "lookup": lambda v: LookupDrafter(min_match=1),
    "bigram": lambda v: NgramDrafter(v, 2, texts=TEXTS),
    "uniform": lambda v: UniformDrafter(v),
    "stack": lambda v: StackedDrafter(LookupDrafter(min_match=1), tables(v)[1], continued=True),
    "levels": lambda v: HierarchicalDrafter(tables(v)[1], small(v), 2),
    "medusa": lambda v: table_and_heads(v)[1],
    "medusa, some tokens": lambda v: table_and_heads(v, known=(LETTER, *range(v - 1, 2, -1), 0))[1],
    "eagle": lambda v: random_head(v),
    "narrow": lambda v: small(SIZE - 1),
    "wider": lambda v: small(v + 3),
}


def generate(target, draft, rows=1, grammar=Nested, **options):
    ids = torch.tensor([PROMPT]).repeat(rows, 1)
    options = {"max_new_tokens": LENGTH, "eos_token_id": END, "pad_token_id": END, **options}
    for model in (target, draft):
        if "tree" in options and isinstance(model, TableModel):  # trees go past the end
            model.last_position = len(PROMPT) + options["max_new_tokens"] - 1
    return specdec_ext.generate(target, draft, ids, grammar=grammar, **options)


def p_value(target, draft, draws=DRAWS, grammar=Nested, **options):
    """Sample, and test the joint law of the new tokens against that of plain masked decoding."""
    result = generate(
        target, draft, draws, grammar, temperature=1.0, seeds=torch.arange(draws) * 7919, **options
    )
    vocabulary = target.table.shape[0]
    new = result.sequences[:, len(PROMPT) :]
    new = torch.nn.functional.pad(new, (0, LENGTH - new.shape[1]), value=END)
    code = (new * vocabulary ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    law = masked_law(target, PROMPT, LENGTH)
    assert law.sum() == pytest.approx(1)
    counts = torch.bincount(code, minlength=len(law))
    assert grammar is NotRolledBack or counts[law == 0].sum() == 0
    if counts[law == 0].sum() > 0:
        return 0.0
    return chi_square(counts[law > 0], law[law > 0])


# ---- the law -------------------------------------------------------------------------------------


def verify_as_the_loop_does(grammar, hands_over):
    """Give `verify` with masks of matchers that were led along another draft before.

    In either of the loop's two ways: masks for the operator, or target rows that are cut.
    """

    def verify(target_logits, draft_tokens, *args, allowed_mask, **options):
        rows, size = len(draft_tokens), target_logits.shape[2]
        new = [[] for _ in range(rows)]
        matchers = [grammar() for _ in range(rows)]
        masks = GrammarMasks(matchers, new, [END], size, torch.device("cpu"))
        slots = draft_tokens.shape[1] + 1
        masks.chain(range(rows), [[OPEN, OPEN, LETTER]] * rows, 4, size)
        found = masks.chain(range(rows), draft_tokens.tolist(), slots, size)
        if hands_over:
            options["allowed_mask"] = found
        else:
            target_logits = hidden(target_logits, found)
        return specdec_ext.verify(target_logits, draft_tokens, *args, **options)

    return verify


def law_of_a_round(grammar=Nested, *, hands_over, seed=5, **options):
    """Exact law over all drafts, coins and final draws, against the masked target's."""
    target, draft = toy_models(seed, SIZE, 3)
    return exact_law(
        verify_as_the_loop_does(grammar, hands_over), target, draft,
        allowed=allowed_tables(3), poison=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["block", "token"])
def test_exact_law_of_a_round_drafted_under_the_masks(rule):
    law = law_of_a_round(hands_over=True, rule=rule)
    assert law.tv < 1e-6 and law.mean_accepted > 0.4


def drawn_under_top_k():
    """Return the law of a draft that is drawn under top-k 2, and under no mask."""
    _, draft = toy_models(0, SIZE, 3)
    kept = [table.masked_fill(table < table.topk(2).values[..., 1:], -torch.inf) for table in draft]
    return {"drawn": [table.double().softmax(-1) for table in kept], "draft_top_k": 2, "seed": 0}


@pytest.mark.parametrize("rule", ["block", "token"])
def test_exact_law_of_a_round_drafted_without_masks(rule):
    law = law_of_a_round(hands_over=False, rule=rule, **drawn_under_top_k())
    assert law.tv < 1e-6


def test_control_masks_that_cut_the_law_of_a_draft_that_was_drawn_without():
    assert law_of_a_round(hands_over=True, rule="token", **drawn_under_top_k()).tv > 1e-3


def test_control_exact_law_of_matchers_that_are_not_rolled_back():
    assert law_of_a_round(NotRolledBack, hands_over=True, rule="block").tv > 1e-2


def test_control_chains_of_matchers_that_are_not_rolled_back():
    target, draft = tables(SIZE)
    assert p_value(target, draft, gamma=3, grammar=NotRolledBack) < ALPHA


@pytest.mark.every("drafter")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_joint_law(drafter):
    """Over a vocabulary that is padded behind the grammar's tokens, as are all below."""
    assert p_value(with_states(WIDE), DRAFTERS[drafter](WIDE), gamma=3) > ALPHA


@pytest.mark.every("tree")
@pytest.mark.parametrize("tree", TREES)
def test_joint_law_of_trees(tree):
    target, draft = tables(WIDE)
    assert p_value(target, draft, tree=TREES[tree]) > ALPHA


@pytest.mark.parametrize("tree", ["static", "grown"])
@pytest.mark.parametrize("drafter", ["medusa", "medusa, some tokens", "eagle"])
def test_joint_law_of_trees_of_heads(drafter, tree):
    target, heads = with_states(WIDE), DRAFTERS[drafter](WIDE)
    assert p_value(target, heads, tree=TREES[tree]) > ALPHA


def test_control_trees_with_matchers_that_are_not_rolled_back():
    target, draft = tables(SIZE)
    assert p_value(target, draft, tree=TREES["static"], grammar=NotRolledBack) < ALPHA


def test_joint_law_of_the_coupled_rule_and_of_a_matcher_without_an_end():
    target, draft = tables(SIZE)
    assert p_value(target, draft, gamma=2, rule="coupled") > ALPHA
    assert p_value(target, draft, gamma=2, grammar=lambda: Nested(says_end=False)) > ALPHA


def same(one, other):
    assert one.sequences.tolist() == other.sequences.tolist()
    assert torch.equal(one.logprobs, other.logprobs)


@pytest.mark.parametrize("options", [{}, {"measure_alpha": True}])
@pytest.mark.parametrize("drafter", ["model", "bigram", "uniform", "levels", "medusa", "eagle"])
def test_tokens_are_those_of_the_same_masks_as_a_processor(drafter, options):
    """Bit for bit: drafts are drawn under the masks as they are from processed rows."""
    target = with_states(WIDE)
    shared = {"temperature": 0.9, "top_k": 3, "seeds": 4, "max_new_tokens": 12, **options}
    masked = generate(target, DRAFTERS[drafter](WIDE), 16, **shared)
    process = by_the_text(len(PROMPT))
    processed = generate(
        target, DRAFTERS[drafter](WIDE), 16, grammar=None, logits_processor=process, **shared
    )
    same(masked, processed)
    assert masked.statistics.accepted == processed.statistics.accepted > 0
    if options:
        assert masked.statistics.alpha == processed.statistics.alpha


@pytest.mark.parametrize("how", [*DRAFTERS, *TREES])
def test_greedy_and_coupled_tokens_are_those_of_plain_decoding(how):
    target, draft = with_states(WIDE), tables(WIDE)[1]
    more = {"tree": TREES[how]} if how in TREES else {"gamma": 3}
    drafter = draft if how in TREES else DRAFTERS[how](WIDE)
    greedy = generate(target, drafter, max_new_tokens=12, **more)
    plain = generate(target, None, max_new_tokens=12)
    same(greedy, plain)
    if how not in TREES:
        coupled = {"rule": "coupled", "temperature": 1.0, "seeds": 9, "max_new_tokens": 12}
        drawn = generate(target, DRAFTERS[how](WIDE), 8, gamma=3, **coupled)
        assert drawn.sequences.tolist() == generate(target, None, 8, **coupled).sequences.tolist()


def test_drafting_under_the_masks_is_accepted_more_often():
    target, draft = tables(WIDE)
    options = {"temperature": 1.0, "seeds": 0, "gamma": 3}
    masked = generate(target, draft, 400, **options).statistics
    unmasked = generate(target, Unmasked(draft), 400, **options).statistics
    assert masked.accepted_of_tested > 1.2 * unmasked.accepted_of_tested


def test_masks_come_behind_processors():
    """As in plain decoding with the processor and then the mask; illegal texts are not shown."""
    target, draft = tables(WIDE)
    seen = []

    def penalty(ids, scores):
        seen.append(ids[0, len(PROMPT) :].tolist())
        return RepetitionPenaltyLogitsProcessor(1.5)(ids, scores)

    class Illegal(Unmasked):
        def _draw(self, logits, positions, i):
            return torch.full_like(super()._draw(logits, positions, i), LETTER)

    processors = [penalty, by_the_text(len(PROMPT))]
    expected = generate(target, None, grammar=None, logits_processor=processors, max_new_tokens=12)
    for drafter in (draft, Illegal(draft)):
        seen.clear()
        found = generate(target, drafter, logits_processor=penalty, max_new_tokens=12)
        assert found.sequences.tolist() == expected.sequences.tolist()
        legal = [all(t in allowed_after(x[:i]) for i, t in enumerate(x)) for x in seen[2:]]
        assert all(legal) and len(legal) > 3


# ---- matchers ------------------------------------------------------------------------------------


def test_a_matcher_is_left_where_its_text_ends():
    target, draft = tables(SIZE)
    matchers = [Nested(), None, Nested(says_end=False)]
    options = {"temperature": 1.0, "gamma": 3, "max_new_tokens": [3, 9, 9], "seeds": 3}
    result = generate(target, draft, 3, matchers, **options)
    for matcher, row in zip(matchers, result.sequences[:, len(PROMPT) :].tolist(), strict=True):
        row = row[:3] if matcher is matchers[0] else row
        text = row[: row.index(END) + 1] if END in row else row
        if matcher is None:
            assert any(t not in allowed_after(text[:i]) for i, t in enumerate(text))
            continue
        assert all(t in allowed_after(text[:i]) for i, t in enumerate(text))
        shown = text if matcher.says_end else [t for t in text if t != END]
        again = Nested(matcher.says_end)
        for token in shown:
            again.accept_token(token)
        assert matcher.states == again.states


def test_a_matcher_goes_on_from_the_state_that_it_is_given_in():
    target, draft = tables(SIZE)
    matcher = Nested()
    matcher.accept_token(OPEN)
    matcher.accept_token(LETTER)
    new = generate(target, draft, 3, matcher, temperature=1.0, seeds=0, max_new_tokens=30)
    for row in new.sequences[:, len(PROMPT) :].tolist():  # the others had copies, in its state
        text = [OPEN, LETTER, *row]
        assert all(t in allowed_after(text[:i]) for i, t in enumerate(text) if i > 1)


def test_masks_of_a_tree_are_those_of_its_paths():
    """The walk computes each place's mask once, and goes back no further than branches part."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        nodes = 12
        tokens = torch.randint(SIZE + 1, (nodes,), generator=generator).tolist()
        parents = [-1] + [
            int(torch.randint(-1, v, (1,), generator=generator)) for v in range(1, nodes)
        ]
        matcher = Nested()
        masks = GrammarMasks([None, matcher], [[], []], [END], WIDE, torch.device("cpu"))
        found = masks.tree([1, 0], [tokens, tokens], [parents, parents], WIDE)
        assert found.shape == (2, nodes, 1) and (found[1] == -1).all()
        paths = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = paths[parent] if parent >= 0 else None
            paths.append(None if above is None else (*above, token))
        legal = set()
        for v, path in enumerate(paths):
            reached = path is not None and all(
                t in allowed_after(path[:i]) for i, t in enumerate(path)
            )
            expected = sum(1 << t for t in allowed_after(path)) if reached else -1
            assert int(found[0, v, 0]) == expected
            if reached:
                legal.add(path)
        shown = {path for path in legal if END not in path}
        assert matcher.filled == len(shown)
        edges = len({path[:i] for path in legal for i in range(1, len(path) + 1)})
        assert matcher.taken_back <= edges


def test_batches_and_streams_are_those_of_single_requests():
    target, draft = tables(SIZE)
    options = {"temperature": 1.0, "gamma": 3, "max_new_tokens": 12}
    both = generate(target, draft, 6, seeds=20, **options)
    ids = torch.tensor([PROMPT])
    for b in range(6):
        bursts = specdec_ext.stream(
            target, draft, ids, grammar=Nested(), seeds=20 + b, eos_token_id=END, **options
        )
        new = [token for burst in bursts for token in burst.tokens]
        row = both.sequences[b, len(PROMPT) :].tolist()
        assert row[: len(new)] == new and set(row[len(new) :]) <= {END}
        assert new[-1] == END or len(new) == 12


def test_sequences_of_a_prompt_have_a_grammar_each():
    target, draft = tables(SIZE)
    ids = torch.tensor([PROMPT, PROMPT])
    options = {"temperature": 1.0, "max_new_tokens": 10, "eos_token_id": END, "pad_token_id": END}
    for grammar in (Nested, [Nested, None], [Nested(), None]):
        result = specdec_ext.generate(
            target, draft, ids, grammar=grammar, num_return_sequences=3, seeds=1, **options
        )
        legal = [
            all(t in allowed_after(row[:i]) for i, t in enumerate(row))
            for row in result.sequences[:, len(PROMPT) :].tolist()
        ]
        assert all(legal[:3]) and (all(legal) if grammar is Nested else not any(legal[3:]))


# ---- what is said --------------------------------------------------------------------------------


class Stuck(Nested):
    """Allows nothing behind its second token."""

    def fill_next_token_bitmask(self, bitmask, index=0):
        super().fill_next_token_bitmask(bitmask, index)
        if len(self.states) > 2:
            bitmask[index] = self.garbage


@pytest.mark.parametrize("more", [{"gamma": 3}, {"tree": TREES["static"]}, {"gamma": 0}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_is_an_error(more, temperature):
    target, draft = tables(WIDE)
    with pytest.raises(GenerationError, match="request 1: the grammar allows no token") as error:
        generate(target, draft, 2, [Nested(), Stuck()], temperature=temperature, seeds=0, **more)
    assert error.value.requests == [1]
    assert "after 2 new tokens" in str(error.value)
    assert error.value.sequences.shape[1] >= len(PROMPT) + 2


def test_rows_that_hide_all_that_a_grammar_allows():
    target, draft = tables(SIZE)

    def hide_brackets(ids, scores):
        return scores.index_fill(1, torch.tensor([OPEN]), -torch.inf)

    with pytest.raises(GenerationError, match="nothing finite.*grammar allows some tokens"):
        generate(target, draft, logits_processor=hide_brackets)


def test_what_comes_against_a_grammar_is_an_error(monkeypatch):
    """As of a verification that forgets the masks; nothing is handed out as if it matched."""
    target, draft = tables(SIZE)
    verify = specdec_ext.ops.verify

    def unmasked(*args, allowed_mask, **options):
        return verify(*args, **options)

    monkeypatch.setattr(specdec_ext.ops, "verify", unmasked)
    with pytest.raises(GenerationError, match="emitted token . against the grammar"):
        generate(target, draft, 8, temperature=1.0, seeds=0, max_new_tokens=20)


class Refuses(Nested):
    def accept_token(self, token):
        return token != OPEN and super().accept_token(token)


class Immovable(Nested):
    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")


def ended():
    matcher = Nested()
    for token in (OPEN, CLOSE, END):
        matcher.accept_token(token)
    return matcher


@pytest.mark.parametrize(
    ("grammar", "options", "error", "message"),
    [
        ("root ::= 1", {}, TypeError, "grammar must be a TokenMatcher, .* got str 'root ::= 1'"),
        ({"type": "object"}, {}, TypeError, "a callable that makes one of these, got dict"),
        (lambda: 3, {}, TypeError, "grammar, as it was made, must be a TokenMatcher"),
        ([Nested()], {}, ValueError, r"one for each request, \[B\] = \[2\], got \[1\]"),
        ([Nested(), 5], {}, TypeError, "grammar of request 1 must be"),
        (Nested, {"eos_token_id": ()}, ValueError, "eos_token_id must be given with a grammar"),
        (Nested, {"num_beams": 2}, ValueError, "grammar must be left out .*branch"),
        (Immovable(), {}, ValueError, "one matcher for several requests, .* cannot be copied"),
        ([Nested(), ended()], {}, ValueError, "request 1 has terminated before the first token"),
        (Refuses, {}, ValueError, "mask allows token 0 after 0 new tokens, and its accept_token"),
    ],
)  # fmt: skip
def test_what_is_refused(grammar, options, error, message):
    target, draft = tables(SIZE)
    with pytest.raises(error, match=message):
        generate(target, draft, 2, grammar, **options)


def test_a_grammar_of_nobody_changes_nothing():
    target, draft = tables(SIZE)
    options = {"temperature": 1.0, "seeds": 0}
    same(
        generate(target, draft, 2, [None, None], **options),
        generate(target, draft, 2, None, **options),
    )


def test_a_matcher_over_more_tokens_than_the_model():
    """What the model has not cannot come, and a place that allows nothing else is a dead end."""
    table = tables(SIZE)[0].table[:, :, :END]
    target = TableModel(torch.nn.functional.pad(table, (0, 0, 0, 0))[:END, :END])
    with pytest.raises(GenerationError, match="allows no token of the target's"):
        generate(target, None, temperature=1.0, seeds=0, max_new_tokens=40)
