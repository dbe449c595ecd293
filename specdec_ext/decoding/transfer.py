"""What a round tells the host: several outputs in one copy, for which the host waits once."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ChainOutcome", "Transfer", "TreeOutcome"]


class Transfer(NamedTuple):
    """Columns of several tensors as one integer tensor, to go to the host in one copy.

    Attributes
    ----------
    packed : Tensor
        ``[B, n]`` int64, the columns beside one another; float32 as integers of the same bits.
    widths : list of int or None
        How many columns each tensor has; None: it had one number a row, ``[B]``.
    floats : list of bool
        Whether a tensor was float32.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.decoding.transfer import Transfer
    >>> packed = Transfer.pack(torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.5, float("nan")]))
    >>> packed.unpack()
    [([1, 2], 0.5), ([3, 4], nan)]
    """

    packed: Tensor
    widths: list[int | None]
    floats: list[bool]

    @classmethod
    def pack(cls, *parts: Tensor) -> Transfer:
        """Pack tensors ``[B]`` or ``[B, n]`` of an integer dtype or float32."""
        columns = [_as_integers(part).reshape(len(part), -1) for part in parts]
        return cls(
            torch.cat(columns, 1),
            [None if part.dim() == 1 else part.shape[1] for part in parts],
            [part.is_floating_point() for part in parts],
        )

    def unpack(self) -> list[tuple[Any, ...]]:
        """Copy to the host; give each row's part of every tensor, a list where there was one."""
        return [self._parts(row) for row in self.packed.tolist()]

    def _parts(self, row: list[int]) -> tuple[Any, ...]:
        parts: list[Any] = []
        start = 0
        for width, is_float in zip(self.widths, self.floats, strict=True):
            stop = start + (1 if width is None else width)
            part: list[Any] = row[start:stop]
            if is_float:
                part = array("f", array("i", part).tobytes()).tolist()
            parts.append(part[0] if width is None else part)
            start = stop
        return tuple(parts)


def _as_integers(values: Tensor) -> Tensor:
    """Give int64, float32 by its bits."""
    return values.contiguous().view(torch.int32).long() if values.is_floating_point() else values


class ChainOutcome(NamedTuple):
    """What the host learns of one request's part in a round with a chain.

    Attributes
    ----------
    tokens : list of int
        The accepted draft tokens, the final token, then -1.
    drafted : list of int
        The draft tokens; -1 ends them.
    logprobs : list of float
        Of ``tokens``, as `specdec_ext.verify` gives them.
    accepted : int
        How many draft tokens were accepted.
    status : int
        Bits as of `specdec_ext.verify`.
    overlaps : list of float or None
        sum_x min(p(x), q(x)) at each draft token, NaN where it is deterministic; None: not
        measured.
    """

    tokens: list[int]
    drafted: list[int]
    logprobs: list[float]
    accepted: int
    status: int
    overlaps: list[float] | None = None


class TreeOutcome(NamedTuple):
    """What the host learns of one request's part in a round with a tree.

    Attributes
    ----------
    tokens : list of int
        The accepted draft tokens, the final token, then -1.
    path : list of int
        The node of each accepted token, then -1.
    parents : list of int
        The parent of each node, -1 of the root and of nodes without a token.
    logprobs, accepted, status
        As in `ChainOutcome`.
    """

    tokens: list[int]
    path: list[int]
    parents: list[int]
    logprobs: list[float]
    accepted: int
    status: int
