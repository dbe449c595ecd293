"""Check that speculation changes nothing: plain and speculative decoding of one pair, side by side.

Greedy output must be that of plain greedy decoding, and under the rule "coupled" sampled output
must be that of plain decoding with the same seeds: both are compared token by token, one prompt at
a time and all of them in one batch. At the first token that differs the target is asked again, in
one call on the whole text: if it puts the two tokens closer together than its own answers differ
between a call on several tokens and calls on fewer, they tie to its precision; if not, it is a bug.

A draft whose token ids stand for other tokens than the target's changes no output, and is of no
use: the two tokenizers are compared first, where the draft's checkpoint has one. A target that is
named without a draft is checked with `SuffixDrafter`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..contract import GREEDY_BELOW
from .frame import (
    add_generation_arguments,
    add_json_argument,
    add_pair_arguments,
    check_gamma,
    check_generation,
    command,
    print_json,
)
from .pair import Pair, Prompt, left_padded, load_named

LOSSLESS, PRECISION, BUG = "lossless", "tie or precision", "bug"


class Finding(NamedTuple):
    """How one prompt came out in one comparison.

    Attributes
    ----------
    what : str
        The comparison.
    prompt : str
        Which prompt.
    verdict : str
        "lossless", "tie or precision" or "bug".
    tokens : int
        Tokens that agree, up to the first that does not.
    gap : float or None
        By how much the target prefers plain decoding's token where they part: a difference of
        logits; sampled, of their scores in the race; infinite (in JSON null) where one of them
        ended. None where nothing differs.
    precision : float or None
        By how much the target's own answers differ there.
    """

    what: str
    prompt: str
    verdict: str
    tokens: int
    gap: float | None = None
    precision: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m specdec_ext check``."""
    add_pair_arguments(parser)
    parser.add_argument("--gamma", type=int, nargs="+", default=[1, 4], help="(default: 1 4)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of the sampled half (default: %(default)s)"
    )
    add_generation_arguments(parser, max_new_tokens=48)
    add_json_argument(parser)


@command("check")
def run(args: argparse.Namespace) -> int:
    """Run the check: status 1 if there is a bug."""
    for gamma in args.gamma:
        check_gamma(gamma)
    check_generation(args.temperature, args.seed, args.max_new_tokens)
    return _report(*load_named(args, needs_draft=False), args)


def _report(pair: Pair, prompts: list[Prompt], args: argparse.Namespace) -> int:
    """Compare, print what is found, and return the exit status."""
    if pair.mismatch is not None and not args.json:
        print(f"{pair.mismatch}\n", flush=True)
    findings = []
    for _, group in itertools.groupby(compare(pair, prompts, args), lambda found: found.what):
        of_one_way = list(group)
        findings += of_one_way
        if not args.json:
            print("\n".join(lines(of_one_way)), flush=True)
    verdicts = {finding.verdict for finding in findings}
    verdict = next(v for v in (BUG, PRECISION, LOSSLESS) if v in verdicts)
    if args.json:
        found = [finding._asdict() for finding in findings]
        print_json({"verdict": verdict, "tokenizers": pair.mismatch, "findings": found})
    else:
        useless = (
            "" if pair.mismatch is None else "; but the draft's tokenizer is another, see above"
        )
        print(f"\n{verdict}: {sum(f.tokens for f in findings)} tokens agree{useless}")
    return 1 if verdict == BUG else 0


def lines(findings: list[Finding]) -> list[str]:
    """Say how one comparison came out: equal prompts together, the others one by one."""
    equal = [finding for finding in findings if finding.verdict == LOSSLESS]
    said = [line(finding) for finding in findings if finding.verdict != LOSSLESS]
    if len(equal) == 1:
        return [line(equal[0]), *said]
    if equal:
        tokens = sum(finding.tokens for finding in equal)
        said.insert(0, f"{equal[0].what}, {len(equal)} prompts: {LOSSLESS} ({tokens} tokens)")
    return said


def line(finding: Finding) -> str:
    """Say a finding on one line."""
    said = f"{finding.what}, {finding.prompt}: {finding.verdict}"
    if finding.gap is None:
        return f"{said} ({finding.tokens} tokens)"
    return (
        f"{said} at token {finding.tokens}: the target's choices are {finding.gap:.2e} apart, its "
        f"own answers differ by {finding.precision:.2e}"
    )


def compare(pair: Pair, prompts: list[Prompt], args: argparse.Namespace) -> Iterator[Finding]:
    """Decode in every way and compare what comes out."""
    sampled = args.temperature if args.temperature >= GREEDY_BELOW else 0.0
    for temperature in dict.fromkeys([0.0, sampled]):
        law = "greedy" if temperature == 0 else f"sampled at T {temperature:g}"
        plain = [_decode(pair, [prompt], temperature, 0, args)[0] for prompt in prompts]
        ways: dict[str, list[list[int]]] = {}
        for gamma in args.gamma:
            ways[f"gamma {gamma}"] = [
                _decode(pair, [prompt], temperature, gamma, args)[0] for prompt in prompts
            ]
            if len(prompts) > 1:
                together = _decode(pair, prompts, temperature, gamma, args)
                ways[f"gamma {gamma}, one batch"] = together
        for way, found in ways.items():
            for prompt, expected, tokens in zip(prompts, plain, found, strict=True):
                yield compare_tokens(
                    pair, prompt, expected, tokens, temperature, args.seed, f"{law}, {way}"
                )


def _decode(
    pair: Pair, prompts: list[Prompt], temperature: float, gamma: int, args: argparse.Namespace
) -> list[list[int]]:
    """Return the new tokens of each prompt; gamma 0 is plain decoding."""
    from ..decoding import stream

    ids, mask = left_padded([prompt.ids[0] for prompt in prompts])
    tokens: list[list[int]] = [[] for _ in prompts]
    for burst in stream(
        pair.target,
        pair.drafter if gamma else None,
        ids,
        attention_mask=mask,
        max_new_tokens=args.max_new_tokens,
        gamma=max(gamma, 1),
        temperature=temperature,
        rule="coupled" if temperature else "block",
        seeds=torch.full((len(prompts),), args.seed),
    ):
        tokens[burst.request] += burst.tokens
    return tokens


def compare_tokens(
    pair: Pair,
    prompt: Prompt,
    plain: list[int],
    found: list[int],
    temperature: float,
    seed: int,
    what: str,
) -> Finding:
    """Say what it means that two continuations of a prompt are equal, or where they part."""
    if plain == found:
        return Finding(what, prompt.name, LOSSLESS, len(plain))
    place = next(
        (i for i, (a, b) in enumerate(zip(plain, found, strict=False)) if a != b),
        min(len(plain), len(found)),
    )
    if place == min(len(plain), len(found)):  # one of them ended: no tie makes it
        return Finding(what, prompt.name, BUG, place, float("inf"), 0.0)
    new = torch.tensor([plain[:place]], dtype=torch.int64, device=pair.device)
    text = torch.cat([prompt.ids, new], 1)
    logits, precision = _ask_again(pair.target, text)
    scores = logits
    if temperature:
        noise = reference.race_noise(seed, text.shape[1], torch.arange(len(logits)))
        scores = logits / temperature - noise.log()
        precision /= temperature
    gap = float(scores[plain[place]] - scores[found[place]])
    verdict = PRECISION if abs(gap) <= 2 * precision else BUG
    return Finding(what, prompt.name, verdict, place, gap, precision)


@torch.inference_mode()
def _ask_again(target: Any, text: Tensor) -> tuple[Tensor, float]:
    """Give the target's logits after a text, ``[V]`` float64, and by how much they are uncertain.

    One call on the whole text, beside calls on some of its last tokens over a cache, as decoding
    makes them.
    """
    from ..decoding.hosting import host_model

    whole = target(input_ids=text).logits[0, -1].double().cpu()
    difference = 0.0
    for fed in (1, 2, 5):
        if text.shape[1] <= fed:
            continue
        ends = torch.tensor([text.shape[1] + 1], device=text.device)
        cached = host_model(target, ends, uneven=False)
        cached.prefill(text[:, :-fed], None)
        row = cached.forward(text[:, -fed:], last_only=True)[0, -1].double().cpu()
        finite = whole.isfinite() & row.isfinite()
        difference = max(difference, float((whole - row)[finite].abs().max()))
    largest = float(whole[whole.isfinite()].abs().max())
    return whole, max(difference, 8 * torch.finfo(target.dtype).eps * largest)
