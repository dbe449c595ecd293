"""What the losses of heads are given of a text: tensors that stand side by side."""

from __future__ import annotations

from torch import Tensor

__all__: list[str] = []


def check_places(owner: str, features: Tensor, **others: Tensor | None) -> None:
    """Refuse tensors that are not of the same texts and tokens as a target's states.

    Places are compared by number: rows or a mask of other ones would be read without a word.

    Parameters
    ----------
    owner : str
        Who asks, for errors.
    features : Tensor
        ``[B, n, D]``.
    **others : Tensor or None
        ``[B, n]`` or ``[B, n, ...]``, by name; None is none.

    Raises
    ------
    ValueError
        One is not.
    """
    places = list(features.shape[:2])
    if features.dim() != 3:
        raise ValueError(f"{owner}: features must be [B, n, D], got {list(features.shape)}")
    for name, given in others.items():
        wanted, dims = ("[B, n, V]", 3) if name == "target_logits" else ("[B, n]", 2)
        if given is not None and (given.dim() != dims or list(given.shape[:2]) != places):
            raise ValueError(
                f"{owner}: {name} must be {wanted} with the B and n of features, {places}, got "
                f"{list(given.shape)}"
            )
