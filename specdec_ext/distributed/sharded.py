"""`verify_sharded`: agree, complete the tiles at the borders, run the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._calls import Floats, Ints
from .._ops import ops
from ..contract import VerifyResult
from .agreement import Local, agree
from .arguments import for_operator, group_of, prepare
from .exchange import Exchange, numbered
from .parts import Part, complete_tiles, draft_bounds, target_bounds


def _run(exchange: Exchange, local: Local, table: Tensor) -> VerifyResult:
    starts, widths, draft_widths = (column.tolist() for column in table.unbind(1))
    parts = [Part(local.arguments["target_logits"], target_bounds(starts, widths))]
    if local.draft:
        rows = local.arguments[local.draft]
        parts.append(Part(rows, draft_bounds(parts[0].bounds, draft_widths)))
    tails = complete_tiles(exchange, parts)
    run = _run_triton if local.on_triton else _run_cpu
    return VerifyResult(*run(exchange, for_operator(local.arguments), parts, tails))


def _run_triton(
    exchange: Exchange, arguments: dict[str, Any], parts: list[Part], tails: list[Tensor | None]
) -> tuple[Tensor, ...]:
    from ..triton.sharded import Part, verify_parts

    both = [Part(*part, tail) for part, tail in zip(parts, tails, strict=True)]
    return verify_parts(exchange, arguments, both[0], both[1] if len(both) == 2 else None)


def _run_cpu(
    exchange: Exchange, arguments: dict[str, Any], parts: list[Part], tails: list[Tensor | None]
) -> tuple[Tensor, ...]:
    drafted = len(parts) == 2
    with numbered(exchange) as number:
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
    return outputs


def _verify(
    given: dict[str, Any], vocab_start: int | None, group: Any, on_triton: bool = False
) -> VerifyResult:
    """Verify; `on_triton`: by Triton's interpreter where rows are on the CPU."""
    rows = given["target_logits"]
    exchange = Exchange(group_of(rows, group), rows)
    local: Local | Exception
    try:
        local = prepare(given, vocab_start, on_triton)
    except Exception as error:  # the other ranks must hear of it
        local = error
    table = agree(exchange, local)
    assert isinstance(local, Local)  # or agree has raised
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
