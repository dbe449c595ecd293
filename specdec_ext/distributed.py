"""Verification over a vocabulary that is sharded across ranks, without gathering the logits.

Tensor parallelism leaves each rank with the logits of a part of the vocabulary. `verify_sharded`
takes these parts and returns, on every rank, what `specdec_ext.verify` returns of the whole rows,
to the bit: docs/sharded.md says how, and what is exchanged. Rows on the CPU go through the C++
operator, which calls back for its exchanges, rows on a GPU through triton/sharded.py.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from bisect import bisect_right
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import _fake, triton
from ._ops import NAMESPACE, add_op_namespace_prefix, ops
from .backend import cpu_capability
from .contract import VerifyResult
from .ops import _EXPANDED, _PASSED_ON, Floats, Ints, _check_type, _per_request

__all__ = ["TILE", "even_bounds", "verify_sharded"]

#: Entries of a vocabulary that are summed in one place. A part that begins between two multiples of
#: it costs an exchange of the logits up to the next one.
TILE = 4096

_NAME = "verify_sharded"
_ROWS = ("target_logits", "draft_logits", "draft_probs")  # of which each rank has a part
_LENGTH_OF_MESSAGE = 512
_OLD_NAME = "all_gather_into_tensor"


# -------------------------------------------------------------------------------------------------
# What is exchanged
# -------------------------------------------------------------------------------------------------


class _Exchange:
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
_exchanges: dict[int, _Exchange] = {}  # those of the calls that run


def _exchange(mine: Tensor, exchange: int) -> Tensor:
    """Exchange what C++ has found: int64 are summed, bytes gathered."""
    here = _exchanges[exchange]
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


# -------------------------------------------------------------------------------------------------
# Parts of a vocabulary
# -------------------------------------------------------------------------------------------------


def even_bounds(vocab: int, ranks: int) -> list[int]:
    """Split a vocabulary into parts of whole tiles, as even as they can be.

    Parts that begin at multiples of `TILE` spare `verify_sharded` the exchange of logits at their
    borders.

    Parameters
    ----------
    vocab : int
        V, at least 1.
    ranks : int
        W, at least 1.

    Returns
    -------
    list of int
        W + 1 numbers: rank r has the entries from the r-th up to the next one.

    Raises
    ------
    ValueError
        A number below 1.

    Examples
    --------
    >>> from specdec_ext.distributed import even_bounds
    >>> even_bounds(128256, 4)
    [0, 32768, 65536, 98304, 128256]
    """
    if vocab < 1 or ranks < 1:
        raise ValueError(f"even_bounds: vocab and ranks must be at least 1, got {vocab}, {ranks}")
    tiles = -(-vocab // TILE)
    return [min(vocab, -(-tiles * r // ranks) * TILE) for r in range(ranks + 1)]


class _Part(NamedTuple):
    """Rows of which each rank has some columns."""

    rows: Tensor  # [..., width] of this rank
    bounds: list[int]  # [W + 1]

    def head(self, rank: int) -> tuple[int, int]:
        """Give the rank that works on the first columns of a rank, and how many these are."""
        begin, end = self.bounds[rank : rank + 2]
        if begin == end or begin % TILE == 0:
            return rank, 0
        tile = begin // TILE * TILE
        return bisect_right(self.bounds, tile) - 1, min(end, tile + TILE) - begin

    def bytes_of(self, columns: int) -> int:
        rows = self.rows.shape[:-1].numel()
        return rows * columns * self.rows.element_size()


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().flatten().view(torch.uint8)


def _tails(exchange: _Exchange, parts: list[_Part]) -> list[Tensor | None]:
    """Complete the tile that begins in this rank's part and ends in others, of each of the parts.

    Parameters
    ----------
    exchange : _Exchange
    parts : list of _Part
        The target's rows, and the draft's.

    Returns
    -------
    list of Tensor or None
        ``[..., n]``, n <= 4,096, in rank order; None where no tile goes on elsewhere.
    """
    rank, ranks = exchange.rank, range(exchange.size)
    heads = [[part.head(r) for r in ranks] for part in parts]
    pieces = _swap_heads(exchange, parts, heads)
    tails: list[Tensor | None] = []
    for part, theirs, received in zip(parts, heads, pieces, strict=True):
        begin, end = part.bounds[rank : rank + 2]
        tile = end // TILE * TILE
        if not begin <= tile < end < part.bounds[-1]:
            tails.append(None)
            continue
        shapes = [(*part.rows.shape[:-1], columns) for _, columns in theirs]
        others = [
            received[r].clone().view(part.rows.dtype).view(shapes[r])  # a clone is aligned
            for r in ranks
            if theirs[r][0] == rank and theirs[r][1] > 0
        ]
        tails.append(torch.cat([part.rows[..., tile - begin :], *others], -1).contiguous())
    return tails


def _swap_heads(
    exchange: _Exchange, parts: list[_Part], heads: list[list[tuple[int, int]]]
) -> list[list[Tensor]]:
    """Send each rank the columns that it works on; gives what came, by part and by rank."""
    ranks = range(exchange.size)
    both = list(zip(parts, heads, strict=True))
    nothing = parts[0].rows.new_empty(0, dtype=torch.uint8)
    if not any(part.bytes_of(columns) for part, theirs in both for _, columns in theirs):
        return [[nothing for _ in ranks] for _ in parts]
    sent: list[list[Tensor]] = [[nothing] for _ in ranks]
    for part, theirs in both:
        owner, columns = theirs[exchange.rank]
        sent[owner].append(_bytes(part.rows[..., :columns]))
    sizes = [
        [part.bytes_of(h[r][1]) if h[r][0] == exchange.rank else 0 for part, h in both]
        for r in ranks
    ]
    received = exchange.swap([torch.cat(pieces) for pieces in sent], [sum(s) for s in sizes])
    by_rank = [piece.split(size) for piece, size in zip(received, sizes, strict=True)]
    return [[by_rank[r][i] for r in ranks] for i in range(len(parts))]


# -------------------------------------------------------------------------------------------------
# Agreement
# -------------------------------------------------------------------------------------------------


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
        pieces = [_bytes(arguments[name].detach()) for name in names]
        copied = torch.cat(pieces).cpu().split([piece.numel() for piece in pieces])
        for name, piece in zip(names, copied, strict=True):
            value = arguments[name]
            found[name] = piece.clone().view(value.dtype).view(value.shape)  # a clone is aligned
    return found


class _Local(NamedTuple):
    """What a rank brings, once its own checks have passed."""

    arguments: dict[str, Any]  # of the operator verify, logits of this rank's part
    start: int  # -1: after the ranks before
    draft: str | None  # the argument that has the draft's rows
    on_triton: bool  # or by the CPU's operator
    facts: dict[str, int]  # what must be the same on all ranks

    def widths(self) -> list[int]:
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


def _facts(arguments: dict[str, Any], on_triton: bool) -> dict[str, int]:
    """Make numbers of what must be the same on all ranks, by what they are about."""
    small = _on_host({name: v for name, v in arguments.items() if name not in _ROWS})
    facts = {name: _digest(value) for name, value in small.items()}
    for name in _ROWS:
        given = arguments[name]
        described = None if given is None else (given.dtype, tuple(given.shape[:-1]))
        facts[f"{name}: dtype and shape but for the last dimension"] = _digest(described)
    kernels, here = _kernels(on_triton, arguments["target_logits"].device)
    facts[kernels] = _digest(here)
    return facts


def _refuse_together(exchange: _Exchange, refused: list[int], mine: Exception | None) -> None:
    """Raise on all ranks what some ranks have refused."""
    text = str(mine or "").encode()[:_LENGTH_OF_MESSAGE].ljust(_LENGTH_OF_MESSAGE)
    texts = exchange.gather(torch.tensor(list(text), dtype=torch.uint8, device=exchange.tables))
    if mine is not None:
        raise mine
    first = refused[0]
    theirs = bytes(texts[first].tolist()).decode(errors="replace").strip()
    raise ValueError(f"{_NAME}: rank {first} has refused its arguments: {theirs}")


def _agree(exchange: _Exchange, local: _Local | Exception) -> Tensor:
    """Make sure that all ranks do the same; returns what only each of them knows.

    Parameters
    ----------
    exchange : _Exchange
    local : _Local or Exception
        What this rank has refused, where it has.

    Returns
    -------
    Tensor
        ``[W, 3]`` int64: where the ranks' parts begin, and their widths, target's and draft's.
    """
    mine = local if isinstance(local, Exception) else None
    names = [*_PASSED_ON["verify"], *_EXPANDED["verify"]]
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
                f"{_NAME}: {name} must be the same on all ranks, "
                f"got another on rank {others[0]} than on rank 0"
            )
    return table[:, 1:4]


def _bounds(starts: list[int], widths: list[int]) -> list[int]:
    """Give where the target's parts begin, and V."""
    bounds = [0, *itertools.accumulate(widths)]
    for rank, (start, expected) in enumerate(zip(starts, bounds, strict=False)):
        if start not in (-1, expected):
            raise ValueError(
                f"{_NAME}: vocab_start must be {expected} on rank {rank}, where the parts of the "
                f"ranks before it end: they must neither overlap nor leave a gap, got {start}"
            )
    if bounds[-1] < 1:
        raise ValueError(f"{_NAME}: target_logits must have at least one column on some rank")
    return bounds


def _draft_bounds(bounds: list[int], widths: list[int]) -> list[int]:
    """Give where the draft's parts begin, which end where the target's do, and Vd."""
    vocab = sum(widths)
    expected = [*(min(bound, vocab) for bound in bounds[:-1]), vocab]
    for rank, width in enumerate(widths):
        wanted = expected[rank + 1] - expected[rank]
        if width != wanted:
            raise ValueError(
                f"{_NAME}: the draft's rows must be split as the target's: rank {rank} holds "
                f"target entries {bounds[rank]} to {bounds[rank + 1]}, and of the draft's {vocab} "
                f"it must hold {expected[rank]} to {expected[rank + 1]}, got {width} columns"
            )
    return expected


# -------------------------------------------------------------------------------------------------
# Arguments of one rank
# -------------------------------------------------------------------------------------------------


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
            f"{_NAME}: {name}, a DTensor, must be Shard({last}) over one dimension of its mesh and "
            f"Replicate() over the others, got {tuple(rows.placements)}"
        )
    return sharded[0]


def _group_of(target_logits: object, group: Any) -> Any:
    """Find the ranks that hold the parts."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{_NAME}: torch.distributed has no process group: call init_process_group first"
        )
    if not _is_distributed(target_logits):
        return group
    rows: Any = target_logits
    found = rows.device_mesh.get_group(_vocabulary_dimension("target_logits", rows))
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(
        found
    ):
        raise ValueError(f"{_NAME}: group must be None or that of target_logits' mesh")
    return found


def _to_local(name: str, value: Any) -> Any:
    """Take this rank's part out of a DTensor; anything else stays."""
    if not _is_distributed(value):
        return value
    if name in _ROWS:
        _vocabulary_dimension(name, value)
    elif not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"{_NAME}: {name}, a DTensor, must be Replicate(), got {tuple(value.placements)}"
        )
    return value.to_local()


def _with_columns(rows: Tensor | None) -> Tensor | None:
    """Give rows without columns one: operators take no empty rows. None of it is read."""
    if rows is None or rows.dim() == 0 or rows.shape[-1] > 0:
        return rows
    return rows.new_zeros(*rows.shape[:-1], 1)


def _for_operator(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: _with_columns(v) if k in _ROWS else v for k, v in arguments.items()}


def _runs_on_triton(device: torch.device) -> bool:
    """Whether Triton's kernels take rows of a device, which others have to refuse."""
    if device.type == "cpu":
        return False
    if device.type.upper() not in triton.DEVICES:
        raise ValueError(
            f"{_NAME}: target_logits must be on the CPU or on a GPU that Triton compiles for, "
            f"got {device}"
        )
    return True


def _prepare(given: dict[str, Any], vocab_start: int | None, on_triton: bool) -> _Local:
    """Check what one rank can check alone, and make numbers tensors."""
    arguments = {name: _to_local(name, value) for name, value in given.items()}
    for name, wanted in _PASSED_ON["verify"].items():
        _check_type(_NAME, name, arguments[name], wanted)
    if vocab_start is not None:
        _check_type(_NAME, "vocab_start", vocab_start, "int")
        if vocab_start < 0:
            raise ValueError(f"{_NAME}: vocab_start must be at least 0, got {vocab_start}")
    tokens, device = arguments["draft_tokens"], arguments["target_logits"].device
    on_triton = _runs_on_triton(device) or on_triton
    if on_triton:
        triton.check_device(_NAME, device)
    batch = tokens.shape[0] if tokens.dim() > 0 else 1
    for name in _EXPANDED["verify"]:
        arguments[name] = _per_request(_NAME, name, arguments[name], batch, device)
    # The mask is of the whole vocabulary, whose size no rank knows yet.
    ops._prepare_verify(**{**_for_operator(arguments), "allowed_mask": None})
    law = [n for n in ("draft_logits", "draft_probs") if arguments[n] is not None]
    start = -1 if vocab_start is None else vocab_start
    facts = _facts(arguments, on_triton)
    return _Local(arguments, start, law[0] if law else None, on_triton, facts)


# -------------------------------------------------------------------------------------------------
# The function
# -------------------------------------------------------------------------------------------------


def _run(exchange: _Exchange, local: _Local, table: Tensor) -> VerifyResult:
    starts, widths, draft_widths = (column.tolist() for column in table.unbind(1))
    parts = [_Part(local.arguments["target_logits"], _bounds(starts, widths))]
    if local.draft:
        rows = local.arguments[local.draft]
        parts.append(_Part(rows, _draft_bounds(parts[0].bounds, draft_widths)))
    tails = _tails(exchange, parts)
    run = _run_triton if local.on_triton else _run_cpu
    return VerifyResult(*run(exchange, _for_operator(local.arguments), parts, tails))


def _run_triton(
    exchange: _Exchange, arguments: dict[str, Any], parts: list[_Part], tails: list[Tensor | None]
) -> tuple[Tensor, ...]:
    from .triton.sharded import Part, verify_parts

    both = [Part(*part, tail) for part, tail in zip(parts, tails, strict=True)]
    return verify_parts(exchange, arguments, both[0], both[1] if len(both) == 2 else None)


def _run_cpu(
    exchange: _Exchange, arguments: dict[str, Any], parts: list[_Part], tails: list[Tensor | None]
) -> tuple[Tensor, ...]:
    drafted = len(parts) == 2
    number = next(_numbers)
    _exchanges[number] = exchange
    try:
        outputs: tuple[Tensor, ...] = ops._verify_sharded(
            **arguments,
            target_tail=tails[0],
            draft_tail=tails[1] if drafted else None,
            bounds=torch.tensor(parts[0].bounds),
            rank=exchange.rank,
            draft_vocab=parts[1].bounds[-1] if drafted else 0,
            exchange=number,
        )
    except RuntimeError:
        if exchange.error is not None:
            raise exchange.error from None
        raise
    finally:
        del _exchanges[number]
    return outputs


def _verify(
    given: dict[str, Any], vocab_start: int | None, group: Any, on_triton: bool = False
) -> VerifyResult:
    """Verify; `on_triton`: by Triton's interpreter where rows are on the CPU."""
    rows = given["target_logits"]
    exchange = _Exchange(_group_of(rows, group), rows)
    local: _Local | Exception
    try:
        local = _prepare(given, vocab_start, on_triton)
    except Exception as error:  # the other ranks must hear of it
        local = error
    table = _agree(exchange, local)
    assert isinstance(local, _Local)  # or _agree has raised
    return _run(exchange, local, table)


_outside_graphs: Any = torch.compiler.disable(_verify)


def verify_sharded(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    vocab_start: int | None = None,
    group: Any = None,
    draft_probs: Tensor | None = None,
    target_rows: Tensor | None = None,
    draft_rows: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_kinds: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Floats = None,
    top_k: Ints = None,
    top_p: Floats = None,
    min_p: Floats = None,
    draft_temperature: Floats = None,
    draft_top_k: Ints = None,
    draft_top_p: Floats = None,
    draft_min_p: Floats = None,
    rule: str = "block",
    lenience: float = 1.0,
    beta: int = 3,
    tau: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    full_accept_probs: bool = False,
    raw_logprobs: bool = False,
) -> VerifyResult:
    """Verify chains of draft tokens whose logits are sharded over the vocabulary.

    All ranks of a group call it together, each with its part of the rows. All get what
    `specdec_ext.verify` gives of the whole rows, to the bit, whatever the number of ranks and
    wherever the parts begin: on CPU tensors by the C++ kernels, on GPU tensors by Triton's (what
    ``verify(..., backend="triton")`` gives there, whatever "auto" would choose). Logits are not
    gathered: ranks exchange summaries of tiles of 4,096 entries, and logits only where a part
    begins inside a tile (`even_bounds` avoids it).

    Collectives are torch.distributed's, on the device of the logits, and the group's backend must
    have them there: gloo on CPUs, NCCL on GPUs, or "cpu:gloo,cuda:nccl". On GPUs the host waits
    once or twice, to compare the ranks' arguments before anything is computed, and not again; the
    call cannot be captured in a CUDA graph. No GPU has run it yet, see docs/sharded.md.
    ``torch.compile`` leaves the call out of its graphs, and refuses it with ``fullgraph=True``.

    Parameters
    ----------
    target_logits : Tensor
        ``[B, G+1, V_r]`` raw logits of the entries that this rank holds, float32, bfloat16 or
        float16, unit stride on the last dimension; ``[R, V_r]`` with target_rows. Parts follow one
        another in rank order; a part may be empty. Or a DTensor ``[B, G+1, V]`` that is sharded on
        its last dimension over one dimension of its mesh, and replicated over the others.
    draft_tokens : Tensor
        ``[B, G]`` int32 or int64, ids of the whole vocabulary. Like all that follows, but for the
        draft's rows, the same on all ranks.
    draft_logits : Tensor, optional
        ``[B, G, Vd_r]``, or ``[R, Vd_r]`` with draft_rows: the draft's logits, split at the same
        entries. Where Vd < V the last parts are shorter or empty, where Vd > V the last rank has
        the rest. Neither this nor draft_probs: a deterministic drafter.
    vocab_start : int, optional
        The first entry that this rank holds. It follows from the widths of the parts before and is
        only checked.
    group : ProcessGroup, optional
        The ranks that hold the vocabulary. Default: those of the mesh of a DTensor, else all.
    draft_probs : Tensor, optional
        Same shapes as draft_logits, instead of it: probabilities, normalised over the whole rows.
    target_rows, draft_rows : Tensor, optional
        As in `specdec_ext.verify`.
    allowed_mask : Tensor, optional
        ``[B, G+1, ceil(V/32)]`` int32 as in `specdec_ext.verify`, of the whole vocabulary.
    draft_kinds, draft_lengths : Tensor, optional
        As in `specdec_ext.verify`.
    uniforms, seeds, positions : Tensor, optional
        As in `specdec_ext.verify`; there is no generator, which would be another on each rank.
    stream, temperature, top_k, top_p, min_p : optional
        As in `specdec_ext.verify`.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p : optional
        As in `specdec_ext.verify`.
    rule, lenience, beta, tau, epsilon, delta, full_accept_probs, raw_logprobs : optional
        As in `specdec_ext.verify`.

    Returns
    -------
    VerifyResult
        As of `specdec_ext.verify`, on every rank.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor the number it should be.
    ValueError
        On every rank, whichever rank it is about: what `specdec_ext.verify` refuses; arguments that
        differ between ranks; parts that overlap or leave a gap; a draft that is split elsewhere;
        logits on a device that Triton does not compile for; CPUs that run other kernels, or GPUs of
        several kinds. On the rank alone: no process group, a DTensor that is not sharded on its
        last dimension.
    RuntimeError
        Logits on a GPU, and no Triton: as a ValueError on the ranks that have it.

    See Also
    --------
    specdec_ext.verify : the same of whole rows, with all that the arguments mean.

    Examples
    --------
    One process that holds everything; docs/sharded.md has several.

    >>> import torch, specdec_ext
    >>> import torch.distributed as dist
    >>> from specdec_ext.distributed import verify_sharded
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> target_logits = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]).log()
    >>> draft_logits = torch.tensor([[[0.8, 0.2]]]).log()
    >>> u = torch.tensor([[0.37, 0.6]], dtype=torch.float64)
    >>> result = verify_sharded(target_logits, torch.tensor([[0]]), draft_logits, uniforms=u)
    >>> result.tokens, result.accept_probs
    (tensor([[0, 1]]), tensor([[0.3750]]))
    >>> dist.destroy_process_group()
    """
    given = {
        **dict(target_logits=target_logits, draft_tokens=draft_tokens, draft_logits=draft_logits),
        **dict(draft_probs=draft_probs, target_rows=target_rows, draft_rows=draft_rows),
        **dict(allowed_mask=allowed_mask, draft_token_ids=None, draft_probs_ids=None),
        **dict(draft_kinds=draft_kinds, draft_lengths=draft_lengths),
        **dict(uniforms=uniforms, seeds=seeds, positions=positions, stream=stream),
        **dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        **dict(draft_temperature=draft_temperature, draft_top_k=draft_top_k),
        **dict(draft_top_p=draft_top_p, draft_min_p=draft_min_p),
        **dict(rule=rule, lenience=lenience, beta=beta, tau=tau, epsilon=epsilon, delta=delta),
        **dict(full_accept_probs=full_accept_probs, raw_logprobs=raw_logprobs),
    }
    result: VerifyResult = _outside_graphs(given, vocab_start, group)
    return result
