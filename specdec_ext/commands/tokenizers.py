"""Whether a draft's token ids stand for the target's tokens, and what to do where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["difference", "has_tokenizer"]

#: One of these is in a checkpoint's folder that has a tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_REMEDY = (
    "output stays the target's, but next to nothing will be accepted: take a draft that was "
    "trained with the target's tokenizer, or one that needs none (LookupDrafter)"
)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a checkpoint's folder holds a tokenizer of its own."""
    return any((folder / name).is_file() for name in _FILES)


def difference(target: Any, draft: Any) -> str | None:
    """Say what differs between the tokens of two tokenizers' ids; None where nothing does.

    Ids that only one of them has are no difference: drafts may know fewer tokens, and embeddings
    are often longer than vocabularies.

    Parameters
    ----------
    target, draft : tokenizer
        With ``get_vocab()``, as those of transformers have.

    Examples
    --------
    >>> from types import SimpleNamespace as Tokenizer
    >>> one = Tokenizer(get_vocab=lambda: {"a": 0, "b": 1})
    >>> other = Tokenizer(get_vocab=lambda: {"a": 0, "c": 1, "d": 2})
    >>> print(difference(one, other)[:72])
    the draft's tokenizer is another: 1 of 2 ids stands for another token (1
    """
    of_target, of_draft = (
        {index: token for token, index in tokenizer.get_vocab().items()}
        for tokenizer in (target, draft)
    )
    shared = sorted(of_target.keys() & of_draft.keys())
    others = [index for index in shared if of_target[index] != of_draft[index]]
    if shared and not others:
        return None
    if not shared:
        return f"the draft's tokenizer has no id of the target's; {_REMEDY}"
    first = others[0]
    stand = "stands for another token" if len(others) == 1 else "stand for other tokens"
    return (
        f"the draft's tokenizer is another: {len(others)} of {len(shared)} ids {stand} ({first} is "
        f"{of_target[first]!r} to the target, {of_draft[first]!r} to the draft); {_REMEDY}"
    )
