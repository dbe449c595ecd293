"""Shapes and dtypes of every operator for torch.compile and export, in csrc/library.cpp's order.

Nothing here depends on values, and sizes are only passed on, so that symbolic shapes stay symbolic.
Arguments are checked by the operators themselves, and the schemas say which there are: a function
here names those whose shapes come back, and is called by name.

The operators are not differentiable: outputs never require grad, whatever the inputs do. Without
the fall-through below, torch's own fallback for operators without an autograd formula would mark
float outputs as requiring grad, and raise only in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._ops import NAMESPACE, add_op_namespace_prefix, ops

__all__: list[str] = []


def _row_law(logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
    rows = logits.shape[:1]
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64, torch.int64)
    return tuple(logits.new_empty(rows, dtype=dtype) for dtype in dtypes)


def _sample(logits: Tensor, **_: Any) -> tuple[Tensor, ...]:
    batch, new = logits.shape[:1], logits.new_empty
    return new(batch, dtype=torch.int64), new(batch, dtype=torch.float32)


def _verify(target_logits: Tensor, draft_tokens: Tensor, **_: Any) -> tuple[Tensor, ...]:
    batch, gamma = draft_tokens.shape
    return (
        target_logits.new_empty((batch, gamma + 1), dtype=torch.int64),
        target_logits.new_empty((batch,), dtype=torch.int32),
        target_logits.new_empty((batch, gamma + 1), dtype=torch.float32),
        target_logits.new_empty((batch, gamma), dtype=torch.float32),
        target_logits.new_empty((batch,), dtype=torch.int32),
    )


def _verify_tree(target_logits: Tensor, tokens: Tensor, **_: Any) -> tuple[Tensor, ...]:
    batch, nodes = tokens.shape
    return (
        target_logits.new_empty((batch, nodes), dtype=torch.int64),
        target_logits.new_empty((batch, nodes), dtype=torch.int64),
        target_logits.new_empty((batch,), dtype=torch.int32),
        target_logits.new_empty((batch, nodes), dtype=torch.float32),
        target_logits.new_empty((batch, nodes), dtype=torch.float32),
        target_logits.new_empty((batch,), dtype=torch.int32),
    )


def _acceptance(target_logits: Tensor, **_: Any) -> Tensor:
    return target_logits.new_empty(target_logits.shape[:1], dtype=torch.float32)


def _uniforms(seeds: Tensor, n: int, **_: Any) -> Tensor:
    return seeds.new_empty((seeds.shape[0], n), dtype=torch.float64)


def _tree_mask(parents: Tensor) -> tuple[Tensor, ...]:
    batch, nodes = parents.shape
    return (
        parents.new_empty((batch, nodes, (nodes + 63) // 64), dtype=torch.int64),
        parents.new_empty((batch, nodes), dtype=torch.int64),
        parents.new_empty((batch,), dtype=torch.int32),
    )


def _compact_kv(k_cache: Tensor, **_: Any) -> Tensor:
    return k_cache.new_empty((k_cache.shape[-4],), dtype=torch.int32)


def _beam_verify(target_logits: Tensor, scores: Tensor, gamma: int, **_: Any) -> tuple[Tensor, ...]:
    batch, width = scores.shape
    beams, new = (batch, gamma + 1, width), target_logits.new_empty
    ids, floats = torch.int64, torch.float32
    dtypes = (ids, ids, ids, floats, ids, ids, floats)
    levels_and_status = (new((batch,), dtype=torch.int32) for _ in range(2))
    return *(new(beams, dtype=dtype) for dtype in dtypes), *levels_and_status


def _tree_attention(q: Tensor, v_cache: Tensor, **_: Any) -> tuple[Tensor, ...]:
    heads = q.shape[:3]
    return q.new_empty((*heads, v_cache.shape[3])), q.new_empty(heads, dtype=torch.float32)


def _by_name(name: str, shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Make the fake of an operator: positional arguments get the names of its schema."""
    names = [a.name for a in getattr(ops, name).default._schema.arguments]

    def fake(*args: Any, **kwargs: Any) -> Any:
        return shapes(**dict(zip(names, args, strict=False)), **kwargs)

    return fake


_SHAPES: dict[str, Callable[..., Any]] = {
    "row_law": _row_law,
    "sample": _sample,
    "verify": _verify,
    "verify_tree": _verify_tree,
    "acceptance": _acceptance,
    "uniforms": _uniforms,
    "tree_mask": _tree_mask,
    "compact_kv": _compact_kv,
    "beam_verify": _beam_verify,
    "tree_attention": _tree_attention,
}
FAKES = {name: _by_name(name, shapes) for name, shapes in _SHAPES.items()}

_library: Any = torch.library  # its functions are not annotated
_fragment = _library.Library(NAMESPACE, "FRAGMENT")  # kept: registrations go away with the object
for _name, _fake in FAKES.items():
    _library.register_fake(add_op_namespace_prefix(_name), _fake)
    for _operator in (_name, f"_prepare_{_name}"):
        _fragment.impl(_operator, _library.fallthrough_kernel, "Autograd")


def count_mutation(library: Any, operator: Any) -> None:
    """Let autograd see that `compact_kv` writes to its first two arguments.

    Otherwise a backward pass through what had read a cache would go on with other values.
    """

    def count(keyset: Any, *args: Any) -> Any:
        _autograd.increment_version([cache for cache in args[:2] if not cache.is_inference()])
        return operator.redispatch(keyset & _after_counting, *args)

    library.impl("compact_kv", count, "ADInplaceOrView", with_keyset=True)


_autograd: Any = torch.autograd.graph
_after_counting: Any = torch._C._after_ADInplaceOrView_keyset
count_mutation(_fragment, ops.compact_kv.default)
