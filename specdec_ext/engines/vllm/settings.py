"""What the environment variable ``SPECDEC_VLLM`` says: a rule, and its parameters.

``SPECDEC_VLLM=block``, or any other rule of chains; ``SPECDEC_VLLM=lenient,lenience=0.8`` for a
rule with parameters. Unset, empty or ``0``: vLLM is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ...contract import CHAIN_RULES, DOMAIN_COUPLED, DOMAIN_DRAFT, RULES, Rule

__all__ = ["VARIABLE", "Settings", "parse_settings"]

VARIABLE = "SPECDEC_VLLM"
_OFF = ("", "0")
#: Parameters of `specdec_ext.verify` that belong to a rule, and how they are read.
_NUMBERS: dict[str, Callable[[str], float]] = {
    **dict(lenience=float, tau=float, epsilon=float, delta=float),
    "beta": int,
}


@dataclass(frozen=True)
class Settings:
    """A rule of `specdec_ext.verify` and its parameters.

    Attributes
    ----------
    rule : str
        One of the rules of chains.
    numbers : dict
        Parameters of the rule by name.
    """

    rule: str
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def traits(self) -> Rule:
        """What is known of the rule."""
        return RULES[self.rule]

    @property
    def draft_domain(self) -> int:
        """The randomness that draft tokens are drawn from: the target's own where both race."""
        return DOMAIN_COUPLED if self.traits.races else DOMAIN_DRAFT

    def __str__(self) -> str:
        """Write it as the variable has it."""
        return ",".join([self.rule, *(f"{name}={n}" for name, n in self.numbers.items())])


def parse_settings(text: str) -> Settings | None:
    """Read the variable; None where it leaves vLLM alone.

    Raises
    ------
    ValueError
        It names no rule, or a parameter that is none or no number.

    Examples
    --------
    >>> from specdec_ext.engines.vllm.settings import parse_settings
    >>> str(parse_settings("lenient,lenience=0.8"))
    'lenient,lenience=0.8'
    >>> parse_settings("0") is None
    True
    """
    if text.strip() in _OFF:
        return None
    rule, *given = (part.strip() for part in text.split(","))
    if rule not in CHAIN_RULES:
        raise ValueError(
            f"{VARIABLE} must begin with one of {', '.join(CHAIN_RULES)}, got {text!r}"
        )
    numbers = {}
    for part in given:
        name, _, value = part.partition("=")
        if name not in _NUMBERS:
            raise ValueError(
                f"{VARIABLE}: parameters of rules are {', '.join(_NUMBERS)}, got {part!r}"
            )
        try:
            numbers[name] = _NUMBERS[name](value)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {name} must be a number, got {value!r}") from error
    return Settings(rule, numbers)
