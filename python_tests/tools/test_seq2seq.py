"""The training of encoder-decoders: schedule, pace, batches, averaging, and resuming to the bit."""

import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from pair.seq2seq import training  # noqa: E402
from pair.seq2seq.block_drafter import (  # noqa: E402
    DrafterOptions,
    build_drafter,
    drafting_loss,
)
from pair.seq2seq.data import BUCKETS, Batches, Copies, Pairs  # noqa: E402
from pair.seq2seq.schedule import Pace, budget_of, lr_factor, seconds_of  # noqa: E402
from pair.seq2seq.sizes import COPYING, SIZES, TIME_SHARES, build_model  # noqa: E402
from pair.seq2seq.training import Options, average_weights, train  # noqa: E402

TINY = {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
CPU = torch.device("cpu")


def reversals(number, digits=4):
    """Strings of digits (tokens 2 to 11) and the same backwards."""
    rows = torch.randint(2, 12, (number, digits), generator=torch.Generator().manual_seed(0))
    pairs = Pairs()
    for row in rows.tolist():
        pairs.sources.append([*row, 1])
        pairs.targets.append([*reversed(row), 1])
    return pairs


def train_tiny(folder, pace, pairs=None, options=None, on_step=None):
    options = options or Options(batch_tokens=64)
    model = build_model(TINY, vocabulary=12, dropout=options.dropout, seed=0)
    pairs = pairs or reversals(40)
    report = train("tiny", model, pairs, pace, options, folder, CPU, on_step=on_step)
    return model, report


def test_learning_rate():
    assert lr_factor(0.0, 0.1, 0.2) == pytest.approx(2e-4)
    assert lr_factor(0.05, 0.1, 0.2) == pytest.approx(0.5001)
    assert lr_factor(0.1, 0.1, 0.2) == 1.0
    assert lr_factor(0.4, 0.1, 0.2) == pytest.approx(0.5)  # sqrt(.1 / .4)
    assert lr_factor(0.9, 0.1, 0.2) == pytest.approx(math.sqrt(0.1 / 0.9) / 2)
    assert lr_factor(1.0, 0.1, 0.2) == 0.0
    assert lr_factor(1.0, 0.25, 0.0) == 0.5


def test_budgets():
    minutes = [budget_of(text).minutes for text in ("small", "full", "1.5")]
    assert minutes == [100.0, 40.0, 1.5]
    for wrong in ("large", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="small, full or a positive number, got"):
            budget_of(wrong)
    assert seconds_of(10.0, {"a": 1, "b": 3}) == {"a": 127.5, "b": 382.5}
    # Two at a time have twice the time to share, and none has more than there is.
    assert seconds_of(10.0, {"a": 1, "b": 3}, jobs=2) == {"a": 255.0, "b": 510.0}
    assert TIME_SHARES.keys() == SIZES.keys() and COPYING.keys() <= SIZES.keys()
    # With two at a time, what is not the largest must fit beside it.
    shares = list(TIME_SHARES.values())
    assert sum(shares[:-1]) == pytest.approx(shares[-1])


def test_pace():
    now = [100.0]
    pace = Pace(steps=10, seconds=40.0, used=10.0, clock=lambda: now[0])
    assert pace.progress(2) == 0.25  # by the clock; by steps .2
    assert pace.progress(5) == 0.5
    now[0] = 120.0
    assert pace.progress(5) == 0.75
    now[0] = 1000.0
    assert pace.progress(0) == 1.0
    pace.restart()
    assert pace.seconds_used() == 10.0  # the earlier sessions' own
    with pytest.raises(ValueError, match="got neither"):
        Pace()
    with pytest.raises(ValueError, match="seconds must be positive, got 0"):
        Pace(seconds=0)


def test_sizes_are_near_1_3_10_30():
    counts = [build_model(shape, 4096, 0.1, 0).num_parameters() for shape in SIZES.values()]
    for count, wanted in zip(counts, (1, 3, 10, 30), strict=True):
        assert wanted * 0.85 < count / counts[0] < wanted * 1.15


def test_average():
    states = [{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 7.0])}]
    assert average_weights(states)["a"].tolist() == [2.0, 4.5]
    with pytest.raises(ValueError, match="got none"):
        average_weights([])


def test_batches():
    lengths = [3, 8, 9, 12, 5, 40, 128, 2, 7, 8]
    pairs = Pairs([[2] * n for n in lengths], [[2]] * len(lengths))
    batches = Batches(pairs, tokens=24, seed=1)
    # Of 8: six rows by threes; of 12: two rows in one; of 48 and 128: one row each.
    assert batches.per_epoch == 2 + 1 + 1 + 1
    for epoch in range(3):
        first = epoch * batches.per_epoch
        seen = [batches[first + k] for k in range(batches.per_epoch)]
        assert sorted(row for rows in seen for row in rows) == list(range(len(lengths)))
        for rows in seen:
            bound = {next(b for b in BUCKETS if lengths[row] <= b) for row in rows}
            assert len(bound) == 1
            assert len(rows) == 1 or len(rows) * bound.pop() <= 24
    assert [batches[k] for k in range(15)] == [Batches(pairs, 24, 1)[k] for k in range(15)]
    assert [batches[k] for k in range(15)] != [Batches(pairs, 24, 2)[k] for k in range(15)]
    with pytest.raises(ValueError, match="at most 128 tokens, got 129"):
        Batches(Pairs([[2] * 129], [[2]]), 24, 0)


def test_copies():
    pairs = Pairs([[5, 1]], [[7, 7, 7, 9, 1]])
    copies = Copies(pairs, tokens=60, seed=0)
    batches = [copies.batch(step, CPU) for step in range(60)]
    low, high = Copies.LENGTHS
    assert {batch.labels.shape[1] - 1 for batch in batches} == set(range(low, high + 1))
    for batch in batches:
        assert torch.equal(batch.inputs, batch.labels) and batch.mask.all()
        assert 60 - batch.labels.shape[1] < batch.labels.numel() <= 60
        assert (batch.labels[:, -1] == 1).all() and (batch.labels[:, :-1] > 1).all()
    drawn = torch.cat([batch.labels[:, :-1].flatten() for batch in batches])
    assert set(drawn.tolist()) == {7, 9}
    share = (drawn == 7).double().mean().item()
    assert share == pytest.approx(0.75, abs=5 * math.sqrt(0.75 * 0.25 / len(drawn)))
    again = Copies(pairs, tokens=60, seed=0)
    assert torch.equal(again.batch(7, CPU).labels, batches[7].labels)
    assert not torch.equal(Copies(pairs, 60, 1).batch(7, CPU).labels, batches[7].labels)


def test_copying_comes_first(tmp_path):
    """Of 20 steps 5 copy: no epoch is counted for them, and the text begins at its beginning."""
    pairs = reversals(40)
    options = Options(batch_tokens=64, copying=0.25)
    with_copies, report = train_tiny(tmp_path / "a", Pace(steps=20), pairs, options)
    assert report.steps == 20
    assert report.epochs == 15 / Batches(pairs, 64, 0).per_epoch
    options = Options(batch_tokens=64)
    without, report = train_tiny(tmp_path / "b", Pace(steps=20), pairs, options)
    assert report.epochs == 20 / Batches(pairs, 64, 0).per_epoch
    assert not torch.equal(with_copies.shared.weight, without.shared.weight)


def test_options_out_of_range():
    for name, wrong, wanted in (
        ("lr_scale", 0.0, "positive"),
        ("lr_scale", math.nan, "positive"),
        ("copying", 1.5, "between 0 and 1"),
        ("dropout", 1.0, "at least 0 and less than 1"),
        ("batch_tokens", 0, "positive"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be {wanted}, got {wrong}"):
            DrafterOptions(**{name: wrong})
    assert Options(copying=1.0, dropout=0.0, lr_scale=0.5).lr_scale == 0.5


class Interruption(Exception):
    pass


@pytest.mark.thorough
def test_compiled(tmp_path, monkeypatch):
    """Compiled steps learn what others learn, up to rounding, and save the same weights' names.

    What is traced runs as it is: generating code for it takes torch two minutes here.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    options = Options(batch_tokens=64, dropout=0.0)
    plain, _ = train_tiny(tmp_path / "plain", Pace(20), options=options)
    compiled, _ = train_tiny(
        tmp_path / "compiled", Pace(20), options=replace(options, compiled=True)
    )
    fresh = build_model(TINY, vocabulary=12, dropout=0.0, seed=0)
    weights, before = compiled.state_dict(), fresh.state_dict()
    assert weights.keys() == before.keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, atol=2e-4, rtol=2e-3)
    assert not torch.equal(weights["shared.weight"], before["shared.weight"])


@pytest.mark.thorough
def test_resumed_to_the_bit(tmp_path):
    """Interrupted between two checkpoints, once early and once among those that are averaged."""

    def interrupt(at):
        def on_step(step):
            if step == at:
                raise Interruption

        return on_step

    options = Options(batch_tokens=64, copying=0.1)
    whole, report = train_tiny(tmp_path / "whole", Pace(steps=150), options=options)
    assert (report.steps, report.averaged) == (150, 10)
    for at in (11, 31, 143):
        with pytest.raises(Interruption):
            train_tiny(tmp_path / "parts", Pace(steps=150), options=options, on_step=interrupt(at))
    steps = []
    parts, report = train_tiny(
        tmp_path / "parts", Pace(steps=150), options=options, on_step=steps.append
    )
    assert 1 < steps[0] <= 144  # it did not begin again
    assert report.averaged == 10
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    again, _ = train_tiny(tmp_path / "parts", Pace(steps=150), options=options, on_step=pytest.fail)
    assert torch.equal(again.shared.weight, whole.shared.weight)
    other, _ = train_tiny(tmp_path / "other", Pace(steps=150), options=Options(1, 64))
    assert not torch.equal(other.shared.weight, whole.shared.weight)


@pytest.mark.thorough
def test_a_block_drafters_training_is_resumed_to_the_bit(tmp_path):
    """Through the same checkpoints; prefixes and glancing are functions of the step, too."""
    target = build_model(TINY, vocabulary=12, dropout=0.0, seed=0)

    def interrupt(step):
        if step == 47:
            raise Interruption

    def run(folder, on_step=None, **changes):
        options = DrafterOptions(batch_tokens=64, **changes)
        model = build_drafter(
            target, block=3, encoder_layers=1, decoder_layers=1, dropout=0.1, seed=0,
            from_target=False,
        )  # fmt: skip
        train(
            "blocks", model, reversals(40), Pace(steps=80), options, folder, CPU, on_step=on_step,
            objective=partial(drafting_loss, options=options),
        )  # fmt: skip
        return model

    whole = run(tmp_path / "whole")
    with pytest.raises(Interruption):
        run(tmp_path / "parts", interrupt)
    for name, value in run(tmp_path / "parts").state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    with pytest.raises(ValueError, match="beams was 5, is 2"):
        run(tmp_path / "parts", beams=2)


def test_another_training_is_refused(tmp_path):
    train_tiny(tmp_path, Pace(steps=4))
    with pytest.raises(ValueError, match="steps was 4, is 5"):
        train_tiny(tmp_path, Pace(steps=5))
    with pytest.raises(ValueError, match="dropout was 0.1, is 0.2"):
        train_tiny(tmp_path, Pace(steps=4), options=Options(batch_tokens=64, dropout=0.2))


def test_the_clock_ends_it(tmp_path):
    now = [0.0]

    def tick():
        now[0] += 0.5
        return now[0]

    _, report = train_tiny(tmp_path, Pace(seconds=20.0, clock=tick))
    assert 0 < report.steps <= 40
    assert report.seconds >= 20.0


def test_the_clock_starts_when_all_is_compiled(tmp_path, monkeypatch):
    """A step that compiles takes 1,000 seconds here: none of them counts, and none is learned."""
    now, calls = [0.0], []

    def slow_at_first(*arguments):
        calls.append(1)
        now[0] += 1000.0 if len(calls) <= 2 * training.COMPILED_AHEAD else 0.5
        return batch_loss(*arguments)

    batch_loss = training.batch_loss
    monkeypatch.setattr(training, "batch_loss", slow_at_first)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    options = Options(batch_tokens=64, copying=0.25, compiled=True)
    pace = Pace(seconds=10.0, clock=lambda: now[0])
    ahead, report = train_tiny(tmp_path / "a", pace, options=options)
    assert report.steps == 20 and report.seconds == 10.0
    assert report.epochs == 15 / Batches(reversals(40), 64, 0).per_epoch
    monkeypatch.setattr(training, "batch_loss", batch_loss)
    options = replace(options, compiled=False)
    at_once, _ = train_tiny(tmp_path / "b", Pace(steps=20), options=options)
    assert torch.equal(ahead.shared.weight, at_once.shared.weight)


@pytest.mark.thorough
def test_a_task_is_learned(tmp_path):
    options = Options(batch_tokens=512, dropout=0.0)
    model, _ = train_tiny(tmp_path, Pace(steps=600), reversals(2000), options)
    unseen = reversals(2100)
    inputs = torch.tensor(unseen.sources[2000:])
    wanted = torch.tensor(unseen.targets[2000:])
    written = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5)
    right = (written[:, 1:] == wanted).all(-1).float().mean()
    assert right > 0.9
