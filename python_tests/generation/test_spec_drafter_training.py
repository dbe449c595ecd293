"""The objective of Spec-Drafter: equation 5 by hand, glancing, its schedule; a task is learned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.spec_drafters import spec_drafter

from specdec_ext.models.spec_drafter import MASKED, SpecDrafter, SpecDrafterConfig
from specdec_ext.models.spec_drafter_training import (
    IGNORED,
    glance,
    glancing_ratio,
    masked_block,
    sample_prefix_lengths,
    spec_drafter_loss,
)

NONE = IGNORED
LABELS = torch.tensor([[5, 6, 7, 8, 1], [9, 4, 1, NONE, NONE], [3, 1, NONE, NONE, NONE]])


# --- blocks ---------------------------------------------------------------------------------------


def test_block_behind_no_prefix():
    """p = 0: the decoder's start token, then [MASK]s for y_1 .. y_k."""
    block = masked_block(LABELS, torch.tensor([0, 0, 0]), block_size=3, start_token=0)
    assert block.prefix_ids.tolist() == [[0], [0], [0]]
    assert block.prefix_lengths.tolist() == [1, 1, 1]
    assert block.targets.tolist() == [[5, 6, 7], [9, 4, 1], [3, 1, NONE]]


def test_block_that_reaches_behind_the_end():
    """p + k > m: what there is of the text, and k slots all the same."""
    block = masked_block(LABELS, torch.tensor([4, 1, 1]), block_size=3, start_token=0)
    kept = [row[:length] for row, length in zip(block.prefix_ids.tolist(), [5, 2, 2], strict=True)]
    assert kept == [[0, 5, 6, 7, 8], [0, 9], [0, 3]]
    assert block.prefix_lengths.tolist() == [5, 2, 2]
    assert block.targets.tolist() == [[1, NONE, NONE], [4, 1, NONE], [1, NONE, NONE]]
    assert (block.prefix_ids >= 0).all()  # padding can be embedded


def test_prefix_lengths_are_uniform():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 2, 5]).repeat_interleave(20_000)
    drawn = sample_prefix_lengths(lengths, generator).reshape(3, -1)
    for row, m in zip(drawn, (1, 2, 5), strict=True):
        shares = torch.bincount(row, minlength=m) / 20_000
        assert len(shares) == m and (shares - 1 / m).abs().max() < 0.02  # five standard errors


# --- glancing -------------------------------------------------------------------------------------


TARGETS = torch.tensor([[5, 6, 7, 8, 1, NONE], [9, 4, 1, NONE, NONE, NONE]])


@pytest.mark.parametrize(
    "predictions, ratio, counts",
    [
        ([[5, 6, 7, 8, 1, 0], [9, 4, 1, 0, 0, 0]], 0.5, [0, 0]),  # all right: nothing to show
        ([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], 0.5, [2, 1]),  # d = 5 and 3, halves down
        ([[5, 6, 0, 0, 0, 0], [9, 4, 0, 0, 0, 0]], 0.5, [1, 0]),  # d = 3 and 1
        ([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], 0.3, [1, 0]),
        ([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], 0.6, [3, 1]),  # .6 * 5 = 3 exactly
        ([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], 0.999, [4, 2]),  # one stays masked
        ([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], 0.0, [0, 0]),
    ],
)
def test_counts_of_glanced_tokens(predictions, ratio, counts):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        found = glance(TARGETS, torch.tensor(predictions), ratio, generator)
        shown = found != MASKED
        assert shown.sum(1).tolist() == counts
        assert (found[shown] == TARGETS[shown]).all()
        assert not shown[TARGETS == NONE].any()


def test_any_slot_with_a_target_may_be_shown():
    """Right or wrong, each as often: 2 of 5."""
    targets = TARGETS[:1].expand(20_000, -1)
    predictions = torch.tensor([[5, 0, 0, 0, 0, 0]]).expand(20_000, -1)  # d = 4
    found = glance(targets, predictions, 0.5, torch.Generator().manual_seed(1)) != MASKED
    shares = found.double().mean(0)
    assert (shares[:5] - 0.4).abs().max() < 0.02 and shares[5] == 0


def test_schedule_of_glancing():
    assert [glancing_ratio(x) for x in (0.0, 0.5, 1.0)] == pytest.approx([0.5, 0.4, 0.3])
    assert glancing_ratio(0.25, 0.8, 0.0) == pytest.approx(0.6)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"progress must be in \[0, 1\]"):
            glancing_ratio(wrong)
    with pytest.raises(ValueError, match=r"first must be in \[0, 1\), got 1.0"):
        glancing_ratio(0.5, 1.0)
    with pytest.raises(ValueError, match=r"last must be in \[0, 1\), got -0.5"):
        glancing_ratio(0.5, 0.5, -0.5)


# --- the loss -------------------------------------------------------------------------------------


class Scripted:
    """A model whose slot i gives a table's row p + i, so that equation 5 can be added up.

    It remembers what it was called with.
    """

    def __init__(self, block_size, vocabulary=12, known=None):
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(40, vocabulary, generator=generator)
        self.config = SimpleNamespace(
            block_size=block_size, decoder_start_token_id=0, vocab_size=vocabulary
        )
        self.draft_token_ids = None if known is None else torch.tensor(known)
        self.calls, self.encoded = [], 0

    def get_encoder(self):
        return self.encode

    def encode(self, input_ids, attention_mask):
        self.encoded += 1
        return SimpleNamespace(last_hidden_state=input_ids[..., None])

    def __call__(self, attention_mask=None, **given):
        self.calls.append(given)
        places = given["prefix_lengths"][:, None] - 1 + torch.arange(self.config.block_size)
        if given["slots"].shape[1] > self.config.block_size:  # the prefix's own tokens, too
            own = torch.arange(given["prefix_ids"].shape[1]).expand(len(places), -1)
            places = torch.cat([own, places], 1)
        logits = self.table[places[given["slots"]]]
        known = self.draft_token_ids
        return SimpleNamespace(logits=logits if known is None else logits[:, known])


def equation_5(model, label, p, k, shown=()):
    """-log P(y_i), i = p + 1 .. p + k, where there is a token that is not shown."""
    text = [token for token in label.tolist() if token != NONE]
    laws = model.table.double().log_softmax(-1)
    places = [i for i in range(p, min(p + k, len(text))) if i - p not in shown]
    return [-laws[i, text[i]].item() for i in places]


@pytest.mark.parametrize("prefixes", [[0, 0, 0], [4, 1, 1], [2, 0, 1]], ids=str)
def test_loss_is_equation_5(monkeypatch, prefixes):
    """With p = 0, with p + k > m, and with both in one batch; a mean over tokens."""
    import specdec_ext.models.spec_drafter_training as training

    monkeypatch.setattr(training, "sample_prefix_lengths", lambda *_: torch.tensor(prefixes))
    model = Scripted(block_size=3)
    found = spec_drafter_loss(model, torch.ones(3, 2), None, LABELS)
    terms = [
        term
        for label, p in zip(LABELS, prefixes, strict=True)
        for term in equation_5(model, label, p, 3)
    ]
    assert len(terms) == sum(min(3, m - p) for m, p in zip((5, 3, 2), prefixes, strict=True))
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert len(model.calls) == 1 and (model.calls[0]["block_ids"] == MASKED).all()


def test_shown_tokens_are_not_predicted(monkeypatch):
    import specdec_ext.models.spec_drafter_training as training

    monkeypatch.setattr(training, "sample_prefix_lengths", lambda *_: torch.tensor([0, 0, 0]))
    model = Scripted(block_size=3)
    generator = torch.Generator().manual_seed(3)
    found = spec_drafter_loss(model, torch.ones(3, 2), None, LABELS, ratio=0.7, generator=generator)
    first, second = (call["block_ids"] for call in model.calls)
    assert (first == MASKED).all() and (second != MASKED).any()
    terms = []
    for label, block in zip(LABELS, second, strict=True):
        shown = [i for i, token in enumerate(block.tolist()) if token != MASKED]
        assert block[shown].tolist() == label[shown].tolist()
        terms += equation_5(model, label, 0, 3, shown)
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    assert model.encoded == 1


def test_several_prefixes_of_a_text(monkeypatch):
    """Each with its own text, source and mask, which are encoded once."""
    import specdec_ext.models.spec_drafter_training as training

    drawn, asked = torch.tensor([4, 0, 1, 2, 0, 1]), []
    monkeypatch.setattr(
        training, "sample_prefix_lengths", lambda lengths, _: (asked.append(lengths), drawn)[1]
    )
    model = Scripted(block_size=3)
    sources, mask = torch.arange(6).view(3, 2), torch.tensor([[1, 1], [1, 0], [1, 1]])
    found = spec_drafter_loss(model, sources, mask, LABELS, prefixes=2)
    assert asked[0].tolist() == [5, 5, 3, 3, 2, 2]
    terms = [
        term
        for row, p in enumerate(drawn.tolist())
        for term in equation_5(model, LABELS[row // 2], p, 3)
    ]
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)
    (call,) = model.calls
    states = call["encoder_outputs"].last_hidden_state[..., 0]
    assert states.tolist() == sources.repeat_interleave(2, 0).tolist() and model.encoded == 1
    with pytest.raises(ValueError, match="prefixes must be .* got 0"):
        spec_drafter_loss(model, sources, mask, LABELS, prefixes=0)


@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_later_slots_count_less(monkeypatch, decay):
    import specdec_ext.models.spec_drafter_training as training

    prefixes = [1, 1, 0]
    monkeypatch.setattr(training, "sample_prefix_lengths", lambda *_: torch.tensor(prefixes))
    model = Scripted(block_size=3)
    found = spec_drafter_loss(model, torch.ones(3, 2), None, LABELS, slot_decay=decay)
    terms = [
        (decay**slot, term)
        for label, p in zip(LABELS, prefixes, strict=True)
        for slot, term in enumerate(equation_5(model, label, p, 3))
    ]
    expected = sum(weight * term for weight, term in terms) / sum(weight for weight, _ in terms)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    for wrong in (0.0, 1.1):
        with pytest.raises(ValueError, match=rf"slot_decay must be in \(0, 1\], got {wrong}"):
            spec_drafter_loss(model, torch.ones(3, 2), None, LABELS, slot_decay=wrong)


def test_the_prefixes_own_tokens(monkeypatch):
    """Each of them, from the first one on, and the one behind the prefix; glancing or not."""
    import specdec_ext.models.spec_drafter_training as training

    prefixes = [2, 0, 1]
    monkeypatch.setattr(training, "sample_prefix_lengths", lambda *_: torch.tensor(prefixes))
    model = Scripted(block_size=3)
    generator = torch.Generator().manual_seed(3)
    found = spec_drafter_loss(
        model, torch.ones(3, 2), None, LABELS, ratio=0.7, prefix_weight=0.5, generator=generator
    )
    shown = [
        [i for i, token in enumerate(row) if token != MASKED]
        for row in model.calls[-1]["block_ids"].tolist()
    ]
    assert any(shown)
    rows = list(zip(LABELS, prefixes, shown, strict=True))
    block = [term for label, p, seen in rows for term in equation_5(model, label, p, 3, seen)]
    own = [term for label, p, _ in rows for term in equation_5(model, label, 0, p + 1)]
    assert len(own) == sum(prefixes) + 3
    expected = sum(block) / len(block) + 0.5 * sum(own) / len(own)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="prefix_weight must be .*at least 0, got -1"):
        spec_drafter_loss(model, torch.ones(3, 2), None, LABELS, prefix_weight=-1)


def test_what_the_prefixes_tokens_say():
    """Each says what it says where nothing stands behind it; the slots say what they say anyhow."""
    model = spec_drafter(12, 3)
    source, tokens = torch.randint(2, 8, (2, 4)), torch.randint(2, 8, (2, 3))
    lengths = torch.tensor([3, 2])
    given = {"prefix_ids": tokens, "prefix_lengths": lengths}
    places = torch.ones(2, 3 + model.config.block_size, dtype=torch.bool)
    found = model(source, **given, slots=places).logits.view(*places.shape, -1)
    torch.testing.assert_close(found[:, 3:], model(source, **given).logits)
    block = torch.randint(2, 8, (2, model.config.block_size))
    for end in (1, 2):  # other tokens behind them, and other slots
        other = torch.cat([tokens[:, :end], torch.randint(2, 8, (2, 3 - end))], 1)
        with torch.inference_mode():
            again = model(source, prefix_ids=other, block_ids=block, slots=places).logits
        torch.testing.assert_close(again.view_as(found)[:, :end], found[:, :end])
        assert not torch.allclose(again.view_as(found)[:, end:3], found[:, end:3])
    with pytest.raises(ValueError, match=r"slots must be \[2, 3\] or, .* \[2, 6\], got \[2, 5\]"):
        model(source, **given, slots=places[:, :5])


def test_slots_and_states_that_were_encoded_before():
    """What training asks the model for is a part of what it says otherwise."""
    model = spec_drafter(12, 3)
    sources, mask = torch.randint(2, 8, (3, 4)), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1] * 4])
    block = masked_block(LABELS, torch.tensor([2, 0, 1]), model.config.block_size, start_token=0)
    given = {"prefix_ids": block.prefix_ids, "prefix_lengths": block.prefix_lengths}
    whole = model(sources, mask, **given).logits
    slots = block.targets != NONE
    states = model.get_encoder()(input_ids=sources, attention_mask=mask)
    asked = model(attention_mask=mask, **given, slots=slots, encoder_outputs=states).logits
    torch.testing.assert_close(asked, whole[slots])
    with pytest.raises(ValueError, match="expected input_ids or encoder_outputs, got neither"):
        model(**given)


@pytest.mark.parametrize("weight", [0.0, 0.5], ids=["slots", "prefixes"])
def test_tokens_that_the_drafter_does_not_know(monkeypatch, weight):
    """They are read and shown, count as wrong in glancing, and are not predicted."""
    import specdec_ext.models.spec_drafter_training as training

    prefixes, known = [2, 0, 1], [9, 1, 5]
    monkeypatch.setattr(training, "sample_prefix_lengths", lambda *_: torch.tensor(prefixes))
    glanced, glance = [], training.glance
    monkeypatch.setattr(
        training, "glance", lambda *given: glanced.append(given[:2]) or glance(*given)
    )
    model = Scripted(block_size=3, known=known)
    found = spec_drafter_loss(
        model, torch.ones(3, 2), None, LABELS, ratio=0.7, prefix_weight=weight,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    ((targets, guessed),) = glanced
    likeliest = torch.tensor(known)[model.table[:, known].argmax(-1)]
    places = torch.tensor(prefixes)[:, None] + torch.arange(3)
    assert torch.equal(guessed, torch.where(targets == NONE, NONE, likeliest[places]))
    assert not torch.isin(targets, torch.tensor([*known, NONE])).all()  # there are others

    def terms(label, start, end, shown=()):
        laws = model.table[:, known].double().log_softmax(-1)
        return [
            -laws[i, known.index(label[i])].item()
            for i in range(start, min(end, len(label)))
            if i - start not in shown and label[i] in known
        ]

    shown = [[i for i, t in enumerate(row) if t != MASKED] for row in model.calls[-1]["block_ids"]]
    rows = list(zip(LABELS.tolist(), prefixes, shown, strict=True))
    block = [term for label, p, seen in rows for term in terms(label, p, p + 3, seen)]
    own = [term for label, p, _ in rows for term in terms(label, 0, p + 1)]
    assert block and own
    expected = sum(block) / len(block) + weight * sum(own) / len(own)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert spec_drafter_loss(Scripted(3, known=[11]), torch.ones(3, 2), None, LABELS) == 0


def test_label_smoothing(monkeypatch):
    import specdec_ext.models.spec_drafter_training as training

    monkeypatch.setattr(training, "sample_prefix_lengths", lambda *_: torch.tensor([4]))
    model = Scripted(block_size=3)
    found = spec_drafter_loss(model, torch.ones(1, 2), None, LABELS[:1], label_smoothing=0.1)
    law = model.table[4].double().log_softmax(-1)
    assert found.item() == pytest.approx(-(0.9 * law[1] + 0.1 * law.mean()).item(), rel=1e-5)


# --- a task ---------------------------------------------------------------------------------------


def marked(number, generator):
    """Strings of three tokens, each one of two that its place has, and the same backwards."""
    drawn = torch.randint(0, 2, (number, 3), generator=generator) + 2 * torch.arange(1, 4)
    end = torch.ones(number, 1, dtype=torch.int64)
    return torch.cat([drawn, end], 1), torch.cat([drawn.flip(1), end], 1)


def test_a_task_is_learned():
    """Whole blocks are right behind every prefix, where a guess would be in one of eight."""
    torch.manual_seed(0)
    steps, block = 250, 4
    config = SpecDrafterConfig(
        vocab_size=8, d_model=32, d_kv=16, d_ff=64, num_heads=2, num_layers=1,
        num_decoder_layers=1, block_size=block, dropout_rate=0.0,
    )  # fmt: skip
    model = SpecDrafter(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        sources, labels = marked(64, generator)
        ratio = glancing_ratio(step / steps)
        loss = spec_drafter_loss(model, sources, None, labels, ratio=ratio, generator=generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    sources, labels = marked(200, generator)
    for p in range(4):
        found = masked_block(labels, torch.full((200,), p), block, start_token=0)
        with torch.inference_mode():
            predicted = model(sources, prefix_ids=found.prefix_ids).logits.argmax(-1)
        exists = found.targets != NONE
        assert ((predicted == found.targets) | ~exists).all(1).float().mean() > 0.95, p
