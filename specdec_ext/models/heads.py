"""Decoding heads: small layers over a target's hidden states, which predict tokens further ahead.

Of a text whose last token is number t the target's last hidden state gives the law of token t + 1.
Head i (1-based) reads the same state and gives a law of token t + 1 + i, without knowing the tokens
in between. So all heads are evaluated at once, on states that verification has computed anyway:
drafting costs one call of a few small layers a round, and no second model with a cache of its own.

`MedusaHeads` and `BlockwiseHeads` are `transformers` models: ``save_pretrained`` and
``from_pretrained`` keep their weights in safetensors. `specdec_ext.decoding.HeadsDrafter` drafts
with them, for causal models and for encoder-decoders; `specdec_ext.models.heads_training` has the
loss that they are trained with.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from ..decoding.checks import integer
from .reduced import keep_tokens, number_of_tokens, vocabulary_entries

__all__ = [
    "BlockwiseHeads",
    "BlockwiseHeadsConfig",
    "DecodingHeads",
    "DecodingHeadsConfig",
    "MedusaHeads",
    "MedusaHeadsConfig",
]

AnyHeads = TypeVar("AnyHeads", bound="DecodingHeads")


class DecodingHeadsConfig(PreTrainedConfig):
    """What all decoding heads are described by.

    Parameters
    ----------
    hidden_size : int
        D, the width of the target's hidden states.
    vocab_size : int
        V, the target's.
    num_heads : int
        K, the tokens that are predicted beyond the target's own next one.
    feature_scale : float
        What the target multiplies its hidden states by before its output head (T5 with tied
        embeddings: ``d_model ** -0.5``; most models: 1).
    projection_bias : bool
        Whether the vocabulary projection has a bias, as the target's does.
    draft_vocab_size : int, optional
        Vd, the tokens that the heads can propose. None: all of the target's.
    initializer_range : float
        Standard deviation of a projection that is not copied from a target.
    """

    hidden_size: int = 512
    vocab_size: int = 32000
    num_heads: int = 4
    feature_scale: float = 1.0
    projection_bias: bool = False
    draft_vocab_size: int | None = None
    initializer_range: float = 0.02


class MedusaHeadsConfig(DecodingHeadsConfig):
    """Configuration of `MedusaHeads`: that of `DecodingHeadsConfig`, and these.

    Parameters
    ----------
    num_layers : int
        Residual blocks of each head.
    shared_projection : bool
        Whether all heads share one vocabulary projection. The paper's heads have one each, K Vd D
        weights; with many heads or a large vocabulary that is more than the target itself.
    """

    model_type = "medusa_heads"

    num_layers: int = 1
    shared_projection: bool = False


class BlockwiseHeadsConfig(DecodingHeadsConfig):
    """Configuration of `BlockwiseHeads`: that of `DecodingHeadsConfig`, and this.

    Parameters
    ----------
    intermediate_size : int
        Units of the hidden layer, of each head.
    """

    model_type = "blockwise_heads"

    intermediate_size: int = 2048


class DecodingHeads(PreTrainedModel):
    """Base of decoding heads: K hidden states for each one of the target, then a projection.

    Parameters
    ----------
    config : DecodingHeadsConfig
        Sizes.

    Attributes
    ----------
    draft_token_ids : Tensor or None
        ``[Vd]`` int64, the target's token of each entry of a reduced vocabulary, saved with the
        weights; None: entry i is token i.

    Raises
    ------
    ValueError
        No head, or a size under 1; ``draft_vocab_size`` over ``vocab_size``.
    """

    config: DecodingHeadsConfig
    draft_token_ids: Tensor | None
    projection: nn.Linear | None
    projections: nn.Parameter
    projection_biases: nn.Parameter | None
    base_model_prefix = "heads"
    main_input_name = "features"

    #: Sizes that must be at least 1.
    _sizes: tuple[str, ...] = ("hidden_size", "vocab_size", "num_heads")

    def __init__(self, config: DecodingHeadsConfig) -> None:
        super().__init__(config)
        for name in self._sizes:
            integer(f"{type(self).__name__}: {name}", getattr(config, name), low=1)
        entries = vocabulary_entries(self)
        reduced = config.draft_vocab_size is not None
        self.register_buffer("draft_token_ids", torch.arange(entries) if reduced else None)
        self.projection = None
        if getattr(config, "shared_projection", True):
            self.projection = nn.Linear(config.hidden_size, entries, bias=config.projection_bias)
        else:
            size = (config.num_heads, entries)
            self.projections = nn.Parameter(torch.empty(*size, config.hidden_size))
            biases = torch.zeros(size) if config.projection_bias else None
            self.projection_biases = None if biases is None else nn.Parameter(biases)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise projections; what stands before them adds nothing at first."""
        super()._init_weights(module)
        if isinstance(module, DecodingHeads) and module.projection is None:
            init.normal_(module.projections, mean=0.0, std=self.config.initializer_range)
            if module.projection_biases is not None:
                init.zeros_(module.projection_biases)

    @property
    def num_heads(self) -> int:
        """K, how many tokens are predicted beyond the target's own next one."""
        return self.config.num_heads

    def make_drafter(self) -> Any:
        """Return the `specdec_ext.decoding.HeadsDrafter` that drafts with these heads."""
        from ..decoding import HeadsDrafter

        return HeadsDrafter(self)

    def hidden(self, features: Tensor, count: int | None = None) -> Tensor:
        """Return the hidden states of ``count`` heads (None: all), ``[..., count, D]``."""
        raise NotImplementedError(f"{type(self).__name__} must define this method of DecodingHeads")

    def project(self, hidden: Tensor, head: int) -> Tensor:
        """Return the logits ``[..., Vd]`` of hidden states ``[..., D]`` of one head (0-based).

        Heads with one projection have the same for all.
        """
        scaled = hidden * self.config.feature_scale
        if self.projection is not None:
            logits: Tensor = self.projection(scaled)
            return logits
        biases = self.projection_biases
        return F.linear(scaled, self.projections[head], None if biases is None else biases[head])

    def forward(self, features: Tensor, count: int | None = None) -> Tensor:
        """Return the logits of the tokens ahead.

        Parameters
        ----------
        features : Tensor
            ``[..., D]``, last hidden states of the target, of any floating dtype.
        count : int, optional
            How many heads to evaluate, from the first. None: all of them.

        Returns
        -------
        Tensor
            ``[..., count, Vd]``: row i belongs to the token i + 1 places behind the one that the
            target predicts from the same state.
        """
        hidden = self.hidden(features.to(self.dtype), count)
        if self.projection is not None:  # one product, which reads its weights once
            return self.project(hidden, 0)
        return torch.stack([self.project(one, k) for k, one in enumerate(hidden.unbind(-2))], -2)

    @classmethod
    @torch.no_grad()
    def from_target(
        cls: type[AnyHeads],
        target: Any,
        num_heads: int,
        *,
        inputs: Any,
        draft_token_ids: Tensor | None = None,
        **changes: Any,
    ) -> AnyHeads:
        """Make heads for a target: each begins as a copy of its output head.

        So every head predicts the target's next token at first. The papers begin in the same way.

        Parameters
        ----------
        target : transformers.PreTrainedModel
            A causal language model or an encoder-decoder. It is not modified, and shares no weights
            with the heads.
        num_heads : int
            K.
        inputs : mapping of str to Tensor
            With what the target is called once (``input_ids``; of an encoder-decoder also
            ``decoder_input_ids``), to see its hidden states and by what they are multiplied before
            its output head.
        draft_token_ids : Tensor, optional
            ``[Vd]`` int64, distinct: the tokens that the heads can propose, the most frequent ones,
            say. Their projection is as much smaller, and so is most of what heads of a large
            vocabulary cost. None: all.
        **changes
            Of the configuration.

        Returns
        -------
        DecodingHeads
            In evaluation mode, of the target's dtype and on its device.

        Raises
        ------
        TypeError
            A target without an output head; tokens that are no integer tensor.
        ValueError
            Its head reads something else than its last hidden states, by their width; tokens that
            are not distinct, or none of the target's.

        Examples
        --------
        >>> import torch, transformers
        >>> from specdec_ext.models.heads import MedusaHeads
        >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
        >>> heads = MedusaHeads.from_target(target, 4, inputs=inputs)
        >>> output = target(**inputs, output_hidden_states=True)
        >>> logits = heads(output.hidden_states[-1])
        >>> logits.shape, bool((logits[:, :, 0] - output.logits).abs().max() < 1e-5)
        (torch.Size([1, 3, 4, 9]), True)
        """
        get_head: Any = getattr(target, "get_output_embeddings", lambda: None)
        head = get_head()
        if getattr(head, "weight", None) is None:
            raise TypeError(
                f"{cls.__name__}: target must have an output head, as Hugging Face language models "
                f"have, got {type(target).__name__}"
            )
        output = target(**inputs, output_hidden_states=True)
        states = getattr(output, "decoder_hidden_states", None) or output.hidden_states
        vocabulary, width = head.weight.shape
        if states[-1].shape[-1] != width:
            raise ValueError(
                f"{cls.__name__}: target must have an output head [V, D] over its last hidden "
                f"states [..., D], got {list(head.weight.shape)} over {list(states[-1].shape)}"
            )
        bias = getattr(head, "bias", None)
        plain = F.linear(states[-1], head.weight).double()  # what the head gives at a scale of 1
        logits = output.logits.double() - (0.0 if bias is None else bias.double())
        kind: Any = cls.config_class
        config = kind(
            hidden_size=width,
            vocab_size=vocabulary,
            num_heads=num_heads,
            feature_scale=float((logits * plain).sum() / (plain * plain).sum()),
            projection_bias=bias is not None,
            draft_vocab_size=(
                None if draft_token_ids is None else number_of_tokens(cls.__name__, draft_token_ids)
            ),
            **changes,
        )
        made: Any = cls(config)
        heads: AnyHeads = made.to(device=head.weight.device, dtype=head.weight.dtype).eval()
        if draft_token_ids is not None:
            keep_tokens(heads, draft_token_ids)
        heads._begin_as(head.weight, bias)
        return heads

    def _begin_as(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copy what the target's output head, ``[V, D]`` and ``[V]``, has for the heads' tokens."""
        if self.draft_token_ids is not None:
            weight = weight[self.draft_token_ids]
            bias = None if bias is None else bias[self.draft_token_ids]
        if self.projection is None:
            self.projections.copy_(weight)
            own = self.projection_biases
        else:
            self.projection.weight.copy_(weight)
            own = self.projection.bias
        if own is not None and bias is not None:
            own.copy_(bias)


class MedusaHeads(DecodingHeads):
    """Medusa's heads: residual layers and a vocabulary projection for each token ahead.

    Head i (1-based) turns the target's last hidden state h_t into the law of token t + 1 + i:

        q_i = softmax(W2_i (h_t + SiLU(W1_i h_t + b_i)))

    with ``num_layers`` such residual layers before the projection W2_i. W1 and b begin at zero, and
    W2 as the target's output head (`from_target`).

    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    arXiv 2401.10774, section 2.1.1 (Medusa-1: the target stays as it is).

    Parameters
    ----------
    config : MedusaHeadsConfig
        Sizes.

    Examples
    --------
    >>> heads = MedusaHeads(MedusaHeadsConfig(hidden_size=8, vocab_size=20, num_heads=3))
    >>> heads(torch.randn(2, 8)).shape
    torch.Size([2, 3, 20])
    """

    config_class = MedusaHeadsConfig
    config: MedusaHeadsConfig
    _sizes = (*DecodingHeads._sizes, "num_layers")

    def __init__(self, config: MedusaHeadsConfig) -> None:
        super().__init__(config)
        size = (config.num_layers, config.num_heads, config.hidden_size)
        self.weights = nn.Parameter(torch.empty(*size, config.hidden_size))
        self.biases = nn.Parameter(torch.empty(size))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module: residual layers add nothing at first."""
        super()._init_weights(module)
        if isinstance(module, MedusaHeads):
            init.zeros_(module.weights)
            init.zeros_(module.biases)

    def hidden(self, features: Tensor, count: int | None = None) -> Tensor:
        """Return the hidden states of ``count`` heads (None: all), ``[..., count, D]``."""
        hidden = features[..., None, :]
        for weight, bias in zip(self.weights[:, :count], self.biases[:, :count], strict=True):
            hidden = hidden.expand(*features.shape[:-1], len(weight), -1)
            hidden = hidden + F.silu(torch.einsum("...kd,ked->...ke", hidden, weight) + bias)
        return hidden


class BlockwiseHeads(DecodingHeads):
    """Heads of blockwise parallel decoding: one wide feed-forward layer, the target's projection.

    Head i (1-based) turns the target's last hidden state h_t into the law of token t + 1 + i:

        q_i = softmax(W (h_t + W2_i relu(W1_i h_t + b1_i) + b2_i))

    with the target's own projection W, the same for all heads. W2 and b2 begin at zero.

    Stern, Shazeer, Uszkoreit, "Blockwise Parallel Decoding for Deep Autoregressive Models", arXiv
    1811.03115, section 4 (there p_1 is the model's own next token and p_2 .. p_k are these heads)
    and section 6 (the layer). The paper prints a layer of k d_hidden units and k d_model outputs;
    here each output reads its own d_hidden units, so that weights grow with k and not with its
    square.

    Parameters
    ----------
    config : BlockwiseHeadsConfig
        Sizes.

    Examples
    --------
    >>> config = BlockwiseHeadsConfig(hidden_size=8, vocab_size=20, num_heads=10)
    >>> BlockwiseHeads(config)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 10, 20])
    """

    config_class = BlockwiseHeadsConfig
    config: BlockwiseHeadsConfig
    _sizes = (*DecodingHeads._sizes, "intermediate_size")

    def __init__(self, config: BlockwiseHeadsConfig) -> None:
        super().__init__(config)
        inner = (config.num_heads, config.intermediate_size)
        outer = (config.num_heads, config.hidden_size)
        self.inner = nn.Linear(config.hidden_size, inner[0] * inner[1])
        self.weights = nn.Parameter(torch.empty(*outer, config.intermediate_size))
        self.biases = nn.Parameter(torch.empty(outer))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module: the layer adds nothing at first."""
        super()._init_weights(module)
        if isinstance(module, BlockwiseHeads):
            init.zeros_(module.weights)
            init.zeros_(module.biases)

    def hidden(self, features: Tensor, count: int | None = None) -> Tensor:
        """Return the hidden states of ``count`` heads (None: all), ``[..., count, D]``."""
        weights, biases = self.weights[:count], self.biases[:count]
        read = slice(len(weights) * self.config.intermediate_size)
        units = F.relu(F.linear(features, self.inner.weight[read], self.inner.bias[read]))
        units = units.unflatten(-1, (len(weights), -1))
        added = torch.einsum("...kf,kdf->...kd", units, weights) + biases
        return features[..., None, :] + added


# Imported, their kinds are among those that ``AutoModel.from_pretrained`` loads.
for _kind in (MedusaHeads, BlockwiseHeads):
    AutoConfig.register(_kind.config_class.model_type, _kind.config_class, exist_ok=True)
    AutoModel.register(_kind.config_class, _kind, exist_ok=True)
