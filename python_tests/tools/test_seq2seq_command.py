"""`python benchmarks/pair/seq2seq`: prepare, train, evaluate, and what the gates say."""

import collections
import dataclasses
import json
import shutil
import sys
import types

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import common  # noqa: E402
from pair.seq2seq import __main__ as command  # noqa: E402
from pair.seq2seq import evaluation  # noqa: E402
from pair.seq2seq.__main__ import main  # noqa: E402
from pair.seq2seq.block_drafter import load_drafter  # noqa: E402
from pair.seq2seq.data import Pairs, batch_of, load_prepared  # noqa: E402
from pair.seq2seq.distillation import (  # noqa: E402
    MAX_LENGTH_A,
    MAX_LENGTH_B,
    growing_cache,
    rewrite,
    write_targets,
)
from pair.seq2seq.evaluation import BEAMS, Gate, gates, held_out, measure, table  # noqa: E402
from pair.seq2seq.models import Family, load_family  # noqa: E402
from pair.seq2seq.sizes import SIZES, build_model  # noqa: E402
from pair.seq2seq.training import Options, batch_loss  # noqa: E402

from specdec_ext.decoding.cache_names import own_cache_name  # noqa: E402

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}


def write_task(folder, numbers):
    """A task in which words of one language become words of another."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    english = list(WORDS)
    for split, number in numbers.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for k in range(number):
                chosen = [english[i] for i in torch.randint(5, (4,), generator=generator)]
                record = {
                    "source": " ".join(chosen),
                    "target": " ".join(WORDS[word] for word in chosen),
                    "permissive": k % 2 == 0,
                }
                file.write(json.dumps(record) + "\n")


def test_a_reversed_task(tmp_path, capsys, monkeypatch):
    """Every pair turned around, in a folder of its own; one vocabulary of both languages."""
    monkeypatch.setattr(command, "BUILD", tmp_path)
    write_task(tmp_path / "tasks" / "words", {"train": 20, "valid": 8, "test": 8})
    found = {}
    for name, more in (("words", []), ("words-reverse", ["--reverse"])):
        assert main(["prepare", "words", "--tasks", str(tmp_path / "tasks"), *more]) == 0
        assert json.loads(capsys.readouterr().out)["reverse"] == bool(more)
        tokenizer, splits, _ = load_prepared(tmp_path / "seq2seq" / name)
        pairs = splits["test"]
        found[name] = [tokenizer.batch_decode(rows) for rows in (pairs.sources, pairs.targets)]
    assert found["words"] == found["words-reverse"][::-1]
    assert found["words"][0] != found["words"][1]


@pytest.mark.thorough
def test_the_command(tmp_path, capsys, monkeypatch):
    write_task(tmp_path / "tasks" / "words", {"train": 80, "valid": 8, "test": 8})
    work = ["words", "--work", str(tmp_path / "work")]
    assert main(["train", *work]) == 1
    assert "run `prepare` first" in capsys.readouterr().err
    assert main(["prepare", *work, "--tasks", str(tmp_path / "tasks"), "--permissive"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["train"]["pairs"], facts["test"]["pairs"]) == (40, 4)
    assert main(["evaluate", *work]) == 1
    assert "run `train` first" in capsys.readouterr().err
    for wrong, said in (("medium", "no such size"), ("mini,nano", "no such size: nano")):
        with pytest.raises(SystemExit):
            main(["train", *work, "--sizes", wrong])
        assert said in capsys.readouterr().err
    for wrong, said in (
        (["--layers", "12"], "expected two numbers from 1 up, as 12+2; got '12'"),
        (["--layers", "12+0"], "got '12+0'"),
        (["--layers", "12+2", "--sizes", "mini"], "are those of large, which --sizes leaves out"),
    ):
        with pytest.raises(SystemExit):
            main(["train", *work, *wrong])
        assert said in capsys.readouterr().err

    train = ["train", *work, "--budget", "0.03", "--jobs", "2", "--sizes", "small,mini"]
    assert main(train) == 0
    family = load_family(tmp_path / "work")
    assert list(family.models) == ["mini", "small"] and family.largest == "small"
    assert family.facts["mini"]["parameters"] < family.facts["small"]["parameters"]
    assert family.facts["small"]["options"]["batch_tokens"] == 512
    assert family.facts["mini"]["options"]["dropout"] == 0.0  # the budget's own
    with pytest.raises(SystemExit):
        main(["evaluate", *work, "--no-repeat-ngram", "-1"])
    assert "--no-repeat-ngram must be at least 0, got -1" in capsys.readouterr().err
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    asked = ["--sentences", "3", "--no-repeat-ngram", "3"]
    code = main(["evaluate", *work, *asked, "--record", "made"])
    shown = capsys.readouterr().out  # how much is learned, the machine decides
    record = (tmp_path / "made.md").read_text(encoding="utf-8")
    assert "evaluate words --sentences 3 --no-repeat-ngram 3`" in record
    assert shown.strip() in record
    assert code == ("FAIL " in shown)
    assert "| copying |" in shown and "BLEU, 5 beams, of small less that of copying" in shown

    distill = ["distill", *work, "--budget", "0.02", "--threads", "1"]
    assert main([*distill, "--size", "small"]) == 1
    assert "the draft must be one of mini, got 'small'" in capsys.readouterr().err
    assert main([*distill, "--loss", "tv", "--written", "6"]) == 0
    taught = load_family(tmp_path / "work")
    assert list(taught.models) == ["mini", "small"] and list(taught.distilled) == [
        "mini-tv-written"
    ]
    assert taught.facts["mini-tv-written"]["options"]["start"] == "mini"
    drafter = [
        "drafter", *work, "--budget", "0.02", "--threads", "1", "--block", "4", "--sentences", "2",
        "--written", "6", "--beams", "2",
    ]  # fmt: skip
    assert main([*drafter, "--encoder-layers", "2"]) == 0
    assert "Tok. of greedy" in capsys.readouterr().out
    # It may have the name of a size, whose training is another.
    assert main([*drafter, "--name", "small", "--from-target"]) == 0
    scratch, own = (load_drafter(tmp_path / "work", name) for name in ("spec-drafter", "small"))
    small = taught.models["small"].config
    assert (scratch.config.block_size, scratch.config.num_layers) == (4, 2)
    assert own.config.num_layers == small.num_layers and own.config.d_model == small.d_model
    assert main([*drafter, "--name", "deep", "--from-target", "--encoder-layers", "3"]) == 1
    assert "must have num_layers=3" in capsys.readouterr().err
    both = [*drafter, "--decoder-layers", "1", "--from-target", "encoder and decoder"]
    assert main([*both, "--name", "both"]) == 0
    begun = load_drafter(tmp_path / "work", "both").decoder.block[0].layer[2].DenseReluDense.wo
    of_target = taught.models["small"].decoder.block[0].layer[2].DenseReluDense.wo
    drawn = own.decoder.block[0].layer[2].DenseReluDense.wo
    change = (begun.weight - of_target.weight).norm()
    assert 0 < change < 0.5 * (drawn.weight - of_target.weight).norm()
    # It goes on from another drafter's weights, which a step or two do not change much.
    more = [*drafter[: drafter.index("--block")], "--sentences", "2", "--start", "small"]
    assert main([*more, "--name", "more", "--dropout", "0.3"]) == 0
    more_of = load_drafter(tmp_path / "work", "more")
    assert more_of.config.dropout_rate == 0.3 and more_of.config.block_size == 4
    change = (more_of.shared.weight - own.shared.weight).norm()
    assert 0 < change < 0.5 * (own.shared.weight - scratch.shared.weight).norm()
    # It may propose the commonest tokens only; its other weights stay as they were.
    assert main([*more, "--name", "few", "--vocabulary", "5"]) == 0
    few = load_drafter(tmp_path / "work", "few")
    texts = load_prepared(tmp_path / "work")[1]["train"].targets
    counts = collections.Counter(token for text in texts for token in text)
    assert few.config.draft_vocab_size == len(few.draft_token_ids) == 5
    assert min(counts[t] for t in few.draft_token_ids.tolist()) >= sorted(counts.values())[-5]
    change = (few.projection.weight - own.shared.weight[few.draft_token_ids]).norm()
    assert 0 < change < 0.5 * own.shared.weight[few.draft_token_ids].norm()
    assert main([*more, "--name", "few", "--vocabulary", "4096"]) == 1
    assert "--vocabulary must be in [1, " in capsys.readouterr().err
    assert main([*drafter, "--name", "more", "--start", "small", "--from-target"]) == 1
    assert "leave out --block, --from-target" in capsys.readouterr().err
    again = load_family(tmp_path / "work")
    assert list(again.distilled) == ["mini-tv-written"]  # drafters lie elsewhere
    weights = taught.distilled["mini-tv-written"].shared.weight
    assert not torch.equal(weights, taught.models["mini"].shared.weight)

    # From a size's weights on, in another folder: a step or two do not lead far from them.
    shutil.copytree(tmp_path / "work", tmp_path / "on", ignore=shutil.ignore_patterns("m*", "tr*"))
    on = ["train", "words", "--work", str(tmp_path / "on"), "--sizes", "mini"]
    assert main([*on, "--budget", "0.002", "--start", str(tmp_path / "work")]) == 0
    went_on = load_family(tmp_path / "on")
    assert went_on.facts["mini"]["options"]["start"] == "work"
    fresh = build_model(SIZES["mini"], len(family.tokenizer), 0.1, 0)
    begun, drawn = (
        (went_on.models["mini"].shared.weight - other.shared.weight).norm()
        for other in (taught.models["mini"], fresh)
    )
    assert 0 < begun < drawn / 2

    # Another target, of other layers; other sizes keep their own.
    other = [*on[:-1], "large,small", "--layers", "3+1", "--budget", "0.003", "--jobs", "2"]
    assert main(other) == 0
    models = load_family(tmp_path / "on").models
    found = {
        name: (model.config.num_layers, model.config.num_decoder_layers)
        for name, model in models.items()
    }
    assert found == {"mini": (1, 1), "small": (2, 1), "large": (3, 1)}
    assert models["large"].config.d_model == SIZES["large"]["d_model"]
    shutil.rmtree(tmp_path / "on" / "training")
    assert main([*on[:-1], "large", "--start", str(tmp_path / "on"), "--layers", "2+1"]) == 1
    assert "has 3+1 layers, not 2+1: see --layers" in capsys.readouterr().err


@pytest.fixture(scope="module")
def family():
    shape = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2}
    models = {
        name: build_model(shape, 40, 0.1, seed).eval()
        for seed, name in enumerate(("mini", "small", "large"))
    }
    for model in models.values():  # laws that are far from uniform, and from each other
        model.shared.weight.data.mul_(4.0)
    return Family(None, models, {}, {}, {})


def one_by_one(family, names, pairs):
    """The same figures in float64 from one sentence at a time, without a batch's padding."""
    sums, tokens = {name: [0.0, 0.0, 0.0] for name in names}, 0
    for source, target in zip(pairs.sources, pairs.targets, strict=True):
        labels = torch.tensor([target])
        laws = {}
        for name in names:
            with torch.no_grad():
                logits = family.models[name](input_ids=torch.tensor([source]), labels=labels).logits
            laws[name] = logits[0].double().softmax(-1)
        for name in names:
            own, last = laws[name], laws[names[-1]]
            sums[name][0] -= own.log()[torch.arange(len(target)), labels[0]].sum().item()
            sums[name][1] += torch.minimum(own, last).sum().item()
            sums[name][2] += (own.argmax(-1) == last.argmax(-1)).sum().item()
        tokens += len(target)
    return {name: [value / tokens for value in values] for name, values in sums.items()}


def test_held_out_figures(family):
    generator = torch.Generator().manual_seed(3)
    pairs = Pairs()
    for _ in range(70):  # more than two batches, of unlike lengths
        for side in (pairs.sources, pairs.targets):
            length = int(torch.randint(1, 12, (), generator=generator))
            side.append([*torch.randint(2, 40, (length,), generator=generator).tolist(), 1])
    names = list(family.models)
    found, wanted = held_out(family, names, pairs), one_by_one(family, names, pairs)
    for name in names:
        assert list(found[name].values()) == pytest.approx(wanted[name], rel=1e-5)
    assert found["large"]["alpha_t1"] == pytest.approx(1.0, abs=1e-6)
    assert 0.05 < found["mini"]["alpha_t1"] < 0.95
    # The comparison tells a draft from another.
    assert found["mini"]["alpha_t1"] != pytest.approx(found["small"]["alpha_t1"], rel=1e-3)


def some_batch(rows=3):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, 40, (2, rows, 6), generator=generator).tolist()
    pairs = Pairs([row[:4] for row in tokens[0]], [row[: 2 + k] for k, row in enumerate(tokens[1])])
    return pairs, batch_of(pairs, list(range(rows)), torch.device("cpu"))


def test_losses(family):
    """Each loss against its definition, in float64."""
    pairs, batch = some_batch()
    student, teacher = family.models["mini"], family.models["large"]
    q, p = (
        torch.cat(
            [
                m(input_ids=torch.tensor([s]), labels=torch.tensor([t])).logits[0].double()
                for s, t in zip(pairs.sources, pairs.targets, strict=True)
            ]
        ).softmax(-1)
        for m in (student, teacher)
    )
    labels = torch.tensor(sum(pairs.targets, []))
    chosen = q[torch.arange(len(labels)), labels].log()
    smoothed = -(0.9 * chosen + 0.1 * q.log().mean(-1)).mean()
    wanted = {
        "labels": smoothed,
        "kl": -(p * q.log()).sum(-1).mean(),
        "tv": (p - q).abs().sum(-1).mean() / 2,
    }
    for name, value in wanted.items():
        options = Options(loss=name)
        assert batch_loss(student, batch, options, teacher).item() == pytest.approx(
            value.item(), rel=1e-5
        )
    for name, one in (("tv", None), ("hinge", teacher)):
        with pytest.raises(ValueError, match="loss must be one of labels, kl, tv"):
            batch_loss(student, batch, Options(loss=name), one)


def test_a_teacher_writes_what_it_writes_alone(family):
    """Batched and sorted by length, in the pairs' order; the end token is kept."""
    pairs, _ = some_batch(rows=40)
    teacher = family.models["small"]
    texts = write_targets(teacher, pairs)
    for source, written in zip(pairs.sources[:5], texts, strict=False):
        alone = teacher.generate(
            torch.tensor([source]), max_new_tokens=128, do_sample=False,
            **{own_cache_name(): growing_cache()},
        )  # fmt: skip
        assert alone[0, 1:].tolist() == written
    assert all(1 not in written[:-1] for written in texts)


def test_texts_to_learn_from_are_cut(family):
    """They are what the teacher writes, as far as its batch's longest source allows."""
    pairs, _ = some_batch(rows=40)
    teacher = family.models["small"]
    chosen = pairs.some(20)
    whole, cut = write_targets(teacher, chosen), rewrite(teacher, pairs, 20)
    assert cut.sources == chosen.sources
    most = int(MAX_LENGTH_A * max(map(len, chosen.sources))) + MAX_LENGTH_B
    assert cut.targets == [text[:most] for text in whole]
    assert cut.targets != whole  # some go on


def test_a_beam_finds_likelier_texts():
    """What a search with beams writes is, all in all, likelier to its writer than greedy text."""
    pairs, _ = some_batch(rows=8)
    shape = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
    teacher = build_model(shape, 40, 0.0, seed=0).eval()
    head = teacher.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for parameter in teacher.parameters():  # else it repeats one token, of which it is sure
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    torch.nn.init.normal_(head.weight, 0.0, 2.0)

    def logprob(texts):
        total = 0.0
        for source, text in zip(pairs.sources, texts, strict=True):
            labels = torch.tensor([text])
            with torch.no_grad():
                logits = teacher(input_ids=torch.tensor([source]), labels=labels).logits
            law = logits[0].double().log_softmax(-1)
            total += law[torch.arange(len(text)), labels[0]].mean().item()  # as beams are ranked
        return total

    greedy, beam = (rewrite(teacher, pairs, 8, beams).targets for beams in (1, 5))
    assert greedy != beam and logprob(beam) > logprob(greedy)


def repeats(text, n):
    """Whether n tokens in a row occur twice in a text."""
    rows = [tuple(text[k : k + n]) for k in range(len(text) - n + 1)]
    return len(set(rows)) < len(rows)


def test_a_search_without_repetitions(family):
    pairs, _ = some_batch(rows=12)
    teacher = family.models["small"]
    free = write_targets(teacher, pairs, 3)
    ruled = write_targets(teacher, pairs, 3, no_repeat_ngram=2)
    assert any(repeats(text, 2) for text in free)
    assert not any(repeats(text, 2) for text in ruled)


def test_the_rule_is_the_searches_alone(family, monkeypatch):
    """Greedy texts are what speculative decoding has to reproduce: no rule changes them."""
    pairs, _ = some_batch(rows=4)
    words = types.SimpleNamespace(
        batch_decode=lambda rows, **_: [" ".join(map(str, r)) for r in rows]
    )
    whole = dataclasses.replace(family, tokenizer=words, splits={"test": pairs})
    asked = []

    def spy(model, pairs, beams=1, **rule):
        asked.append((beams, rule))
        return pairs.targets

    monkeypatch.setattr(evaluation, "write_targets", spy)
    measure(whole, 2, no_repeat_ngram=3)
    assert asked == [(BEAMS, {"no_repeat_ngram": 3}), (1, {})] * len(family.models)


def records(**changes):
    """Measurements that pass every gate, but for the changes (size_figure=value)."""
    sizes = {
        "mini": {"loss": 3.0, "alpha_t1": 0.5, "alpha_t0": 0.6, "bleu": 5.0},
        "small": {"loss": 2.9, "alpha_t1": 0.6, "alpha_t0": 0.7, "bleu": 8.0},
        "large": {"loss": 2.8, "alpha_t1": 1.0, "alpha_t0": 1.0, "bleu": 12.0},
    }
    greedy = {"greedy_bleu": 1.0, "greedy_chrf": 5.0}  # no gate asks for these
    for change, value in changes.items():
        name, figure = change.split("_", 1)
        sizes[name][figure] = value
    copying = {"model": "copying", "bleu": 4.0, "bleu_error": 0.1, "chrf": 10.0}
    whole = {"parameters": 1000, "bleu_error": 0.1, "chrf": 30.0, **greedy}
    return [copying, *({"model": name, **whole, **given} for name, given in sizes.items())]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"small_loss": 2.98}, ["held-out loss of mini less that of small"]),
        ({"small_loss": 2.79}, ["held-out loss of small less that of large"]),
        ({"mini_alpha_t1": 0.3}, ["alpha of mini at T = 1"]),
        ({"small_alpha_t0": 0.95}, ["alpha of small at T = 0"]),
        ({"large_alpha_t1": 0.2}, []),  # the target's own alpha is no figure of a draft
        ({"large_bleu": 6.5}, ["of large less that of mini"]),
        (
            {"large_bleu": 1.0},
            [f"BLEU, 5 beams, of large less that of {other}" for other in ("copying", "mini")],
        ),
        ({"small_loss": float("nan")}, ["mini less that of small", "small less that of large"]),
    ],
)
def test_gates(changes, missed):
    measured = records(**changes)
    found = [gate for gate in gates(measured) if not gate.passed]
    assert len(found) == len(missed)
    for gate, name in zip(found, missed, strict=True):
        assert gate.name.endswith(name)
    assert table(measured, found).count("FAIL") == len(missed)


def test_a_gate_is_an_open_interval():
    assert not Gate("x", 0.35, 0.35, 0.9).passed and not Gate("x", 0.9, 0.35, 0.9).passed
    assert Gate("x", 0.5, 0.35, 0.9).line() == "PASS x: 0.500, 0.35-0.9 wanted"
    assert Gate("x", 0.01, 0.03).line() == "FAIL x: 0.010, more than 0.03 wanted"
