"""Speculative generation: propose, verify, commit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..contract import RULES
from . import arguments
from .beam_generation import BeamGeneration, GeneratedBeams
from .beams import beam_options, check_unsampled
from .chain_generation import Burst, ChainGeneration, Generated
from .checks import flag, shown
from .collapse import warn_where_drafts_fail
from .configured import check_sampled, configured, repeated, with_beams
from .drafters import Drafter, as_drafter, check_distinct, modules_of
from .grown_trees import GrownTree
from .matchers import matchers_of, without_grammar
from .options import Options, Settings
from .policies import FixedGamma, GammaPolicy, as_policy
from .processors import Processor
from .sampling_laws import SAMPLING, sampling_laws
from .stopping import Criterion, find_stops
from .trees import StaticTree

__all__ = ["generate", "stream"]


def generate(
    target: Any,
    draft: Any | Drafter | None,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    generation_config: Any = None,
    max_new_tokens: int | Sequence[int] | None = None,
    num_return_sequences: int | None = None,
    do_sample: bool | None = None,
    gamma: int | GammaPolicy = 5,
    temperature: float | Sequence[float] | Tensor | None = None,
    top_k: int | Sequence[int] | Tensor | None = None,
    top_p: float | Sequence[float] | Tensor | None = None,
    min_p: float | Sequence[float] | Tensor | None = None,
    draft_temperature: float | Sequence[float] | Tensor | None = None,
    draft_top_k: int | Sequence[int] | Tensor | None = None,
    draft_top_p: float | Sequence[float] | Tensor | None = None,
    draft_min_p: float | Sequence[float] | Tensor | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
    generator: torch.Generator | None = None,
    tree: StaticTree | GrownTree | None = None,
    rule: str | None = None,
    lenience: float = 1.0,
    beta: int = 3,
    tau: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    raw_logprobs: bool = False,
    logits_processor: Processor | Iterable[Processor] | None = None,
    grammar: Any = None,
    eos_token_id: int | Iterable[int] | None = None,
    stop_sequences: Iterable[Sequence[int]] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    stopping_criteria: Criterion | Iterable[Criterion] | None = None,
    pad_token_id: int | None = None,
    padded_texts: bool = False,
    static_cache: bool = False,
    measure_alpha: bool = False,
    num_beams: int | None = None,
    draft_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    on_round: Callable[[list[Burst]], None] | None = None,
    progress: bool = False,
) -> Generated | GeneratedBeams:
    """Generate with a target model and a draft: each target call verifies several draft tokens.

    Under every lossless rule, the default among them, the new tokens are distributed as the
    target's own: sampled, they follow its law (probability distribution) under the given filters;
    at temperature 0 they are its greedy choice. Only the wall time depends on the draft. (Leviathan
    et al., arXiv 2211.17192; block verification: Sun et al., arXiv 2403.10444.) Under ``"coupled"``
    the very tokens do not depend on the draft, gamma or the batch either, for equal logits of the
    target: they are those of plain decoding with the same seeds. (Daliri, Musco, Suresh, arXiv
    2408.07978.)

    Parameters
    ----------
    target : torch.nn.Module
        A Hugging Face causal language model, unmodified and in evaluation mode.
    draft : torch.nn.Module, Drafter or None
        A smaller causal model over the same tokens, decoding heads (`specdec_ext.models.heads`,
        `specdec_ext.models.eagle`), or any `Drafter`. None: plain decoding. Heads, and any other
        `FeatureDrafter`, are given the hidden states that the target's calls compute.
    input_ids : Tensor
        ``[B, P]`` int64 or int32 prompts, left-padded.
    attention_mask : Tensor, optional
        ``[B, P]``, zeros at padding. None: every token is part of its prompt.
    generation_config : transformers.GenerationConfig, optional
        Says what arguments left out are: lengths, ``do_sample``, temperature and filters, stop
        tokens and strings, padding, ``num_return_sequences``, ``num_beams`` and, of several beams,
        ``length_penalty`` and ``early_stopping``, completed as ``model.generate`` does it (from the
        model's own configuration; top-k is 50 where nobody says otherwise). One that asks for
        anything else is refused; `specdec_ext.hf.generate_fn` takes it. None: the model's own is
        consulted for ``eos_token_id`` and ``pad_token_id`` alone.
    max_new_tokens : int or sequence of int, optional
        Limit on new tokens, of all requests or of each. Never exceeded. Default: 128.
    num_return_sequences : int, optional
        So many sequences of each prompt, sampled independently: rows b n, ..., b n + n - 1 of the
        result are those of prompt b, requests with seeds of their own. What was given for each
        prompt goes for all of its sequences, but for ``seeds``: one number, or one a sequence. Of a
        beam search the best so many, at most ``num_beams``. Default: 1.
    do_sample : bool, optional
        True: sample, at temperature 1 if none is given. False: greedy. What it contradicts is
        refused. None: the temperature says.
    gamma : int or GammaPolicy
        Draft tokens a round, or what chooses them as it goes (see `specdec_ext.decoding.policies`);
        of no account where ``tree`` is given. Of a beam search, levels: the requests of a batch
        share the depth of the draft's tree, the longest that a policy allows any of them.
    temperature, top_k, top_p, min_p : number, sequence or Tensor ``[B]``
        The sampling law, of all requests or of each, as in `specdec_ext.verify`. Temperature 0 (the
        default) is greedy.
    draft_temperature, draft_top_k, draft_top_p, draft_min_p : number, sequence or Tensor ``[B]``
        What the draft is sampled with; each by default as the target is. Any choice leaves the law
        of the new tokens as it is under a lossless rule, and changes how many draft tokens are
        accepted (Leviathan et al., section 6: the draft's law may be standardised otherwise than
        the target's). Deterministic drafters have no law, and sample nothing.
    seeds : int, sequence of int or Tensor ``[B]``, optional
        Seed of each request; an int s stands for s, s + 1, ... A request's tokens are a function of
        its seed, its prompt and the models' logits, whatever else is in the batch.
    generator : torch.Generator, optional
        Draws the seeds where none are given (default: torch's own generator).
    tree : StaticTree or GrownTree, optional
        Draft a tree in place of a chain; every node of it is run through the target in the same
        call, under a 4-D attention mask. The draft must be a model then, or a `TreeProposer`.
    rule : str, optional
        The verification rule, as in `specdec_ext.verify` (default "block") or, with a tree, in
        `specdec_ext.verify_tree` (default "traversal").
    lenience, beta, tau, epsilon, delta : float
        Of the rules that are not lossless, as in `specdec_ext.verify`.
    raw_logprobs : bool
        Report log-probabilities of the target's raw rows at T = 1 in every `Burst`, in place of
        those of the sampling law.
    logits_processor : callable or iterable of callable, optional
        `transformers.LogitsProcessor` or the like: of ids ``[1, n]`` and float32 scores ``[1, V]``
        the new scores, before temperature and filters. Every row is processed after the text that
        would lead to it, draft tokens included and padding left out (see ``padded_texts``), so that
        the law is that of plain decoding under the same processors. Rows are asked for that are
        then discarded: of a processor that keeps state between calls, copies are called, which
        follow each request as if it were alone and know nothing of what was discarded. Which
        processors do is found out by asking copies of them; one that can be neither copied nor
        shown to be a function of its arguments is refused. (What a function keeps in its closure
        cannot be copied, and is noticed only where its answers differ at once.) They are called on
        the host, row by row (see ``padded_texts``). Drafters that have rows over as many tokens as
        the target (models, n-gram models, uniform tokens, each level of a hierarchy) draw from
        processed rows, too, but for processors that keep state and run a model; drafts that are
        trees do not.
    grammar : TokenMatcher, callable, xgrammar.CompiledGrammar or sequence of them, optional
        What new tokens must match: of all requests, or of each (None: anything). A `TokenMatcher`,
        as xgrammar's ``GrammarMatcher`` and llguidance's ``LLMatcher`` are understood to be, is
        followed from the state that it is in to the end of its request's text; what makes matchers
        (a compiled grammar, a callable without arguments) is asked for one for each request. The
        law is that of plain decoding under the same masks, which apply behind
        ``logits_processor``, before temperature and filters. Matchers are led along each draft, or
        over each tree, and rolled back. Drafters draw under the masks where they draw from
        processed rows, and so do trees that a model drafts. Where a matcher has terminated, only
        end tokens may come. Tokens that it does not know, as of a padded vocabulary, never come.
        xgrammar's own logits processor, given as the last ``logits_processor``, is taken for the
        grammar that it holds.
    eos_token_id : int, iterable of int or Tensor, optional
        Tokens that end a request (and are kept). None: those of the model's configuration, ``()``:
        none.
    stop_sequences : iterable of sequence of int, optional
        A request ends where its new tokens end in one of these (kept).
    stop_strings : str or sequence of str, optional
        A request ends where its text ends in one of these (kept); needs ``tokenizer``.
    tokenizer : optional
        The Hugging Face tokenizer of ``stop_strings``.
    stopping_criteria : callable or iterable of callable, optional
        `transformers.StoppingCriteria` or the like: of ids ``[1, n]`` and None, whether the request
        ends there. Asked at every token of a burst, as in plain decoding; what a burst holds behind
        the end is dropped, from the statistics as well.
    pad_token_id : int, optional
        Fills ``sequences`` behind the end of a request. None: the model's, else the first stop
        token, else 0.
    padded_texts : bool
        Call ``logits_processor`` and ``stopping_criteria`` as transformers does: with all requests
        at once, ids ``[B, n]`` and scores ``[B, V]``, each at its own row, padding before prompts
        and ``pad_token_id`` behind ends included. What counts from the prompts' common end, or is
        made for each row, is right then. Requests are not at the same place: of each call, rows
        count whose request is at n, and the others show what they had there, or padding. Scores
        or answers that depend on other rows are refused.
    static_cache : bool
        Let caches keep one size, as compiled models want it: the models' shapes then depend on the
        batch and the number of new tokens alone (they grow in the rare case that they must).
        Models that keep a recurrent state are refused.
    measure_alpha : bool
        Compute sum_x min(p(x), q(x)) at every tested draft token, for `Statistics.alpha`: one more
        pass over the rows a round, counted in the phase ``rest``. Chains only, and not under
        "top_beta", whose drafts are not sampled.
    num_beams : int, optional
        Live beams of a beam search by the target (at most 64), of which the draft, a model or a
        drafter that runs one, searches ``gamma`` levels ahead (where drafting may not pay, give a
        `RenewalRule`, and rounds draft only while it does). The hypotheses and their scores are
        those of transformers' beam search, whatever the draft. Nothing is sampled, so that what is
        about sampling, rules and trees must be left out, and so must stop sequences, strings and
        criteria. Logits processors are called on log-probabilities, as transformers calls them,
        each beam's after its own text; they must be functions of their arguments. 1 (the
        default): no beams.
    draft_beams : int, optional
        The draft's beams, at least ``num_beams`` (the default). With one beam of the target's, the
        result is its greedy choice.
    length_penalty : float, optional
        A hypothesis' score is the sum of its tokens' log-probabilities divided by their number to
        this power, from -50 to 50. Default: 1.0.
    early_stopping : bool or "never", optional
        When a request's search is over, its hypotheses being as many as its beams. True: then.
        False (the default): when the best live beam's score at its present length is no better than
        the worst of theirs. "never": when its score at the most favourable length is not.
    on_round : callable, optional
        Called after every round with what it added (a list of `Burst`).
    progress : bool
        Show a bar of the new tokens (needs tqdm).

    Returns
    -------
    Generated or GeneratedBeams
        ``(sequences, statistics)``, and ``logprobs`` beside them; a beam search gives
        `GeneratedBeams`, which has ``scores`` in the place of ``logprobs``.

    Raises
    ------
    TypeError
        An argument of another kind: a target that is no model, a draft that is neither a model nor
        a `Drafter`, a bool or a string for a number. NumPy scalars and 0-d tensors are numbers.
    ValueError
        A number out of range, a shape that does not match, a prompt with an id that the target's
        vocabulary has not (padding may hold any), one drafter or policy in two places, or a model
        whose cache cannot be rolled back. Both come before any model is called.
    GenerationError
        A request cannot go on (the target's logits hold NaN, say). The error names it and carries
        what was generated for all of them.
    ValueError
        An argument is not as above; or a logits processor or a stopping criterion cannot be right
        in a burst, with the reason.

    Notes
    -----
    The host waits for the device once a round; a policy that looks at draft tokens (``go_on``) adds
    a wait for each of them, logits processors one for every call they see, and a drafter that reads
    text on the host one a round. The cache has a slot for every token of every row; tokens that a
    row rejected while another kept its own are masked out (see `CachedModel`).

    Where at least 64 draft tokens were tested, in at least half of the request calls, and less than
    1 in 20 of them was accepted, a `UserWarning` says so at the end, with the numbers and what to
    do: drafting cannot pay then.

    Examples
    --------
    >>> sequences, statistics = generate(target, draft, input_ids, gamma=5)  # doctest: +SKIP
    >>> statistics.tokens_per_target_call  # doctest: +SKIP
    3.1
    """
    options = Options(
        target=target,
        draft=draft,
        input_ids=input_ids,
        attention_mask=attention_mask,
        generation_config=generation_config,
        max_new_tokens=max_new_tokens,
        num_return_sequences=num_return_sequences,
        do_sample=do_sample,
        gamma=gamma,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        draft_temperature=draft_temperature,
        draft_top_k=draft_top_k,
        draft_top_p=draft_top_p,
        draft_min_p=draft_min_p,
        seeds=seeds,
        generator=generator,
        tree=tree,
        rule=rule,
        lenience=lenience,
        beta=beta,
        tau=tau,
        epsilon=epsilon,
        delta=delta,
        raw_logprobs=raw_logprobs,
        logits_processor=logits_processor,
        grammar=grammar,
        eos_token_id=eos_token_id,
        stop_sequences=stop_sequences,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        stopping_criteria=stopping_criteria,
        pad_token_id=pad_token_id,
        padded_texts=padded_texts,
        static_cache=static_cache,
        measure_alpha=measure_alpha,
        num_beams=num_beams,
        draft_beams=draft_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    if on_round is not None and not callable(on_round):
        raise TypeError(f"generate: on_round must be a callable or None, got {shown(on_round)}")
    progress = flag("generate: progress", progress)
    options = with_beams(options)
    if beam_options(options) is not None:
        if on_round is not None or progress:
            raise ValueError(
                "generate: a beam search has no tokens to show before its end; on_round must be "
                "None and progress False where num_beams or draft_beams is given"
            )
        return _search(configured(options))
    generation = _prepare(options)
    with _progress_bar(generation, shown=progress) as show:
        for bursts in _rounds(generation):
            show(bursts)
            if on_round is not None:
                on_round(bursts)
    return generation.result()


def stream(
    target: Any, draft: Any | Drafter | None, input_ids: Tensor, **options: Any
) -> Generator[Burst, None, Generated]:
    """Generate as `generate` does, and hand over what every round adds as soon as it is there.

    Parameters
    ----------
    target, draft, input_ids
        As in `generate`.
    **options
        As in `generate`, but ``on_round`` and ``progress``. They are checked at once, not at the
        first burst.

    Returns
    -------
    generator of Burst
        One for every request that was running in a round: its number, tokens, log-probabilities and
        which of them are accepted draft tokens. The tokens of a request's bursts, one after
        another, are those that `generate` returns. What the iterator's ``return`` gives (the value
        of ``yield from``) is the `Generated` of `generate`.

    Raises
    ------
    GenerationError
        As in `generate`. Bursts of earlier rounds have come by then; what the failing round gave to
        requests that could go on is in the error's ``sequences`` only.

    Examples
    --------
    >>> for burst in stream(target, draft, input_ids, gamma=5):  # doctest: +SKIP
    ...     print(burst.request, burst.tokens, burst.flags)

    A burst may end within a character of several bytes: `specdec_ext.hf.streaming` hands tokens to
    a streamer of transformers, which puts text together.
    """
    for name in ("on_round", "progress"):
        if name in options:
            raise TypeError(f"stream: {name} is of generate(); iterate over the bursts instead")
    bound = signature(generate).bind(target, draft, input_ids, **options)
    bound.apply_defaults()
    given = {name: bound.arguments[name] for name in Options.__dataclass_fields__}
    checked = with_beams(Options(**given))
    if beam_options(checked) is not None:
        raise ValueError(
            "stream: a beam search has no tokens to show before its end; num_beams must be 1 and "
            f"draft_beams None, got {checked.num_beams} and {checked.draft_beams}"
        )
    return _bursts(_prepare(checked))


def _bursts(generation: ChainGeneration) -> Generator[Burst, None, Generated]:
    for bursts in _rounds(generation):
        yield from bursts
    return generation.result()


def _rounds(generation: ChainGeneration) -> Iterator[list[Burst]]:
    """Run all rounds; whoever reads the bursts is not in inference mode."""
    with torch.inference_mode():
        generation.start()
    while generation.running:
        with torch.inference_mode():
            bursts = generation.step()
        yield bursts
    with torch.inference_mode():
        generation.finish()
    warn_where_drafts_fail(generation.statistics, stacklevel=3)  # generate's or stream's caller


@contextmanager
def _progress_bar(
    generation: ChainGeneration, *, shown: bool
) -> Iterator[Callable[[list[Burst]], object]]:
    """Show the new tokens of all requests as they come."""
    if not shown:
        yield lambda bursts: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("generate: progress needs tqdm: pip install tqdm") from error
    with tqdm(total=sum(generation.limits), unit="token") as bar:
        yield lambda bursts: bar.update(sum(len(burst.tokens) for burst in bursts))


def _search(given: Options) -> GeneratedBeams:
    """Check the arguments that a beam search shares with other generation, and run it."""
    arguments.check_target(given.target)
    arguments.check_prompts(given.input_ids, given.attention_mask, given.target)
    check_unsampled(given.temperature, len(given.input_ids))
    beams = beam_options(given)
    assert beams is not None
    generation = BeamGeneration(given, beams)
    _warn_of_training(given)
    return generation.run()


def _warn_of_training(given: Options) -> None:
    models = (given.target, *modules_of(given.draft))
    if any(getattr(model, "training", None) is True for model in models):
        warnings.warn(
            "generate: a model is in training mode; without eval(), dropout is part of its law",
            stacklevel=4,
        )


def _prepare(given: Options) -> ChainGeneration:
    """Check the arguments of `generate`, and bring them to one form."""
    target, tree = given.target, given.tree
    arguments.check_target(target)
    kind, drafter, policy = _drafting(given)
    arguments.check_prompts(given.input_ids, given.attention_mask, target)
    given = repeated(configured(given))
    ids = given.input_ids
    flags = {
        name: flag(f"generate: {name}", getattr(given, name))
        for name in ("raw_logprobs", "padded_texts", "static_cache", "measure_alpha")
    }
    if tree is not None and flags["measure_alpha"]:
        raise ValueError("generate: measure_alpha is of chains, got a tree")
    batch, device = ids.shape[0], ids.device
    rule = given.rule
    if rule is None:
        rule = "block" if tree is None else "traversal"
    rule_options = arguments.rule_options(
        rule,
        tree=tree is not None,
        **{name: getattr(given, name) for name in ("lenience", "beta", "tau", "epsilon", "delta")},
    )
    sampling = {name: getattr(given, name) for name in SAMPLING}
    laws = sampling_laws(batch, device, sampling, greedy=rule == "greedy")
    check_sampled(given, greedy=laws.greedy)
    if flags["measure_alpha"] and RULES[rule].ignores_sampling and not RULES[rule].lossless:
        raise ValueError(
            f'generate: measure_alpha must be False under the rule "{rule}", which samples no draft'
        )
    stop = arguments.stop_tokens(target, given.eos_token_id)
    processors, grammar = without_grammar(
        arguments.callables("logits_processor", given.logits_processor), given.grammar
    )
    settings = Settings(
        prompts=ids,
        attention_mask=given.attention_mask,
        limits=arguments.new_token_limits(given.max_new_tokens, batch),
        tree=tree,
        rule=rule,
        rule_options={**rule_options, "raw_logprobs": flags["raw_logprobs"]},
        laws=laws,
        processors=processors,
        matchers=matchers_of(grammar, batch, ends=any(token >= 0 for token in stop)),
        stops=find_stops(
            stop,
            arguments.stop_sequences(given.stop_sequences),
            arguments.stop_strings(given.stop_strings, given.tokenizer),
            given.tokenizer,
            given.stopping_criteria,
            device,
        ),
        pad=arguments.pad_token(target, given.pad_token_id, stop, ids.dtype),
        padded_texts=flags["padded_texts"],
        static_cache=flags["static_cache"],
        measure_alpha=flags["measure_alpha"],
        # Last: what is refused draws nothing from torch's generator.
        seeds=arguments.seeds(
            given.seeds, given.generator, batch, device, unused=laws.greedy and laws.draft_greedy
        ),
    )
    _warn_of_training(given)
    return kind(target, drafter, policy, settings)


def _drafting(given: Options) -> tuple[type[ChainGeneration], Any, GammaPolicy]:
    """Return how a round runs, who drafts in it, and who says how much."""
    policy = as_policy("generate: gamma", given.gamma)
    if given.tree is not None:
        from .tree_generation import TreeGeneration

        drafter = _tree_drafter(given.draft, given.tree)
        return TreeGeneration, drafter, FixedGamma(given.tree.depth)
    drafter = as_drafter(given.draft, "generate: draft")
    policy = FixedGamma(0) if given.draft is None else policy
    check_distinct("generate: draft", drafter, policy)
    return ChainGeneration, drafter, policy


def _tree_drafter(draft: Any, tree: StaticTree | GrownTree) -> Any:
    """Return the drafter that proposes trees, or drives a model to do so."""
    from .drafters.tree import as_tree_proposer

    if not isinstance(tree, (StaticTree, GrownTree)):
        raise TypeError(
            f"generate: tree must be a StaticTree, a GrownTree or None, got {shown(tree)}"
        )
    return as_tree_proposer(draft, "generate: draft")
