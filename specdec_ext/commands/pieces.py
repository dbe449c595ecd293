"""Tokens as text, one by one, and who wrote each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .page import ACCEPTED, REPLACED, TARGET

if TYPE_CHECKING:
    from ..decoding import Burst

__all__ = ["Piece", "Reader", "pieces_of", "shown"]

VISIBLE = {"\n": "↵", "\t": "→", " ": "·"}


class Piece(NamedTuple):
    """A token of the completion, and who wrote it."""

    kind: str
    token: int
    text: str


class Reader:
    """Turns tokens into text one by one; bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(prompt)[-8:]
        self.read = len(self.tokens)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def peek(self, token: int) -> str:
        """Return the text that a token would add."""
        before = self._decode(self.tokens)
        return self._decode([*self.tokens, token])[len(before) :]

    def push(self, token: int) -> str:
        """Add a token; return the text that is now complete."""
        before = self._decode(self.tokens[: self.read])
        self.tokens.append(token)
        after = self._decode(self.tokens)
        if after.endswith("\ufffd") and len(self.tokens) - self.read < 4:
            return ""
        self.read = len(self.tokens)
        if self.read > 32:
            self.tokens, self.read = self.tokens[-8:], 8
        return after[len(before) :]


def shown(text: str) -> str:
    """Return a replaced token's text on one line; one of nothing but space shows its characters."""
    if text.isspace():
        return "".join(VISIBLE.get(character, character) for character in text)
    return text.replace("\n", VISIBLE["\n"])


def pieces_of(burst: Burst, reader: Reader) -> Iterator[Piece]:
    """Yield what a round added, in order; a replaced draft token stands before what replaced it."""
    for i, token in enumerate(burst.tokens):
        if i == burst.accepted and burst.replaced is not None:
            yield Piece(REPLACED, burst.replaced, reader.peek(burst.replaced))
        yield Piece(ACCEPTED if i < burst.accepted else TARGET, token, reader.push(token))
