"""The arguments of `generate`: checked, and brought to one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from .checks import (
    integer,
    is_model,
    items,
    number,
    shown,
    token_ids,
)

MOST_NEW_TOKENS = 2**62  # positions, which are int64, have room for as many behind any prompt


def trimmed(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cut the padding that all prompts share; return no mask where nothing is padded."""
    if mask is None or bool(mask.all()):
        return ids, None
    mask = mask.long()
    shared = int(mask.any(0).long().argmax())
    ids, mask = ids[:, shared:], mask[:, shared:]
    return ids, None if bool(mask.all()) else mask


def check_target(target: Any) -> None:
    """Check that the target is a model, as far as can be told before it is called."""
    if not is_model(target):
        raise TypeError(
            "generate: target must be a causal language model, called as Hugging Face models are, "
            f"got {shown(target)}"
        )


def check_prompts(input_ids: Tensor, attention_mask: Tensor | None, target: Any) -> None:
    """Check that the prompts are a left-padded batch of ids that the target can embed."""
    from .cache import vocabulary_size

    if not isinstance(input_ids, Tensor):
        raise TypeError(f"generate: input_ids must be a Tensor, got {type(input_ids).__name__}")
    shape = tuple(input_ids.shape)
    if input_ids.dtype not in (torch.int32, torch.int64) or len(shape) != 2 or shape[1] == 0:
        raise ValueError(
            f"generate: input_ids must be [B, P] int32 or int64 with P >= 1, got "
            f"{list(shape)} {_dtype(input_ids)}"
        )
    if input_ids.is_meta:
        raise ValueError("generate: input_ids must hold ids, got a tensor on the meta device")
    if attention_mask is not None:
        _check_mask(input_ids, attention_mask)
    _check_ids(input_ids, attention_mask, vocabulary_size(target))


def _check_mask(input_ids: Tensor, attention_mask: Tensor) -> None:
    """Check that the mask is one of the prompts' tokens, padded on the left."""
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"generate: attention_mask must be a Tensor, got {type(attention_mask).__name__}"
        )
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: attention_mask must be [B, P] = {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}"
        )
    if attention_mask.device != input_ids.device:
        raise ValueError(
            f"generate: attention_mask must be on the device of input_ids, {input_ids.device}, got "
            f"{attention_mask.device}"
        )
    others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if others.numel():
        raise ValueError(
            f"generate: attention_mask must hold zeros and ones, got {others[0].item()}"
        )
    padded = (attention_mask[:, -1] == 0).nonzero()
    if padded.numel():
        raise ValueError(
            f"generate: attention_mask must end in a 1 for every prompt (pad on the left), got a 0 "
            f"for request {int(padded[0])}"
        )


def _check_ids(input_ids: Tensor, attention_mask: Tensor | None, vocabulary: int | None) -> None:
    """Check that the prompts' tokens are ids of the target; padding may hold anything."""
    if vocabulary is None:
        return
    outside = (input_ids < 0) | (input_ids >= vocabulary)
    if attention_mask is not None:
        outside &= attention_mask.bool()
    places = outside.nonzero()
    if places.numel():
        request, place = places[0].tolist()
        raise ValueError(
            f"generate: input_ids must be ids of the target's {vocabulary} tokens, got "
            f"{int(input_ids[request, place])} at place {place} of request {request}"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def per_request(name: str, value: Any, batch: int, one: Callable[..., Any], kind: str) -> list[Any]:
    """Return one Python number a request, each checked by ``one``, of :mod:`checks`."""
    values = items(value)
    if values is None:
        wanted = f"{kind}, or a Tensor or sequence of them"
        return [one(f"generate: {name}", value, wanted=wanted)] * batch
    if isinstance(value, Tensor) and value.dim() != 1:
        raise ValueError(
            f"generate: {name} must be one number or [B] = [{batch}], got {list(value.shape)}"
        )
    if len(values) != batch:
        raise ValueError(
            f"generate: {name} must be one number or [B] = [{batch}], got [{len(values)}]"
        )
    return [one(f"generate: {name} of request {b}", item) for b, item in enumerate(values)]


def new_token_limits(value: Any, batch: int) -> list[int]:
    """Return how many new tokens each request may have."""

    def limit(name: str, given: Any, wanted: str = "an int") -> int:
        found = integer(name, given, low=0, wanted=wanted)
        if found > MOST_NEW_TOKENS:
            raise ValueError(f"{name} must be at most 2**62, got {found}")
        return found

    return per_request("max_new_tokens", value, batch, limit, "an int")


def callables(name: str, given: Any) -> list[Any]:
    """Return the callables of (ids, scores) that were given: none, one or several."""
    if given is None:
        return []
    # transformers' lists of processors and of criteria are both iterable and callable.
    listed = items(given)
    for item in [given] if listed is None else listed:
        if isinstance(item, type) or not callable(item):
            raise TypeError(
                f"generate: {name} must be callables of (ids, scores), got {shown(item)}"
            )
    return [given] if listed is None else listed


def rule_options(
    rule: Any, *, tree: bool, lenience: Any, beta: Any, tau: Any, epsilon: Any, delta: Any
) -> dict[str, Any]:
    """Return the numbers of the rules that are not lossless; refuse an unknown rule."""
    if not isinstance(rule, str):
        raise TypeError(f"generate: rule must be a str or None, got {shown(rule)}")
    given = {"lenience": lenience, "tau": tau, "epsilon": epsilon, "delta": delta}
    options: dict[str, Any] = {
        name: number(f"generate: {name}", value) for name, value in given.items()
    }
    options["beta"] = integer("generate: beta", beta)
    # What a rule is called and what its numbers may be is the operators' to say, before models run.
    logits, ids = torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64)
    coins = {"seeds": ids[0], "positions": ids[0]}
    try:
        if tree:
            ops.verify_tree(logits, ids, ids - 1, rule=rule, **coins)
        else:
            ops.verify(logits, ids[:, :0], rule=rule, **coins, **options)
    except ValueError as error:
        operator = "verify_tree" if tree else "verify"
        raise ValueError(f"generate{str(error).removeprefix(operator)}") from None
    return options


def seeds(
    seeds: int | Sequence[int] | Tensor | None,
    generator: torch.Generator | None,
    batch: int,
    device: torch.device,
    *,
    unused: bool,
) -> Tensor:
    """Return the seed of each request, ``[B]`` int64."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generate: generator must be a torch.Generator or None, got {shown(generator)}"
        )
    if seeds is not None and generator is not None:
        raise ValueError("generate: give seeds or generator, not both")
    if isinstance(seeds, Tensor) and seeds.dim() > 0:
        if seeds.dtype != torch.int64 or tuple(seeds.shape) != (batch,):
            raise ValueError(
                f"generate: seeds must be [B] = [{batch}] int64, got {list(seeds.shape)} "
                f"{_dtype(seeds)}"
            )
        return seeds.to(device)
    if seeds is not None:
        numbers = per_request("seeds", seeds, batch, integer, "an int")
        if items(seeds) is None:  # s stands for s, s + 1, ...
            numbers = [integer("generate: seeds", s + b) for b, s in enumerate(numbers)]
        return torch.tensor(numbers, dtype=torch.int64, device=device)
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


def stop_tokens(target: Any, given: int | Iterable[int] | Tensor | None) -> list[int]:
    """Return the tokens that end a request; an id that the target has not (-1, say) ends none."""
    if given is None:
        given = _configured(target, "eos_token_id")
    if given is None:
        return []
    several = sorted(given) if isinstance(given, (set, frozenset)) else items(given)
    if several is None:
        wanted = "an int or an iterable of int"
        return [integer("generate: eos_token_id", given, wanted=wanted)]
    return token_ids("generate: eos_token_id", several, low=None)


def pad_token(target: Any, given: int | None, stop: list[int], dtype: torch.dtype) -> int:
    """Return the token behind a request's end, of the prompts' type."""
    if given is None:
        given = _configured(target, "pad_token_id")
    if given is None:
        given = stop[0] if stop else 0
    limits = torch.iinfo(dtype)
    return integer("generate: pad_token_id", given, limits.min, limits.max)


def stop_sequences(given: Iterable[Sequence[int]] | None) -> list[list[int]]:
    """Return the sequences of tokens that end a request."""
    if given is None:
        return []
    several = items(given)
    if several is None:
        raise TypeError(
            f"generate: stop_sequences must be sequences of token ids, got {shown(given)}"
        )
    return [token_ids("generate: ids of each of stop_sequences", ids, low=None) for ids in several]


def stop_strings(given: str | Sequence[str] | None, tokenizer: Any) -> list[str]:
    """Return the strings that end a request; they need the tokenizer."""
    if given is None:
        return []
    strings = [given] if isinstance(given, str) else items(given)
    wrong = next((text for text in strings or () if not isinstance(text, str)), None)
    if strings is None or wrong is not None:
        what = shown(given if strings is None else wrong)
        raise TypeError(f"generate: stop_strings must be a str or a sequence of str, got {what}")
    if not all(strings):
        raise ValueError("generate: stop_strings must hold a character each, got ''")
    if not strings:
        return []
    if tokenizer is None:
        raise ValueError("generate: stop_strings need a tokenizer; tokenizer must be one, got None")
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(
            f"generate: tokenizer must be a Hugging Face tokenizer, got {shown(tokenizer)}"
        )
    return strings
