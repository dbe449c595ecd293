"""Tables of the report and the article: they run on a tiny family, and mistakes are found."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys

import pytest
import torch
from conftest import ROOT
from tiny_family import make_family

pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench_generate import Run  # noqa: E402
from pair.seq2seq.models import load_family  # noqa: E402
from tables import __main__ as command  # noqa: E402
from tables import (  # noqa: E402
    copying,
    decode,
    domains,
    helps,
    kinds,
    report2,
    rows,
    sampled_beams,
    shared,
)
from tables.registry import FOLLOWERS  # noqa: E402

from specdec_ext.decoding import Statistics  # noqa: E402


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A family that was trained for a few seconds, and the records that it was trained on."""
    base = tmp_path_factory.mktemp("tables")
    work, data = base / "family" / "correction", base / "data" / "correction"
    make_family(work, data)
    return work, data


@pytest.fixture(scope="session")
def family(folders):
    return load_family(folders[0])


def bench_of(family, folders, *arguments):
    work, data = folders
    given = ["--task", str(work), "--data", str(data), *arguments]
    return shared.Bench(family, command.parse(given))


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOLLOWERS)
def test_every_table_runs(name, folders, tmp_path, capsys):
    work, data = folders
    found = command.main(
        [name, "--quick", "--task", str(work), "--data", str(data), "--output", str(tmp_path),
         "--record", "found"]
    )  # fmt: skip
    assert found == 0
    shown, written = capsys.readouterr().out, (tmp_path / "found.md").read_text()
    assert written.split("\n\n")[1] in shown
    assert "PASS" in shown
    with (tmp_path / "found.csv").open() as lines:
        records = list(csv.DictReader(lines))
    assert len(records) > 1
    plain = [float(r["speed"]) for r in records if decode.PLAIN in (r.get("way"), r.get("draft"))]
    assert plain == pytest.approx([1.0] * len(plain)) and plain
    assert (tmp_path / "found.png").read_bytes()[:4] == b"\x89PNG"


# ---- rows ----------------------------------------------------------------------------------------


def counts(drafted, accepted):
    """The statistics of one round."""
    found = Statistics(8, new_tokens=[0])
    found.record(
        0, drafted=drafted, accepted=accepted, emitted=accepted + 1, rejected=accepted < drafted
    )
    return found


def runs_of(bench, sentences, seconds, drafted=4, accepted=1):
    """Runs that wrote the references, one a sentence."""
    return [Run([s.reference], seconds, counts(drafted, accepted)) for s in sentences]


def test_a_row_by_hand(family, folders):
    bench = bench_of(family, folders, "report2", "--sentences", "4")
    own = bench.sentences
    runs = {decode.PLAIN: runs_of(bench, own, 3.0, 0, 0), "way": runs_of(bench, own, 2.0)}
    # The second sentence twice as slow: 5 texts' time in place of 4.
    runs["way"][1] = runs["way"][1]._replace(seconds=4.0)
    found = rows.record(bench, "way", runs, 0.0, own)
    assert found["seconds"] == pytest.approx(2.5)
    assert found["seconds_se"] == pytest.approx(0.5)
    assert found["speed"] == pytest.approx(12 / 10)
    assert found["alpha"] == pytest.approx(1 / 2)  # each round: one accepted, one rejected
    assert found["share"] == pytest.approx(1 / 4)
    assert found["tokens_a_call"] == pytest.approx(2)
    for perfect in ("bleu", "chrf", "rouge1", "rougeL"):
        assert found[perfect] == pytest.approx(100)
    plain = rows.record(bench, decode.PLAIN, runs, 0.0, own)
    assert plain["speed"] == 1 and "alpha" not in plain
    # Repeats: the median of each sentence, and the first text is scored.
    worse = [run._replace(seconds=9.0, tokens=[[5, 5, 1]]) for run in runs["way"]]
    runs["way"] = runs["way"] + worse + runs["way"]
    runs[decode.PLAIN] = runs[decode.PLAIN] * 3
    again = rows.record(bench, "way", runs, 0.0, own)
    assert again["seconds"] == pytest.approx(2.5) and again["bleu"] == pytest.approx(100)


def test_a_wrong_text_lowers_the_score(family, folders):
    bench = bench_of(family, folders, "report2", "--sentences", "6")
    runs = runs_of(bench, bench.sentences, 1.0)
    runs[0] = runs[0]._replace(tokens=[[7, 7, 7, 1]])
    assert rows.quality_of(bench, runs, bench.sentences)["bleu"] < 95


def test_rouge_is_of_english_tasks(family, folders):
    bench = bench_of(family, folders, "report2", "--quick")
    runs = runs_of(bench, bench.sentences, 1.0)
    assert "rougeL" in rows.quality_of(bench, runs, bench.sentences)
    bench.options.task = bench.options.task.with_name("translation-small")
    assert bench.task == "translation"
    assert "rougeL" not in rows.quality_of(bench, runs, bench.sentences)


def test_wrong_output_is_found(family, folders):
    """A way that is not lossless, among ways that are."""
    bench = bench_of(family, folders, "report2", "--quick")
    right = decode.model_way(bench, family.models["small"], 3, 0.0)

    def wrong(sentence, seed):
        run = right(sentence, seed)
        return run._replace(tokens=[[run.tokens[0][0] ^ 1, *run.tokens[0][1:]]])

    ways = {decode.PLAIN: decode.plain_way(bench, 0.0), "right": right}
    found = rows.measure(bench, ways, 0.0)
    assert not found.faults and found.bars[0].endswith("PASS")
    found = rows.measure(bench, ways | {"wrong": wrong}, 0.0)
    assert len(found.faults) == 3 and found.bars[0].endswith("FAIL")
    # Beams and other models have texts of their own.
    found = rows.measure(bench, ways, 0.0, others={"wrong": wrong})
    assert not found.faults and len(found.records) == 3


def test_cost_ratio(family, folders, monkeypatch):
    """2 ms a call of the draft, 8 ms one of the target; prefill and verification do not count."""
    bench = bench_of(family, folders, "report4", "--quick")

    def decode_(bench, ways, sentences):
        assert sentences[0] in bench.some("valid", 99)
        alone, drafted = counts(0, 0), counts(3, 1)
        alone.rounds, drafted.rounds, drafted.draft_calls = 10, 4, 12
        alone.seconds |= {"prefill": 5.0, "target": 0.08, "verify": 1.0}
        drafted.seconds |= {"prefill": 5.0, "target": 0.08, "draft": 0.024, "verify": 1.0}
        return {
            name: [Run([[]], 9.0, one)] for name, one in zip(ways, (alone, drafted), strict=True)
        }

    monkeypatch.setattr(rows, "decode", decode_)
    assert rows.cost_ratio(bench, decode.by_model(family.models["mini"])) == pytest.approx(0.25)


def test_sizes_by_name(family, folders):
    bench = bench_of(family, folders, "report2", "--quick")
    assert rows.size(bench, "base") is family.models["base"]
    with pytest.raises(ValueError, match="the size 'huge'; .* mini, small, base"):
        rows.size(bench, "huge")


def test_what_is_printed_in_the_report(family, folders):
    bench = bench_of(family, folders, "report2", "--quick")
    assert report2.printed(bench, 3, report2.REPORT) == {}  # it has no correction
    bench.options.task = bench.options.task.with_name("translation")
    found = report2.printed(bench, 3, report2.REPORT)
    assert found == {"report_bleu": 0.73, "report_alpha": 0.79, "report_speed": 2.68}
    two = report2.printed(bench, "a", {("translation", "a"): (0.723, 2.68)})
    assert two == {"report_bleu": 0.723, "report_speed": 2.68}


# ---- bars ----------------------------------------------------------------------------------------


def copied(bench, aggressive_seconds, calls):
    """Runs of the table of copies, made up: times of aggressive decoding, calls of the lookups."""
    own = bench.sentences
    runs = {name: runs_of(bench, own, 4.0) for name in (decode.PLAIN, copying.HOST)}
    runs[copying.HOST] = [run._replace(seconds=3.0) for run in runs[copying.HOST]]
    runs[copying.AGGRESSIVE] = runs_of(bench, own, aggressive_seconds)
    records = []
    for gamma in copying.GAMMAS:
        for name, figure in zip((copying.ours(gamma), copying.theirs(gamma)), calls, strict=True):
            records.append({"way": name, "tokens_a_call": figure})
    return rows.Measured(runs, records)


def test_bar_of_aggressive_decoding(family, folders):
    """Twice as fast as the faster of the two greedy loops, which takes 3 seconds a text here."""
    bench = bench_of(family, folders, "copying", "--quick")
    passing = copying.aggressive_bar(bench, copied(bench, 1.4, (2, 1)))
    assert passing.endswith("PASS") and "2.86" in passing and "2.14" in passing
    # Twice as fast as our own loop alone is not enough.
    failing = copying.aggressive_bar(bench, copied(bench, 1.9, (2, 1)))
    assert failing.endswith("FAIL") and "2.11" in failing and "1.58" in failing
    bench.options.task = bench.options.task.with_name("translation")
    other = copying.aggressive_bar(bench, copied(bench, 9.0, (2, 1)))
    assert "PASS" not in other and "FAIL" not in other


def test_bar_of_lookup(family, folders):
    bench = bench_of(family, folders, "copying", "--quick")
    for calls, verdict in (((2.0, 1.9), "PASS"), ((2.0, 2.0), "PASS"), ((1.9, 2.0), "FAIL")):
        lines = copying.lookup_bars(copied(bench, 1.0, calls))
        assert len(lines) == len(copying.GAMMAS)
        assert all(line.endswith(verdict) for line in lines)


# ---- kinds and domains ---------------------------------------------------------------------------


def test_kinds_draft_what_they_are_called(family, folders):
    """Kinds are told apart by what they have accepted of a text that repeats its source."""
    bench = bench_of(family, folders, "kinds", "--quick")
    every = kinds.kinds(bench)
    sentence = bench.sentences[0]
    drafters = {
        name: drafting(decode.Reading([sentence], bench.device))
        for name, (drafting, _, _) in every.items()
    }
    named = {name: type(drafter).__name__ for name, drafter in drafters.items()}
    assert named["lookup in source and output"] == "LookupDrafter"
    assert drafters["lookup in source and output"].inputs == [sentence.source]
    assert drafters["lookup in the output"].inputs is None
    assert named["hierarchy base over mini"] == "HierarchicalDrafter"
    assert named["early exit, 1 of 2 layers"] == "EarlyExitDrafter"
    assert drafters["bandit of lookup and models"].costs[0] == 0
    assert len(drafters["bandit of lookup and models"].drafters) == 4
    assert {name for name in named if name.startswith("model ")} == {
        "model mini", "model small", "model base",
    }  # fmt: skip


def test_kinds_of_a_target_alone(family, folders):
    alone = dataclasses.replace(family, models={"large": family.models["large"]})
    every = kinds.kinds(bench_of(alone, folders, "kinds", "--quick"))
    assert "aggressive" in every and "early exit, 1 of 2 layers" in every
    assert not any("model" in name for name in every)


def test_models_taught_by_the_target_have_rows(family, folders):
    told = dataclasses.replace(family, distilled={"mini-taught": family.models["mini"]})
    every = kinds.kinds(bench_of(told, folders, "kinds", "--quick"))
    assert every["model mini-taught"][2] == kinds.DISTILLED != every["model mini"][2]


def test_domains_are_read(family, folders):
    bench = bench_of(family, folders, "domains", "--sentences", "10")
    found = domains.read_domains(bench)
    assert set(found) == {"pages", "dialogs"}
    tokenizer = family.tokenizer
    for name, domain in found.items():
        assert len(domain.test) == 5 and domain.seen
        words = set(" ".join(rows.texts(bench, domain.train.targets)).split())
        # pages: words 4 and up; dialogs: up to 7.
        assert ("cat" in words) == (name == "pages") and ("red" in words) == (name == "dialogs")
        assert tokenizer.decode(domain.test[0].source).endswith("</s>")


def test_domains_that_cannot_be(family, folders, tmp_path):
    bench = bench_of(family, folders, "domains")
    bench.options.data = tmp_path
    with pytest.raises(FileNotFoundError, match="test.jsonl is missing: run"):
        domains.read_domains(bench)
    for split in ("train", "test"):
        lines = (folders[1] / f"{split}.jsonl").read_text().splitlines()
        some = [line for line in lines if json.loads(line)["origin"] == "pages"]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(some))
    with pytest.raises(ValueError, match="at least 2 origins with 8 texts .* got 1 of 1"):
        domains.read_domains(bench)


def test_unseen_domains_are_named(family, folders, tmp_path):
    """Models that were trained on permissive texts alone have not read the others."""
    for split in ("train", "test"):
        records = [json.loads(x) for x in (folders[1] / f"{split}.jsonl").open()]
        for record in records:
            record["permissive"] = record["origin"] == "pages"
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))
    bench = bench_of(family, folders, "domains")
    bench.options.data = tmp_path
    assert [d.seen for d in domains.read_domains(bench).values()] == [True, True]
    told = {**family.facts, "data": {**family.facts["data"], "permissive only": True}}
    bench.family = dataclasses.replace(family, facts=told)
    seen = {name: domain.seen for name, domain in domains.read_domains(bench).items()}
    assert seen == {"pages": True, "dialogs": False}


def test_own_and_other_domain():
    """Means over pairs of domains that something was learnt from, of counts that are known."""

    def runs(accepted):
        return [Run([[]], 1.0, counts(4, accepted))] * 2

    learnt = [("n", "a"), ("n", "b"), ("m", "a"), ("m", domains.GENERAL)]
    names = {key: " ".join(key) for key in learnt}
    measured = {
        origin: rows.Measured({"n a": runs(first), "n b": runs(second)}, [])
        for origin, first, second in (("a", 3, 1), ("b", 0, 2), ("c", 4, 4))
    }
    said = domains._comparison(measured, names, "n")
    assert "3.50 tokens a call on texts of the domain that it learnt from, 1.50 on those" in said
    assert said.endswith("means over a, b.")


# ---- the shipped pair ----------------------------------------------------------------------------


def test_kinds_of_text_are_checked(folders, monkeypatch, capsys):
    """A contestant that writes another token is found, and the exit code says so."""
    original = helps.contestants

    def wrong(pair, temperature, new):
        found = original(pair, temperature, new)
        lookup = found[helps.LOOKUP]

        def changed(ids, mask, seed):
            run = lookup(ids, mask, seed)
            return run._replace(tokens=[[run.tokens[0][0] ^ 1, *run.tokens[0][1:]]])

        return found | {helps.LOOKUP: changed}

    monkeypatch.setattr(helps, "contestants", wrong)
    monkeypatch.setattr(helps, "TEMPERATURES", (0.0,))
    assert shared.Bench(None, command.parse(["helps"])).device.type == "cpu"
    assert command.main(["helps", "--quick", "--tokens", "3"]) == 1
    shown = capsys.readouterr().out
    assert "12 texts compared with plain decoding, 6 differ by more than a tie: FAIL" in shown


def test_repeated_runs():
    assert helps.repeated([1, 2, 3, 4, 5, 6]) == (0, 3)
    assert helps.repeated([1, 2, 1, 2, 1, 2, 1, 2]) == (3, 5)
    assert helps.repeated([1, 2, 3]) == (0, 0)


# --- the report's beams -----------------------------------------------------------------------


def test_the_best_candidates_differ():
    one, two, three = (
        sampled_beams.Hypothesis(tokens, score, False)
        for tokens, score in (((1, 2), -1.0), ((3,), -1.0), ((1,), -2.0))
    )
    assert sampled_beams.best([three, two, one, one, one], 2) == [one, two]
    assert sampled_beams.best([three, three], 2) == [three]


def test_scores_are_of_all_tokens(family, folders):
    """Unlike in the algorithm as printed, where those of a round's last token alone are added."""
    bench = bench_of(family, folders, "report3", "--quick")
    sentence = bench.sentences[0]
    ids = torch.tensor([sentence.source])
    with torch.inference_mode():
        target, draft = (
            sampled_beams.Encoded(model, model.get_encoder()(ids))
            for model in (bench.target, next(iter(bench.drafts.values())))
        )
        found, rounds = sampled_beams.search(target, draft, 3, 2, 12, seed=1)
        again, _ = sampled_beams.search(target, draft, 3, 2, 12, seed=1)
        labels = torch.tensor([found.tokens])
        logits = bench.target(input_ids=ids, labels=labels).logits
    assert found.ended and again == found and 0 < rounds <= 12
    assert len(found.tokens) == 12 or found.tokens[-1] == bench.target.config.eos_token_id
    expected = logits.log_softmax(-1)[0].gather(1, labels.T).sum().item()
    assert found.score == pytest.approx(expected, abs=1e-4)
    last = logits.log_softmax(-1)[0, -1, found.tokens[-1]].item()
    assert found.score != pytest.approx(last, abs=1e-2)
