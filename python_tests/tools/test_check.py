"""python -m specdec_ext check: equal, a tie, a bug."""

from __future__ import annotations

import argparse
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from generate_models import pair as random_pair

from specdec_ext.commands import check, demo
from specdec_ext.commands.pair import Pair, Prompt, find_pair, load_pair
from specdec_ext.commands.tokenizers import difference
from specdec_ext.decoding import cache
from specdec_ext.decoding.counts import Counts


def options(*arguments, of=check):
    parser = argparse.ArgumentParser()
    of.add_arguments(parser)
    return parser.parse_args([*arguments])


def test_the_shipped_pair(capsys):
    few = ("--gamma", "3", "--max-new-tokens", "10", "--prompt", "import os\n")
    assert check.run(options(*few)) == 0
    said = capsys.readouterr().out
    assert "greedy, gamma 3, the prompt: lossless (10 tokens)" in said
    assert "sampled at T 1, gamma 3, the prompt: lossless (10 tokens)" in said
    assert said.endswith("lossless: 20 tokens agree\n")
    assert check.run(options(*few, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "lossless" and len(report["findings"]) == 2


def test_a_target_alone_is_checked_with_copies(capsys):
    few = (
        "--gamma",
        "3",
        "--max-new-tokens",
        "6",
        "--prompt",
        "import os\nimport sys\nimport os\n",
    )
    assert check.run(options("--json", *few, "--target", str(find_pair() / "target"))) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "lossless" and len(report["findings"]) == 2


def test_packed_weights(capsys):
    few = ("--packed", "--gamma", "3", "--max-new-tokens", "6", "--prompt", "import os\n")
    assert check.run(options(*few)) == 0
    assert check.run(options(*few, "--dtype", "bfloat16")) == 2
    assert "expected a float32 model on a CPU" in capsys.readouterr().err


def test_a_compiled_draft(capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda model, **options: compiled.append((model, options))
    )
    few = ("--compile-draft", "--gamma", "3", "--max-new-tokens", "6", "--prompt", "import os\n")
    assert check.run(options(*few)) == 0
    ((draft, how),) = compiled
    assert how == {"dynamic": True}
    assert draft.num_parameters() == load_pair().draft.num_parameters()
    capsys.readouterr()
    with pytest.raises(ValueError, match="--compile-draft needs a draft model"):
        load_pair(str(find_pair() / "target"), needs_draft=False, compiled=True)


def other_tokenizer(folder, places):
    """Make a checkpoint of the shipped draft whose tokenizer has ids in each other's places."""
    for path in (find_pair() / "draft").iterdir():
        (folder / path.name).symlink_to(path)
    words = find_pair() / "tokenizer"
    shutil.copy(words / "tokenizer_config.json", folder)
    known = json.loads((words / "tokenizer.json").read_text())
    tokens = {index: token for token, index in known["model"]["vocab"].items()}
    for place, index in places.items():
        known["model"]["vocab"][tokens[place]] = index
    (folder / "tokenizer.json").write_text(json.dumps(known))


def test_a_draft_with_another_tokenizer_is_said(capsys, tmp_path):
    """Lossless it is, and good for nothing."""
    other_tokenizer(tmp_path, {300: 301, 301: 300})
    folders = ("--target", str(find_pair() / "target"), "--draft", str(tmp_path))
    few = ("--gamma", "2", "--max-new-tokens", "4", "--prompt", "import os\n", *folders)
    assert check.run(options(*few)) == 0
    said = capsys.readouterr().out
    assert said.startswith("the draft's tokenizer is another: 2 of ")
    assert "ids stand for other tokens (300 is " in said and "take a draft that" in said
    assert said.endswith(
        "lossless: 8 tokens agree; but the draft's tokenizer is another, see above\n"
    )
    assert check.run(options(*few, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["tokenizers"].startswith("the draft's tokenizer is")
    assert demo.run(options(*few, of=demo)) == 0
    assert "the draft's tokenizer is another" in capsys.readouterr().out


def test_the_same_tokenizer_is_no_difference(tmp_path):
    other_tokenizer(tmp_path, {})
    pair = load_pair(str(find_pair() / "target"), str(tmp_path))
    assert pair.draft_tokenizer is not None and pair.mismatch is None
    assert load_pair().mismatch is None


def test_no_token_in_common():
    one, other = (SimpleNamespace(get_vocab=lambda i=i: {"a": i}) for i in range(2))
    assert "has no id of the target's" in difference(one, other)


def test_equal_prompts_share_a_line():
    equal, other = (
        check.Finding("x", "a", check.LOSSLESS, 5),
        check.Finding("x", "b", check.BUG, 3, 1, 0),
    )
    assert check.lines([equal, other, equal]) == [
        "x, 2 prompts: lossless (10 tokens)",
        check.line(other),
    ]
    assert check.lines([other, equal]) == [check.line(equal), check.line(other)]


def two_prompts():
    ids = torch.randint(1, 67, (2, 8), generator=torch.Generator().manual_seed(0))
    return [Prompt("a", "", ids[:1]), Prompt("b", "", ids[1:, 2:])]


def models():
    target, draft = random_pair(noise=0.02)
    return Pair(target, draft, None, [])


def verdicts(pair, *arguments):
    found = check.compare(pair, two_prompts(), options("--max-new-tokens", "16", *arguments))
    return {finding.what: finding.verdict for finding in found}


def test_every_way_is_compared():
    found = verdicts(models(), "--gamma", "2", "4", "--temperature", "0.7")
    assert set(found.values()) == {check.LOSSLESS}
    assert set(found) == {
        f"{law}, gamma {gamma}{batch}"
        for law in ("greedy", "sampled at T 0.7")
        for gamma in (2, 4)
        for batch in ("", ", one batch")
    }


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_a_wrong_rollback_is_a_bug(monkeypatch, law):
    rollback = cache.CachedModel.rollback

    def off_by_one(self, drop):
        less = [max(n - 1, 0) for n in drop.host]
        rollback(self, Counts.on(drop.device.device, less))

    monkeypatch.setattr(cache.CachedModel, "rollback", off_by_one)
    found = verdicts(models(), "--gamma", "4")
    assert check.BUG in {verdict for what, verdict in found.items() if what.startswith(law)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tie_is_told_by_the_targets_own_precision(temperature):
    pair, prompt = models(), two_prompts()[0]
    logits, precision = check._ask_again(pair.target, prompt.ids)
    assert 0 < precision < 1e-5
    scores = logits
    if temperature:
        noise = check.reference.race_noise(5, 8, torch.arange(len(logits)))
        scores = logits / temperature - noise.log()
    first, second = scores.topk(2).indices.tolist()
    finding = check.compare_tokens(pair, prompt, [first, 1], [second, 1], temperature, 5, "x")
    assert finding.verdict == check.BUG and finding.tokens == 0
    assert finding.gap == pytest.approx(float(scores[first] - scores[second]))
    pair.target.lm_head.weight.data[second] = pair.target.lm_head.weight.data[first]
    if not temperature:  # now a tie
        finding = check.compare_tokens(pair, prompt, [first, 1], [second, 1], 0.0, 5, "x")
        assert finding.verdict == check.PRECISION and "its own answers differ" in check.line(
            finding
        )
    shorter = check.compare_tokens(pair, prompt, [first, 1], [first], temperature, 5, "x")
    assert shorter.verdict == check.BUG


def test_missing_checkpoint(capsys, tmp_path):
    assert check.run(options("--target", str(tmp_path / "a"), "--draft", str(tmp_path / "b"))) == 2
    assert "no checkpoint at" in capsys.readouterr().err
