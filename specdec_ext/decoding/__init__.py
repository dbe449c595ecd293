"""The generation loop: `generate`, its statistics, and the drafters."""

from specdec_ext.decoding.chain_generation import Burst, Generated, GenerationError
from specdec_ext.decoding.drafters import Draft, Drafter, NoDrafter, Requests
from specdec_ext.decoding.generate import generate, stream
from specdec_ext.decoding.stats import Statistics
from specdec_ext.decoding.trees import GrownTree, StaticTree, sequoia_tree

__all__ = [
    "Burst",
    "Draft",
    "Drafter",
    "Generated",
    "GenerationError",
    "GrownTree",
    "NoDrafter",
    "Requests",
    "StaticTree",
    "Statistics",
    "generate",
    "sequoia_tree",
    "stream",
]
