"""Every operator in plain float64 PyTorch: the text that backends must match.

Written to be read beside DESIGN.md. One request at a time, one function per rule, nothing fused.
The argument checks live in ``csrc/torch``: shapes and dtypes are assumed clean here, values are
not, and every corner that ``status`` reports is handled where the text says so.

The words: *target* law p, *draft* law q, draft tokens ``x_1 .. x_G``. Node i of a chain is the
state after ``x_1 .. x_i``; row i of the target logits is the law there, and column i (0-based) of
the draft holds ``x_{i+1}`` and the law it was drawn from. ``w_i`` is the inflow of node i and
``h_i`` the threshold of its coin (section 4 of DESIGN.md).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import contract
from .contract import (
    CHAIN_RULES,
    GREEDY_BELOW,
    KIND_DETERMINISTIC,
    KIND_SAMPLED,
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
    RowLaw,
    Rule,
    SampleResult,
    TreeMaskResult,
    VerifyResult,
)

__all__ = [
    "ACCEPT",
    "COUPLED",
    "DRAFT",
    "RESIDUAL",
    "RULES",
    "Law",
    "acceptance",
    "chain_acceptance",
    "chain_inflow",
    "compact_kv",
    "inverse_cdf",
    "law",
    "law_weights",
    "make_law",
    "philox4x32",
    "philox_uniforms",
    "race",
    "race_noise",
    "residual",
    "residual_weights",
    "row_law",
    "sample",
    "tree_attention",
    "tree_mask",
    "tree_size",
    "uniforms",
    "verify",
]

# Philox domains: what a draw is for.
ACCEPT, RESIDUAL = contract.DOMAIN_ACCEPT, contract.DOMAIN_RESIDUAL
DRAFT, COUPLED = contract.DOMAIN_DRAFT, contract.DOMAIN_COUPLED

NAN, INF = math.nan, math.inf
MASK32 = 0xFFFFFFFF


# -------------------------------------------------------------------------------------------------
# Randomness (DESIGN section 5)
# -------------------------------------------------------------------------------------------------


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Parameters
    ----------
    counter : Tensor
        ``[..., 4]`` int64, each word in [0, 2^32).
    key : Tensor
        ``[..., 2]`` int64, each word in [0, 2^32).

    Returns
    -------
    Tensor
        ``[..., 4]`` int64, each word in [0, 2^32).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # int64 products wrap modulo 2^64, so the bits are those of the unsigned product.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((odd >> 32) & MASK32) ^ c1 ^ k0,
            odd & MASK32,
            ((even >> 32) & MASK32) ^ c3 ^ k1,
            even & MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return torch.stack([c0, c1, c2, c3], dim=-1)


def philox_uniforms(
    seeds: Tensor, positions: Tensor, index: Tensor | int, domain: int, stream: int = 0
) -> Tensor:
    """One uniform in [0, 1) per seed, position and index: words 0 and 1 at counter word c0 = 0.

    Parameters
    ----------
    seeds, positions : Tensor
        int64, any shapes that broadcast with each other and with `index`.
    index : Tensor or int
        The node or draft index, in [0, 65536).
    domain : int
        `ACCEPT`, `RESIDUAL`, `DRAFT` or `COUPLED`.
    stream : int
        In [0, 256): one for every level of a hierarchy of models.

    Returns
    -------
    Tensor
        float64, multiples of 2^-53.
    """
    last = torch.as_tensor(index, dtype=torch.int64) | domain << 16 | stream << 24
    first, second = _words(seeds, positions, torch.tensor(0), last)[..., :2].unbind(-1)
    pair = second << 32 | first
    return ((pair >> 11) & (2**53 - 1)).double() * 2.0**-53


def _words(seeds: Tensor, positions: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Philox words at counter (first, position low, position high, last), broadcast; [..., 4]."""
    words = (first, positions & MASK32, (positions >> 32) & MASK32, last)
    key = torch.stack([seeds & MASK32, (seeds >> 32) & MASK32], dim=-1)
    return philox4x32(torch.stack(torch.broadcast_tensors(*words), dim=-1), key)


def race_noise(seed: int, position: int, tokens: Tensor, stream: int = 0) -> Tensor:
    """Exponential variables of the COUPLED race, one for every token: ``-log1p(-u)``.

    u has all 64 bits: a lattice of 2^-24 has no exponential above 16.6 and many at 0, so that it
    draws rare tokens at a wrong rate.

    Parameters
    ----------
    seed, position : int
        int64 values; the position is the absolute one of the token that is raced for.
    tokens : Tensor
        int64 ids, each in [0, 2^31).
    stream : int
        In [0, 256).

    Returns
    -------
    Tensor
        float64, positive, of the shape of `tokens`.
    """
    last = torch.tensor(COUPLED << 16 | stream << 24)
    words = _words(torch.tensor(seed), torch.tensor(_int64(position)), tokens >> 1, last)
    odd = (tokens & 1).bool()
    first = torch.where(odd, words[..., 2], words[..., 0])
    second = torch.where(odd, words[..., 3], words[..., 1])
    pair = second.double() * 2.0**32 + first.double()  # rounded once, as a uint64 would be
    u = ((pair + 0.5) * 2.0**-64).clamp(max=1.0 - 2.0**-53)
    return -torch.log1p(-u)


def _int64(value: int) -> int:
    """Wrap to int64, as a sum of positions does on the device."""
    return (value + 2**63) % 2**64 - 2**63


def race(weights: Tensor, noise: Tensor) -> int:
    """Find the arg min of noise / weights over positive weights, the lowest index among ties.

    For independent exponential noise it is distributed as the weights, and two laws that race on
    the same noise give the same token with probability sum_j 1 / sum_i max(p_i / p_j, q_i / q_j),
    at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024).
    """
    return int((noise / weights).masked_fill(weights <= 0, INF).argmin())


def uniforms(seeds: Tensor, positions: Tensor, n: int, *, stream: int = 0) -> Tensor:
    """Compute the coins of `verify`, [B, n]: those of nodes 1 .. n - 1, then the final draw."""
    nodes = torch.arange(1, n, dtype=torch.int64)
    seeds_, positions_ = seeds.cpu()[:, None], positions.cpu()[:, None]
    coins = philox_uniforms(seeds_, positions_, nodes, ACCEPT, stream)
    final = philox_uniforms(seeds_, positions_, 0, RESIDUAL, stream)
    return torch.cat([coins, final], dim=1).to(seeds.device)


# -------------------------------------------------------------------------------------------------
# Draws in integers (DESIGN section 5)
# -------------------------------------------------------------------------------------------------


def law_weights(weights: Tensor) -> Tensor:
    """Integer weights ``floor(w * 2^40)`` of an unnormalised law, w in [0, 1]; ``[V]`` int64."""
    return (weights * 2.0**40).floor().long()


def residual_weights(positive: Tensor) -> Tensor:
    """Integer weights ``floor(w / S * 2^62)`` of a residual with sum S, all 0 if S = 0; [V]."""
    total = positive.sum()
    if not total > 0:
        return torch.zeros_like(positive, dtype=torch.int64)
    return (positive / total * 2.0**62).floor().long()


def inverse_cdf(weights: Tensor, u: float) -> int:
    """Find the lowest index whose inclusive prefix sum exceeds ``umulhi(u53 << 11, total)``.

    Parameters
    ----------
    weights : Tensor
        ``[V]`` int64, not negative, with a positive total below 2^63.
    u : float
        The uniform; u53 = floor(u * 2^53) clamped to [0, 2^53 - 1].

    Returns
    -------
    int
        An index of positive weight.
    """
    prefix = weights.cumsum(0)
    u53 = min(max(math.floor(u * 2.0**53), 0), 2**53 - 1)
    t = (u53 << 11) * int(prefix[-1]) >> 64
    return int(torch.searchsorted(prefix, t, right=True))


# -------------------------------------------------------------------------------------------------
# Laws (DESIGN section 3)
# -------------------------------------------------------------------------------------------------


class Filters(NamedTuple):
    """The sampling parameters of one request, as float64 reads its float32 and int values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def checked(self) -> tuple[Filters, bool]:
        """Give the parameters with the bad ones replaced by T = 1 or no filter, and if any was."""
        good = Filters(
            self.temperature if 0 <= self.temperature < INF else 1.0,
            self.top_k,
            self.top_p if self.top_p >= 0 else 1.0,  # NaN compares false
            self.min_p if self.min_p <= 1 else 0.0,
        )
        return good, good != self


class Law:
    """A logits row and the scalars that make it a law: p(x) = exp(scale * (l_x - max)) / z.

    Attributes
    ----------
    logits : Tensor
        ``[V]`` float64, the raw row.
    max, argmax : float, int
        The largest logit and the lowest index that has it.
    scale : float
        1 / T; +inf for T = 0, where the law is the point mass at `argmax`.
    cutoff : float
        Raw logits below it have probability 0. A float32 value.
    z, log_z : float
        The sum of exp(scale * (l_x - max)) over what is kept, and its logarithm.
    """

    def __init__(self, logits: Tensor, filters: Filters) -> None:
        temperature, top_k, top_p, min_p = filters
        self.logits = logits
        self.max = float(logits.max())
        self.argmax = int(logits.argmax())  # the first one, by torch's contract
        self.scale = 1.0 / temperature if temperature >= GREEDY_BELOW else INF
        self.cutoff = -INF if self.scale < INF else self.max
        if self.scale < INF:
            if 0 < top_k < len(logits):
                self.cutoff = float(logits.topk(top_k).values[-1])
            if top_p < 1:
                self.cutoff = _top_p_cutoff(logits, self.weights, top_p)
                del self.weights  # a cached property: the cutoff has changed
            if min_p > 0:
                lowest = self.max + temperature * math.log(min_p)
                self.cutoff = max(self.cutoff, _float32_above(lowest))
        self.z = float(self.weights.sum())
        self.log_z = math.log(self.z)

    @cached_property
    def weights(self) -> Tensor:
        """``[V]`` float64: exp(scale * (l - max)), 0 below the cutoff. The largest is 1."""
        if self.scale == INF:
            point = torch.zeros_like(self.logits)
            point[self.argmax] = 1.0
            return point
        weights = (self.scale * (self.logits - self.max)).exp()
        return weights.masked_fill(self.logits < self.cutoff, 0.0)

    @cached_property
    def probs(self) -> Tensor:
        """``[V]`` float64 probabilities."""
        return self.weights / self.z

    def log_prob(self, token: int) -> float:
        """Log p(token) in nats."""
        if self.scale == INF:
            return 0.0 if token == self.argmax else -INF
        logit = float(self.logits[token])
        if logit < self.cutoff:
            return -INF
        return self.scale * (logit - self.max) - self.log_z


def _top_p_cutoff(logits: Tensor, weights: Tensor, top_p: float) -> float:
    """Find the lowest logit such that the mass strictly above it is below ``top_p`` of the total.

    Masses are fixed-point, so that the answer depends on no order of summation. Inside a group of
    ties `above` is too large for all but the first, which decides: the value is the group's.
    """
    order = logits.argsort(descending=True)
    mass = law_weights(weights[order])
    above = mass.cumsum(0) - mass
    bound = int(top_p * float(int(mass.sum())))
    kept = max(int((above < bound).sum()), 1)  # the top entry always stays
    return float(logits[order[kept - 1]])


def _float32(value: float) -> float:
    """Round to the nearest float32."""
    return ctypes.c_float(value).value


def _float32_above(value: float) -> float:
    """Find the smallest float32 that is >= value: a float32 logit reaches both or neither."""
    rounded = torch.tensor(_float32(value), dtype=torch.float32)
    if float(rounded) < value:
        rounded = rounded.nextafter(torch.tensor(INF))
    return float(rounded)


def make_law(logits: Tensor, filters: Filters) -> Law | None:
    """Make the law of a float64 row ``[V]``, parameters in range; None: NaN, +inf or all -inf."""
    if not bool((logits < INF).all()) or float(logits.max()) == -INF:
        return None
    return Law(logits, filters)


@torch.no_grad()
def law(
    logits_row: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Probabilities of one row under temperature, top-k, top-p, min-p, in that order.

    Parameters
    ----------
    logits_row : Tensor
        ``[V]`` raw logits, any float dtype.
    temperature, top_k, top_p, min_p
        Of the row; rounded to float32 first, since that is what operators are given.

    Returns
    -------
    Tensor
        ``[V]`` float64, sum 1. All NaN where the row has no law or a parameter is out of range.
    """
    filters, bad = Filters(
        _float32(temperature), int(top_k), _float32(top_p), _float32(min_p)
    ).checked()
    found = None if bad else make_law(logits_row.double(), filters)
    return torch.full_like(logits_row, NAN, dtype=torch.float64) if found is None else found.probs


def _allowed(words: Tensor, tokens: Tensor) -> Tensor:
    """Whether each token is allowed by int32 words ``[W]``: bit j of word w is token 32 w + j.

    Parameters
    ----------
    words : Tensor
        ``[W]`` int32.
    tokens : Tensor
        int64 ids, not negative. Those of 32 W or above are not allowed.
    """
    place = (tokens >> 5).clamp(max=len(words) - 1)
    bit = (words.long()[place] >> (tokens & 31)) & 1
    return bit.bool() & (tokens < 32 * len(words))


def _masked(row: Tensor, words: Tensor | None, vocab: int, to: float = -INF) -> Tensor:
    """Give a row of logits (or probabilities) with `to` in place of what is not allowed.

    `vocab` is the target's: an id above it is never allowed where there is a mask.
    """
    if words is None:
        return row
    tokens = torch.arange(len(row))
    return row.masked_fill(~_allowed(words, tokens) | (tokens >= vocab), to)


class _DraftVocabulary:
    """Where the draft's entries are in the target's vocabulary: entry d is token ``ids[d]``.

    `ids` None: entry d is token d.
    """

    def __init__(self, ids: Tensor | None, vocab: int) -> None:
        self.ids = None if ids is None else ids.cpu().long()
        self.vocab = vocab
        self.is_valid = self.ids is None or (
            bool(((self.ids >= 0) & (self.ids < vocab)).all())
            and len(self.ids.unique()) == len(self.ids)
        )

    def masked(self, row: Tensor, words: Tensor | None, to: float = -INF) -> Tensor:
        """Give the draft's row ``[Vd]`` with `to` where its token is not allowed."""
        if self.ids is None or words is None:
            return _masked(row, words, self.vocab, to)
        return row.masked_fill(~_allowed(words, self.ids), to)

    def law(self, probs: Tensor) -> Tensor:
        """Give the draft's law ``[Vd]`` as a law of target tokens: 0 where it has no entry."""
        if self.ids is None:
            return probs
        return torch.zeros(self.vocab, dtype=probs.dtype).scatter_(0, self.ids, probs)

    def law_of(
        self, row: Tensor, words: Tensor | None, parameters: Filters | None
    ) -> Tensor | None:
        """Give the law of a draft's row as one of target tokens; None: it has none.

        ``parameters`` None: the row holds probabilities.
        """
        if parameters is None:
            row = self.masked(row, words, to=0.0)
            legal = bool(((row >= 0) & (row < INF)).all()) and float(row.sum()) > 0
            return self.law(row / row.sum()) if legal else None
        found = make_law(self.masked(row, words), parameters)
        return None if found is None else self.law(found.probs)


def _filters(
    temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Callable[[int], Filters]:
    """Read the parameters of request b out of [B] tensors, None being T = 1 or off."""
    given: dict[str, list[Any]] = {
        name: tensor.tolist()
        for name, tensor in zip(Filters._fields, (temperature, top_k, top_p, min_p), strict=True)
        if tensor is not None
    }
    return lambda b: Filters(**{name: values[b] for name, values in given.items()})


_Parameters: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _both_filters(
    target: _Parameters, draft: _Parameters
) -> tuple[Callable[[int], Filters], Callable[[int], Filters]]:
    """Collect the parameters of target and draft, the draft's by default the target's."""
    own = [t if d is None else d for t, d in zip(target, draft, strict=True)]
    return _filters(*target), _filters(*own)


def _words_of(allowed_mask: Tensor | None, *index: int) -> Tensor | None:
    """Mask words of one row, on the CPU."""
    return None if allowed_mask is None else allowed_mask[index].cpu()


@torch.no_grad()
def row_law(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
) -> RowLaw:
    """Compute the five scalars of every row; see `specdec_ext.row_law`."""
    filters = _filters(temperature, top_k, top_p, min_p)
    rows: list[tuple[float, float, float, float, int]] = []
    for r, row in enumerate(logits.cpu().double()):
        parameters, bad = filters(r).checked()
        masked = _masked(row, _words_of(allowed_mask, r), len(row))
        found = None if bad else make_law(masked, parameters)
        if found is None:
            rows.append((NAN, NAN, NAN, NAN, -1))
        else:
            rows.append((found.max, found.scale, found.cutoff, found.log_z, found.argmax))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64, torch.int64)
    made = (
        torch.tensor(c, dtype=d, device=logits.device) for c, d in zip(columns, dtypes, strict=True)
    )
    return RowLaw(*made)


@torch.no_grad()
def sample(
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
) -> SampleResult:
    """Draw one token per row; see `specdec_ext.sample`."""
    ids = torch.arange(logits.shape[-1])  # of the entries
    if draft_token_ids is not None:
        ids = draft_token_ids.cpu().long()
    legal = bool(((ids >= 0) & (ids < 2**31)).all())
    if uniforms is None:
        assert seeds is not None and positions is not None
        uniforms = philox_uniforms(seeds.cpu(), positions.cpu(), draft_index, domain, stream)
    filters = _filters(temperature, top_k, top_p, min_p)
    tokens: list[int] = []
    logprobs: list[float] = []
    for r, (row, u) in enumerate(zip(logits.cpu().double(), uniforms.tolist(), strict=True)):
        parameters, bad = filters(r).checked()
        words = _words_of(allowed_mask, r)
        if legal and words is not None:
            row = row.masked_fill(~_allowed(words, ids), -INF)
        found = make_law(row, parameters) if legal and not bad else None
        if found is None or (found.scale < INF and not 0 <= u < 1):
            tokens.append(-1)
            logprobs.append(NAN)
            continue
        if found.scale == INF:
            entry = found.argmax
        elif domain == COUPLED:
            assert seeds is not None and positions is not None
            position = int(positions[r]) + draft_index
            entry = race(found.weights, race_noise(int(seeds[r]), position, ids, stream))
        else:
            entry = inverse_cdf(law_weights(found.weights), u)
        tokens.append(int(ids[entry]))
        logprobs.append(found.log_prob(entry))
    return SampleResult(
        torch.tensor(tokens, dtype=torch.int64, device=logits.device),
        torch.tensor(logprobs, dtype=torch.float32, device=logits.device),
    )


@torch.no_grad()
def acceptance(
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
    """Compute sum min(p, q) row by row, [R] float32; see `specdec_ext.acceptance`."""
    vocab = target_logits.shape[-1]
    entries = _DraftVocabulary(draft_token_ids, vocab)
    target_filters, draft_filters = _both_filters(
        (temperature, top_k, top_p, min_p),
        (draft_temperature, draft_top_k, draft_top_p, draft_min_p),
    )
    out: list[float] = []
    rows = zip(target_logits.cpu().double(), draft_logits.cpu().double(), strict=True)
    for r, (target_row, draft_row) in enumerate(rows):
        target_parameters, bad = target_filters(r).checked()
        draft_parameters, draft_bad = draft_filters(r).checked()
        words = _words_of(allowed_mask, r)
        p = make_law(_masked(target_row, words, vocab), target_parameters)
        q = None
        if entries.is_valid:
            q = make_law(entries.masked(draft_row, words), draft_parameters)
        if bad or draft_bad or p is None or q is None:
            out.append(NAN)
            continue
        q_probs = entries.law(q.probs)
        both = min(vocab, len(q_probs))  # beyond it, one of the laws is 0
        out.append(float(torch.minimum(p.probs[:both], q_probs[:both]).sum()))
    return torch.tensor(out, dtype=torch.float32, device=target_logits.device)


# -------------------------------------------------------------------------------------------------
# The mathematics of a chain (DESIGN section 4)
# -------------------------------------------------------------------------------------------------


def residual(p: Tensor, q: Tensor | None, w: float, excluded: Sequence[int] = ()) -> Tensor:
    """Positive part of ``w p - q`` with the excluded tokens set to 0, not normalised.

    Parameters
    ----------
    p : Tensor
        ``[V]`` float64, the target law.
    q : Tensor or None
        ``[Vd]`` float64, the draft law; None is q = 0 (a deterministic draft token).
    w : float
        The inflow: 1 for the token rule.
    excluded : sequence of int
        Tokens already tried. An id of V or above has nothing to exclude.

    Returns
    -------
    Tensor
        ``[V]`` float64, not negative. May be all 0: then the extra token is drawn from p.
    """
    positive = w * p
    if q is not None:
        both = min(len(p), len(q))
        positive[:both] -= q[:both]
        positive.clamp_(min=0.0)
    for token in excluded:
        if token < len(positive):
            positive[token] = 0.0
    return positive


def _prob(law_probs: Tensor, token: int) -> float:
    """Probability of a token; 0 beyond the vocabulary."""
    return float(law_probs[token]) if token < len(law_probs) else 0.0


def _ratio(p: float, q: float) -> float:
    """Min(1, p / q) without the overflow of a division by almost nothing."""
    return 1.0 if p >= q else p / q


def _next_inflow(w: float, p: Tensor, q: Tensor | None, token: int) -> float:
    """Inflow of the child: min(1, w p/q) at a sampled token, w p at a deterministic one."""
    inflow = w * _prob(p, token)
    if q is None:
        return inflow
    return _ratio(inflow, _prob(q, token))


def _threshold(w: float, p: Tensor, q: Tensor | None, token: int) -> float:
    """Give h of an inner node: R / (R + (1 - w)), R the mass that its residual can emit."""
    if w == 1.0:
        return 1.0
    mass = w * (1.0 - _prob(p, token)) if q is None else float(residual(p, q, w).sum())
    return mass / (mass + (1.0 - w))


def chain_inflow(
    target_probs: Sequence[Tensor], draft_probs: Sequence[Tensor | None], tokens: Sequence[int]
) -> list[float]:
    """Inflows ``w_0 .. w_L`` of a chain: w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)).

    Parameters
    ----------
    target_probs : sequence of Tensor
        At least L laws ``[V]``; law i is the target's after i draft tokens.
    draft_probs : sequence of Tensor or None
        L laws ``[Vd]``; law i is the one that token i was drawn from, with q(x) > 0 there. None is
        a deterministic token: w_i = w_{i-1} p(x_i).
    tokens : sequence of int
        L draft tokens.
    """
    inflows = [1.0]
    for p, q, token in zip(target_probs, draft_probs, tokens, strict=False):
        inflows.append(_next_inflow(inflows[-1], p, q, token))
    return inflows


def chain_acceptance(
    target_probs: Sequence[Tensor], draft_probs: Sequence[Tensor | None], tokens: Sequence[int]
) -> list[float]:
    """Thresholds ``h_1 .. h_L`` of block verification (Sun et al., arXiv 2403.10444).

    The number of accepted tokens is the largest i with u_i < h_i, 0 if there is none. Parameters as
    for `chain_inflow`.
    """
    inflows = chain_inflow(target_probs, draft_probs, tokens)
    inner = [
        0.0 if w == 0.0 else _threshold(w, p, q, token)
        for w, p, q, token in zip(
            inflows[1:-1], target_probs[1:], draft_probs[1:], tokens[1:], strict=False
        )
    ]
    return inner + inflows[1:][-1:]


# -------------------------------------------------------------------------------------------------
# verify: what the rules read
# -------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What decides about one draft token: the target law, the draft law (None: none), the token."""

    law: Law
    q: Tensor | None
    token: int


class _Verdict(NamedTuple):
    """What a rule decides: accepted tokens, h of positions it looked at, and the extra token."""

    accepted: int
    accept_probs: list[float]
    token: int


class _Chain:
    """One request of `verify`, as the rules see it. Rows are read when a rule asks for them.

    Attributes
    ----------
    length : int
        L, the number of usable draft tokens. Shrinks when a rule reaches a row that ends the draft.
    status : int
        Status bits found so far.
    """

    def __init__(
        self,
        tokens: list[int],
        kinds: list[int],
        target_row: Callable[[int], Tensor | None],
        draft_law: Callable[[int], Tensor | None],
        filters: Filters,
        coins: list[float],
        noise: Callable[[int], Tensor],
        status: int,
        rule: Rule,
        options: _Options,
    ) -> None:
        self.tokens, self.kinds, self.rule = tokens, kinds, rule
        self.target_row, self.draft_law = target_row, cache(draft_law)
        self.filters, self.coins, self.final = filters, coins[:-1], coins[-1]
        self.noise = noise
        self.greedy = filters.temperature < GREEDY_BELOW
        self.length, self.status, self.options = len(tokens), status, options
        self.law = cache(self._law)
        self.raw_law = cache(self._raw_law)

    def _law(self, i: int) -> Law | None:
        """Law of row i under the request's parameters; None: the row has no law."""
        row = self.target_row(i)
        return None if row is None else make_law(row, self.filters)

    def _raw_law(self, i: int) -> Law | None:
        """Law of row i at T = 1 without filters."""
        row = self.target_row(i)
        return None if row is None else make_law(row, Filters())

    def step(self, i: int) -> _Step | None:
        """Read what decides about draft token i + 1; None: node i is a leaf, the chain ends there.

        A chain ends at its last token, at a target row without a law, and where a sampled token
        has no draft law or q(x) = 0: nothing was sampled from q there. T = 0 never reads q, nor do
        rules without a use for it.
        """
        law = self.law(i)
        if law is not None and i < self.length:
            reads_draft = self.rule.reads_draft_law and not self.greedy
            if not reads_draft or self.kinds[i] == KIND_DETERMINISTIC:
                return _Step(law, None, self.tokens[i])
            q = self.draft_law(i)
            if q is not None and _prob(q, self.tokens[i]) > 0:
                return _Step(law, q, self.tokens[i])
            self.status |= STATUS_NO_DRAFT_LAW
        self.length = i
        return None

    def draw(self, i: int) -> int:
        """Draw from the target law of row i; token 0 where it has none."""
        law = self.law(i)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return inverse_cdf(law_weights(law.weights), self.final)

    def draw_extra(self, i: int, w: float = 1.0) -> int:
        """Draw the token after i accepted ones: bonus at the end, else [w p - q]+ without x."""
        if i == self.length:
            return self.draw(i)
        step = self.step(i)
        assert step is not None
        p, q, x = step.law.probs, step.q, step.token
        weights = residual_weights(residual(p, q, 1.0 if q is None else w, [x]))
        # p and q can be equal to the last bit, or p all on x: then any token of p is as good.
        return inverse_cdf(weights, self.final) if int(weights.sum()) > 0 else self.draw(i)

    def race(self, i: int) -> int:
        """Race for the token after i accepted ones, on noise of that place; token 0: no law.

        T = 0 needs no case of its own: only the arg max takes part.
        """
        law = self.law(i)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return race(law.weights, self.noise(i))

    def argmax(self, i: int) -> int:
        """Give the arg max of row i; token 0 where it has no law."""
        law = self.law(i)
        if law is None:
            self.status |= STATUS_NO_TARGET_LAW
            return 0
        return law.argmax

    def logprob(self, i: int, token: int) -> float:
        """Log-probability to report for a token that row i emitted."""
        law = self.raw_law(i) if self.options.raw_logprobs else self.law(i)
        if law is None:
            return NAN
        # T = 0 reports 0 for any token: the lenient rule also accepts others than the arg max.
        return 0.0 if law.scale == INF else law.log_prob(token)


def _first_failure(
    chain: _Chain, test: Callable[[int, _Step], tuple[bool, float]]
) -> tuple[int, list[float]]:
    """Accept tokens one by one, stop at the first that fails `test`.

    `test` gives the decision about one token and the probability of accepting it. Returns the
    number of accepted tokens and the probabilities of those looked at (`full_accept_probs` looks at
    all).
    """
    accepted: int | None = None
    probs: list[float] = []
    i = 0
    while (step := chain.step(i)) is not None:
        accept, prob = test(i, step)
        probs.append(prob)
        if not accept and accepted is None:
            accepted = i
        if not accept and not chain.options.full_accept_probs:
            break
        i += 1
    return chain.length if accepted is None else accepted, probs


# -------------------------------------------------------------------------------------------------
# verify: one function per rule
# -------------------------------------------------------------------------------------------------

_Decide: TypeAlias = Callable[[_Chain], _Verdict]

#: What each rule decides, by its name.
RULES: dict[str, _Decide] = {}


def _rule(name: str) -> Callable[[_Decide], _Decide]:
    """Make the function below it what `verify` does under a rule."""

    def enter(decide: _Decide) -> _Decide:
        RULES[name] = decide
        return decide

    return enter


@_rule("block")
def _block(chain: _Chain) -> _Verdict:
    """Block verification: all coins are flipped, the last success wins (Sun et al., 2403.10444).

    T = 0 needs no case of its own: p is a point mass, q is not read, so w and h are 0 or 1.
    """
    inflows: list[float] = [1.0]
    thresholds: list[float] = []
    for i in range(chain.length + 1):
        w = inflows[i]
        if w == 0.0:  # no inflow: h = 0 in all that follows, and no row is looked at
            thresholds.append(0.0)
            inflows.append(0.0)
        elif (step := chain.step(i)) is None:
            thresholds.append(w)
            break
        else:
            p, q, x = step.law.probs, step.q, step.token
            thresholds.append(_threshold(w, p, q, x))
            inflows.append(_next_inflow(w, p, q, x))
    heads = [i for i in range(1, len(thresholds)) if chain.coins[i - 1] < thresholds[i]]
    accepted = max(heads, default=0)
    return _Verdict(accepted, thresholds[1:], chain.draw_extra(accepted, inflows[accepted]))


@_rule("token")
def _token(chain: _Chain) -> _Verdict:
    """Token-wise rejection (Leviathan et al., arXiv 2211.17192, Algorithm 1)."""

    def test(i: int, step: _Step) -> tuple[bool, float]:
        p, u = _prob(step.law.probs, step.token), chain.coins[i]
        if step.q is None:
            return u < p, p
        q = _prob(step.q, step.token)
        return u * q < p, _ratio(p, q)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.draw_extra(accepted))


@_rule("greedy")
def _greedy(chain: _Chain) -> _Verdict:
    """Accept what the arg max would have emitted. Reads neither q nor a coin."""

    def test(i: int, step: _Step) -> tuple[bool, float]:
        accept = step.token == step.law.argmax
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.argmax(accepted))


@_rule("lenient")
def _lenient(chain: _Chain) -> _Verdict:
    """Token-wise with l q in place of q (Leviathan et al., appendix A.5): not lossless.

    At T = 0: accept p(x) >= l max p on the raw softmax, correct by the arg max.
    """
    lenience = chain.options.lenience

    def test(i: int, step: _Step) -> tuple[bool, float]:
        if chain.greedy:
            law, x = step.law, step.token
            accept = x < len(law.logits) and math.exp(float(law.logits[x]) - law.max) >= lenience
            return accept, float(accept)
        p, u = _prob(step.law.probs, step.token), chain.coins[i]
        q = lenience * (1.0 if step.q is None else _prob(step.q, step.token))
        return u * q < p, _ratio(p, q)

    accepted, probs = _first_failure(chain, test)
    if chain.greedy:
        return _Verdict(accepted, probs, chain.argmax(accepted))
    return _Verdict(accepted, probs, chain.draw_extra(accepted))


@_rule("top_beta")
def _top_beta(chain: _Chain) -> _Verdict:
    """Accept near the top of the raw row (Xia et al., eq. 8-10), else the top-1: not lossless."""
    beta, tau = chain.options.beta, chain.options.tau

    def test(i: int, step: _Step) -> tuple[bool, float]:
        law, x = step.law, step.token
        if x >= len(law.logits):
            return False, 0.0
        rank = 1 + int((law.logits > law.logits[x]).sum())
        accept = rank <= beta and law.max - float(law.logits[x]) <= tau
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.argmax(accepted))


@_rule("typical")
def _typical(chain: _Chain) -> _Verdict:
    """Accept p(x) > min(epsilon, delta exp(-H(p))) (Medusa, arXiv 2401.10774): not lossless."""
    if chain.greedy:
        return _greedy(chain)
    epsilon, delta = chain.options.epsilon, chain.options.delta

    def test(i: int, step: _Step) -> tuple[bool, float]:
        p = step.law.probs
        entropy = -float(torch.special.xlogy(p, p).sum())
        accept = _prob(p, step.token) > min(epsilon, delta * math.exp(-entropy))
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.draw(accepted))


@_rule("coupled")
def _coupled(chain: _Chain) -> _Verdict:
    """Accept what the target's own race would have emitted (Daliri, Musco, Suresh 2024).

    The noise belongs to the place in the sequence, so that the tokens are those of plain sampling
    by the same race, whatever was drafted. Reads neither q nor a coin.
    """

    def test(i: int, step: _Step) -> tuple[bool, float]:
        accept = step.token == chain.race(i)
        return accept, float(accept)

    accepted, probs = _first_failure(chain, test)
    return _Verdict(accepted, probs, chain.race(accepted))


# -------------------------------------------------------------------------------------------------
# verify
# -------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The scalar arguments of `verify`."""

    lenience: float
    beta: int
    tau: float
    epsilon: float
    delta: float
    full_accept_probs: bool
    raw_logprobs: bool


@torch.no_grad()
def verify(
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
) -> VerifyResult:
    """Verify chains of draft tokens; see `specdec_ext.verify`."""
    if rule not in CHAIN_RULES:
        raise ValueError(f"verify: rule must be one of {', '.join(CHAIN_RULES)}, got {rule!r}")
    traits = contract.RULES[rule]
    batch, gamma = draft_tokens.shape
    vocab = target_logits.shape[-1]
    draft = draft_logits if draft_logits is not None else draft_probs
    # A map that is not read cannot be wrong.
    entries = _DraftVocabulary(draft_token_ids if traits.reads_draft_law else None, vocab)
    ids = vocab  # draft tokens are below it
    if draft is not None and draft_token_ids is None:
        ids = max(vocab, draft.shape[-1])
    raw_logprobs = raw_logprobs or traits.raw_logprobs
    options = _Options(lenience, beta, tau, epsilon, delta, full_accept_probs, raw_logprobs)

    target_filters, draft_filters = _both_filters(
        (temperature, top_k, top_p, min_p),
        (draft_temperature, draft_top_k, draft_top_p, draft_min_p),
    )
    if seeds is not None:
        assert positions is not None
        uniforms = _coins(seeds, positions, gamma + 1, stream=stream)

    tokens = torch.full((batch, gamma + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    logprobs = torch.full((batch, gamma + 1), NAN, dtype=torch.float32)
    accept_probs = torch.full((batch, gamma), NAN, dtype=torch.float32)
    status = torch.zeros(batch, dtype=torch.int32)

    for b in range(batch):
        bits = 0 if entries.is_valid else STATUS_PARAMETER_OUT_OF_RANGE

        def target_row(i: int, b: int = b) -> Tensor | None:
            row = _row(target_logits, target_rows, b, i)
            return None if row is None else _masked(row, _words_of(allowed_mask, b, i), vocab)

        def noise(i: int, b: int = b) -> Tensor:
            assert seeds is not None and positions is not None
            position = int(positions[b]) + i
            return race_noise(int(seeds[b]), position, torch.arange(vocab), stream)

        # The columns that can be used at all: before the end, before the first -1 or invalid id.
        given_length = gamma if draft_lengths is None else int(draft_lengths[b])
        if not 0 <= given_length <= gamma:
            bits |= STATUS_PARAMETER_OUT_OF_RANGE
        ids_read: list[int] = []
        kinds: list[int] = []
        for i in range(min(max(given_length, 0), gamma)):
            token = int(draft_tokens[b, i])
            if token == -1:
                break
            kind = int(draft is not None) if draft_kinds is None else int(draft_kinds[b, i])
            if not 0 <= token < ids or kind not in (KIND_DETERMINISTIC, KIND_SAMPLED):
                bits |= STATUS_INVALID_DRAFT_TOKEN
                break
            ids_read.append(token)
            kinds.append(kind)

        # The parameters.
        filters, draft_parameters = Filters(), Filters()
        if rule == "greedy":
            filters = Filters(temperature=0.0)
        elif not traits.ignores_sampling:
            filters, bad = target_filters(b).checked()
            draft_parameters, draft_bad = draft_filters(b).checked()
            if bad or (draft_bad and draft_logits is not None):
                bits |= STATUS_PARAMETER_OUT_OF_RANGE

        def draft_law(i: int, b: int = b, parameters: Filters = draft_parameters) -> Tensor | None:
            row = None if draft is None else _row(draft, draft_rows, b, i)
            if row is None or not entries.is_valid:
                return None
            words = _words_of(allowed_mask, b, i)
            return entries.law_of(row, words, None if draft_probs is not None else parameters)

        # The coins: those of the usable columns, and the last slot for the final draw.
        coins = [0.0] * (gamma + 1)
        if traits.takes_coins and filters.temperature >= GREEDY_BELOW:
            assert uniforms is not None
            given = uniforms[b].tolist()
            for slot in [*range(len(ids_read)), gamma]:
                coins[slot] = _clamped(given[slot])
                if coins[slot] != given[slot]:
                    bits |= STATUS_PARAMETER_OUT_OF_RANGE

        chain = _Chain(
            ids_read, kinds, target_row, draft_law, filters, coins, noise, bits, traits, options
        )
        accepted, probs, extra = RULES[rule](chain)
        emitted = ids_read[:accepted] + [extra]
        tokens[b, : accepted + 1] = torch.tensor(emitted)
        num_accepted[b] = accepted
        accept_probs[b, : len(probs)] = torch.tensor(probs, dtype=torch.float64)
        for i, token in enumerate(emitted):
            logprobs[b, i] = chain.logprob(i, token)
        status[b] = chain.status

    device = target_logits.device
    return VerifyResult(
        tokens.to(device),
        num_accepted.to(device),
        logprobs.to(device),
        accept_probs.to(device),
        status.to(device),
    )


_coins = uniforms  # `uniforms` is also the name of an argument


def _row(table: Tensor, rows: Tensor | None, b: int, i: int) -> Tensor | None:
    """Row i of request b as float64 on the CPU; None where a packed table has no such row."""
    if rows is None:
        return table[b, i].cpu().double()
    r = int(rows[b, i])
    return table[r].cpu().double() if 0 <= r < len(table) else None


def _clamped(u: float) -> float:
    """Clamp to [0, 1 - 2^-53]; NaN becomes 0."""
    return 0.0 if math.isnan(u) else min(max(u, 0.0), 1.0 - 2.0**-53)


# -------------------------------------------------------------------------------------------------
# Draft trees: masks, caches, attention
# -------------------------------------------------------------------------------------------------


def tree_size(parents: Sequence[int]) -> int:
    """Count the nodes that are no padding; 0 where parents are no tree (DESIGN section 6)."""
    size = next((v for v, parent in enumerate(parents) if v > 0 and parent == -1), len(parents))
    legal = parents[0] == -1 and all(0 <= parents[v] < v for v in range(1, size))
    return size if legal and all(parent == -1 for parent in parents[size:]) else 0


@torch.no_grad()
def tree_mask(parents: Tensor) -> TreeMaskResult:
    """Ancestor bits and depths; see `specdec_ext.tree_mask`."""
    batch, nodes = parents.shape
    seen = torch.zeros(batch, nodes, (nodes + 63) // 64 * 64, dtype=torch.bool)
    depths = torch.full((batch, nodes), -1, dtype=torch.int64)
    status = torch.zeros(batch, dtype=torch.int32)
    for b, row in enumerate(parents.tolist()):
        size = tree_size(row)
        if size == 0:
            status[b], size = STATUS_INVALID_TREE, 1
        for v in range(size):
            if v > 0:
                seen[b, v] = seen[b, row[v]]
            seen[b, v, v] = True
            depths[b, v] = seen[b, v].sum() - 1
    place = torch.ones(64, dtype=torch.int64) << torch.arange(64)  # the last one is negative
    words = (seen.unflatten(2, (-1, 64)) * place).sum(3)
    return TreeMaskResult(*(t.to(parents.device) for t in (words, depths, status)))


@torch.no_grad()
def compact_kv(
    k_cache: Tensor, v_cache: Tensor, path: Tensor, num_accepted: Tensor, seq_lens: Tensor
) -> Tensor:
    """Move the accepted path's keys and values, in place; see `specdec_ext.compact_kv`."""
    status = []
    places = k_cache.shape[-3]
    for b, (nodes, accepted, start) in enumerate(
        zip(path.tolist(), num_accepted.tolist(), seq_lens.tolist(), strict=True)
    ):
        if not (0 <= accepted <= len(nodes) and 0 <= start <= places):
            status.append(STATUS_PARAMETER_OUT_OF_RANGE)
            continue
        kept = [0, *nodes[:accepted]]
        ascending = all(v < later for v, later in zip(kept, kept[1:], strict=False))
        if not ascending or (accepted > 0 and kept[-1] >= places - start):
            status.append(STATUS_INVALID_TREE)
            continue
        for moving in (k_cache, v_cache):
            rows = moving.select(-4, b)
            moved = rows[..., [start + v for v in kept[1:]], :, :]
            rows[..., start + 1 : start + 1 + accepted, :, :] = moved
        status.append(0)
    return torch.tensor(status, dtype=torch.int32, device=k_cache.device)


@torch.no_grad()
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Softmax over the prefix and the ancestors; see `specdec_ext.tree_attention`."""
    nodes, heads, size = q.shape[1:]
    node = torch.arange(nodes, device=q.device)
    out = torch.full(q.shape, NAN, dtype=q.dtype, device=q.device)
    for b, start in enumerate(seq_lens.tolist()):
        if not 0 <= start <= k_cache.shape[1] - nodes:
            continue
        group = heads // k_cache.shape[2]
        keys, values = (
            held[b, : start + nodes].double().repeat_interleave(group, dim=1)
            for held in (k_cache, v_cache)
        )
        scores = torch.einsum("nhd,lhd->hnl", q[b].double(), keys)
        scores *= size**-0.5 if scale is None else scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        seen = (ancestors[b][:, node // 64] >> (node % 64) & 1).bool()
        scores[:, :, start:].masked_fill_(~seen, -INF)
        found = torch.einsum("hnl,lhd->nhd", scores.softmax(2), values)
        out[b] = torch.where(seen.any(1)[:, None, None], found, 0.0).to(q.dtype)
    return out


def __getattr__(name: str) -> Any:
    # Trees have a text of their own, which builds on this one.
    if name == "verify_tree":
        from .reference_tree import verify_tree

        return verify_tree
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
