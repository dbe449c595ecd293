"""A small grammar, twice: as a matcher that follows a text, and as a function of the whole text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

OPEN, CLOSE, LETTER, END = range(4)
SIZE = 4  # tokens that the grammar knows
DEEPEST = 2


def allowed_after(text: Sequence[int]) -> list[int]:
    """Brackets nested at most twice; letters within them, no two together; then the end."""
    if END in text:
        return [END]
    depth = text.count(OPEN) - text.count(CLOSE)
    if depth == 0 and text:
        return [END]
    legal = [OPEN] if depth < DEEPEST else []
    if depth > 0:
        legal.append(CLOSE)
        if text[-1] != LETTER:
            legal.append(LETTER)
    return legal


class Nested:
    """That grammar as a `TokenMatcher`; it takes any token, as one that was told nonsense.

    Parameters
    ----------
    says_end : bool
        Its masks allow the end token, and it terminates when that is accepted. False: it
        terminates where the last bracket closes, and knows of no end.
    """

    vocab_size = SIZE
    garbage = -1 << SIZE  # engines leave anything in bits that no token has

    def __init__(self, says_end: bool = True) -> None:
        self.states = [(0, False, False)]  # depth, whether behind a letter, whether ended
        self.says_end = says_end
        self.filled = self.taken_back = 0

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert bitmask.dtype == torch.int32 and bitmask.shape[1] == 1 and not self.is_terminated()
        depth, behind_letter, _ = self.states[-1]
        self.filled += 1
        bits = 0
        if len(self.states) > 1 and depth == 0:
            bits = 1 << END
        else:
            bits |= (depth < DEEPEST) << OPEN | (depth > 0) << CLOSE
            bits |= (depth > 0 and not behind_letter) << LETTER
        bitmask[index] = bits | self.garbage

    def accept_token(self, token):
        assert not self.is_terminated()
        depth, _, _ = self.states[-1]
        depth += (token == OPEN) - (token == CLOSE)
        ended = token == END if self.says_end else depth == 0
        self.states.append((depth, token == LETTER, ended))
        return True

    def rollback(self, num_tokens):
        assert 0 < num_tokens < len(self.states)
        self.taken_back += num_tokens
        del self.states[len(self.states) - num_tokens :]

    def is_terminated(self):
        return self.states[-1][2]


class NotRolledBack(Nested):
    """What a loop would have that forgets to: the draft stays in the matcher's state."""

    def rollback(self, num_tokens):
        pass

    def fill_next_token_bitmask(self, bitmask, index=0):
        super().fill_next_token_bitmask(bitmask, index)
        if not int(bitmask[index, 0]) & 7:  # lost, it allows anything but the end
            bitmask[index] = 7


def by_the_text(prompt: int):
    """Return a logits processor that hides what the grammar does not allow behind a prompt."""

    def process(ids, scores):
        hidden = torch.full_like(scores, -torch.inf)
        legal = allowed_after(ids[0, prompt:].tolist())
        hidden[:, legal] = scores[:, legal]
        return hidden

    return process


def allowed_tables(length: int, vocabulary: int = SIZE) -> list[torch.Tensor]:
    """Return which tokens may come after each text, ``[V] * d + [V]`` bool, d = 0 .. length."""
    tables = []
    for depth in range(length + 1):
        table = torch.zeros([vocabulary] * (depth + 1), dtype=torch.bool)
        for text in itertools.product(range(vocabulary), repeat=depth):
            table[text][allowed_after(text)] = True
        tables.append(table)
    return tables


def masked_law(model, prompt: list[int], length: int, temperature: float = 1.0) -> torch.Tensor:
    """Return the law of the next tokens under the grammar, ``[V ** length]``; END behind the end.

    Parameters
    ----------
    model : TableModel
        Its rows over V tokens, V >= `SIZE`.
    """
    vocabulary = model.table.shape[0]
    law = []
    for new in itertools.product(range(vocabulary), repeat=length):
        text, p = [0, *prompt], 1.0
        for i, token in enumerate(new):
            row = torch.zeros(vocabulary, dtype=torch.float64)
            legal = allowed_after(new[:i])
            row[legal] = (model.table[text[-2], text[-1]][legal].double() / temperature).softmax(0)
            p *= row[token].item()
            text.append(token)
        law.append(p)
    return torch.tensor(law, dtype=torch.float64)
