"""``python -m specdec_ext demo`` on a tiny random pair, to a pipe, to a terminal and as JSON."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

import specdec_ext
from specdec_ext import reference, theory
from specdec_ext.commands import bench, demo, page
from specdec_ext.commands.pair import Pair, Prompt, load_pair
from specdec_ext.models.eagle import EagleHead

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """Save a target, a draft (the target, perturbed) and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("pair")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(alphabet) + 1,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder / "draft")
    for name in ("target", "draft"):
        tokenizer.save_pretrained(folder / name)
    return folder


def command(pair: Path, *options: str) -> list[str]:
    """Return the command line of a short demo."""
    models = [f"--{name}={pair / name}" for name in ("target", "draft")]
    prompt = ["--prompt=import os  # 日本", "--max-new-tokens=24", "--gamma=3"]
    return [sys.executable, "-m", "specdec_ext", "demo", *models, *prompt, *options]


def environment(**changes: str) -> dict[str, str]:
    package = Path(specdec_ext.__file__).parents[1]
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "COLUMNS")}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TERM": "xterm", **changes}


def run(pair: Path, *options: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(pair, *options), capture_output=True, text=True, env=environment(**changes)
    )


@pytest.fixture
def here(pair, capsys):
    """Return what runs the demo in this process: its status, output and errors."""
    verbosity = logging.get_verbosity()

    def run_here(*options: str):
        parser = argparse.ArgumentParser()
        demo.add_arguments(parser)
        status = demo.run(parser.parse_args(command(pair, *options)[4:]))
        return status, *capsys.readouterr()

    yield run_here
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def on_terminal(pair: Path, *options: str, **changes: str) -> str:
    """Return what the demo writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(pair, *options), stdout=theirs, stderr=theirs, env=environment(**changes)
    )
    os.close(theirs)
    written = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 120)
        try:
            part = os.read(ours, 65536) if ready else b""
        except OSError:  # Linux: the other end was closed
            part = b""
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


@pytest.mark.thorough
def test_plain_text_on_a_pipe(pair):
    done = run(pair)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "\x1b" not in text and "\r" not in text
    assert "«accepted draft tokens»   ~replaced draft tokens~   the target's own tokens" in text
    assert "Greedy output is identical to plain greedy decoding: 24 tokens of 1 prompt" in text
    assert "temperature 0 (greedy)" in text and "temperature 0.8" in text
    for line in ("tokens per second", "tokens per target call", "acceptance rate (alpha)",
                 "time in verification", "faster, measured", "faster, by the formula"):  # fmt: skip
        assert line in text
    assert max(sum(map(page.cells, line)) for line in text.splitlines()) <= 88


@pytest.mark.thorough
def test_colours_on_a_terminal(pair):
    text = on_terminal(pair)
    assert "\x1b[32m" in text and "\x1b[31;9m" in text and "\x1b[94m" in text
    assert "«" not in text.replace("«»", "")
    bare = re.sub(r"\x1b\[[0-9;]*[mK]", "", text)
    assert "Greedy output is identical" in bare


@pytest.mark.thorough
def test_no_colour_where_none_is_wanted(pair):
    text = on_terminal(pair, NO_COLOR="1")
    assert "\x1b[3" not in text and "\x1b[9" not in text
    assert "«accepted draft tokens»" in text


@pytest.mark.thorough
def test_an_output_without_these_characters(pair):
    done = run(pair, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "{accepted draft tokens}" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_alpha_is_the_mean_overlap_of_the_laws_over_the_texts(pair, temperature):
    models = [LlamaForCausalLM.from_pretrained(pair / name) for name in ("target", "draft")]
    texts = [torch.randint(1, 200, (1, n)) for n in (9, 17)]
    prompts = [Prompt("", "", text[:, :4]) for text in texts]
    new = [text[0, 4:].tolist() for text in texts]
    found = demo.mean_overlap(Pair(*models, None, []), prompts, new, temperature)
    expected = []
    for text in texts:
        rows = [model(input_ids=text).logits[0, 3:-1].detach() for model in models]
        expected += [
            torch.minimum(*(reference.law(row, temperature) for row in both)).sum()
            for both in zip(*rows, strict=True)
        ]
    assert len(expected) == 5 + 13
    assert found == pytest.approx(float(torch.stack(expected).mean()), abs=1e-5)


def test_json(here):
    status, output, _ = here("--json", "--rule=token", "--temperature=1", "--seed=3")
    assert status == 0
    report = json.loads(output)
    settings = report["settings"]
    assert (settings["rule"], settings["gamma"], settings["seed"]) == ("token", 3, 3)
    assert report["greedy"] == {"identical": True, "prompts": 1, "tokens": 24, "differences": []}
    assert [run["temperature"] for run in report["comparisons"]] == [0.0, 1.0]
    for comparison in report["comparisons"]:
        spec = comparison["speculative"]
        assert spec["emitted"] == comparison["plain"]["emitted"] == 24
        assert 0 < comparison["alpha"] < 1 and spec["alpha"] == spec["accepted_of_tested"]
        assert comparison["formula_speedup"] == pytest.approx(
            theory.walltime_factor(comparison["alpha"], 3, comparison["c"])
        )
        assert comparison["speedup"] == pytest.approx(
            spec["tokens_per_second"] / comparison["plain"]["tokens_per_second"]
        )
    pieces = report["completion"]["pieces"]
    assert len([piece for piece in pieces if piece["kind"] != "replaced"]) == 24
    assert {piece["kind"] for piece in pieces} == {"accepted", "replaced", "target"}
    assert report["transformers_generate_tokens_per_second"] > 0


def test_greedy_only(here):
    _, output, _ = here("--temperature=0", "--json")
    assert [run["temperature"] for run in json.loads(output)["comparisons"]] == [0.0]


def test_a_rule_that_is_not_lossless_is_no_defect(here):
    status, output, _ = here("--rule=top_beta", "--temperature=0")
    assert status == 0
    assert "This rule is not lossless." in output


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_a_defect_is_told(here, monkeypatch, rule):
    from specdec_ext import ops

    original = ops.verify

    def wrong(logits, *args, **kwargs):
        return original(logits.roll(1, -1) if logits.shape[1] > 2 else logits, *args, **kwargs)

    monkeypatch.setattr(ops, "verify", wrong)
    status, output, _ = here("--temperature=0", f"--rule={rule}")
    assert status == 1
    assert "That is no tie: a defect." in output and "identical" not in output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--target=/nowhere"], "no checkpoint at /nowhere"),
        (["--rule=nosuch"], "block"),
        (["--gamma=-1"], "--gamma must be in [1, 65534], got -1"),
        (["--temperature=-1"], "--temperature must be in [0, "),
        (["--max-new-tokens=0"], "--max-new-tokens must be at least 2 (no draft"),
        (["--prompt="], "--prompt is empty"),
    ],
)
def test_what_is_missing_is_said(here, options, text):
    status, output, errors = here(*options)
    assert status == 2
    assert errors.startswith("demo: ") and text in errors
    assert not output


def test_target_and_draft_go_together(pair, capsys):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.run(parser.parse_args([f"--draft={pair / 'draft'}"])) == 2
    assert "go together" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("example", ["drop_in_loop", "cached_loop", "inside_transformers"])
def test_the_examples(pair, example):
    folders = (str(pair / "target"), str(pair / "draft"))
    arguments = [f"examples/{example}.py", "import os", *folders]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os") and len(done.stdout) > len("import os") + 20


# --- parts ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def page_of(monkeypatch, columns: int = 40) -> page.Page:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return page.Page(Terminal())


def test_wide_characters_never_pass_the_margin(monkeypatch):
    out = page_of(monkeypatch)
    out.text("日本語のテキスト" * 9 + "e\u0301" * 50, "accepted")
    out.line()
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.stream.getvalue())
    sizes = [sum(map(page.cells, line)) for line in bare.splitlines() if line]
    assert max(sizes) == 38  # of 40, with the margin on the left
    assert bare.replace("\n", "").replace("  ", "") == "日本語のテキスト" * 9 + "e\u0301" * 50


def test_control_characters_do_not_reach_the_terminal(monkeypatch):
    out = page_of(monkeypatch)
    out.text("a\x1b[2Jb\x07\x9b\x7f\tc")
    assert out.stream.getvalue().startswith("  a␛[2Jb␇\ufffd␡")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_marks_instead_of_colours(monkeypatch, name, value):
    page_of(monkeypatch)
    monkeypatch.setenv(name, value)
    out = page.Page(Terminal())
    out.text("a", "accepted")
    out.text("b", "replaced")
    out.text("c", "target")
    out.line()
    assert out.stream.getvalue().startswith("  «a»~b~c\n")


def test_styles_end_at_the_end_of_a_line(monkeypatch):
    out = page_of(monkeypatch)
    out.text("one\ntwo", "replaced")
    out.text("three", "target")
    out.line()
    strike, blue, reset = "\x1b[31;9m", "\x1b[94m", "\x1b[0m"
    assert out.stream.getvalue().startswith(
        f"{strike}  one{reset}\n{strike}  two{reset}{blue}three{reset}\n"
    )


def test_replaced_space_is_visible():
    assert demo.shown("  ") == "··"
    assert demo.shown("\n    ") == "↵····"
    assert demo.shown(" x\n") == " x↵"


def test_characters_of_several_tokens(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    text = "naïve 日本 🙂 ok"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert len(tokens) > len(text)
    reader = demo.Reader(tokenizer, [])
    assert "".join(map(reader.push, tokens)) == text
    reader = demo.Reader(tokenizer, tokens[:20])
    read = "".join(map(reader.push, tokens[:13] * 9))
    assert read == tokenizer.decode(tokens[:13] * 9)


def test_a_target_alone_drafts_with_copies(pair, capsys, tmp_path):
    """It is `SuffixDrafter` that drafts, on prompts from a file; there is no alpha."""
    path = tmp_path / "prompts.yaml"
    path.write_text("- name: a loop\n  content: 'for i in range(3):'\n")
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    line = [f"--target={pair / 'target'}", f"--prompts={path}", "--temperature=0", "--json"]
    assert demo.run(parser.parse_args([*line, "--max-new-tokens=8", "--gamma=4"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == ["a loop"] and found["settings"]["draft"] == "SuffixDrafter()"
    assert found["greedy"]["identical"] and found["comparisons"][0]["alpha"] is None
    path.write_text("[]")
    assert demo.run(parser.parse_args(line)) == 2
    assert "there are no prompts" in capsys.readouterr().err


def test_decoding_heads_draft_in_place_of_a_model(pair, capsys, tmp_path):
    """Their folder is a ``--draft``; there is no alpha, since they have no law of a text."""
    target = AutoModelForCausalLM.from_pretrained(pair / "target")
    EagleHead.from_target(target, torch.arange(200)).save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    line = [f"--target={pair / 'target'}", f"--draft={tmp_path}", "--temperature=0"]
    line += ["--max-new-tokens=8", "--gamma=2", "--prompt=import os"]
    assert demo.run(parser.parse_args(line)) == 0
    assert "draft   EagleHead, " in capsys.readouterr().out
    assert demo.run(parser.parse_args([*line, "--json"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["greedy"]["identical"] and found["comparisons"][0]["alpha"] is None
    assert found["settings"]["draft"] == str(tmp_path)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    line = [*line[:2], "--drafter=model", "--gamma=2", "--max-new-tokens=8", "--repeats=1"]
    assert bench.run(parser.parse_args(line)) == 0
    assert "the draft, gamma 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match="must be a language model here, got decoding heads"):
        load_pair(str(pair / "target"), str(tmp_path))
