"""All ranks must do the same: what each brings is compared before anything is computed."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._calls import EXPANDED, PASSED_ON
from ..backend import cpu_capability
from .exchange import Exchange
from .parts import NAME, as_bytes

#: Arguments of which each rank has a part.
ROWS = ("target_logits", "draft_logits", "draft_probs")
_LENGTH_OF_MESSAGE = 512


def _digest(value: object) -> int:
    """Give a number that tells values apart; tensors with their dtype and shape."""
    if value is None:
        return 0
    if not isinstance(value, Tensor):
        return 1 + zlib.crc32(repr(value).encode())
    kind = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode())
    flat = value.detach().contiguous()
    content = (ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr())
    return 1 + (zlib.crc32(content, kind) if flat.numel() else kind)


def _on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy the tensors of GPUs to the CPU, those of one device at once: each copy is a wait."""
    found = dict(arguments)
    away: dict[torch.device, list[str]] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            away.setdefault(value.device, []).append(name)
    for names in away.values():
        pieces = [as_bytes(arguments[name].detach()) for name in names]
        copied = torch.cat(pieces).cpu().split([piece.numel() for piece in pieces])
        for name, piece in zip(names, copied, strict=True):
            value = arguments[name]
            found[name] = piece.clone().view(value.dtype).view(value.shape)  # a clone is aligned
    return found


class Local(NamedTuple):
    """What a rank brings, once its own checks have passed."""

    arguments: dict[str, Any]  # of the operator verify, logits of this rank's part
    start: int  # -1: after the ranks before
    draft: str | None  # the argument that has the draft's rows
    on_triton: bool  # or by the CPU's operator
    facts: dict[str, int]  # what must be the same on all ranks

    def widths(self) -> list[int]:
        """Give the columns of the target's rows here, and of the draft's: -1 where it has none."""
        draft = self.arguments[self.draft] if self.draft else None
        return [self.arguments["target_logits"].shape[-1], -1 if draft is None else draft.shape[-1]]


def _kernels(on_triton: bool, device: torch.device) -> tuple[str, str]:
    """Give what a rank's kernels depend on, and what that is here: others may have other bits."""
    if not on_triton:
        return "SPECDEC_CPU_CAPABILITY", cpu_capability()
    if device.type == "cpu":
        return "the device of target_logits", "cpu"
    name = torch.get_device_module(device).get_device_name(device)
    return "the device of target_logits", f"{device.type} {name}"


def facts_of(arguments: dict[str, Any], on_triton: bool) -> dict[str, int]:
    """Make numbers of what must be the same on all ranks, by what they are about."""
    small = _on_host({name: v for name, v in arguments.items() if name not in ROWS})
    facts = {name: _digest(value) for name, value in small.items()}
    for name in ROWS:
        given = arguments[name]
        described = None if given is None else (given.dtype, tuple(given.shape[:-1]))
        facts[f"{name}: dtype and shape but for the last dimension"] = _digest(described)
    kernels, here = _kernels(on_triton, arguments["target_logits"].device)
    facts[kernels] = _digest(here)
    return facts


def _refuse_together(exchange: Exchange, refused: list[int], mine: Exception | None) -> None:
    """Raise on all ranks what some ranks have refused."""
    text = str(mine or "").encode()[:_LENGTH_OF_MESSAGE].ljust(_LENGTH_OF_MESSAGE)
    texts = exchange.gather(torch.tensor(list(text), dtype=torch.uint8, device=exchange.tables))
    if mine is not None:
        raise mine
    first = refused[0]
    theirs = bytes(texts[first].tolist()).decode(errors="replace").strip()
    raise ValueError(f"{NAME}: rank {first} has refused its arguments: {theirs}")


def agree(exchange: Exchange, local: Local | Exception) -> Tensor:
    """Make sure that all ranks do the same; returns what only each of them knows.

    Parameters
    ----------
    exchange : Exchange
    local : Local or Exception
        What this rank has refused, where it has.

    Returns
    -------
    Tensor
        ``[W, 3]`` int64: where the ranks' parts begin, and their widths, target's and draft's.
    """
    mine = local if isinstance(local, Exception) else None
    names = [*PASSED_ON["verify"], *EXPANDED["verify"]]
    facts = {} if isinstance(local, Exception) else local.facts
    own = [0, 0, 0] if isinstance(local, Exception) else [local.start, *local.widths()]
    numbers = [int(mine is not None), *own, *facts.values()]
    numbers += [0] * (len(names) + 5 - len(numbers))
    mine_alone = torch.tensor(numbers, dtype=torch.int64, device=exchange.tables)
    table = exchange.gather(mine_alone).cpu()
    refused = table[:, 0].nonzero().flatten().tolist()
    if refused:
        _refuse_together(exchange, refused, mine)
    for name, column in zip(facts, table[:, 4:].unbind(1), strict=True):
        others = (column != column[0]).nonzero().flatten().tolist()
        if others:
            raise ValueError(
                f"{NAME}: {name} must be the same on all ranks, "
                f"got another on rank {others[0]} than on rank 0"
            )
    return table[:, 1:4]
