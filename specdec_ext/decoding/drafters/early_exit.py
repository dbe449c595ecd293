"""The target's own first layers as the drafter (self-speculation): no second set of weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checks import integer
from ..module_views import outermost_lists, with_part
from .model import ModelDrafter

__all__ = ["EarlyExitDrafter", "first_layers"]


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the target's first layers, its final norm and its head.

    The law passed on is the one that those layers give, so the output follows the target's law
    whatever they are worth. They keep a cache of their own: in a round the target runs all of its
    layers on every draft token, as with any drafter.

    Zhang et al., "Draft & Verify", arXiv 2309.08168; Elhoushi et al., "LayerSkip", arXiv
    2404.16710: a model trained to exit early drafts far better than one that was not.

    Parameters
    ----------
    model : torch.nn.Module
        The target (or any model): a Hugging Face causal language model, or an encoder-decoder that
        has read its inputs (`encoded`), of which decoder layers are left out. It is not modified.
    layers : int
        How many of its layers to run.

    Examples
    --------
    >>> drafter = EarlyExitDrafter(target, layers=4)  # doctest: +SKIP
    >>> specdec_ext.generate(target, drafter, input_ids, gamma=3)  # doctest: +SKIP
    """

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__(first_layers(model, layers))


def first_layers(model: Any, layers: int) -> Any:
    """Return a model of the first layers of ``model``, which shares its weights.

    The result is a model like any other: a draft, the medium model of a hierarchy, a target.
    Whatever happens to the weights (a load, a move to another device) happens to both.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face causal language model whose decoder runs a list of layers in order, as
        Llama's, GPT-2's and GPT-NeoX's do, or what `encoded` gives: there the encoder runs whole,
        once, and the first layers of the decoder read what it gave. It is not modified.
    layers : int
        How many layers, between 1 and all of them.

    Returns
    -------
    torch.nn.Module
        Of the same class.

    Raises
    ------
    TypeError
        The list of layers or the head cannot be found, or a wrapped ``forward`` hides them.
    ValueError
        A number of layers that the model does not have.

    Examples
    --------
    >>> import torch, transformers
    >>> from specdec_ext.decoding.drafters.early_exit import first_layers
    >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=3, n_head=2)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> first = first_layers(model, 1)
    >>> len(first.transformer.h), len(model.transformer.h)
    (1, 3)
    >>> first.lm_head.weight is model.lm_head.weight
    True
    """
    layers = integer("early exit: layers", layers)
    is_encoded = hasattr(model, "with_model")
    inner = model.model if is_encoded else model
    path = _path_in_decoder(model) if is_encoded else _path_of_layers(model)
    every: Any = inner.get_submodule(path)
    if not 1 <= layers <= len(every):
        raise ValueError(
            f"early exit: layers must be in [1, {len(every)}] for this {type(inner).__name__}, got "
            f"{layers}"
        )
    try:
        first = with_part(inner, path, every[:layers])
    except TypeError as error:
        raise TypeError(f"early exit: {error}") from error
    return model.with_model(first) if is_encoded else first


def _path_in_decoder(encoded: Any) -> str:
    """Return where the list of layers is of an `EncodedModel`'s decoder."""
    if encoded.layers is None:
        raise TypeError(
            f"early exit: the decoder of {type(encoded.model).__name__} must have one list of "
            "layers, got none or several"
        )
    path: str = encoded.layers
    return path


def _path_of_layers(model: Any) -> str:
    """Return where the list of decoder layers is, as ``model.named_modules`` says it."""
    kind = type(model).__name__
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "get_text_config"):
        raise TypeError(f"early exit: model must be a Hugging Face causal model, got {kind}")
    if getattr(config, "is_encoder_decoder", False):
        raise TypeError(
            f"early exit: model must be a causal model, or an encoder-decoder wrapped with its "
            f"inputs in specdec_ext.decoding.encoder_decoder.encoded(), got {kind}"
        )
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    if get_head() is None:
        raise TypeError(f"early exit: {kind} has no language-model head")
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    outermost = outermost_lists(model, count)
    if len(outermost) != 1:
        raise TypeError(
            f"early exit: {kind} must have one list of {count} layers, got {outermost or 'none'}"
        )
    return outermost[0]
