"""The generation loop: `generate`, its statistics, and the drafters."""

from specdec_ext.decoding.drafters import Draft, Drafter, NoDrafter, Requests
from specdec_ext.decoding.generate import Burst, Generated, GenerationError, generate
from specdec_ext.decoding.stats import Statistics

__all__ = [
    "Burst",
    "Draft",
    "Drafter",
    "Generated",
    "GenerationError",
    "NoDrafter",
    "Requests",
    "Statistics",
    "generate",
]
