"""Arguments of one rank: taken out of DTensors, checked, made ready for the operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import triton
from .._calls import EXPANDED, PASSED_ON, check_type, per_request
from .._ops import ops
from .agreement import ROWS, Local, facts_of
from .parts import NAME


def _is_distributed(value: object) -> bool:
    if not isinstance(value, Tensor) or type(value) is Tensor:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _vocabulary_dimension(name: str, rows: Any) -> int:
    """Find the mesh dimension over which the last dimension of a DTensor is sharded."""
    from torch.distributed.tensor import Replicate, Shard

    last = rows.dim() - 1
    sharded = [
        i
        for i, placement in enumerate(rows.placements)
        if type(placement) is Shard and placement.dim % rows.dim() == last
    ]
    others = [p for i, p in enumerate(rows.placements) if i not in sharded]
    if len(sharded) != 1 or not all(type(p) is Replicate for p in others):
        raise ValueError(
            f"{NAME}: {name}, a DTensor, must be Shard({last}) over one dimension of its mesh and "
            f"Replicate() over the others, got {tuple(rows.placements)}"
        )
    return sharded[0]


def group_of(target_logits: object, group: Any) -> Any:
    """Find the ranks that hold the parts."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{NAME}: torch.distributed has no process group: call init_process_group first"
        )
    if not _is_distributed(target_logits):
        return group
    rows: Any = target_logits
    found = rows.device_mesh.get_group(_vocabulary_dimension("target_logits", rows))
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(
        found
    ):
        raise ValueError(f"{NAME}: group must be None or that of target_logits' mesh")
    return found


def _to_local(name: str, value: Any) -> Any:
    """Take this rank's part out of a DTensor; anything else stays."""
    if not _is_distributed(value):
        return value
    if name in ROWS:
        _vocabulary_dimension(name, value)
    elif not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"{NAME}: {name}, a DTensor, must be Replicate(), got {tuple(value.placements)}"
        )
    return value.to_local()


def _with_columns(rows: Tensor | None) -> Tensor | None:
    """Give rows without columns one: operators take no empty rows. None of it is read."""
    if rows is None or rows.dim() == 0 or rows.shape[-1] > 0:
        return rows
    return rows.new_zeros(*rows.shape[:-1], 1)


def for_operator(arguments: dict[str, Any]) -> dict[str, Any]:
    """Give the arguments as the operator takes them."""
    return {k: _with_columns(v) if k in ROWS else v for k, v in arguments.items()}


def _runs_on_triton(device: torch.device) -> bool:
    """Whether Triton's kernels take rows of a device, which others have to refuse."""
    if device.type == "cpu":
        return False
    if device.type.upper() not in triton.DEVICES:
        raise ValueError(
            f"{NAME}: target_logits must be on the CPU or on a GPU that Triton compiles for, "
            f"got {device}"
        )
    return True


def prepare(given: dict[str, Any], vocab_start: int | None, on_triton: bool) -> Local:
    """Check what one rank can check alone, and make numbers tensors."""
    arguments = {name: _to_local(name, value) for name, value in given.items()}
    for name, wanted in PASSED_ON["verify"].items():
        check_type(NAME, name, arguments[name], wanted)
    if vocab_start is not None:
        check_type(NAME, "vocab_start", vocab_start, "int")
        if vocab_start < 0:
            raise ValueError(f"{NAME}: vocab_start must be at least 0, got {vocab_start}")
    tokens, device = arguments["draft_tokens"], arguments["target_logits"].device
    on_triton = _runs_on_triton(device) or on_triton
    if on_triton:
        triton.check_device(NAME, device)
    batch = tokens.shape[0] if tokens.dim() > 0 else 1
    for name in EXPANDED["verify"]:
        arguments[name] = per_request(NAME, name, arguments[name], batch, device)
    # The mask is of the whole vocabulary, whose size no rank knows yet.
    ops._prepare_verify(**{**for_operator(arguments), "allowed_mask": None})
    law = [n for n in ("draft_logits", "draft_probs") if arguments[n] is not None]
    start = -1 if vocab_start is None else vocab_start
    facts = facts_of(arguments, on_triton)
    return Local(arguments, start, law[0] if law else None, on_triton, facts)
