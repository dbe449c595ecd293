"""What `generate` goes by where arguments are left out: a `GenerationConfig`, or its own defaults.

And several sequences a prompt, which are requests like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .checks import flag, integer, items, shown
from .options import Options
from .sampling_laws import SAMPLING

__all__ = ["check_sampled", "configured", "repeated", "with_beams"]

NEW_TOKENS = 128
_FILTERS = ("top_k", "top_p", "min_p")
_SAME = ("stop_strings", "eos_token_id", "pad_token_id")  # arguments of that meaning
#: What is said of beams, and what holds where nobody says anything.
_BEAMS: Mapping[str, Any] = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
_READ = {
    "max_length", "max_new_tokens", "do_sample", "temperature", "num_return_sequences", *_FILTERS,
    *_SAME, *_BEAMS,
}  # fmt: skip
#: Fields that say how transformers works, or are of no account where these here are read.
_WITHOUT_EFFECT = {
    "assistant_confidence_threshold", "assistant_lookbehind", "bos_token_id", "cache_config",
    "cache_implementation", "compile_config", "decoder_start_token_id", "disable_compile",
    "is_assistant", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prefill_chunk_size", "return_dict_in_generate",
    "target_lookbehind", "transformers_version", "use_cache",
}  # fmt: skip


def configured(given: Options) -> Options:
    """Fill in what was left out: from ``generation_config``, if there is one, else the defaults.

    Raises
    ------
    TypeError
        ``generation_config`` is none, ``do_sample`` no bool, ``num_return_sequences`` no int.
    ValueError
        The configuration asks for what `generate` does not read of it, or to sample at temperature
        0.
    """
    config = _fields(given.generation_config, given.target)
    do_sample = given.do_sample
    if do_sample is None:
        do_sample = bool(config.get("do_sample")) or given.temperature is not None
    do_sample = flag("generate: do_sample", do_sample)
    found: dict[str, Any] = {name: config.get(name) for name in _SAME}
    found["max_new_tokens"] = _new_tokens(given, config)
    temperature = config.get("temperature")
    if do_sample and given.temperature is None and temperature == 0:
        raise ValueError(
            "generate: generation_config must have a temperature above 0 where it is sampled from, "
            f"got do_sample={do_sample} and temperature={temperature}; greedy is do_sample=False"
        )
    found["temperature"] = (temperature or 1.0) if do_sample else 0.0
    if do_sample:
        found.update((name, config.get(name)) for name in _FILTERS)
    sequences = given.num_return_sequences
    if sequences is None:
        sequences = config.get("num_return_sequences") or 1
    filled = {name: value for name, value in found.items() if getattr(given, name) is None}
    sequences = integer("generate: num_return_sequences", sequences, low=1)
    return replace(given, **filled, num_return_sequences=sequences)


def with_beams(given: Options) -> Options:
    """Fill in what was left out about beams, as `configured` does with the rest.

    Of a configuration with one beam nothing else about beams is read: transformers decodes without
    them, too.

    Raises
    ------
    TypeError, ValueError
        As in `configured`, of ``generation_config``.
    """
    config = _fields(given.generation_config, given.target)
    width = config.get("num_beams", 1) if given.num_beams is None else given.num_beams
    found = {**_BEAMS, **({} if width == 1 else config), "num_beams": width}
    return replace(given, **{name: found[name] for name in _BEAMS if getattr(given, name) is None})


def _fields(config: Any, target: Any) -> Mapping[str, Any]:
    """Return what a configuration asks for, as ``model.generate`` completes it.

    What it leaves open is the model's own configuration's to say, then transformers': of filters,
    top-k is 50 there.
    """
    if config is None:
        return {}
    if isinstance(config, type) or not callable(getattr(config, "to_dict", None)):
        raise TypeError(
            "generate: generation_config must be a transformers.GenerationConfig or None, got "
            f"{shown(config)}"
        )
    neutral = config._get_default_generation_params()
    own = getattr(target, "generation_config", None)
    layers = [{} if own is None else own.to_dict(), config.to_dict()]
    asked = {
        name: value
        for layer in layers
        for name, value in layer.items()
        if value is not None and not name.startswith("_")
    }
    unread = [
        f"{name}={value!r}"
        for name, value in asked.items()
        if name not in _READ | _WITHOUT_EFFECT and value is not False and value != neutral.get(name)
    ]
    if unread:
        raise ValueError(
            "generate: generation_config asks for what generate has not, or takes otherwise (as a "
            f"logits_processor, say): {', '.join(unread)}; specdec_ext.hf.generate_fn takes all "
            "that model.generate does"
        )
    return {name: neutral[name] for name in ("temperature", "top_k", "top_p")} | asked


def _new_tokens(given: Options, config: Mapping[str, Any]) -> int:
    """Return how many new tokens a configuration allows, the default if it does not say."""
    if config.get("max_new_tokens") is not None:
        return int(config["max_new_tokens"])
    if config.get("max_length") is not None:
        return max(int(config["max_length"]) - given.input_ids.shape[1], 0)
    return NEW_TOKENS


def check_sampled(given: Options, *, greedy: bool) -> None:
    """Check that ``do_sample`` and the number of sequences agree with how requests are decoded."""
    if given.do_sample is not None and bool(given.do_sample) == greedy:
        law = "greedy (its temperature, or its rule)" if greedy else "sampled (its temperature)"
        raise ValueError(f"generate: do_sample is {given.do_sample}, but decoding is {law}")
    if greedy and given.num_return_sequences > 1:
        raise ValueError(
            "generate: num_return_sequences must be 1 where decoding is greedy, whose sequences "
            f"would be equal, got {given.num_return_sequences}"
        )


def repeated(given: Options) -> Options:
    """Make ``num_return_sequences`` requests of each prompt, beside each other.

    What was given for each prompt goes for all of its sequences, but seeds: equal seeds would make
    equal sequences.
    """
    several = given.num_return_sequences
    if several == 1:
        return given
    batch = len(given.input_ids)
    changed: dict[str, Any] = {"input_ids": given.input_ids.repeat_interleave(several, 0)}
    if given.attention_mask is not None:
        changed["attention_mask"] = given.attention_mask.repeat_interleave(several, 0)
    for name in ("max_new_tokens", "grammar", *SAMPLING):
        values = items(getattr(given, name))
        if values is not None:
            of_each = [value for value in values for _ in range(several)]
            changed[name] = of_each if len(values) == batch else values
    return replace(given, **changed)
