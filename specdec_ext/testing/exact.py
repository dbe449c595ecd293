"""Exact laws of what a verifier of chains emits, all randomness integrated out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import Verifier, VerifyCase, VerifyOutcome
from .laws import SAMPLING, Params, law_table
from .masks import forbid, of_tokens, pack_mask
from .philox import BEFORE_ONE


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
        row = laws[depth][context_index(prefix, laws[depth])]
        if kinds[depth] == 0:
            open_.append(((*prefix, int(row.argmax())), weight))
            continue
        open_ += [((*prefix, x), weight * q) for x, q in enumerate(row.tolist()) if q > 0]
    return done


def context_index(prefix: tuple[int, ...], table: Tensor) -> tuple[int, ...]:
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
    scalars = {k: options.pop(k) for k in list(options) if k.removeprefix("draft_") in SAMPLING}
    params = Params().updated({k: scalars.get(k) for k in SAMPLING})
    masks: Sequence[Tensor | None] = allowed if allowed is not None else [None] * (gamma + 1)
    target_probs = [
        law_table(forbid(table, mask, None), params)
        for table, mask in zip(target, masks, strict=True)
    ]
    passed: list[Tensor] | None = None
    if drawn is None:
        if draft is None:
            raise ValueError("exact_law: draft or drawn must be given")
        params = params.updated({k: scalars.get(f"draft_{k}") for k in SAMPLING})
        masked = [
            table if as_probs else forbid(table, mask, draft_token_ids)
            for table, mask in zip(draft, masks, strict=False)
        ]
        drawn = [law_table(table, params) for table in masked]
    if as_probs:  # what is passed is float32, and masked and normalised inside
        passed = [table.float() for table in drawn]
        drawn = [
            forbid(table.double(), mask, draft_token_ids, fill=0.0)
            for table, mask in zip(passed, masks, strict=False)
        ]
        drawn = [table / table.sum(-1, keepdim=True) for table in drawn]
    drawn = [of_tokens(table, draft_token_ids, vocab) for table in drawn]
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
            rows[c, d] = target[d][context_index(context[:d], target[d])]
            if allowed is not None:
                masks[c, d] = allowed[d][context_index(context[:d], allowed[d])]
        for d, table in enumerate(tables[:read]):
            laws[c, d] = table[context_index(context[:d], table)]
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
    others[later] = BEFORE_ONE
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
