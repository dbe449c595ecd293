"""Spec-Drafter: an encoder-decoder that drafts a block of tokens in one decoder call.

Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
Generation" (arXiv 2203.16487), section 3.1. `SpecDrafter` is the model,
`specdec_ext.decoding.BlockDrafter` drives it in `specdec_ext.generate`, and
`specdec_ext.models.spec_drafter_training` has the loss that it is trained with.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers import initialization as init
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.models.t5.modeling_t5 import T5PreTrainedModel, T5Stack

from ..decoding.checks import integer
from ..decoding.counts import Counts
from ..decoding.packed import PackedLinear
from ..tree_masks import additive_mask
from .block_decoder import BlockDecoder
from .prefix_cache import PrefixCache, block_mask
from .reduced import keep_tokens, number_of_tokens, vocabulary_entries
from .t5_targets import BIASES, OF_A_LAYER, OF_THE_ENCODER, check_sizes, check_target

__all__ = ["MASKED", "BlockState", "SpecDrafter", "SpecDrafterConfig"]

#: In ``block_ids``: a slot that holds [MASK].
MASKED = -1

# The fewest slots that are projected onto the vocabulary: BLAS libraries take other kernels for
# fewer rows, which round otherwise. From here on a row had the same bits among any number of them.
_FEWEST_SLOTS = 4
# A float32 matrix of more entries than this lies in no cache of a CPU's core. There some rows at a
# time cost a quarter less than all at once (MKL, 25 slots, 3,072 to 32,000 tokens of 512 entries),
# with the same bits.
_LARGE, _PART = 1 << 20, 1024


class SpecDrafterConfig(T5Config):
    """Configuration of a `SpecDrafter`: T5's, and what a block needs.

    The defaults are the paper's Spec-Drafter: Transformer-base (512 wide, 2,048 in the feed-forward
    layers, 8 heads) with 12 encoder layers and 2 decoder layers, and blocks of k = 25.

    Parameters
    ----------
    num_layers, num_decoder_layers : int
        Encoder and decoder layers. The encoder runs once a text, the decoder once a round: depth is
        spent where it is cheap (the paper's Principles I and II).
    block_size : int
        k, the [MASK] slots of a block.
    decoder_relative_attention_num_buckets : int
        Buckets of the decoder's relative positions. Half are for tokens to the left and half for
        those to the right, and half of each are for exact distances: 128 tell 32 positions on
        either side apart, which is more than a block of 25 has. (T5's 32 would tell 8.)
    draft_vocab_size : int, optional
        Vd, the tokens that can be proposed; see `SpecDrafter.with_vocabulary`. None: all.
    **kwargs
        As of `transformers.T5Config`.
    """

    model_type = "spec_drafter"

    num_layers: int = 12
    num_decoder_layers: int | None = 2
    block_size: int = 25
    decoder_relative_attention_num_buckets: int = 128
    draft_vocab_size: int | None = None
    decoder_start_token_id: int = 0


@dataclass
class BlockState:
    """What a `SpecDrafter` remembers of the requests that it drafts for.

    Attributes
    ----------
    states : Tensor
        ``[B, S, d]``, what the encoder gave.
    source_mask : Tensor or None
        ``[B, 1, 1, S]``, added to scores of cross attention; None: no padding.
    prefix : PrefixCache
        Keys and values of the prefixes.
    source : DynamicCache
        Keys and values of cross attention, filled in the first call.
    calls : int
        Decoder calls so far.
    """

    states: Tensor
    source_mask: Tensor | None
    prefix: PrefixCache
    source: DynamicCache
    calls: int = 0

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests, given on the device and on the host."""
        self.states = self.states[rows]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[rows]
        self.prefix.select(rows, list(indices))
        if len(self.source):
            self.source.batch_select_indices(rows)


class SpecDrafter(T5PreTrainedModel):
    """An encoder-decoder that predicts the k tokens behind a prefix in one decoder call.

    The source is Xia et al. (arXiv 2203.16487), section 3.1. The decoder reads the prefix and k
    [MASK] slots, and slot i gives the law of token i behind the prefix (eq. 5-7):

        P(y_i | y_1 .. y_p, [MASK] x k, x)        for all i = p + 1 .. p + k at once

    Every slot has an attention query of its own, to the source and to the prefix, and the slots see
    each other, as in mask-predict decoding (Ghazvininejad et al. 2019), on which the paper builds.
    Given the prefix, the tokens of a block are independent: the law of a drafted block is the
    product of the slots' laws.

    The layers are T5's. What the paper leaves open is decided so:

    - The prefix is causal: its tokens do not see the slots, nor later tokens. Its keys and values
      are then the same in every round and are cached, and a round costs one decoder call on what
      was accepted in the last one and k slots. (Equations 5-7 print no mask. A mask-predict decoder
      would let the prefix see the slots, and would have to run all of it in every round.)
    - A slot's input is the embedding of [MASK] and one of its place in the block: T5 adds no
      positions to embeddings, and without them the first layer's queries would all be the same.
      [MASK] is a vector of its own and no id: the drafter reads the target's vocabulary.
    - Relative positions in the decoder are bidirectional, see `SpecDrafterConfig`.

    Parameters
    ----------
    config : SpecDrafterConfig
        Sizes.

    Attributes
    ----------
    draft_token_ids : Tensor or None
        ``[Vd]`` int64, the target's token of each entry of a reduced vocabulary; None: the same.
    projection : torch.nn.Linear or None
        The output layer of a reduced vocabulary. None: the embeddings, ``shared``, are that too.

    Raises
    ------
    ValueError
        A block of less than 1 slot; fewer than 4 buckets of relative positions, or more than four
        times the largest distance; ``draft_vocab_size`` not in [1, ``vocab_size``].

    Examples
    --------
    >>> config = SpecDrafterConfig(
    ...     vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=3, block_size=5
    ... )
    >>> model = SpecDrafter(config).eval()
    >>> source, prefix = torch.tensor([[7, 8, 9, 1]]), torch.tensor([[0, 7]])
    >>> model(source, prefix_ids=prefix).logits.shape
    torch.Size([1, 5, 50])
    """

    config_class = SpecDrafterConfig
    config: SpecDrafterConfig
    draft_token_ids: Tensor | None
    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}

    def __init__(self, config: SpecDrafterConfig) -> None:
        super().__init__(config)
        integer("SpecDrafter: block_size", config.block_size, low=1)
        integer(
            "SpecDrafter: decoder_relative_attention_num_buckets",
            config.decoder_relative_attention_num_buckets,
            low=4,
            high=4 * config.relative_attention_max_distance - 1,
        )
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.mask_embedding = nn.Parameter(torch.zeros(config.d_model))
        self.slot_embedding = nn.Embedding(config.block_size, config.d_model)
        of_encoder = copy.deepcopy(config)
        of_encoder.is_decoder, of_encoder.use_cache = False, False
        self.encoder = T5Stack(of_encoder)
        of_decoder = copy.deepcopy(config)
        of_decoder.is_decoder = True
        of_decoder.num_layers = integer(
            "SpecDrafter: num_decoder_layers", config.num_decoder_layers, low=1
        )
        of_decoder.relative_attention_num_buckets = config.decoder_relative_attention_num_buckets
        self.decoder = BlockDecoder(of_decoder)
        entries, reduced = vocabulary_entries(self), config.draft_vocab_size is not None
        self.register_buffer("draft_token_ids", torch.arange(entries) if reduced else None)
        self.projection = nn.Linear(config.d_model, entries, bias=False) if reduced else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module: as T5 does, and embeddings of [MASK] and of slots as of tokens."""
        super()._init_weights(module)
        if isinstance(module, SpecDrafter):
            embeddings = [module.shared.weight, module.mask_embedding, module.slot_embedding.weight]
            if module.projection is not None:  # of order 1 as well, see `_project`
                embeddings.append(module.projection.weight)
            for weight in embeddings:
                init.normal_(weight, mean=0.0, std=self.config.initializer_factor)

    # ---- made from a target ---------------------------------------------------------------------

    @classmethod
    def from_target(cls, target: Any, **changes: Any) -> SpecDrafter:
        """Make a drafter for a target, its encoder and embeddings initialised with the target's.

        This is how the paper makes one for BART (section 4.4).

        Parameters
        ----------
        target : transformers.PreTrainedModel
            A T5 encoder-decoder.
        **changes
            Of the configuration, which else has the target's sizes, 2 decoder layers and blocks
            of 25. What shapes the encoder cannot change.

        Returns
        -------
        SpecDrafter
            In training mode; the decoder is new.

        Raises
        ------
        TypeError, ValueError
            As `init_encoder_from`.

        Examples
        --------
        >>> from transformers import T5ForConditionalGeneration
        >>> config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=3)
        >>> target = T5ForConditionalGeneration(config)
        >>> drafter = SpecDrafter.from_target(target, block_size=10)
        >>> drafter.config.num_layers, drafter.config.num_decoder_layers
        (3, 2)
        >>> torch.equal(drafter.shared.weight, target.shared.weight)
        True
        """
        check_target("from_target", target)
        own = ("dropout_rate", "pad_token_id", "eos_token_id", "decoder_start_token_id")
        of_target = {
            name: value
            for name in (*OF_THE_ENCODER, *own)
            if (value := getattr(target.config, name, None)) is not None
        }
        drafter = cls(SpecDrafterConfig(**of_target | changes))
        drafter.init_encoder_from(target)
        return drafter

    @torch.no_grad()
    def init_encoder_from(self, target: Any) -> None:
        """Copy the weights of a target's encoder, and its embeddings.

        Parameters
        ----------
        target : transformers.PreTrainedModel
            A T5 encoder-decoder whose encoder has this one's shape.

        Raises
        ------
        TypeError
            A model without a T5 encoder.
        ValueError
            An encoder of another shape; the message says what was expected.
        """
        check_target("init_encoder_from", target)
        check_sizes("init_encoder_from", "encoder", self.config, target.config, OF_THE_ENCODER)
        self.encoder.load_state_dict(target.get_encoder().state_dict())
        self.shared.weight.copy_(target.get_input_embeddings().weight)

    @torch.no_grad()
    def init_decoder_from(self, target: Any) -> None:
        """Copy layers of a target's decoder: its first, its last, evenly spaced ones between.

        A shallow decoder that begins so need not find out anew how to read the source (Shleifer and
        Rush, "Pre-trained Summarization Distillation", arXiv 2010.13002). The paper begins with
        random layers.

        Of the biases by distance those of what lies to the left are copied; what a slot makes of
        the slots to its right stays to be learned.

        Parameters
        ----------
        target : transformers.PreTrainedModel
            A T5 encoder-decoder with layers of this one's sizes, at least as many.

        Raises
        ------
        TypeError
            A model without a T5 encoder.
        ValueError
            Layers of other sizes, or too few; the message says what was expected.

        Examples
        --------
        >>> from transformers import T5ForConditionalGeneration
        >>> config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=6)
        >>> target = T5ForConditionalGeneration(config)
        >>> drafter = SpecDrafter.from_target(target)
        >>> drafter.init_decoder_from(target)
        >>> last = [blocks[-1].layer[1].EncDecAttention for blocks in
        ...         (drafter.decoder.block, target.decoder.block)]
        >>> torch.equal(last[0].q.weight, last[1].q.weight)
        True
        """
        check_target("init_decoder_from", target)
        check_sizes("init_decoder_from", "decoder", self.config, target.config, OF_A_LAYER)
        own, others = self.decoder.block, target.decoder.block
        if len(others) < len(own):
            raise ValueError(
                f"init_decoder_from: the target's decoder must have at least {len(own)} layers, as "
                f"this drafter's has, got {len(others)}"
            )
        step = (len(others) - 1) / max(len(own) - 1, 1)
        for place, block in enumerate(own):
            block.load_state_dict(
                {
                    name: weight
                    for name, weight in others[round(place * step)].state_dict().items()
                    if not name.endswith(BIASES)
                },
                strict=False,
            )
        self.decoder.final_layer_norm.load_state_dict(target.decoder.final_layer_norm.state_dict())
        self.decoder.copy_biases_from(target.decoder)

    @torch.no_grad()
    def with_vocabulary(self, draft_token_ids: Tensor) -> SpecDrafter:
        """Return a copy that proposes some of the tokens only, in less time.

        Its output layer, which is most of what a slot costs, has the rows of these tokens alone; it
        still reads every token. Its laws are this drafter's, given that the token is one of these,
        and what is emitted has the target's law as before: the others are tokens that it proposes
        with probability 0. It may be trained, or made of a trained drafter.

        Choose the most frequent tokens, and the end token (as "FR-Spec" does for draft models of
        large vocabularies: Zhao et al., arXiv 2502.14856).

        Parameters
        ----------
        draft_token_ids : Tensor
            ``[Vd]`` int64, distinct tokens of the target.

        Returns
        -------
        SpecDrafter
            On the same device, of the same dtype, in the same mode.

        Raises
        ------
        TypeError, ValueError
            No integer tensor; not distinct tokens of the target, or none; a reduced vocabulary.

        Examples
        --------
        >>> config = SpecDrafterConfig(vocab_size=50, num_layers=1, block_size=5)
        >>> model = SpecDrafter(config).eval()
        >>> some = model.with_vocabulary(torch.tensor([1, 9, 7]))
        >>> source, prefix = torch.tensor([[7, 8, 1]]), torch.tensor([[0, 7]])
        >>> whole, fewer = (m(source, prefix_ids=prefix).logits for m in (model, some))
        >>> fewer.shape, torch.allclose(whole[..., [1, 9, 7]], fewer, atol=1e-3)
        (torch.Size([1, 5, 3]), True)
        """
        if self.draft_token_ids is not None:
            raise ValueError(
                "with_vocabulary: expected a drafter over the target's vocabulary, got one over "
                f"{len(self.draft_token_ids)} tokens of it"
            )
        config = copy.deepcopy(self.config)
        config.draft_vocab_size = number_of_tokens("with_vocabulary", draft_token_ids)
        new: Any = type(self)(config)
        ids = keep_tokens(new, draft_token_ids).to(self.device)
        made: SpecDrafter = new.to(device=self.device, dtype=self.dtype).train(self.training)
        own = {"draft_token_ids": ids, "projection.weight": self.shared.weight[ids]}
        made.load_state_dict({**self.state_dict(), **own})
        return made

    # ---- running --------------------------------------------------------------------------------

    def get_encoder(self, modality: str | None = None) -> T5Stack:
        """Return the encoder."""
        return self.encoder

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embeddings of tokens; of the whole vocabulary, the output layer's, too."""
        return self.shared

    def set_input_embeddings(self, value: Any) -> None:
        """Replace them."""
        self.shared = value
        self.encoder.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        prefix_ids: Tensor,
        prefix_lengths: Tensor | None = None,
        block_ids: Tensor | None = None,
        slots: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
    ) -> Seq2SeqLMOutput:
        """Predict the block behind each prefix, without a cache: for training.

        Parameters
        ----------
        input_ids : Tensor, optional
            ``[B, S]`` int64, the source; with ``encoder_outputs`` it is not read.
        attention_mask : Tensor, optional
            ``[B, S]``, zeros at padding of the source.
        prefix_ids : Tensor
            ``[B, n]`` int64, the decoder's start token and y_1 .. y_p, then anything.
        prefix_lengths : Tensor, optional
            ``[B]`` int64, how many of them there are, p + 1. None: n of every row.
        block_ids : Tensor, optional
            ``[B, k]`` int64: `MASKED`, or a token that the slot shows (glancing). None:
            ``block_size`` slots, all masked.
        slots : Tensor, optional
            ``[B, k]`` bool, those whose logits are asked for; the decoder runs all of them, which
            see each other. With ``[B, n + k]`` the prefix's tokens stand before them: the logits of
            one are those of the token behind it, which it cannot see. No draft is made of these;
            see ``prefix_weight`` of `spec_drafter_loss`. None: all slots.
        encoder_outputs : BaseModelOutput, optional
            What `get_encoder` returns for the source, where that has been run. None: it is run.

        Returns
        -------
        Seq2SeqLMOutput
            ``logits`` ``[B, k, V]``, of the tokens behind the prefix; with ``slots`` ``[N, V]``, of
            the N places that were asked for, row by row. Vd in place of V where the vocabulary is
            reduced.

        Raises
        ------
        ValueError
            More slots than ``block_size``; neither a source nor ``encoder_outputs``; ``slots`` of
            another shape.
        """
        batch, new = prefix_ids.shape
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("SpecDrafter: expected input_ids or encoder_outputs, got neither")
            encoder_outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        states: Any = encoder_outputs.last_hidden_state
        if prefix_lengths is None:
            lengths = torch.full((1,), new, device=prefix_ids.device)
        else:
            lengths = prefix_lengths.long()
        if block_ids is None:
            block_ids = prefix_ids.new_full((batch, self.config.block_size), MASKED)
        embeddings = torch.cat([self.shared(prefix_ids), self._block_embeddings(block_ids)], 1)
        hidden = self._decode(
            embeddings,
            torch.zeros_like(lengths),
            lengths,
            block_ids.shape[1],
            new,
            states,
            _source_mask(attention_mask, states.dtype),
            None,
        )
        if slots is None or slots.shape == block_ids.shape:
            hidden = hidden[:, new:]
        elif slots.shape != hidden.shape[:2]:
            raise ValueError(
                f"SpecDrafter: slots must be {[*block_ids.shape]} or, with the prefix's tokens, "
                f"{[*hidden.shape[:2]]}, got {[*slots.shape]}"
            )
        return Seq2SeqLMOutput(logits=self._project(hidden if slots is None else hidden[slots]))

    @torch.inference_mode()
    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, room: int = 0
    ) -> BlockState:
        """Run the encoder; what comes back is handed to `draft_block`.

        Parameters
        ----------
        input_ids : Tensor
            ``[B, S]`` int64, the source.
        attention_mask : Tensor, optional
            ``[B, S]``, zeros at padding of the source.
        room : int
            Tokens of prefixes to allocate room for at first.

        Returns
        -------
        BlockState
        """
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        layers = self.decoder.config.num_layers
        return BlockState(
            states,
            _source_mask(attention_mask, states.dtype),
            PrefixCache(layers, len(input_ids), states.device, room),
            DynamicCache(),
        )

    @torch.inference_mode()
    def draft_block(
        self,
        state: BlockState,
        tokens: Tensor,
        new: Counts,
        block_size: int | None = None,
        wanted: int | None = None,
    ) -> Tensor:
        """Take tokens into the prefixes and predict the block behind them, in one decoder call.

        Parameters
        ----------
        state : BlockState
            From `read`; it is changed.
        tokens : Tensor
            ``[B, n]`` int64: the tokens that come behind each prefix, then anything. At first these
            are the decoder's start token and what follows it.
        new : Counts
            How many of them there are, of each row.
        block_size : int, optional
            k, at most the configuration's. None: that.
        wanted : int, optional
            Slots whose logits are asked for, the first ones. The decoder runs all k, which see each
            other; the output layer, the larger part of the work, runs no more than it must. None:
            k.

        Returns
        -------
        Tensor
            ``[B, wanted, V]`` logits, or ``[B, wanted, Vd]``.

        Raises
        ------
        ValueError
            ``block_size`` or ``wanted`` out of range.

        Examples
        --------
        >>> config = SpecDrafterConfig(vocab_size=50, num_layers=1, block_size=5)
        >>> model = SpecDrafter(config).eval()
        >>> source, start = torch.tensor([[7, 8, 1], [9, 3, 1]]), torch.tensor([[0], [0]])
        >>> state = model.read(source)
        >>> one = Counts.full(2, 1, source.device)
        >>> model.draft_block(state, start, one).shape
        torch.Size([2, 5, 50])
        >>> new = Counts.on(source.device, [2, 1])  # the second row gained one token
        >>> model.draft_block(state, torch.tensor([[7, 8], [9, 0]]), new).shape, state.calls
        (torch.Size([2, 5, 50]), 2)
        """
        block = self.config.block_size if block_size is None else block_size
        shown = block if wanted is None else integer("draft_block: wanted", wanted, 1, block)
        cache = state.prefix
        known, width = cache.lengths, tokens.shape[1]
        seen = cache.begin(new, width)
        lengths = known + new
        rows = slice(None)
        if min(known.host) == max(known.host) and min(lengths.host) == max(lengths.host):
            rows = slice(1)  # all rows have the same mask and the same distances
        masked = tokens.new_full((len(tokens), block), MASKED)
        embeddings = torch.cat(
            [
                self.shared(tokens.clamp(0, self.config.vocab_size - 1)),
                self._block_embeddings(masked),
            ],
            1,
        )
        hidden = self._decode(
            embeddings,
            known.device[rows],
            lengths.device[rows],
            block,
            seen,
            state.states,
            state.source_mask,
            EncoderDecoderCache(cache, state.source),
        )
        cache.end()
        state.calls += 1
        slots = hidden[:, tokens.shape[1] :]
        return self._project(slots[:, : max(shown, _FEWEST_SLOTS)])[:, :shown]

    def _block_embeddings(self, block_ids: Tensor) -> Tensor:
        """Return the slots' inputs, ``[B, k, d]``: [MASK] or a token, and the slot's place."""
        slots = block_ids.shape[1]
        if not 1 <= slots <= self.config.block_size:
            raise ValueError(
                f"SpecDrafter: a block must have 1 to block_size = {self.config.block_size} "
                f"slots, got {slots}"
            )
        shown = self.shared(block_ids.clamp(min=0))
        content = torch.where((block_ids == MASKED)[..., None], self.mask_embedding, shown)
        return content + self.slot_embedding.weight[:slots]

    def _decode(
        self,
        embeddings: Tensor,
        known: Tensor,
        lengths: Tensor,
        block: int,
        width: int,
        states: Tensor,
        source_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> Tensor:
        """Return states of new tokens and slots, ``[B, n + k, d]``; arguments as `block_mask`'s."""
        new = embeddings.shape[1] - block
        visible = block_mask(known, lengths, new, block, width)
        device = embeddings.device
        slots = lengths[:, None] + torch.arange(block, device=device)
        tokens = known[:, None] + torch.arange(new, device=device)
        columns = torch.arange(width, device=device).expand(len(known), -1)
        queries, keys = torch.cat([tokens, slots], 1), torch.cat([columns, slots], 1)
        hidden: Tensor = self.decoder(
            embeddings,
            visible,
            keys[:, None] - queries[..., None],
            states,
            source_mask,
            cache,
        )
        return hidden

    def _project(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[B, k, V]`` or ``[B, k, Vd]`` of slots' states."""
        # Embeddings, of order 1, as the output layer: T5 scales its input.
        scaled = hidden * self.config.d_model**-0.5
        if isinstance(self.projection, PackedLinear):
            logits: Tensor = self.projection(scaled)
            return logits
        weight = (self.shared if self.projection is None else self.projection).weight
        is_slow = weight.is_cpu and weight.dtype == torch.float32 and weight.numel() > _LARGE
        if not is_slow or hidden[..., 0].numel() == 1 or torch.is_grad_enabled():
            return nn.functional.linear(scaled, weight)
        parts = [nn.functional.linear(scaled, part) for part in weight.split(_PART)]
        return torch.cat(parts, -1)


def _source_mask(attention_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to scores of cross attention, ``[B, 1, 1, S]``."""
    if attention_mask is None:
        return None
    return additive_mask(attention_mask[:, None, None].bool(), dtype)
