"""Matchers: who says which tokens may come next, as grammar engines do it.

`TokenMatcher` is what the loop needs of one. xgrammar's and llguidance's are recognised and made
into it; neither library is imported before it was used by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from .checks import items, shown
from .evidence import copied, name_of

__all__ = ["TokenMatcher", "is_grammar_processor", "matchers_of", "without_grammar"]


class TokenMatcher(Protocol):
    """Follows one request's new tokens, and says which token may come next.

    A matcher may also have ``fork()``, which returns another one in the same state; without it,
    `copy.deepcopy` makes the copies that are needed where one matcher is given for several
    requests. It is used by one thread at a time.

    Examples
    --------
    A matcher that lets tokens come in ascending order, and ends with the largest of them:

    >>> import torch
    >>> class Ascending:
    ...     vocab_size = 8
    ...
    ...     def __init__(self):
    ...         self.tokens = [-1]
    ...
    ...     def fill_next_token_bitmask(self, bitmask, index=0):
    ...         bitmask[index] = 0
    ...         bitmask[index, 0] = 0xFF & ~((2 << self.tokens[-1]) - 1 if self.tokens[1:] else 0)
    ...
    ...     def accept_token(self, token):
    ...         self.tokens.append(token)
    ...         return True
    ...
    ...     def rollback(self, num_tokens):
    ...         del self.tokens[len(self.tokens) - num_tokens :]
    ...
    ...     def is_terminated(self):
    ...         return self.tokens[-1] == 7
    >>> matcher, bitmask = Ascending(), torch.zeros(1, 1, dtype=torch.int32)
    >>> matcher.accept_token(5), matcher.fill_next_token_bitmask(bitmask), f"{bitmask.item():b}"
    (True, None, '11000000')
    >>> matcher.rollback(1), matcher.fill_next_token_bitmask(bitmask), f"{bitmask.item():b}"
    (None, None, '11111111')
    """

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows: ids from here on are not allowed, whatever stands in the mask."""

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> object:
        """Write which tokens may come next; the state stays.

        Parameters
        ----------
        bitmask : Tensor
            ``[n, ceil(vocab_size / 32)]`` int32, on the CPU: token x is allowed where bit x % 32 of
            word x // 32 is 1, the lowest bit being bit 0.
        index : int
            The row to write, all of it.
        """

    def accept_token(self, token: int, /) -> bool:
        """Go on by a token that the mask at this place allows; False: it cannot, after all."""

    def rollback(self, num_tokens: int, /) -> object:
        """Take back the last so many tokens that it accepted, the end token among them."""

    def is_terminated(self) -> bool:
        """Whether nothing but an end token may come: neither of the first two is called then."""


_METHODS = ("fill_next_token_bitmask", "accept_token", "rollback", "is_terminated")


class _XGrammar:
    """xgrammar's ``GrammarMatcher`` as a `TokenMatcher`.

    Parameters
    ----------
    matcher : xgrammar.GrammarMatcher
        In any state.
    vocab_size : int, optional
        Of the grammar's tokenizer. A matcher does not say it: None stands for that of the model.
    """

    def __init__(self, matcher: Any, vocab_size: int | None = None) -> None:
        self.matcher, self.vocab_size = matcher, vocab_size
        self.accept_token = matcher.accept_token
        self.rollback = matcher.rollback
        self.is_terminated = matcher.is_terminated

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> None:
        """Write which tokens may come next."""
        try:
            self.matcher.fill_next_token_bitmask(bitmask, index)
        except RuntimeError as error:
            if self.vocab_size is not None:
                raise
            raise ValueError(
                "generate: grammar must be compiled for the model's vocabulary where an xgrammar "
                f"GrammarMatcher is given, which does not say its own, got one that refuses "
                f"{bitmask.shape[1]} words of 32 tokens ({error}); give the CompiledGrammar"
            ) from error

    def fork(self) -> _XGrammar:
        """Return another in the same state."""
        return _XGrammar(self.matcher.fork(), self.vocab_size)


class _LLGuidance:
    """llguidance's ``LLMatcher`` as a `TokenMatcher`."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._raise_if_failed()
        self.vocab_size = len(matcher.compute_logit_bias())  # a byte a token

    def _raise_if_failed(self) -> None:
        """Say what its methods keep to themselves, after which all of them answer anything."""
        if self.matcher.is_error():
            raise ValueError(f"generate: grammar: llguidance says: {self.matcher.get_error()}")

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> None:
        """Write which tokens may come next."""
        row = bitmask[index]
        self.matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        self._raise_if_failed()

    def accept_token(self, token: int) -> bool:
        """Go on by a token."""
        accepted: bool = self.matcher.consume_token(token)
        return accepted

    def rollback(self, num_tokens: int) -> None:
        """Take tokens back."""
        self.matcher.rollback(num_tokens)
        self._raise_if_failed()

    def is_terminated(self) -> bool:
        """Whether nothing but an end token may come."""
        self._raise_if_failed()
        stopped: bool = self.matcher.is_stopped()
        return stopped

    def fork(self) -> _LLGuidance:
        """Return another in the same state."""
        return _LLGuidance(self.matcher.deep_copy())


def _is_of_xgrammar(value: Any, name: str) -> bool:
    """Whether something is an instance of a class of xgrammar, which is not imported for it."""
    kinds = type(value).__mro__
    return any(k.__module__.partition(".")[0] == "xgrammar" and k.__name__ == name for k in kinds)


def _is_of_llguidance(value: Any) -> bool:
    """Whether something is an ``LLMatcher``: its class does not say where it comes from."""
    methods = ("consume_token", "unsafe_compute_mask_ptr", "compute_logit_bias", "is_stopped")
    return not isinstance(value, type) and all(hasattr(value, method) for method in methods)


def _matcher(given: Any, name: str) -> Any:
    """Return the matcher that something is, or that it makes."""
    if _is_of_xgrammar(given, "CompiledGrammar"):
        from xgrammar import GrammarMatcher

        return _XGrammar(GrammarMatcher(given), given.tokenizer_info.vocab_size)
    if _is_of_xgrammar(given, "GrammarMatcher"):
        return _XGrammar(given)
    if _is_of_llguidance(given):
        return _LLGuidance(given)
    if not isinstance(given, type) and all(hasattr(given, method) for method in _METHODS):
        if not hasattr(given, "vocab_size"):
            raise TypeError(f"{name} must have vocab_size, as matchers do, got {shown(given)}")
        return given
    if callable(given):
        made = given()
        if not callable(made):
            return _matcher(made, f"{name}, as it was made,")
    raise TypeError(
        f"{name} must be a TokenMatcher, xgrammar's CompiledGrammar or GrammarMatcher, "
        f"llguidance's LLMatcher, or a callable that makes one of these, got {shown(given)}"
    )


def matchers_of(given: Any, batch: int, *, ends: bool) -> list[TokenMatcher | None] | None:
    """Return a matcher for each request, None where anything may come.

    Parameters
    ----------
    given : optional
        ``grammar`` of `generate`. What makes matchers is asked for one for each request. Of a
        matcher that is given for several requests, the first has it, and the others have copies.
    batch : int
        Requests.
    ends : bool
        Whether there is a token that ends a request.

    Returns
    -------
    list or None
        None: there is no grammar at all.

    Raises
    ------
    TypeError
        It is something else.
    ValueError
        Not one for each request, a matcher that cannot be copied, or that has failed or terminated
        already, or no end token, which must come where a matcher has terminated.
    """
    several = items(given)
    if several is not None and len(several) != batch:
        raise ValueError(
            f"generate: grammar must be one, or one for each request, [B] = [{batch}], got "
            f"[{len(several)}]"
        )
    matchers: list[TokenMatcher | None] = []
    first: dict[int, Any] = {}  # matchers that were given themselves: others get copies
    for b, one in enumerate([given] * batch if several is None else several):
        name = "generate: grammar" if several is None else f"generate: grammar of request {b}"
        if one is None:
            matchers.append(None)
        elif id(one) in first:
            matchers.append(_forked(first[id(one)], name))
        else:
            made = _matcher(one, name)
            matchers.append(made)
            if made is one or getattr(made, "matcher", None) is one:  # else it makes matchers
                first[id(one)] = made
    if all(matcher is None for matcher in matchers):
        return None
    for b, matcher in enumerate(matchers):
        if matcher is not None and matcher.is_terminated():
            raise ValueError(
                f"generate: grammar of request {b} has terminated before the first token: a "
                "matcher follows one text to its end, and the next one needs another"
            )
    if not ends:
        raise ValueError(
            "generate: eos_token_id must be given with a grammar, since nothing else may come "
            "where it is at its end; the target's configuration has none"
        )
    return matchers


def _forked(matcher: Any, name: str) -> Any:
    """Return a copy of a matcher in its state."""
    try:
        return matcher.fork() if hasattr(matcher, "fork") else copied(matcher)
    except Exception as error:
        raise ValueError(
            f"{name} is one matcher for several requests, and cannot be copied ({error}); give "
            "what makes one, or a sequence"
        ) from error


def is_grammar_processor(processor: Any) -> bool:
    """Whether a logits processor is xgrammar's own, ``xgrammar.contrib.hf.LogitsProcessor``."""
    return _is_of_xgrammar(processor, "LogitsProcessor") and hasattr(processor, "compiled_grammars")


def without_grammar(processors: Sequence[Any], grammar: Any) -> tuple[list[Any], Any]:
    """Take xgrammar's logits processor out of others, and return its grammars in its place.

    It accepts tokens as they come and cannot go back, nor be copied; matchers can.

    Parameters
    ----------
    processors : sequence of callable
        The logits processors.
    grammar : optional
        ``grammar`` of `generate`.

    Returns
    -------
    processors : list of callable
        The others.
    grammar : optional
        The one grammar that there is.

    Raises
    ------
    ValueError
        It was used before, there is another grammar, or it stands before other processors, which
        would be called on what it has masked.
    """
    at = [i for i, processor in enumerate(processors) if is_grammar_processor(processor)]
    if not at:
        return list(processors), grammar
    found = processors[at[0]]
    what = "generate: logits_processor: xgrammar's LogitsProcessor"
    if grammar is not None or len(at) > 1:
        raise ValueError(f"{what} is a grammar, and there is another: give one, as grammar=")
    if at[0] != len(processors) - 1:
        others = ", ".join(name_of(processor) for processor in processors[at[0] + 1 :])
        raise ValueError(
            f"{what} must be the last processor, since masks are applied behind all others, got "
            f"{others} behind it: give its CompiledGrammar as grammar="
        )
    if found.prefilled:
        raise ValueError(
            f"{what} was used before, and can be used once: give its CompiledGrammar as grammar="
        )
    compiled = list(found.compiled_grammars)
    return list(processors[:-1]), compiled[0] if len(compiled) == 1 else compiled
