"""How good texts are: BLEU and chrF by sacreBLEU, ROUGE by rouge-score, with standard errors.

No score is computed here: sacreBLEU's public parts give a corpus' BLEU from its sentences' counts,
which is what the jackknife below needs, and rouge-score gives every sentence's F-measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")


class Score(NamedTuple):
    """A figure of quality in percent, and its standard error over sentences."""

    value: float
    error: float


def _checked(hypotheses: Sequence[str], references: Sequence[str], library: str) -> None:
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"quality: as many hypotheses as references, at least one, got {len(hypotheses)} and "
            f"{len(references)}"
        )
    try:
        __import__(library)
    except ImportError as error:
        raise ImportError(
            f"quality needs {library}: pip install 'specdec_ext[bench]' (or {library} by itself)"
        ) from error


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Corpus BLEU of cased text, one reference a sentence: sacreBLEU's defaults (13a, exp).

    The standard error is the jackknife's: BLEU is no mean over sentences, but the counts that it is
    made of are sums over them, so each sentence can be left out in turn.

    Parameters
    ----------
    hypotheses, references : sequence of str
        Detokenised texts, as many of the one as of the other.

    Returns
    -------
    Score
        In percent; the error is NaN of fewer than two sentences.

    References
    ----------
    Papineni et al. 2002; Post 2018, "A call for clarity in reporting BLEU scores" (sacreBLEU);
    Efron and Stein 1981 (the jackknife).
    """
    _checked(hypotheses, references, "sacrebleu")
    from sacrebleu.metrics import BLEU

    whole = BLEU().corpus_score(list(hypotheses), [list(references)])
    metric = BLEU(effective_order=True)  # it changes a sentence's own score, not its counts
    parts = [
        metric.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)
    ]  # fmt: skip
    orders = range(len(whole.counts))

    def without(k: int) -> float:
        part = parts[k]
        return BLEU.compute_bleu(
            correct=[whole.counts[n] - part.counts[n] for n in orders],
            total=[whole.totals[n] - part.totals[n] for n in orders],
            sys_len=whole.sys_len - part.sys_len,
            ref_len=whole.ref_len - part.ref_len,
            smooth_method="exp",
        ).score

    count = len(parts)
    if count < 2:
        return Score(whole.score, math.nan)
    left = [without(k) for k in range(count)]
    mean = sum(left) / count
    variance = (count - 1) / count * sum((value - mean) ** 2 for value in left)
    return Score(whole.score, math.sqrt(variance))


def mean_sentence_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Mean over sentences of each one's BLEU, up to the order that the sentence is long enough for.

    What a paper calls an "average BLEU score" may be this; it is no corpus BLEU, and mostly higher.

    Parameters
    ----------
    hypotheses, references : sequence of str
        Detokenised texts, as many of the one as of the other.

    Returns
    -------
    Score
        In percent.
    """
    _checked(hypotheses, references, "sacrebleu")
    from sacrebleu.metrics import BLEU

    metric = BLEU(effective_order=True)
    return mean_of(
        [metric.sentence_score(h, [r]).score for h, r in zip(hypotheses, references, strict=True)]
    )


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF2 in percent, sacreBLEU's defaults (characters up to 6, no words).

    References
    ----------
    Popović 2015, "chrF: character n-gram F-score for automatic MT evaluation".
    """
    _checked(hypotheses, references, "sacrebleu")
    from sacrebleu.metrics import CHRF

    return float(CHRF().corpus_score(list(hypotheses), [list(references)]).score)


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
    """Mean F-measures in percent of ROUGE-1, ROUGE-2 and ROUGE-L, for English texts.

    rouge-score's own tokens, with its stemmer. It knows the letters a to z alone and would cut
    German words at their umlauts.

    Parameters
    ----------
    hypotheses, references : sequence of str
        As many of the one as of the other.

    Returns
    -------
    dict
        A `Score` for each of `ROUGE_KINDS`.

    References
    ----------
    Lin 2004, "ROUGE: a package for automatic evaluation of summaries".
    """
    _checked(hypotheses, references, "rouge_score")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE_KINDS, use_stemmer=True)
    found = [scorer.score(r, h) for h, r in zip(hypotheses, references, strict=True)]
    return {
        kind: mean_of([100 * sentence[kind].fmeasure for sentence in found])
        for kind in ROUGE_KINDS
    }  # fmt: skip


def mean_of(values: Sequence[float]) -> Score:
    """Return the mean of independent values and its standard error (NaN of fewer than two)."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return Score(mean, math.nan)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Score(mean, math.sqrt(variance / count))
