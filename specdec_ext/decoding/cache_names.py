"""What models call their key-value cache: ``past_key_values``, or ``cache``.

transformers 5.24 renamed the argument of its models and the field of their outputs. Models of
others, and remote code, may have either name under any version. So a model is asked by its own
signature, and only what transformers itself defines goes by `own_cache_name`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import fields
from typing import Any

__all__ = ["CACHE_NAMES", "STATE_NAMES", "cache_name", "cache_of", "own_cache_name"]

#: Names of a key-value cache, among arguments and in outputs.
CACHE_NAMES = ("cache", "past_key_values")

#: All names under which models take what they remember.
STATE_NAMES = (*CACHE_NAMES, "cache_params", "state")


@functools.cache
def own_cache_name() -> str:
    """Return the name that the models and outputs of the installed transformers have for it."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    name = cache_name({field.name for field in fields(CausalLMOutputWithPast)})
    assert name is not None
    return name


def cache_name(model_takes: Collection[str]) -> str | None:
    """Return the name of the cache among the arguments that a model takes; None: it takes none."""
    return next((name for name in CACHE_NAMES if name in model_takes), None)


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output; None where there is none."""
    # The old name, asked of a new output, warns.
    found = (getattr(output, name, None) for name in CACHE_NAMES)
    return next((cache for cache in found if cache is not None), None)
