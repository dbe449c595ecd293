"""The figures of Leviathan et al., arXiv 2211.17192, that tables here stand beside.

T5-XXL (11B) is the target throughout: "translation" is WMT English to German, "summarisation" CNN /
Daily Mail.
"""

from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """A row of Tables 2 and 4: gamma, alpha, c, expected and measured speed-up."""

    gamma: int
    alpha: float
    c: float
    expected: float
    measured: float


# (task, draft, temperature): Tables 2 and 4.
SPEEDS = {
    ("translation", "T5-small", 0): Speed(7, 0.75, 0.02, 3.2, 3.4),
    ("translation", "T5-base", 0): Speed(7, 0.80, 0.04, 3.3, 2.8),
    ("translation", "T5-large", 0): Speed(7, 0.82, 0.11, 2.5, 1.7),
    ("translation", "T5-small", 1): Speed(7, 0.62, 0.02, 2.3, 2.6),
    ("translation", "T5-base", 1): Speed(5, 0.68, 0.04, 2.4, 2.4),
    ("translation", "T5-large", 1): Speed(3, 0.71, 0.11, 2.0, 1.4),
    ("summarisation", "T5-small", 0): Speed(5, 0.65, 0.02, 2.4, 3.1),
    ("summarisation", "T5-base", 0): Speed(5, 0.73, 0.04, 2.6, 3.0),
    ("summarisation", "T5-large", 0): Speed(3, 0.74, 0.11, 2.0, 2.2),
    ("summarisation", "T5-small", 1): Speed(5, 0.53, 0.02, 1.9, 2.3),
    ("summarisation", "T5-base", 1): Speed(3, 0.55, 0.04, 1.8, 2.2),
    ("summarisation", "T5-large", 1): Speed(3, 0.56, 0.11, 1.6, 1.7),
}

# Section 3.6, translation: gamma, alpha, and the speed-up that they would give; no temperature is
# named, and nothing was timed.
BIGRAM = (3, 0.20, 1.25)

# (task, draft): alpha at T = 0 and T = 1, Table 3.
ALPHAS = {
    ("translation", "unigram"): (0.08, 0.07),
    ("translation", "bigram"): (0.20, 0.19),
    ("translation", "T5-small"): (0.75, 0.62),
    ("translation", "T5-base"): (0.80, 0.68),
    ("translation", "T5-large"): (0.82, 0.71),
    ("summarisation", "unigram"): (0.13, 0.08),
    ("summarisation", "bigram"): (0.23, 0.16),
    ("summarisation", "T5-small"): (0.65, 0.53),
    ("summarisation", "T5-base"): (0.73, 0.55),
    ("summarisation", "T5-large"): (0.74, 0.56),
}

LENIENCES = (1.0, 0.5, 0.3, 0.1)
# Draft: alpha at each lenience, T = 1, translation: Table 5.
LENIENT = {
    "unigram": (0.07, 0.10, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "T5-small": (0.62, 0.71, 0.76, 0.84),
    "T5-base": (0.68, 0.80, 0.83, 0.90),
}
# The same at T = 0 (section A.5), for T5-small, and the speed-ups that it names.
LENIENT_GREEDY = (0.75, 0.75, 0.80, 0.87)
LENIENT_SPEEDS = (2.5, 3.1, 3.6, 5.0)
LENIENT_GREEDY_SPEEDS = (3.3, 3.3, 3.9, 4.9)

# The drafts of the paper, the smallest first: those here stand beside them in this order.
DRAFTS = ("T5-small", "T5-base", "T5-large")


def beside(drafts: list[str]) -> dict[str, str]:
    """Return which of the paper's drafts each draft stands beside, by order of size."""
    return dict(zip(drafts, DRAFTS, strict=False))


def speed(task: str, drafts: list[str], draft: str, temperature: float) -> tuple[str, Speed | None]:
    """Return the paper's draft that one of ``drafts`` stands beside, and its row, if any."""
    other = beside(drafts).get(draft, "")
    return other, SPEEDS.get((task, other, int(temperature)))


# alpha, gamma, operations, speed at c = 0: Table 1.
OPERATIONS = (
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)
