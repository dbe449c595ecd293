"""The collectives of a call, and the operator by which the C++ kernels ask for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _fake
from .._ops import NAMESPACE, add_op_namespace_prefix

_OLD_NAME = "all_gather_into_tensor"


class Exchange:
    """The collectives of one call, all through torch.distributed."""

    def __init__(self, group: Any, rows: object) -> None:
        self.group = group
        self.tables = _device_of_tables(group, rows)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.error: BaseException | None = None  # that of a collective called from C++

    def gather(self, mine: Tensor) -> Tensor:
        """Give every rank what each has: ``[W, n]`` of ``[n]``."""
        all_of_them = mine.new_empty(self.size * mine.numel())
        # torch 2.13 has renamed it, and warns of the old name.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else _OLD_NAME
        getattr(dist, name)(all_of_them, mine, group=self.group)
        return all_of_them.view(self.size, -1)

    def total(self, mine: Tensor) -> Tensor:
        """Give every rank the sums over ranks."""
        sums = mine.clone()
        dist.all_reduce(sums, group=self.group)
        return sums

    def swap(self, sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send bytes to each rank, and receive as many as ``sizes`` says from each."""
        given = torch.cat(sent)
        received = given.new_empty(sum(sizes))
        dist.all_to_all_single(
            received, given, sizes, [piece.numel() for piece in sent], group=self.group
        )
        return list(received.split(sizes))


def _device_of_tables(group: Any, rows: object) -> torch.device:
    """Choose where ranks compare what they bring: on the CPU, if the group has a backend for it."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl", say
    kinds = [pair.split(":")[0] for pair in config.split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    if isinstance(rows, Tensor) and rows.device.type in kinds:
        return rows.device
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


_numbers = itertools.count()
_running: dict[int, Exchange] = {}  # those of the calls that run


@contextmanager
def numbered(exchange: Exchange) -> Iterator[int]:
    """Give the number by which C++ asks for the collectives of a call, while the call runs."""
    number = next(_numbers)
    _running[number] = exchange
    try:
        yield number
    finally:
        del _running[number]


def _exchange(mine: Tensor, exchange: int) -> Tensor:
    """Exchange what C++ has found: int64 are summed, bytes gathered."""
    here = _running[exchange]
    try:
        return here.total(mine) if mine.dtype == torch.int64 else here.gather(mine).flatten()
    except BaseException as error:  # C++ would lose it: kept, and C++ stops at the wrong size
        here.error = error
        return mine.new_empty(0)


_library: Any = torch.library
_fragment = _library.Library(NAMESPACE, "FRAGMENT")  # kept: registrations go away with the object
_fragment.impl("_exchange", _exchange, "CPU")
for _operator in ("_exchange", "_verify_sharded"):
    _fragment.impl(_operator, _library.fallthrough_kernel, "Autograd")
_library.register_fake(add_op_namespace_prefix("_verify_sharded"), _fake.FAKES["verify"])
