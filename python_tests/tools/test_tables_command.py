"""Tables of the papers: each runs on a tiny family, and its arithmetic is that of closed forms."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from dataclasses import asdict, dataclass

import pytest
import torch
from conftest import ROOT

pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

from pair.seq2seq.data import Pairs  # noqa: E402
from pair.seq2seq.schedule import Pace  # noqa: E402
from pair.seq2seq.sizes import build_model  # noqa: E402
from pair.seq2seq.training import KL, TV, Options, train  # noqa: E402
from tables import __main__ as command  # noqa: E402
from tables import decode, figure5, forced, identical, shared  # noqa: E402
from tables.registry import PAPER  # noqa: E402

from specdec_ext import theory  # noqa: E402
from specdec_ext.decoding import Statistics  # noqa: E402

VOCABULARY = 14
SHAPES = {
    "tiny": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1},
    "less": {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1},
    "more": {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2},
}


@dataclass
class Family:
    """What `pair.seq2seq.models.load_family` returns."""

    tokenizer: object
    models: dict
    distilled: dict
    splits: dict
    facts: dict


def reversals(number, seed):
    """Strings of 3 to 9 digits (tokens 2 to 11), and the same backwards."""
    generator = torch.Generator().manual_seed(seed)
    pairs = Pairs()
    for _ in range(number):
        length = int(torch.randint(3, 10, (1,), generator=generator))
        row = torch.randint(2, 12, (length,), generator=generator).tolist()
        pairs.sources.append([*row, 1])
        pairs.targets.append([*reversed(row), 1])
    return pairs


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Three sizes that reverse strings, each a bit better than the one before."""
    folder = tmp_path_factory.mktemp("family")
    splits = {"train": reversals(400, 0), "valid": reversals(30, 1), "test": reversals(60, 2)}
    models = {}
    for (name, shape), steps in zip(SHAPES.items(), (40, 60, 150), strict=True):
        models[name] = build_model(shape, VOCABULARY, dropout=0.0, seed=0)
        taught(models[name], Options(batch_tokens=256, dropout=0.0), steps, folder / name)
    distilled, facts = {}, {}
    for loss in (KL, TV):
        name = f"tiny-{loss}"
        options = Options(batch_tokens=256, dropout=0.0, loss=loss, start="tiny")
        distilled[name] = copy.deepcopy(models["tiny"])
        taught(distilled[name], options, 20, folder / name, models["more"])
        facts[name] = {"options": asdict(options), "seconds": 6.0}
    return Family(None, models, distilled, splits, facts)


def taught(model, options, steps, folder, teacher=None):
    """Train a model of the family."""
    pairs, pace, device = reversals(400, 0), Pace(steps=steps), torch.device("cpu")
    train(folder.name, model, pairs, pace, options, folder, device, teacher)


def bench_of(family, tmp_path, *arguments):
    options = command.parse([*arguments, "--output", str(tmp_path), "--task", "translation"])
    return shared.Bench(family, options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PAPER)
def test_every_table_runs(name, family, tmp_path, capsys):
    bench = bench_of(family, tmp_path, name, "--quick", "--record", "found")
    assert command.run(bench, [name]) == 0
    shown = capsys.readouterr().out
    written = (tmp_path / "found.md").read_text()
    assert written.split("\n\n")[1] in shown
    assert len((tmp_path / "found.csv").read_text().splitlines()) > 1
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


# ---- the framework -------------------------------------------------------------------------------


def run_of(tokens, seconds, statistics=None):
    return decode.Run([list(tokens)], seconds, statistics)


def test_speedup_is_of_rates_and_its_error_that_of_a_ratio():
    plain = [run_of(range(n), s) for n, s in ((4, 2.0), (6, 3.0), (5, 3.0), (9, 4.0))]
    own = [run_of(range(n), s) for n, s in ((4, 1.0), (6, 1.0), (5, 2.0), (9, 1.0))]
    found = decode.speedup(plain, own, 4)
    wanted = theory.ratio(torch.tensor([2.0, 3, 3, 4]), torch.tensor([1.0, 1, 2, 1]))
    assert found.mean == pytest.approx(12 / 5) and found.units == 4
    assert found.standard_error == pytest.approx(wanted.standard_error)
    # Twice the tokens in the same time is twice as fast.
    longer = [run_of(range(2 * run.num_tokens), run.seconds) for run in own]
    assert decode.speedup(plain, longer, 4).mean == pytest.approx(24 / 5)
    # The median of a sentence's repeats: one slow run does not count.
    again = own + own + [run_of(run.tokens[0], 100.0) for run in own]
    assert decode.speedup(plain, again, 4).mean != pytest.approx(12 / 5)  # other repeats of plain
    assert decode.speedup(plain * 3, again, 4).mean == pytest.approx(12 / 5)


def test_counts_of_repeats_belong_to_their_sentence():
    def counts(drafted, accepted):
        found = Statistics(4, new_tokens=[0])
        rejected = accepted < drafted
        found.record(0, drafted=drafted, accepted=accepted, emitted=accepted + 1, rejected=rejected)
        return found

    runs = [run_of([], 1.0, counts(*pair)) for pair in ((4, 4), (4, 1), (4, 2), (4, 1))]
    tested = decode.accepted_of_tested(runs, 2)  # sentences 0: 4 + 2 of 4 + 3; 1: 1 + 1 of 2 + 2
    assert (tested.mean, tested.units) == (pytest.approx(8 / 11), 2)
    assert decode.accepted_of_drafted(runs, 2).mean == pytest.approx(8 / 16)
    assert decode.tokens_a_call(runs, 2).mean == pytest.approx(12 / 4)


@pytest.mark.thorough
def test_wrong_greedy_output_is_found(family, tmp_path):
    bench = bench_of(family, tmp_path, "table2", "--quick")
    draft = decode.by_model(family.models["tiny"])
    right = decode.way(bench, draft, gamma=3)

    def wrong(sentence, seed):
        run = right(sentence, seed)
        return run._replace(tokens=[[run.tokens[0][0] ^ 1, *run.tokens[0][1:]]])

    ways = {decode.PLAIN: decode.way(bench, None), "right": right, "wrong": wrong}
    runs = decode.decode(bench, ways)
    faults, ties = decode.greedy_faults(bench, runs)
    assert len(faults) == 3 and not ties and all("wrong" in fault for fault in faults)
    assert decode.greedy_bar(runs, faults, ties).endswith("FAIL")
    del runs["wrong"]
    faults, ties = decode.greedy_faults(bench, runs)
    assert not faults and decode.greedy_bar(runs, faults, ties).endswith("PASS")


@pytest.mark.thorough
def test_batches_of_sentences_are_compared_one_by_one(family, tmp_path, monkeypatch):
    bench = bench_of(family, tmp_path, "identical", "--quick")
    bench.options.sentences = identical.BATCH + 3
    plain = identical.Way(None, {})
    runs, statistics = identical.decode(bench, plain)
    one_by_one = [decode.way(bench, None)(sentence, 0).tokens for sentence in bench.sentences]
    assert [run.tokens for run in runs] == one_by_one
    assert statistics.emitted == sum(run.num_tokens for run in runs)
    token = runs[-1].tokens[0][0]

    def without(ids, scores):
        return scores.index_fill(1, torch.tensor([token]), -torch.inf)

    wrong = identical.Way(None, {"logits_processor": [without]})
    monkeypatch.setattr(identical, "ways", lambda bench: {decode.PLAIN: plain, "wrong": wrong})
    result = identical.make(bench)
    affected = sum(token in run.tokens[0] for run in runs)
    assert len(result.faults) == result.records[1]["wrong"] == affected > 0
    assert result.bars[0].endswith("FAIL") and result.records[0]["wrong"] == 0


def changed(run, place, token):
    """A run whose text has another token at a place."""
    tokens = list(run.tokens[0])
    tokens[place] = token
    return run._replace(tokens=[tokens])


@pytest.mark.thorough
def test_ties_are_told_from_faults(family, tmp_path):
    model = copy.deepcopy(family.models["more"])
    twins = Family(None, {"tiny": family.models["tiny"], "more": model}, {}, family.splits, {})
    bench = bench_of(twins, tmp_path, "table2", "--quick")
    run = decode.way(bench, None)(bench.sentences[0], 0)
    place = next(k for k, t in enumerate(run.tokens[0]) if 1 < k and t > 1)
    token, other = run.tokens[0][place], 13  # 13 is in no text
    with torch.no_grad():  # the output layer is the embedding: the two tokens always tie
        model.shared.weight[other] = model.shared.weight[token]
    runs = {decode.PLAIN: [run], "twin": [changed(run, place, other)]}
    faults, ties = decode.greedy_faults(bench, runs, bench.sentences[:1])
    assert not faults and len(ties) == 1 and f"at token {place}" in ties[0]
    third = 2 if token != 2 else 3
    runs["twin"] = [changed(run, place, third)]
    faults, ties = decode.greedy_faults(bench, runs, bench.sentences[:1])
    assert len(faults) == 1 and not ties
    runs["twin"] = [run._replace(tokens=[run.tokens[0][:place]])]  # it ended too early
    faults, ties = decode.greedy_faults(bench, runs, bench.sentences[:1])
    assert len(faults) == 1 and not ties


def test_faults_give_exit_code_1(monkeypatch, tmp_path, capsys):
    result = shared.Result("A", [shared.Column("a", "a")], [{"a": 0.5, "a_se": 0.25}], faults=["x"])
    monkeypatch.setattr(command, "maker", lambda name: lambda bench: result)
    empty = Family(None, {"one": torch.nn.Linear(1, 1)}, {}, {"test": Pairs([[1]], [[1]])}, {})
    empty.models["one"].num_parameters = lambda: 2
    empty.models["one"].device = torch.device("cpu")
    bench = bench_of(empty, tmp_path, "table2", "--quick")
    assert command.run(bench, ["table2"]) == 1
    assert "0.50 (0.25)" in capsys.readouterr().out
    result.faults.clear()
    assert command.run(bench, ["table2"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_trace_has_every_call(family, tmp_path):
    bench = bench_of(family, tmp_path, "figure5", "--quick")
    draft = family.models["tiny"]
    modules = {
        "target, encoder": bench.target.get_encoder(),
        "draft, encoder": draft.get_encoder(),
        "draft": draft.get_decoder(),
        "target": bench.target.get_decoder(),
    }
    decoding = decode.way(bench, decode.by_model(draft), gamma=3)
    run, calls = figure5.trace(decoding, bench.sentences[0], modules, bench)
    counts = Counter(call.who for call in calls)
    assert counts["target"] == run.statistics.rounds
    assert counts["draft"] == run.statistics.draft_calls
    assert counts["target, encoder"] == counts["draft, encoder"] == 1
    assert all(0 <= call.begin <= call.end for call in calls)
    ends = [call.end for call in calls]
    assert all(after.begin >= end for after, end in zip(calls[1:], ends, strict=False))
    records = figure5.sums("way", calls, run.num_tokens)
    *parts, whole = records
    assert sum(part["milliseconds"] for part in parts) == pytest.approx(whole["milliseconds"])
    assert not bench.target.get_decoder()._forward_hooks  # hooks are gone


# ---- acceptance on the target's text -------------------------------------------------------------


@pytest.mark.thorough
def test_forced_rows_are_those_of_decoding(family, tmp_path):
    bench = bench_of(family, tmp_path, "table2", "--sentences", "5", "--tokens", "12")
    texts = forced.forced_texts(bench, 0.0)
    for sentence, text in zip(bench.sentences, texts.tokens, strict=True):
        assert decode.way(bench, None)(sentence, 0).tokens == [text]
    # At T = 0 the target's own arg max is the text, at every place of it.
    (batch,) = texts.batches
    for row, text in zip(batch.target_logits, texts.tokens, strict=True):
        assert row[: len(text)].argmax(-1).tolist() == text
    same = forced.alpha_of(texts, bench.target, temperature=1.0)
    assert same.mean == pytest.approx(1.0) and same.units == 5
    draft = family.models["tiny"]
    (rows,) = [forced.logits_of(draft, batch)]
    laws = (batch.target_logits.softmax(-1), rows.softmax(-1))
    wanted = [
        float(torch.minimum(laws[0][b, :n], laws[1][b, :n]).sum())
        for b, n in enumerate(batch.lengths)
    ]
    found = forced.alpha_of(texts, draft, temperature=1.0)
    assert found.mean == pytest.approx(sum(wanted) / sum(batch.lengths), abs=1e-5)
