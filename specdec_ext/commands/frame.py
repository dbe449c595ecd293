"""What the commands share: options and their checks, refusals on one line, JSON that is strict."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..decoding.checks import integer, number_in
from ..decoding.policies import MOST_DRAFTED

__all__ = [
    "REFUSALS",
    "add_generation_arguments",
    "add_json_argument",
    "add_pair_arguments",
    "check_device",
    "check_gamma",
    "check_generation",
    "check_temperature",
    "command",
    "first_line",
    "print_json",
]

#: What a command meets that has nothing to do with what it measures: exit status 2, never 1.
REFUSALS = (ImportError, OSError, OverflowError, RuntimeError, ValueError)

Run = Callable[[argparse.Namespace], int]

_LARGEST_TEMPERATURE = torch.finfo(torch.float32).max


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line; torch's errors have many."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def command(name: str) -> Callable[[Run], Run]:
    """Make a command of a function: what it refuses is said on one line, and its status is 2.

    Such a function takes what its module's ``add_arguments`` declares and returns the exit status:
    0, or 1 for a verdict. 2 is for what could not be judged: something is missing, a file is not
    what it should be, a parameter is out of range or leaves nothing to compare.
    """

    def wrap(run: Run) -> Run:
        @functools.wraps(run)
        def guarded(args: argparse.Namespace) -> int:
            try:
                return run(args)
            except REFUSALS as error:
                print(f"{name}: {first_line(error)}", file=sys.stderr)
                return 2

        return guarded

    return wrap


# --- options ----------------------------------------------------------------------------------


def add_pair_arguments(parser: argparse.ArgumentParser, purpose: str = "") -> None:
    """Declare the models that a command runs, and what they compute in; `purpose`: what for."""
    parser.add_argument(
        "--target",
        metavar="PATH",
        help=f"{purpose}a local Hugging Face checkpoint, or the name of one that `fetch` got "
        "(default: that of specdec-ext-pair)",
    )
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="a smaller one over the same tokens, decoding heads for the target, or the name of "
        "the fetched model whose draft comes with specdec-ext-pair",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="what models compute in (default: float32 on CPUs, elsewhere as the checkpoints say)",
    )
    parser.add_argument(
        "--packed",
        action="store_true",
        help="make the target's calls of a few tokens in float32 faster on a CPU, see "
        "specdec_ext.decoding.pack_linears and group_queries; weights take twice the memory",
    )
    parser.add_argument(
        "--compile-draft",
        action="store_true",
        help="compile the draft model by torch.compile: a minute at the first time, then faster "
        "calls",
    )


def add_generation_arguments(
    parser: argparse.ArgumentParser, max_new_tokens: int, *, prompt: bool = True
) -> None:
    """Declare what is completed, if it is one prompt, how far, with which seed, on which device."""
    if prompt:
        parser.add_argument(
            "--prompt",
            metavar="TEXT",
            help="complete this (default: held-out standard-library modules)",
        )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="(default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")


def add_json_argument(
    parser: argparse._ActionsContainer, text: str = "print one JSON object instead"
) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help=text)


def check_gamma(gamma: int) -> None:
    """Refuse a draft length under which nothing is drafted, or too long a one."""
    integer("--gamma", gamma, 1, MOST_DRAFTED)


def check_temperature(temperature: float) -> float:
    """Refuse a temperature that is none; return it."""
    return number_in("--temperature", temperature, 0, _LARGEST_TEMPERATURE)


def check_generation(temperature: float, seed: int, max_new_tokens: int) -> None:
    """Refuse what no generation can begin with, or what leaves nothing to compare."""
    check_temperature(temperature)
    integer("--seed", seed)
    if max_new_tokens < 2:
        raise ValueError(
            "--max-new-tokens must be at least 2 (no draft reaches a request's last token), got "
            f"{max_new_tokens}"
        )
    integer("--max-new-tokens", max_new_tokens)


def check_device(name: str) -> None:
    """Refuse a device that holds no tensors here."""
    try:
        torch.zeros(1, device=name).tolist()
    except Exception as error:  # each backend has errors of its own
        raise ValueError(f"--device {name} cannot be used here: {first_line(error)}") from error


# --- what is printed --------------------------------------------------------------------------


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print strict JSON: null stands for numbers that are not finite."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
