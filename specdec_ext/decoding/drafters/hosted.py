"""What drafters that run a causal model share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .interface import Requests, over_the_target

if TYPE_CHECKING:
    from ..hosting import HostedModel


def reduced_vocabulary(model: Any) -> Tensor | None:
    """Return the target's token of each entry of a draft model's rows, ``[Vd]``; None: the same."""
    from ..cache import described

    found: Tensor | None = getattr(described(model), "draft_token_ids", None)
    return found


class ModelHost:
    """Runs a causal model behind a cache, from the requests' prompts on.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are. One with ``draft_token_ids``
        ``[Vd]``, as `specdec_ext.models.draft_llama.DraftLlama` has, gives logits over these tokens
        only.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._cached: HostedModel | None = None
        self._requests: Requests
        self._missing: Tensor  # [B, n]: each row's last n tokens, which the cache lacks

    @property
    def calls(self) -> int:
        """Model calls so far, prefill excluded."""
        return 0 if self._cached is None else self._cached.calls

    @property
    def token_ids(self) -> Tensor | None:
        """``[Vd]`` int64, the target's token of each entry of a reduced vocabulary; None: all."""
        return reduced_vocabulary(self.model)

    def _over_the_target(self, rows: Tensor) -> Tensor:
        """Give entries of rows ``[..., Vd]`` the places of their tokens, ``[..., V]``."""
        from ..cache import vocabulary_size

        return over_the_target(rows, self.token_ids, vocabulary_size(self.model))

    def _begin(self, requests: Requests, trees: bool = False) -> None:
        """Take the prompts; what the first call appends, it runs behind them."""
        from ..hosting import host_model

        ids, mask = requests.input_ids, requests.attention_mask
        self._requests = requests
        self._cached = host_model(
            self.model,
            requests.ends,
            room=requests.room,
            static=requests.static_cache,
            trees=trees,
        )
        self._cached.prefill(ids[:, :-1], None if mask is None else mask[:, :-1], rides=True)
        self._missing = ids[:, -1:]
