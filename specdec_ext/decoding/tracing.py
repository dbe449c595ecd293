"""A trace of `generate` in the terminal: what each round kept, and what the target put instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from .chain_generation import Burst
from .checks import shown

__all__ = ["RoundTrace"]

GREEN, RED_STRUCK, BOLD, PLAIN = "\x1b[32m", "\x1b[31;9m", "\x1b[1m", "\x1b[0m"


class RoundTrace:
    """Prints a line for every round and request: give it to ``on_round`` of `specdec_ext.generate`.

    A line shows the draft tokens that were accepted, then the draft token that was not, struck out,
    and the target's own token in its place. Where no draft token was rejected, the target's own
    follows those that were accepted. (Xia et al., arXiv 2203.16487, Table 16, shows rounds so.)

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Anything with ``decode(ids)``. Tokens are decoded one by one: a character of several tokens
        shows as replacement characters here.
    file : file, optional
        Where to write. None: what ``sys.stdout`` is at the time.
    color : bool, optional
        Accepted green, rejected red and struck out, the target's own bold; False: rejected
        ``[-so-]``, the target's own ``{+so+}``. None: colours in a terminal.

    Raises
    ------
    TypeError
        A tokenizer that cannot decode.

    Examples
    --------
    >>> from specdec_ext.decoding import Burst, RoundTrace
    >>> class Letters:
    ...     def decode(self, ids):
    ...         return "".join(chr(96 + i) for i in ids)
    >>> trace = RoundTrace(Letters(), color=False)
    >>> trace([Burst(0, [1, 2, 3], accepted=2, replaced=7, logprobs=[-1.0, -1.0, -1.0])])
    round 1, 2 accepted: 'a' 'b' [-'g'-] {+'c'+}
    >>> trace([Burst(0, [4, 5], accepted=1, replaced=None, logprobs=[-1.0, -1.0])])
    round 2, 1 accepted: 'd' {+'e'+}
    """

    def __init__(
        self, tokenizer: Any, *, file: TextIO | None = None, color: bool | None = None
    ) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"RoundTrace: tokenizer must have decode(ids), got {shown(tokenizer)}")
        self.tokenizer, self.file, self.color = tokenizer, file, color
        self.rounds = 0

    def __call__(self, bursts: Sequence[Burst]) -> None:
        """Print what a round added."""
        self.rounds += 1
        file = sys.stdout if self.file is None else self.file
        color = file.isatty() if self.color is None else self.color
        for burst in bursts:
            request = f", request {burst.request}" if burst.request or len(bursts) > 1 else ""
            head = f"round {self.rounds}{request}, {burst.accepted} accepted:"
            print(head, *self._marked(burst, color), file=file, flush=True)

    def _marked(self, burst: Burst, color: bool) -> list[str]:
        kept = [self._text(token) for token in burst.tokens[: burst.accepted]]
        own = [self._text(token) for token in burst.tokens[burst.accepted :]]
        gone = [] if burst.replaced is None else [self._text(burst.replaced)]
        if not color:
            return kept + [f"[-{text}-]" for text in gone] + [f"{{+{text}+}}" for text in own]
        marks = ((GREEN, kept), (RED_STRUCK, gone), (BOLD, own))
        return [f"{mark}{text}{PLAIN}" for mark, texts in marks for text in texts]

    def _text(self, token: int) -> str:
        """Return a token as text in quotes, so that spaces and line ends show."""
        return repr(self.tokenizer.decode([token]))
