"""A trace of `generate`: what each round kept and what the target put instead, printed or kept.

`RoundTrace` prints rounds as they come, `RoundRecord` keeps them with their times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

import torch

from .chain_generation import Burst
from .checks import shown

__all__ = ["ModelCall", "RecordedRound", "RoundRecord", "RoundTrace"]

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


class ModelCall(NamedTuple):
    """One call of a model, in seconds since the record began.

    Attributes
    ----------
    model : str
        ``"target"`` or ``"draft"``.
    begin, end : float
        When.
    """

    model: str
    begin: float
    end: float


class RecordedRound(NamedTuple):
    """One round, in seconds since the record began.

    Attributes
    ----------
    begin, end : float
        When: a round begins where the one before it ends, the first with the record.
    bursts : list of Burst
        What it added.
    calls : list of ModelCall
        The calls of the models in it, in order.
    """

    begin: float
    end: float
    bursts: list[Burst]
    calls: list[ModelCall]


class RoundRecord:
    """Keeps every round of `specdec_ext.generate` with its time, and the models' calls in it.

    Give it to ``on_round`` within its own context, which begins the clock. Calls of the models that
    it is given are timed by hooks; on a CUDA device each of them is waited for, which keeps host
    and device from overlapping.

    Parameters
    ----------
    target, draft : torch.nn.Module, optional
        Models whose calls are timed. What is no module (None, a drafter without a model) has none.

    Raises
    ------
    ValueError
        The target and the draft are one object, whose calls could not be told apart.

    Examples
    --------
    >>> from specdec_ext.decoding import Burst, RoundRecord
    >>> with RoundRecord() as record:
    ...     record([Burst(0, [1, 2], accepted=1, replaced=7, logprobs=[-1.0, -1.0])])
    >>> len(record.rounds), record.rounds[0].bursts[0].tokens, record.rounds[0].calls
    (1, [1, 2], [])
    """

    def __init__(self, target: Any = None, draft: Any = None) -> None:
        if target is draft and target is not None:
            raise ValueError("RoundRecord: target and draft must be two objects, got one")
        models = {"target": target, "draft": draft}
        self.rounds: list[RecordedRound] = []
        self._models = {n: m for n, m in models.items() if isinstance(m, torch.nn.Module)}
        self._calls: list[ModelCall] = []
        self._hooks: list[Any] = []
        self._origin = time.perf_counter()

    def __enter__(self) -> RoundRecord:
        """Begin the clock."""
        self.rounds.clear()
        self._calls.clear()
        for name, model in self._models.items():
            begun, ended = self._around(name)
            self._hooks += [
                model.register_forward_pre_hook(begun),
                model.register_forward_hook(ended),
            ]
        self._origin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """Time no further calls."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __call__(self, bursts: Sequence[Burst]) -> None:
        """Keep what a round added."""
        begin = self.rounds[-1].end if self.rounds else 0.0
        calls, self._calls = self._calls, []
        self.rounds.append(RecordedRound(begin, self._now(), list(bursts), calls))

    def _now(self) -> float:
        return time.perf_counter() - self._origin

    def _around(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what is called before and after a model's call."""
        begins: list[float] = []

        def begun(model: Any, given: Any) -> None:
            _wait_for(model)
            begins.append(self._now())

        def ended(model: Any, given: Any, output: Any) -> None:
            _wait_for(model)
            self._calls.append(ModelCall(name, begins.pop(), self._now()))

        return begun, ended


def _wait_for(model: torch.nn.Module) -> None:
    """Wait for a model's CUDA device, if it is on one."""
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)
