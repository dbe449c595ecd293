"""What requests ask for that vLLM's sampling metadata do not hold: seeds, min-p, grammars."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Facts", "Requests", "seed_of"]


class Facts(NamedTuple):
    """What a batch of B requests asks for.

    Attributes
    ----------
    seeds : Tensor
        ``[B]`` int64.
    min_p : Tensor or None
        ``[B]`` float32; None where no request has it.
    bound : Tensor or None
        ``[B]`` bool: a grammar binds the request's text; None where no request's.
    """

    seeds: Tensor
    min_p: Tensor | None = None
    bound: Tensor | None = None


def seed_of(request_id: str, seed: int | None, engine_seed: int) -> int:
    """Give a request's seed: its own, or one that every rank of a group of processes agrees on."""
    if seed is not None:
        return (seed + 2**63) % 2**64 - 2**63  # in the range of int64
    digest = hashlib.blake2b(f"{engine_seed} {request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class Requests:
    """Facts of the running requests; those of a batch are kept until another batch comes."""

    def __init__(self, engine_seed: int, device: torch.device) -> None:
        self._engine_seed = engine_seed
        self._device = device
        self._states: list[Any] = []  # kept alive, so that identity tells requests apart
        self._facts = Facts(torch.empty(0, dtype=torch.int64, device=device))

    def facts(self, states: Sequence[Any]) -> Facts:
        """Give the facts of a batch, in its order.

        Parameters
        ----------
        states : sequence
            vLLM's states of the requests, with ``req_id`` and ``sampling_params``.
        """
        same = len(states) == len(self._states) and all(map(operator.is_, states, self._states))
        if not same:
            self._states, self._facts = list(states), self._read(states)
        return self._facts

    def _read(self, states: Sequence[Any]) -> Facts:
        params = [state.sampling_params for state in states]
        seeds = [
            seed_of(state.req_id, getattr(p, "seed", None), self._engine_seed)
            for state, p in zip(states, params, strict=True)
        ]
        min_p = [float(getattr(p, "min_p", 0.0)) for p in params]
        bound = [getattr(p, "structured_outputs", None) is not None for p in params]

        def on_device(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        return Facts(
            on_device(seeds, torch.int64),
            on_device(min_p, torch.float32) if any(min_p) else None,
            on_device(bound, torch.bool) if any(bound) else None,
        )
