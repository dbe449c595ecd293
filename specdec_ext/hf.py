"""`generate_fn` for Hugging Face transformers, its assisted generation, and its streamers.

Needs transformers (the extra ``hf``).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "specdec_ext.hf works inside Hugging Face transformers: pip install 'specdec_ext[hf]'"
    ) from error

from transformers.cache_utils import Cache, StaticCache, StaticLayer
from transformers.generation import utils as _generation
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils.generic import ModelOutput

from . import ops
from .contract import rule_names
from .decoding import (
    Burst,
    GammaPolicy,
    Generated,
    GeneratedBeams,
    LookupDrafter,
    Statistics,
    generate,
)
from .decoding.cache_names import STATE_NAMES, own_cache_name
from .decoding.drafters.early_exit import first_layers
from .decoding.encoder_decoder import encoded, rows_of
from .decoding.grown_trees import GrownTree
from .decoding.processors import ByRequest
from .decoding.trees import StaticTree

__all__ = ["SpeculativeOutput", "assisted_generation", "generate_fn", "streaming"]

#: What `specdec_ext.verify` does itself, in the order in which it does it.
_FUSED = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_GENERATE = inspect.unwrap(_generation.GenerationMixin.generate).__code__
_KEPT_BACK = ("assistant_model", "streamer")  # arguments of it that no other function is handed
#: What ``model.generate`` prepares and the loop makes for itself.
_PREPARED = {
    "attention_mask", "cache_position", "logits_to_keep", "position_ids", "use_cache", *STATE_NAMES,
}  # fmt: skip


@dataclass
class SpeculativeOutput(ModelOutput):
    """What `generate_fn` returns under ``return_dict_in_generate=True``.

    Attributes
    ----------
    sequences : Tensor
        ``[B, P + N]`` int64.
    statistics : Statistics
        Counts and times.
    logprobs : Tensor or None
        ``[B, N]``, log-probabilities of the new tokens, as in `specdec_ext.decoding.Generated`;
        None of a beam search.
    sequences_scores : Tensor or None
        ``[B R]`` float32, of a beam search, as transformers gives them.
    """

    sequences: Tensor | None = None
    statistics: Statistics | None = None
    logprobs: Tensor | None = None
    sequences_scores: Tensor | None = None


def generate_fn(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    generation_config: Any = None,
    *,
    draft_model: Any = None,
    gamma: int | GammaPolicy | None = None,
    draft_beams: int | None = None,
    rule: str | None = None,
    tree: StaticTree | GrownTree | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
    grammar: Any = None,
    on_round: Callable[[list[Burst]], None] | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode speculatively in ``model.generate(..., custom_generate=generate_fn)``.

    The model stays as it is, and so does every argument of ``model.generate`` that is about what
    tokens are drawn: ``do_sample``, temperature, filters, repetition penalty, bad words, stop
    strings, lengths, end tokens, ``num_return_sequences``, ``num_beams`` (without ``do_sample``)
    with ``length_penalty`` and ``early_stopping``. Temperature, top-k, top-p and min-p are left to
    the verification kernel where nothing comes after them; all other processors run on the host
    after every slot's own prefix. Output is distributed as that of ``model.generate`` without it.

    Parameters
    ----------
    model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
        As ``model.generate`` hands them over. Processors and criteria are called as it calls them,
        with the whole batch; of those that keep state (guidance, SynthID) copies follow each
        request, see ``logits_processor`` and ``padded_texts`` of `specdec_ext.generate`.
        ``guidance_scale`` runs the model once more for every slot: right, but no faster than
        without a draft.
    draft_model : torch.nn.Module, Drafter or None
        As ``draft`` of `specdec_ext.generate`, or a `SpecDrafter`, which is given the encoder's
        input. What starts transformers' own assisted generation gives a draft as well:
        ``assistant_model=`` is the draft model, ``prompt_lookup_num_tokens`` (with
        ``max_matching_ngram_size``) stands for a `LookupDrafter` that drafts so many tokens,
        ``assistant_early_exit`` for the target's first layers. One of the four at most.
    gamma : int or GammaPolicy, optional
        As in `specdec_ext.generate`. None: ``prompt_lookup_num_tokens`` where that is given, else
        5. (``num_assistant_tokens`` is not read: transformers fills in a number of its own, so that
        nobody can tell whether one was asked for.)
    draft_beams : int, optional
        Of a beam search, as in `specdec_ext.generate`.
    rule, tree, seeds, on_round
        As in `specdec_ext.generate`. Without seeds, they are drawn from torch's generator, which
        ``transformers.set_seed`` sets.
    grammar : optional
        As in `specdec_ext.generate`. xgrammar's own logits processor is understood as well, as the
        last one that is given; it need not be told of the batch.
    inputs_tensor : Tensor
        The encoder's input, where there is one: a draft that is an encoder-decoder reads it, too.

    Returns
    -------
    Tensor or SpeculativeOutput
        ``[B, P + N]``; with ``return_dict_in_generate=True`` with statistics.

    Raises
    ------
    ValueError
        Something is asked for that the loop has not: sampled beams, scores of all steps,
        attentions, hidden states, inputs that are no token ids, a cache that is not empty, a cache
        that is offloaded or quantized, an ensemble of target and assistant; several drafts; a
        streamer for a batch; a processor or criterion whose state cannot be copied, or that makes
        requests depend on each other.

    Notes
    -----
    A beam search fills sequences as transformers does, which takes the end token where the padding
    token is 0.

    transformers keeps ``assistant_model`` and ``streamer`` from functions like this one. They are
    read from the frame of ``model.generate``, since to decode without them would surprise; where a
    release has them elsewhere, a warning says that they are not seen. What a
    streamer gets is all tokens of a round at once. ``assistant_tokenizer`` cannot be read so:
    drafts are over the target's tokens.

    The loop has caches of its own, which keep one size under ``cache_implementation="static"``.

    Whisper's own ``generate`` cuts audio into segments and calls this function for each. Its
    ``logprob_threshold`` (and with it ``no_speech_threshold``) needs scores, and it takes apart
    what ``return_dict_in_generate`` gives: both are refused. ``on_round`` has the counts.

    Examples
    --------
    >>> target.generate(  # doctest: +SKIP
    ...     **tokenizer("def main():", return_tensors="pt"), do_sample=True, max_new_tokens=64,
    ...     custom_generate=specdec_ext.hf.generate_fn, draft_model=draft, gamma=5,
    ... )
    """
    config = generation_config
    _refuse_what_is_missing(model, config, model_kwargs)
    kept_back = _kept_back(model)
    draft_model, gamma = _drafting(config, draft_model, kept_back.get("assistant_model"), gamma)
    streamer = kept_back.get("streamer")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"generate_fn: a streamer shows one request, got {len(input_ids)}")
    processors, filters = _split(logits_processor, sampled=config.do_sample)
    beams = config.num_beams or 1
    if beams > 1:
        input_ids, model_kwargs = _without_beams(input_ids, model_kwargs, beams)
    mask_name = "attention_mask"
    if model.config.is_encoder_decoder:
        model, draft_model = _encoded(model, draft_model, inputs_tensor, input_ids, model_kwargs)
        mask_name = "decoder_attention_mask"
    if getattr(config, "assistant_early_exit", None) is not None:
        draft_model = first_layers(model, config.assistant_early_exit)
    decode = partial(
        generate,
        model,
        draft_model,
        input_ids,
        attention_mask=model_kwargs.get(mask_name),
        max_new_tokens=max(config.max_length - input_ids.shape[1], 0),
        gamma=gamma,
        seeds=seeds,
        tree=tree,
        rule=rule,
        grammar=grammar,
        logits_processor=[_by_request(processor, beams) for processor in processors],
        eos_token_id=_ids(config._eos_token_tensor),
        stopping_criteria=[
            # These two are the loop's own.
            c
            for c in stopping_criteria
            if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        ],
        pad_token_id=_padding(config, beams),
        static_cache=_is_static(model_kwargs.get(own_cache_name())),
        padded_texts=True,  # min_new_tokens and their like count from the padded prompts' end
        draft_beams=draft_beams,
        **_of_beams(config, beams),
        **filters,
    )
    if streamer is None:
        result = decode(on_round=on_round)
    else:  # which has seen the prompt
        with streaming(streamer, None) as show:
            result = decode(on_round=_both(show, on_round))
    if not config.return_dict_in_generate:
        return result.sequences
    scores = result.scores if isinstance(result, GeneratedBeams) else None
    logprobs = result.logprobs if isinstance(result, Generated) else None
    return SpeculativeOutput(result.sequences, result.statistics, logprobs, scores)


def _without_beams(
    input_ids: Tensor, model_kwargs: dict[str, Any], beams: int
) -> tuple[Tensor, dict[str, Any]]:
    """Give one row of each request, of which transformers has made one for each beam."""
    rows = torch.arange(0, len(input_ids), beams, device=input_ids.device)
    kept: dict[str, Any] = {
        name: value[rows] if isinstance(value, Tensor) and len(value) == len(input_ids) else value
        for name, value in model_kwargs.items()
    }
    if "encoder_outputs" in kept:
        kept["encoder_outputs"] = rows_of(kept["encoder_outputs"], rows)
    return input_ids[rows], kept


def _of_beams(config: Any, beams: int) -> dict[str, Any]:
    """Return what a generation configuration says of beams; of one, nothing."""
    if beams == 1:
        return {}
    return {
        "num_beams": beams,
        "length_penalty": 1.0 if config.length_penalty is None else config.length_penalty,
        "early_stopping": config.early_stopping or False,
        "num_return_sequences": config.num_return_sequences or 1,
    }


def _padding(config: Any, beams: int) -> int | None:
    """Return what sequences are filled with: by a beam search of transformers, never token 0."""
    ends = _ids(config._eos_token_tensor)
    token = next(iter(_ids(config._pad_token_tensor)), None)
    return ends[0] if beams > 1 and ends and not token else token


@contextmanager
def streaming(streamer: Any, input_ids: Tensor | None) -> Iterator[Callable[[list[Burst]], None]]:
    """Hand what `specdec_ext.generate` adds to a streamer of transformers.

    A round's tokens are handed over together. ``transformers.TextStreamer`` and its like hold back
    what is not yet a whole character or word; text that is decoded burst by burst would not.

    Parameters
    ----------
    streamer : transformers.generation.BaseStreamer
        Anything with ``put(tokens)`` and ``end()``. transformers' own show one request.
    input_ids : Tensor or None
        ``[1, P]``, the prompt, which streamers are given first. None: it has been given.

    Yields
    ------
    callable
        For ``on_round``. The streamer's end is said when the context is left, with an error too, so
        that nobody waits for more.

    Raises
    ------
    ValueError
        There is a second request.

    Examples
    --------
    >>> streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)  # doctest: +SKIP
    >>> with specdec_ext.hf.streaming(streamer, input_ids) as on_round:  # doctest: +SKIP
    ...     specdec_ext.generate(target, draft, input_ids, on_round=on_round)
    """

    def on_round(bursts: list[Burst]) -> None:
        for burst in bursts:
            if burst.request:
                raise ValueError(
                    f"streaming: a streamer shows one request, got tokens of request "
                    f"{burst.request}"
                )
            if burst.tokens:
                streamer.put(torch.tensor(burst.tokens))

    try:
        if input_ids is not None:
            streamer.put(input_ids.cpu())
        yield on_round
    finally:
        streamer.end()


def _both(
    one: Callable[[list[Burst]], None], other: Callable[[list[Burst]], None] | None
) -> Callable[[list[Burst]], None]:
    """Call one after the other, if there is another."""

    def on_round(bursts: list[Burst]) -> None:
        one(bursts)
        if other is not None:
            other(bursts)

    return on_round


def _kept_back(model: Any) -> dict[str, Any]:
    """Return what the running ``model.generate`` was given and hands to no function, if any.

    It warns where that is not to be found, as another release of transformers may have it: what was
    asked for would not be done, without a word.
    """
    frame = inspect.currentframe()
    found: dict[str, Any] = {}
    while frame is not None:
        # Of a model that this one drafts for, another `generate` may be running further out.
        if frame.f_code is _GENERATE and frame.f_locals.get("self") is model:
            found = {name: frame.f_locals[name] for name in _KEPT_BACK if name in frame.f_locals}
            break
        frame = frame.f_back
    missing = [name for name in _KEPT_BACK if name not in found]
    if missing:
        warnings.warn(
            f"generate_fn: cannot see {' and '.join(missing)} of {type(model).__name__}.generate, "
            f"and goes on without (transformers {transformers.__version__}): give draft_model= and "
            "on_round= in their place",
            stacklevel=3,
        )
    return found


def _drafting(
    config: Any, draft_model: Any, assistant: Any, gamma: int | GammaPolicy | None
) -> tuple[Any, int | GammaPolicy]:
    """Return the one draft that was asked for, but for early exits, and how far it drafts."""
    lookup = getattr(config, "prompt_lookup_num_tokens", None)
    drafts = {
        "draft_model": draft_model,
        "assistant_model": assistant,
        "prompt_lookup_num_tokens": lookup,
        "assistant_early_exit": getattr(config, "assistant_early_exit", None),
    }
    given = [name for name, value in drafts.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"generate_fn: give one draft at most, got {' and '.join(given)}")
    if lookup is not None:
        longest = getattr(config, "max_matching_ngram_size", None) or 2
        drafter = LookupDrafter(min_match=1, max_match=longest)  # a single token, as it is there
        return drafter, lookup if gamma is None else gamma
    return draft_model if assistant is None else assistant, 5 if gamma is None else gamma


def _encoded(
    model: Any, draft: Any, inputs: Tensor | None, input_ids: Tensor, model_kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Give both models what was encoded; a draft that is no encoder-decoder stays as it is."""
    from .decoding.drafters.block import BlockDrafter, is_block_model

    mask = model_kwargs.get("attention_mask")
    target = encoded(model, encoder_outputs=model_kwargs["encoder_outputs"], attention_mask=mask)
    if not getattr(getattr(draft, "config", None), "is_encoder_decoder", False):
        return target, draft
    assert inputs is not None, "transformers hands over the encoder's input"
    several = len(input_ids) // len(inputs)  # num_return_sequences
    name = draft.get_encoder().main_input_name
    read = inputs.repeat_interleave(several, 0)
    if is_block_model(draft):
        return target, BlockDrafter(draft, read, mask)
    return target, encoded(draft, attention_mask=mask, **{name: read})


def _ids(tokens: Tensor | None) -> list[int]:
    return [] if tokens is None else [int(token) for token in tokens.reshape(-1)]


def _refuse_what_is_missing(model: Any, config: Any, model_kwargs: dict[str, Any]) -> None:
    wanted = [
        name
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        if getattr(config, name, False) and config.return_dict_in_generate
    ]
    # Whisper's generate takes outputs apart, row by row, and would drop the statistics.
    if config.return_dict_in_generate and hasattr(model, "generate_with_fallback"):
        wanted.append("return_dict_in_generate")
    wanted += [
        name
        for name in ("use_mtp", "assistant_ensemble_weight")
        if getattr(config, name, None) not in (None, False)
    ]
    if (config.num_beams or 1) > 1 and config.do_sample:
        wanted.append(f"do_sample=True with num_beams={config.num_beams}")
    prepared = _PREPARED
    if model.config.is_encoder_decoder:
        prepared = prepared | {"encoder_outputs", "decoder_attention_mask"}
    wanted += [
        name for name in model_kwargs if name not in prepared and model_kwargs[name] is not None
    ]
    if config.cache_implementation in {"offloaded", "offloaded_static", "quantized"}:
        wanted.append(f"cache_implementation={config.cache_implementation!r}")
    wanted += [
        f"{name} that are not empty"
        for name in STATE_NAMES
        if not _is_empty(model_kwargs.get(name))
    ]
    if wanted:
        raise ValueError(
            f"generate_fn: {type(model).__name__}.generate was asked for what speculative decoding "
            f"has not here: {', '.join(wanted)}"
        )


def _is_static(cache: Any) -> bool:
    """Tell whether a cache, an encoder-decoder's say, was handed over to keep one size.

    One without slots, of a recurrent model, does so in any case.
    """
    held = getattr(cache, "self_attention_cache", cache)
    return isinstance(held, StaticCache) and any(isinstance(x, StaticLayer) for x in held.layers)


def _is_empty(cache: Any) -> bool:
    """Tell whether what a model remembers, as it was handed over, is nothing yet."""
    if not isinstance(cache, Cache):
        return cache is None
    layers: list[Any] = getattr(cache, "layers", None) or [cache]
    attention = [layer for layer in layers if hasattr(layer, "get_seq_length")]
    states = [getattr(layer, "has_previous_state", {}) for layer in layers if layer is not cache]
    return not (
        any(layer.get_seq_length() > 0 for layer in attention)
        or any(any(seen.values()) for seen in states)
    )


def _split(given: Sequence[Any], *, sampled: bool) -> tuple[list[Any], dict[str, Any]]:
    """Leave to the kernel what it does itself: a tail of temperature, top-k, top-p, min-p."""
    processors = list(given)
    if not sampled:
        return processors, {"temperature": 0.0}
    filters: dict[str, Any] = {}
    rest = list(_FUSED)
    while processors and type(processors[-1]) in rest and _is_plain(processors[-1]):
        last = processors.pop()
        filters[_FUSED[type(last)]] = getattr(last, _FUSED[type(last)])
        rest = rest[: rest.index(type(last))]
    return processors, {"temperature": 1.0, **filters}


def _by_request(processor: Any, beams: int) -> Any:
    """Have ``prefix_allowed_tokens_fn`` asked only about texts that a request has or may get.

    In a batch it would be asked about each row, and some rows show no text of their request. Of a
    beam search, each of a request's ``beams`` has a number of its own.
    """
    if type(processor) is not PrefixConstrainedLogitsProcessor:
        return processor
    allowed = processor._prefix_allowed_tokens_fn

    def process(request: int, ids: Tensor, scores: Tensor) -> Tensor:
        one = PrefixConstrainedLogitsProcessor(lambda _, text: allowed(request // beams, text), 1)
        processed: Tensor = one(ids, scores)
        return processed

    return ByRequest(process, type(processor).__name__)


def _is_plain(warper: Any) -> bool:
    """Tell a filter that keeps one token at least, and hides the others."""
    hidden = getattr(warper, "filter_value", -torch.inf) == -torch.inf
    return hidden and getattr(warper, "min_tokens_to_keep", 1) == 1


@contextmanager
def assisted_generation(rule: str = "block") -> Iterator[None]:
    """Let transformers' own assisted generation verify with `specdec_ext.verify`.

    Within the context, ``model.generate(..., assistant_model=..., do_sample=True)`` decides which
    candidates to keep, and draws the token behind them, by our operator in place of its own
    ``_speculative_sampling``; all else, the candidate generators included, stays theirs. Coins come
    from torch's generator. Not for several threads at once: it replaces a function of a module.
    ``assistant_ensemble_weight``, which is not lossless, keeps their function.

    Parameters
    ----------
    rule : {"block", "token"}
        How to verify. Both are lossless.

    Raises
    ------
    ValueError
        Another rule.

    Examples
    --------
    >>> with specdec_ext.hf.assisted_generation():  # doctest: +SKIP
    ...     target.generate(**inputs, assistant_model=draft, do_sample=True)
    """
    rules = rule_names(chains=True, lossless=True, takes_coins=True)
    if rule not in rules:
        known = " or ".join(map(repr, rules))
        raise ValueError(f"assisted_generation: rule must be {known}, got {rule!r}")
    original = _generation._speculative_sampling
    signature = inspect.signature(original)

    def verify(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("assistant_ensemble_weight") is not None:
            theirs: tuple[Tensor, Tensor] = original(*args, **kwargs)
            return theirs
        candidates, draft_logits = given["candidate_input_ids"], given["candidate_logits"]
        count = draft_logits.shape[1]
        drafted = candidates[:, candidates.shape[1] - count :]
        coins = torch.rand(1, count + 1, dtype=torch.float64, device=drafted.device)
        found = ops.verify(given["new_logits"], drafted, draft_logits, uniforms=coins, rule=rule)
        if int(found.status) & ops.STATUS_NO_TARGET_LAW:
            raise ValueError("assisted_generation: the target's logits hold NaN or nothing finite")
        accepted = found.num_accepted[0]
        if given.get("is_done_candidate", False) and 0 < count == int(accepted):
            # transformers 5.17: the text stops with the last candidate, which counts as the token
            # behind those that were accepted. (Where the prompt alone looks done, it goes on.)
            return drafted, accepted - 1
        return found.tokens[:, : int(accepted) + 1], accepted

    _generation._speculative_sampling = verify
    try:
        yield
    finally:
        _generation._speculative_sampling = original
