"""Scores of texts against figures worked out by hand, and transformers' loops on a small model."""

import math
import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from pair.seq2seq.sizes import build_model  # noqa: E402
from tables import hosts, quality  # noqa: E402

from specdec_ext.decoding.cache_names import cache_of  # noqa: E402

sacrebleu = pytest.importorskip("sacrebleu")

HYPOTHESES = ["the cat sat on the mat", "a dog barked at me today", "one two three four five"]
REFERENCES = ["the cat sat on the mat .", "a dog barked at him today", "one two three five four"]


def test_bleu_by_hand():
    """One sentence of 6 words against 7: 6/6, 5/5, 4/4, 3/3 n-grams, and the shorter text pays."""
    score = quality.bleu(HYPOTHESES[:1], REFERENCES[:1])
    assert score.value == pytest.approx(100 * math.exp(1 - 7 / 6))
    assert math.isnan(score.error)
    # 6 of 6 words and 5 of 6; 5 of 5 pairs and 3 of 5; 4 of 4 and 2 of 4; 3 of 3 and 1 of 3.
    both = quality.bleu(HYPOTHESES[:2], REFERENCES[:2]).value
    precisions = (11 / 12) * (8 / 10) * (6 / 8) * (4 / 6)
    assert both == pytest.approx(100 * math.exp(1 - 13 / 12) * precisions**0.25)
    assert quality.bleu(REFERENCES, REFERENCES).value == pytest.approx(100)


def test_bleu_error_is_the_jackknife():
    """Each sentence left out by scoring the others again, through another door of sacreBLEU."""
    left = []
    for k in range(3):
        kept = [i for i in range(3) if i != k]
        left.append(
            sacrebleu.corpus_bleu(
                [HYPOTHESES[i] for i in kept], [[REFERENCES[i] for i in kept]]
            ).score
        )
    mean = sum(left) / 3
    wanted = math.sqrt(2 / 3 * sum((value - mean) ** 2 for value in left))
    found = quality.bleu(HYPOTHESES, REFERENCES)
    assert found.error == pytest.approx(wanted)
    # The same sentences twice: about 1 / sqrt(2) of it, and exactly the same score.
    twice = quality.bleu(HYPOTHESES * 2, REFERENCES * 2)
    assert twice.value == pytest.approx(found.value)
    assert 0.4 < twice.error / found.error < 0.8


def test_hypotheses_and_references_have_places():
    """Exchanged they give another score, which a wrong order of arguments in here would."""
    score = quality.bleu(HYPOTHESES[:1], REFERENCES[:1]).value
    assert quality.bleu(REFERENCES[:1], HYPOTHESES[:1]).value < score


def test_mean_sentence_bleu():
    score = quality.mean_sentence_bleu(HYPOTHESES[:1] * 4 + REFERENCES[:1] * 4, REFERENCES[:1] * 8)
    low = 100 * math.exp(1 - 7 / 6)
    assert score.value == pytest.approx((low + 100) / 2)
    spread = (100 - low) / 2
    assert score.error == pytest.approx(spread * math.sqrt(8 / 7) / math.sqrt(8))
    # A text of two words has no 3-grams: of effective order it is right as a whole.
    assert quality.mean_sentence_bleu(["Guten Tag"], ["Guten Tag"]).value == pytest.approx(100)


def test_rouge_by_hand():
    found = quality.rouge(["a b c d"], ["a b d c e"])
    precision, recall = 4 / 4, 4 / 5
    assert found["rouge1"].value == pytest.approx(
        100 * 2 * precision * recall / (precision + recall)
    )
    precision, recall = 1 / 3, 1 / 4  # "a b"
    assert found["rouge2"].value == pytest.approx(
        100 * 2 * precision * recall / (precision + recall)
    )
    precision, recall = 3 / 4, 3 / 5  # "a b d" or "a b c"
    assert found["rougeL"].value == pytest.approx(
        100 * 2 * precision * recall / (precision + recall)
    )


def test_chrf():
    assert quality.chrf(REFERENCES, REFERENCES) == pytest.approx(100)
    wanted = sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert quality.chrf(HYPOTHESES, REFERENCES) == pytest.approx(wanted)


@pytest.mark.parametrize("score", [quality.bleu, quality.mean_sentence_bleu, quality.chrf])
def test_numbers_of_texts(score):
    with pytest.raises(ValueError, match="got 2 and 1"):
        score(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="at least one, got 0 and 0"):
        score([], [])


# ---- transformers' loops -------------------------------------------------------------------------

SHAPE = {"d_model": 32, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2}
SOURCE = [5, 6, 7, 8, 9, 1]


@pytest.fixture(scope="module")
def model():
    return build_model(SHAPE, 64, 0.0, 0).eval()


def greedy_by_hand(model, new):
    ids = torch.tensor([[0]])
    for _ in range(new):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([SOURCE]), decoder_input_ids=ids).logits
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=1)
        if ids[0, -1] == 1:
            break
    return ids[0, 1:].tolist()


def test_greedy_is_counted(model):
    found = hosts.decode(model, SOURCE, 9)
    assert found.tokens == greedy_by_hand(model, 9)
    assert found.calls == len(found.tokens)
    assert found.seconds > 0


def test_prompt_lookup_is_given_the_source(model):
    """A model that copies its input: after the first token all of the source is proposed."""
    echo = build_model(SHAPE, 64, 0.0, 0).eval()
    wanted = [*SOURCE]

    def next_tokens(module, args, kwargs, output):
        # Whatever was written, the next token is the source's at that place.
        past = cache_of(output).get_seq_length() - output.logits.shape[1]
        output.logits.fill_(0.0)
        for k in range(output.logits.shape[1]):
            place = min(past + k, len(wanted) - 1)
            output.logits[0, k, wanted[place]] = 9.0
        return output

    handle = echo.register_forward_hook(next_tokens, with_kwargs=True)
    plain = hosts.decode(echo, SOURCE, 12)
    given = hosts.prompt_lookup(echo, SOURCE, 12, 8)
    without = hosts.decode(echo, SOURCE, 12, prompt_lookup_num_tokens=8)
    handle.remove()
    assert plain.tokens == given.tokens == without.tokens == wanted
    # One call for the first token; it is found in the source, and the rest but the end is copied.
    assert given.calls == 2
    # The decoder's own ids repeat nothing.
    assert without.calls == plain.calls == 6
    # The model is as it was.
    assert "_get_candidate_generator" not in vars(echo)


def test_beams_run(model):
    found = hosts.decode(model, SOURCE, 9, num_beams=5)
    assert 0 < len(found.tokens) <= 9
