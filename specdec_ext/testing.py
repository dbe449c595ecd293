"""Tools to test a verifier: exact laws, close-or-explained comparison, case generators.

Everything takes *any* callable with the signature of `specdec_ext.verify` (or of
``torch.ops.specdec.verify``), so that a decoding loop, a new backend or a deliberately wrong
verifier can be examined in the same way.

Exact laws
    `verify` is a pure function of its uniforms, and the emitted tokens are a step function of each
    of them. `exact_law` enumerates the draft chains, locates the threshold of each coin and the
    steps of the final draw by bisection, and so integrates out all randomness: the law of what is
    emitted comes out to about 1e-12, with no sampling error. Losslessness is then an equality, not
    a hypothesis test.
Close or explained
    Backends round differently, so two correct ones may differ where a coin falls within rounding of
    its threshold. `assert_tokens_match` excuses a mismatch only if every decision in the outcome is
    admissible in float64 up to a tolerance (`explain_outcome`); nothing else is excused.
Cases
    `make_case` draws seeded inputs over shapes, dtypes, strides, filters, temperatures, masks and
    ragged lengths.

The laws here are computed by sorting, on purpose: a second formulation, independent of the
selection that the operators and `specdec_ext.reference` use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ExactLaw",
    "VerifyCase",
    "VerifyOutcome",
    "assert_tokens_match",
    "draw_interval",
    "exact_law",
    "explain_outcome",
    "filtered_law",
    "joint_law",
    "make_case",
    "pack_mask",
    "philox4x32",
    "philox_exponentials",
    "philox_uniform",
    "step_law",
    "toy_models",
    "tv_bound",
]

_GREEDY_TEMPERATURE = 1e-6
_BEFORE_ONE = 1.0 - 2.0**-53

_PER_REQUEST = frozenset(
    "draft_tokens draft_kinds draft_lengths target_rows draft_rows uniforms seeds positions "
    "temperature top_k top_p min_p draft_temperature draft_top_k draft_top_p draft_min_p "
    "allowed_mask".split()
)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


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


Verifier = Callable[..., Any]


@dataclass(frozen=True)
class VerifyCase:
    """Keyword arguments of one call of `verify`, with a name for messages.

    Attributes
    ----------
    inputs : mapping
        The arguments, by name.
    name : str
        What the case is about.
    """

    inputs: Mapping[str, Any]
    name: str = ""

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

    def replace(self, **changes: Any) -> VerifyCase:
        """Give the case with other arguments; None drops one."""
        merged = {**self.inputs, **changes}
        return VerifyCase({k: v for k, v in merged.items() if v is not None}, self.name)

    def select(self, requests: Sequence[int]) -> VerifyCase:
        """Give the case with only these requests, in this order (repeats allowed).

        Packed logits and draft_token_ids, shared by all requests, stay as they are.
        """
        index = torch.tensor(list(requests), dtype=torch.int64)
        per_request = set(_PER_REQUEST)
        if "target_rows" not in self.inputs:
            per_request.add("target_logits")
        if "draft_rows" not in self.inputs:
            per_request.update(("draft_logits", "draft_probs"))
        chosen = {
            name: value.index_select(0, index.to(value.device))
            if name in per_request and isinstance(value, Tensor)
            else value
            for name, value in self.inputs.items()
        }
        return VerifyCase(chosen, self.name)


# -------------------------------------------------------------------------------------------------
# Randomness
# -------------------------------------------------------------------------------------------------


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in plain integers, from Salmon et al. (SC 2011).

    Parameters
    ----------
    counter : sequence of int
        Four words in [0, 2^32).
    key : sequence of int
        Two words in [0, 2^32).

    Returns
    -------
    tuple of int
        Four words in [0, 2^32).

    Examples
    --------
    The first of the Random123 known-answer vectors:

    >>> [f"{word:08x}" for word in philox4x32([0, 0, 0, 0], [0, 0])]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    mask = 0xFFFFFFFF
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right & mask, (left >> 32) ^ d ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return a, b, c, d


def philox_uniform(seed: int, position: int, index: int, domain: int, stream: int = 0) -> float:
    """Give the uniform that operators draw at a counter; a multiple of 2^-53 in [0, 1).

    Parameters
    ----------
    seed, position : int
        int64 values, negative ones included.
    index : int
        Node of a coin, 0 for the final draw, or draft index; in [0, 65536).
    domain : int
        0 a coin, 1 the final draw, 2 a draft token.
    stream : int
        Level in a hierarchy of models, in [0, 256).

    Examples
    --------
    >>> philox_uniform(seed=0, position=0, index=0, domain=0) == (0xE169C58D6627E8D5 >> 11) / 2**53
    True
    """
    mask = 0xFFFFFFFF
    last = index | domain << 16 | stream << 24
    words = philox4x32(
        [0, position & mask, position >> 32 & mask, last], [seed & mask, seed >> 32 & mask]
    )
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53


def philox_exponentials(
    seed: int, position: int, tokens: Sequence[int], stream: int = 0
) -> list[float]:
    """Give the noise of tokens in a COUPLED race, in plain integers but for the logarithm.

    Parameters
    ----------
    seed : int
        An int64 value.
    position : int
        The absolute position of the token that is raced for; modulo 2^64.
    tokens : sequence of int
        Ids in [0, 2^31).
    stream : int
        Level in a hierarchy of models, in [0, 256).

    Examples
    --------
    >>> [round(e, 4) for e in philox_exponentials(seed=0, position=0, tokens=[0, 1, 2])]
    [0.7784, 1.1083, 1.0563]
    """
    mask = 0xFFFFFFFF
    found: list[float] = []
    pairs: dict[int, tuple[int, int, int, int]] = {}  # one counter serves two tokens
    for token in tokens:
        pair, odd = divmod(token, 2)
        if pair not in pairs:
            pairs[pair] = philox4x32(
                [pair, position & mask, position >> 32 & mask, 3 << 16 | stream << 24],
                [seed & mask, seed >> 32 & mask],
            )
        words = pairs[pair][2:] if odd else pairs[pair][:2]
        u = (float(words[1] << 32 | words[0]) + 0.5) * 2.0**-64
        found.append(-math.log1p(-min(u, _BEFORE_ONE)))
    return found


# -------------------------------------------------------------------------------------------------
# Masks and reduced vocabularies
# -------------------------------------------------------------------------------------------------


def pack_mask(allowed: Tensor, beyond: Tensor | bool = False) -> Tensor:
    """Pack booleans as ``allowed_mask`` wants them: bit j of word w is token 32 w + j.

    Parameters
    ----------
    allowed : Tensor
        ``[..., V]`` bool.
    beyond : bool or Tensor
        Bits of the last word that no token has; ``[..., 32 * ceil(V/32) - V]`` bool or one value.

    Returns
    -------
    Tensor
        ``[..., ceil(V/32)]`` int32.

    Examples
    --------
    >>> pack_mask(torch.tensor([True, False, True])).tolist()
    [5]
    >>> allowed = torch.zeros(40, dtype=torch.bool)
    >>> allowed[31] = allowed[33] = True
    >>> pack_mask(allowed).tolist()
    [-2147483648, 2]
    """
    *lead, vocab = allowed.shape
    bits = torch.zeros(*lead, (vocab + 31) // 32 * 32, dtype=torch.bool)
    bits[..., :vocab] = allowed
    bits[..., vocab:] = beyond
    words = (bits.unflatten(-1, (-1, 32)) * 2 ** torch.arange(32)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _unpack_mask(words: Tensor, vocab: int) -> Tensor:
    """Booleans ``[V]`` of words ``[W]``."""
    text = "".join(f"{word % 2**32:032b}"[::-1] for word in words.tolist())
    return torch.tensor([bit == "1" for bit in text[:vocab]])


def _forbid(
    values: Tensor, allowed: Tensor | None, ids: Tensor | None, fill: float = -math.inf
) -> Tensor:
    """Values of tokens (or of entries that `ids` names), `fill` where the token is not allowed.

    `values` are ``[..., V or Vd]``, `allowed` ``[..., V]``: an entry beyond V is never allowed.
    """
    if allowed is None:
        return values
    if ids is None:
        missing = max(values.shape[-1] - allowed.shape[-1], 0)
        allowed = torch.nn.functional.pad(allowed, (0, missing))[..., : values.shape[-1]]
    else:
        allowed = allowed[..., ids.long()]
    return values.masked_fill(~allowed, fill)


def _of_tokens(probs: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Probabilities ``[..., Vd]`` of draft entries as ``[..., V]`` of target tokens."""
    if ids is None:
        return probs
    found = torch.zeros(*probs.shape[:-1], vocab, dtype=probs.dtype)
    return found.index_add_(-1, ids.long().cpu(), probs)


# -------------------------------------------------------------------------------------------------
# Laws, by sorting
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Law:
    """A row's law in float64; `greedy` is T = 0, the point mass at `argmax`."""

    logits: Tensor
    probs: Tensor
    log_probs: Tensor
    argmax: int
    greedy: bool


class _Params(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def updated(self, given: Mapping[str, Any]) -> _Params:
        """Replace what is given and not None."""
        return self._replace(**{k: v for k, v in given.items() if v is not None})

    def cleaned(self) -> _Params:
        """Out-of-range values replaced: T = 1, no filter."""
        temperature, top_k, top_p, min_p = self
        return _Params(
            temperature if 0 <= temperature < math.inf else 1.0,
            top_k,
            top_p if top_p >= 0 else 1.0,
            min_p if min_p <= 1 else 0.0,
        )


def _top_p_cutoffs(
    logits: Tensor, weights: Tensor, top_p: float, tol: float, tokens: Sequence[int]
) -> list[float]:
    """Cutoffs that top-p may choose: the exact one first, then others within `tol` of a tie.

    Near-ties may be many. What tells them apart is whether each of `tokens` is kept, and, barely,
    how much mass is: both ways for each token, and a few over the whole range.
    """
    values, inverse = torch.unique(logits, return_inverse=True)  # ascending
    mass = torch.zeros(len(values), dtype=torch.float64).index_add_(0, inverse, weights).flip(0)
    above = (mass.cumsum(0) - mass) / mass.sum()
    values = values.flip(0)
    groups = int((mass > 0).sum())  # -inf, or filtered by top-k: not there
    exact, lowest, highest = (
        max(int((above[:groups] < bound).sum()), 1) for bound in (top_p, top_p - tol, top_p + tol)
    )
    counts = {exact, exact - 1, exact + 1}
    counts.update(round(lowest + (highest - lowest) * k / 8) for k in range(9))
    for token in tokens:
        if token < len(logits):
            place = len(values) - 1 - int(inverse[token])
            counts.update((place, place + 1))  # the most that leave it out, the least that keep it
    kept = sorted((k for k in counts if lowest <= k <= highest), key=lambda k: abs(k - exact))
    return [float(values[k - 1]) for k in kept]


def _candidate_laws(
    row: Tensor, params: _Params, tol: float, tokens: Sequence[int] = ()
) -> list[_Law]:
    """Give the law of a row, then the laws that differ by one filter decision within `tol`.

    `tokens` are the ones whose membership matters. Empty: the row has no law (NaN, +inf, all -inf).
    """
    logits = row.detach().cpu().double()
    top = float(logits.max())
    if not bool((logits < math.inf).all()) or top == -math.inf:
        return []
    argmax = int((logits == top).nonzero()[0])
    temperature, top_k, top_p, min_p = params
    if temperature < _GREEDY_TEMPERATURE:
        probs = torch.zeros_like(logits)
        probs[argmax] = 1.0
        return [_Law(logits, probs, probs.log(), argmax, True)]
    exponents = (logits - top) / temperature
    weights = exponents.exp()
    lowest = -math.inf
    if 0 < top_k < len(logits):
        lowest = float(logits.sort(descending=True).values[top_k - 1])
    nucleus = [-math.inf]
    if top_p < 1:
        nucleus = _top_p_cutoffs(logits, weights * (logits >= lowest), top_p, tol, tokens)
    floor = [-math.inf]
    if min_p > 0:
        exact = top + temperature * math.log(min_p)
        slack = max(abs(exact), abs(top)) * 2.0**-22
        # Only a logit inside the slack makes the choice visible.
        visible = bool(((logits - exact).abs() <= slack).any())
        floor = [exact, exact - slack, exact + slack] if visible else [exact]
    laws: list[_Law] = []
    seen: set[int] = set()
    for a, b in itertools.product(nucleus, floor):
        cutoff = min(max(lowest, a, b), top)  # the top entry and its ties always stay
        keep = logits >= cutoff
        count = int(keep.sum())
        if count in seen:
            continue
        seen.add(count)
        kept = weights * keep
        log_probs = torch.where(keep, exponents - math.log(float(kept.sum())), -math.inf)
        laws.append(_Law(logits, kept / kept.sum(), log_probs, argmax, False))
    return laws


def filtered_law(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Probabilities of logits under temperature, then top-k, top-p, min-p, in float64.

    Parameters
    ----------
    logits : Tensor
        ``[..., V]``, any float dtype.
    temperature, top_k, top_p, min_p
        Python scalars. Temperature and probabilities are rounded to float32 first, since that is
        what operators are given.

    Returns
    -------
    Tensor
        ``[..., V]`` float64.

    Raises
    ------
    ValueError
        A row has no law (NaN, +inf, all -inf).

    Examples
    --------
    >>> logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    >>> filtered_law(logits, top_k=2)
    tensor([0.6667, 0.3333, 0.0000, 0.0000], dtype=torch.float64)
    >>> filtered_law(logits, top_p=0.8)  # 0.75 lies above the ties, so both are kept
    tensor([0.5000, 0.2500, 0.1250, 0.1250], dtype=torch.float64)
    """
    return _law_table(logits, _Params(temperature, top_k, top_p, min_p))


def _law_table(logits: Tensor, params: _Params) -> Tensor:
    singles = torch.tensor([params.temperature, params.top_p, params.min_p]).tolist()  # float32
    params = _Params(singles[0], params.top_k, singles[1], singles[2])
    rows = logits.reshape(-1, logits.shape[-1])
    found = [_candidate_laws(row, params, 0.0) for row in rows]
    if not all(found):
        raise ValueError("filtered_law: a row of NaN, +inf or all -inf has no law")
    return torch.stack([laws[0].probs for laws in found]).reshape(logits.shape)


# -------------------------------------------------------------------------------------------------
# Exact laws
# -------------------------------------------------------------------------------------------------


def step_law(
    outcome: Callable[[Tensor, Tensor], Tensor],
    rows: int,
    bits: int = 40,
    grid: int = 8,
) -> dict[tuple[int, int], float]:
    """Exact law of step functions of one uniform, by bisection.

    Parameters
    ----------
    outcome : callable
        ``outcome(row, u)``: int64 codes ``[M]`` of what row ``row[m]`` gives at uniform ``u[m]``
        (float64, [0, 1)). It must be piecewise constant in u.
    rows : int
        Number of functions.
    bits : int
        Steps are located on the lattice of multiples of ``2^-bits`` (at most 53).
    grid : int
        Starting points per row; two steps between neighbours that cancel would be missed. An
        inverse CDF cannot have such a pair.

    Returns
    -------
    dict
        Probability of each ``(row, code)``.

    Examples
    --------
    >>> law = step_law(lambda row, u: (u >= 0.3).long(), rows=1)
    >>> {code: round(mass, 9) for (_, code), mass in law.items()}
    {0: 0.3, 1: 0.7}
    """
    size = 1 << bits
    starts = torch.tensor([k * size // grid for k in range(grid)] + [size - 1])
    row = torch.arange(rows).repeat_interleave(len(starts))
    code = outcome(row, starts.repeat(rows).double() / size).reshape(rows, -1)
    low, high = starts[:-1].repeat(rows), starts[1:].repeat(rows)
    row = torch.arange(rows).repeat_interleave(grid)
    left, right = code[:, :-1].reshape(-1), code[:, 1:].reshape(-1)
    law: dict[tuple[int, int], float] = {}

    def add(row: Tensor, code: Tensor, mass: Tensor) -> None:
        for key_row, key_code, value in zip(
            row.tolist(), code.tolist(), mass.tolist(), strict=True
        ):
            key = (key_row, key_code)
            law[key] = law.get(key, 0.0) + value

    # Telescoping: a segment of code c that ends at lattice point k and begins at j is worth k - j.
    # The lattice's last point stands for everything up to 1.
    add(torch.arange(rows), code[:, -1], torch.ones(rows))
    while True:
        differs = left != right
        row, low, high = row[differs], low[differs], high[differs]
        left, right = left[differs], right[differs]
        narrow = high - low == 1
        at = high[narrow].double() / size
        add(row[narrow], left[narrow], at)
        add(row[narrow], right[narrow], -at)
        row, low, high = row[~narrow], low[~narrow], high[~narrow]
        left, right = left[~narrow], right[~narrow]
        if len(row) == 0:
            return {key: mass for key, mass in sorted(law.items()) if mass > 0}
        middle = (low + high) // 2
        code_middle = outcome(row, middle.double() / size)
        row = torch.cat([row, row])
        low, high = torch.cat([low, middle]), torch.cat([middle, high])
        left, right = torch.cat([left, code_middle]), torch.cat([code_middle, right])


@dataclass(frozen=True)
class ExactLaw:
    """What `exact_law` finds.

    Attributes
    ----------
    joint : Tensor
        ``[V] * (G+1)`` float64: the law of the emitted tokens, continued by the target up to G + 1.
    target : Tensor
        ``[V] * (G+1)``: the target's own law of G + 1 tokens.
    num_accepted : Tensor
        ``[G+1]``: the law of the number of accepted tokens.
    threshold_gap : float
        Largest difference between a reported ``accept_probs`` and the threshold where the coin
        really turns, over all coins that can decide.
    status : int
        All status bits seen.
    """

    joint: Tensor
    target: Tensor
    num_accepted: Tensor
    threshold_gap: float
    status: int
    calls: int = field(default=0, compare=False)

    @property
    def tv(self) -> float:
        """Total variation between `joint` and `target`: 0 for a lossless verifier."""
        return 0.5 * float((self.joint - self.target).abs().sum())

    @property
    def first_token_tv(self) -> float:
        """Total variation of the first emitted token's law."""
        v = self.joint.shape[0]
        difference = (self.joint - self.target).reshape(v, -1).sum(1)
        return 0.5 * float(difference.abs().sum())

    @property
    def mean_accepted(self) -> float:
        """Expected number of accepted draft tokens."""
        return float((self.num_accepted * torch.arange(len(self.num_accepted))).sum())


def toy_models(
    seed: int,
    vocab: int,
    gamma: int,
    draft_vocab: int | None = None,
    spread: float = 1.5,
    noise: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], list[Tensor]]:
    """Draw random context-dependent target and draft models over a tiny vocabulary.

    Parameters
    ----------
    seed : int
        Of the tables.
    vocab, gamma : int
        V and G.
    draft_vocab : int, optional
        Vd; V by default.
    spread : float
        Standard deviation of the target's logits.
    noise : float
        Standard deviation of what the draft adds to them.
    dtype : torch.dtype
        Of both tables.

    Returns
    -------
    target, draft : list of Tensor
        ``target[d]`` is ``[V] * d + [V]``, d = 0 .. G: the logits after each prefix of d tokens;
        ``draft[d]`` is ``[V] * d + [Vd]``, d = 0 .. G-1.
    """
    generator = torch.Generator().manual_seed(seed)
    width = vocab if draft_vocab is None else draft_vocab
    target, draft = [], []
    for depth in range(gamma + 1):
        logits = torch.randn([vocab] * (depth + 1), generator=generator) * spread
        target.append(logits.to(dtype))
        if depth == gamma:
            break
        drafted = torch.randn([vocab] * depth + [width], generator=generator) * noise
        both = min(vocab, width)
        drafted[..., :both] += logits[..., :both]
        draft.append(drafted.to(dtype))
    return target, draft


def joint_law(conditionals: Sequence[Tensor]) -> Tensor:
    """Joint law of a sequence from its conditionals.

    Parameters
    ----------
    conditionals : sequence of Tensor
        ``[V] * d + [V]`` probabilities, d = 0 .. n-1.

    Returns
    -------
    Tensor
        ``[V] * n`` float64.

    Examples
    --------
    >>> joint_law([torch.tensor([0.25, 0.75]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])]).tolist()
    [[0.25, 0.0], [0.375, 0.375]]
    """
    joint = conditionals[0].double()
    for conditional in conditionals[1:]:
        joint = joint[..., None] * conditional.double()
    return joint


def _enumerate_chains(
    laws: Sequence[Tensor], kinds: Sequence[int], stop: Callable[[tuple[int, ...]], bool] | None
) -> list[tuple[tuple[int, ...], float]]:
    """Draft chains with their probabilities; a deterministic draft token is the draft's arg max."""
    gamma, done = len(laws), []
    open_: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_:
        prefix, weight = open_.pop()
        depth = len(prefix)
        if depth == gamma or (stop is not None and stop(prefix)):
            done.append((prefix, weight))
            continue
        row = laws[depth][_context(prefix, laws[depth])]
        if kinds[depth] == 0:
            open_.append(((*prefix, int(row.argmax())), weight))
            continue
        open_ += [((*prefix, x), weight * q) for x, q in enumerate(row.tolist()) if q > 0]
    return done


def _context(prefix: tuple[int, ...], table: Tensor) -> tuple[int, ...]:
    """Index a table's row; an id beyond the target's vocabulary (p = 0) has no row of its own."""
    return tuple(min(x, table.shape[d] - 1) for d, x in enumerate(prefix))


def exact_law(
    verify: Verifier,
    target: Sequence[Tensor],
    draft: Sequence[Tensor] | None = None,
    *,
    drawn: Sequence[Tensor] | None = None,
    kinds: Sequence[int] | None = None,
    allowed: Sequence[Tensor] | None = None,
    draft_token_ids: Tensor | None = None,
    stop: Callable[[tuple[int, ...]], bool] | None = None,
    ending: str = "lengths",
    as_probs: bool = False,
    poison: bool = True,
    shared_coins: bool = False,
    bits: int = 40,
    **options: Any,
) -> ExactLaw:
    """Exact law of what a verifier emits, over all drafts, coins and final draws.

    Parameters
    ----------
    verify : callable
        Anything with the signature of `specdec_ext.verify`.
    target, draft : sequence of Tensor
        Tables of logits as from `toy_models`. Without `draft` no draft law is passed; `drawn` then
        says what is drafted.
    drawn : sequence of Tensor, optional
        ``[V] * d + [Vd]`` probabilities: the law that draft tokens are really drawn from. By
        default the one that `draft` and the draft's parameters describe, as the contract demands.
    kinds : sequence of int, optional
        ``[G]``: 1 a sampled draft token, 0 a deterministic one (the arg max of `drawn`); passed as
        ``draft_kinds``. Not passed by default (all sampled).
    allowed : sequence of Tensor, optional
        ``[V] * d + [V]`` bool, d = 0 .. G: the tokens allowed after each prefix; passed as
        ``allowed_mask`` beside logits that know nothing of it. The target's law is that of the
        masked logits, and so is the draft's.
    draft_token_ids : Tensor, optional
        ``[Vd]`` of a reduced draft vocabulary, passed on. `draft` and `drawn` are tables of its
        entries then (given their contexts in target ids, as always).
    stop : callable, optional
        ``stop(prefix)``: the draft ends after these tokens.
    ending : {"lengths", "placeholder", "invalid"}
        How a stopped draft is marked: ``draft_lengths``, -1, or an id out of range.
    as_probs : bool
        Pass the draft's law as ``draft_probs``, not as logits.
    poison : bool
        Fill the rows after a draft's end, which nobody may read, with NaN. False: with what the
        models would give, as an engine does that computes them anyway.
    shared_coins : bool
        Cut the range of each coin at all thresholds of its chain, not at its own only, and do not
        require that nothing else matters: for wrong verifiers that reuse a coin.
    bits : int
        Resolution of the bisections.
    **options
        Passed on; ``temperature`` and its kin as Python scalars.

    Returns
    -------
    ExactLaw

    Raises
    ------
    AssertionError
        The outcome is not a step function with one step per coin.

    Notes
    -----
    With all other coins held where they do not decide (earlier ones accept, later ones reject), the
    coin of position i is bisected for the threshold of "at least i accepted". Each chain is then
    run once for each side of each coin, whose ends must do what its middle does, and the final
    uniform swept by `step_law`. Masses are products of the lengths found. Tokens missing up to
    G + 1 are continued by the target's law: a verifier is lossless iff `joint` equals `target`.

    Examples
    --------
    The example of Sun et al. (arXiv 2403.10444): block verification accepts 11/9 on average, token
    verification 10/9.

    >>> from specdec_ext import reference
    >>> p, q = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    >>> target, draft = [p, p.expand(2, 2), p.expand(2, 2, 2)], [q, q.expand(2, 2)]
    >>> law = exact_law(reference.verify, target, draft, rule="block")
    >>> law.tv < 1e-9, round(law.mean_accepted * 9, 4)
    (True, 11.0)
    """
    gamma = len(target) - 1
    vocab = target[0].shape[-1]
    scalars = {k: options.pop(k) for k in list(options) if k.removeprefix("draft_") in _SAMPLING}
    params = _Params().updated({k: scalars.get(k) for k in _SAMPLING})
    masks: Sequence[Tensor | None] = allowed if allowed is not None else [None] * (gamma + 1)
    target_probs = [
        _law_table(_forbid(table, mask, None), params)
        for table, mask in zip(target, masks, strict=True)
    ]
    passed: list[Tensor] | None = None
    if drawn is None:
        if draft is None:
            raise ValueError("exact_law: draft or drawn must be given")
        params = params.updated({k: scalars.get(f"draft_{k}") for k in _SAMPLING})
        masked = [
            table if as_probs else _forbid(table, mask, draft_token_ids)
            for table, mask in zip(draft, masks, strict=False)
        ]
        drawn = [_law_table(table, params) for table in masked]
    if as_probs:  # what is passed is float32, and masked and normalised inside
        passed = [table.float() for table in drawn]
        drawn = [
            _forbid(table.double(), mask, draft_token_ids, fill=0.0)
            for table, mask in zip(passed, masks, strict=False)
        ]
        drawn = [table / table.sum(-1, keepdim=True) for table in drawn]
    drawn = [_of_tokens(table, draft_token_ids, vocab) for table in drawn]
    ids = max(vocab, drawn[0].shape[-1] if gamma else vocab)
    chains = _enumerate_chains(drawn, kinds if kinds is not None else [1] * gamma, stop)
    if draft_token_ids is not None:
        options["draft_token_ids"] = draft_token_ids

    # One request per chain.
    inputs = _chain_inputs(chains, target, draft, passed, allowed, ending, ids, poison)
    if kinds is not None:
        inputs["draft_kinds"] = torch.tensor([list(kinds)] * len(chains), dtype=torch.int8)
        inputs["draft_kinds"] = inputs["draft_kinds"].reshape(len(chains), gamma)
    weights = torch.tensor([weight for _, weight in chains], dtype=torch.float64)
    calls = 0
    status = 0

    def run(chain: Tensor, uniforms: Tensor) -> VerifyOutcome:
        nonlocal calls, status
        calls += 1
        case = VerifyCase(inputs).select(chain.tolist())
        count = len(chain)
        expanded = {
            k: torch.full((count,), v, dtype=torch.int64 if k.endswith("top_k") else torch.float32)
            for k, v in scalars.items()
        }
        outcome = case.replace(uniforms=uniforms, **expanded, **options).run(verify)
        for bits_seen in set(outcome.status.tolist()):
            status |= bits_seen
        return outcome

    everyone = torch.arange(len(chains))
    size = 1 << bits
    middle = torch.full((len(chains), gamma + 1), 0.5, dtype=torch.float64)
    options["full_accept_probs"] = True
    reported = run(everyone, middle).accept_probs.double()
    thresholds, decides = _bisect_thresholds(run, everyone, gamma, size)
    gaps = (reported - thresholds).abs()[decides]
    gap = float(gaps.max()) if gaps.numel() else 0.0

    # The sides of the coins, and each side's probability.
    cuts = thresholds.sort(dim=1).values if shared_coins else thresholds[:, :, None]
    if shared_coins:
        cuts = cuts[:, None, :].expand(-1, gamma, -1)
    edges = torch.cat([torch.zeros_like(cuts[..., :1]), cuts, torch.ones_like(cuts[..., :1])], -1)
    sides = edges.shape[-1] - 1 if gamma else 1
    patterns = torch.tensor(list(itertools.product(range(sides), repeat=gamma)), dtype=torch.int64)
    patterns = patterns.reshape(sides**gamma, gamma)
    chain = everyone.repeat_interleave(len(patterns))
    side = patterns.repeat(len(chains), 1)[..., None]
    low = edges[chain].gather(2, side)[..., 0]
    high = edges[chain].gather(2, side + 1)[..., 0]
    mass = weights[chain] * (high - low).prod(1)
    chain, low, high = chain[mass > 0], low[mass > 0], high[mass > 0]
    mass = mass[mass > 0]
    coins = (low + high) / 2
    if not shared_coins:
        # The ends of each side, one lattice point in, must do what its middle does.
        ends = [torch.minimum(low + 1 / size, coins), torch.maximum(high - 2 / size, coins)]
        final = torch.full((len(chain), 1), 0.5, dtype=torch.float64)
        seen = [run(chain, torch.cat([c, final], 1)).tokens for c in (coins, *ends)]
        if not (torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])):
            raise AssertionError("exact_law: the outcome changes within one side of a coin")

    # The final draw. A code is the whole row of tokens, so that anything emitted is seen.
    base = ids + 2
    powers = torch.tensor([base**k for k in range(gamma + 1)])
    accepted = torch.zeros(len(chain), dtype=torch.int64)

    def emitted(row: Tensor, u: Tensor) -> Tensor:
        outcome = run(chain[row], torch.cat([coins[row], u[:, None]], 1))
        accepted[row] = outcome.num_accepted.long()
        return ((outcome.tokens + 1).clamp(0, base - 1) * powers).sum(1)

    by_length = [torch.zeros([vocab] * n, dtype=torch.float64) for n in range(gamma + 2)]
    for (row, code), probability in step_law(emitted, len(chain), bits).items():
        tokens = []
        while code:
            code, digit = divmod(code, base)
            tokens.append(digit - 1)
        if not all(0 <= token < vocab for token in tokens):
            raise AssertionError(f"exact_law: tokens {tokens} emitted, vocabulary {vocab}")
        by_length[len(tokens)][tuple(tokens)] += float(mass[row]) * probability
    joint = by_length[0]
    for n in range(gamma + 1):
        joint = joint[..., None] * target_probs[n] + by_length[n + 1]
    counts = torch.zeros(gamma + 1, dtype=torch.float64).index_add_(0, accepted, mass)
    return ExactLaw(joint, joint_law(target_probs), counts, gap, status, calls)


def _chain_inputs(
    chains: Sequence[tuple[tuple[int, ...], float]],
    target: Sequence[Tensor],
    draft: Sequence[Tensor] | None,
    probs: Sequence[Tensor] | None,
    allowed: Sequence[Tensor] | None,
    ending: str,
    ids: int,
    poison: bool,
) -> dict[str, Any]:
    """Arguments of `verify` with one request per chain."""
    gamma, count = len(target) - 1, len(chains)
    rows = torch.full((count, gamma + 1, target[0].shape[-1]), math.nan, dtype=target[0].dtype)
    fill = {"lengths": 0, "placeholder": -1, "invalid": ids + 7}[ending]
    tokens = torch.full((count, gamma), fill, dtype=torch.int64)
    lengths = torch.zeros(count, dtype=torch.int64)
    tables = list(probs or draft or ())
    width = tables[0].shape[-1] if tables else ids
    dtype = tables[0].dtype if tables and probs is None else torch.float32
    laws = torch.full((count, gamma, width), math.nan, dtype=dtype)
    masks = torch.zeros(rows.shape, dtype=torch.bool)
    for c, (prefix, _) in enumerate(chains):
        lengths[c] = len(prefix)
        tokens[c, : len(prefix)] = torch.tensor(prefix, dtype=torch.int64)
        read = len(prefix) if poison else gamma
        context = prefix + (0,) * (gamma - len(prefix))
        for d in range(read + 1):
            rows[c, d] = target[d][_context(context[:d], target[d])]
            if allowed is not None:
                masks[c, d] = allowed[d][_context(context[:d], allowed[d])]
        for d, table in enumerate(tables[:read]):
            laws[c, d] = table[_context(context[:d], table)]
    inputs: dict[str, Any] = {"target_logits": rows, "draft_tokens": tokens}
    if allowed is not None:
        inputs["allowed_mask"] = pack_mask(masks, beyond=True)
    if draft is not None or probs is not None:
        inputs["draft_probs" if probs is not None else "draft_logits"] = laws
    if ending == "lengths" and bool((lengths < gamma).any()):
        inputs["draft_lengths"] = lengths
    return inputs


def _bisect_thresholds(
    run: Callable[[Tensor, Tensor], VerifyOutcome], everyone: Tensor, gamma: int, size: int
) -> tuple[Tensor, Tensor]:
    """Find where each coin turns "at least i accepted" on, [C, G], and which coins decide."""
    count = len(everyone)
    chain = everyone.repeat_interleave(gamma)
    position = torch.arange(gamma).repeat(count)
    # Earlier coins accept whatever can be accepted, later ones reject whatever can be rejected.
    later = torch.arange(gamma + 1) >= position[:, None]
    others = torch.zeros(len(chain), gamma + 1, dtype=torch.float64)
    others[later] = _BEFORE_ONE
    slot = position[:, None]

    def accepts(k: Tensor) -> Tensor:
        uniforms = others.scatter(1, slot, (k.double() / size)[:, None])
        return run(chain, uniforms).num_accepted > position

    low, high = torch.zeros_like(chain), torch.full_like(chain, size)
    if len(chain) == 0:
        empty = torch.zeros(count, gamma, dtype=torch.float64)
        return empty, empty.bool()
    never, always = ~accepts(low), accepts(high - 1)
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        yes = accepts(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    high = torch.where(never, 0, torch.where(always, size, high))
    decides = ~(never | always)
    return (high.double() / size).reshape(count, gamma), decides.reshape(count, gamma)


def tv_bound(draws: int, outcomes: int, alpha: float = 1e-9) -> float:
    """Total variation that an empirical law stays within, except with probability `alpha`.

    From P(L1 distance >= e) <= 2^K exp(-n e^2 / 2) for n independent draws over K outcomes
    (Weissman et al., 2003), which holds whatever the law is.

    Parameters
    ----------
    draws, outcomes : int
        n and K.
    alpha : float
        False-positive rate.

    Returns
    -------
    float
        The bound. A verifier whose law is off by more than twice this is caught, except with
        probability `alpha`: that is the test's power.

    Examples
    --------
    >>> round(tv_bound(400_000, 9), 4)
    0.0058
    """
    return 0.5 * math.sqrt(2.0 * (outcomes * math.log(2.0) - math.log(alpha)) / draws)


# -------------------------------------------------------------------------------------------------
# Close or explained
# -------------------------------------------------------------------------------------------------


def draw_interval(weights: Tensor, token: int) -> tuple[float, float]:
    """Range of u in which an inverse CDF over these weights gives the token.

    Parameters
    ----------
    weights : Tensor
        ``[V]``, not negative, any positive total.
    token : int
        Index.

    Returns
    -------
    low, high : float
        The token is drawn for ``low <= u < high``.

    Examples
    --------
    >>> draw_interval(torch.tensor([1.0, 2.0, 1.0]), 1)
    (0.25, 0.75)
    """
    prefix = weights.double().cumsum(0)
    high = float(prefix[token])
    total = float(prefix[-1])
    return (high - float(weights[token])) / total, high / total


def _params_of(inputs: Mapping[str, Any], prefix: str, b: int, base: _Params) -> _Params:
    """Parameters of request b, those not given from `base`."""
    given = {name: inputs.get(prefix + name) for name in _SAMPLING}
    return base.updated({k: None if t is None else t[b].item() for k, t in given.items()})


class _Request:
    """One request of a case, with the prescan done: what the rules may read.

    `emitted` are its tokens in the outcome: where filters nearly tie, they tell laws apart.
    """

    def __init__(self, case: VerifyCase, b: int, tolerance: float, emitted: Sequence[int]) -> None:
        inputs = case.inputs
        self.tolerance = tolerance
        self.rule = inputs.get("rule", "block")
        self.full = bool(inputs.get("full_accept_probs", False))
        self.raw = bool(inputs.get("raw_logprobs", False)) or self.rule == "top_beta"
        self.lenience = inputs.get("lenience", 1.0)
        self.beta, self.tau = inputs.get("beta", 3), inputs.get("tau", 1.0)
        self.epsilon, self.delta = inputs.get("epsilon", 0.09), inputs.get("delta", 0.3)
        gamma = case.gamma
        logits, draft = inputs["target_logits"], inputs.get("draft_logits")
        probs = inputs.get("draft_probs")
        source = draft if draft is not None else probs
        vocab = logits.shape[-1]
        ids = max(vocab, source.shape[-1] if source is not None else vocab)
        self.bits = 0
        entries = inputs.get("draft_token_ids")
        has_draft_laws = True
        if entries is not None:
            ids = vocab
            named = entries.tolist()
            has_draft_laws = len(set(named) & set(range(vocab))) == len(named)
            if self.rule not in _DRAFT_LAW_UNREAD and not has_draft_laws:
                self.bits |= 8

        length = gamma
        if inputs.get("draft_lengths") is not None:
            length = int(inputs["draft_lengths"][b])
            if not 0 <= length <= gamma:
                self.bits |= 8
            length = min(max(length, 0), gamma)
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        for i in range(length):
            token = int(inputs["draft_tokens"][b, i])
            kind = int(source is not None)
            if inputs.get("draft_kinds") is not None:
                kind = int(inputs["draft_kinds"][b, i])
            if token == -1:
                break
            if not 0 <= token < ids or kind not in (0, 1):
                self.bits |= 2
                break
            self.tokens.append(token)
            self.kinds.append(kind)

        params = _params_of(inputs, "", b, _Params())
        draft_params = _params_of(inputs, "draft_", b, params)
        if self.rule == "greedy":
            params = _Params(temperature=0.0)
        elif self.rule == "top_beta":
            params = _Params()
        else:
            # NaN differs from itself, which is what is wanted: it is replaced, too.
            if params.cleaned() != params or (
                draft is not None and draft_params.cleaned() != draft_params
            ):
                self.bits |= 8
            params, draft_params = params.cleaned(), draft_params.cleaned()
        self.greedy = params.temperature < _GREEDY_TEMPERATURE

        used = range(len(self.tokens) + 1)
        masks: list[Tensor | None] = [None for _ in used]
        if inputs.get("allowed_mask") is not None:
            masks = [_unpack_mask(inputs["allowed_mask"][b, i], vocab) for i in used]
        target_rows = [
            self._row(logits, inputs.get("target_rows"), b, i, masks[i], None) for i in used
        ]
        seen = [
            [token for token in (*self.tokens[i : i + 1], *emitted[i : i + 1]) if token >= 0]
            for i in used
        ]
        self.target: list[list[_Law | None]] = [
            self._laws(row, params, tolerance, seen[i]) for i, row in enumerate(target_rows)
        ]
        self.raw_laws = [self._laws(row, _Params(), 0.0, ())[0] for row in target_rows]
        self.draft: list[list[Tensor | None]] = []
        reads_draft = not self.greedy and self.rule not in _DRAFT_LAW_UNREAD
        for i in range(len(self.tokens)):
            row = None
            if source is not None and reads_draft and has_draft_laws:
                fill = -math.inf if probs is None else 0.0
                row = self._row(source, inputs.get("draft_rows"), b, i, masks[i], entries, fill)
            if row is not None and probs is not None:
                total = float(row.sum())
                legal = bool((row >= 0).all()) and 0 < total < math.inf
                found = [row / total if legal else None]
            else:
                places = [p for token in seen[i] for p in _entries_of(token, entries)]
                laws = self._laws(row, draft_params, tolerance, places)
                found = [None if law is None else law.probs for law in laws]
            self.draft.append([q if q is None else _of_tokens(q, entries, vocab) for q in found])

        self.noise: list[Tensor] = []
        if self.rule == "coupled" and not self.greedy:
            seed, position = int(inputs["seeds"][b]), int(inputs["positions"][b])
            stream = inputs.get("stream", 0)
            self.noise = [
                torch.tensor(
                    philox_exponentials(seed, position + i, range(vocab), stream),
                    dtype=torch.float64,
                )
                for i in used
            ]

        self.coins = [0.5] * (gamma + 1)
        if not self.greedy and self.rule not in ("top_beta", "coupled"):
            for slot in [*range(len(self.tokens)), gamma]:
                u = self._uniform(inputs, b, slot, gamma)
                clamped = 0.0 if math.isnan(u) else min(max(u, 0.0), _BEFORE_ONE)
                if u != clamped:
                    self.bits |= 8
                self.coins[slot] = clamped
        self.final = self.coins[gamma]

    @staticmethod
    def _row(
        table: Tensor,
        rows: Tensor | None,
        b: int,
        i: int,
        allowed: Tensor | None,
        entries: Tensor | None,
        fill: float = -math.inf,
    ) -> Tensor | None:
        if rows is None:
            row = table[b, i]
        else:
            r = int(rows[b, i])
            if not 0 <= r < len(table):
                return None
            row = table[r]
        return _forbid(row.detach().cpu().double(), allowed, entries, fill)

    @staticmethod
    def _laws(
        row: Tensor | None, params: _Params, tolerance: float, tokens: Sequence[int]
    ) -> list[_Law | None]:
        if row is None:
            return [None]
        return [*_candidate_laws(row, params, tolerance, tokens)] or [None]

    @staticmethod
    def _uniform(inputs: Mapping[str, Any], b: int, slot: int, gamma: int) -> float:
        if inputs.get("uniforms") is not None:
            return float(inputs["uniforms"][b, slot])
        seed, position = int(inputs["seeds"][b]), int(inputs["positions"][b])
        stream = inputs.get("stream", 0)
        if slot == gamma:
            return philox_uniform(seed, position, 0, 1, stream)
        return philox_uniform(seed, position, slot + 1, 0, stream)


#: Rules that never read a draft law.
_DRAFT_LAW_UNREAD = ("greedy", "top_beta", "typical", "coupled")


def _entries_of(token: int, ids: Tensor | None) -> list[int]:
    """Draft entries that stand for a token."""
    return [token] if ids is None else (ids == token).nonzero().flatten().tolist()


class _Inadmissible(Exception):
    """A decision that no rounding explains."""


def _close(value: float, expected: float, tolerance: float) -> bool:
    if math.isnan(expected) or math.isnan(value):
        return math.isnan(expected) and math.isnan(value)
    if math.isinf(expected):
        return value == expected
    return abs(value - expected) <= tolerance + 1e-6 * abs(expected)


class _Claim(NamedTuple):
    """One request's outcome, to be checked."""

    accepted: int
    token: int  # the extra one
    logprobs: list[float]
    accept_probs: list[float]
    status: int


class _State(NamedTuple):
    """Where a walk down the chain stands: everything that later nodes depend on."""

    node: int = 0
    inflow: float = 1.0  # block
    failed: bool = False  # stepwise rules: a token was rejected, the rest is only reported
    bits: int = 0


#: Bounds `_Checker.admits`. A walk that meets no tie takes gamma + 1 trials.
_MAX_TRIALS = 4096


@dataclass
class _Checker:
    """Looks for a choice of the candidate laws, node by node, under which a claim is right."""

    request: _Request
    claim: _Claim
    reason: str = ""  # the first contradiction found

    def admits(self) -> bool:
        """Search depth first, the exact laws first.

        A choice at one node matters below only through the `_State`; states that have led nowhere
        are not entered again, nor are inflows that rounding would not tell from theirs.
        """
        request = self.request
        dead: set[tuple[int, int, bool]] = set()
        grain = max(0.1 * request.tolerance, 1e-12)
        start = _State(bits=request.bits)
        stack = [(start, self.choices(start))]
        trials = 0
        while stack:
            state, choices = stack[-1]
            choice = next(choices, None)
            if choice is None:
                dead.add((state.node, round(state.inflow / grain), state.failed))
                stack.pop()
                continue
            trials += 1
            if trials > _MAX_TRIALS:
                self.reason += f" (gave up after {_MAX_TRIALS} trials of near-ties)"
                return False
            try:
                following = self.visit(state, *choice)
            except _Inadmissible as failure:
                self.reason = self.reason or str(failure)
                continue
            if following is None:
                return True
            key = (following.node, round(following.inflow / grain), following.failed)
            if key not in dead:
                stack.append((following, self.choices(following)))
        return False

    def choices(self, state: _State) -> Iterator[tuple[_Law | None, Tensor | None]]:
        """Candidate laws of a node: the target's, and the draft's where a column is left."""
        request, i = self.request, state.node
        drafts: list[Tensor | None] = request.draft[i] if i < len(request.tokens) else [None]
        return itertools.product(request.target[i], drafts)

    def visit(self, state: _State, law: _Law | None, q: Tensor | None) -> _State | None:
        """Check all that the claim says about a node; the next state, None at the end."""
        block = self.request.rule == "block"
        return self.visit_block(state, law, q) if block else self.visit_step(state, law, q)

    def expect(self, good: bool, message: str) -> None:
        if not good:
            raise _Inadmissible(message)

    def reads_draft(self, i: int) -> bool:
        request = self.request
        unread = request.greedy or request.rule in _DRAFT_LAW_UNREAD
        return not unread and request.kinds[i] == 1

    def is_leaf(self, i: int, law: _Law | None, q: Tensor | None) -> tuple[bool, int]:
        """Whether the draft ends at node i, and the status bit that says so."""
        request = self.request
        if law is None or i == len(request.tokens):
            return True, 0
        if self.reads_draft(i) and (q is None or self.prob(q, request.tokens[i]) == 0):
            return True, 4
        return False, 0

    @staticmethod
    def prob(probs: Tensor, token: int) -> float:
        return float(probs[token]) if token < len(probs) else 0.0

    def proposal(self, i: int, q: Tensor | None) -> float:
        """Probability with which token i + 1 was proposed; 1 if it was put there."""
        if self.reads_draft(i) and q is not None:
            return self.prob(q, self.request.tokens[i])
        return 1.0

    def residual(self, i: int, w: float, law: _Law, q: Tensor | None) -> Tensor:
        """Signed ``w p - q`` of node i, ``[V]``."""
        difference = w * law.probs
        if self.reads_draft(i) and q is not None:
            both = min(len(difference), len(q))
            difference[:both] -= q[:both]
        return difference

    def flip(self, i: int, h: float, slack: float, accepted: bool) -> None:
        """Check the coin of draft token i + 1, which the outcome took as accepted or not."""
        u = self.request.coins[i]
        verb = "accepted" if accepted else "rejected"
        good = u < h + slack if accepted else u >= h - slack
        self.expect(good, f"token {i + 1} {verb} at u = {u!r}, h = {h!r} (slack {slack:.1e})")

    def reported(self, i: int, h: float, slack: float) -> None:
        """Check accept_probs of draft token i + 1."""
        got = self.claim.accept_probs[i]
        # A threshold of rounding noise over rounding noise can be anything in [0, 1].
        self.expect(_close(got, h, slack + 1e-7), f"accept_probs[{i}] = {got}, not {h}")

    def logprob(self, i: int, token: int, law: _Law | None) -> None:
        """Check what is reported of an emitted token."""
        law = self.request.raw_laws[i] if self.request.raw else law
        expected = math.nan
        if law is not None:
            expected = 0.0 if law.greedy else float(law.log_probs[token])
        got = self.claim.logprobs[i]
        good = _close(got, expected, 2 * self.request.tolerance)
        self.expect(good, f"logprobs[{i}] = {got}, not {expected}")

    def finish(self, looked_at: int, bits: int) -> None:
        """Check what must not be reported, and the status."""
        claim = self.claim
        self.expect(claim.status == bits, f"status {claim.status}, not {bits}")
        for i, got in enumerate(claim.accept_probs[looked_at:], looked_at):
            self.expect(math.isnan(got), f"accept_probs[{i}] = {got}, not nan")
        for i, got in enumerate(claim.logprobs[claim.accepted + 1 :], claim.accepted + 1):
            self.expect(math.isnan(got), f"logprobs[{i}] = {got}, not nan")

    def visit_step(self, state: _State, law: _Law | None, q: Tensor | None) -> _State | None:
        """Rules that stop at the first failure."""
        i, _, failed, bits = state
        request, claim = self.request, self.claim
        leaf, bit = self.is_leaf(i, law, q)
        if leaf:
            bits |= bit
            if not failed:
                self.expect(claim.accepted == i, f"{claim.accepted} accepted of a draft of {i}")
                bits |= self.final(i, 1.0, law, None, bonus=True)
            self.finish(i, bits)
            return None
        assert law is not None
        h, slack = self.test(i, law, q)
        accepted = not failed and i < claim.accepted
        if not failed:
            self.flip(i, h, slack, accepted)
            if accepted:
                self.logprob(i, request.tokens[i], law)
            else:
                bits |= self.final(i, 1.0, law, q, bonus=request.rule == "typical")
                failed = True
        self.reported(i, h, slack)
        if failed and not request.full:
            self.finish(i + 1, bits)
            return None
        return _State(i + 1, 1.0, failed, bits)

    def test(self, i: int, law: _Law, q: Tensor | None) -> tuple[float, float]:
        """Acceptance probability of one token and its slack."""
        request = self.request
        x, tol = request.tokens[i], request.tolerance
        inside = x < len(law.logits)
        if request.rule == "top_beta":
            if not inside:
                return 0.0, 0.0
            rank = 1 + int((law.logits > law.logits[x]).sum())
            gap = float(law.logits[law.argmax] - law.logits[x])
            return float(rank <= request.beta and gap <= request.tau), 0.0
        if request.rule == "lenient" and request.greedy:
            ratio = math.exp(float(law.logits[x] - law.logits[law.argmax])) if inside else 0.0
            near = abs(ratio - request.lenience) < 1e-12 and ratio != request.lenience
            return float(ratio >= request.lenience), float(near)
        if request.greedy:
            return float(x == law.argmax), 0.0
        if request.rule == "coupled":
            times = self.race(i, law)
            x_time = float(times[x]) if inside else math.inf
            winner = int(times.argmin())
            rival = float(times.kthvalue(min(2, len(times))).values) if x == winner else x_time
            near = rival <= float(times[winner]) * (1 + 2 * tol) and len(times) > 1
            return float(x == winner), float(near)
        p = self.prob(law.probs, x)
        if request.rule == "typical":
            entropy = -float(torch.special.xlogy(law.probs, law.probs).sum())
            threshold = min(request.epsilon, request.delta * math.exp(-entropy))
            return float(p > threshold), float(abs(p - threshold) <= tol * threshold)
        lenience = request.lenience if request.rule == "lenient" else 1.0
        h = min(1.0, p / (lenience * self.proposal(i, q)))
        # p = 0 is exact, whatever the rounding: no slack.
        return h, tol * min(h, 1.0) if p > 0 else 0.0

    def race(self, i: int, law: _Law) -> Tensor:
        """Arrival times of the race at node i, ``[V]``: inf where the token takes no part."""
        return torch.where(law.probs > 0, self.request.noise[i] / law.probs, math.inf)

    def visit_block(self, state: _State, law: _Law | None, q: Tensor | None) -> _State | None:
        """Block rule: the largest i with a coin below h_i wins, whatever came before."""
        i, w, _, bits = state
        request, claim = self.request, self.claim
        tol, noise = request.tolerance, 0.2 * request.tolerance
        end = len(request.tokens)
        if w == 0:  # nothing below can be accepted, and nothing there is looked at
            for k in range(i, end + 1):
                self.judge(k, 0.0, 0.0)
            self.finish(end, bits)
            return None
        leaf, bit = self.is_leaf(i, law, q)
        if leaf:
            self.judge(i, w, min(1.0, tol) if w < 1 else noise)
            self.expect(claim.accepted <= i, f"{claim.accepted} accepted of a draft of {i}")
            bits |= bit
            if i == claim.accepted:
                bits |= self.final(i, w, law, None, bonus=True)
            self.finish(i, bits)
            return None
        assert law is not None
        x, p, scaled = request.tokens[i], self.prob(law.probs, request.tokens[i]), 1.0
        mass = w * (1.0 - p)
        if self.reads_draft(i):
            mass = float(self.residual(i, w, law, q).clamp(min=0).sum())
            scaled = self.proposal(i, q)
        denominator = mass + (1.0 - w)
        h = 1.0 if w == 1.0 else mass / denominator
        # dh <= (dR + dw) / (R + 1 - w); a point mass and w = 1 at the root are exact.
        self.judge(i, h, min(1.0, tol + 2 * noise / max(denominator, 1e-300)))
        if i < claim.accepted:
            self.logprob(i, x, law)
        elif i == claim.accepted:
            bits |= self.final(i, w, law, q, bonus=False)
        return _State(i + 1, 1.0 if w * p >= scaled else w * p / scaled, False, bits)

    def judge(self, i: int, h: float, slack: float) -> None:
        """Check the coin of node i of a block and what is reported of it; the root has none."""
        if i == 0:
            return
        if i >= self.claim.accepted:
            self.flip(i - 1, h, slack, accepted=i == self.claim.accepted)
        self.reported(i - 1, h, slack)

    def final(self, n: int, w: float, law: _Law | None, q: Tensor | None, bonus: bool) -> int:
        """Check the extra token, drawn at node n; gives the status bit of a row without a law."""
        request, token = self.request, self.claim.token
        tolerance, noise = request.tolerance, 0.2 * request.tolerance
        if law is None:
            self.expect(token == 0, f"token {token} from a row without a law, not 0")
            self.logprob(n, token, None)
            return 1
        self.expect(0 <= token < len(law.probs), f"extra token {token} out of range")
        if request.rule in ("greedy", "top_beta") or request.greedy:
            self.expect(token == law.argmax, f"extra token {token}, arg max {law.argmax}")
        else:
            self.expect(float(law.probs[token]) > 0, f"extra token {token} of probability 0")
            if request.rule == "coupled":
                times = self.race(n, law)
                won = float(times[token]) <= float(times.min()) * (1 + 2 * tolerance)
                self.expect(won, f"extra token {token}, the race is won by {int(times.argmin())}")
                rejected = bonus or token != request.tokens[n]
                self.expect(rejected, f"extra token {token} is the rejected one")
            elif bonus:
                self.draw(law.probs, token, tolerance)
            else:
                self.draw_residual(n, self.residual(n, w, law, q), noise)
        self.logprob(n, token, law)
        return 0

    def draw_residual(self, n: int, signed: Tensor, noise: float) -> None:
        """Check that the extra token may come from the positive part of ``w p - q``."""
        request, token = self.request, self.claim.token
        x = request.tokens[n]
        positive = signed.clamp(min=0)
        if x < len(positive):
            positive[x] = 0.0
        total = float(positive.sum())
        if total <= 5 * noise:
            return  # p and q agree to rounding: any token of p may come, drawn from p or from noise
        self.expect(token != x, f"extra token {token} is the rejected one")
        self.expect(
            float(signed[token]) > -noise, f"extra token {token} has residual {signed[token]:.1e}"
        )
        self.draw(positive / total, token, request.tolerance + noise / total)

    def draw(self, probs: Tensor, token: int, slack: float) -> None:
        """Check that an inverse CDF at the final uniform may give the token."""
        low, high = draw_interval(probs, token)
        u = self.request.final
        self.expect(
            low - slack <= u < high + slack,
            f"extra token {token} at u = {u!r}, drawn for [{low!r}, {high!r}) (slack {slack:.1e})",
        )


def explain_outcome(
    result: VerifyOutcome, case: VerifyCase, request: int, tolerance: float = 1e-5
) -> str:
    """Say why an outcome cannot be right; an empty string if it can.

    Every decision is recomputed in float64 from the case's own inputs: coins against thresholds,
    the final draw against the boundaries of its inverse CDF, filters, log-probabilities, acceptance
    probabilities, status. A decision may go either way only within `tolerance` of a tie. Arg max,
    top-k and anything of probability 0 are exact in the inputs: no tolerance applies.

    Parameters
    ----------
    result : VerifyOutcome
        What a verifier returned for the case.
    case : VerifyCase
        Its inputs.
    request : int
        Which row of the batch.
    tolerance : float
        Relative to 1; scaled by the conditioning of the block rule's thresholds and of residuals.

    Returns
    -------
    str
        The first contradiction found, or "".

    Examples
    --------
    >>> p = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]]).log()
    >>> case = VerifyCase(dict(target_logits=p, draft_tokens=torch.tensor([[1]]), rule="token",
    ...                        uniforms=torch.tensor([[0.3, 0.9]], dtype=torch.float64)))
    >>> from specdec_ext import reference
    >>> result = case.run(reference.verify)
    >>> result.tokens.tolist(), explain_outcome(result, case, 0)
    ([[0, -1]], '')
    >>> wrong = result._replace(tokens=torch.tensor([[1, -1]]))
    >>> explain_outcome(wrong, case, 0)
    'extra token 1 is the rejected one'
    """
    n = int(result.num_accepted[request])
    tokens = result.tokens[request].tolist()
    checked = _Request(case, request, tolerance, tokens)
    if not 0 <= n <= len(checked.tokens):
        return f"{n} accepted of a draft of {len(checked.tokens)}"
    expected = checked.tokens[:n] + tokens[n : n + 1] + [-1] * (case.gamma - n)
    if tokens != expected:
        return f"tokens {tokens} are not {n} draft tokens, one more and -1"
    claim = _Claim(
        n,
        tokens[n],
        result.logprobs[request].tolist(),
        result.accept_probs[request].tolist(),
        int(result.status[request]),
    )
    checker = _Checker(checked, claim)
    return "" if checker.admits() else checker.reason


def _same(a: Tensor, b: Tensor, atol: float, rtol: float) -> Tensor:
    """Row by row: close, NaN where NaN."""
    a, b = a.double(), b.double()
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    return close.flatten(1).all(1) if close.ndim > 1 else close


def assert_tokens_match(
    result: Any, expected: Any, case: VerifyCase, tolerance: float = 1e-5
) -> int:
    """Check that two outcomes of a case are equal, or differ only where float64 sees a tie.

    Parameters
    ----------
    result : VerifyOutcome or tuple
        What the verifier under test returned.
    expected : VerifyOutcome or tuple
        What another verifier (the reference, say) returned.
    case : VerifyCase
        The inputs of both.
    tolerance : float
        See `explain_outcome`.

    Returns
    -------
    int
        How many requests differed and were excused. Tests should bound it: ties are rare.

    Raises
    ------
    AssertionError
        A request differs, and its outcome is not admissible in float64.

    Examples
    --------
    >>> from specdec_ext import reference
    >>> case = make_case(0)
    >>> result = case.run(reference.verify)
    >>> assert_tokens_match(result, result, case)
    0
    >>> wrong = result._replace(num_accepted=result.num_accepted + 1)
    >>> assert_tokens_match(wrong, result, case)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    AssertionError: ...
    """
    result = VerifyOutcome(*(t.detach().cpu() for t in result))
    expected = VerifyOutcome(*(t.detach().cpu() for t in expected))
    for name, got, wanted in zip(VerifyOutcome._fields, result, expected, strict=True):
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise AssertionError(
                f"{case.name}: {name} is {list(got.shape)} {got.dtype}, "
                f"not {list(wanted.shape)} {wanted.dtype}"
            )
    same = (result.tokens == expected.tokens).all(1)
    same &= (result.num_accepted == expected.num_accepted) & (result.status == expected.status)
    same &= _same(result.logprobs, expected.logprobs, 2 * tolerance, 1e-6)
    same &= _same(result.accept_probs, expected.accept_probs, tolerance, 1e-6)
    excused = 0
    for b in (~same).nonzero().flatten().tolist():
        reason = explain_outcome(result, case, b, tolerance)
        if reason:
            rows = "\n".join(
                f"  {name}: {got[b].tolist()} against {wanted[b].tolist()}"
                for name, got, wanted in zip(VerifyOutcome._fields, result, expected, strict=True)
            )
            raise AssertionError(f"{case.name or 'case'}, request {b}: {reason}\n{rows}")
        excused += 1
    return excused


# -------------------------------------------------------------------------------------------------
# Cases
# -------------------------------------------------------------------------------------------------


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


def _random_params(
    generator: torch.Generator, batch: int, vocab: int, filters: bool, greedy: bool
) -> dict[str, Tensor]:
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
    draft : {"logits", "probs", "none"}
        How the draft's law is given; "none" is a deterministic drafter.
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
    params = _random_params(generator, batch, vocab, filters, greedy_rows)
    if draft_filters and draft == "logits":
        theirs = _random_params(generator, batch, width, True, True)
        params |= {f"draft_{name}": value for name, value in theirs.items()}
    ids = torch.randperm(vocab, generator=generator)[:width] if draft_token_ids else None
    target, drafted = _random_rows(generator, batch, gamma + 1, vocab, width, ids, masks)
    target = target.to(dtype)
    drafted = drafted[:, :gamma].to(draft_dtype or dtype)
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
        scalars = _Params()
        if draft != "probs":
            scalars = _params_of(params, "", b, scalars)
            scalars = _params_of(params, "draft_", b, scalars).cleaned()
        anything = int(picks[b, i, 0] * (vocab if draft_token_ids else max(vocab, width)))
        mask = None if allowed is None else allowed[b, i]
        laws = _candidate_laws(_forbid(drafted[b, i], mask, ids), scalars, 0.0)
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
            named = likely if ids is None else ids[likely]
            noise = philox_exponentials(int(seeds[b]), int(positions[b]) + i, named.tolist())
            times = torch.tensor(noise, dtype=torch.float64) / law.probs[likely]
            drawn = int(likely[times.argmin()])
        drawn = min(drawn, width - 1)
        tokens[b, i] = drawn if ids is None else ids[drawn]

    inputs: dict[str, Any] = {"rule": rule, **params}
    if allowed is not None:
        spare = torch.rand(*allowed.shape[:2], -vocab % 32, generator=generator) < 0.5
        inputs["allowed_mask"] = pack_mask(allowed, beyond=spare)
        poisoned = torch.rand(batch, 1, 1, generator=generator) < 0.5
        target = torch.where(poisoned, _forbid(target, allowed, None, math.nan), target)
    if ids is not None:
        inputs["draft_token_ids"] = ids.to(id_dtype)
    if draft == "probs":
        scale = torch.rand(batch, gamma, 1, generator=generator) + 0.5  # normalised inside
        drafted = (drafted.float().softmax(-1) * scale).to(draft_dtype or dtype)
    if allowed is not None:
        drafted = torch.where(
            poisoned, _forbid(drafted, allowed[:, :gamma], ids, math.nan), drafted
        )
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
    if draft != "none":
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
