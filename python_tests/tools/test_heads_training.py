"""`python benchmarks/pair/heads`: heads learn, resume to the bit, are saved, and are tried."""

import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from pair.data import Corpus  # noqa: E402
from pair.heads import sources  # noqa: E402
from pair.heads.__main__ import loss_of, main  # noqa: E402
from pair.heads.sources import Rows  # noqa: E402
from pair.heads.training import Options, train  # noqa: E402
from pair.seq2seq.__main__ import main as seq2seq  # noqa: E402
from pair.seq2seq.models import save_model  # noqa: E402
from pair.seq2seq.schedule import Pace  # noqa: E402
from pair.seq2seq.sizes import build_model  # noqa: E402
from test_seq2seq_command import write_task  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from specdec_ext.commands.pair import find_pair  # noqa: E402
from specdec_ext.models.eagle import EagleHead  # noqa: E402
from specdec_ext.models.heads import (  # noqa: E402
    BlockwiseHeads,
    BlockwiseHeadsConfig,
    MedusaHeads,
    MedusaHeadsConfig,
)

WIDTH, WORDS = 12, 9
OPTIONS = Options("cycle", "medusa", peak_lr=0.02)


def cycle(step):
    """A target that knows that w + 1 comes behind w; its states say which word stands there."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (4, 1), generator=generator)
    tokens = (first + torch.arange(10)) % WORDS
    states = torch.nn.functional.one_hot(tokens, WIDTH).float()
    logits = 8.0 * torch.nn.functional.one_hot((tokens + 1) % WORDS, WORDS)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return Rows(tokens, states, logits.float(), mask)


def fresh(kind="medusa"):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "vocab_size": WORDS, "num_heads": 3}
    if kind == "medusa":
        return MedusaHeads(MedusaHeadsConfig(**sizes))
    return BlockwiseHeads(BlockwiseHeadsConfig(**sizes, intermediate_size=16))


class Interrupted(Exception):
    """The machine went away."""


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_heads_learn_what_comes_later(tmp_path, kind):
    """Head i of a text that counts up is to say w + 1 + i: all of it can be learned."""
    heads = fresh(kind)
    report = train(heads, cycle, loss_of, Pace(steps=80), OPTIONS, tmp_path)
    assert report.steps == 80 and len(report.parts) == 3
    states = torch.eye(WIDTH)[:WORDS]
    for head, logits in enumerate(heads(states).unbind(1)):
        assert torch.equal(logits.argmax(-1), (torch.arange(WORDS) + 2 + head) % WORDS)


def test_an_interrupted_training_ends_as_another(tmp_path):
    whole, again = fresh(), fresh()
    train(whole, cycle, loss_of, Pace(steps=20), OPTIONS, tmp_path / "whole")

    def stop(step):
        if step == 7:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(again, cycle, loss_of, Pace(steps=20), OPTIONS, tmp_path / "parts", on_step=stop)
    again = fresh()
    report = train(again, cycle, loss_of, Pace(steps=20), OPTIONS, tmp_path / "parts")
    assert report.steps == 20
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    with pytest.raises(ValueError, match="peak_lr was 0.02, is 0.5"):
        other = Options("cycle", "medusa", peak_lr=0.5)
        train(fresh(), cycle, loss_of, Pace(steps=20), other, tmp_path / "parts")


def test_frozen_parameters_stay(tmp_path):
    heads = fresh("blockwise")
    heads.projection.requires_grad_(False)
    before = heads.projection.weight.clone()
    train(heads, cycle, loss_of, Pace(steps=20), OPTIONS, tmp_path)
    assert torch.equal(heads.projection.weight, before) and heads.weights.any()


def test_the_command_on_a_causal_model(tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    shutil.copytree(find_pair() / "tokenizer", tmp_path / "tokenizer")
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(60))
    monkeypatch.setattr(sources, "collect_corpus", lambda: Corpus([text], [], [text]))
    given = [str(tmp_path / "target"), "--work", str(tmp_path / "work"), "--heads", "2"]
    work = given[:3]
    assert main(["evaluate", *work]) == 1
    assert "has no heads: run `train` first" in capsys.readouterr().err
    steps = ["--steps", "20", "--batch-tokens", "128"]
    assert main(["train", *given, *steps, "--shared", "--vocabulary", "300"]) == 0
    assert "20 steps" in capsys.readouterr().out
    folder = tmp_path / "work" / "target" / "medusa-2"
    facts = json.loads((folder / "training.json").read_text())
    assert facts["steps"] == 20 and len(facts["parts"]) == 2
    heads = MedusaHeads.from_pretrained(folder)
    target = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    assert len(heads.draft_token_ids.unique()) == 300
    kept = target.lm_head.weight[heads.draft_token_ids]  # it stays the target's
    assert torch.equal(heads.projection.weight, kept)
    assert heads.weights.any()
    assert main(["evaluate", *work, "--texts", "2", "--new-tokens", "6"]) == 0
    assert capsys.readouterr().out.count("\n|") == 1 + 3 + 4  # at T = 0 without `typical`
    for kind in ("medusa", "eagle"):
        assert main(["train", *given, *steps, "--kind", kind, "--vocabulary", "0"]) == 1
        assert "draft_vocab_size must be" in capsys.readouterr().err
    eagle = [*given, "--kind", "eagle"]
    assert main(["train", *eagle, *steps, "--vocabulary", "300"]) == 0
    assert "distance of states, nats: " in capsys.readouterr().out
    head = EagleHead.from_pretrained(folder.parent / "eagle-2")
    assert len(head.draft_token_ids.unique()) == 300 and head.projection.weight.shape[0] == 300
    assert torch.equal(head.projection.weight, target.lm_head.weight[head.draft_token_ids])
    only = ["--only", "eagle-2", "--record", str(tmp_path / "heads-record")]
    assert main(["evaluate", *work, "--texts", "2", "--new-tokens", "6", *only]) == 0
    record = json.loads((tmp_path / "heads-record.json").read_text())
    assert list(record["machine"]["trained"]) == ["eagle-2"]
    greedy = record["records"][:3]
    assert [way["draft"] for way in greedy] == ["plain", "eagle-2, chain", "eagle-2, tree"]
    assert all(way["texts"] == 2 and way["wrong"] == 0 for way in greedy)
    assert greedy[0]["tokens_a_call"] == 1.0 and greedy[0]["speed_up"] == 1.0
    assert "20 steps of up to 128 tokens" in (tmp_path / "heads-record.md").read_text()
    assert main(["evaluate", *work, "--packed", *only[:2]]) == 1
    assert "pack_linears: expected a float32 model" in capsys.readouterr().err  # it is too small
    packed = []
    monkeypatch.setattr("pair.heads.__main__.pack_linears", packed.append)
    assert main(["evaluate", *work, "--texts", "2", "--new-tokens", "6", "--packed", *only]) == 0
    assert [type(model).__name__ for model in packed] == ["LlamaForCausalLM"]
    assert "the target with packed weights" in (tmp_path / "heads-record.md").read_text()
    assert main(["evaluate", *work, "--only", "blockwise-2"]) == 1
    assert "has not all of blockwise-2: run `train` first" in capsys.readouterr().err
    assert main(["train", "nowhere", "--work", str(tmp_path)]) == 1
    assert "a model's folder or name, got 'nowhere', which is no task of" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_command_on_an_encoder_decoder(tmp_path, capsys):
    write_task(tmp_path / "tasks" / "words", {"train": 40, "valid": 4, "test": 4})
    work = tmp_path / "seq2seq" / "words"
    assert (
        seq2seq(["prepare", "words", "--work", str(work), "--tasks", str(tmp_path / "tasks")]) == 0
    )
    shape = {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
    save_model(build_model(shape, 4096, 0.1, 0), work, "mini", {})
    given = ["words", "--tasks", str(tmp_path / "seq2seq"), "--work", str(tmp_path / "work")]
    kind = ["--kind", "blockwise", "--heads", "10"]
    steps = ["--steps", "20", "--batch-tokens", "64", "--units", "16"]
    assert main(["train", *given, *kind, *steps]) == 0
    heads = BlockwiseHeads.from_pretrained(tmp_path / "work" / "words" / "blockwise-10")
    assert heads.num_heads == 10 and heads.config.intermediate_size == 16
    assert heads.config.feature_scale == pytest.approx(32**-0.5, rel=1e-3)
    capsys.readouterr()
    assert main(["evaluate", *given, "--bfloat16"]) == 1
    assert "are for causal targets, got the task words" in capsys.readouterr().err
    assert main(["evaluate", *given, "--texts", "3", "--new-tokens", "5"]) == 0
    assert "| plain" in capsys.readouterr().out
