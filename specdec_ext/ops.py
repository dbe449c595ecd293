"""The public operators: scalars and randomness on this side, checks and kernels in C++.

Words (as in vLLM's rejection sampler). A *law* is a probability distribution over the vocabulary.
*target* is the model whose law is to be emitted, *draft* what proposed tokens, G of them for a
request. *Accepted* tokens are draft tokens that are kept; then exactly one more token is emitted:
the *residual* token (vLLM: recovered) after a rejection, the *bonus* token after full acceptance.
Tokens emitted = accepted + 1. A *coin* is the uniform number that decides about one draft token.

Shapes: B requests, G draft positions, V target vocabulary, Vd draft vocabulary, R rows.

All functions take sampling parameters as Python numbers (expanded to every request), sequences or
tensors (passed on untouched). Calls trace under ``torch.compile(fullgraph=True)``, except with
``generator=``. Outputs never require grad.

Errors, all functions: TypeError for an argument that is neither a tensor nor the number it should
be; ValueError for a wrong dtype, shape, combination of arguments or a number out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._calls import Floats, Ints, call, check_type, is_number, kind
from .attention import wrong_pages
from .beams import beam_verify
from .contract import (
    CHAIN_RULES,
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
    TREE_RULES,
    BeamVerifyResult,
    RowLaw,
    SampleResult,
    TreeAttentionResult,
    TreeMaskResult,
    VerifyResult,
    VerifyTreeResult,
)

__all__ = [
    "BeamVerifyResult",
    "RULES",
    "STATUS_INVALID_DRAFT_TOKEN",
    "STATUS_INVALID_TREE",
    "STATUS_NO_DRAFT_LAW",
    "STATUS_NO_TARGET_LAW",
    "STATUS_PARAMETER_OUT_OF_RANGE",
    "RowLaw",
    "SampleResult",
    "TREE_RULES",
    "TreeAttentionResult",
    "TreeMaskResult",
    "VerifyResult",
    "VerifyTreeResult",
    "acceptance",
    "beam_verify",
    "compact_kv",
    "row_law",
    "sample",
    "tree_attention",
    "tree_mask",
    "uniforms",
    "verify",
    "verify_tree",
]

#: Names that `verify` takes as its rule.
RULES = CHAIN_RULES


# -------------------------------------------------------------------------------------------------
# Operators, in csrc/library.cpp's order
# -------------------------------------------------------------------------------------------------


def row_law(
    logits: Tensor,
    *,
    allowed_mask: Tensor | None = None,
    temperature: Floats = None,
    top_k: Ints = None,
    top_p: Floats = None,
    min_p: Floats = None,
    backend: str = "auto",
) -> RowLaw:
    """Reduce every logits row and its filters to five scalars: its law, a probability distribution.

    p(x) = exp(scale * (logit_x - max) - log_z) where logit_x >= cutoff, else 0. Filters apply in
    the order top-k, top-p (on the renormalised top-k set), min-p, and ties at a threshold are all
    kept. No sort: radix selection, with fixed-point masses for top-p, so that the result depends
    neither on the number of threads nor on the batch.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]`` raw logits, float32, bfloat16 or float16, unit stride on V. -inf is a legal mask.
    allowed_mask : Tensor, optional
        ``[R, ceil(V/32)]`` int32, unit stride on the last dimension, the layout of grammar engines
        (xgrammar, llguidance): token x is allowed where bit x % 32 of word x // 32 is 1, the lowest
        bit being bit 0. The result is, to the bit, that of logits with -inf in place of what is not
        allowed; what stands there, even NaN, does not matter.
    temperature : Tensor or number or sequence, optional
        ``[R]`` float32, default 1. Below 1e-6: the point mass at the arg max (lowest index).
    top_k : Tensor or int or sequence, optional
        ``[R]`` int32 or int64. Off where <= 0 or >= V.
    top_p : Tensor or number or sequence, optional
        ``[R]`` float32. A token stays if the mass strictly more likely than it is < top_p; the top
        entry and its ties always stay. Off where >= 1.
    min_p : Tensor or number or sequence, optional
        ``[R]`` float32. A token stays if p(x) >= min_p * max p. Off where <= 0.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        "auto" follows the tensors' device. An explicit choice never falls back. "reference" is
        float64 PyTorch, slow, and checks no shapes.

    Returns
    -------
    RowLaw
        ``max`` [R] float32, ``scale`` [R] float64, ``cutoff`` [R] float32 (a raw logit), ``log_z``
        [R] float64 (nats, relative to max), ``argmax`` [R] int64. NaN and -1 where the row has no
        law (NaN, +inf, all -inf, nothing allowed) or a parameter is out of range (T negative, NaN
        or inf; top_p NaN or negative; min_p NaN or above 1).

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor a number.
    ValueError
        A dtype or shape that is not the one above.

    References
    ----------
    Holtzman et al., "The curious case of neural text degeneration", arXiv 1904.09751, section 3.1
    (top-p). Nguyen et al., "Turning up the heat: min-p sampling", arXiv 2407.01082, section 3.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> logits = torch.tensor([[0.0, 1.0, 2.0, 1.0]])
    >>> law = specdec_ext.row_law(logits, temperature=0.5, top_k=2)
    >>> law.max, law.scale, law.cutoff, law.argmax  # two tokens tie for rank 2: both stay
    (tensor([2.]), tensor([2.], dtype=torch.float64), tensor([1.]), tensor([2]))
    >>> weights = torch.where(logits >= law.cutoff, (law.scale * (logits - law.max)).exp(), 0)
    >>> (weights / law.log_z.exp()).float()
    tensor([[0.0000, 0.1065, 0.7870, 0.1065]])

    Only tokens 1 and 3 are allowed:

    >>> mask = torch.tensor([[0b1010]], dtype=torch.int32)
    >>> law = specdec_ext.row_law(logits, allowed_mask=mask)
    >>> law.max, law.argmax
    (tensor([1.]), tensor([1]))
    """
    arguments = {
        **dict(logits=logits, allowed_mask=allowed_mask),
        **dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
    }
    return RowLaw(*call("row_law", backend, logits, arguments))


def sample(
    logits: Tensor,
    uniforms: Tensor | None = None,
    *,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    draft_index: int = 0,
    domain: int = 2,
    stream: int = 0,
    temperature: Floats = None,
    top_k: Ints = None,
    top_p: Floats = None,
    min_p: Floats = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> SampleResult:
    """Draw one token per row from the row's law, the probability distribution that it stands for.

    The token is distributed as softmax(logits / temperature) after top-k, top-p and min-p, to
    within 2^-40 of a weight: an inverse CDF in integers, weights floor(2^40 exp((logit - max) /
    T)), the lowest index whose prefix sum exceeds u times the total. It always has positive
    probability.

    In domain 3 it is the winner of a race instead, as in the rule "coupled" of `verify`: the arg
    min of E(seed, position, token) / p(token) with independent exponential E, which has the same
    law. A draft and a target that race on the same noise give the same token with probability
    sum_j 1 / sum_i max(p_i / p_j, q_i / q_j), at least (1 - TV) / (1 + TV) of their total variation
    distance TV, where two draws that could speak with each other have 1 - TV.

    Parameters
    ----------
    logits : Tensor
        ``[B, V]`` raw logits, float32, bfloat16 or float16, unit stride on V.
    uniforms : Tensor, optional
        ``[B]`` float64 in [0, 1).
    allowed_mask : Tensor, optional
        ``[B, ceil(V/32)]`` int32 as in `row_law`. With draft_token_ids its bits are target ids and
        its width is free: an id beyond it is not allowed.
    draft_token_ids : Tensor, optional
        ``[V]`` int32 or int64: the target id of each entry, where the rows are those of a draft
        with a reduced vocabulary. The token returned is a target id.
    seeds, positions : Tensor, optional
        ``[B]`` int64 each, instead of uniforms: Philox4x32-10 with the seed as key and counter (0,
        position, draft_index | domain << 16 | stream << 24). Positions are those of `verify`. In
        domain 3 the noise of token x has counter (x >> 1, position + draft_index, 3 << 16 | stream
        << 24): words 0 and 1 where x is even, 2 and 3 where it is odd, all 64 bits.
    draft_index : int
        Which token of the round this is, in [0, 65536).
    domain : int
        Selects an independent set of random numbers: 2 (default) for a draft model's draws, 1 for
        draws from a target law outside `verify`, 3 for the races of the rule "coupled", the draft's
        and the target's: there alone noise is shared.
        Never draw both from domain 1 or 2: shared noise biases what the other rules emit.
    stream : int
        In [0, 256), not a CUDA stream: numbers the models where a draft is itself verified against
        a smaller draft with the same seeds; otherwise 0.
    temperature, top_k, top_p, min_p : optional
        ``[B]`` as in `row_law`.
    generator : torch.Generator, optional
        Draws fresh seeds, at position 0 unless positions are given, where neither uniforms nor
        seeds are given; the default generator of the device if None. A call with one does not
        trace under ``torch.compile(fullgraph=True)``.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        As in `row_law`.

    Returns
    -------
    SampleResult
        ``tokens`` [B] int64; ``logprobs`` [B] float32, nats, under the filtered law (0 at T = 0).
        Token -1 and NaN where the row has no law, a parameter is out of range (see `row_law`), the
        uniform is outside [0, 1) or any of draft_token_ids outside [0, 2^31): there is no status
        here, and never a silently wrong token. At T = 0 uniforms are not read.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor a number.
    ValueError
        A wrong dtype, shape or stride; uniforms together with seeds or a generator; seeds without
        positions; a domain other than 1, 2 and 3; uniforms in domain 3; draft_index or stream out
        of range.

    References
    ----------
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox). Daliri, Musco,
    Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv
    2408.07978 (the race: Gumbel sampling there).

    Examples
    --------
    >>> import torch, specdec_ext
    >>> logits = torch.tensor([[0.125, 0.25, 0.625]]).log().repeat(3, 1)
    >>> u = torch.tensor([0.12, 0.13, 0.38], dtype=torch.float64)
    >>> specdec_ext.sample(logits, u).tokens  # prefix sums .125, .375, 1
    tensor([0, 1, 2])
    >>> specdec_ext.sample(logits, u, temperature=0).tokens
    tensor([2, 2, 2])
    >>> ids = torch.tensor([40, 7, 19])  # a reduced vocabulary: entry 0 is token 40, ...
    >>> specdec_ext.sample(logits, u, draft_token_ids=ids).tokens
    tensor([40,  7, 19])

    Races of slightly different laws on the same noise mostly agree:

    >>> target, draft = logits[:1].expand(8, 3), 0.9 * logits[:1].expand(8, 3)
    >>> noise = dict(seeds=torch.full((8,), 6), positions=torch.arange(8), domain=3)
    >>> specdec_ext.sample(target, **noise).tokens
    tensor([1, 2, 2, 2, 2, 1, 2, 0])
    >>> specdec_ext.sample(draft, **noise).tokens
    tensor([1, 2, 2, 0, 2, 1, 2, 0])
    """
    arguments = {
        **dict(logits=logits, uniforms=uniforms, allowed_mask=allowed_mask),
        **dict(draft_token_ids=draft_token_ids, seeds=seeds, positions=positions),
        **dict(draft_index=draft_index, domain=domain, stream=stream),
        **dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
    }
    return SampleResult(*call("sample", backend, logits, arguments, generator))


def verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    draft_probs_ids: Tensor | None = None,
    target_rows: Tensor | None = None,
    draft_rows: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    draft_kinds: Tensor | None = None,
    draft_lengths: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Floats = None,
    top_k: Ints = None,
    top_p: Floats = None,
    min_p: Floats = None,
    draft_temperature: Floats = None,
    draft_top_k: Ints = None,
    draft_top_p: Floats = None,
    draft_min_p: Floats = None,
    rule: str = "block",
    lenience: float = 1.0,
    beta: int = 3,
    tau: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    full_accept_probs: bool = False,
    raw_logprobs: bool = False,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> VerifyResult:
    """Verify chains of draft tokens: raw logits in, tokens to emit out.

    Softmax, temperature, filters, the accept tests, the residual and the final draw happen inside.
    Under every rule that is not called "not lossless" below, the emitted tokens are distributed
    exactly as if the target had sampled them one by one from its law, the probability distribution
    after temperature and filters, whatever the draft, given that every sampled draft token was
    drawn from the draft law passed here and with other randomness ("coupled": however it was
    drawn).

    Rules:

    - ``block`` (default): accept all tokens up to the last one whose coin u is below its threshold
      h. Accepts at least as many tokens as any other lossless rule on a chain, in expectation. Sun
      et al., arXiv 2403.10444, Algorithm 2.
    - ``token``: accept while u q(x) < p(x). Leviathan et al., arXiv 2211.17192, Algorithm 1.
    - ``greedy``: accept while x is the arg max. Ignores temperature, randomness and draft law.
    - ``lenient``: token with lenience * q in place of q. Not lossless: no token gets above
      p / lenience. At T = 0: accept while p(x) >= lenience * max p on the raw softmax. Leviathan et
      al., appendix A.5.
    - ``top_beta``: accept while x is among the ``beta`` best of the raw row and within ``tau`` nats
      of the best; failure and bonus emit the best. Not lossless. Xia et al., arXiv 2203.16487, eq.
      8-10.
    - ``typical``: accept while p(x) > min(epsilon, delta exp(-entropy)); failure and bonus drawn
      from p. Not lossless. Cai et al. (Medusa), arXiv 2401.10774, section 3.3.
    - ``coupled``: accept while x is the token that the target itself would have drawn, the arg min
      of E / p(token) with exponential noise E of the seed, the absolute position and the token;
      failure and bonus emit that token. So the output is a function of seeds and target, whatever
      the draft, gamma or batch: it equals ``sample(domain=3)`` one token at a time. A draft that
      draws by ``sample(domain=3)`` too is mostly accepted (`sample` says how often). No draft law
      is read. Daliri, Musco, Suresh, arXiv 2408.07978.

    A request at T = 0 is verified as under ``greedy`` in every rule except those two whose words
    above say otherwise (lenient, top_beta).

    Parameters
    ----------
    target_logits : Tensor
        ``[B, G+1, V]`` raw logits, float32, bfloat16 or float16, unit stride on V; row i has the
        logits of the token after the first i draft tokens. ``[R, V]`` with target_rows.
    draft_tokens : Tensor
        ``[B, G]`` int32 or int64. A draft ends at its first -1.
    draft_logits : Tensor, optional
        ``[B, G, Vd]`` raw logits, or ``[R, Vd]`` with draft_rows, of a dtype as above, which may be
        another than target_logits has; row i is the one that ``draft_tokens[:, i]`` was drawn from.
        Vd may differ from V: ids that only one of them has get 0 from the other.
    draft_probs : Tensor, optional
        Same shapes and dtypes, instead of draft_logits: probabilities (>= 0, normalised here, not
        filtered).
        Neither: a deterministic drafter.
    draft_probs_ids : Tensor, optional
        ``[B, G, K]`` int32 or int64, unit stride on K, 1 <= K <= 1024; ``[R, K]`` with draft_rows.
        draft_probs, of that shape, then holds lists: q of target token ``draft_probs_ids[b, i, k]``
        is in proportion to ``draft_probs[b, i, k]``, and q of all others is 0. In any order; -1 is
        no entry, whatever stands beside it. Results are, to the bit, those of draft_probs ``[B, G,
        V]`` in float32 with the lists scattered into zeros; no such row is made. The law must be
        the one that tokens were drawn from: that of the list alone, if it is the head of a longer
        law.
    target_rows : Tensor, optional
        ``[B, G+1]`` int32 or int64: target_logits is then packed, ``[R, V]``.
    draft_rows : Tensor, optional
        ``[B, G]`` int32 or int64: draft_logits or draft_probs is then packed, ``[R, Vd]``.
    allowed_mask : Tensor, optional
        ``[B, G+1, ceil(V/32)]`` int32 as in `row_law`, by request and slot also where the logits
        are packed. Slot i masks ``target_logits[:, i]`` and the draft row that
        ``draft_tokens[:, i]`` was drawn from (it must have been drawn under that mask). Slots after
        the draft's end are never read. Masks apply before everything else: filters, ranks,
        raw_logprobs. A draft token that is not allowed has p = 0: it is rejected if it is
        deterministic, and ends the draft if it is said to be sampled (q = 0).
    draft_token_ids : Tensor, optional
        ``[Vd]`` int32 or int64, any stride, Vd <= V, with a draft law: the target id of each draft
        entry, for a draft with a reduced vocabulary. draft_tokens are target ids all the same.
        Draft filters work on the draft's entries; q is 0 where there is no entry, and the target
        keeps its whole support. Ids must differ and be in [0, V).
    draft_kinds : Tensor, optional
        ``[B, G]`` int8: 1 for a token sampled from the draft law, 0 for a deterministic one (a
        point mass). Default: 1 where a draft law is given, else 0.
    draft_lengths : Tensor, optional
        ``[B]`` int32 or int64 in [0, G], default G. Columns after it are never read.
    uniforms : Tensor, optional
        ``[B, G+1]`` float64 in [0, 1): ``[:, i]`` is the coin of ``draft_tokens[:, i]``, ``[:, G]``
        the number of the final draw.
    seeds, positions : Tensor, optional
        ``[B]`` int64 each, instead of uniforms: see `uniforms`. A position is the absolute position
        of this call's first draft token; it must grow from call to call.
    stream : int
        In [0, 256), not a CUDA stream: numbers the models where a draft is itself verified against
        a smaller draft with the same seeds; otherwise 0.
    temperature, top_k, top_p, min_p : optional
        ``[B]`` as in `row_law`, of the target's law.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p : optional
        ``[B]`` as in `row_law`, of the draft's law: those that its tokens were really sampled with.
        None is the target's value (pass 1.0, 0, 1.0 or 0 to switch one off). Only with
        draft_logits.
    rule : str
        See above.
    lenience : float
        In (0, 1], for "lenient".
    beta : int
        At least 1, for "top_beta".
    tau : float
        Nats, at least 0, for "top_beta".
    epsilon, delta : float
        Positive, for "typical".
    full_accept_probs : bool
        Also give the accept_probs that follow the first failure (rules other than "block", which
        has them anyway).
    raw_logprobs : bool
        Report log softmax(target_logits), without temperature and filters.
    generator : torch.Generator, optional
        Draws fresh seeds, at position 0 unless positions are given, where the rule needs randomness
        and neither uniforms nor seeds are given; the default generator of the device if None. A
        call with one does not trace under ``torch.compile(fullgraph=True)``.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        As in `row_law`.

    Returns
    -------
    VerifyResult
        ``tokens`` [B, G+1] int64: accepted tokens, then the residual or bonus token, then -1.
        ``num_accepted`` [B] int32.
        ``logprobs`` [B, G+1] float32, nats, of what is emitted, under the filtered target law; 0 at
        T = 0, NaN after the end. "top_beta" reports raw ones.
        ``accept_probs`` [B, G] float32: the threshold of each position's coin (0 or 1 where the
        test is deterministic, as under "coupled" given the noise). NaN after the end of the draft,
        and after the first failure of a rule that stops there. Under "block" it is h: num_accepted
        is the largest n with ``uniforms[b, n - 1] < h[b, n - 1]``, or 0; so h is not the acceptance
        probability of a single token.
        ``status`` [B] int32: 0, or the sum of the bits ``STATUS_NO_TARGET_LAW`` (1; the last token
        is then a placeholder, 0), ``STATUS_INVALID_DRAFT_TOKEN`` (2), ``STATUS_NO_DRAFT_LAW`` (4)
        and ``STATUS_PARAMETER_OUT_OF_RANGE`` (8); docs/design.md, "Failure", says when each is set.
        Nothing that depends on values raises.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor the number it should be.
    ValueError
        A wrong dtype, shape or stride; an unknown rule; a number out of range; draft_logits
        together with draft_probs; draft filters without draft_logits; draft_rows or draft_token_ids
        without a draft law; draft_probs_ids without draft_probs or with draft_token_ids; K > 1024;
        Vd > V with draft_token_ids; uniforms together with seeds or a generator, or with "coupled";
        seeds without positions.

    See Also
    --------
    uniforms : the coins that seeds and positions stand for.
    acceptance : how often one token of this draft would be accepted.

    Examples
    --------
    Token 0 has target probability 0.3 and draft probability 0.8: accepted with 0.375.

    >>> import torch, specdec_ext
    >>> target_logits = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]).log()
    >>> draft_logits = torch.tensor([[[0.8, 0.2]]]).log()
    >>> draft_tokens = torch.tensor([[0]])
    >>> u = torch.tensor([[0.37, 0.6]], dtype=torch.float64)
    >>> result = specdec_ext.verify(target_logits, draft_tokens, draft_logits, uniforms=u)
    >>> result.tokens, result.num_accepted, result.accept_probs  # accepted, then the bonus token
    (tensor([[0, 1]]), tensor([1], dtype=torch.int32), tensor([[0.3750]]))
    >>> u = torch.tensor([[0.38, 0.6]], dtype=torch.float64)
    >>> specdec_ext.verify(target_logits, draft_tokens, draft_logits, uniforms=u).tokens
    tensor([[ 1, -1]])

    The same where only token 1 is allowed at first. Token 0 is not accepted at any u:

    >>> mask = torch.tensor([[[0b10], [0b11]]], dtype=torch.int32)
    >>> specdec_ext.verify(target_logits, draft_tokens, uniforms=u, allowed_mask=mask).tokens
    tensor([[ 1, -1]])

    A draft that knows token 1 only; token 0 can still come out:

    >>> draft = dict(draft_logits=torch.zeros(1, 1, 1), draft_token_ids=torch.tensor([1]))
    >>> u = torch.tensor([[0.75, 0.6]], dtype=torch.float64)
    >>> result = specdec_ext.verify(target_logits, torch.tensor([[1]]), **draft, uniforms=u)
    >>> result.tokens, result.accept_probs
    (tensor([[ 0, -1]]), tensor([[0.7000]]))

    The same law as a list of tokens and their probabilities:

    >>> draft = dict(draft_probs=torch.ones(1, 1, 1), draft_probs_ids=torch.tensor([[[1]]]))
    >>> result = specdec_ext.verify(target_logits, torch.tensor([[1]]), **draft, uniforms=u)
    >>> result.tokens, result.accept_probs
    (tensor([[ 0, -1]]), tensor([[0.7000]]))

    Coupled: what the target draws from these seeds, whatever is proposed.

    >>> noise = dict(seeds=torch.tensor([3]), positions=torch.tensor([0]))
    >>> specdec_ext.sample(target_logits[:, 0], **noise, domain=3).tokens
    tensor([0])
    >>> for proposed in (0, 1):
    ...     x = torch.tensor([[proposed]])
    ...     print(specdec_ext.verify(target_logits, x, **noise, rule="coupled").tokens)
    tensor([[0, 1]])
    tensor([[ 0, -1]])
    """
    arguments = {
        **dict(target_logits=target_logits, draft_tokens=draft_tokens, draft_logits=draft_logits),
        **dict(draft_probs=draft_probs, draft_probs_ids=draft_probs_ids),
        **dict(target_rows=target_rows, draft_rows=draft_rows),
        **dict(allowed_mask=allowed_mask, draft_token_ids=draft_token_ids),
        **dict(draft_kinds=draft_kinds, draft_lengths=draft_lengths),
        **dict(uniforms=uniforms, seeds=seeds, positions=positions, stream=stream),
        **dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        **dict(draft_temperature=draft_temperature, draft_top_k=draft_top_k),
        **dict(draft_top_p=draft_top_p, draft_min_p=draft_min_p),
        **dict(rule=rule, lenience=lenience, beta=beta, tau=tau, epsilon=epsilon, delta=delta),
        **dict(full_accept_probs=full_accept_probs, raw_logprobs=raw_logprobs),
    }
    return VerifyResult(*call("verify", backend, draft_tokens, arguments, generator))


def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_probs: Tensor | None = None,
    draft_probs_ids: Tensor | None = None,
    target_rows: Tensor | None = None,
    children_rows: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    kinds: Tensor | None = None,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    stream: int = 0,
    temperature: Floats = None,
    top_k: Ints = None,
    top_p: Floats = None,
    min_p: Floats = None,
    draft_temperature: Floats = None,
    draft_top_k: Ints = None,
    draft_top_p: Floats = None,
    draft_min_p: Floats = None,
    rule: str = "traversal",
    raw_logprobs: bool = False,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> VerifyTreeResult:
    """Verify trees of draft tokens: several proposals for every next token, one target call.

    Node 0 is the root, the state before anything drafted; every other node holds a draft token, and
    its parent the state that the token continues. The accepted tokens lie on a path from the root;
    then one more is emitted, from what the children of the path's last node leave of the target's
    law (probability distribution) there. Under every rule the emitted tokens are distributed
    exactly as if the target had sampled them one by one from its filtered law, given that every
    drawn token was drawn as its kind says, and with other randomness.

    Rules:

    - ``traversal`` (default): the coins of all nodes are flipped, the first success in post-order
      (children before their parent, siblings in index order) wins. On a chain this is ``block`` of
      `verify`, to the bit. Weng et al., arXiv 2505.12398; on chains Sun et al., arXiv 2403.10444.
    - ``recursive``: from the root, a node's children are tried in index order, each against what
      the rejected ones leave of p, down to the first that is accepted. Accepts no more than
      ``traversal`` on average. Miao et al. (SpecInfer), arXiv 2305.09781; without replacement,
      Chen et al. (Sequoia), arXiv 2402.12374.
    - ``target_only``: ``recursive`` with every child taken as deterministic, so accepted with what
      is left of p. Reads no draft law, and is lossless however the tree was drafted.
    - ``greedy``: follows the arg max. Ignores temperature, randomness and draft law.
    - ``coupled``: follows the token that the target draws itself, by a race on noise keyed by seed
      and absolute position, as in `verify`: the output is the same for every tree. Reads no draft
      law. Daliri, Musco, Suresh, arXiv 2408.07978.

    A request at T = 0 reads no draft law, takes all children as deterministic and follows the
    arg max.

    Parameters
    ----------
    target_logits : Tensor
        ``[B, N, V]`` raw logits, float32, bfloat16 or float16, unit stride on V; row v is the law
        after the tokens on the way from the root to node v. ``[R, V]`` with target_rows.
    tokens : Tensor
        ``[B, N]`` int32 or int64, 1 <= N <= 1024. The root's is ignored. -1: nothing is drafted
        there nor below.
    parents : Tensor
        ``[B, N]`` int32 or int64: the node that a node continues, below its own index; -1 for the
        root (node 0) and for padding, which comes last.
    draft_logits : Tensor, optional
        ``[B, R, Vd]`` raw logits, of a dtype as above: the rows that children were drawn from. Vd
        may differ from V.
    draft_probs : Tensor, optional
        Same shape and dtypes, instead of draft_logits: probabilities (>= 0, normalised here, not
        filtered).
    draft_probs_ids : Tensor, optional
        ``[B, R, K]`` as in `verify`: draft_probs then holds lists of K tokens.
    target_rows : Tensor, optional
        ``[B, N]`` int32 or int64: target_logits is then packed, ``[R, V]``.
    children_rows : Tensor, optional
        ``[B, N]`` int32 or int64 in [0, R): the row that the children of a node were drawn from; -1
        for none. By default row v is node v's, and R = N.
    allowed_mask : Tensor, optional
        ``[B, N, ceil(V/32)]`` int32 as in `row_law`: slot v masks target row v and the draft law of
        v's children.
    draft_token_ids : Tensor, optional
        ``[Vd]`` as in `verify`: the target id of each draft entry.
    kinds : Tensor, optional
        ``[B, N]`` int8, how a node was proposed: 0 deterministic (chosen, not drawn), 1 drawn from
        its parent's draft law independently of its siblings, 2 drawn without replacement (from what
        the earlier such siblings leave), 3 drawn from what all deterministic siblings leave
        ("greedy draft sampling", Hu et al., arXiv 2502.18779; one such child at most, best with the
        lowest index). The drawn children of one node share one kind. Default: 1 where a draft law
        is given, else 0.
    uniforms : Tensor, optional
        ``[B, N]`` float64 in [0, 1): slot v - 1 is the coin of node v, slot N - 1 the final draw.
    seeds, positions : Tensor, optional
        ``[B]`` int64 each, instead of uniforms, as in `verify` with G = N - 1. A position is the
        absolute position of the root's children; it must grow from call to call.
    stream : int
        In [0, 256), not a CUDA stream: numbers the models where a draft is itself verified against
        a smaller draft with the same seeds; otherwise 0.
    temperature, top_k, top_p, min_p : optional
        ``[B]`` as in `row_law`, of the target's law.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p : optional
        ``[B]`` as in `verify`, of the draft's law. None is the target's value. Only with
        draft_logits.
    rule : str
        See above.
    raw_logprobs : bool
        Report log softmax(target_logits), without temperature and filters.
    generator : torch.Generator, optional
        Draws fresh seeds, at position 0 unless positions are given, where the rule needs randomness
        and neither uniforms nor seeds are given; the default generator of the device if None. A
        call with one does not trace under ``torch.compile(fullgraph=True)``.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        As in `row_law`.

    Returns
    -------
    VerifyTreeResult
        ``tokens`` [B, N] int64: the accepted path's tokens, then the residual or bonus token, then
        -1.
        ``path`` [B, N] int64: the node of each accepted token, the root left out, then -1.
        ``num_accepted`` [B] int32.
        ``logprobs`` [B, N] float32, nats, of what is emitted, as in `verify`.
        ``accept_probs`` [B, N] float32, by node: the threshold of its coin. Under "traversal" h of
        every node; under the other rules that of the children tried (0 or 1 under "greedy" and
        "coupled"). 1 at the root, NaN where nothing was computed.
        ``status`` [B] int32: the bits of `verify`, and ``STATUS_INVALID_TREE`` (16).

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor the number it should be.
    ValueError
        A wrong dtype, shape or stride; N = 0 or above 1024; an unknown rule; draft_logits together
        with draft_probs; draft filters without draft_logits; children_rows or draft_token_ids
        without a draft law; draft_probs_ids without draft_probs or with draft_token_ids; K > 1024;
        uniforms together with seeds or a generator, or with "coupled"; seeds without positions.

    See Also
    --------
    verify : the same for chains, with more rules.

    Notes
    -----
    A node with target law p and draft law q carries scalars from child to child: inflow a (1 at the
    root), lambda = 0 and S = 1. A child x is offered b = min(1, a [p(x) - lambda q(x)]+ / (S kappa
    q(x))), where kappa q is the law it was drawn from; b = min(1, a [p(x) - lambda q(x)]+ / S) if
    it is deterministic. Its own inflow is b. Then lambda grows by kappa S / a, S becomes the sum of
    [p - lambda q]+ outside the tokens tried, R = a S_new / S_old, and a becomes R / (R + 1 - a).
    The threshold of a node's coin is its a after the last child.

    Examples
    --------
    Two deterministic proposals for the first token. The first is accepted with p = 0.5, the second
    with 0.3 / (1 - 0.5):

    >>> import torch, specdec_ext
    >>> target_logits = torch.tensor([[[0.5, 0.3, 0.2]] * 3]).log()
    >>> tokens, parents = torch.tensor([[-1, 0, 1]]), torch.tensor([[-1, 0, 0]])
    >>> u = torch.tensor([[0.55, 0.55, 0.1]], dtype=torch.float64)
    >>> out = specdec_ext.verify_tree(target_logits, tokens, parents, uniforms=u)
    >>> out.accept_probs
    tensor([[1.0000, 0.5000, 0.6000]])
    >>> out.tokens, out.path, out.num_accepted
    (tensor([[ 1,  0, -1]]), tensor([[ 2, -1, -1]]), tensor([1], dtype=torch.int32))
    """
    arguments = {
        **dict(target_logits=target_logits, tokens=tokens, parents=parents),
        **dict(draft_logits=draft_logits, draft_probs=draft_probs),
        **dict(draft_probs_ids=draft_probs_ids),
        **dict(target_rows=target_rows, children_rows=children_rows),
        **dict(allowed_mask=allowed_mask, draft_token_ids=draft_token_ids, kinds=kinds),
        **dict(uniforms=uniforms, seeds=seeds, positions=positions, stream=stream),
        **dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        **dict(draft_temperature=draft_temperature, draft_top_k=draft_top_k),
        **dict(draft_top_p=draft_top_p, draft_min_p=draft_min_p),
        **dict(rule=rule, raw_logprobs=raw_logprobs),
    }
    return VerifyTreeResult(*call("verify_tree", backend, tokens, arguments, generator))


def acceptance(
    target_logits: Tensor,
    draft_logits: Tensor,
    *,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    temperature: Floats = None,
    top_k: Ints = None,
    top_p: Floats = None,
    min_p: Floats = None,
    draft_temperature: Floats = None,
    draft_top_k: Ints = None,
    draft_top_p: Floats = None,
    draft_min_p: Floats = None,
    backend: str = "auto",
) -> Tensor:
    """Compute sum_x min(p(x), q(x)) of two laws (probability distributions), row by row.

    It is the probability that one token sampled from q is accepted: the beta of Leviathan et al.,
    whose mean over contexts is alpha, and 1 - D_LK(p, q), one minus the total variation distance.

    Parameters
    ----------
    target_logits : Tensor
        ``[R, V]`` raw logits, float32, bfloat16 or float16, unit stride on V.
    draft_logits : Tensor
        ``[R, Vd]`` raw logits. An id that only one vocabulary has contributes nothing.
    allowed_mask : Tensor, optional
        ``[R, ceil(V/32)]`` int32 as in `row_law`, of both laws.
    draft_token_ids : Tensor, optional
        ``[Vd]`` as in `verify`: the target id of each draft entry.
    temperature, top_k, top_p, min_p : optional
        ``[R]`` as in `row_law`, of the target's law.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p : optional
        ``[R]`` as in `row_law`, of the draft's law. None is the target's value.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        As in `row_law`.

    Returns
    -------
    Tensor
        ``[R]`` float32 in [0, 1]. NaN where a row has no law or a parameter is out of range, and
        everywhere where draft_token_ids has an id outside [0, V) or a repeated one.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor a number.
    ValueError
        A dtype or shape that is not the one above.

    References
    ----------
    Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
    section 3.2, theorem 3.5.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> target_logits = torch.tensor([[0.3, 0.7]]).log()
    >>> draft_logits = torch.tensor([[0.8, 0.2]]).log()
    >>> specdec_ext.acceptance(target_logits, draft_logits)  # min(.3, .8) + min(.7, .2)
    tensor([0.5000])
    >>> ids = torch.tensor([1, 0])  # draft entry 0 is token 1: min(.3, .2) + min(.7, .8)
    >>> specdec_ext.acceptance(target_logits, draft_logits, draft_token_ids=ids)
    tensor([0.9000])
    """
    arguments = {
        **dict(target_logits=target_logits, draft_logits=draft_logits),
        **dict(allowed_mask=allowed_mask, draft_token_ids=draft_token_ids),
        **dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
        **dict(draft_temperature=draft_temperature, draft_top_k=draft_top_k),
        **dict(draft_top_p=draft_top_p, draft_min_p=draft_min_p),
    }
    found: Tensor = call("acceptance", backend, target_logits, arguments)
    return found


def uniforms(
    seeds: Tensor, positions: Tensor, n: int, *, stream: int = 0, backend: str = "auto"
) -> Tensor:
    """Compute the uniforms that `verify` draws from seeds and positions, G = n - 1.

    ``verify(seeds=s, positions=p)`` equals ``verify(uniforms=uniforms(s, p, G + 1))`` bit for bit.
    The uniforms are i.i.d. on the multiples of 2^-53 in [0, 1), fresh for every (seed, position,
    stream): Philox4x32-10 with the seed as key; ``[:, i]`` is the coin of ``draft_tokens[:, i]``,
    counter (0, position, i + 1 | stream << 24), and ``[:, n - 1]`` the number of the final draw,
    counter (0, position, 1 << 16 | stream << 24).

    Parameters
    ----------
    seeds, positions : Tensor
        ``[B]`` int64 each; all 64 bits count.
    n : int
        Slots per request, at least 1.
    stream : int
        In [0, 256), not a CUDA stream: numbers the models where a draft is itself verified against
        a smaller draft with the same seeds; otherwise 0.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        As in `row_law`.

    Returns
    -------
    Tensor
        ``[B, n]`` float64 in [0, 1).

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor an int.
    ValueError
        A wrong dtype or shape; n or stream out of range.

    References
    ----------
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> specdec_ext.uniforms(torch.tensor([1, 2]), torch.tensor([0, 0]), 3)
    tensor([[0.1173, 0.4194, 0.5779],
            [0.6029, 0.0513, 0.7861]], dtype=torch.float64)
    """
    arguments = dict(seeds=seeds, positions=positions, n=n, stream=stream)
    found: Tensor = call("uniforms", backend, seeds, arguments)
    return found


def _tree_fault(parents: Sequence[int]) -> str:
    """Say why parents are no tree, for the message."""
    if parents[0] != -1:
        return f"node 0, the root, must have parent -1, got {parents[0]}"
    for v, parent in enumerate(parents[1:], 1):
        if parent < -1:
            return f"a parent must be a node or -1 (padding), got {parent} at node {v}"
        if parent >= v:
            return f"a parent must come before its child, got {parent} at node {v}"
        if parent >= 0 and parents[v - 1] == -1 and v > 1:
            return f"padding must come last (there is one root), got a parent of -1 at node {v - 1}"
    return "no fault"


def tree_mask(parents: Tensor, *, backend: str = "auto") -> TreeMaskResult:
    """Turn the parents of draft trees into ancestor bits and depths.

    What `tree_attention` takes; `specdec_ext.dense_tree_mask`, `specdec_ext.tree_mask_mod` and
    `specdec_ext.tree_position_ids` make of it what other attention takes.

    Parameters
    ----------
    parents : Tensor
        ``[B, N]`` int32 or int64, N <= 1024. Node 0 is the root, of parent -1; a parent comes
        before its children; padding nodes have parent -1 and come last.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        "auto" follows the tensors' device. An explicit choice never falls back.

    Returns
    -------
    TreeMaskResult
        ``ancestors`` [B, N, ceil(N/64)] int64, ``depths`` [B, N] int64, ``status`` [B] int32.

    Raises
    ------
    TypeError
        `parents` is no tensor.
    ValueError
        A wrong dtype or shape. For CPU tensors also parents that are no tree; elsewhere, and in a
        trace, these are in `status`, and such a request is a root alone.

    References
    ----------
    Miao et al., "SpecInfer", arXiv 2305.09781, section 4.2 (topology-aware causal mask).

    Examples
    --------
    >>> import torch, specdec_ext
    >>> tree = specdec_ext.tree_mask(torch.tensor([[-1, 0, 0, 1, -1]]))
    >>> tree.ancestors[..., 0]  # node 3: itself (8), its parent 1 (2) and the root (1)
    tensor([[ 1,  3,  5, 11,  0]])
    >>> tree.depths
    tensor([[ 0,  1,  1,  2, -1]])
    """
    found = TreeMaskResult(*call("tree_mask", backend, parents, dict(parents=parents)))
    if parents.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = found.status.nonzero()[:, 0].tolist()
        if wrong:
            fault = _tree_fault(parents[wrong[0]].tolist())
            raise ValueError(f"tree_mask: parents of request {wrong[0]} are no tree: {fault}")
    return found


def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    path: Tensor,
    num_accepted: Tensor,
    seq_lens: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Keep the accepted path of a tree in the caches, in place.

    The keys and values of a tree lie at places ``seq_lens[b] .. seq_lens[b] + N - 1`` of request b.
    Those of node ``path[b, k]`` move to place ``seq_lens[b] + 1 + k`` for the first
    ``num_accepted[b]`` nodes; the root's stay. What lies behind is left as it is.

    Parameters
    ----------
    k_cache, v_cache : Tensor
        ``[B, L, H, D]``, or ``[Y, B, L, H, D]`` for Y layers at once; any dtype of 1, 2, 4 or 8
        bytes, any strides: ``cache.transpose(-3, -2)`` makes one of Hugging Face's [B, H, L, D].
        Written to. Their H, D and dtypes may differ, and both may lie in one buffer, but share no
        element: where the values are a part of the keys, as in a latent (MLA) cache, pass
        ``k_cache[..., :0]`` as `v_cache`.
    path : Tensor
        ``[B, N]`` int32 or int64: the accepted nodes without the root, each after its parent, as
        `verify_tree` gives them. What follows the first ``num_accepted[b]`` is not read.
    num_accepted : Tensor
        ``[B]`` int32 or int64.
    seq_lens : Tensor
        ``[B]`` int32 or int64: the root's place.
    backend : {"auto", "cpu", "cuda", "triton", "reference"}
        "auto" follows the tensors' device. An explicit choice never falls back.

    Returns
    -------
    Tensor
        ``[B]`` int32 status: ``STATUS_PARAMETER_OUT_OF_RANGE`` for num_accepted outside [0, N] or
        seq_lens outside [0, L], ``STATUS_INVALID_TREE`` for nodes that do not ascend from 1 or lie
        behind the cache's end. Nothing of such a request moves.

    Raises
    ------
    TypeError
        An argument that is no tensor.
    ValueError
        A wrong dtype or shape, or caches that overlap themselves or each other.

    Examples
    --------
    >>> import torch, specdec_ext
    >>> keys = torch.arange(8.0).view(1, 8, 1, 1)  # two tokens, then a tree of five nodes
    >>> values = keys.clone()
    >>> path, num_accepted = torch.tensor([[2, 4, -1, -1, -1]]), torch.tensor([2])
    >>> specdec_ext.compact_kv(keys, values, path, num_accepted, torch.tensor([2]))
    tensor([0], dtype=torch.int32)
    >>> keys[0, :5, 0, 0]
    tensor([0., 1., 2., 4., 6.])
    """
    arguments = dict(
        k_cache=k_cache, v_cache=v_cache, path=path, num_accepted=num_accepted, seq_lens=seq_lens
    )
    status: Tensor = call("compact_kv", backend, seq_lens, arguments)
    return status


def _head_factor(name: str, factor: Any, q: Tensor) -> Tensor | None:
    """Make a factor of a cache a tensor."""
    if factor is None or isinstance(factor, Tensor):
        return factor
    if not is_number(factor):
        raise TypeError(
            f"tree_attention: {name} must be a Tensor, a number or None, got {kind(factor)}"
        )
    return torch.full((1,), float(factor), dtype=torch.float32, device=q.device)


@overload
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    return_lse: Literal[True],
    backend: str = "auto",
) -> TreeAttentionResult: ...


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ancestors: Tensor,
    seq_lens: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = 0,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | TreeAttentionResult:
    """Attend from the nodes of draft trees to their cached prefixes and to their ancestors.

    Equal to ``scaled_dot_product_attention`` under the mask that `specdec_ext.dense_tree_mask`
    makes with ``layout="packed"``, without that mask: memory does not grow with N x L.

    Parameters
    ----------
    q : Tensor
        ``[B, N, H, D]`` float32, bfloat16 or float16, D <= 576, unit stride on D.
    k_cache, v_cache : Tensor
        ``[B, L, Hkv, D]`` and ``[B, L, Hkv, Dv]``, Dv <= 512, of q's dtype, float8_e4m3fn or
        float8_e5m2, unit stride on D; H is a multiple of Hkv, and query head h attends with head
        ``h // (H / Hkv)``. Prefixes lie at places [0, seq_lens[b]), the tree's own keys and values
        at ``seq_lens[b] .. seq_lens[b] + N - 1``. With a `block_table` ``[num_blocks, block_size,
        Hkv, D]``, the pages of an engine's cache in any strides. Latent attention (MLA) has one key
        head, and ``v_cache = k_cache[..., :512]``, a view, which is then read once.
    ancestors : Tensor
        ``[B, N, ceil(N/64)]`` int64, from `tree_mask`.
    seq_lens : Tensor
        ``[B]`` int32 or int64: the lengths of the prefixes, at most L - N.
    block_table : Tensor, optional
        ``[B, P]`` int32 or int64: place l of request b is entry ``l % block_size`` of block
        ``block_table[b, l // block_size]``, and L = P * block_size. Only entries of places that are
        attended to are read.
    k_scale, v_scale : Tensor or number, optional
        ``[Hkv]``, ``[1]`` or ``[]`` float32: what stands in the caches is to be multiplied by it,
        head by head or as a whole; default 1.
    scale : float, optional
        Of the scores, default ``D ** -0.5``.
    soft_cap : float
        Scores s become ``soft_cap * tanh(s / soft_cap)``; 0: they stay.
    window : int
        A node at position p sees keys at positions p - window + 1 to p only; 0: all. Position l
        is place l of the prefix; a node's is seq_lens[b] and its depth, the number of its
        ancestors. Below 2^31.
    return_lse : bool
        Return the log-sum-exp of the scores, too: what `specdec_ext.merge_attention` merges this
        attention by with attention over other keys.
    backend : {"auto", "cpu", "triton", "reference"}
        "auto" follows the tensors' device. An explicit choice never falls back. There are no CUDA
        C++ kernels: GPUs run Triton's.

    Returns
    -------
    Tensor or TreeAttentionResult
        ``[B, N, H, Dv]`` of q's dtype. 0 at padding nodes, NaN in a request with seq_lens outside
        [0, L - N] or a page that is read outside [0, num_blocks), which is not followed. With
        `return_lse` a pair: ``out``, and ``lse`` [B, N, H] float32 in nats, -inf at padding nodes,
        NaN where `out` is. The operator ``torch.ops.specdec.tree_attention``
        always returns the pair.

    Raises
    ------
    TypeError
        An argument that is neither a tensor nor the number it should be.
    ValueError
        A wrong dtype, shape or stride; a number out of range. For CPU tensors also a page outside
        [0, num_blocks) that would be read; elsewhere, and in a trace, such a request is NaN.

    References
    ----------
    Dao et al., "Flash-Decoding for long-context inference", 2023 (the split over the prefix). Kwon
    et al., "Efficient memory management for large language model serving with PagedAttention",
    arXiv 2309.06180, section 4.1 (block tables). Beltagy et al., "Longformer", arXiv 2004.05150,
    section 3.1 (windows). DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1 (MLA).

    Examples
    --------
    >>> import torch, specdec_ext
    >>> tree = specdec_ext.tree_mask(torch.tensor([[-1, 0, 0]]))
    >>> q, keys = torch.zeros(1, 3, 1, 2), torch.zeros(1, 5, 1, 2)
    >>> values = torch.arange(10.0).view(1, 5, 1, 2)
    >>> out = specdec_ext.tree_attention(q, keys, values, tree.ancestors, torch.tensor([2]))
    >>> out[0, :, 0, 0]  # equal scores: the means of places 0-2, 0-3 and 0-2 with 4
    tensor([2.0000, 3.0000, 3.5000])

    The same out of pages of two places, which lie anywhere in a cache of five:

    >>> table = torch.tensor([[4, 0, 3]])
    >>> pages = torch.zeros(5, 2, 1, 2)
    >>> pages[table[0]] = torch.cat([values, values[:, :1]], 1).view(3, 2, 1, 2)
    >>> paged = specdec_ext.tree_attention(
    ...     q, torch.zeros_like(pages), pages, tree.ancestors, torch.tensor([2]), block_table=table
    ... )
    >>> torch.equal(paged, out)
    True
    """
    check_type("tree_attention", "return_lse", return_lse, "bool")
    check_type("tree_attention", "q", q, "Tensor")
    factors = dict(k_scale=k_scale, v_scale=v_scale)
    arguments = {
        **dict(q=q, k_cache=k_cache, v_cache=v_cache, ancestors=ancestors),
        **dict(seq_lens=seq_lens, block_table=block_table),
        **{name: _head_factor(name, factor, q) for name, factor in factors.items()},
        **dict(scale=scale, soft_cap=soft_cap, window=window),
    }
    found = TreeAttentionResult(*call("tree_attention", backend, seq_lens, arguments))
    if block_table is not None and q.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = wrong_pages(block_table, seq_lens, k_cache, q.shape[1], window).nonzero().tolist()
        if wrong:
            b, page = wrong[0]
            raise ValueError(
                f"tree_attention: block_table must name blocks in [0, {k_cache.shape[0]}), "
                f"got {int(block_table[b, page])} for page {page} of request {b}"
            )
    return found if return_lse else found.out
