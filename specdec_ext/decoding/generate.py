"""Speculative generation: propose, verify, commit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.decoding import arguments
from specdec_ext.decoding.drafters import Drafter, Requests, as_drafter, last_tokens
from specdec_ext.decoding.stats import Clock, Statistics
from specdec_ext.decoding.trees import GrownTree, StaticTree

__all__ = ["Burst", "Generated", "GenerationError", "generate"]

READ_DRAFT_LAW = ("block", "token", "lenient")
DRAFT_ENDED_EARLY = ops.STATUS_INVALID_DRAFT_TOKEN | ops.STATUS_NO_DRAFT_LAW
ROOM = 512  # slots that the caches allocate beyond the prompt; they double when it is used up
FATAL = {
    ops.STATUS_NO_TARGET_LAW: "the target's logits hold NaN, +inf or nothing finite",
    ops.STATUS_PARAMETER_OUT_OF_RANGE: "a sampling parameter is out of range",
    ops.STATUS_INVALID_TREE: "the draft is no valid tree",
}


class Burst(NamedTuple):
    """What one round added to one request.

    Attributes
    ----------
    request : int
        Which.
    tokens : list of int
        The tokens added: ``accepted`` draft tokens, then at most one token of the target's own.
    accepted : int
        How many of them are draft tokens.
    replaced : int or None
        The draft token in whose place the target's own stands; None where it replaces nothing.
    """

    request: int
    tokens: list[int]
    accepted: int
    replaced: int | None


class Generated(NamedTuple):
    """Result of `generate`.

    Attributes
    ----------
    sequences : Tensor
        ``[B, P + N]``, the prompts as given and the new tokens, ``pad_token_id`` after the end.
    statistics : Statistics
        Counts and times, with definitions.
    """

    sequences: Tensor
    statistics: Statistics


class GenerationError(RuntimeError):
    """Verification reported a request that cannot go on.

    Attributes
    ----------
    requests : list of int
        Which requests.
    status : list of int
        The status bits of each of them.
    sequences : Tensor
        As in `Generated`: what every request had when the error came.
    statistics : Statistics
        As in `Generated`.
    """

    def __init__(
        self,
        message: str,
        requests: list[int],
        status: list[int],
        sequences: Tensor,
        statistics: Statistics,
    ) -> None:
        super().__init__(message)
        self.requests = requests
        self.status = status
        self.sequences = sequences
        self.statistics = statistics


def generate(
    target: Any,
    draft: Any | Drafter | None,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    gamma: int = 5,
    temperature: float | Sequence[float] | Tensor = 0.0,
    top_k: int | Sequence[int] | Tensor | None = None,
    top_p: float | Sequence[float] | Tensor | None = None,
    min_p: float | Sequence[float] | Tensor | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
    generator: torch.Generator | None = None,
    tree: StaticTree | GrownTree | None = None,
    rule: str | None = None,
    lenience: float = 1.0,
    beta: int = 3,
    tau: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    on_round: Callable[[list[Burst]], None] | None = None,
) -> Generated:
    """Generate with a target model and a draft: each target call verifies several draft tokens.

    Under the rules ``"block"``, ``"token"`` and ``"coupled"`` the new tokens are distributed as the
    target's own: sampled, they follow its law under the given filters; at temperature 0 they are
    its greedy choice. Only the wall time depends on the draft. (Leviathan et al., arXiv 2211.17192;
    block verification: Sun et al., arXiv 2403.10444.) Under ``"coupled"`` the very tokens do not
    depend on the draft, gamma or the batch either, for equal logits of the target: they are those
    of plain decoding with the same seeds. (Daliri, Musco, Suresh, arXiv 2408.07978.)

    Parameters
    ----------
    target : torch.nn.Module
        A Hugging Face causal language model, unmodified and in evaluation mode.
    draft : torch.nn.Module, Drafter or None
        A smaller causal model over the same tokens, or any `Drafter`. None: plain decoding.
    input_ids : Tensor
        ``[B, P]`` int64 or int32 prompts, left-padded.
    attention_mask : Tensor, optional
        ``[B, P]``, zeros at padding. None: every token is part of its prompt.
    max_new_tokens : int or sequence of int
        Limit on new tokens, of all requests or of each. Never exceeded.
    gamma : int
        Draft tokens a round; of no account where ``tree`` is given.
    temperature, top_k, top_p, min_p : number, sequence or Tensor ``[B]``
        The sampling law, of all requests or of each, as in `specdec_ext.verify`; the draft samples
        under the same filters. Temperature 0 (the default) is greedy. The model's own
        ``generation_config`` is not consulted for these.
    seeds : int, sequence of int or Tensor ``[B]``, optional
        Seed of each request; an int s stands for s, s + 1, ... A request's tokens are a function of
        its seed, its prompt and the models' logits, whatever else is in the batch.
    generator : torch.Generator, optional
        Draws the seeds where none are given (default: torch's own generator).
    tree : StaticTree or GrownTree, optional
        Draft a tree in place of a chain; every node of it is run through the target in the same
        call, under a 4-D attention mask. The draft must be a model then.
    rule : str, optional
        The verification rule, as in `specdec_ext.verify` (default "block") or, with a tree, in
        `specdec_ext.verify_tree` (default "traversal").
    lenience, beta, tau, epsilon, delta : float
        Of the rules that are not lossless, as in `specdec_ext.verify`.
    eos_token_id : int or iterable of int, optional
        Tokens that end a request (and are kept). None: those of the model's configuration, ``()``:
        none.
    pad_token_id : int, optional
        Fills ``sequences`` behind the end of a request. None: the model's, else the first stop
        token, else 0.
    on_round : callable, optional
        Called after every round with what it added (a list of `Burst`).

    Returns
    -------
    Generated
        ``(sequences, statistics)``.

    Raises
    ------
    GenerationError
        A request cannot go on (the target's logits hold NaN, say). The error names it and carries
        what was generated for all of them.

    Notes
    -----
    The host waits for the device once a round. The cache has a slot for every token of every row;
    tokens that a row rejected while another kept its own are masked out (see `CachedModel`).

    Examples
    --------
    >>> sequences, statistics = generate(target, draft, input_ids, gamma=5)  # doctest: +SKIP
    >>> statistics.tokens_per_target_call  # doctest: +SKIP
    3.1
    """
    arguments.check_prompts(input_ids, attention_mask)
    arguments.check_count("gamma", gamma)
    batch = input_ids.shape[0]
    limits = arguments.per_request("max_new_tokens", max_new_tokens, batch)
    for limit in limits:
        arguments.check_count("max_new_tokens", limit)
    filters, greedy = arguments.filters(
        batch,
        input_ids.device,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    if rule is None:
        rule = "block" if tree is None else "traversal"
    greedy = greedy or rule == "greedy"
    randomness = arguments.seeds(seeds, generator, batch, input_ids.device, unused=greedy)
    if getattr(target, "training", False) or getattr(draft, "training", False):
        warnings.warn(
            "generate: a model is in training mode; without eval(), dropout is part of its law",
            stacklevel=2,
        )
    stop = arguments.stop_tokens(target, eos_token_id)
    kind: type[_Generation] = _Generation
    if tree is None:
        drafter, gamma = as_drafter(draft), 0 if draft is None else gamma
    else:
        from specdec_ext.decoding.tree_generation import TreeGeneration

        kind, drafter, gamma = TreeGeneration, _tree_drafter(draft, tree), tree.depth
    generation = kind(
        target,
        drafter,
        input_ids,
        attention_mask,
        limits=limits,
        gamma=gamma,
        filters=filters,
        greedy=greedy,
        seeds=randomness,
        rule=rule,
        rule_options={
            "lenience": lenience,
            "beta": beta,
            "tau": tau,
            "epsilon": epsilon,
            "delta": delta,
        },
        stop=frozenset(stop),
        pad=arguments.pad_token(target, pad_token_id, stop),
    )
    with torch.inference_mode():
        generation.start()
        while generation.running:
            bursts = generation.step()
            if on_round is not None:
                on_round(bursts)
    return generation.result()


class _Generation:
    """The state of one call of `generate`; `step` is the algorithm.

    Rows of the batch are the running requests: a request that ends leaves the batch.
    """

    lossless: tuple[str, ...] = (
        "block",
        "token",
        "coupled",
    )  # at temperature 0, the same as "greedy"

    def __init__(
        self,
        target: Any,
        drafter: Drafter,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        limits: list[int],
        gamma: int,
        filters: dict[str, Any],
        greedy: bool,
        seeds: Tensor,
        rule: str,
        rule_options: dict[str, Any],
        stop: frozenset[int],
        pad: int,
    ) -> None:
        self.target_model = target
        self.drafter = drafter
        self.prompts = input_ids
        self.attention_mask = attention_mask
        self.gamma = gamma
        self.rule = "greedy" if greedy and rule in self.lossless else rule
        self.filters = {} if self.rule == "greedy" else filters
        self.seeds = seeds
        self.rule_options = rule_options
        self.needs_law = self.rule in READ_DRAFT_LAW
        self.greedy = greedy
        self.stop = stop
        self.pad = pad
        self.limits = limits
        self.new: list[list[int]] = [[] for _ in limits]
        self.running = [b for b, limit in enumerate(limits) if limit > 0]
        self.statistics = Statistics(gamma, new_tokens=[0] * len(limits))
        self.clock = Clock(input_ids.device)

    def start(self) -> None:
        """Run the prompts but their last tokens through both models."""
        from specdec_ext.decoding.cache import CachedModel

        if not self.running:
            return
        self.clock.start("prefill")
        ids, mask = arguments.trimmed(self.prompts.long(), self.attention_mask)
        device = ids.device
        lengths = [ids.shape[1]] * len(self.limits) if mask is None else mask.sum(1).tolist()
        self.positions = torch.tensor(lengths, device=device)  # [B], where the next token goes
        self.ends = self.positions + torch.tensor(self.limits, device=device)
        room = ids.shape[1] + min(max(self.limits) + self.gamma, ROOM)
        self.target = CachedModel(self.target_model, self.ends, room=room)
        self.target.prefill(ids[:, :-1], None if mask is None else mask[:, :-1])
        self.drafter.start(
            Requests(
                ids,
                mask,
                self.ends,
                room,
                self.seeds,
                self.filters,
                self.greedy,
                self.needs_law,
                coupled=self.rule == "coupled",
            )
        )
        self.last = ids[:, -1:]  # [B, 1], each row's last token, which no cache holds
        if len(self.running) < len(self.limits):
            self._keep(self.running)
        self.clock.start("rest")

    def step(self) -> list[Burst]:
        """One round: every running request gains between 1 and gamma + 1 tokens."""
        remaining = [self.limits[b] - len(self.new[b]) for b in self.running]
        gamma = min(self.gamma, max(remaining) - 1)  # the final token counts, too

        self.clock.start("draft")
        draft = self.drafter.propose(gamma, self.positions)
        gamma = draft.tokens.shape[1]  # it may have had fewer to propose

        self.clock.start("target")
        logits = self.target.forward(torch.cat([self.last, draft.tokens], 1))  # [B, gamma + 1, V]

        self.clock.start("verify")
        verified = ops.verify(
            logits,
            draft.tokens,
            draft.logits,
            draft_kinds=draft.kinds if self.needs_law else None,
            draft_lengths=self._lengths(gamma, remaining),
            seeds=self.seeds,
            positions=self.positions,
            rule=self.rule,
            **self.filters,
            **self.rule_options,
        )

        self.clock.start("rest")
        rows = torch.cat(
            [
                verified.tokens,
                draft.tokens,
                verified.num_accepted[:, None],
                verified.status[:, None],
            ],
            1,
        ).tolist()  # the round's one host synchronisation
        self.statistics.rounds += 1
        bursts = [
            self._append(i, row, min(gamma, left - 1), verified.accept_probs)
            for i, (row, left) in enumerate(zip(rows, remaining, strict=True))
        ]
        self._raise_if_fatal([row[-1] for row in rows])
        self._commit(verified.tokens, [row[-2] for row in rows], verified.num_accepted, bursts)
        return bursts

    def _lengths(self, gamma: int, remaining: list[int]) -> Tensor | None:
        """Return how many draft tokens each request may take, where some may not take all."""
        if min(remaining) > gamma:
            return None
        return (self.ends - self.positions - 1).clamp(max=gamma)

    def _emitted(self, row: list[int], accepted: int, status: int) -> list[int]:
        """Return what a round emitted, up to a stop token; without a law, no final token."""
        tokens = row[: accepted + (0 if status & ops.STATUS_NO_TARGET_LAW else 1)]
        end = next((n for n, token in enumerate(tokens, 1) if token in self.stop), len(tokens))
        return tokens[:end]

    def _append(self, i: int, row: list[int], length: int, accept_probs: Tensor) -> Burst:
        """Add to running request ``i`` what the round emitted, up to a stop token; count it."""
        b, accepted, status = self.running[i], row[-2], row[-1]
        gamma = (len(row) - 3) // 2
        drafted = row[gamma + 1 : gamma + 1 + length]
        length = next((n for n, token in enumerate(drafted) if token < 0), length)
        # The draft may have ended where its law failed: what stands there then replaces nothing.
        # Columns that verification did not test hold NaN (a second synchronisation, in this case).
        rejected = accepted < length and not (
            status & DRAFT_ENDED_EARLY and math.isnan(accept_probs[i, accepted].item())
        )
        tokens = self._emitted(row, accepted, status)
        rejected = rejected and len(tokens) == accepted + 1
        accepted = min(accepted, len(tokens))
        self.new[b] += tokens
        self.statistics.record(
            b, drafted=length, accepted=accepted, emitted=len(tokens), rejected=rejected
        )
        return Burst(b, tokens, accepted, drafted[accepted] if rejected else None)

    def _commit(
        self, tokens: Tensor, accepted: list[int], num_accepted: Tensor, bursts: list[Burst]
    ) -> None:
        """Drop the requests that ended; roll both caches back to what the others accepted."""
        going = self._going(bursts)
        if not going:
            self.running = []
            return
        if len(going) < len(bursts):
            kept = self._keep(going)
            tokens, num_accepted = tokens[kept], num_accepted[kept]
            accepted = [accepted[i] for i in going]
            self.running = [self.running[i] for i in going]
        gamma = tokens.shape[1] - 1
        self.target.rollback([gamma - n for n in accepted], gamma - num_accepted)
        self.drafter.commit(tokens, accepted, num_accepted)
        self.last = last_tokens(tokens, accepted, num_accepted, 1)
        self.positions = self.positions + num_accepted + 1

    def _going(self, bursts: list[Burst]) -> list[int]:
        """Which of the running requests go on."""
        return [
            i
            for i, burst in enumerate(bursts)
            if burst.tokens[-1] not in self.stop
            and len(self.new[burst.request]) < self.limits[burst.request]
        ]

    def _keep(self, indices: list[int]) -> Tensor:
        """Keep only these rows of the batch."""
        rows = torch.tensor(indices, device=self.last.device)
        self.target.select(rows, indices)
        self.drafter.select(rows, indices)
        self.last, self.positions, self.ends = (
            self.last[rows],
            self.positions[rows],
            self.ends[rows],
        )
        self.seeds = self.seeds[rows]
        self.filters = {name: value[rows] for name, value in self.filters.items()}
        return rows

    def _raise_if_fatal(self, status: list[int]) -> None:
        fatal = sum(FATAL)
        failed = [(b, bits) for b, bits in zip(self.running, status, strict=True) if bits & fatal]
        if not failed:
            return
        b, bits = failed[0]
        reasons = " and ".join(text for bit, text in FATAL.items() if bits & bit)
        others = f" ({len(failed) - 1} more requests failed)" if len(failed) > 1 else ""
        sequences, statistics = self.result()
        raise GenerationError(
            f"generate: request {b}: {reasons} (status {bits}) after {len(self.new[b])} new "
            f"tokens{others}; what was generated is in this error's .sequences",
            [b for b, _ in failed],
            [bits for _, bits in failed],
            sequences,
            statistics,
        )

    def result(self) -> Generated:
        """Return what there is by now."""
        self.statistics.seconds = self.clock.stop()
        self.statistics.draft_calls = self.drafter.calls
        width = max(map(len, self.new), default=0)
        with torch.inference_mode(False):
            new = torch.tensor(
                [tokens + [self.pad] * (width - len(tokens)) for tokens in self.new],
                dtype=self.prompts.dtype,
                device=self.prompts.device,
            ).reshape(len(self.new), width)
            return Generated(torch.cat([self.prompts, new], 1), self.statistics)


def _tree_drafter(draft: Any, tree: StaticTree | GrownTree) -> Any:
    """Return the drafter that drives a model to draft a tree."""
    from specdec_ext.decoding.drafters.tree import TreeDrafter

    if draft is None or hasattr(draft, "propose"):
        raise TypeError(
            "generate: draft must be a causal model where a tree is asked for, got "
            f"{type(draft).__name__}"
        )
    return TreeDrafter(draft, tree)
