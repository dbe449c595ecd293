"""Shapes and dtypes of every operator for torch.compile and export, in csrc/library.cpp's order.

Nothing here depends on values, and sizes are only passed on, so that symbolic shapes stay symbolic.
Arguments are checked by the operators themselves.

The operators are not differentiable: outputs never require grad, whatever the inputs do. Without
the fall-through below, torch's own fallback for operators without an autograd formula would mark
float outputs as requiring grad, and raise only in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def _row_law(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        logits.new_empty((rows,), dtype=torch.float32),
        logits.new_empty((rows,), dtype=torch.float64),
        logits.new_empty((rows,), dtype=torch.float32),
        logits.new_empty((rows,), dtype=torch.float64),
        logits.new_empty((rows,), dtype=torch.int64),
    )


def _sample(
    logits: Tensor,
    uniforms: Tensor | None = None,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    draft_index: int = 0,
    domain: int = 2,
    stream: int = 0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch = logits.shape[0]
    return (
        logits.new_empty((batch,), dtype=torch.int64),
        logits.new_empty((batch,), dtype=torch.float32),
    )


def _verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    draft_kinds: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    target_rows: Tensor | None = None,
    draft_rows: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    rule: str = "block",
    lenience: float = 1.0,
    beta: int = 3,
    tau: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    full_accept_probs: bool = False,
    raw_logprobs: bool = False,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, gamma = draft_tokens.shape
    return (
        target_logits.new_empty((batch, gamma + 1), dtype=torch.int64),
        target_logits.new_empty((batch,), dtype=torch.int32),
        target_logits.new_empty((batch, gamma + 1), dtype=torch.float32),
        target_logits.new_empty((batch, gamma), dtype=torch.float32),
        target_logits.new_empty((batch,), dtype=torch.int32),
    )


def _verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    kinds: Tensor | None = None,
    draft_rows: Tensor | None = None,
    target_rows: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    rule: str = "traversal",
    raw_logprobs: bool = False,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, nodes = tokens.shape
    return (
        target_logits.new_empty((batch, nodes), dtype=torch.int64),
        target_logits.new_empty((batch, nodes), dtype=torch.int64),
        target_logits.new_empty((batch,), dtype=torch.int32),
        target_logits.new_empty((batch, nodes), dtype=torch.float32),
        target_logits.new_empty((batch, nodes), dtype=torch.float32),
        target_logits.new_empty((batch,), dtype=torch.int32),
    )


def _acceptance(
    target_logits: Tensor,
    draft_logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
) -> Tensor:
    return target_logits.new_empty((target_logits.shape[0],), dtype=torch.float32)


def _uniforms(seeds: Tensor, positions: Tensor, n: int, *, stream: int = 0) -> Tensor:
    return seeds.new_empty((seeds.shape[0], n), dtype=torch.float64)


def _tree_mask(parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, nodes = parents.shape
    return (
        parents.new_empty((batch, nodes, (nodes + 63) // 64), dtype=torch.int64),
        parents.new_empty((batch, nodes), dtype=torch.int64),
        parents.new_empty((batch,), dtype=torch.int32),
    )


def _compact_kv(
    k_cache: Tensor, v_cache: Tensor, path: Tensor, num_accepted: Tensor, seq_lens: Tensor
) -> Tensor:
    return k_cache.new_empty((k_cache.shape[-4],), dtype=torch.int32)


def _tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    return q.new_empty(q.shape)


FAKES = {
    "row_law": _row_law,
    "sample": _sample,
    "verify": _verify,
    "verify_tree": _verify_tree,
    "acceptance": _acceptance,
    "uniforms": _uniforms,
    "tree_mask": _tree_mask,
    "compact_kv": _compact_kv,
    "tree_attention": _tree_attention,
}

_library: Any = torch.library  # its functions are not annotated
_fragment = _library.Library("specdec", "FRAGMENT")  # kept: registrations go away with the object
for _name, _shapes in FAKES.items():
    _library.register_fake(f"specdec::{_name}", _shapes)
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
count_mutation(_fragment, torch.ops.specdec.compact_kv.default)
