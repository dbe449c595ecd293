"""A draft distilled on its target's conversations: what is written, what is learned from it."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from generate_models import pair  # noqa: E402
from pair.distilled.__main__ import SHAPE, main  # noqa: E402
from pair.distilled.decoding import Part, draw, likeliest, write  # noqa: E402
from pair.distilled.induction import begin_copying  # noqa: E402
from pair.distilled.measurement import measure  # noqa: E402
from pair.distilled.texts import (  # noqa: E402
    Answers,
    Plan,
    Start,
    Template,
    read_shards,
    scripts,
    starts,
    template_of,
    write_shard,
    write_shards,
)
from pair.distilled.training import (  # noqa: E402
    Conversation,
    batch_of,
    batches,
    conversations,
    distillation_loss,
    draft_laws,
    frequent_tokens,
    law_parts,
    optimizers,
)
from pair.heads.__main__ import main as train_heads  # noqa: E402
from pair.heads.sources import open_source  # noqa: E402
from pair.models import multiplies_bfloat16  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext.decoding import grouped_queries  # noqa: E402
from specdec_ext.models.draft_llama import DraftLlama, DraftLlamaConfig  # noqa: E402

END = 1
VOCABULARY = 67
PLAN = Plan(batch=10, prompt_tokens=4, follow_up_tokens=3, answer_tokens=7, kept=VOCABULARY, seed=3)
BEGUN = [Start("ab", ["?"]), Start("how", ["more", "less"])]


class Words:
    """A tokenizer over tokens 2 to 66 as characters; in its template a tab is the end token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [END if c == "\t" else 2 + ord(c) % (VOCABULARY - 2) for c in text]

    def apply_chat_template(self, messages, tokenize, add_generation_prompt) -> str:
        return "".join(f"{m['role'][0]}>{m['content']}\t" for m in messages) + "a>"


def chat_target():
    """Return a random causal model in float32 that ends texts at a token."""
    target = pair("llama")[0].float()
    assert target.config.vocab_size == VOCABULARY
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = END
    return target


def shard(number: int = 0) -> Answers:
    return write_shard(chat_target(), Words(), BEGUN, PLAN, number)


def target_laws(target, tokens) -> torch.Tensor:
    """Return what a target says behind each token, ``[n, V]``."""
    with torch.no_grad():
        return target(tokens[None].long()).logits[0].softmax(-1)


def test_conversations_hold_the_laws_of_their_answers():
    """Each kept law is what the target says behind the text so far, at temperature 1."""
    target, found = chat_target(), conversations([shard()])
    assert len(found) == PLAN.batch
    for text in found:
        rows = target_laws(target, text.tokens)[:-1][text.answered[1:]]
        own = torch.zeros_like(rows).scatter_(1, text.entries, text.probs)
        torch.testing.assert_close(own, rows, rtol=5e-3, atol=1e-4)  # kept in half precision
        if text.temperature == 0.0:
            assert text.tokens[text.answered].tolist() == text.entries[:, 0].tolist()
    assert {round(text.temperature, 1) for text in found} == {0.0, 0.7, 1.0}


def test_turns_follow_the_template():
    """Turns are given as the template has them; an end that was drawn is not given again."""
    made = shard()
    to_answer, to_user = Words().encode("\ta>"), Words().encode("\tu>")
    two = cut = 0
    for text in conversations([made]):
        tokens, answered = text.tokens.tolist(), text.answered.tolist()
        runs = [list(run) for _, run in groupby(range(len(tokens)), answered.__getitem__)]
        assert not answered[0] and answered[-1] and len(runs) in (2, 4)
        two += len(runs) == 4
        for place, run in enumerate(runs):
            said = [tokens[i] for i in run]
            assert END not in said[:-1] or not answered[run[0]]
            if answered[run[0]]:
                assert 1 <= len(said) <= PLAN.answer_tokens
                cut += said[-1] != END
            else:
                assert said[-3:] == to_answer
            if place == 2:  # behind an answer
                ended = tokens[run[0] - 1] == END
                assert said[: 3 - ended] == to_user[ended:]
    assert 0 < two < PLAN.batch and cut > 0


def parts_of(*lengths: int) -> list[list[Part]]:
    """Return conversations with greedy answers of so many tokens."""
    return [[Part([5, 6, 7 + n], n, 0.0, True)] for n in lengths]


def test_bfloat16_where_it_is_fast(monkeypatch):
    for supported in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda found=supported: found)
        assert multiplies_bfloat16(torch.device("cpu")) == supported
        assert multiplies_bfloat16(torch.device("cuda"))


def test_rows_that_end_are_taken_out():
    """Each conversation is the one that it is by itself, however long the others are."""
    target = chat_target()
    together = write(target, parts_of(3, 20, 5, 12), 4, ())
    alone = [write(target, [own], 4, ()) for own in parts_of(3, 20, 5, 12)]
    assert [len(text) for text in together.tokens] == [6, 23, 8, 15]
    for text, own in zip(together.tokens, alone, strict=True):
        assert torch.equal(text, own.tokens[0])
    assert torch.equal(together.entries, torch.cat([own.entries for own in alone]))
    assert len(together.entries) == 40


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma3_alternating", "gpt2"])
def test_queries_are_grouped(family):
    """A windowed model, too, writes what it says without a cache."""
    target = pair(family)[0].float()
    found = write(target, parts_of(24), 4, ())
    assert target.config._attn_implementation == grouped_queries.NAME
    ids = found.tokens[0].long()
    target.set_attn_implementation("eager")
    rows = target_laws(target, ids)
    values, entries = rows[2:-1].topk(4, -1)
    torch.testing.assert_close(found.log_probs.float().exp(), values, rtol=5e-3, atol=1e-4)
    assert torch.equal(found.entries.long(), entries)


def test_drawing():
    logits = torch.randn(20, 50).double()
    entries, log_probs = likeliest(logits, 5)
    laws = logits.softmax(-1)
    torch.testing.assert_close(log_probs.exp().double(), laws.gather(1, entries), rtol=1e-5, atol=0)
    assert torch.equal(entries, laws.topk(5, -1).indices)
    torch.manual_seed(0)
    some = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(20000, 3)
    for temperature in (0.0, 0.5, 1.0):
        drawn = draw(some, torch.full((20000,), temperature)).bincount(minlength=3) / 20000
        law = (some[0] / max(temperature, 1e-3)).softmax(-1)
        torch.testing.assert_close(drawn, law, rtol=0, atol=0.015)


def test_a_shard_is_a_function_of_its_number():
    first, again, other = shard(), shard(), shard(1)
    assert all(map(torch.equal, first, again))
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


def test_shards_are_shared_by_jobs_and_go_on(tmp_path):
    told = (chat_target(), Words(), BEGUN, PLAN, tmp_path)
    assert write_shards(*told, 1, 2, 3600.0, 4) == 2
    assert [path.name for path in sorted(tmp_path.glob("*"))] == ["00001.pt", "00003.pt"]
    assert write_shards(*told, 0, 2, 3600.0, 4) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
    assert write_shards(*told, 0, 1, 3600.0, 4) == 4
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
    assert write_shards(*told, 0, 1, -1.0, 5) == 4  # no time for another
    assert len(read_shards(tmp_path)) == 4


def test_how_turns_begin(tmp_path):
    ours = starts()
    openings = [start.opening for start in ours]
    assert len(openings) == len(set(openings)) > 40
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    given = starts(path)
    assert [start.opening for start in given] == ["one", "two"]
    # What follows on any prompt follows on ours as well, and each kind has more.
    assert all(set(given[0].follow_ups) < set(start.follow_ups) for start in ours)
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must have a prompt"):
        starts(path)


def test_the_benchmarks_prompts_are_not_among_them():
    """No four words in a row of a follow-up stand in a prompt that the draft is measured on."""
    prompts = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts"
    seen = " ".join(path.read_text(encoding="utf-8") for path in prompts.glob("*.yaml"))
    seen = " ".join(re.findall(r"\w+", seen.lower()))
    assert "shopping list" in seen
    for said in {said for start in starts() for said in start.follow_ups}:
        words = re.findall(r"\w+", said.lower())
        for place in range(len(words) - 3):
            assert " ".join(words[place : place + 4]) not in seen


def test_templates():
    assert template_of(Words()) == Template("u>", "\ta>", "\tu>")
    words = Words()
    words.apply_chat_template = lambda messages, **how: messages[0]["content"]
    with pytest.raises(ValueError, match="must write .answer. as it is"):
        template_of(words)
    chance = random.Random(0)
    parts = scripts(Words(), BEGUN, PLAN, chance)
    assert [own[1].temperature for own in parts[:5]] == [0.0, 0.7, 0.0, 0.7, 1.0]
    assert all(own[1].temperature == own[-1].temperature for own in parts)


def by_hand() -> Answers:
    """Two conversations over five tokens, 2 and 1 of them answered, with two kept entries each."""
    probs = torch.tensor([[0.6, 0.4], [0.5, 0.25], [0.75, 0.125]])
    return Answers(
        torch.tensor([4, 1, 0, 3, 2, 0], dtype=torch.int32),
        torch.tensor([False, False, True, True, False, True]), torch.tensor([4, 2]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([[0, 3], [3, 4], [0, 2]], dtype=torch.int32), probs.log().half(),
    )  # fmt: skip


def small_draft() -> DraftLlama:
    """Return a draft that knows tokens 0, 3 and 4 of five."""
    torch.manual_seed(0)
    config = DraftLlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=5, draft_vocab_size=3,
    )  # fmt: skip
    return DraftLlama(config).with_tokens(torch.tensor([0, 3, 4])).eval()


def test_batches_by_hand():
    texts = conversations([by_hand()])
    batch = batch_of(texts)
    assert batch.tokens.tolist() == [[4, 1, 0, 3], [2, 0, 0, 0]]
    assert batch.answered.tolist() == [[False, True, True], [True, False, False]]
    assert batch.entries.tolist() == [[0, 3], [3, 4], [0, 2]]
    assert frequent_tokens(texts, 3, 5).tolist() == [0, 3, 4]


def test_epochs():
    """Each text comes once an epoch, among texts of its length."""
    texts = [
        Conversation(torch.arange(n), torch.ones(n).bool(), torch.ones(n, 1), torch.ones(n, 1), 0.0)
        for n in range(3, 43)
    ]
    of_step = batches(texts, 4, 0, torch.device("cpu"))
    assert torch.equal(of_step(13).tokens, of_step(13).tokens)
    for epoch in range(2):
        steps = [of_step(10 * epoch + step) for step in range(10)]
        lengths = [[len(row.unique()) for row in step.tokens] for step in steps]
        assert sorted(sum(lengths, [])) == list(range(3, 43))
        assert all(max(own) - min(own) == 3 for own in lengths)
    assert lengths != sorted(lengths)


def test_a_fresh_draft_copies():
    """Before any training, what follows a repeated token is what followed it before."""
    torch.manual_seed(0)
    config = DraftLlamaConfig(vocab_size=300, draft_vocab_size=300, **SHAPE)
    draft = DraftLlama(config).eval()
    once = torch.stack([torch.randperm(300)[:60] for _ in range(4)])
    twice = torch.cat([once, once], 1)

    def right() -> float:
        with torch.no_grad():
            likeliest = draft(twice[:, :-1]).logits.argmax(-1)
        return (likeliest[:, 60:] == twice[:, 61:]).float().mean().item()

    assert right() < 0.1
    begin_copying(draft)
    assert right() > 0.75
    with pytest.raises(ValueError, match="needs 2 layers.*got 1, False and 8 with heads of 4"):
        begin_copying(small_draft())


def test_the_loss_by_hand():
    draft, batch = small_draft(), batch_of(conversations([by_hand()]))
    laws = draft_laws(draft, batch).detach()
    q = laws.exp()  # entries: tokens 0, 3, 4
    expected = [[(0.6, q[0, 0]), (0.4, q[0, 1])], [(0.5, q[1, 1]), (0.25, q[1, 2])],
                [(0.75, q[2, 0])]]  # fmt: skip
    entropy, acceptance = (part.mean() for part in law_parts(draft, batch, laws))
    of_p = [-sum(p * math.log(q) for p, q in row) for row in expected]
    shared = [sum(min(p, float(q)) for p, q in row) for row in expected]
    assert entropy.item() == pytest.approx(sum(of_p) / 3, rel=2e-3)
    assert acceptance.item() == pytest.approx(sum(shared) / 3, rel=2e-3)
    # The head ran on the answered columns alone.
    whole = draft(batch.tokens[:, :-1]).logits.log_softmax(-1)[batch.answered]
    torch.testing.assert_close(laws, whole, rtol=0.02, atol=0.02)
    loss, parts = distillation_loss(draft, batch)
    assert parts.tolist() == [entropy.item(), acceptance.item()]
    assert loss.item() == pytest.approx(0.5 * entropy.item() + 0.5 * (1 - acceptance.item()))


@pytest.mark.thorough
def test_a_toy_draft_learns():
    torch.manual_seed(0)
    texts = conversations([shard(number) for number in range(3)])
    held, texts = texts[:6], texts[6:]
    target = chat_target()
    known = frequent_tokens(texts, 40, VOCABULARY)
    draft = DraftLlama.from_target(
        target, known, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    ).requires_grad_(True)  # fmt: skip
    of_step = batches(texts, 6, 0, torch.device("cpu"))
    before = measure(draft, held, torch.device("cpu"))
    losses = []
    used = optimizers(draft)
    for step in range(60):
        loss, _ = distillation_loss(draft, of_step(step))
        loss.backward()
        for optimizer in used:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    after = measure(draft, held, torch.device("cpu"))
    assert sum(r["alpha_1"] for r in after) > sum(r["alpha_1"] for r in before)
    assert all(0.0 < r["alpha_1"] <= r["known"] + 1e-6 <= 1.001 for r in after)


def save_chat_model(folder: Path) -> None:
    """Save a tiny random chat model and a tokenizer of single characters."""
    characters = " abcdefghijklmnopqrstuvwxyz.,?!'0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
    vocabulary = {"<end>": 0, "<user>": 1, "<model>": 2, "<unknown>": 3}
    vocabulary |= {letter: 4 + number for number, letter in enumerate(characters)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<model>' }}{{ m.content }}"
        "<end>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=192, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_the_commands(tmp_path, capsys):
    """Conversations are written, a draft is trained and saved, measured, and drafts."""
    folder, work = tmp_path / "chatty", tmp_path / "work"
    save_chat_model(folder)
    shared = [str(folder), "--work", str(work), "--device", "cpu", "--seed", "5"]
    few = ["--shards", "2", "--batch", "5", "--tokens", "6"]
    assert main(["texts", *shared, *few]) == 0
    assert "2 shards of 5 conversations" in capsys.readouterr().out
    assert main(["train", *shared, "--steps", "3", "--batch", "2", "--vocabulary", "40"]) == 0
    assert "3 steps, 1.2 epochs" in capsys.readouterr().out
    card = json.loads((work / "chatty" / "draft" / "training.json").read_text(encoding="utf-8"))
    assert (card["steps"], card["conversations"]) == (3, 5)
    record = tmp_path / "record"
    assert main(["evaluate", *shared, "--record", str(record)]) == 0
    written = json.loads(record.with_suffix(".json").read_text(encoding="utf-8"))["records"]
    assert {(own["temperature"], own["turn"]) for own in written} >= {(0.0, 1), (0.7, 1), (1.0, 1)}
    assert sum(own["answers"] for own in written if own["turn"] == 1) == 5
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    draft = DraftLlama.from_pretrained(work / "chatty" / "draft").eval()
    assert draft.dtype == torch.bfloat16 and len(draft.draft_token_ids) == 40
    ids = torch.tensor([[1, 8, 9]])
    told = {"max_new_tokens": 12, "temperature": 0.0}
    found = specdec_ext.generate(target, draft, ids, gamma=3, **told).sequences
    assert torch.equal(found, specdec_ext.generate(target, None, ids, **told).sequences)


def test_a_trained_draft_goes_on_with_new_texts(tmp_path, capsys):
    """It keeps its vocabulary and begins with its weights; its card says what it began with."""
    folder, work = tmp_path / "chatty", tmp_path / "work"
    save_chat_model(folder)
    few = ["--shards", "2", "--batch", "5", "--tokens", "6"]
    steps = ["--batch", "2", "--steps"]

    def run(command: str, seed: int, own: Path, *more: str) -> None:
        line = [command, str(folder), "--work", str(own), "--device", "cpu", "--seed", f"{seed}"]
        assert main([*line, *more]) == 0

    run("texts", 5, work, *few)
    run("train", 5, work, *steps, "3", "--vocabulary", "40")
    first, later = work / "chatty" / "draft", tmp_path / "later"
    run("texts", 6, later, *few)
    run("train", 6, later, *steps, "1", "--start", str(first))
    run("evaluate", 6, later, "--record", str(tmp_path / "record"))
    said = (tmp_path / "record.md").read_text(encoding="utf-8")
    assert ", behind 3 on " in said and " other tokens. Measured on 5 others." in said
    card, begun = (
        json.loads((path / "training.json").read_text(encoding="utf-8"))
        for path in (later / "chatty" / "draft", first)
    )
    assert card["steps"] == 1 and card["start"] == begun
    old = DraftLlama.from_pretrained(first, dtype=torch.float32)
    new = DraftLlama.from_pretrained(later / "chatty" / "draft", dtype=torch.float32)
    assert torch.equal(old.draft_token_ids, new.draft_token_ids)
    # A single step, at the beginning of the warm-up, moves no weight far; a fresh draft's differ.
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 0.02
    torch.manual_seed(6)
    fresh = DraftLlama(old.config)
    pairs = zip(old.parameters(), fresh.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 0.05
    capsys.readouterr()
    line = ["train", str(folder), "--work", str(later), "--device", "cpu", "--steps", "1"]
    assert main([*line, "--start", str(folder)]) == 2
    assert "has no draft that `train` made" in capsys.readouterr().err
    assert main([*line, "--start", str(first), "--vocabulary", "40"]) == 2
    assert "--vocabulary is for a fresh draft" in capsys.readouterr().err
    config = json.loads((first / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] += 1
    (first / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main([*line, "--start", str(first)]) == 2
    assert f"the target's {config['vocab_size'] - 1} tokens, got" in capsys.readouterr().err


def chatty(tmp_path: Path, shards: int) -> tuple[Path, Path]:
    """Save a chat model and let it write; return their folders."""
    folder, work = tmp_path / "chatty", tmp_path / "work"
    save_chat_model(folder)
    few = ["--shards", f"{shards}", "--batch", "4", "--tokens", "6", "--seed", "5"]
    assert main(["texts", str(folder), "--work", str(work), *few, "--device", "cpu"]) == 0
    return folder, work / "chatty" / "texts"


def test_heads_learn_from_the_same_conversations(tmp_path, capsys):
    folder, texts = chatty(tmp_path, shards=3)
    source = open_source(str(folder), tmp_path, tmp_path, 64, 0, torch.device("cpu"), texts)
    rows = source.rows(0)
    held_out, *rest = read_shards(texts)
    learned = conversations(rest)
    assert rows.tokens.shape == rows.mask.shape == rows.features.shape[:2]
    for tokens, mask, logits in zip(rows.tokens, rows.mask, rows.logits, strict=True):
        (text,) = [t for t in learned if torch.equal(t.tokens, tokens[: len(t.tokens)])]
        # What counts is the state in front of every token that the target said.
        assert mask.nonzero()[:, 0].tolist() == (text.answered.nonzero()[:, 0] - 1).tolist()
        assert torch.equal(logits[mask].argmax(-1), text.entries[:, 0])
    few_logits = source.rows(0, torch.tensor([5, 2])).logits
    assert torch.allclose(few_logits, rows.logits[..., [5, 2]], rtol=1e-5, atol=1e-5)
    (trial,) = source.trials(1)
    first = conversations([held_out])[0]
    assert trial.prompt.shape[1] == first.answered.nonzero()[0, 0]
    assert torch.equal(source.frequent(9), frequent_tokens(learned, 9, len(logits[0])))

    own = [str(folder), "--work", str(tmp_path / "heads"), "--conversations", str(texts)]
    kind = ["--kind", "eagle", "--heads", "2", "--steps", "10", "--batch-tokens", "64"]
    kind += ["--vocabulary", "30", "--unrolled", "2", "--law-weight", "1", "--bfloat16"]
    capsys.readouterr()
    assert train_heads(["train", *own, *kind]) == 0
    assert "10 steps" in capsys.readouterr().out
    assert train_heads(["evaluate", *own, "--texts", "2", "--new-tokens", "5", "--bfloat16"]) == 0
    assert "eagle-2, tree" in capsys.readouterr().out
    assert train_heads(["train", *own, *kind[:-1], "--unrolled", "1"]) == 1
    assert "details was" in capsys.readouterr().err
    assert train_heads(["train", *own, "--kind", "medusa", "--unrolled", "2"]) == 1
    assert "--unrolled is for --kind eagle, got --kind medusa" in capsys.readouterr().err
    assert train_heads(["train", *own, "--kind", "eagle", "--layers", "2"]) == 1
    assert "--layers is for --kind medusa, got --kind eagle" in capsys.readouterr().err
    assert train_heads(["train", *own, "--kind", "medusa", "--units", "9"]) == 1
    assert "--units is for --kind blockwise, got --kind medusa" in capsys.readouterr().err
    with pytest.raises(ValueError, match="2 shards at least .* got 1"):
        for path in sorted(texts.glob("*.pt"))[1:]:
            path.unlink()
        open_source(str(folder), tmp_path, tmp_path, 64, 0, torch.device("cpu"), texts)


def test_states_of_conversations_are_computed_once(tmp_path, monkeypatch):
    folder, texts = chatty(tmp_path, shards=2)
    source = open_source(str(folder), tmp_path, tmp_path, 64, 0, torch.device("cpu"), texts)
    model, read = type(source.target.base_model), []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda self, *a, **k: (read.append(1), forward(self, *a, **k))[1]
    )
    seen = [source.rows(step) for step in range(12)]
    assert len(read) == 4  # the texts of the shard that is not held out
    for rows in seen[:4]:
        output = source.target(input_ids=rows.tokens, output_hidden_states=True)
        counted = rows.mask.bool()
        for own, expected in ((rows.features, output.hidden_states[-1]), (rows.logits, output[0])):
            assert torch.allclose(own[counted], expected[counted], rtol=1e-4, atol=1e-5)

    whole = LlamaForCausalLM.forward

    def scaled(self, *given, **named):
        output = whole(self, *given, **named)
        output.logits = output.logits / 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ValueError, match="unscaled; got LlamaForCausalLM, whose are not"):
        open_source(str(folder), tmp_path, tmp_path, 64, 0, torch.device("cpu"), texts)


def test_errors(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert "has no draft that `train` made" in capsys.readouterr().err
    assert main(["train", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert "run `texts` first" in capsys.readouterr().err
    assert main(["texts", str(tmp_path / "nowhere")]) == 2
    assert "must be a model's folder or name" in capsys.readouterr().err
    assert main(["texts", str(tmp_path), "--job", "2", "--jobs", "2"]) == 2
    assert "--job must be in [0, 2), got 2" in capsys.readouterr().err
