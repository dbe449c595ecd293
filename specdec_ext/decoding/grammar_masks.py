"""The masks of a round: which tokens a grammar allows at each slot of a draft.

A matcher stands at one place of one text. It is led along a draft, or over a tree, token by token,
is rolled back where ways part, and in the end to what was accepted. Masks are kept for the round,
so that those which a drafter drew under are not computed again for verification.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .matchers import TokenMatcher

__all__ = ["GrammarMasks", "hidden"]

_EVERYTHING = -1  # a word that allows all of its 32 tokens


class _Walk:
    """One request's matcher, and the masks at the places around it.

    Parameters
    ----------
    matcher : TokenMatcher
        It stands behind the text.
    text : list of int
        The request's new tokens; they come from outside.
    end : Tensor
        ``[n]`` int32, the mask that allows the end tokens.
    size : int or None
        Tokens of the target's, for a matcher that does not say how many it knows.
    name : str
        The request, for errors.
    """

    def __init__(
        self, matcher: TokenMatcher, text: list[int], end: Tensor, size: int | None, name: str
    ) -> None:
        self._matcher, self._text, self._end, self._name = matcher, text, end, name
        known: int | None = matcher.vocab_size
        if known is None and size is None:
            raise ValueError(
                f"generate: grammar of {name} does not say its vocabulary, and neither does the "
                "target's config.vocab_size: give xgrammar's CompiledGrammar"
            )
        self._size = size if known is None else known
        self._known = len(text)  # tokens of the text that paths begin behind
        self._shown: list[int] = []  # what the matcher accepted behind them
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def mask(self, path: tuple[int, ...]) -> Tensor | None:
        """Return the mask behind a path ``[n]`` int32; None: the path is not allowed."""
        if path not in self._masks:
            allowed = not path or self.allows(path[:-1], path[-1])
            self._masks[path] = self._filled(path) if allowed else None
        return self._masks[path]

    def allows(self, path: tuple[int, ...], token: int) -> bool:
        """Whether a token may come behind a path, which is allowed itself."""
        mask = self.mask(path)
        if mask is None or not 0 <= token < 32 * len(mask):
            return False
        return bool(int(mask[token >> 5]) >> (token & 31) & 1)

    def _filled(self, path: tuple[int, ...]) -> Tensor:
        self._go_to(path)
        if self._matcher.is_terminated():
            return self._end
        assert self._size is not None
        filled = torch.zeros(1, (self._size + 31) // 32, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(filled, 0)
        mask = filled[0]
        if self._size % 32:  # engines leave anything behind the last token
            mask[-1] &= (1 << self._size % 32) - 1
        return mask

    def _go_to(self, path: tuple[int, ...]) -> None:
        """Lead the matcher to the end of a path, or to where it terminates on the way."""
        pairs = zip(self._shown, path, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        shared = min(len(self._shown), len(path)) if shared is None else shared
        if shared < len(self._shown):
            self._matcher.rollback(len(self._shown) - shared)
            del self._shown[shared:]
        for token in path[shared:]:
            if self._matcher.is_terminated():
                return
            if not self._matcher.accept_token(token):
                raise ValueError(
                    f"generate: grammar of {self._name}: the matcher's mask allows token {token} "
                    f"after {self._known + len(self._shown)} new tokens, and its accept_token "
                    "refuses it (was it made for another vocabulary?)"
                )
            self._shown.append(token)

    def advance(self) -> int | None:
        """Take what the text has gained; return the first token that was not allowed, if any."""
        gained = tuple(self._text[self._known :])
        for i, token in enumerate(gained):
            if not self.allows(gained[:i], token):
                return token
        self._go_to(gained)
        self._known = len(self._text)
        self._shown, self._masks = [], {}
        return None


class GrammarMasks:
    """The matchers of all requests, led along drafts.

    Parameters
    ----------
    matchers : sequence of TokenMatcher or None
        One for each request, running or not; None: anything may come.
    new : sequence of list of int
        The new tokens of each, which grow from outside.
    end_tokens : iterable of int
        What may come behind a matcher that has terminated.
    size : int or None
        Tokens of the target's, if it says how many.
    device : torch.device
        Where masks are wanted.
    """

    def __init__(
        self,
        matchers: Sequence[TokenMatcher | None],
        new: Sequence[list[int]],
        end_tokens: Iterable[int],
        size: int | None,
        device: torch.device,
    ) -> None:
        self._size, self._device = size, device
        end = _mask_of([token for token in end_tokens if token >= 0])
        self._walks = [
            None if matcher is None else _Walk(matcher, text, end, size, f"request {b}")
            for b, (matcher, text) in enumerate(zip(matchers, new, strict=True))
        ]

    def chain(
        self, running: Sequence[int], drafted: Sequence[Sequence[int]], columns: int, size: int
    ) -> Tensor:
        """Return the masks of the last ``columns`` slots: slot i follows i draft tokens.

        Parameters
        ----------
        running : sequence of int
            The request of each row.
        drafted : sequence of sequence of int
            ``[R][G]``, G of any size for each row.
        columns : int
            How many of the G + 1 slots.
        size : int
            Entries of the rows, V.

        Returns
        -------
        Tensor
            ``[R, columns, ceil(V / 32)]`` int32. Behind a token that is not allowed everything is:
            what verification makes of it does not matter.
        """
        masks = [
            [
                self._mask(b, tuple(tokens[:i]))
                for i in range(len(tokens) + 1 - columns, len(tokens) + 1)
            ]
            for b, tokens in zip(running, drafted, strict=True)
        ]
        return self._packed(masks, columns, size)

    def tree(
        self,
        running: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        size: int,
    ) -> Tensor:
        """Return the masks of a tree's nodes, ``[R, N, ceil(V / 32)]`` int32; the root is node 0.

        The matcher walks the tree depth first, and goes back where branches part.
        """
        masks = []
        for b, row, above in zip(running, tokens, parents, strict=True):
            paths = _paths(row, above)
            found = {
                path: self._mask(b, path)
                for path in sorted({path for path in paths if path is not None})
            }
            masks.append([None if path is None else found[path] for path in paths])
        return self._packed(masks, len(tokens[0]) if tokens else 0, size)

    def legal(self, running: Sequence[int], drafted: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return drafts ``[R][G]`` with -1 from the first token on that is not allowed."""
        found = []
        for b, tokens in zip(running, drafted, strict=True):
            reached = [self._reaches(b, tuple(tokens[: i + 1])) for i in range(len(tokens))]
            found.append(
                [t if is_legal else -1 for t, is_legal in zip(tokens, reached, strict=True)]
            )
        return found

    def legal_nodes(
        self,
        running: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Return the tokens of trees ``[R][N]`` with -1 at nodes whose path is not allowed."""
        return [
            [
                token if v == 0 or (path is not None and self._reaches(b, path)) else -1
                for v, (token, path) in enumerate(zip(row, _paths(row, above), strict=True))
            ]
            for b, row, above in zip(running, tokens, parents, strict=True)
        ]

    def advance(self, request: int) -> int | None:
        """Take what a request's text has gained; return the first token not allowed, if any."""
        walk = self._walks[request]
        return None if walk is None else walk.advance()

    def allows_nothing(self, request: int) -> bool:
        """Whether no token of the target's may come behind a request's text."""
        mask = self._mask(request, ())
        return mask is not None and not bool(_unpacked(mask, self._size).any())

    def _mask(self, request: int, path: tuple[int, ...]) -> Tensor | None:
        walk = self._walks[request]
        return None if walk is None else walk.mask(path)

    def _reaches(self, request: int, path: tuple[int, ...]) -> bool:
        walk = self._walks[request]
        return walk is None or walk.allows(path[:-1], path[-1])

    def _packed(self, masks: list[list[Tensor | None]], columns: int, size: int) -> Tensor:
        """Put masks ``[R][columns]`` of any width together; None allows everything."""
        words = (size + 31) // 32
        packed = torch.full(
            (len(masks), columns, words),
            _EVERYTHING,
            dtype=torch.int32,
            pin_memory=self._device.type == "cuda",
        )
        for row, of_slots in zip(packed, masks, strict=True):
            for into, mask in zip(row, of_slots, strict=True):
                if mask is not None:
                    into[: len(mask)] = mask[:words]
                    into[len(mask) :] = 0
        return packed.to(self._device, non_blocking=True)


def _paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...] | None]:
    """Return the tokens on the way to each node of a tree; None of nodes that hold none."""
    paths: list[tuple[int, ...] | None] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        above = paths[parent] if 0 <= parent < len(paths) and token >= 0 else None
        paths.append(None if above is None else (*above, token))
    return paths


def _mask_of(tokens: Sequence[int]) -> Tensor:
    """Return the mask that allows these tokens, as wide as they need."""
    words = [0] * (max(tokens, default=0) // 32 + 1)
    for token in tokens:
        words[token >> 5] |= 1 << (token & 31)
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32)


def _unpacked(masks: Tensor, size: int | None) -> Tensor:
    """Return ``[..., size]`` bool, which tokens masks ``[..., words]`` allow; None: of all bits."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return (masks[..., None] >> bits & 1).flatten(-2)[..., :size].bool()


def hidden(logits: Tensor, masks: Tensor) -> Tensor:
    """Return rows ``[..., V]`` with -inf where masks ``[..., ceil(V / 32)]`` allow nothing."""
    return logits.masked_fill(~_unpacked(masks, logits.shape[-1]), -torch.inf)
