"""Drafts of a block from one call: the law, greedy output, batches, what the prefix cache keeps."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from enumerated_drafts import PROMPT, Round, check_lossless
from generate_models import TableModel, joint_law, tables
from spec_drafters import spec_drafter
from test_encoder_decoder import inputs_of, models, plain, start
from test_generate_law import ALPHA, chi_square
from transformers.modeling_outputs import BaseModelOutput

import specdec_ext
from specdec_ext import hf
from specdec_ext.decoding import (
    BlockDrafter,
    ConfidenceStop,
    Counts,
    Draft,
    HierarchicalDrafter,
    LookupDrafter,
    Requests,
    StackedDrafter,
)
from specdec_ext.decoding.encoder_decoder import encoded

RULES = ["block", "token"]
VOCABULARY = 3


# --- the law ------------------------------------------------------------------------------------


class Penalty:
    """A logits processor: a token that was there before is less likely."""

    def __call__(self, input_ids, scores):
        there = torch.nn.functional.one_hot(input_ids, scores.shape[-1]).amax(1).bool()
        return torch.where(there, scores - 1.5, scores)


def enumerated_law(drafter_of, monkeypatch, rule, process=None, known=None):
    """Exact law of a round of a drafter and `specdec_ext.verify`, over drafts, coins and draws."""
    ids = None if known is None else torch.tensor(known)
    return Round(drafter_of, VOCABULARY, process=process, token_ids=ids).law(monkeypatch, rule)


def of_batch(kind=BlockDrafter, known=None, **options):
    model = spec_drafter(VOCABULARY, block_size=3)
    if known is not None:
        model = model.with_vocabulary(torch.tensor(known))
    return lambda rows: kind(model, torch.tensor([[2, 1, 2]]).repeat(rows, 1), **options)


def processed(logits, drafted, emitted=None):
    """What the loop does to a drafter's rows: after each, the processor sees what was drafted."""
    ids = torch.cat([torch.tensor([PROMPT]).repeat(len(drafted), 1), drafted], 1)
    return Penalty()(ids, logits[:, 0])[:, None]


@pytest.mark.parametrize("known", [None, [2, 0]], ids=["all tokens", "two of three"])
@pytest.mark.parametrize("process", [None, processed], ids=["plain", "processed"])
@pytest.mark.parametrize("rule", RULES)
def test_exact_law(monkeypatch, rule, process, known):
    """Slots are independent given the prefix: their marginals are the q of every lossless rule."""
    check_lossless(enumerated_law(of_batch(known=known), monkeypatch, rule, process, known))


class NeighbouringRow(BlockDrafter):
    """Passes on the row of another slot than the one that each token was drawn from."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        return draft._replace(logits=None if draft.logits is None else draft.logits.roll(1, 1))


class OtherTokens(BlockDrafter):
    """Says that the entries of its laws are other tokens than those that it drew."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        return draft._replace(token_ids=None if draft.logits is None else draft.token_ids.roll(1))


class Unprocessed(BlockDrafter):
    """Passes on the rows as the model gave them, and draws from processed ones."""

    def propose(self, gamma, positions, go_on=None):
        kept = []
        draft_block = self.model.draft_block
        self.model = SimpleNamespace(
            draft_block=lambda *given: kept.append(draft_block(*given)) or kept[0],
        )
        return Draft(super().propose(gamma, positions, go_on).tokens, kept[0][:, :gamma].float())


class Dropping(BlockDrafter):
    """Drops a token because of its value, once it has seen it."""

    def propose(self, gamma, positions, go_on=None):
        draft = super().propose(gamma, positions, go_on)
        return draft._replace(tokens=torch.where(draft.tokens != 1, draft.tokens, -1))


@pytest.mark.parametrize(
    "kind, process, known",
    [
        (NeighbouringRow, None, None),
        (Unprocessed, processed, None),
        (NeighbouringRow, None, [2, 0]),
    ],
    ids=["row", "processor", "row of two of three"],
)
@pytest.mark.parametrize("rule", RULES)
def test_control_another_row_than_the_one_that_was_drawn_from(
    monkeypatch, rule, kind, process, known
):
    found = enumerated_law(of_batch(kind, known), monkeypatch, rule, process, known)
    assert found.tv > 1e-2


DRAWS = 4_000


def emitted_p_value(kind, rule, *, temperature=1.0, known=None, **options):
    """Generate and test the joint law of three tokens, over several rounds."""
    target, _ = tables(4)
    model = spec_drafter(4, block_size=3)
    if known is not None:
        model = model.with_vocabulary(torch.tensor(known))
    drafter = kind(model, torch.tensor([[2, 3, 1]]).repeat(DRAWS, 1))
    sequences, statistics = specdec_ext.generate(
        target, drafter, torch.tensor([[1, 2]]).repeat(DRAWS, 1), max_new_tokens=3, rule=rule,
        temperature=temperature, seeds=torch.arange(DRAWS) * 7919, eos_token_id=(), **options,
    )  # fmt: skip
    assert statistics.accepted > 0 and statistics.rejected > 0
    codes = (sequences[:, 2:] * torch.tensor([16, 4, 1])).sum(1)
    law = joint_law(target, [1, 2], 3, temperature)
    return chi_square(torch.bincount(codes, minlength=64), law)


@pytest.mark.every("rule")
@pytest.mark.parametrize("rule", [*RULES, "coupled"])
@pytest.mark.parametrize("gamma", [3, "confidence"])
def test_law_over_rounds(rule, gamma):
    policy = ConfidenceStop(3, 0.4) if gamma == "confidence" else gamma
    assert emitted_p_value(BlockDrafter, rule, gamma=policy) > ALPHA


@pytest.mark.parametrize("known", [None, [3, 0, 2]], ids=["all tokens", "three of four"])
def test_law_under_filters_of_its_own(known):
    options = {"draft_temperature": 0.6, "draft_top_k": 3, "temperature": 0.8}
    assert emitted_p_value(BlockDrafter, "block", gamma=3, known=known, **options) > ALPHA


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_law_over_rounds_of_a_reduced_vocabulary(rule):
    policy = ConfidenceStop(3, 0.4)
    assert emitted_p_value(BlockDrafter, rule, gamma=policy, known=[3, 1]) > ALPHA


@pytest.mark.parametrize(
    "kind, known",
    [(NeighbouringRow, None), (Dropping, None), (OtherTokens, [3, 0, 2])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_control_laws_over_rounds(kind, known):
    assert emitted_p_value(kind, "block", gamma=2, known=known) < ALPHA


# --- greedy ---------------------------------------------------------------------------------------


BLOCK = 4


@pytest.mark.parametrize("known", [None, 40], ids=["all tokens", "40 of 67"])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
@torch.inference_mode()
def test_greedy_equals_plain_decoding(name, known):
    """Token by token: rows of unlike length, limits of their own, requests that end early."""
    target, _ = models(name)
    inputs = inputs_of(name)
    limits = [20, 18, 16]
    expected = [plain(target, inputs, b)[: 1 + limit] for b, limit in enumerate(limits)]
    model = spec_drafter(67, block_size=BLOCK)
    if known is not None:
        model = model.with_vocabulary(torch.arange(67).flip(0)[:known])
    drafter = BlockDrafter(model, **inputs)
    for gamma in (BLOCK, 2):
        found, statistics = specdec_ext.generate(
            encoded(target, **inputs), drafter, start(3), max_new_tokens=limits, gamma=gamma,
            rule="greedy",
        )  # fmt: skip
        for row, right in zip(found.tolist(), expected, strict=True):
            assert row[: len(right)] == right and not any(row[len(right) :])
        assert statistics.rejected > 0


class Oracle:
    """A block model that knows the texts, and is wrong at every fifth token."""

    def __init__(self, texts):
        self.texts, self.config = texts, SimpleNamespace(block_size=BLOCK)

    def read(self, input_ids, attention_mask=None, room=0):
        texts = [list(text) for text in self.texts]
        state = SimpleNamespace(texts=texts, known=[0] * len(texts), calls=0)

        def select(rows, indices):
            state.texts = [state.texts[i] for i in indices]
            state.known = [state.known[i] for i in indices]

        state.select = select
        return state

    def draft_block(self, state, tokens, new, block_size, wanted):
        logits = torch.zeros(len(state.texts), wanted, 67)
        for b, text in enumerate(state.texts):
            said = tokens[b, : new.host[b]].tolist()
            assert text[state.known[b] : state.known[b] + len(said)] == said
            state.known[b] += len(said)
            for i in range(wanted):
                at = state.known[b] + i
                right = text[at] if at < len(text) else 0
                logits[b, i, right if at % 5 else (right + 1) % 67] = 5.0
        state.calls += 1
        return logits


@torch.inference_mode()
def test_what_was_emitted_is_what_the_model_is_told():
    """Ragged batches: each row's tokens once, in order, whatever the others accepted."""
    target, _ = models("t5")
    inputs = inputs_of("t5")
    texts = [plain(target, inputs, b) for b in range(3)]
    found, statistics = specdec_ext.generate(
        encoded(target, **inputs), BlockDrafter(Oracle(texts), **inputs), start(3),
        max_new_tokens=[20, 11, 16], gamma=BLOCK,
    )  # fmt: skip
    for row, text, limit in zip(found.tolist(), texts, [20, 11, 16], strict=True):
        assert row[: 1 + limit] == text[: 1 + limit] + [0] * (1 + limit - len(text))
    assert statistics.tokens_per_target_call > 3.0
    assert statistics.draft_calls <= statistics.rounds


# --- batches, stacks, hierarchies ------------------------------------------------------------


def test_a_round_is_one_call():
    """On what is new and the slots: never on the prefix, which is cached."""
    model = spec_drafter(4, block_size=3)
    seen = []
    decode = model._decode

    def counted(embeddings, *rest):
        seen.append(embeddings.shape[1])
        return decode(embeddings, *rest)

    model._decode = counted
    target, _ = tables(4)
    drafter = BlockDrafter(model, torch.tensor([[2, 3, 1]]))
    bursts = []
    _, statistics = specdec_ext.generate(
        target, drafter, torch.tensor([[1, 2, 3, 1, 2]]), max_new_tokens=30, gamma=3,
        temperature=1.0, seeds=1, on_round=bursts.append,
    )  # fmt: skip
    gained = [len(burst[0].tokens) for burst in bursts]
    assert len(seen) == statistics.draft_calls == drafter.calls <= statistics.rounds
    assert seen == [n + 3 for n in [5, *gained]][: len(seen)]
    assert max(gained) > 1


PROMPTS = torch.tensor([[0, 0, 1, 2, 1], [3, 1, 2, 3, 1], [0, 0, 0, 0, 2], [2, 2, 2, 2, 2]])
PROMPT_MASK = torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 0, 0, 0, 1], [1] * 5])
SOURCES = torch.tensor([[2, 3, 1, 0], [1, 2, 3, 2], [3, 0, 0, 0], [2, 2, 1, 3]])
SOURCE_MASK = torch.tensor([[1, 1, 1, 0], [1] * 4, [1, 0, 0, 0], [1] * 4])


def alone(model, b):
    real = SOURCE_MASK[b].bool()
    return BlockDrafter(model, SOURCES[b : b + 1, real])


WITHIN = {
    "behind a lookup": lambda block, draft: StackedDrafter(LookupDrafter(min_match=2), block),
    "before a model": lambda block, draft: StackedDrafter(block, draft),
    "drafts for a model": lambda block, draft: HierarchicalDrafter(draft, block, 2),
}


@pytest.mark.parametrize("rule", ["block", "coupled", "greedy"])
@pytest.mark.parametrize("within", WITHIN)
def test_output_does_not_depend_on_batch_mates(within, rule):
    """Padded sources and prompts; rows accept as many as they accept alone."""
    target, draft = tables(4, noise=0.7)
    model = spec_drafter(4, block_size=3)
    seeds, limits = torch.tensor([5, -3, 2**62, 8]), [11, 5, 14, 9]
    options = {"gamma": 3, "rule": rule, "pad_token_id": 0}
    if rule != "greedy":
        options["temperature"] = 1.0
    together, statistics = specdec_ext.generate(
        target, WITHIN[within](BlockDrafter(model, SOURCES, SOURCE_MASK), draft), PROMPTS,
        attention_mask=PROMPT_MASK, seeds=seeds, max_new_tokens=limits, **options,
    )  # fmt: skip
    assert statistics.accepted > 0
    for b in range(4):
        own = PROMPTS[b : b + 1, PROMPT_MASK[b].bool()]
        given = {"seeds": seeds[b : b + 1], "max_new_tokens": limits[b], **options}
        found = specdec_ext.generate(
            target, WITHIN[within](alone(model, b), draft), own, **given
        ).sequences
        assert torch.equal(together[b, 5 : 5 + limits[b]], found[0, own.shape[1] :])
        if rule != "block":
            assert torch.equal(found, specdec_ext.generate(target, None, own, **given).sequences)


def test_taken_back_tokens_are_as_if_they_had_not_been():
    """`revise`, as hierarchies call it, against a drafter that is started on the text."""
    model = spec_drafter(9, block_size=3)
    source = torch.tensor([[2, 3, 1], [4, 5, 1]])

    def started(texts):
        width = max(map(len, texts))
        ids = torch.tensor([[0] * (width - len(t)) + t for t in texts])
        mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])
        drafter = BlockDrafter(model, source)
        ends = torch.tensor([50, 50])
        drafter.start(Requests(ids, mask, ends, 0, None, {}, True, True))
        return drafter

    positions = torch.tensor([3, 3])
    drafter = started([[0, 4], [0, 7]])
    drafter.propose(3, positions)
    drafter.commit(torch.tensor([[5, 6, 7, 8], [3, 3, 0, 0]]), Counts([3, 1], torch.tensor([3, 1])))
    drafter.propose(3, positions)
    drafter.commit(torch.tensor([[2, 1], [2, 0]]), Counts([1, 0], torch.tensor([1, 0])))
    # 0 4 5 6 7 8 2 1 and 0 7 3 3 2: five tokens are gone of one, one of the other.
    text = torch.tensor([[-1, 0, 4, 5, 8], [0, 7, 3, 3, 8]])
    drafter.revise(text, Counts([5, 1], torch.tensor([5, 1])))
    found = drafter.propose(3, positions).logits
    expected = started([[0, 4, 5, 8], [0, 7, 3, 3, 8]]).propose(3, positions).logits
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(
        expected, started([[0, 4, 5], [0, 7, 3]]).propose(3, positions).logits
    )


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_inside_transformers_generate(options):
    target, _ = models("t5")
    inputs = inputs_of("t5")
    ours = {"custom_generate": hf.generate_fn, "draft_model": spec_drafter(67, block_size=BLOCK)}
    given = {"max_new_tokens": 12, "do_sample": False, **options}
    found = target.generate(**inputs, **given, **ours, gamma=BLOCK)
    if options:
        assert found.shape[0] == 6
    else:
        assert found.tolist() == target.generate(**inputs, **given).tolist()


# --- Spec-Verification ----------------------------------------------------------------------------


def sure_target():
    """A T5 whose laws are far from uniform: its likeliest tokens are about 1 nat apart."""
    target, _ = models("t5")
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(10.0)
    return target


class NearlyTheTarget:
    """A block model whose slots are the target's greedy text, from rows with noise on them.

    It stands for a drafter that has learned much: what it gets wrong is likely all the same.
    """

    def __init__(self, target, block_size=5, noise=1.0):
        self.target, self.noise = target, noise
        self.config = SimpleNamespace(block_size=block_size)

    def read(self, input_ids, attention_mask=None, room=0):
        states = self.target.get_encoder()(input_ids).last_hidden_state
        state = SimpleNamespace(states=states, texts=[[] for _ in input_ids], calls=0)

        def select(rows, indices):
            state.states = state.states[rows]
            state.texts = [state.texts[i] for i in indices]

        state.select = select
        return state

    def draft_block(self, state, tokens, new, block_size, wanted):
        for text, said, count in zip(state.texts, tokens.tolist(), new.host, strict=True):
            text += said[:count]
        generators = [torch.Generator().manual_seed(len(text)) for text in state.texts]
        ahead = [list(text) for text in state.texts]
        found = []
        for _ in range(wanted):
            width = max(map(len, ahead))
            ids = torch.tensor([text + [0] * (width - len(text)) for text in ahead])
            outputs = BaseModelOutput(last_hidden_state=state.states)
            logits = self.target(encoder_outputs=outputs, decoder_input_ids=ids).logits
            last = torch.tensor([len(text) - 1 for text in ahead])
            rows = logits[torch.arange(len(ahead)), last]
            noise = [torch.randn(rows.shape[1], generator=generator) for generator in generators]
            found.append(rows + self.noise * torch.stack(noise))
            for text, token in zip(ahead, found[-1].argmax(-1).tolist(), strict=True):
                text.append(token)
        state.calls += 1
        return torch.stack(found, 1)


@pytest.mark.parametrize("beta, tau", [(1, 1.0), (3, 1.0), (5, 3.0)])
@torch.inference_mode()
def test_top_beta_accepts_what_equations_8_to_10_say(beta, tau):
    """Against the definition, on the target's own rows, in every round of a generation."""
    target = sure_target()
    inputs = {name: value[:1] for name, value in inputs_of("t5").items()}
    drafter = BlockDrafter(NearlyTheTarget(target, BLOCK), **inputs)
    drafts = []
    propose = drafter.propose
    drafter.propose = lambda *given: drafts.append(propose(*given)) or drafts[-1]
    rounds = []
    found, _ = specdec_ext.generate(
        encoded(target, **inputs), drafter, start(1), max_new_tokens=40, gamma=BLOCK,
        rule="top_beta", beta=beta, tau=tau, eos_token_id=(), on_round=rounds.append,
    )  # fmt: skip
    rows = target(**inputs, decoder_input_ids=found).logits[0].log_softmax(-1)
    at, relaxed = 0, 0  # tokens before the round
    for (burst,), draft in zip(rounds[:-1], drafts, strict=False):
        for i, token in enumerate(draft.tokens[0].tolist()):
            row = rows[at + i]
            best = row.topk(beta).values
            accepts = row[token] >= best[-1] and best[0] - row[token] <= tau  # (8) and (9)
            assert accepts == (i < burst.accepted)
            if not accepts:
                break
            relaxed += token != row.argmax()
        assert burst.tokens[-1] == rows[at + burst.accepted].argmax()
        at += len(burst.tokens)
    assert (relaxed > 0) == (beta > 1)


@torch.inference_mode()
def tokens_per_call(sources, **options):
    """Tok., the paper's measure: tokens that a round emits, over a set of sentences."""
    target = sure_target()
    drafter = BlockDrafter(NearlyTheTarget(target), sources)
    _, statistics = specdec_ext.generate(
        encoded(target, input_ids=sources), drafter, start(len(sources)), max_new_tokens=15,
        gamma=5, eos_token_id=(), **options,
    )  # fmt: skip
    return statistics.tokens_per_target_call


@pytest.mark.parametrize("seed", range(3))
def test_spec_verification_takes_no_fewer_tokens_a_call(seed):
    """Tok. of top_beta against vanilla verification on a set of sentences, and by beta and tau."""
    generator = torch.Generator().manual_seed(seed)
    sources = torch.randint(3, 67, (6, 7), generator=generator)
    vanilla = tokens_per_call(sources, rule="greedy")
    narrow = tokens_per_call(sources, rule="top_beta", beta=3, tau=1.0)
    wide = tokens_per_call(sources, rule="top_beta", beta=5, tau=5.0)
    assert 1.2 < vanilla < narrow < wide
    assert tokens_per_call(sources, rule="top_beta", beta=1, tau=1.0) == vanilla
    assert tokens_per_call(sources, rule="top_beta", beta=3, tau=0.0) == vanilla


@pytest.mark.parametrize("stacked", [False, True])
def test_a_model_in_training_mode(stacked):
    """`SpecDrafter.from_target` makes one, whose dropout would be in every draft."""
    target, _ = models("t5")
    source = inputs_of("t5")
    model = spec_drafter(target.config.vocab_size, 4)
    for training in (False, True):
        drafter = BlockDrafter(model.train(training), **source)
        draft = StackedDrafter(LookupDrafter(), drafter) if stacked else drafter
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            specdec_ext.generate(
                encoded(target, **source),
                draft,
                start(len(source["input_ids"])),
                gamma=3,
                max_new_tokens=4,
            )
        assert any("training mode" in str(each.message) for each in caught) == training


# --- refused -------------------------------------------------------------------------------------


def test_refused():
    model = spec_drafter(9, block_size=3)
    source = torch.tensor([[2, 3, 1]])
    with pytest.raises(TypeError, match="must predict blocks, as SpecDrafter does.*got TableModel"):
        BlockDrafter(TableModel(torch.zeros(3, 3, 3)), source)
    with pytest.raises(TypeError, match="input_ids must be a tensor, got list"):
        BlockDrafter(model, [[2, 3]])
    with pytest.raises(TypeError, match="attention_mask must be a tensor or None, got list"):
        BlockDrafter(model, source, [[1, 1, 1]])
    with pytest.raises(ValueError, match=r"input_ids must be \[B, S\], got \[3\]"):
        BlockDrafter(model, source[0])
    with pytest.raises(ValueError, match=r"attention_mask must be .* \[1, 3\], got \[1, 2\]"):
        BlockDrafter(model, source, torch.ones(1, 2))
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=rf"block_size must be in \[1, 3\], got {wrong}"):
            BlockDrafter(model, source, block_size=wrong)
    target, _ = tables(9)
    with pytest.raises(ValueError, match="1 sources were given, but there are 2 requests"):
        specdec_ext.generate(target, BlockDrafter(model, source), torch.tensor([[1], [2]]))
