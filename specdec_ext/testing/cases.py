"""Calls of `specdec_ext.verify`: what is passed, what comes back, and random ones of every kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .laws import Params, candidate_laws, params_of
from .masks import forbid, pack_mask
from .philox import philox_exponentials

Verifier = Callable[..., Any]
AnyCase = TypeVar("AnyCase", bound="Case")
_PER_REQUEST = frozenset(
    "draft_tokens draft_kinds draft_lengths target_rows draft_rows uniforms seeds positions "
    "temperature top_k top_p min_p draft_temperature draft_top_k draft_top_p draft_min_p "
    "allowed_mask".split()
)


class VerifyOutcome(NamedTuple):
    """What `verify` returns, whichever backend returned it.

    Attributes
    ----------
    tokens : Tensor
        ``[B, G+1]`` int64, -1 after the end.
    num_accepted : Tensor
        ``[B]`` int32.
    logprobs : Tensor
        ``[B, G+1]`` float32, NaN after the end.
    accept_probs : Tensor
        ``[B, G]`` float32, NaN where a position was not looked at.
    status : Tensor
        ``[B]`` int32, a bit set.
    """

    tokens: Tensor
    num_accepted: Tensor
    logprobs: Tensor
    accept_probs: Tensor
    status: Tensor


@dataclass(frozen=True)
class Case:
    """Keyword arguments of one call of a verifier, with a name for messages.

    Attributes
    ----------
    inputs : mapping
        The arguments, by name.
    name : str
        What the case is about.
    """

    inputs: Mapping[str, Any]
    name: str = ""

    def replace(self: AnyCase, **changes: Any) -> AnyCase:
        """Give the case with other arguments; None drops one."""
        merged = {**self.inputs, **changes}
        return type(self)({k: v for k, v in merged.items() if v is not None}, self.name)

    def with_whole_rows(self: AnyCase) -> AnyCase:
        """Give the case with lists of tokens scattered into rows ``[V]`` of float32.

        An illegal list becomes a row of NaN, which has no law either.
        """
        if "draft_probs_ids" not in self.inputs:
            return self
        rows = whole_rows(
            self.inputs["draft_probs"],
            self.inputs["draft_probs_ids"],
            self.inputs["target_logits"].shape[-1],
        )
        return self.replace(draft_probs=rows, draft_probs_ids=None)


class VerifyCase(Case):
    """A call of `verify`."""

    @property
    def batch(self) -> int:
        """Number of requests."""
        return int(self.inputs["draft_tokens"].shape[0])

    @property
    def gamma(self) -> int:
        """Number of draft columns."""
        return int(self.inputs["draft_tokens"].shape[1])

    def run(self, verify: Verifier) -> VerifyOutcome:
        """Call a verifier on the case."""
        return VerifyOutcome(*verify(**self.inputs))

    def select(self, requests: Sequence[int]) -> VerifyCase:
        """Give the case with only these requests, in this order (repeats allowed).

        Packed logits and draft_token_ids, shared by all requests, stay as they are.
        """
        index = torch.tensor(list(requests), dtype=torch.int64)
        per_request = set(_PER_REQUEST)
        if "target_rows" not in self.inputs:
            per_request.add("target_logits")
        if "draft_rows" not in self.inputs:
            per_request.update(("draft_logits", "draft_probs", "draft_probs_ids"))
        chosen = {
            name: value.index_select(0, index.to(value.device))
            if name in per_request and isinstance(value, Tensor)
            else value
            for name, value in self.inputs.items()
        }
        return VerifyCase(chosen, self.name)


def whole_rows(probs: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Scatter lists ``[.., K]`` into rows ``[.., V]`` of float32; NaN where they are illegal.

    Examples
    --------
    >>> whole_rows(torch.tensor([[0.75, 0.25, 9.0]]), torch.tensor([[2, 0, -1]]), 4)
    tensor([[0.2500, 0.0000, 0.7500, 0.0000]])
    """
    named = ids != -1
    known = named & (ids >= 0) & (ids < vocab)
    # The last column takes what is not there.
    places = torch.where(known, ids, vocab).long()
    rows = torch.zeros(*ids.shape[:-1], vocab + 1, dtype=torch.float32, device=ids.device)
    counts = torch.zeros_like(rows).scatter_add_(-1, places, torch.ones_like(places).float())
    rows = rows.scatter_(-1, places, probs.float())[..., :vocab]
    wrong = (named & ~known).any(-1) | (counts[..., :vocab] > 1).any(-1)
    return rows.masked_fill(wrong[..., None], math.nan)


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """Give the same values with other strides; the last dimension keeps stride 1."""
    if layout == "contiguous":
        return values.contiguous()
    if layout == "transposed":  # [B, R, V] stored as [R, B, V]
        return values.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "padded":  # odd row pitch, odd storage offset
        *lead, last = values.shape
        storage = torch.full((*lead, last + 3), math.nan).to(values.dtype)
        view = storage[..., 1 : last + 1]
        return view.copy_(values)
    raise ValueError(f"make_case: layout must be contiguous, transposed or padded, got {layout!r}")


def _random_rows(
    generator: torch.Generator,
    batch: int,
    rows: int,
    vocab: int,
    width: int,
    ids: Tensor | None,
    masks: bool,
) -> tuple[Tensor, Tensor]:
    """Target and draft logits in four styles: flat, usual, peaked, equal."""
    style = torch.randint(4, (batch, 1, 1), generator=generator)
    spread = torch.tensor([0.3, 2.0, 8.0, 2.0])[style]
    noise = torch.tensor([0.5, 1.0, 1.0, 0.0])[style]
    target = torch.randn(batch, rows, vocab, generator=generator) * spread
    draft = torch.randn(batch, rows, width, generator=generator) * noise
    both = min(vocab, width)
    draft[..., :both] += target[..., :both] if ids is None else target[..., ids]
    if masks and vocab > 2:
        # A third of the requests has masked entries, never the first one: a law always remains.
        masked = torch.rand(batch, 1, 1, generator=generator) < 1 / 3
        for values in (target, draft):
            some = torch.rand(values.shape, generator=generator) < 0.3
            some[..., 0] = False
            values.masked_fill_(masked & some, -math.inf)
    return target, draft


def random_params(
    generator: torch.Generator, batch: int, vocab: int, filters: bool, greedy: bool
) -> dict[str, Tensor]:
    """Draw sampling parameters ``[B]`` of a target or a draft, usual values and odd ones."""

    def pick(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        table = torch.tensor(list(values), dtype=dtype)
        return table[torch.randint(len(table), (batch,), generator=generator)]

    temperatures = [0.3, 0.7, 1.0, 1.0, 1.6] + ([0.0] if greedy else [])
    params = {"temperature": pick(temperatures)}
    if filters:
        ks = [0, -1, 1, 2, max(1, vocab // 2), vocab, vocab + 5]
        params["top_k"] = pick(ks, torch.int64)
        params["top_p"] = pick([1.0, 1.5, 0.97, 0.83, 0.41, 0.0])
        params["min_p"] = pick([0.0, -1.0, 0.013, 0.21, 1.0])
    return params


def _random_seeds(generator: torch.Generator, batch: int) -> tuple[Tensor, Tensor]:
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    return seeds, torch.randint(0, 2**40, (batch,), generator=generator)


def _random_masks(generator: torch.Generator, batch: int, slots: int, vocab: int) -> Tensor:
    """Masks ``[B, G+1, V]``: a share of tokens for each request, now and then nothing at all."""
    style = torch.randint(4, (batch, 1, 1), generator=generator)
    share = torch.tensor([1.0, 0.7, 0.7, 0.2])[style]
    allowed = torch.rand(batch, slots, vocab, generator=generator) < share
    return allowed & (torch.rand(batch, slots, 1, generator=generator) >= 0.04)


def _random_lists(generator: torch.Generator, logits: Tensor, number: int) -> Tensor:
    """Name the largest entries of each row, in any order; half of the lists lack one, by a -1."""
    top = logits.float().topk(number, -1).indices
    order = torch.rand(top.shape, generator=generator).argsort(-1)
    named = top.gather(-1, order)
    if number > 1:
        short = torch.rand(top.shape[:-1], generator=generator) < 0.5
        named[..., -1].masked_fill_(short, -1)
    return named


def make_case(
    seed: int,
    *,
    batch: int = 8,
    gamma: int = 3,
    vocab: int = 17,
    draft_vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    layout: str = "contiguous",
    packed: bool = False,
    draft: str = "logits",
    listed: int = 6,
    kinds: str | None = None,
    ragged: bool = True,
    filters: bool = True,
    draft_filters: bool = False,
    greedy_rows: bool = True,
    masks: bool = True,
    allowed_mask: bool = False,
    draft_token_ids: bool = False,
    philox: bool = False,
    id_dtype: torch.dtype = torch.int64,
    rule: str = "block",
    **options: Any,
) -> VerifyCase:
    """Draw the inputs of one call of `verify`, reproducibly.

    Parameters
    ----------
    seed : int
        Everything follows from it.
    batch, gamma, vocab : int
        B, G, V.
    draft_vocab : int, optional
        Vd; V by default.
    dtype, draft_dtype : torch.dtype
        Of the logits; the draft's follows the target's by default.
    layout : {"contiguous", "transposed", "padded"}
        Strides of the logits: ``padded`` has an odd row pitch and storage offset.
    packed : bool
        Logits as ``[R, V]`` with ``target_rows`` and ``draft_rows``, in shuffled order.
    draft : {"logits", "probs", "lists", "none"}
        How the draft's law is given; "none" is a deterministic drafter. "lists": the likeliest
        tokens by ``draft_probs_ids``, in any order, here and there less one.
    listed : int
        K of "lists".
    kinds : {None, "mixed", "deterministic"}
        ``draft_kinds``.
    ragged : bool
        ``draft_lengths`` per request (0 included), and -1 inside some drafts.
    filters, draft_filters : bool
        Per-request top_k, top_p, min_p; the draft's parameters of its own.
    greedy_rows : bool
        Some requests at T = 0.
    masks : bool
        Some requests with -inf logits.
    allowed_mask : bool
        Masks per request and slot: everything, most or few tokens allowed, here and there none;
        half of the requests have NaN where nothing is allowed.
    draft_token_ids : bool
        A reduced draft vocabulary in shuffled order; needs ``draft_vocab <= vocab`` and a draft
        law.
    philox : bool
        ``seeds`` and ``positions`` in place of ``uniforms``; the rule "coupled" always has them,
        and draft tokens that won a race of the draft's likeliest on the same noise.
    id_dtype : torch.dtype
        Of ids, lengths and rows.
    rule : str
        Passed on.
    **options
        Passed on as they are.

    Returns
    -------
    VerifyCase

    Examples
    --------
    >>> case = make_case(1, batch=2, gamma=3, vocab=5)
    >>> case.inputs["target_logits"].shape, case.inputs["draft_tokens"].shape
    (torch.Size([2, 4, 5]), torch.Size([2, 3]))
    """
    generator = torch.Generator().manual_seed(seed)
    width = vocab if draft_vocab is None else draft_vocab
    params = random_params(generator, batch, vocab, filters, greedy_rows)
    if draft_filters and draft == "logits":
        theirs = random_params(generator, batch, width, True, True)
        params |= {f"draft_{name}": value for name, value in theirs.items()}
    ids = torch.randperm(vocab, generator=generator)[:width] if draft_token_ids else None
    target, drafted = _random_rows(generator, batch, gamma + 1, vocab, width, ids, masks)
    target = target.to(dtype)
    drafted = drafted[:, :gamma].to(draft_dtype or dtype)
    named: Tensor | None = None
    if draft == "lists":
        named = _random_lists(generator, drafted, min(listed, width))
        known = torch.zeros(*drafted.shape[:-1], width + 1, dtype=torch.bool)
        known = known.scatter_(-1, torch.where(named < 0, width, named), True)[..., :width]
        drafted = drafted.masked_fill(~known, -math.inf)
    allowed = _random_masks(generator, batch, gamma + 1, vocab) if allowed_mask else None
    seeds, positions = _random_seeds(generator, batch) if rule == "coupled" else (None, None)

    # Draft tokens: drawn from the draft's law, its arg max at deterministic columns; now and then
    # anything at all.
    tokens = torch.zeros(batch, gamma, dtype=torch.int64)
    draft_kinds = torch.ones(batch, gamma, dtype=torch.int8)
    if kinds is not None or draft == "none":
        draft_kinds.zero_()
    if kinds == "mixed":
        draft_kinds = torch.randint(2, (batch, gamma), generator=generator).to(torch.int8)
    picks = torch.rand(batch, gamma, 2, generator=generator, dtype=torch.float64)
    for b, i in itertools.product(range(batch), range(gamma)):
        scalars = Params()
        if draft not in ("probs", "lists"):
            scalars = params_of(params, "", b, scalars)
            scalars = params_of(params, "draft_", b, scalars).cleaned()
        anything = int(picks[b, i, 0] * (vocab if draft_token_ids else max(vocab, width)))
        mask = None if allowed is None else allowed[b, i]
        laws = candidate_laws(forbid(drafted[b, i], mask, ids), scalars, 0.0)
        if not laws or picks[b, i, 1] >= 0.93:
            tokens[b, i] = anything
            continue
        law = laws[0]
        prefix = law.probs.cumsum(0)
        drawn = int(torch.searchsorted(prefix, picks[b, i, 0] * prefix[-1], right=True))
        if draft_kinds[b, i] == 0:
            drawn = law.argmax
        elif seeds is not None and positions is not None:
            likely = law.probs.topk(min(width, 16)).indices  # any draft is legal: spare the time
            runners = likely if ids is None else ids[likely]
            noise = philox_exponentials(int(seeds[b]), int(positions[b]) + i, runners.tolist())
            times = torch.tensor(noise, dtype=torch.float64) / law.probs[likely]
            drawn = int(likely[times.argmin()])
        drawn = min(drawn, width - 1)
        tokens[b, i] = drawn if ids is None else ids[drawn]

    inputs: dict[str, Any] = {"rule": rule, **params}
    if allowed is not None:
        spare = torch.rand(*allowed.shape[:2], -vocab % 32, generator=generator) < 0.5
        inputs["allowed_mask"] = pack_mask(allowed, beyond=spare)
        poisoned = torch.rand(batch, 1, 1, generator=generator) < 0.5
        target = torch.where(poisoned, forbid(target, allowed, None, math.nan), target)
    if ids is not None:
        inputs["draft_token_ids"] = ids.to(id_dtype)
    if draft in ("probs", "lists"):
        scale = torch.rand(batch, gamma, 1, generator=generator) + 0.5  # normalised inside
        drafted = (drafted.float().softmax(-1) * scale).to(draft_dtype or dtype)
    if allowed is not None:
        drafted = torch.where(poisoned, forbid(drafted, allowed[:, :gamma], ids, math.nan), drafted)
    if ragged:
        inputs["draft_lengths"] = torch.randint(gamma + 1, (batch,), generator=generator)
        inputs["draft_lengths"][::2] = gamma
        holes = torch.rand(batch, gamma, generator=generator) < 0.05
        tokens.masked_fill_(holes, -1)
        inputs["draft_lengths"] = inputs["draft_lengths"].to(id_dtype)
    inputs["draft_tokens"] = tokens.to(id_dtype)
    if kinds is not None:
        inputs["draft_kinds"] = draft_kinds

    def give(name: str, values: Tensor) -> None:
        if not packed:
            inputs[name] = _laid_out(values, layout)
            return
        rows = values.shape[0] * values.shape[1]
        order = torch.randperm(rows, generator=generator)
        table = torch.empty(rows, values.shape[-1], dtype=values.dtype)
        table[order] = values.flatten(0, 1)
        inputs[name] = _laid_out(table, "padded" if layout == "padded" else "contiguous")
        rows_name = "target_rows" if name == "target_logits" else "draft_rows"
        inputs[rows_name] = order.reshape(values.shape[:2]).to(id_dtype)

    give("target_logits", target)
    if named is not None:
        drafted = drafted.gather(-1, named.clamp(min=0))
        give("draft_probs", torch.where(named < 0, math.nan, drafted))
        if packed:
            table = torch.full(inputs["draft_probs"].shape, -1)
            table[inputs["draft_rows"].long()] = named
            named = table
        inputs["draft_probs_ids"] = named.to(id_dtype)
    elif draft != "none":
        give(f"draft_{draft}", drafted)
    if philox or rule == "coupled":
        if seeds is None:
            seeds, positions = _random_seeds(generator, batch)
        inputs["seeds"], inputs["positions"] = seeds, positions
    else:
        inputs["uniforms"] = torch.rand(batch, gamma + 1, generator=generator, dtype=torch.float64)
    inputs.update(options)
    shape = f"B={batch} G={gamma} V={vocab} Vd={width} {dtype}".replace("torch.", "")
    return VerifyCase(inputs, f"seed {seed}, {shape}, {rule}, {layout}, draft {draft}")
