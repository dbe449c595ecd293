"""The public function of beam search by the target."""

from __future__ import annotations

from torch import Tensor

from ._calls import call
from .contract import BeamVerifyResult

__all__ = ["beam_verify"]


def beam_verify(
    target_logits: Tensor,
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    gamma: int,
    *,
    eos_token_ids: Tensor | None = None,
    rule: str = "bound",
    log_probs: bool = False,
    backend: str = "auto",
) -> BeamVerifyResult:
    """Decide levels of a beam search by the target: several with one target call.

    Beam search keeps the W hypotheses ("live beams") of the highest sums of log-probabilities and
    continues each by every token. Here a draft has searched ahead: its beams are a tree below the
    live ones, the target has computed the rows of all its nodes in one call, and as many levels are
    decided as those rows allow, at least one. The result is exactly that of beam search by the
    target alone, whatever the draft; its scores are not read.

    A call's last decided live beams are the next call's first: scores go into `scores`, the tokens
    to ``tokens[:, :W]``. A search begins with one beam of score 0.

    Rules, of when a level after the first is decided:

    - ``bound`` (default): no live beam is missing from the tree, or W continuations of the others
      that are no EOS token have scores above the best missing beam's. Log-probabilities are at most
      0, so that nothing behind a missing beam can have a higher score than the beam.
    - ``subset``: no live beam is missing from the tree. For rows that may hold values above 0.

    Parameters
    ----------
    target_logits : Tensor
        ``[B, N, V]`` raw logits, float32, bfloat16 or float16, unit stride on V; row v has the
        logits of the token after node v. Rows of places without a beam are not read.
    scores : Tensor
        ``[B, W]`` float32, nats, 1 <= W <= 64: the scores of the live beams, best first; -inf for
        no beam.
    tokens : Tensor
        ``[B, N]`` int32 or int64, W <= N <= 1024. Those of the live beams are ignored. An EOS token
        is never reached.
    parents : Tensor
        ``[B, N]`` int32 or int64: -1 for nodes 0 .. W-1, which are the live beams, and for padding;
        else the node that a node continues, below its own index.
    gamma : int
        In [0, 1024): levels of the tree below the live beams. At most gamma + 1 are decided.
    eos_token_ids : Tensor, optional
        ``[E]`` int32 or int64: tokens that end a hypothesis.
    rule : str
        See above.
    log_probs : bool
        target_logits holds log-probabilities, which are added as they are: those of a softmax that
        processors have changed since, as transformers does. With values above 0 only "subset" is
        exact.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        "auto" follows the tensors' device; an explicit choice never falls back.

    Returns
    -------
    BeamVerifyResult
        ``tokens``, ``parents``, ``nodes`` [B, G+1, W] int64 and ``scores`` [B, G+1, W] float32, by
        level: each live beam's last token, the place of the beam before it in the level before, its
        node in the tree or -1, and its score; best first, then -1 and -inf.
        ``finished_tokens``, ``finished_parents`` [B, G+1, W] int64 and ``finished_scores``
        [B, G+1, W] float32: the hypotheses that ended in the level, those among the best W of all
        continuations, without a length penalty.
        ``num_levels`` [B] int32: decided levels. 0 where there is no live beam, or no law.
        ``status`` [B] int32: ``STATUS_`` bits. 1: a row that was needed has no law (NaN, +inf or
        nothing but -inf); what was decided before it stands. 2: a draft token outside [0, V) other
        than -1, which is never reached. 8: a score of NaN or +inf, taken as no beam. 16: parents
        that are no tree of beams: nothing is drafted.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor what it should be.
    ValueError
        A wrong dtype, shape or stride; W, N or gamma out of range; an unknown rule.

    See Also
    --------
    verify_tree : the same for sampling and for greedy decoding.

    Notes
    -----
    A continuation of score s by token t has score ``s + ((l_t - max) - log z)``, each operation and
    log z rounded to float32, as transformers computes it. Equal scores are ordered by place, then
    by token. Hypotheses that end leave their place to the next continuation, so that W beams live
    on; a length penalty, limits of length and the end of the search are the caller's and need
    decided levels only. docs/design.md, "Beam search", says where transformers differs.

    References
    ----------
    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", arXiv
    2211.17192, appendix A.4: the subset rule, and "a more elaborate procedure", here the bound.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> logits = torch.tensor([[.6, .3, .1], [.1, .2, .7], [.5, .3, .2], [.2, .7, .1]]).log()
    >>> scores = torch.tensor([[0.0, -torch.inf]])  # a search begins: one beam of two
    >>> tokens = torch.tensor([[0, 0, 0, 1]])  # nodes 2 and 3 continue it by tokens 0 and 1
    >>> parents = torch.tensor([[-1, -1, 0, 0]])
    >>> found = specdec_ext.beam_verify(logits[None], scores, tokens, parents, 1)
    >>> found.num_levels  # both are the target's best: its second level is decided too
    tensor([2], dtype=torch.int32)
    >>> found.tokens[0]
    tensor([[0, 1],
            [0, 1]])
    >>> found.parents[0]  # in the second level 0 continues 0, and 1 continues 1
    tensor([[0, 0],
            [0, 1]])
    >>> found.scores[0, 1].exp()
    tensor([0.3000, 0.2100])
    """
    arguments = dict(
        target_logits=target_logits,
        scores=scores,
        tokens=tokens,
        parents=parents,
        gamma=gamma,
        eos_token_ids=eos_token_ids,
        rule=rule,
        log_probs=log_probs,
    )
    return BeamVerifyResult(*call("beam_verify", backend, target_logits, arguments))
