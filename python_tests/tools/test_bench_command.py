"""python -m specdec_ext bench: what it advises, and what it refuses."""

from __future__ import annotations

import argparse
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from generate_models import pair as random_pair

import specdec_ext
from specdec_ext import __main__ as commands
from specdec_ext.commands import bench
from specdec_ext.commands.pair import Pair, Prompt, find_pair
from specdec_ext.commands.prompt_files import Given


def options(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args([*map(str, arguments)])


@pytest.fixture
def prompts(tmp_path):
    """Write two prompts to a file."""
    path = tmp_path / "prompts.txt"
    path.write_text("import os\n\ndef main():\n")
    return path


# --- on models --------------------------------------------------------------------------------


def test_the_shipped_pair(capsys, prompts):
    few = ("--prompts", prompts, "--max-new-tokens", 6, "--gamma", 2, "--repeats", 1)
    assert bench.run(options(*few)) == 0
    said = capsys.readouterr().out
    assert "2 prompts of " in said and "6 more each, temperature 0, cpu" in said
    rows = [line for line in said.splitlines() if " ± " in line and "plain" not in line]
    assert [row.split("  ")[1] for row in rows] == [
        "the draft, gamma 2",
        "the draft, gamma RenewalRule()",
        "LookupDrafter(), gamma 2",
        "LookupDrafter(), gamma RenewalRule()",
        "SuffixDrafter(), gamma 2",
        "SuffixDrafter(), gamma RenewalRule()",
    ]
    assert ("Use " in said) != ("Leave it off: " in said)
    assert bench.run(options(*few, "--json", "--drafter", "lookup", "--temperature", 0.8)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in found["contestants"]] == [row.split("  ")[1] for row in rows[2:4]]
    assert found["best"] in [c["name"] for c in found["contestants"]]
    assert found["speed"]["mean"] > 0 and found["plain_tokens_per_second"] > 0
    assert found["tokenizers"] is None and found["call"].startswith("generate(target, LookupDraft")


def test_a_target_alone_takes_the_short_prompts(capsys):
    target = str(find_pair() / "target")
    args = options(
        "--target", target, "--max-new-tokens", 4, "--gamma", 2, "--repeats", 1, "--json"
    )
    pair, prompts = bench.load_named(
        args, texts=[Given(text, text) for text in bench.PROMPTS], needs_draft=False
    )
    assert pair.draft is None and pair.draft_tokenizer is None
    assert [prompt.text for prompt in prompts] == list(bench.PROMPTS)
    names = [contestant.name for contestant in bench.contestants(pair, args)]
    assert names == [
        bench.PLAIN,
        "LookupDrafter(), gamma 2",
        "LookupDrafter(), gamma RenewalRule()",
        "SuffixDrafter(), gamma 2",
        "SuffixDrafter(), gamma RenewalRule()",
    ]


def test_the_calls_that_it_names_are_calls():
    """Each contestant is what the call beside it says."""
    target, draft = random_pair(noise=0.02)
    pair = Pair(target, draft, None, [])
    ids = torch.tensor([[3, 5, 7, 3, 5, 7, 3, 5]])
    makers = ("LookupDrafter", "SuffixDrafter", "RenewalRule", "GrownTree")
    names = {name: getattr(specdec_ext.decoding, name) for name in makers}
    names |= {"generate": specdec_ext.generate, "target": target, "draft": draft, "input_ids": ids}
    field = bench.contestants(pair, options("--gamma", 1, 3, "--tree", 4, 6))
    assert [c.name for c in field if "tree" in c.name] == [
        "the draft, tree of 4", "the draft, tree of 6"
    ]  # fmt: skip
    for contestant in field:
        result = eval(contestant.code, names)
        ours = specdec_ext.generate(target, contestant.draft(), ids, **contestant.shape)
        assert torch.equal(result.sequences, ours.sequences)
        if "Renewal" not in contestant.code:  # which goes by the clock
            assert result.statistics.histogram == ours.statistics.histogram


def test_greedy_output_that_differs_is_a_bug_and_is_not_timed(monkeypatch, capsys):
    target, draft = random_pair(noise=0.02)
    pair = Pair(target, draft, None, [])
    texts = [Prompt(str(i), "", torch.tensor([[i, 5, 7]])) for i in (1, 2)]
    monkeypatch.setattr(bench, "load_named", lambda *_, **__: (pair, texts))
    monkeypatch.setattr(bench, "time_all", None)
    decode = bench.decode

    def wrong(pair, prompt, contestant, *rest):
        run = decode(pair, prompt, contestant, *rest)
        if contestant.name == "the draft, gamma 3":
            run = run._replace(tokens=[*run.tokens[:4], (run.tokens[4] + 1) % 67, *run.tokens[5:]])
        return run

    monkeypatch.setattr(bench, "decode", wrong)
    few = ("--gamma", 1, 3, "--max-new-tokens", 8)
    assert bench.run(options(*few)) == 1
    said = capsys.readouterr().out
    assert said.count("the draft, gamma 3, ") == said.count(": bug at token 4") == 2
    assert bench.run(options(*few, "--json")) == 1
    assert len(json.loads(capsys.readouterr().out)["bugs"]) == 2


# --- on times that are given ------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch, capsys):
    """Run it on contestants whose speeds are given: of the first timing, and of the second."""
    pair = Pair(*random_pair(), None, [])
    texts = [Prompt(str(i), "", torch.tensor([[i]])) for i in range(4)]
    monkeypatch.setattr(bench, "load_named", lambda *_, **__: (pair, texts))
    monkeypatch.setattr(bench, "compare_greedy", lambda *_: [])

    def run(first, second):
        def time_all(pair, prompts, field, args, status, repeats=1):
            given = first if len(field) > 2 else second
            assert len(field) > 2 or repeats == 3
            rates = {c.name: given.get(c.name, [1.0] * 4) for c in field}
            return {name: [bench.Run([0], 1 / r, 1.5) for r in of] for name, of in rates.items()}

        monkeypatch.setattr(bench, "time_all", time_all)
        assert bench.run(options("--gamma", 2, 4, "--json")) == 0
        return json.loads(capsys.readouterr().out)

    return run


FOUR, EIGHT = "the draft, gamma 4", "LookupDrafter(), gamma 2"


def test_the_fastest_is_advised_with_its_second_time(told):
    found = told({FOUR: [2.0] * 4, EIGHT: [1.5] * 4}, {FOUR: [1.6, 1.7, 1.5, 1.6]})
    assert found["best"] == FOUR and found["call"] == "generate(target, draft, input_ids, gamma=4)"
    assert found["use"] and 1.59 < found["speed"]["mean"] < 1.61
    assert [c["speed"]["mean"] for c in found["contestants"]].count(pytest.approx(2.0)) == 1


@pytest.mark.parametrize("second", [[0.9] * 4, [1.0] * 4, [0.7, 1.0, 1.6, 1.3]])
def test_luck_and_doubt_are_left_off(told, second):
    """Faster once by chance, or faster by less than two standard errors."""
    found = told({FOUR: [1.3] * 4}, {FOUR: second})
    assert found["best"] == FOUR and not found["use"]


def test_the_geometric_mean_and_its_standard_error():
    runs = {"plain": [bench.Run([0], 1.0, 1.0)] * 2,
            "x": [bench.Run([0, 0], 1.0, 1.0), bench.Run([0], 0.125, 1.0)]}  # fmt: skip
    speed = bench.speed_over(runs, "plain", "x")  # 2 and 8 times
    assert speed.mean == pytest.approx(4)
    assert speed.standard_error == pytest.approx(
        4 * math.log(2)
    )  # deviation sqrt(2) log 2, over sqrt(2)


def test_the_run_of_median_time_counts_and_all_take_turns(monkeypatch):
    times, calls = iter([3.0, 1.0, 2.0, 9.0, 7.0, 8.0]), []

    def decode(pair, prompt, contestant, temperature, args, seed):
        calls.append((contestant.name, seed))
        return bench.Run([0], next(times), 1.0)

    monkeypatch.setattr(bench, "decode", decode)
    one = [bench.Contestant("a", None, {}, "")]
    args = SimpleNamespace(seed=5, temperature=0.0)
    runs = bench.time_all(None, ["p", "q"], one, args, lambda text: None, repeats=3)
    assert [run.seconds for run in runs["a"]] == [2.0, 8.0]
    assert calls == [("a", 5), ("a", 6), ("a", 7)] * 2


# --- the command line -------------------------------------------------------------------------


def test_trees_want_a_draft(capsys):
    target = str(find_pair() / "target")
    for given in (("--target", target), ("--drafter", "lookup")):
        assert bench.run(options(*given, "--tree", 4)) == 2
        assert "--tree needs a draft model or heads (--draft)" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [
    ("one prompt\n\n", "a standard error is over prompts: give 2 at least, got 1"),
    ("", "give 2 at least, got 0"),
])  # fmt: skip
def test_too_few_prompts(capsys, prompts, content, said):
    prompts.write_text(content)
    assert bench.run(options("--prompts", prompts)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"a": 1}', "{}", "3", '["a", ""]', '["a", 3]', "garbage"])
def test_json_that_holds_no_prompts(capsys, tmp_path, content):
    path = tmp_path / "prompts.json"
    path.write_text(content)
    assert bench.run(options("--prompts", path)) == 2
    assert str(path) in capsys.readouterr().err
    path.write_text('["a\\nb", "c"]')
    assert [given.text for given in bench.read_prompts(path)] == ["a\nb", "c"]


@pytest.mark.parametrize(("line", "said"), [
    (["--prompts", "nowhere.txt"], "No such file"),
    (["--repeats", 0], "--repeats must be at least 1, got 0"),
    (["--gamma", 2, 0], "--gamma must be in [1, 65534], got 0"),
    (["--draft", "somewhere"], "--target and --draft go together"),
    (["--target", "somewhere", "--drafter", "model"], "--target and --draft go together"),
    (["--target", "nowhere"], "no checkpoint at nowhere"),
    (["--chat"], "the target's tokenizer has no chat template"),
])  # fmt: skip
def test_what_is_refused(capsys, line, said):
    assert bench.run(options(*line)) == 2
    output, errors = capsys.readouterr()
    assert errors.startswith("bench: ") and said in errors and not output


@pytest.mark.parametrize(("script", "name"), [
    ("specdec", "specdec"), ("__main__.py", "python -m specdec_ext"),
])  # fmt: skip
def test_the_version_and_the_programs_name(monkeypatch, capsys, script, name):
    for option, said in (("--version", f"specdec_ext {specdec_ext.__version__}\n"), ("-h", name)):
        monkeypatch.setattr(sys, "argv", [f"/somewhere/{script}", option])
        with pytest.raises(SystemExit) as end:
            commands.main()
        output = capsys.readouterr().out
        assert end.value.code == 0 and (output == said or output.startswith(f"usage: {said} [-h]"))


def test_the_console_script_is_declared():
    """`make test-wheels` asks an installed copy."""
    tomllib = pytest.importorskip("tomllib")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"specdec": f"{commands.__name__}:{commands.main.__name__}"}


def test_prompts_with_names_and_conversations(tmp_path):
    talk, plain = tmp_path / "talk.yaml", tmp_path / "plain.txt"
    talk.write_text(
        "- name: first\n  messages:\n  - {role: user, content: Hello}\n"
        "  - {role: assistant, content: ' Hi! '}\n  - {role: user, content: Bye}\n"
        "- content: |\n    two\n    lines\n- three\n"
    )
    plain.write_text("a\n\nb\n")
    found = bench.read_prompts(talk, plain)
    assert [given.name for given in found] == [
        "first", "prompt 1", "prompt 2", "prompt 2", "prompt 3",
    ]  # fmt: skip
    assert [given.text for given in found] == ["Bye", "a", "two\nlines", "b", "three"]
    assert [message["content"] for message in found[0].messages()] == ["Hello", "Hi!", "Bye"]
    assert found[1].messages() == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("content", [
    "- {content: a, messages: []}", "- {name: a}", "- messages: []", "- messages: [{role: user}]",
    "- {content: '  '}", "a: [", "- {messages: [{content: a}]}", "- 3",
])  # fmt: skip
def test_yaml_that_holds_no_prompts(tmp_path, content):
    path = tmp_path / "prompts.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"prompts\.yaml"):
        bench.read_prompts(path)
