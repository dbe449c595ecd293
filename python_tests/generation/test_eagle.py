"""The EAGLE-style head: the law of what is emitted, its cache, greedy equality, its loss."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
import wrong_laws
from enumerated_drafts import Round, check_lossless
from generate_models import TableWithStates, pair, prompts, tables
from test_generate_law import ALPHA, PROMPT, p_value

import specdec_ext
from specdec_ext.decoding import (
    ConfidenceStop,
    EagleDrafter,
    FixedGamma,
    GrownTree,
    HierarchicalDrafter,
    LookupDrafter,
    StackedDrafter,
    StaticTree,
)
from specdec_ext.models.eagle import EagleHead, EagleHeadConfig, eagle_loss

NEW = 20
RAGGED = [6, 1, 3, 5]
LIMITS = [NEW, NEW - 5, NEW - 1, NEW - 3]
LENGTH, DRAWS = 3, 3_000
REDUCED = torch.tensor([3, 0, 2])  # in no order, and token 1 is never proposed


# ---- the law of what is emitted ------------------------------------------------------------------


@functools.cache
def table_and_head(reduced: bool = True):
    """Return a target over four tokens, and a random head over three of them, or all."""
    target = TableWithStates(tables(4)[0].table)
    target.last_position = len(PROMPT) + LENGTH - 1
    torch.manual_seed(2)
    config = EagleHeadConfig(
        hidden_size=4, intermediate_size=6, num_attention_heads=2, vocab_size=4,
        draft_vocab_size=3 if reduced else None,
    )  # fmt: skip
    head = EagleHead(config).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    if reduced:
        head.draft_token_ids.copy_(REDUCED)
    return target, head


def law_of(drafter, **options) -> float:
    """Return the p-value of the law of a few tokens: of several rounds, each on other states."""
    return p_value(table_and_head()[0], drafter, length=LENGTH, draws=DRAWS, **options)


@pytest.mark.every("reduced")
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("gamma", [2, 1, 4])
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "whole"])
def test_joint_law(reduced, gamma, rule):
    drafter = EagleDrafter(table_and_head(reduced)[1])
    assert law_of(drafter, temperature=0.8, rule=rule, gamma=gamma) > ALPHA


@pytest.mark.parametrize("options", [{"draft_top_k": 2}, {"rule": "coupled"}], ids=str)
def test_joint_law_under_other_draft_laws(options):
    assert law_of(EagleDrafter(table_and_head()[1]), gamma=2, **options) > ALPHA


def test_joint_law_in_a_stack_and_under_a_policy():
    _, head = table_and_head()
    stack = StackedDrafter(LookupDrafter(min_match=2), EagleDrafter(head))
    assert law_of(stack, gamma=2) > ALPHA
    assert law_of(EagleDrafter(head), gamma=ConfidenceStop(3, 0.4)) > ALPHA


TREES = {
    "top_k": (StaticTree.from_widths((2, 2), "top_k"), "target_only"),
    "drawn": (StaticTree.from_widths((2, 1)), "traversal"),
    "chain": (StaticTree.from_widths((1, 1, 1), "iid"), "recursive"),
    "grown": (GrownTree(6, 3, beam=2), "traversal"),
}


@pytest.mark.parametrize("name", TREES)
def test_joint_law_of_trees(name):
    tree, rule = TREES[name]
    assert law_of(EagleDrafter(table_and_head()[1]), tree=tree, rule=rule) > ALPHA


class AnotherMap(wrong_laws.AnotherMap, EagleDrafter):
    """Says of its law that its entries are other tokens than were drawn."""


class AnotherRow(wrong_laws.AnotherRow, EagleDrafter):
    """Passes on the row of another token than each was drawn from."""


@pytest.mark.every("wrong")
@pytest.mark.parametrize("wrong", [AnotherMap, AnotherRow])
def test_control_a_law_that_was_not_drawn_from(wrong):
    assert law_of(wrong(table_and_head()[1]), gamma=2) < ALPHA


class Unconditional(EagleDrafter):
    """Passes on the first token's law for all tokens, as if none depended on another."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        return draft._replace(logits=draft.logits[:, :1].expand_as(draft.logits))


def enumerated(reduced, drafter=EagleDrafter, **options) -> Round:
    """Return a round of a random head over four tokens, or three of them, to be enumerated."""
    _, head = table_and_head(reduced)
    states = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(4)).double()
    head = copy.deepcopy(head).double()
    ids = REDUCED if reduced else None
    return Round(lambda rows: drafter(head), 4, features=states, token_ids=ids, **options)


@pytest.mark.every("reduced")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "whole"])
def test_exact_law(monkeypatch, reduced, rule, temperature):
    """Each token's law is the one after the tokens that were drawn before it."""
    check_lossless(enumerated(reduced, temperature=temperature).law(monkeypatch, rule))


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize(
    "reduced, wrong",
    [(True, AnotherRow), (True, Unconditional), (False, Unconditional)],
)
def test_control_exact_law_with_a_law_that_was_not_drawn_from(monkeypatch, reduced, wrong, rule):
    assert enumerated(reduced, wrong).law(monkeypatch, rule).tv > 1e-2


# ---- what the head reads -------------------------------------------------------------------------


@functools.cache
def causal_head(name: str = "llama", reduced: bool = True):
    """Return a random target, and a head that is taught its greedy texts of the tests' prompts."""
    target, _ = pair(name)
    ids, mask = prompts(RAGGED)
    texts = [
        specdec_ext.generate(target, None, row[real.bool()][None], max_new_tokens=2 * NEW).sequences
        for row, real in zip(ids, mask, strict=True)
    ]
    torch.manual_seed(3)
    kept = torch.cat(texts, 1)[0].unique()
    head = EagleHead.from_target(target, kept if reduced else None).requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    losses = []
    with torch.no_grad():
        outputs = [target(input_ids=text, output_hidden_states=True) for text in texts]
    for _ in range(15):
        for text, output in zip(texts, outputs, strict=True):
            states, logits = output.hidden_states[-1], 10 * output.logits
            loss, _ = eagle_loss(head, text, states, logits, law_weight=1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    return target, head.eval()


class Watched(EagleDrafter):
    """Remembers the texts and the rows that it drew from."""

    def start(self, requests):
        super().start(requests)
        ids, mask = requests.input_ids, requests.attention_mask
        self.texts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        self.rows, self.seen, self.trees = list(range(len(ids))), [], []

    def take_features(self, features, tokens, gained):
        super().take_features(features, tokens, gained)
        for i, b in enumerate(self.rows):
            self.texts[b] += tokens[i, : gained.host[i]].tolist()

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        for i, b in enumerate(self.rows):
            if draft.tokens.shape[1]:
                laws = None if draft.logits is None else draft.logits[i]
                self.seen.append((list(self.texts[b]), draft.tokens[i], laws))
        return draft

    def propose_tree(self, positions):
        draft = super().propose_tree(positions)
        for i, b in enumerate(self.rows):
            self.trees.append(
                (list(self.texts[b]), draft.tokens[i].tolist(), draft.parents[i].tolist())
            )
        return draft

    def select(self, rows, indices):
        super().select(rows, indices)
        self.rows = [self.rows[i] for i in indices]


def expected_rows(target, head, text, drafted):
    """Draft without any cache: the target's states of the text, then the head's own estimates."""
    whole = torch.tensor([text])
    states = target(input_ids=whole, output_hidden_states=True).hidden_states[-1][:, :-1]
    tokens, rows = whole[:, 1:], []
    for token in drafted.tolist():
        output = head(tokens, states)
        rows.append(output.logits[0, -1])
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        states = torch.cat([states, output.hidden_states[-1][:, -1:]], 1)
    return torch.stack(rows)


def check_trees(drafter, target, head):
    """Children of every node are the likeliest tokens of the row behind its own path."""
    checked = 0
    for text, tokens, parents in drafter.trees[::2]:
        for node in range(1, len(parents)):
            path, above = [], parents[node]
            while above > 0:
                path.insert(0, tokens[above])
                above = parents[above]
            if len(text) == 1:
                assert tokens[node] == -1
                continue
            rows = expected_rows(target, head, text, torch.tensor([*path, 0]))
            rank = parents[:node].count(parents[node])
            best = head.draft_token_ids[rows[-1].argsort(descending=True)]
            assert tokens[node] == best[rank]
            checked += len(path) > 0
    assert checked > 20


def check_rows(drafter, target, head):
    drafted = 0
    for text, tokens, rows in drafter.seen[::2]:
        if len(text) == 1:  # there is no state yet
            assert (tokens == -1).all()
            continue
        expected = expected_rows(target, head, text, tokens)
        assert (rows - expected).abs().max() < 1e-4  # rows are passed on in float32
        drafted += len(tokens)
    assert drafted > 20


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.inference_mode()
def test_rows_are_those_without_a_cache(name, static):
    """Rows of a batch accept differently, end apart, and one begins without a state."""
    with torch.inference_mode(False), torch.enable_grad():
        target, head = causal_head(name)
    ids, mask = prompts(RAGGED)
    drafter = Watched(head)
    _, statistics = specdec_ext.generate(
        target, drafter, ids, attention_mask=mask, max_new_tokens=LIMITS, temperature=0.7, seeds=4,
        gamma=3, static_cache=static,
    )  # fmt: skip
    assert statistics.accepted > 0 and statistics.rejected > 0
    check_rows(drafter, target, head)


class Seldom(FixedGamma):
    """Drafts in every third round."""

    rounds = 0

    def lengths(self):
        self.rounds += 1
        return [0 if self.rounds % 3 else n for n in super().lengths()]


@pytest.mark.parametrize("company", ["alone", "stack"])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.inference_mode()
def test_rounds_without_a_draft_call_no_layer(static, company):
    """The head reads what such rounds added when it drafts again, each row its own tokens."""
    with torch.inference_mode(False), torch.enable_grad():
        target, head = causal_head()
    ids, mask = prompts(RAGGED)
    drafter = Watched(head)
    whole = StackedDrafter(LookupDrafter(), drafter) if company == "stack" else drafter
    policy = FixedGamma(3) if company == "stack" else Seldom(3)
    _, statistics = specdec_ext.generate(
        target, whole, ids, attention_mask=mask, max_new_tokens=2 * NEW, temperature=0.7,
        seeds=4, gamma=policy, static_cache=static,
    )  # fmt: skip
    check_rows(drafter, target, head)
    if company == "alone":
        # The first tokens' call takes in what is there; each further token is a call.
        assert drafter.calls <= 3 * (statistics.rounds // 3)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_nodes_are_those_without_a_cache(static):
    target, head = causal_head()
    ids, mask = prompts(RAGGED)
    drafter = Watched(head)
    with torch.inference_mode():
        _, statistics = specdec_ext.generate(
            target, drafter, ids, attention_mask=mask, max_new_tokens=LIMITS, static_cache=static,
            tree=StaticTree((-1, 0, 0, 1, 1, 2, 3, 5), "top_k"),
        )  # fmt: skip
        assert statistics.accepted > 0 and statistics.rejected > 0
        check_trees(drafter, target, head)


def test_control_estimates_left_in_the_cache(monkeypatch):
    """What the head made of its own estimates must go: the target's states come in its place."""

    def lax(self, features, tokens, gained, original=Watched.take_features):
        self._drafted = max(self._drafted - 1, 0)
        original(self, features, tokens, gained)

    target, head = causal_head()
    monkeypatch.setattr(Watched, "take_features", lax)
    ids, mask = prompts(RAGGED)
    drafter = Watched(head)
    with torch.inference_mode():
        specdec_ext.generate(
            target, drafter, ids, attention_mask=mask, max_new_tokens=LIMITS, temperature=0.7,
            seeds=4, gamma=3,
        )  # fmt: skip
        with pytest.raises(AssertionError):
            check_rows(drafter, target, head)


@pytest.mark.every("company")
@pytest.mark.parametrize("company", ["alone", "tree", "coupled", "stack", "grown"])
@pytest.mark.parametrize("lengths", [RAGGED, [1], [4]], ids=["ragged", "one token", "one"])
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "whole"])
def test_tokens_of_plain_decoding(reduced, lengths, company):
    target, head = causal_head("llama", reduced)
    ids, mask = prompts(lengths)
    options = {"attention_mask": mask, "max_new_tokens": LIMITS[: len(lengths)]}
    if company == "coupled":
        options |= {"rule": "coupled", "temperature": 0.8, "seeds": 1}
    drafter = EagleDrafter(head)
    if company == "stack":
        drafter = StackedDrafter(LookupDrafter(), drafter)
    shape = {"gamma": 4}
    if company in ("tree", "grown"):
        grown = GrownTree(8, 3, beam=2)
        shape = {"tree": grown if company == "grown" else StaticTree.from_widths((2, 2, 1))}
    plain, _ = specdec_ext.generate(target, None, ids, **options)
    found, statistics = specdec_ext.generate(target, drafter, ids, **shape, **options)
    assert torch.equal(found, plain) and statistics.drafted > 0
    if len(lengths) > 1:  # of a single text this untrained head may foresee nothing
        assert statistics.accepted > 0


def test_grown_trees_are_those_over_the_targets_vocabulary(monkeypatch):
    """They grow from rows of the head's own tokens, unless these are to be masked."""
    drafted: list[list] = []

    class Recorded(EagleDrafter):
        masks = None

        def start(self, requests):
            super().start(replace(requests, mask_nodes=self.masks))

        def propose_tree(self, positions):
            draft = super().propose_tree(positions)
            drafted[-1].append((draft.tokens.tolist(), draft.parents.tolist()))
            return draft

    class Spread(Recorded):
        @staticmethod
        def masks(rows, tokens, parents):
            assert rows.shape[-1] == target.config.vocab_size
            return rows

    target, head = causal_head("llama", True)
    ids, mask = prompts(RAGGED)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "tree": GrownTree(8, 3, beam=2)}
    for drafter in (Spread(head), Recorded(head)):
        drafted.append([])
        if type(drafter) is Recorded:
            monkeypatch.setattr(Recorded, "_over_the_target", None)  # nothing is spread
        specdec_ext.generate(target, drafter, ids, **options)
    assert drafted[0] == drafted[1]
    own = set(head.draft_token_ids.tolist())
    tokens = {t for trees, _ in drafted[1] for tree in trees for t in tree[1:]}
    assert len(tokens) > 3 and tokens <= own | {-1} and len(own) < target.config.vocab_size


# ---- the head itself -----------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path):
    target, head = causal_head()
    head.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = EagleHead.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(again.draft_token_ids, head.draft_token_ids)
    ids, states = torch.tensor([[1, 2, 3]]), torch.randn(1, 3, 32, dtype=torch.float64)
    assert torch.equal(again(ids, states).logits, head(ids, states).logits)
    assert again.to(torch.bfloat16)(ids, states).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_saved_and_loaded_in_half_precision(tmp_path, dtype):
    """The head that was made is the one that is loaded, at any distance between tokens."""
    target = copy.deepcopy(pair()[0]).to(dtype)
    head = EagleHead.from_target(target, initializer_range=0.3)
    assert {weight.dtype for weight in head.parameters()} == {dtype}
    head.save_pretrained(tmp_path)
    again = EagleHead.from_pretrained(tmp_path, dtype=dtype).eval()
    for buffer, loaded in zip(head.buffers(), again.buffers(), strict=True):
        assert buffer.dtype == loaded.dtype and torch.equal(buffer, loaded)
    ids, states = torch.arange(900)[None] % 67, torch.randn(1, 900, 32).to(dtype)
    with torch.no_grad():
        assert torch.equal(again(ids, states).logits, head(ids, states).logits)


def test_the_loss_by_hand():
    _, head = table_and_head()
    torch.manual_seed(0)
    tokens, states = torch.randint(4, (2, 5)), torch.randn(2, 5, 4)
    logits, mask = torch.randn(2, 5, 4), torch.ones(2, 5)
    mask[1, 3:] = 0
    with torch.no_grad():
        loss, parts = eagle_loss(head, tokens, states, logits, mask, law_weight=0.3)
        distances, entropies = [], []
        for b, length in ((0, 5), (1, 3)):
            output = head(tokens[b : b + 1, 1:length], states[b : b + 1, : length - 1])
            error = (output.hidden_states[-1][0] - states[b, 1:length]).abs()
            distances += torch.where(error < 1, error**2 / 2, error - 0.5).flatten().tolist()
            law = logits[b, 1:length][:, REDUCED].softmax(-1)
            entropies += (-(law * output.logits[0].log_softmax(-1)).sum(-1)).tolist()
    distance, entropy = (sum(each) / len(each) for each in (distances, entropies))
    assert parts.tolist() == pytest.approx([distance, entropy], rel=1e-5)
    assert loss.item() == pytest.approx(distance + 0.3 * entropy, rel=1e-5)


@pytest.mark.parametrize("unrolled", [1, 3])
@pytest.mark.parametrize(("length", "counts"), [(5, 0), (1, 1), (1, 0)])
def test_the_loss_where_nothing_counts(length, counts, unrolled):
    """As of other heads: a batch of which nothing can be learned moves no weight."""
    _, head = table_and_head()
    rows, mask = torch.randn(2, length, 4), torch.full((2, length), counts)
    tokens = torch.ones(2, length, dtype=torch.int64)
    loss, parts = eagle_loss(head, tokens, rows, rows, mask, unrolled=unrolled)
    assert loss == 0 and parts.isnan().all()
    (gradient,) = torch.autograd.grad(loss, head.fuse.weight)
    assert not gradient.any()


def rounds_by_hand(head, tokens, states, length):
    """A head's outputs in rounds from every place, by place: [(element, its state, its row)]."""
    found = [[] for _ in range(length)]
    for first in range(tokens.shape[1] - 1):
        read = states[:, : first + 1]
        for place in range(min(length, tokens.shape[1] - 1 - first)):
            output = head(tokens[:, 1 : first + place + 2], read)
            estimate = output.hidden_states[-1][:, -1:]
            found[place].append((first + place, estimate[0, 0], output.logits[0, -1]))
            read = torch.cat([read, estimate], 1)
    return found


@pytest.mark.parametrize(("unrolled", "layers"), [(2, 1), (3, 1), (3, 2)])
def test_the_unrolled_loss_by_hand(unrolled, layers):
    """A later place of a round is learned behind the head's own estimates of its earlier ones."""
    torch.manual_seed(1)
    config = EagleHeadConfig(
        hidden_size=8, intermediate_size=6, num_attention_heads=2, vocab_size=4,
        draft_vocab_size=len(REDUCED), num_hidden_layers=layers,
    )  # fmt: skip
    head = EagleHead(config).double().eval()
    head.draft_token_ids.copy_(REDUCED)
    tokens, states = torch.randint(4, (1, 6)), torch.randn(1, 6, 8).double()
    logits, mask = torch.randn(1, 6, 4).double(), torch.ones(1, 6)
    mask[0, 2] = 0
    loss, parts = eagle_loss(head, tokens, states, logits, mask, unrolled=unrolled)
    known = eagle_loss(head, tokens, states, logits[..., REDUCED], mask, unrolled=unrolled)
    assert torch.equal(loss, known[0]) and torch.equal(parts, known[1])
    means = []
    for own in rounds_by_hand(head, tokens, states, unrolled):
        counted = [each for each in own if mask[0, each[0] + 1]]
        error = torch.stack([s - states[0, e + 1] for e, s, _ in counted]).abs()
        distance = torch.where(error < 1, error**2 / 2, error - 0.5).mean()
        laws = torch.stack([logits[0, e + 1][REDUCED] for e, _, _ in counted]).softmax(-1)
        rows = torch.stack([row for _, _, row in counted]).log_softmax(-1)
        means.append(torch.stack([distance, -(laws * rows).sum(-1).mean()]))
    wanted = torch.stack(means).mean(0)
    by_hand = wanted[0] + 0.1 * wanted[1]
    assert parts.tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    for name, own, expected in zip(
        dict(head.named_parameters()),
        torch.autograd.grad(loss, weights),
        torch.autograd.grad(by_hand, weights),
        strict=True,
    ):
        assert torch.allclose(own, expected, rtol=1e-3, atol=1e-6), name
    with torch.no_grad():
        plain, _ = eagle_loss(head, tokens, states, logits, mask)
    assert abs(loss.item() - plain.item()) > 1e-3  # its own estimates are not the target's states


def test_what_is_refused():
    target, head = table_and_head()
    with pytest.raises(TypeError, match="EagleDrafter: head must be an EagleHead"):
        EagleDrafter(target)
    with pytest.raises(TypeError, match="one that reads no hidden states"):
        HierarchicalDrafter(pair()[1], EagleDrafter(head))
    rows = torch.zeros(1, 3, 4)
    with pytest.raises(ValueError, match=r"eagle_loss: unrolled must be .* got 0"):
        eagle_loss(head, torch.tensor([[1, 2, 3]]), rows, rows, unrolled=0)
    with pytest.raises(ValueError, match=r"V = 4 or .* Vd = 3, got \[1, 3, 2\]"):
        eagle_loss(head, torch.tensor([[1, 2, 3]]), rows, rows[..., :2])
    for wrong in ({"tokens": torch.ones(1, 4).long()}, {"target_logits": rows[:, :2]}):
        given = {"tokens": torch.ones(1, 3).long(), "features": rows, "target_logits": rows}
        with pytest.raises(ValueError, match=r"with the B and n of features, \[1, 3\], got \[1, "):
            eagle_loss(head, **{**given, **wrong})
    with pytest.raises(ValueError, match=r"draft_vocab_size must be in \[1, 4\], got 5"):
        EagleHead(EagleHeadConfig(vocab_size=4, draft_vocab_size=5))
    with pytest.raises(TypeError, match="must have an embedding and an output head"):
        EagleHead.from_target(pair()[0].model)
    with pytest.raises(TypeError, match="EagleHead: draft_token_ids must be an int64 tensor"):
        EagleHead.from_target(pair()[0], [3, 1])
    with pytest.raises(ValueError, match="EagleHead: draft_token_ids must be 2 distinct tokens"):
        EagleHead.from_target(pair()[0], torch.tensor([3, 3]))
