"""A block of tokens from one call of a model, as Spec-Drafter gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import integer, shown
from ..counts import Counts
from . import Draft, GoOn, Requests, lengthened, without_padding
from .hosted import reduced_vocabulary

__all__ = ["BlockDrafter", "is_block_model"]


def is_block_model(value: Any) -> bool:
    """Tell whether something predicts blocks, as `specdec_ext.models.spec_drafter.SpecDrafter`."""
    methods = ("read", "draft_block")
    is_instance = not isinstance(value, type)
    return is_instance and all(callable(getattr(value, method, None)) for method in methods)


class BlockDrafter:
    """Draws a block of k tokens in one call of a model that predicts them all at once.

    The model is a `specdec_ext.models.spec_drafter.SpecDrafter` (Xia et al., arXiv 2203.16487,
    section 3.1) or another with its methods ``read`` and ``draft_block`` and a state as they have.
    Its slots are independent given the text so far: each token is drawn from its slot's row, under
    the draft's filters and the processors, and that row is passed on as its law. What is emitted
    then has the target's law under every lossless rule. With the rule "top_beta" (the paper's
    Spec-Verification) the block is the slots' arg max, as in the paper.

    A round costs one decoder call, on what the last round emitted and k slots; the prefix before it
    is cached. The model sees all k slots even where fewer tokens are asked for, so that a request's
    tokens do not depend on the other requests of the batch; logits are computed of the slots that
    are asked for alone, whose number ``draft_block`` is given as ``wanted``. Give
    `specdec_ext.generate` a gamma of k: more than k are never proposed. ``go_on`` is asked, and
    spares the target tokens that are hardly worth its time; the drafter's own time is spent by
    then.

    Parameters
    ----------
    model : SpecDrafter
        Over the target's tokens, or some of them: one with ``draft_token_ids`` ``[Vd]`` gives
        logits over these only, and its laws are passed on by `Draft.token_ids`.
    input_ids : Tensor
        ``[B, S]`` int64, what its encoder reads, in the order of the batch.
    attention_mask : Tensor, optional
        ``[B, S]``, zeros at padding.
    block_size : int, optional
        k, at most what the model was trained for. None: that.

    Raises
    ------
    TypeError
        A model without these methods, or ``input_ids`` that are no tensor.
    ValueError
        ``block_size`` out of range; at the start, if there is not one source a request.

    Examples
    --------
    >>> import torch
    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> from specdec_ext.decoding import BlockDrafter, generate
    >>> from specdec_ext.decoding.encoder_decoder import encoded
    >>> from specdec_ext.models.spec_drafter import SpecDrafter
    >>> config = T5Config(
    ...     vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
    ...     decoder_start_token_id=0,
    ... )
    >>> target = T5ForConditionalGeneration(config).eval()
    >>> model = SpecDrafter.from_target(target, block_size=8).eval()  # to be trained
    >>> source, start = torch.tensor([[5, 6, 7, 1]]), torch.tensor([[0]])
    >>> drafter = BlockDrafter(model, source)
    >>> result = generate(
    ...     encoded(target, input_ids=source), drafter, start, gamma=8, max_new_tokens=12
    ... )
    >>> result.statistics.draft_calls <= result.statistics.rounds
    True
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        block_size: int | None = None,
    ) -> None:
        if not is_block_model(model):
            raise TypeError(
                "BlockDrafter: model must predict blocks, as SpecDrafter does (read() and "
                f"draft_block()), got {shown(model)}"
            )
        for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
            is_optional = name == "attention_mask"
            if not isinstance(given, Tensor) and not (is_optional and given is None):
                wanted = "a tensor or None" if is_optional else "a tensor"
                raise TypeError(f"BlockDrafter: {name} must be {wanted}, got {shown(given)}")
        if input_ids.dim() != 2:
            raise ValueError(f"BlockDrafter: input_ids must be [B, S], got {list(input_ids.shape)}")
        if input_ids.is_floating_point():
            raise ValueError(f"BlockDrafter: input_ids must be int64, got {input_ids.dtype}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"BlockDrafter: attention_mask must be [B, S] = {list(input_ids.shape)}, got "
                f"{list(attention_mask.shape)}"
            )
        self.model = model
        self.input_ids, self.attention_mask = input_ids, attention_mask
        trained_for: int = model.config.block_size
        self.block_size = (
            trained_for
            if block_size is None
            else integer("BlockDrafter: block_size", block_size, low=1, high=trained_for)
        )
        self._state: Any = None
        self._requests: Requests
        self._pending: Tensor  # [B, n], tokens that the model has not read, then anything
        self._counts: Counts  # how many of them, of each row

    @property
    def calls(self) -> int:
        """Decoder calls so far."""
        return 0 if self._state is None else self._state.calls

    def start(self, requests: Requests) -> None:
        """Run the encoder; the prompts of the decoder are read in the first round."""
        ids, mask = requests.input_ids, requests.attention_mask
        if len(self.input_ids) != len(ids):
            raise ValueError(
                f"BlockDrafter: {len(self.input_ids)} sources were given, but there are "
                f"{len(ids)} requests"
            )
        self._requests = requests
        self._state = self.model.read(self.input_ids, self.attention_mask, room=requests.room)
        if mask is None:
            self._pending = ids
            self._counts = Counts.full(len(ids), ids.shape[1], ids.device)
        else:
            self._pending = without_padding(ids, mask)
            lengths = mask.sum(1)
            self._counts = Counts(lengths.tolist(), lengths)

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Draw up to ``gamma`` tokens, each from its slot's law, all from one decoder call."""
        wanted = min(gamma, self.block_size)
        if wanted == 0:
            return Draft(positions.new_empty(len(positions), 0))
        logits = self.model.draft_block(
            self._state, self._pending, self._counts, self.block_size, wanted
        )
        if logits.dtype == torch.float64:  # operators take 32 bits at most
            logits = logits.float()
        self._pending = self._pending[:, :0]
        self._counts = Counts.full(len(positions), 0, positions.device)
        ids = reduced_vocabulary(self.model)
        is_same = self._requests.process is None or ids is not None  # rows are not processed
        if self._requests.greedy and is_same and go_on is None:
            # On a CPU torch finds the largest of half-precision numbers four times as slowly.
            best, laws = logits.float().argmax(-1), logits
            tokens = best if ids is None else ids[best]
        else:
            drawn, rows = self._requests.draw_independent(logits, positions, go_on, token_ids=ids)
            tokens = torch.stack(drawn, 1)
            laws = logits[:, : len(rows)] if is_same else torch.stack(rows, 1)
        return Draft(tokens, laws, token_ids=ids) if self._requests.needs_law else Draft(tokens)

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Note what verification emitted; the next round's call takes it in."""
        self.observe(tokens, accepted + 1)

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Note tokens, of a round of its own or of others'.

        Parameters
        ----------
        tokens : Tensor
            ``[B, n]``: ``gained`` tokens, then anything.
        gained : Counts
            How many tokens each request gained.
        """
        self._pending, self._counts = lengthened(self._pending, self._counts, tokens, gained)

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Take tokens back that commits emitted, and take one in their place.

        Parameters
        ----------
        text : Tensor
            ``[B, n]``, what each request's text is now, left-padded with -1.
        drop : Counts
            How many tokens of each request are gone.
        """
        prefix = self._state.prefix
        kept = prefix.lengths + self._counts - drop  # of the text; then comes one more
        prefix.shorten(kept)
        self._counts = kept - prefix.lengths + 1
        columns = torch.arange(max(self._counts.host), device=text.device)
        first = text.shape[1] - self._counts.device
        self._pending = text.gather(1, (first[:, None] + columns).clamp(max=text.shape[1] - 1))

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
        self._state.select(rows, indices)
        self._pending = self._pending[rows]
        self._counts = self._counts.select(rows, indices)
