"""How a model is run for the requests of a batch: `HostedModel`, and `host_model`, which chooses.

The loop and the drafters feed tokens, read rows of logits, and take rejected tokens back. What
keeps the text behind those tokens (a key-value cache, say) is the hosted model's own business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .counts import Counts

__all__ = ["HostedModel", "host_model"]


class HostedModel(Protocol):
    """A causal model and what it remembers of each row; rows may advance at different speeds."""

    @property
    def calls(self) -> int:
        """Model calls since `prefill`."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that the model remembers, of each row."""

    @property
    def features(self) -> Tensor | None:
        """The last hidden states that the last call computed, ``[B, m, D]``, one for each token.

        They are what the model's output head turned into logits (behind the final norm), of the
        tokens of `forward` or `forward_nodes`, or, after `prefill`, of those of the prompts, in
        their columns; what stands at padding is not to be read. None where they were not asked for
        (see `host_model`), and after a `prefill` that had nothing to run.
        """

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None, *, rides: bool = False
    ) -> None:
        """Run all of the prompts but their last tokens, ``[B, P - 1]``, left-padded.

        With ``rides`` they may wait for the next call, and be run in it: then no call is spent on
        the prompts alone, and `features` of them are not there.
        """

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Append ``tokens`` ``[B, m]`` to every row; return logits ``[B, m, V]``.

        With ``last_only`` the logits of the last token, ``[B, 1, V]``. Ids outside the vocabulary
        (a draft may have more tokens, or none to propose) are fed as its nearest id.
        """

    def rollback(self, drop: Counts, *, across_holes: bool = False) -> None:
        """Forget the last tokens of each row.

        Parameters
        ----------
        drop : Counts
            How many.
        across_holes : bool
            Whether some of them were run before the last rollback.
        """

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these rows of the batch, given on the device and on the host."""

    def begin_tree(self) -> None:
        """Begin a tree: what `forward_nodes` appends from here on are its nodes."""

    def forward_nodes(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> Tensor:
        """Append nodes of a tree to every row; return logits ``[B, m, V]``.

        Parameters
        ----------
        tokens : Tensor
            ``[B, m]`` int64.
        visible : Tensor
            ``[B, m, t]`` bool, t the nodes appended since `begin_tree`, these included: a node sees
            its ancestors and itself.
        depths : Tensor
            ``[B, m]`` or ``[m]`` int64, 0 for the root.
        """

    def keep_nodes(self, nodes: Tensor, kept: Counts) -> None:
        """End a tree: of its nodes keep a path, as if nothing else had been run.

        Parameters
        ----------
        nodes : Tensor
            ``[B, n]`` int64, so many nodes from the root on, then anything.
        kept : Counts
            How many.
        """

    def keep_tree(self, nodes: Tensor, first: int) -> None:
        """Drop nodes of a tree that goes on; those that stay are numbered anew.

        Parameters
        ----------
        nodes : Tensor
            ``[B, n]`` int64, which nodes come behind the first ones, in this order.
        first : int
            How many nodes stay where they are.
        """


def host_model(
    model: Any,
    ends: Tensor,
    *,
    room: int = 0,
    static: bool = False,
    uneven: bool = True,
    trees: bool = False,
    verifies: bool = False,
    features: bool = False,
) -> HostedModel:
    """Choose how a model is run for a batch.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are.
    ends : Tensor
        ``[B]`` int64, the position at which each request must stop: no position id reaches it.
    room : int
        Slots that a cache allocates at first.
    static : bool
        Keep caches at one size, as compiled models want it.
    uneven : bool
        Whether rows may come to differ in length: by padding, or by what they accept.
    trees : bool
        Whether trees will be run.
    verifies : bool
        Whether drafts will be verified: calls on several tokens must cost less than one for each.
    features : bool
        Whether `HostedModel.features` will be read.

    Raises
    ------
    ValueError
        The model cannot be run so; the message says why.
    """
    from . import probe
    from .cache import CachedModel, Traits, refuse_unsuitable
    from .recurrent import RecurrentModel, keeps_state
    from .row_by_row import RowByRow

    if keeps_state(model):
        if features:
            raise ValueError(
                f"generate: {type(model).__name__} keeps more than the keys and values of slots "
                "(a recurrent state, say): its calls repeat accepted tokens, and their hidden "
                "states are not handed over; draft must be one that reads none"
            )
        if static or trees:
            what = "a static cache" if static else "a tree"
            raise ValueError(
                f"generate: {type(model).__name__} keeps more than the keys and values of slots "
                f"(a recurrent state, say), and {what} needs slots alone; it can run chains, over "
                "a cache that grows"
            )
        return RecurrentModel(model, ends, room=room, rolls_back=uneven, verifies=verifies)
    refuse_unsuitable(model)
    span = _slots(ends, room)
    probe.check_model(model)
    if static:
        probe.check_static(model, span)
    if trees:
        probe.check_trees(model, span, static=static)
    if features:
        probe.check_features(model)
    traits = Traits()
    if static or trees or (uneven and ends.shape[0] > 1):
        traits = probe.find_traits(model, span, static=static)

    def open_row(b: int, end: Tensor) -> HostedModel:
        row = CachedModel(
            model, end, room=room, static=static, traits=traits, reads_features=features
        )
        if hasattr(row.model, "begin"):  # what was encoded for all requests
            row.model.select(torch.tensor([b], device=end.device))
        return row

    if uneven and ends.shape[0] > 1 and not traits.padding:
        return RowByRow(open_row, ends)
    return CachedModel(
        model, ends, room=room, static=static, traits=traits, reads_features=features
    )


def _slots(ends: Tensor, room: int) -> int:
    """Return how many slots a cache may come to have, rounded up: a third more are holes."""
    longest = int(ends.max()) if ends.numel() else 0
    return 1 << (max(longest * 4 // 3, room) + 64).bit_length()
