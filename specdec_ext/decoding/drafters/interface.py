"""What the loop needs of a drafter: `Drafter`, what it is told and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import ops
from ...contract import DOMAIN_COUPLED, DOMAIN_DRAFT
from ..checks import shown
from ..counts import Counts
from ..texts import on_the_host

if TYPE_CHECKING:
    from ..grown_trees import GrownTree
    from ..trees import StaticTree, TreeDraft

__all__ = [
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "GoOn",
    "MaskNodes",
    "NoDrafter",
    "Process",
    "Requests",
    "RevisableDrafter",
    "TreeProposer",
    "made_drafter",
    "asked_for_some",
    "over_the_target",
    "check_draft",
    "ByChance",
    "estimates_chances",
    "estimates_some_chances",
    "reads_features",
]

#: Asked after every draft token but the last: ``go_on(tokens [B], logits [B, V] or None)``, the
#: tokens just proposed and the rows over the target's tokens that they were drawn from, returns
#: ``[B]`` bool, which requests propose another. It must see nothing of a token that is then
#: dropped, or the law is lost.
GoOn = Callable[[Tensor, Tensor | None], Tensor]


class Process(Protocol):
    """Runs the caller's logits processors on rows that a drafter is to draw from, and grammars."""

    def __call__(
        self, logits: Tensor, drafted: Tensor, emitted: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Return the processed rows; rows over other tokens than the target's are only masked.

        Parameters
        ----------
        logits : Tensor
            ``[B, m, Vd]``, the rows after the last m of the i + 1 prefixes of ``drafted``.
        drafted : Tensor
            ``[B, i]``, what is drafted so far, behind what the target has.
        emitted : sequence of sequence of int, optional
            What a level of a hierarchy has emitted in between, of each request.

        Returns
        -------
        Tensor
            ``[B, m, Vd]`` float32. The host waits for the device.
        """


class MaskNodes(Protocol):
    """Hides what the caller's grammars do not allow in rows of a tree that is being drafted."""

    def __call__(self, logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the rows with -inf at tokens that may not come.

        Parameters
        ----------
        logits : Tensor
            ``[B, m, V]``, of the last m nodes.
        tokens, parents : Tensor
            ``[B, n]`` int64, all nodes so far; what stands at the root, node 0, is not read.

        Returns
        -------
        Tensor
            ``[B, m, V]``. The host waits for the device.
        """


def over_the_target(rows: Tensor, token_ids: Tensor | None, size: int | None = None) -> Tensor:
    """Give entries of rows over a reduced vocabulary the places of their tokens.

    Parameters
    ----------
    rows : Tensor
        ``[..., Vd]`` logits.
    token_ids : Tensor or None
        ``[Vd]`` int64, the target's token of each entry. None: these are the target's.
    size : int, optional
        V, the width of the rows that are returned. None: as far as the last of these tokens.

    Returns
    -------
    Tensor
        ``[..., V]``, -inf at tokens that have no entry.
    """
    if token_ids is None:
        return rows
    if size is None:
        size = int(token_ids.max()) + 1
    whole = rows.new_full((*rows.shape[:-1], size), -torch.inf)
    return whole.index_copy(rows.dim() - 1, token_ids, rows)


@dataclass(frozen=True)
class Requests:
    """What a drafter is told at the start: the prompts, and how tokens will be drawn.

    Attributes
    ----------
    input_ids : Tensor
        ``[B, P]`` int64, left-padded.
    attention_mask : Tensor or None
        ``[B, P]``, zeros at padding; None if there is none.
    ends : Tensor
        ``[B]`` int64, the position at which each request must stop.
    room : int
        Slots that a cache should allocate at first.
    seeds : Tensor or None
        ``[B]`` int64; None if nothing is drawn at random.
    filters : mapping of str to Tensor
        ``temperature``, ``top_k``, ``top_p``, ``min_p`` that the draft is sampled with, ``[B]``
        each; absent: off. They are the target's, unless the caller gave the draft its own.
    greedy : bool
        Whether every draft token is to be the likeliest one.
    needs_law : bool
        Whether verification reads the law that draft tokens were drawn from.
    coupled : bool
        Whether the target will race for each token on the noise of the COUPLED domain: a draft that
        draws in the same domain is accepted more often.
    stream : int
        The stream of `specdec_ext.sample` and `specdec_ext.verify` that is the drafter's own; a
        hierarchy gives each level one of its own.
    static_cache : bool
        Whether caches keep one size, as compiled models want it.
    process : Process or None
        Runs the caller's logits processors on rows over the target's tokens, and hides what the
        caller's grammars do not allow there, see `Process`; None if there are none of both. A
        drafter need not use it: the law that it passes on is the one it drew from, either way.
    mask_nodes : MaskNodes or None
        The grammars' part of that, for a `TreeProposer`; None if there are none.
    tree : StaticTree, GrownTree or None
        What a `TreeProposer` is to draft in every round; None where chains are asked for.
    features : Tensor or None
        ``[B, P - 1, D]``, for a `FeatureDrafter`: the target's last hidden states at all tokens of
        the prompts but the last one. Column i is the state from which the target predicts what
        stands in column i + 1 of ``input_ids``; what stands at padding is not to be read. None for
        other drafters, and where all prompts have one token: then nothing was run.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    ends: Tensor
    room: int
    seeds: Tensor | None
    filters: Mapping[str, Any]
    greedy: bool
    needs_law: bool
    coupled: bool = False
    stream: int = 0
    static_cache: bool = False
    process: Process | None = None
    tree: StaticTree | GrownTree | None = None
    mask_nodes: MaskNodes | None = None
    features: Tensor | None = None

    @property
    def domain(self) -> int:
        """The domain of `specdec_ext.sample` that draft tokens are drawn in."""
        return DOMAIN_COUPLED if self.coupled else DOMAIN_DRAFT

    def texts(self) -> list[list[int]]:
        """Return the prompts on the host, without their padding."""
        return on_the_host(self.input_ids, self.attention_mask)

    def draw(
        self, logits: Tensor, positions: Tensor, index: int, token_ids: Tensor | None = None
    ) -> Tensor:
        """Draw draft token ``index`` (0-based) of each request from its row, under the filters.

        Parameters
        ----------
        logits : Tensor
            ``[B, Vd]``.
        positions : Tensor
            ``[B]``, where the round's first draft token goes.
        index : int
            Which draft token of the round.
        token_ids : Tensor, optional
            ``[Vd]`` int64, the target's token of each entry, of a reduced vocabulary.

        Returns
        -------
        Tensor
            ``[B]`` int64; -1 where a row has no law.
        """
        if self.greedy:
            best = logits.argmax(-1)
            return best if token_ids is None else token_ids[best]
        return ops.sample(
            logits,
            draft_token_ids=token_ids,
            seeds=self.seeds,
            positions=positions,
            draft_index=index,
            domain=self.domain,
            stream=self.stream,
            **self.filters,
        ).tokens

    def draw_independent(
        self,
        logits: Tensor,
        positions: Tensor,
        go_on: GoOn | None,
        going: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Draw draft tokens whose rows are there before any of them is drawn.

        Parameters
        ----------
        logits : Tensor
            ``[B, n, Vd]``, a row for each token.
        positions : Tensor
            ``[B]``, where the round's first draft token goes.
        go_on : GoOn or None
            Asked after every token but the last.
        going : Tensor, optional
            ``[B]`` bool, which requests draft at all. None: all.
        token_ids : Tensor, optional
            ``[Vd]`` int64, the target's token of each entry, of a reduced vocabulary.

        Returns
        -------
        tuple of list of Tensor
            Tokens ``[B]`` each, -1 behind a request's end, and the rows that they were drawn from,
            ``[B, Vd]`` each. Fewer than n where no request went on.
        """
        tokens: list[Tensor] = []
        rows: list[Tensor] = []
        for i, row in enumerate(logits.unbind(1)):
            rows.append(self.processed(row, tokens, token_ids))
            drawn = self.draw(rows[-1], positions, i, token_ids)
            tokens.append(drawn if going is None else torch.where(going, drawn, -1))
            if go_on is None or i == logits.shape[1] - 1:
                continue
            wanted = go_on(tokens[-1], over_the_target(rows[-1], token_ids))
            going = wanted if going is None else going & wanted
            if not bool(going.any()):
                break
        return tokens, rows

    def processed(
        self, logits: Tensor, tokens: Sequence[Tensor], token_ids: Tensor | None = None
    ) -> Tensor:
        """Run the caller's logits processors, if any, on the rows that come next.

        Parameters
        ----------
        logits : Tensor
            ``[B, Vd]``.
        tokens : sequence of Tensor
            ``[B]`` each, what is drafted so far in this round.
        token_ids : Tensor, optional
            ``[Vd]`` int64, the target's token of each entry, of a reduced vocabulary, whose rows
            stay as they are: processors read rows over the target's.

        Returns
        -------
        Tensor
            ``[B, Vd]``.
        """
        if self.process is None or token_ids is not None:
            return logits
        drafted = torch.stack(list(tokens), 1) if tokens else self.ends.new_empty(len(logits), 0)
        return self.process(logits[:, None], drafted)[:, 0]

    def of_trees(self) -> dict[str, Any]:
        """Give what `trees.draft_static` draws children with: ``seeds`` and ``filters``."""
        seeds = self.seeds
        if seeds is None:  # nothing is drawn at random, but samplers ask for noise
            seeds = torch.zeros_like(self.ends)
        filters = dict(self.filters)
        if self.greedy:
            filters = {"temperature": torch.zeros_like(self.ends, dtype=torch.float32)}
        return {"seeds": seeds, "filters": filters}

    def select(self, rows: Tensor) -> Requests:
        """Keep only these requests."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            attention_mask=None if self.attention_mask is None else self.attention_mask[rows],
            ends=self.ends[rows],
            seeds=None if self.seeds is None else self.seeds[rows],
            filters={name: value[rows] for name, value in self.filters.items()},
            features=None if self.features is None else self.features[rows],
        )


class Draft(NamedTuple):
    """Draft tokens of one round.

    Attributes
    ----------
    tokens : Tensor
        ``[B, G]`` int64; -1 ends a request's draft early.
    logits : Tensor or None
        ``[B, G, Vd]``, the rows that the tokens were drawn from; None: a deterministic drafter.
    kinds : Tensor or None
        ``[B, G]`` int8, 0 for a deterministic token, whatever its row says, 1 for one that was
        drawn from it. None: drawn where there are logits.
    token_ids : Tensor or None
        ``[Vd]`` int64, the target's token of each entry of ``logits``, of a reduced vocabulary;
        None: entry i is token i. Not without logits.
    masked : bool
        Whether all rows of ``logits`` come from `Requests.process`, so that they hold -inf where a
        grammar allows nothing. Verification then takes the packed masks as they are; otherwise the
        target's rows are cut first, which is as exact, and costs a copy of them.
    chances : sequence of sequence of float, or None
        Of each token of each request, what the drafter takes for the probability that it is
        accepted if those before it are. A policy may cut such a draft after the fact (see
        `GammaPolicy`), so only a drafter without randomness gives them, for deterministic tokens.
    """

    tokens: Tensor
    logits: Tensor | None = None
    kinds: Tensor | None = None
    token_ids: Tensor | None = None
    masked: bool = False
    chances: Sequence[Sequence[float]] | None = None


class ByChance(NamedTuple):
    """What a drafter is told that holds some drafters that estimate chances and some that do not.

    Attributes
    ----------
    weigh : callable
        Leaves out what is not worth its time of a draft with chances. A request that keeps nothing
        is the next drafter's.
    unestimated : list of int
        The most tokens of each request that drafters propose which estimate no chances.
    """

    weigh: Callable[[Draft], Draft]
    unestimated: list[int]


def check_draft(draft: Any, drafter: Any, batch: int, gamma: int) -> None:
    """Check that what a drafter proposed is a `Draft` of ``batch`` requests.

    Rows and kinds are left to the operator, which looks at them anyway.

    Raises
    ------
    TypeError
        It is none, or its tokens are no tensor.
    ValueError
        Its tokens have another shape or dtype, or there are more than ``gamma``; it has chances of
        other requests, or of drawn tokens.
    """
    by = f"generate: {type(drafter).__name__}.propose"
    if not isinstance(draft, Draft) or not isinstance(draft.tokens, Tensor):
        inner = f" of {shown(draft.tokens)}" if isinstance(draft, Draft) else ""
        raise TypeError(f"{by} must return a Draft of tensors, got {shown(draft)}{inner}")
    shape, dtype = list(draft.tokens.shape), draft.tokens.dtype
    if len(shape) != 2 or shape[0] != batch or shape[1] > gamma or dtype != torch.int64:
        raise ValueError(
            f"{by} must return int64 tokens [B, G] with B = {batch} and G <= {gamma}, got {shape} "
            f"{str(dtype).removeprefix('torch.')}"
        )
    if draft.chances is not None and (draft.logits is not None or len(draft.chances) != batch):
        raise ValueError(
            f"{by}: chances are those of {batch} requests' deterministic tokens, got "
            f"{len(draft.chances)} requests {'without' if draft.logits is None else 'with'} logits"
        )


class Drafter(Protocol):
    """Proposes draft tokens, and is told what became of them.

    A round is one `propose` and one `commit`. `select` comes between the two, when requests end.
    One that can stand beside others, in a `StackedDrafter` or a `BanditDrafter`, also has
    ``observe`` (`several.StackableDrafter`).
    """

    @property
    def calls(self) -> int:
        """Model calls so far, prefill excluded."""

    def start(self, requests: Requests) -> None:
        """Take the prompts."""

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Propose up to ``gamma`` tokens a request; ``positions`` ``[B]`` is where the first goes.

        (In a hierarchy that is no race: numbers that tell its calls apart, see
        `HierarchicalDrafter`.)

        A sampled token must come from `specdec_ext.sample` in the domain and stream that `Requests`
        says, with the request's seed, these positions and its index, or from randomness that
        verification never sees. A drafter whose tokens cost something asks ``go_on``; one whose
        tokens cost nothing and are not drawn may estimate their chances instead, see `Draft`.
        """

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Take note of what verification emitted.

        Parameters
        ----------
        tokens : Tensor
            ``[B, G + 1]``: the accepted draft tokens, the final token, then anything.
        accepted : Counts
            How many draft tokens of each request were accepted.
        """

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests, given on the device and on the host."""


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of the target: of those that its calls compute anyway.

    They come with the prompts, as `Requests.features`, and from then on with every round, from the
    call that verified it. The target is never run for them.
    """

    #: Whether it does; `generate` asks the target for hidden states where this is true.
    reads_features: bool

    def take_features(self, features: Tensor, tokens: Tensor, gained: Counts) -> None:
        """Take the target's last hidden states on the path that verification accepted.

        This comes once a round, before the `commit` (or, in a `StackedDrafter`, the ``observe``)
        that ends it.

        Parameters
        ----------
        features : Tensor
            ``[B, n, D]``, in the target's dtype: row i is the state from which the target predicted
            ``tokens[:, i]``, so row 0 is that of the text's last token before the round.
        tokens : Tensor
            ``[B, n]``: the tokens that verification emitted, the final one included.
        gained : Counts
            How many rows of each request count; then comes anything.
        """


class TreeProposer(Protocol):
    """A drafter that proposes trees, for ``generate(..., tree=...)``.

    A round is one `propose_tree` and one `commit_path`; `select` comes between the two, when
    requests end. A class may be a `Drafter` of chains as well.
    """

    @property
    def calls(self) -> int:
        """Model calls so far, prefill excluded."""

    def start(self, requests: Requests) -> None:
        """Take the prompts, and `Requests.tree`."""

    def propose_tree(self, positions: Tensor) -> TreeDraft:
        """Draft a tree for each request, of at most the depth of `Requests.tree`.

        Parameters
        ----------
        positions : Tensor
            ``[B]``, where the tokens of level 1 go.

        Returns
        -------
        TreeDraft
            What stands at the root is not read: it is the text's last token. A child that was drawn
            is declared so, with the row of logits that it was drawn from, and drawn from randomness
            that verification never sees: `trees.draft_static` and `grown_trees.draft_grown` do
            both. Whatever was chosen is a deterministic child.
        """

    def commit_path(self, tokens: Tensor, path: Tensor, accepted: Counts) -> None:
        """Take note of what verification emitted.

        Parameters
        ----------
        tokens : Tensor
            ``[B, N]``: the accepted draft tokens, the final token, then anything.
        path : Tensor
            ``[B, N]``: the nodes of the accepted tokens, then anything.
        accepted : Counts
            How many draft tokens of each request were accepted.
        """

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests, given on the device and on the host."""


class RevisableDrafter(Drafter, Protocol):
    """A drafter whose past commits can be revised, as a level of a hierarchy has to.

    There tokens that were committed are no more than proposals to the level above.
    """

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Take tokens back that commits emitted, and take one in their place.

        Parameters
        ----------
        text : Tensor
            ``[B, n]``, what each request's text is now, left-padded with -1: its last tokens are
            gone, and a new one ends it.
        drop : Counts
            How many tokens of each request are gone.
        """

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Take note of tokens that it did not propose, as a `StackableDrafter` does."""


@dataclass
class NoDrafter:
    """Proposes nothing: plain decoding."""

    calls: int = field(default=0, init=False)

    def start(self, requests: Requests) -> None:
        """Take the prompts."""

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Propose no token."""
        return Draft(torch.empty(positions.shape[0], 0, dtype=torch.int64, device=positions.device))

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Take note of what was emitted."""

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""


def estimates_chances(drafter: Any) -> bool:
    """Tell whether every draft of a drafter comes with chances, see `Draft`."""
    return bool(getattr(drafter, "estimates_chances", False))


def estimates_some_chances(drafter: Any) -> bool:
    """Tell whether a drafter takes `ByChance`: whether it holds drafters of both kinds."""
    return bool(getattr(drafter, "estimates_some_chances", False))


def reads_features(drafter: Any) -> bool:
    """Tell whether a drafter is to be given hidden states: whether it is a `FeatureDrafter`."""
    return bool(getattr(drafter, "reads_features", False))


def made_drafter(draft: Any) -> Any:
    """Return the drafter that decoding heads make of themselves; anything else as it is."""
    make = None if isinstance(draft, type) else getattr(draft, "make_drafter", None)
    return make() if callable(make) else draft


def asked_for_some(go_on: GoOn, rows: Tensor) -> GoOn:
    """Ask ``go_on`` for the requests ``rows`` ``[B]`` bool alone; the others stop."""
    return lambda tokens, logits: go_on(torch.where(rows, tokens, -1), logits) & rows
