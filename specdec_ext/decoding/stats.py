"""What a generation did and where its time went: counts with written definitions.

Words. A *round* is one call of the target, on every request still running. A *request call* is one
request's part in one round. In it, draft token i (1-based) is

* *drafted* if it was offered for verification;
* *accepted* if verification accepted it and the output kept it;
* *rejected* if the round's final token took its place and the output kept that token;
* *tested* if it was accepted or rejected. Draft tokens after a rejection are no trials: whatever
  they were, the round could not have taken them.

The output is cut behind a stop token, and so are these counts: what verification accepted behind
the stop token is neither accepted nor tested nor emitted.

The prompts ride on the first round: its calls run them, too, so that no call is spent on prompts
alone, and their time is in `decode_seconds`. Where they cannot (a drafter that reads the target's
states of them, a model with a recurrent state, a long prompt before a tree), they are run before,
in the phase ``prefill``, which is no round and emits nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["PHASES", "Clock", "Statistics"]

PHASES = ("prefill", "draft", "target", "verify", "rest")


class Clock:
    """Time by phase, without synchronising: host time, or events in the stream of a CUDA device.

    Every moment between the first `start` and `stop` belongs to exactly one phase, so that the
    phases sum to the whole. On a CUDA device the moments are those of the stream: what the host
    does while the device computes is free, and what the device waits for counts in its phase.

    Parameters
    ----------
    device : torch.device
        Where the models run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._phase: str | None = None
        self._since = 0.0
        self._marks: list[tuple[str | None, Any]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def start(self, phase: str | None) -> None:
        """End the running phase and begin ``phase``."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
            return
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def stop(self) -> dict[str, float]:
        """End the running phase; return the seconds of each phase (waits for a CUDA device)."""
        self.start(None)
        if self._marks:
            self._marks[-1][1].synchronize()
            for (phase, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
                if phase is not None:
                    self._seconds[phase] += begin.elapsed_time(end) / 1e3
            self._marks.clear()
        return dict(self._seconds)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


@dataclass
class Statistics:
    """Counts and times of one generation; the module's text defines the words.

    Two of them add up to the statistics of both generations together.

    Attributes
    ----------
    gamma : int
        Draft tokens asked for in a round, or the most that the policy may ask for. Near a request's
        limit there are fewer.
    rounds : int
        Target calls, but those that ran prompts alone.
    request_calls : int
        Request calls: the sum over rounds of the requests that were running.
    draft_calls : int
        Calls of the draft model, but those that ran prompts alone (0 without one); of a hierarchy,
        of all levels.
    drafted : int
        Draft tokens offered for verification.
    tested : list of int
        ``tested[i]``: request calls in which draft token i + 1 was tested.
    passed : list of int
        ``passed[i]``: request calls in which draft token i + 1 was accepted.
    histogram : list of int
        ``histogram[n]``: request calls with exactly n accepted draft tokens, n = 0..gamma.
    new_tokens : list of int
        Tokens emitted for each request.
    rank_tested : list of int
        Trees. ``rank_tested[k]``: nodes that verification came to, with a final token kept or a
        child accepted there, that have a child k + 1. (k counts siblings in the order of nodes.)
    rank_passed : list of int
        Trees. ``rank_passed[k]``: how often it went on to that child.
    alpha_sum : float
        Chains. Sum of the samples of alpha, see `alpha`.
    alpha_samples : int
        How many there are.
    seconds : dict of str to float
        Wall time by phase: ``prefill`` (all before the first round: how the models are to be run,
        prompts that are run alone), ``draft`` (proposing), ``target`` (its calls), ``verify`` (the
        operator), ``rest`` (all else: logits processors of the target's rows, the synchronisation,
        the caches' rollback, the bookkeeping).
    """

    gamma: int
    rounds: int = 0
    request_calls: int = 0
    draft_calls: int = 0
    drafted: int = 0
    tested: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    rank_tested: list[int] = field(default_factory=list)
    rank_passed: list[int] = field(default_factory=list)
    alpha_sum: float = 0.0
    alpha_samples: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def __post_init__(self) -> None:
        """Size the counters of each draft position."""
        self.tested = self.tested or [0] * self.gamma
        self.passed = self.passed or [0] * self.gamma
        self.histogram = self.histogram or [0] * (self.gamma + 1)

    def record(
        self, request: int, *, drafted: int, accepted: int, emitted: int, rejected: bool
    ) -> None:
        """Count one request call.

        Parameters
        ----------
        request : int
            Which request.
        drafted : int
            Draft tokens offered.
        accepted : int
            Draft tokens accepted and kept.
        emitted : int
            Tokens kept, the final one included if it was kept.
        rejected : bool
            Whether draft token ``accepted + 1`` was rejected, and the token in its place kept.
        """
        self.request_calls += 1
        self.drafted += drafted
        self.new_tokens[request] += emitted
        self.histogram[accepted] += 1
        for i in range(accepted):
            self.tested[i] += 1
            self.passed[i] += 1
        if rejected:
            self.tested[accepted] += 1

    def record_alpha(self, samples: Sequence[float]) -> None:
        """Count samples of alpha."""
        self.alpha_sum += sum(samples)
        self.alpha_samples += len(samples)

    def record_ranks(self, nodes: Iterable[tuple[int, int | None]]) -> None:
        """Count the nodes that verification came to: children, and the rank of the one taken."""
        for children, taken in nodes:
            missing = [0] * (children - len(self.rank_tested))
            self.rank_tested += missing
            self.rank_passed += missing
            for rank in range(children):
                self.rank_tested[rank] += 1
            if taken is not None:
                self.rank_passed[taken] += 1

    @property
    def emitted(self) -> int:
        """Tokens generated: accepted draft tokens, replacements and bonus tokens."""
        return sum(self.new_tokens)

    @property
    def accepted(self) -> int:
        """Draft tokens in the output."""
        return sum(self.passed)

    @property
    def rejected(self) -> int:
        """Draft tokens replaced by a token of the target's."""
        return sum(self.tested) - self.accepted

    @property
    def bonus(self) -> int:
        """Tokens of the target's own that replaced nothing; plain decoding has no other kind."""
        return self.emitted - self.accepted - self.rejected

    @property
    def tokens_per_target_call(self) -> float:
        """Tokens emitted per request call; plain decoding has 1."""
        return _ratio(self.emitted, self.request_calls)

    @property
    def accepted_of_tested(self) -> float:
        """``accepted / (accepted + rejected)``, of the rule in use (NaN if nothing was tested).

        Under ``"token"`` it estimates `alpha`; ``"block"`` accepts more of the same drafts.
        """
        return _ratio(self.accepted, self.accepted + self.rejected)

    @property
    def alpha(self) -> float:
        """Mean over tested draft tokens of sum_x min(p(x), q(x)): the papers' alpha.

        It belongs to the models, whatever the rule: the probability that the rule ``"token"``
        accepts a draft token (Leviathan et al., arXiv 2211.17192, definitions 3.1 and 3.4). NaN
        where it is not known: under rules other than "token" and "greedy" it must be asked for by
        ``measure_alpha=True``.
        """
        return _ratio(self.alpha_sum, self.alpha_samples)

    @property
    def conditional_acceptance(self) -> list[float]:
        """P(draft token i accepted, given that it was tested), for i = 1..gamma.

        A draft token is tested where all before it were accepted: P(accept i | accepted i - 1).
        NaN where none was.
        """
        return [_ratio(p, t) for p, t in zip(self.passed, self.tested, strict=True)]

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of request calls in which draft token i was accepted, for i = 1..gamma.

        They sum to `mean_accepted_length`. (Drafts that are short or missing count as calls without
        it; `conditional_acceptance` leaves them out.)
        """
        return [_ratio(p, self.request_calls) for p in self.passed]

    @property
    def acceptance_by_rank(self) -> list[float]:
        """P(the k-th child of a node is the one accepted), k = 1, ...; for `sequoia_tree`."""
        return [_ratio(p, t) for p, t in zip(self.rank_passed, self.rank_tested, strict=True)]

    @property
    def mean_accepted_length(self) -> float:
        """Accepted draft tokens per request call."""
        return _ratio(self.accepted, self.request_calls)

    @property
    def decode_seconds(self) -> float:
        """Wall time of all phases but the prefill."""
        return sum(value for phase, value in self.seconds.items() if phase != "prefill")

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted, of all requests, per second of `decode_seconds`."""
        return _ratio(self.emitted, self.decode_seconds)

    @property
    def verify_share(self) -> float:
        """Share of `decode_seconds` that went into verification."""
        return _ratio(self.seconds["verify"], self.decode_seconds)

    def __add__(self, other: Statistics) -> Statistics:
        """Count two generations together; ``new_tokens`` are those of both, one after the other."""
        if not isinstance(other, Statistics):
            return NotImplemented
        gamma = max(self.gamma, other.gamma)

        ranks = max(len(self.rank_tested), len(other.rank_tested))

        def add(a: list[int], b: list[int], size: int) -> list[int]:
            pad = [0] * size
            return [x + y for x, y in zip((a + pad)[:size], (b + pad)[:size], strict=True)]

        return Statistics(
            gamma,
            self.rounds + other.rounds,
            self.request_calls + other.request_calls,
            self.draft_calls + other.draft_calls,
            self.drafted + other.drafted,
            add(self.tested, other.tested, gamma),
            add(self.passed, other.passed, gamma),
            add(self.histogram, other.histogram, gamma + 1),
            self.new_tokens + other.new_tokens,
            add(self.rank_tested, other.rank_tested, ranks),
            add(self.rank_passed, other.rank_passed, ranks),
            self.alpha_sum + other.alpha_sum,
            self.alpha_samples + other.alpha_samples,
            {phase: self.seconds[phase] + other.seconds[phase] for phase in PHASES},
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything above as plain numbers, ready for JSON (NaN becomes None)."""

        def plain(value: Any) -> Any:
            if isinstance(value, float):
                return value if math.isfinite(value) else None
            return [plain(item) for item in value] if isinstance(value, list) else value

        names = (
            "gamma",
            "rounds",
            "request_calls",
            "draft_calls",
            "emitted",
            "drafted",
            "accepted",
            "rejected",
            "bonus",
            "tokens_per_target_call",
            "accepted_of_tested",
            "alpha",
            "mean_accepted_length",
            "conditional_acceptance",
            "acceptance_by_position",
            "acceptance_by_rank",
            "histogram",
            "new_tokens",
            "decode_seconds",
            "tokens_per_second",
            "verify_share",
        )
        return {name: plain(getattr(self, name)) for name in names} | {"seconds": self.seconds}

    def summary(self) -> dict[str, float]:
        """Give what matters as one flat dict of numbers, for a log or a metrics hook.

        Counts, rates, seconds of each phase and, as ``acceptance_at_1`` and so on, what
        `acceptance_by_position` says. What is not known (alpha without ``measure_alpha``, rates of
        drafts where there were none) is left out, so that every value is a finite number.

        Examples
        --------
        >>> statistics = Statistics(2, new_tokens=[0])
        >>> statistics.record(0, drafted=2, accepted=1, emitted=2, rejected=True)
        >>> found = statistics.summary()
        >>> found["tokens_per_target_call"], found["acceptance_at_1"], found["acceptance_at_2"]
        (2.0, 1.0, 0.0)
        """
        names = (
            "rounds",
            "request_calls",
            "draft_calls",
            "emitted",
            "drafted",
            "accepted",
            "rejected",
            "tokens_per_target_call",
            "accepted_of_tested",
            "alpha",
            "mean_accepted_length",
            "decode_seconds",
            "tokens_per_second",
        )
        found: dict[str, float] = {name: getattr(self, name) for name in names}
        for i, share in enumerate(self.acceptance_by_position, start=1):
            found[f"acceptance_at_{i}"] = share
        for phase, seconds in self.seconds.items():
            found[f"seconds_{phase}"] = seconds
        return {name: value for name, value in found.items() if math.isfinite(value)}
