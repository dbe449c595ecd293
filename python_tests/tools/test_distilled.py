"""A draft distilled on its target's conversations: what is written, what is learned from it."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from generate_models import pair  # noqa: E402
from pair.distilled.__main__ import main  # noqa: E402
from pair.distilled.measurement import measure  # noqa: E402
from pair.distilled.texts import (  # noqa: E402
    Answers,
    Plan,
    openings,
    read_shards,
    write_shard,
    write_shards,
)
from pair.distilled.training import (  # noqa: E402
    batch_of,
    batches,
    conversations,
    distillation_loss,
    draft_laws,
    frequent_tokens,
    law_parts,
    optimizers,
)

from specdec_ext.models.draft_llama import DraftLlama, DraftLlamaConfig  # noqa: E402

END = 1
VOCABULARY = 67
PLAN = Plan(batch=6, prompt_tokens=4, answer_tokens=7, kept=VOCABULARY, seed=3)


class Words:
    """A tokenizer over tokens 2 to 66 as characters, with a chat template of one turn."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + ord(letter) % (VOCABULARY - 2) for letter in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        first = VOCABULARY - 2  # a code whose remainder is 0
        return "".join(chr(first + token - 2) for token in tokens if token > END)

    def apply_chat_template(self, messages, tokenize, **how) -> str:
        ends = "" if how.get("continue_final_message") else "|"
        return f">{messages[0]['content']}{ends}"


def chat_target():
    """Return a random causal model in float32 that ends texts at a token."""
    target = pair("llama")[0].float()
    assert target.config.vocab_size == VOCABULARY
    target.generation_config.eos_token_id = END
    target.generation_config.pad_token_id = END
    return target


def shard(number: int = 0) -> Answers:
    return write_shard(chat_target(), Words(), ["ab", "how"], PLAN, number)


def test_conversations_hold_the_laws_of_their_answers():
    """Each kept law is what the target says behind the text so far, at temperature 1."""
    target, found = chat_target(), conversations([shard()])
    assert len(found) == PLAN.batch
    for text in found:
        answer = text.tokens[text.prompt :].tolist()
        assert 1 <= len(answer) <= PLAN.answer_tokens
        assert END not in answer[:-1]
        with torch.no_grad():
            rows = target(text.tokens[None]).logits[0, text.prompt - 1 : -1].softmax(-1)
        own = torch.zeros_like(rows).scatter_(1, text.entries, text.probs)
        torch.testing.assert_close(own, rows, rtol=5e-3, atol=1e-4)  # kept in half precision
        if text.temperature == 0.0:
            assert answer == text.entries[:, 0].tolist()
    assert {round(text.temperature, 1) for text in found} == {0.0, 0.7, 1.0}


def test_a_shard_is_a_function_of_its_number():
    first, again, other = shard(), shard(), shard(1)
    assert all(map(torch.equal, first, again))
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


def test_shards_are_shared_by_jobs_and_go_on(tmp_path):
    told = (chat_target(), Words(), ["ab"], PLAN, tmp_path)
    assert write_shards(*told, 1, 2, 3600.0, 4) == 2
    assert [path.name for path in sorted(tmp_path.glob("*"))] == ["00001.pt", "00003.pt"]
    assert write_shards(*told, 0, 2, 3600.0, 4) == 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
    assert write_shards(*told, 0, 1, 3600.0, 4) == 4
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
    assert write_shards(*told, 0, 1, -1.0, 5) == 4  # no time for another
    assert len(read_shards(tmp_path)) == 4


def test_openings(tmp_path):
    ours = openings()
    assert len(ours) == len(set(ours)) > 40
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert openings(path) == ["one", "two"]
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must have a prompt"):
        openings(path)


def by_hand() -> Answers:
    """Two conversations over five tokens: 2 + 2 and 1 + 1 tokens, with two kept entries each."""
    probs = torch.tensor([[0.6, 0.4], [0.5, 0.25], [0.75, 0.125]])
    return Answers(
        torch.tensor([4, 1, 0, 3, 2, 0], dtype=torch.int32), torch.tensor([4, 2]),
        torch.tensor([2, 1]), torch.tensor([0.0, 1.0]),
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
    assert batch.said.tolist() == [[True, False, False], [False, False, False]]
    assert batch.answered.tolist() == [[False, True, True], [True, False, False]]
    assert batch.entries.tolist() == [[0, 3], [3, 4], [0, 2]]
    assert frequent_tokens(texts, 3, 5).tolist() == [0, 3, 4]
    of_step = batches(texts * 4, 2, 0, torch.device("cpu"))
    assert torch.equal(of_step(5).tokens, of_step(5).tokens)
    epoch = [len(of_step(step).tokens) for step in range(4)]
    assert epoch == [2] * 4


def test_the_loss_by_hand():
    draft, batch = small_draft(), batch_of(conversations([by_hand()]))
    laws = draft_laws(draft, batch).detach()
    q = laws[batch.answered].exp()  # entries: tokens 0, 3, 4
    expected = [[(0.6, q[0, 0]), (0.4, q[0, 1])], [(0.5, q[1, 1]), (0.25, q[1, 2])],
                [(0.75, q[2, 0])]]  # fmt: skip
    entropy, acceptance = law_parts(draft, batch, laws)
    of_p = [-sum(p * math.log(q) for p, q in row) for row in expected]
    shared = [sum(min(p, float(q)) for p, q in row) for row in expected]
    assert entropy.item() == pytest.approx(sum(of_p) / 3, rel=2e-3)
    assert acceptance.item() == pytest.approx(sum(shared) / 3, rel=2e-3)
    # The one token of a user's turn, 1, is not known: nothing is learned from it, and no NaN.
    loss, parts = distillation_loss(draft, batch)
    assert parts[2] == 0
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
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    after = measure(draft, held, torch.device("cpu"))
    assert sum(r["alpha_1"] for r in after) > sum(r["alpha_1"] for r in before)
    assert all(0.0 < r["alpha_1"] <= r["known"] + 1e-6 <= 1.001 for r in after)


def test_errors(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert "run `train` first" in capsys.readouterr().err
    assert main(["train", str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    assert "run `texts` first" in capsys.readouterr().err
    assert main(["texts", str(tmp_path / "nowhere")]) == 2
    assert "must be a model's folder or name" in capsys.readouterr().err
    assert main(["texts", str(tmp_path), "--job", "2", "--jobs", "2"]) == 2
    assert "--job must be in [0, 2), got 2" in capsys.readouterr().err
