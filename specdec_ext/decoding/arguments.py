"""The arguments of `generate`: checked, and brought to one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from specdec_ext.contract import GREEDY_BELOW


def trimmed(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cut the padding that all prompts share; return no mask where nothing is padded."""
    if mask is None or bool(mask.all()):
        return ids, None
    mask = mask.long()
    shared = int(mask.any(0).long().argmax())
    ids, mask = ids[:, shared:], mask[:, shared:]
    return ids, None if bool(mask.all()) else mask


def check_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Check that the prompts are a left-padded batch of token ids."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"generate: input_ids must be a Tensor, got {type(input_ids).__name__}")
    shape = tuple(input_ids.shape)
    if input_ids.dtype not in (torch.int32, torch.int64) or len(shape) != 2 or shape[1] == 0:
        raise ValueError(
            f"generate: input_ids must be [B, P] int32 or int64 with P >= 1, got "
            f"{list(shape)} {_dtype(input_ids)}"
        )
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"generate: attention_mask must be a Tensor, got {type(attention_mask).__name__}"
        )
    if tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"generate: attention_mask must be [B, P] = {list(shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    padded = (attention_mask[:, -1] == 0).nonzero()
    if padded.numel():
        raise ValueError(
            f"generate: attention_mask must end in a 1 for every prompt (pad on the left), got a 0 "
            f"for request {int(padded[0])}"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_count(name: str, value: Any) -> None:
    """Check that a number is an int and not negative."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"generate: {name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"generate: {name} must be at least 0, got {value}")


def per_request(name: str, value: Any, batch: int) -> list[Any]:
    """Return one Python number a request."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Real):
        return [value] * batch
    values = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(number, Real) for number in values):
        raise TypeError(
            f"generate: {name} must be a number, or a Tensor or sequence of them, got "
            f"{type(value).__name__}"
        )
    if len(values) != batch:
        raise ValueError(
            f"generate: {name} must be one number or [B] = [{batch}], got [{len(values)}]"
        )
    return values


def callables(name: str, given: Any) -> list[Any]:
    """Return the callables of (ids, scores) that were given: none, one or several."""
    if given is None:
        return []
    # transformers' lists of processors and of criteria are both iterable and callable.
    listed = list(given) if isinstance(given, Iterable) else [given]
    for item in listed:
        if not callable(item):
            raise TypeError(
                f"generate: {name} must be callables of (ids, scores), got {type(item).__name__}"
            )
    return listed


def filters(
    batch: int, device: torch.device, **given: float | Sequence[float] | Tensor | None
) -> tuple[dict[str, Any], bool]:
    """Return the sampling parameters as ``[B]`` tensors, and whether every temperature is 0.

    A parameter that is off for all requests is left out.
    """
    legal: dict[str, Callable[[float], bool]] = {
        "temperature": lambda t: 0 <= t < math.inf,
        "top_k": lambda k: True,
        "top_p": lambda p: p >= 0,
        "min_p": lambda p: p <= 1,
    }
    off: dict[str, Callable[[float], bool]] = {
        "temperature": lambda t: t == 1,
        "top_k": lambda k: k <= 0,
        "top_p": lambda p: p >= 1,
        "min_p": lambda p: p <= 0,
    }
    filters: dict[str, Tensor] = {}
    greedy = False
    for name, value in given.items():
        if value is None:
            continue
        values = per_request(name, value, batch)
        for b, number in enumerate(values):
            if not legal[name](number):
                raise ValueError(f"generate: {name} is out of range for request {b}: {number}")
        if name == "temperature":
            greedy = all(number < GREEDY_BELOW for number in values)
        if not all(off[name](number) for number in values):
            dtype = torch.int64 if name == "top_k" else torch.float32
            filters[name] = torch.tensor(values, dtype=dtype, device=device)
    return filters, greedy


def seeds(
    seeds: int | Sequence[int] | Tensor | None,
    generator: torch.Generator | None,
    batch: int,
    device: torch.device,
    *,
    unused: bool,
) -> Tensor:
    """Return the seed of each request, ``[B]`` int64."""
    if seeds is not None and generator is not None:
        raise ValueError("generate: give seeds or generator, not both")
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        return seeds + torch.arange(batch, device=device)
    if isinstance(seeds, Tensor):
        if seeds.dtype != torch.int64 or tuple(seeds.shape) != (batch,):
            raise ValueError(
                f"generate: seeds must be [B] = [{batch}] int64, got {list(seeds.shape)} "
                f"{_dtype(seeds)}"
            )
        return seeds.to(device)
    if seeds is not None:
        return torch.tensor(per_request("seeds", seeds, batch), dtype=torch.int64, device=device)
    if unused:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    where = generator.device if generator is not None else "cpu"
    return torch.randint(2**63 - 1, (batch,), generator=generator, device=where).to(device)


def _configured(target: Any, name: str) -> Any:
    """Return a token id from the model's generation configuration, or from its configuration."""
    for holder in ("generation_config", "config"):
        value = getattr(getattr(target, holder, None), name, None)
        if value is not None:
            return value
    return None


def stop_tokens(target: Any, given: int | Iterable[int] | None) -> list[int]:
    """Return the tokens that end a request."""
    if given is None:
        given = _configured(target, "eos_token_id")
    if given is None:
        return []
    return [given] if isinstance(given, int) else [int(token) for token in given]


def pad_token(target: Any, given: int | None, stop: list[int]) -> int:
    """Return the token behind a request's end."""
    if given is None:
        given = _configured(target, "pad_token_id")
    if given is None:
        given = stop[0] if stop else 0
    return given
