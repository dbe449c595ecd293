"""What the commands share: options that are checked, errors on one line, JSON that is strict."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch

from .decoding.checks import integer, number_in
from .decoding.policies import MOST_DRAFTED

__all__ = [
    "REFUSALS",
    "check_device",
    "check_gamma",
    "check_generation",
    "check_temperature",
    "first_line",
    "print_json",
    "refused",
]

#: What a command meets that has nothing to do with what it measures: exit status 2, never 1.
REFUSALS = (ImportError, OSError, OverflowError, RuntimeError, ValueError)

_LARGEST_TEMPERATURE = torch.finfo(torch.float32).max


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line; torch's errors have many."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def refused(command: str, error: BaseException) -> int:
    """Say on one line why a command does not run; return its exit status, 2."""
    print(f"{command}: {first_line(error)}", file=sys.stderr)
    return 2


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


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print strict JSON: null stands for numbers that are not finite."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
