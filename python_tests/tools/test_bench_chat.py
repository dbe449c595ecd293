"""bench_chat.py and replay.py: counts agree with the loop, verdicts follow from runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_chat as bench  # noqa: E402
import contestants  # noqa: E402
import replay  # noqa: E402

from specdec_ext.commands.pair import find_prompts, load_pair  # noqa: E402
from specdec_ext.commands.prompt_files import Given, read_prompts  # noqa: E402
from specdec_ext.decoding import LookupDrafter, Statistics  # noqa: E402

pytestmark = pytest.mark.thorough

TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def shipped():
    found = load_pair()
    found.tokenizer.chat_template = TEMPLATE
    return found


@pytest.fixture
def few_words(monkeypatch, tmp_path):
    """Prompts of a few words, four of each kind: long ones take most of the time."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for kind in bench.KINDS:
        texts = [f"{kind} {n}: one two one two one" for n in range(4)]
        if kind == "chat":  # a conversation
            said = [("user", "one"), ("assistant", "two")]
            turns = [{"role": role, "content": content} for role, content in said]
            texts = [{"messages": [*turns, {"role": "user", "content": text}]} for text in texts]
        (folder / f"{kind}.yaml").write_text(json.dumps(texts))
    monkeypatch.setattr(bench, "PROMPTS", folder)


def test_the_prompts_are_eight_of_each_kind():
    for kind in bench.KINDS:
        prompts = read_prompts(bench.PROMPTS / f"{kind}.yaml")
        assert len({prompt.name for prompt in prompts}) == len({p.text for p in prompts}) == 8
        assert all((len(prompt.messages()) == 3) == (kind == "chat") for prompt in prompts)


def test_replaying_a_text_counts_what_decoding_it_counts(shipped):
    """On greedy texts: calls, drafted and emitted tokens of the loop, and calls of transformers."""
    setting, compared = contestants.Setting(1, 0.0), 0
    for prompt in find_prompts(shipped)[:3]:
        ids, mask = prompt.ids, torch.ones_like(prompt.ids)
        plain = contestants.ours(shipped, setting, 40)(ids, mask, 0).tokens[0]
        text = replay.Text("", "", ids[0].tolist(), plain, [], 40)
        for gamma in (2, 7):
            for name in ("lookup", "suffix"):
                decode = contestants.ours(
                    shipped, setting, 40, gamma, draft=contestants.DRAFTERS[name]
                )
                run = decode(ids, mask, 0)
                assert run.tokens == [plain]
                played = replay.play(
                    text, replay.ours_on(text, contestants.DRAFTERS[name](shipped), gamma)
                )
                counted = (run.num_tokens, run.calls, run.statistics.drafted)
                assert played[:3] == counted
                compared += run.statistics.accepted > 0
            decode = contestants.theirs(shipped, setting, 40, gamma, lookup=True)
            run = decode(ids, mask, 0)
            played = replay.play(text, replay.theirs_on(text, gamma))
            assert run.tokens == [plain] and run.calls == played.calls
            compared += played.calls < 40
    assert compared > 6  # so many had something accepted


def test_texts_end_where_the_target_ends_them(shipped):
    setting = contestants.Setting(1, 0.0)
    prompt = find_prompts(shipped)[0]
    ids, mask = prompt.ids, torch.ones_like(prompt.ids)
    plain = contestants.ours(shipped, setting, 24)(ids, mask, 0).tokens[0]
    end = plain[9]
    before = shipped.target.generation_config.eos_token_id
    shipped.target.generation_config.eos_token_id = end
    try:
        for run in (
            contestants.ours(shipped, setting, 24, stops=True),
            contestants.ours(
                shipped, setting, 24, 5, draft=contestants.DRAFTERS["suffix"], stops=True
            ),
            contestants.theirs(shipped, setting, 24, 0, stops=True),
            contestants.theirs(shipped, setting, 24, 5, lookup=True, stops=True),
            contestants.theirs(shipped, setting, 24, 3, stops=True),
        ):
            assert run(ids, mask, 0).tokens == [plain[: plain.index(end) + 1]]
    finally:
        shipped.target.generation_config.eos_token_id = before


def test_by_turns_contestants_decode_as_by_themselves(shipped):
    prompt, setting = find_prompts(shipped)[0], contestants.Setting(1, 0.0)
    ids, mask = prompt.ids, torch.ones_like(prompt.ids)
    playing = {
        "plain": contestants.ours(shipped, setting, 30),
        "suffix": contestants.ours(
            shipped, setting, 30, 5, draft=contestants.DRAFTERS["suffix"], stops=True
        ),
    }
    runs = contestants.by_turns(playing, ids, mask, 0)
    assert [*runs] == ["plain", "suffix"]
    for name, contestant in playing.items():
        alone = contestant(ids, mask, 0)
        assert runs[name].tokens == alone.tokens
        assert (runs[name].num_tokens, runs[name].calls) == (alone.num_tokens, alone.calls)


def test_turns_and_their_seconds_by_hand(monkeypatch, shipped):
    """Whoever has the fewest tokens is next, and pays for its own rounds alone."""
    now, order = [0.0], []

    class Scripted:
        pair = shipped

        def __init__(self, name, rounds, price):
            self.name, self.rounds, self.price = name, rounds, price

        def bursts(self, ids, mask, seed):
            for size in self.rounds:
                order.append(self.name)
                now[0] += self.price
                yield contestants.Burst(0, [1] * size, size - 1, None, [0.0] * size)
            return lambda seconds: contestants.Run([[1] * sum(self.rounds)], seconds, None)

    monkeypatch.setattr(contestants.time, "perf_counter", lambda: now[0])
    playing = {"one": Scripted("one", [1, 1, 1, 1], 2.0), "more": Scripted("more", [3, 1], 5.0)}
    runs = contestants.by_turns(playing, torch.ones(1, 1), torch.ones(1, 1), 0)
    assert order == ["one", "more", "one", "one", "one", "more"]
    assert {name: run.seconds for name, run in runs.items()} == {"one": 8.0, "more": 10.0}


def test_smoke(monkeypatch, tmp_path, capsys, shipped, few_words):
    monkeypatch.setattr(bench, "load_given", lambda *_, **__: shipped)
    line = ["--prompts", "3", "--tokens", "4", "--gamma", "2", "--drafters", "suffix", "ngram"]
    line += ["--tree", "4", "--temperature", "0", "--model-gamma", "3"]
    assert bench.main([*line, "--output", str(tmp_path), "--minutes", "0"]) == 0
    said = capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    payload = json.loads(path.read_text())
    settings = {(r["batch"], r["temperature"]) for r in payload["records"]}
    assert settings == {(1, 0.0)}
    for record in payload["records"]:
        assert record["tokens_per_call"] >= 1 and record["speed"] > 0
        if record["contestant"] == bench.PLAIN:
            assert record["tokens_per_call"] == record["speed"] == 1
    names = {r["contestant"] for r in payload["records"]}
    assert names == {
        "plain", "suffix, gamma 2", "suffix, renewal", "ngram, gamma 2", "ngram, renewal",
        "model, gamma 3", "model, renewal", "suffix, tree of 4", "model, tree of 4",
        "suffix, else model, gamma 2", "suffix, else model, renewal",
        "transformers, plain", "transformers, lookup 2", "transformers, model 3",
    }  # fmt: skip
    assert path.with_suffix(".md").read_text() in said and "PASS  greedy output of 14" in said
    assert "stopped after 8 of 12: 0 minutes are over" in said


def test_batches_sample_without_transformers(monkeypatch, tmp_path, shipped, few_words):
    monkeypatch.setattr(bench, "load_given", lambda *_, **__: shipped)
    line = ["--prompts", "4", "--tokens", "3", "--gamma", "2", "--drafters", "suffix", "--tree"]
    line += ["0", "--batch", "2", "--temperature", "0.7", "--output", str(tmp_path)]
    line += ["--model-gamma", "2", "--contestants", "suffix", "model", "transf", "--by-turns"]
    line += ["--repeats", "2"]
    seeds = []
    complete = bench.complete
    monkeypatch.setattr(
        bench, "complete", lambda *given: seeds.append(given[3]) or complete(*given)
    )
    assert bench.main(line) == 0
    assert seeds == list(range(2 * 4 * 2))  # two batches of each kind, twice, never the same coins
    (path,) = tmp_path.glob("*.json")
    records = json.loads(path.read_text())["records"]
    assert {(r["batch"], r["temperature"]) for r in records} == {(2, 0.7)}
    assert {r["contestant"] for r in records} == {
        "plain", "suffix, gamma 2", "suffix, renewal", "model, gamma 2", "model, renewal",
        "suffix, else model, gamma 2", "suffix, else model, renewal", "transformers, plain",
    }  # fmt: skip
    assert all(r["texts"] == (24 if r["kind"] == bench.ALL else 8) for r in records)
    with pytest.raises(SystemExit):
        bench.parse(["--batch", "4", "--prompts", "7"])
    options = bench.parse(["--contestants", "renewal", "lookup 10"])
    assert [*bench.contestants(shipped, bench.Setting(1, 0.0), options)] == [
        "plain", "lookup, renewal", "suffix, renewal", "ngram, renewal", "model, renewal",
        "suffix, else model, renewal", "transformers, lookup 10",
    ]  # fmt: skip


@pytest.mark.parametrize("line, full", [([], False), (["--full-length"], True)])
def test_texts_of_full_length_do_not_end_where_the_target_ends_them(
    monkeypatch, shipped, line, full
):
    ids = find_prompts(shipped)[0].ids
    mask, setting = torch.ones_like(ids), contestants.Setting(1, 0.0)
    plain = contestants.ours(shipped, setting, 6)(ids, mask, 0).tokens[0]
    monkeypatch.setattr(shipped.target.generation_config, "eos_token_id", plain[2])
    line = [*line, *"--tokens 6 --gamma 2 --model-gamma 2 --drafters suffix --tree 4".split()]
    found = bench.contestants(shipped, setting, bench.parse(line))
    expected = plain if full else plain[: plain.index(plain[2]) + 1]
    assert len(expected) == 6 if full else len(expected) < 6
    assert len(found) == 12
    assert {name: play(ids, mask, 0).tokens for name, play in found.items()} == dict.fromkeys(
        found, [expected]
    )


def outcome(speeds, calls):
    """Two texts of ten tokens a kind, by each contestant's calls of the target and seconds."""
    kinds = [kind for kind in bench.KINDS for _ in range(2)]
    runs = {
        name: [
            bench.Run([[1] * 10], second, None, calls.get((name, kind), 10))
            for kind, second in zip(
                kinds, [speeds[name] * (1 + i % 2) for i in range(8)], strict=True
            )
        ]
        for name in speeds
    }
    return bench.Outcome(bench.Setting(1, 0.0), kinds, runs, [], [])


def test_bars():
    mine, rival = "suffix, gamma 5", "transformers, lookup 5"
    speeds = {"plain": 1.0, mine: 0.5, "suffix, renewal": 1.02, "lookup, renewal": 1.05, rival: 0.6}
    calls = {(mine, kind): 5 for kind in bench.KINDS} | {(rival, "chat"): 4, (rival, "edit"): 5}
    lines = bench.bars(outcome(speeds, calls), [5])
    verdicts = {line.split("  ", 1)[1]: line[:4] for line in lines}
    assert verdicts[f"{mine}, edit: 2.00 tokens a call; {rival}: 2.00"] == "PASS"
    assert verdicts[f"{mine}, chat: 2.00 tokens a call; {rival}: 2.50"] == "FAIL"
    assert verdicts[f"{mine}, free: 2.00 tokens a call; {rival}: 1.00"] == "PASS"
    faster = "1.20 ± 0.00 times as fast as transformers, lookup 5 (1.15 asked)"
    assert verdicts[f"{mine}, copying kinds: {faster}"] == "PASS"
    said = "{}, free: {} ± 0.00 times plain decoding (0.97 asked)"
    assert verdicts[said.format("suffix, renewal", "0.98")] == "PASS"
    assert verdicts[said.format("lookup, renewal", "0.95")] == "FAIL"
    assert lines[-1].startswith("PASS  greedy output of 5 contestants on 8 texts: 0 differ")
    more = {"model, gamma 3": 0.7, "model, renewal": 0.625, "transformers, plain": 0.99}
    lines = bench.bars(outcome({**speeds, **more}, calls), [5])
    assert "PASS  model, renewal, chat: 1.60 ± 0.00 times plain decoding (1.5 asked)" in lines
    assert any(line.startswith("FAIL  plain, all kinds: 0.99") for line in lines)
    assert bench.bars(outcome({"plain": 1.0, mine: 0.5}, calls), [5])[:-1] == []  # no rival
    slow = outcome({**speeds, rival: 0.55}, calls)
    slow.bugs.append("a bug")
    lines = bench.bars(slow, [5])
    assert any(line.startswith(f"FAIL  {mine}, copying kinds: 1.10") for line in lines)
    assert lines[-2].startswith("FAIL  greedy output") and lines[-1] == "a bug"
    # In batches and at a temperature: the policy's bar; texts are compared where they are greedy.
    for setting in (bench.Setting(4, 0.0), bench.Setting(1, 0.7)):
        other = bench.bars(slow._replace(setting=setting), [5])
        rule = [line for line in other if "renewal" in line]
        assert len(rule) == 8 and {line[:4] for line in rule} == {"PASS", "FAIL"}
        rest = other[8:]
        assert (rest[-1:] == ["a bug"] and "greedy" in rest[0]) == (not setting.temperature)
        assert len(rest) == (0 if setting.temperature else 2)


def test_what_differs_is_a_bug(shipped):
    prompt = bench.as_prompt(shipped, Given("one", "def f():"))
    wrong = bench.Run([[3, 4]], 1.0, None, 2)
    plain = bench.Run([[5, 6]], 1.0, Statistics(1, new_tokens=[2]))
    found = bench.Outcome(bench.Setting(1, 0.0), ["edit"], {"plain": [plain], "x": [wrong]}, [], [])
    bench.compare(shipped, [prompt], found)
    assert len(found.bugs) == 1 and "x" in found.bugs[0] and not found.ties


def test_record_and_play(monkeypatch, tmp_path, capsys, shipped):
    monkeypatch.setattr(replay, "load_pair", lambda *_, **__: shipped)
    prompts, file = tmp_path / "words.yaml", tmp_path / "texts.json"
    prompts.write_text("- one two one two one\n- content: three\n  name: b\n- four five\n")
    line = ["record", file, "--target", "t", "--prompts", prompts, "--tokens", 12, "--batch", 2]
    assert replay.main([*map(str, line)]) == 0
    texts = json.loads(file.read_text())
    assert len(texts) == 3 and {t["kind"] for t in texts} == {"words"}
    assert all(1 <= len(t["output"]) <= 12 for t in texts)
    sampled = []
    for number, seed in enumerate([1, 1, 2]):
        other = tmp_path / f"sampled{number}.json"
        line[1] = other
        assert replay.main([*map(str, [*line, "--temperature", 2, "--seed", seed])]) == 0
        sampled.append(json.loads(other.read_text()))
    assert sampled[0] == sampled[1] != sampled[2] != texts
    capsys.readouterr()
    assert replay.main(["play", str(file), str(other), "--gamma", "3"]) == 0
    found = tmp_path / "found"
    assert replay.main(["play", str(file), "--gamma", "3", "--output", str(found)]) == 0
    table = capsys.readouterr().out
    records = json.loads(found.with_suffix(".json").read_text())["records"]
    assert len(records) == 3 and all(r["texts"] == 3 for r in records)
    times = tmp_path / "times.json"
    line = ["times", times, "--target", "t", "--rows", 1, 2, 5, "--repeats", 2, "--prompt", 9]
    assert replay.main([*map(str, line)]) == 0
    assert min(json.loads(times.read_text()).values()) > 0
    assert replay.main(["play", str(file), "--gamma", "3", "--times", str(times)]) == 0
    assert "| suffix, renewal anew " in capsys.readouterr().out
    text = replay.Text(**texts[0])
    assert "| suffix, gamma 3 " in table and "| transformers, lookup 3 " in table
    played = replay.play(text, replay.ours_on(text, LookupDrafter(), 3))
    assert played.tokens == len(text.output) and 1 <= played.calls <= played.tokens


def test_texts_of_all_kinds_are_played_by_turns():
    texts = [replay.Text(kind, name, [1], [2], [], 1) for kind, name in ("aA", "aB", "bC", "aD")]
    assert "".join(text.name for text in replay.in_turn(texts)) == "ACBD"


def test_speeds_of_a_replay_by_hand():
    """Three calls of 1 + 3 tokens in place of nine of one, which take 2 of its times each."""
    times = replay.CallTimes({1: 1.0, 3: 1.8, 5: 2.2}, noise=0.0)
    assert [times.of(n) for n in (1, 2, 4, 5, 6)] == pytest.approx([1, 1.4, 2.0, 2.2, 2.4])
    text = replay.Text("", "", [1], [2, 3, 4] * 3, [], 9)
    played = replay.play(text, lambda written, most: [2, 3, 9], times)
    assert played == (9, 3, 9, pytest.approx(9 / 6)) and times.clock() == pytest.approx(6)
    assert replay.speeds([played, played]) == pytest.approx(
        {"speed": 1.5, "speed_se": 0.0, "least_speed": 1.5}
    )
