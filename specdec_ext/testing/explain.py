"""Close or explained: an outcome of `specdec_ext.verify`, every decision recomputed in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import VerifyCase, VerifyOutcome
from .laws import Law, draw_interval
from .requests import DRAFT_LAW_UNREAD, Request

#: Bounds `_Checker.admits`. A chain that meets no tie takes gamma + 1 trials.
_MAX_TRIALS = 4096


class _Inadmissible(Exception):
    """A decision that no rounding explains."""


def close_to(value: float, expected: float, tolerance: float) -> bool:
    """Whether a reported number is the expected one; NaN and infinities must be just that."""
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
    """How far down the chain a check has come: everything that later nodes depend on."""

    node: int = 0
    inflow: float = 1.0  # block
    failed: bool = False  # stepwise rules: a token was rejected, the rest is only reported
    bits: int = 0


@dataclass
class _Checker:
    """Looks for a choice of the candidate laws, node by node, under which a claim is right."""

    request: Request
    claim: _Claim
    exact: bool = False  # no candidates but the exact laws
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

    def choices(self, state: _State) -> Iterator[tuple[Law | None, Tensor | None]]:
        """Candidate laws of a node: the target's, and the draft's where a column is left."""
        request, i = self.request, state.node
        drafts: list[Tensor | None] = request.draft[i] if i < len(request.tokens) else [None]
        if self.exact:
            return iter([(request.target[i][0], drafts[0])])
        return itertools.product(request.target[i], drafts)

    def visit(self, state: _State, law: Law | None, q: Tensor | None) -> _State | None:
        """Check all that the claim says about a node; the next state, None at the end."""
        block = self.request.rule == "block"
        return self.visit_block(state, law, q) if block else self.visit_step(state, law, q)

    def expect(self, good: bool, message: str) -> None:
        if not good:
            raise _Inadmissible(message)

    def reads_draft(self, i: int) -> bool:
        request = self.request
        unread = request.greedy or request.rule in DRAFT_LAW_UNREAD
        return not unread and request.kinds[i] == 1

    def is_leaf(self, i: int, law: Law | None, q: Tensor | None) -> tuple[bool, int]:
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
        """Probability with which token i + 1 was proposed; 1 if it is deterministic."""
        if self.reads_draft(i) and q is not None:
            return self.prob(q, self.request.tokens[i])
        return 1.0

    def residual(self, i: int, w: float, law: Law, q: Tensor | None) -> Tensor:
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
        self.expect(close_to(got, h, slack + 1e-7), f"accept_probs[{i}] = {got}, not {h}")

    def logprob(self, i: int, token: int, law: Law | None) -> None:
        """Check what is reported of an emitted token."""
        law = self.request.raw_laws[i] if self.request.raw else law
        expected = math.nan
        if law is not None:
            expected = 0.0 if law.greedy else float(law.log_probs[token])
        got = self.claim.logprobs[i]
        good = close_to(got, expected, 2 * self.request.tolerance)
        self.expect(good, f"logprobs[{i}] = {got}, not {expected}")

    def finish(self, looked_at: int, bits: int) -> None:
        """Check what must not be reported, and the status."""
        claim = self.claim
        self.expect(claim.status == bits, f"status {claim.status}, not {bits}")
        for i, got in enumerate(claim.accept_probs[looked_at:], looked_at):
            self.expect(math.isnan(got), f"accept_probs[{i}] = {got}, not nan")
        for i, got in enumerate(claim.logprobs[claim.accepted + 1 :], claim.accepted + 1):
            self.expect(math.isnan(got), f"logprobs[{i}] = {got}, not nan")

    def visit_step(self, state: _State, law: Law | None, q: Tensor | None) -> _State | None:
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

    def test(self, i: int, law: Law, q: Tensor | None) -> tuple[float, float]:
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

    def race(self, i: int, law: Law) -> Tensor:
        """Arrival times of the race at node i, ``[V]``: inf where the token takes no part."""
        return torch.where(law.probs > 0, self.request.noise[i] / law.probs, math.inf)

    def visit_block(self, state: _State, law: Law | None, q: Tensor | None) -> _State | None:
        """Block rule: the largest i with a coin below h_i wins, whatever came before."""
        i, w, _, bits = state
        request, claim = self.request, self.claim
        tol, noise = request.tolerance, 0.2 * request.tolerance
        end = len(request.tokens)
        if w == 0:  # nothing below can be accepted, and nothing there is looked at
            for k in range(i, end + 1):
                self.decide(k, 0.0, 0.0)
            self.finish(end, bits)
            return None
        leaf, bit = self.is_leaf(i, law, q)
        if leaf:
            self.decide(i, w, min(1.0, tol) if w < 1 else noise)
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
        self.decide(i, h, min(1.0, tol + 2 * noise / max(denominator, 1e-300)))
        if i < claim.accepted:
            self.logprob(i, x, law)
        elif i == claim.accepted:
            bits |= self.final(i, w, law, q, bonus=False)
        return _State(i + 1, 1.0 if w * p >= scaled else w * p / scaled, False, bits)

    def decide(self, i: int, h: float, slack: float) -> None:
        """Check the coin of node i of a block and what is reported of it; the root has none."""
        if i == 0:
            return
        if i >= self.claim.accepted:
            self.flip(i - 1, h, slack, accepted=i == self.claim.accepted)
        self.reported(i - 1, h, slack)

    def final(self, n: int, w: float, law: Law | None, q: Tensor | None, bonus: bool) -> int:
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
    return _explain(result, case, request, tolerance)[0]


def _explain(
    result: VerifyOutcome, case: VerifyCase, request: int, tolerance: float
) -> tuple[str, bool]:
    """Give what `explain_outcome` says, and whether the exact laws do: no filter is at a tie."""
    n = int(result.num_accepted[request])
    tokens = result.tokens[request].tolist()
    checked = Request(case, request, tolerance, tokens)
    if not 0 <= n <= len(checked.tokens):
        return f"{n} accepted of a draft of {len(checked.tokens)}", False
    expected = checked.tokens[:n] + tokens[n : n + 1] + [-1] * (case.gamma - n)
    if tokens != expected:
        return f"tokens {tokens} are not {n} draft tokens, one more and -1", False
    claim = _Claim(
        n,
        tokens[n],
        result.logprobs[request].tolist(),
        result.accept_probs[request].tolist(),
        int(result.status[request]),
    )
    if _Checker(checked, claim, exact=True).admits():
        return "", True
    checker = _Checker(checked, claim)
    return "" if checker.admits() else checker.reason, False


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
        How many requests were excused by a tie. Tests should bound it: ties are rare.

    Raises
    ------
    AssertionError
        A request differs, and its outcome is not admissible in float64.

    Notes
    -----
    The block rule's thresholds ``h = R / D``, ``D = R + (1 - w)``, are ill-conditioned where nearly
    everything is accepted: R and 1 - w are what a p near 1 leaves, and an error e of p is one of
    e / D in h. The law of what is emitted does not feel it: the thresholds of a rounded p give that
    of the rounded p. So a request whose ``accept_probs`` alone differ, by no more than this, is not
    a tie, and is not counted.

    Examples
    --------
    >>> from specdec_ext import reference
    >>> from specdec_ext.testing import make_case
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
    agreed = (result.tokens == expected.tokens).all(1)
    agreed &= (result.num_accepted == expected.num_accepted) & (result.status == expected.status)
    agreed &= _same(result.logprobs, expected.logprobs, 2 * tolerance, 1e-6)
    same = agreed & _same(result.accept_probs, expected.accept_probs, tolerance, 1e-6)
    excused = 0
    for b in (~same).nonzero().flatten().tolist():
        reason, exact = _explain(result, case, b, tolerance)
        if reason:
            rows = "\n".join(
                f"  {name}: {got[b].tolist()} against {wanted[b].tolist()}"
                for name, got, wanted in zip(VerifyOutcome._fields, result, expected, strict=True)
            )
            raise AssertionError(f"{case.name or 'case'}, request {b}: {reason}\n{rows}")
        excused += not (exact and bool(agreed[b]))
    return excused
