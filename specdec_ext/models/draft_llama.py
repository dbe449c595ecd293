"""A small Llama that drafts for a large model: it knows a part of the target's tokens only.

Half of a small model over a large vocabulary is its embedding, and most of the time that one of its
calls takes goes into the output head. Text uses few of a vocabulary's tokens often, so that a draft
with the frequent ones is smaller and faster and proposes nearly as well (EAGLE-3 and FR-Spec, arXiv
2502.14856, reduce the vocabularies of their heads for this reason).
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..decoding.cache_names import own_cache_name
from ..decoding.packed import linear
from .reduced import keep_tokens, number_of_tokens, vocabulary_entries

__all__ = ["DraftLlama", "DraftLlamaConfig"]

_CACHE = own_cache_name()


class DraftLlamaConfig(LlamaConfig):
    """Configuration of a `DraftLlama`: Llama's, and how many tokens it knows.

    Parameters
    ----------
    draft_vocab_size : int, optional
        Vd, the tokens that it knows. None: all.
    **kwargs
        As of `transformers.LlamaConfig`; ``vocab_size`` is the target's.
    """

    model_type = "draft_llama"

    draft_vocab_size: int | None = None


class _ReducedEmbedding(nn.Module):
    """Embeds the tokens of a reduced vocabulary, and all others by one common vector."""

    entries: Tensor  # [V] int64, the entry of each of the target's tokens, Vd where it has none

    def __init__(self, config: DraftLlamaConfig, draft_vocab_size: int) -> None:
        super().__init__()
        self.num_embeddings = vocab_size = config.vocab_size
        self.weight = nn.Parameter(torch.empty(draft_vocab_size + 1, config.hidden_size))
        nn.init.normal_(self.weight, std=config.initializer_range)
        entries = torch.arange(vocab_size).clamp(max=draft_vocab_size)
        self.register_buffer("entries", entries)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(self.entries[input_ids], self.weight)


class DraftLlama(PreTrainedModel):
    """A causal model over a target's tokens that proposes only those of a reduced vocabulary.

    It reads any text of the target's: tokens outside its vocabulary share one embedding. Its logits
    ``[B, n, Vd]`` are over its own vocabulary, and its output head is its embedding (they are
    tied). `specdec_ext.generate` takes it as ``draft`` and passes its rows on as they are, with
    ``draft_token_ids``, so that the output follows the target's law under every lossless rule. It
    is saved and loaded as any transformers model; ``benchmarks/pair/distilled`` trains one.

    Parameters
    ----------
    config : DraftLlamaConfig
        Sizes.

    Attributes
    ----------
    draft_token_ids : Tensor
        ``[Vd]`` int64, distinct: the target's token of each entry; saved with the weights.

    Examples
    --------
    >>> config = DraftLlamaConfig(
    ...     hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    ...     vocab_size=50, draft_vocab_size=3,
    ... )
    >>> draft = DraftLlama(config).with_tokens(torch.tensor([7, 2, 40])).eval()
    >>> draft(torch.tensor([[1, 2, 3, 40]])).logits.shape
    torch.Size([1, 4, 3])
    >>> draft.draft_token_ids
    tensor([ 7,  2, 40])
    """

    config_class = DraftLlamaConfig
    config: DraftLlamaConfig
    base_model_prefix = "layers"
    draft_token_ids: Tensor

    def __init__(self, config: DraftLlamaConfig) -> None:
        super().__init__(config)
        size = vocabulary_entries(self)
        inner = copy(config)
        inner.vocab_size, inner.pad_token_id = 1, None  # its own embedding is not used
        self.layers = LlamaModel(inner)
        embedding: Any = _ReducedEmbedding(config, size)
        self.layers.embed_tokens = embedding
        self.register_buffer("draft_token_ids", torch.arange(size))
        self.post_init()

    @torch.no_grad()
    def with_tokens(self, draft_token_ids: Tensor) -> DraftLlama:
        """Say which of the target's tokens it knows.

        Parameters
        ----------
        draft_token_ids : Tensor
            ``[Vd]`` int64, distinct.

        Returns
        -------
        DraftLlama
            This model.

        Raises
        ------
        TypeError
            Something else than an integer tensor.
        ValueError
            Another number of tokens, one that comes twice, or one outside ``[0, V)``.
        """
        ids = keep_tokens(self, draft_token_ids)
        entries = torch.full((self.config.vocab_size,), len(ids))
        entries[ids] = torch.arange(len(ids))
        self.entries.copy_(entries)
        return self

    @property
    def entries(self) -> Tensor:
        """``[V]`` int64, the entry of each of the target's tokens, Vd where it has none."""
        embedding: Any = self.layers.embed_tokens
        found: Tensor = embedding.entries
        return found

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run tokens of the target's.

        Parameters
        ----------
        input_ids : Tensor
            ``[B, n]`` int64, any of the target's tokens.
        attention_mask, position_ids, use_cache, logits_to_keep, **kwargs
            As of `transformers.LlamaForCausalLM`.
        cache, past_key_values
            The key-value cache, by either of the names that versions of transformers have for it.

        Returns
        -------
        CausalLMOutputWithPast
            ``logits`` ``[B, n, Vd]``, of the token behind each, and the cache.
        """
        output = self.layers(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **{_CACHE: past_key_values if cache is None else cache},
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(
            logits=self.head(output.last_hidden_state[:, kept]),
            **{_CACHE: output[_CACHE] if _CACHE in output else None},
        )

    def head(self, hidden_states: Tensor) -> Tensor:
        """Return the logits ``[..., Vd]`` of last hidden states ``[..., D]``."""
        embedding: Any = self.layers.embed_tokens
        return linear(hidden_states, embedding.weight[:-1])

    @classmethod
    @torch.no_grad()
    def from_target(cls, target: Any, draft_token_ids: Tensor, **changes: Any) -> DraftLlama:
        """Make a draft for a target, to be trained: its embedding begins as the target's.

        The target's embedding vectors are projected on the directions in which those of the
        reduced vocabulary vary most (principal components), and scaled to a fresh embedding's size.

        Parameters
        ----------
        target : transformers.PreTrainedModel
            A causal language model. It is not modified, and shares no weights with the draft.
        draft_token_ids : Tensor
            ``[Vd]`` int64, distinct: the tokens that the draft knows, the most frequent ones, say.
        **changes
            Of the configuration: ``hidden_size``, ``num_hidden_layers`` and so on.

        Returns
        -------
        DraftLlama
            In evaluation mode, float32, on the target's device.

        Raises
        ------
        TypeError
            A target without an embedding; tokens that are no integer tensor.
        ValueError
            ``draft_token_ids`` as in `with_tokens`; a draft wider than the target's embedding.
        """
        embedding = getattr(target, "get_input_embeddings", lambda: None)()
        weight = getattr(embedding, "weight", None)
        if weight is None:
            raise TypeError(
                "DraftLlama: target must have an embedding, as Hugging Face causal models have, "
                f"got {type(target).__name__}"
            )
        text = target.config.get_text_config()
        config = DraftLlamaConfig(
            **{
                "vocab_size": text.vocab_size,
                "draft_vocab_size": number_of_tokens("DraftLlama", draft_token_ids),
                "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
                "bos_token_id": text.bos_token_id,
                "eos_token_id": text.eos_token_id,
                "pad_token_id": None,
                **changes,
            }
        )
        width = config.hidden_size
        if width > weight.shape[1]:
            raise ValueError(
                "DraftLlama: hidden_size must be at most the width of the target's embedding, "
                f"{weight.shape[1]}, got {width}"
            )
        made: Any = cls(config).with_tokens(draft_token_ids).to(weight.device).eval()
        vectors = weight[made.draft_token_ids].float()
        vectors = vectors - vectors.mean(0)
        # Directions from the second moments: [D, D] instead of a decomposition of [Vd, D].
        directions = torch.linalg.eigh(vectors.T @ vectors).eigenvectors[:, -width:]
        # A random rotation spreads the components evenly over the heads and the norms' entries.
        vectors = vectors @ directions @ torch.linalg.qr(torch.randn(width, width)).Q.to(vectors)
        own = made.layers.embed_tokens.weight
        own[:-1] = vectors * (config.initializer_range / vectors.std())
        own[-1] = 0.0
        result: DraftLlama = made
        return result


# A folder with such a draft loads as any other model does, once this module is imported.
AutoConfig.register(DraftLlamaConfig.model_type, DraftLlamaConfig, exist_ok=True)
AutoModelForCausalLM.register(DraftLlamaConfig, DraftLlama, exist_ok=True)
