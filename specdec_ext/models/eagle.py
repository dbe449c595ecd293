"""An EAGLE-style head: one transformer layer over a target's hidden states and its next tokens.

Decoding heads (`specdec_ext.models.heads`) guess tokens without knowing those in between. This head
is autoregressive, but over hidden states: from the target's state at a token and the token behind
it, it predicts the state at that token, and by it the law of the token after. Drafting one token
costs one layer, and the keys and values of one layer are all that it caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..decoding.cache_names import own_cache_name
from ..decoding.checks import integer
from ..tree_masks import additive_mask
from .loss_inputs import check_places
from .reduced import keep_tokens, logits_of_tokens, number_of_tokens, vocabulary_entries

__all__ = ["EagleHead", "EagleHeadConfig", "eagle_loss"]


class EagleHeadConfig(LlamaConfig):
    """Configuration of an `EagleHead`: Llama's, and the size of its vocabulary.

    Parameters
    ----------
    num_hidden_layers : int
        Layers, 1 in the paper.
    draft_vocab_size : int, optional
        Vd, the tokens that it can propose. None: all of the target's.
    projection_bias : bool
        Whether the vocabulary projection has a bias, as the target's does.
    **kwargs
        As of `transformers.LlamaConfig`; ``hidden_size`` and ``vocab_size`` are the target's.
    """

    model_type = "eagle_head"

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    projection_bias: bool = False


class EagleHead(PreTrainedModel):
    """A layer that reads a target's hidden states and goes on with its own.

    The element of its sequence that stands for token t + 1 reads the target's last hidden state f_t
    and the embedding of token t + 1. It gives f'_{t+1}, an estimate of the next state, and the law
    of token t + 2:

        f'_{t+1} = Layer(W [e(x_{t+1}), f_t], elements before);   q = softmax(P f'_{t+1})

    P begins as the target's output head, restricted to the tokens of a reduced vocabulary if there
    is one (EAGLE-3's way to make a large head small); e is the target's embedding. In drafting, f'
    takes the place of the states that the target has not computed yet.

    Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv
    2401.15077, section 4.1. The layer is Llama's, and a norm stands behind it, since the target's
    last hidden states are normed ones.

    Parameters
    ----------
    config : EagleHeadConfig
        Sizes.

    Attributes
    ----------
    draft_token_ids : Tensor or None
        ``[Vd]`` int64, the target's token of each entry of a reduced vocabulary, saved with the
        weights; None: entry i is token i.

    Examples
    --------
    >>> config = EagleHeadConfig(
    ...     hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=50,
    ...     draft_vocab_size=20,
    ... )
    >>> head = EagleHead(config).eval()
    >>> output = head(torch.tensor([[3, 4, 5]]), torch.randn(1, 3, 16))
    >>> output.logits.shape, output.hidden_states[-1].shape
    (torch.Size([1, 3, 20]), torch.Size([1, 3, 16]))
    """

    config_class = EagleHeadConfig
    config: EagleHeadConfig
    base_model_prefix = "layers"
    main_input_name = "features"
    draft_token_ids: Tensor | None

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config)
        size = vocabulary_entries(self)
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = LlamaModel(config)
        self.projection = nn.Linear(config.hidden_size, size, bias=config.projection_bias)
        reduced = config.draft_vocab_size is not None
        self.register_buffer("draft_token_ids", torch.arange(size) if reduced else None)
        self.post_init()

    def make_drafter(self) -> Any:
        """Return the `specdec_ext.decoding.EagleDrafter` that drafts with this head."""
        from ..decoding import EagleDrafter

        return EagleDrafter(self)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        """Run elements of the sequence.

        Parameters
        ----------
        input_ids : Tensor
            ``[B, n]`` int64, the element's tokens.
        features : Tensor
            ``[B, n, D]``, the hidden state at the token before each, of any floating dtype.
        attention_mask, position_ids, past_key_values, use_cache, logits_to_keep
            As of `transformers.LlamaForCausalLM`.

        Returns
        -------
        CausalLMOutputWithPast
            ``logits`` ``[B, n, Vd]``, of the token behind each; ``hidden_states``, of which the
            last, ``[B, n, D]``, estimates the target's state at each token.
        """
        embedded = self.layers.embed_tokens(input_ids)
        states = self.layers(
            inputs_embeds=self.fuse(torch.cat([embedded, features.to(embedded.dtype)], -1)),
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **{own_cache_name(): past_key_values},
        ).last_hidden_state
        logits = self.projection(states[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, hidden_states=(states,))

    @classmethod
    @torch.no_grad()
    def from_target(
        cls, target: Any, draft_token_ids: Tensor | None = None, **changes: Any
    ) -> EagleHead:
        """Make a head for a target, with copies of its embedding and its output head.

        Parameters
        ----------
        target : transformers.PreTrainedModel
            A causal language model. It is not modified, and shares no weights with the head.
        draft_token_ids : Tensor, optional
            ``[Vd]`` int64, distinct: the tokens that the head can propose, the most frequent ones,
            say. None: all.
        **changes
            Of the configuration, whose sizes else are the target's.

        Returns
        -------
        EagleHead
            In evaluation mode, of the target's dtype and on its device.

        Raises
        ------
        TypeError
            A target without an embedding or an output head, or an encoder-decoder; tokens that are
            no integer tensor.
        ValueError
            An embedding, or a head, of another width than the target's hidden states; tokens that
            are not distinct, or none of the target's.
        """
        get_head: Any = getattr(target, "get_output_embeddings", lambda: None)
        get_embedding: Any = getattr(target, "get_input_embeddings", lambda: None)
        head, embedding = get_head(), get_embedding()
        if getattr(head, "weight", None) is None or getattr(embedding, "weight", None) is None:
            raise TypeError(
                "EagleHead: target must have an embedding and an output head, as Hugging Face "
                f"causal models have, got {type(target).__name__}"
            )
        if target.config.is_encoder_decoder:
            raise TypeError(
                "EagleHead: target must be a causal model (a layer of its own would not see what "
                f"an encoder read), got {type(target).__name__}"
            )
        text = target.config.get_text_config()
        vocabulary, width = head.weight.shape
        if embedding.weight.shape != (vocabulary, width) or text.hidden_size != width:
            raise ValueError(
                "EagleHead: target must have an embedding and an output head [V, D] over hidden "
                f"states of width D, got {list(embedding.weight.shape)}, "
                f"{list(head.weight.shape)} and {text.hidden_size}"
            )
        config = EagleHeadConfig(
            **{
                "hidden_size": width,
                "vocab_size": vocabulary,
                "num_attention_heads": text.num_attention_heads,
                "num_key_value_heads": getattr(text, "num_key_value_heads", None),
                "intermediate_size": getattr(text, "intermediate_size", None) or 4 * width,
                "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
                "draft_vocab_size": (
                    None
                    if draft_token_ids is None
                    else number_of_tokens("EagleHead", draft_token_ids)
                ),
                "projection_bias": getattr(head, "bias", None) is not None,
                **changes,
            }
        )
        made: Any = cls(config)
        made = made.to(head.weight.device).eval()
        # Weights alone: the frequencies of positions stay float32, as where a head is loaded. In
        # bfloat16 they are off by .2 %, a quarter turn a few hundred tokens on.
        for weight in made.parameters():
            weight.data = weight.data.to(head.weight.dtype)
        if draft_token_ids is not None:
            keep_tokens(made, draft_token_ids)
        made.layers.embed_tokens.weight.copy_(embedding.weight)
        known = slice(None) if draft_token_ids is None else made.draft_token_ids
        made.projection.weight.copy_(head.weight[known])
        if made.projection.bias is not None:
            made.projection.bias.copy_(head.bias[known])
        result: EagleHead = made
        return result


def eagle_loss(
    head: EagleHead,
    tokens: Tensor,
    features: Tensor,
    target_logits: Tensor,
    mask: Tensor | None = None,
    *,
    law_weight: float = 0.1,
    unrolled: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return how far a head's states and laws are from the target's, on a text.

    The sum of a smooth L1 distance of states and ``law_weight`` times the cross entropy of the
    head's law relative to the target's, which is taken over the head's vocabulary (Li et al., arXiv
    2401.15077, section 4.2: w_cls = 0.1).

    In drafting only the first token of a round is drafted from the target's own states; the later
    ones are drafted from the head's estimates. With ``unrolled`` over 1 the head learns that, too:
    it goes on from every place of the text as it does in a round of that many draft tokens, each
    time over its estimates, and the loss is the mean over the places of a round (Zhang et al.,
    "Learning Harmonized Representations for Speculative Sampling", arXiv 2408.15766, section 3.2;
    the training-time test of EAGLE-3, arXiv 2503.01840).

    Parameters
    ----------
    head : EagleHead
        The head.
    tokens : Tensor
        ``[B, n]`` int64, a text.
    features : Tensor
        ``[B, n, D]``, the target's last hidden states at its tokens.
    target_logits : Tensor
        ``[B, n, V]``, the target's logits there, or ``[B, n, Vd]``, those of the tokens
        ``head.draft_token_ids`` alone, which is all that is read.
    mask : Tensor, optional
        ``[B, n]``, zeros where the head's state and law do not count: at padding, which stands
        behind the text. None: all count.
    law_weight : float
        The weight of laws.
    unrolled : int
        Draft tokens of a round.

    Returns
    -------
    loss : Tensor
        ``[]`` float32, to be minimised; 0 where no token but the first ones of texts counts.
    by_part : Tensor
        ``[2]`` float32, detached: the distance of states, and the cross entropy in nats; NaN where
        there is none.

    Raises
    ------
    ValueError
        ``unrolled`` under 1; logits of another size; tokens, logits or a mask of other texts or
        tokens than the states.
    """
    integer("eagle_loss: unrolled", unrolled, low=1)
    check_places("eagle_loss", features, tokens=tokens, target_logits=target_logits, mask=mask)
    kept = torch.ones_like(tokens) if mask is None else mask
    own = logits_of_tokens(
        "eagle_loss", target_logits, head.draft_token_ids, head.config.vocab_size
    )
    laws = own.float().softmax(-1)
    parts = []
    for place, (states, logits) in enumerate(_rounds(head, tokens, features, unrolled)):
        # Elements that have no text for the places before them are none of a round.
        here = kept[:, 1 + place :].bool()
        if not bool(here.any()):
            break
        law, wanted = (whole[:, 1 + place :][here] for whole in (laws, features))
        found = logits[:, place:][here].float().log_softmax(-1)
        distance = F.smooth_l1_loss(states[:, place:][here].float(), wanted.float())
        parts.append(torch.stack([distance, -(law * found).sum(-1).mean()]))
    if not parts:
        none = 0.0 * head.fuse.weight.float().sum()  # which has a gradient all the same
        return none, torch.full((2,), torch.nan, device=none.device)
    distance, entropy = torch.stack(parts).mean(0)
    return distance + law_weight * entropy, torch.stack([distance, entropy]).detach()


def _rounds(
    head: EagleHead, tokens: Tensor, features: Tensor, unrolled: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a head from every place of a text at once, as in rounds of so many draft tokens.

    Gives for each place of a round the states ``[B, n - 1, D]`` and logits ``[B, n - 1, Vd]`` of
    the text's elements in that place. Before it, an element in place p sees the text's elements in
    place 0 (those that read the target's states) up to p back, and those in between in the places
    1, 2, ... of its own round.
    """
    elements = tokens.shape[1] - 1
    index = torch.arange(elements, device=tokens.device)
    given = features[:, :-1]
    keys = DynamicCache()
    for place in range(unrolled if elements else 0):
        seen = None if place == 0 else additive_mask(_seen(index, place)[None, None], head.dtype)
        output = head(
            tokens[:, 1:],
            given,
            attention_mask=seen,
            position_ids=index[None],
            past_key_values=keys,
            use_cache=True,
        )
        hidden: Any = output.hidden_states
        states, logits = hidden[-1], output.logits
        yield states, logits
        given = torch.cat([features[:, :1].to(states.dtype), states[:, :-1]], 1)


def _seen(index: Tensor, place: int) -> Tensor:
    """Return what elements see in a place of a round, ``[n, (place + 1) n]`` bool; see `_rounds`.

    The keys are the text's elements in place 0, then in place 1, and so on.
    """
    back = index[:, None] - index  # how far the query is behind the key
    round_so_far = [back == place - other for other in range(1, place + 1)]
    return torch.cat([back >= place, *round_so_far], 1)


# Imported, its kind is one that ``AutoModel.from_pretrained`` loads.
AutoConfig.register(EagleHeadConfig.model_type, EagleHeadConfig, exist_ok=True)
AutoModel.register(EagleHeadConfig, EagleHead, exist_ok=True)
