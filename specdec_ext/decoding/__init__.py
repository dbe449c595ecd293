"""The generation loop: `generate`, its statistics, and the drafters."""

from specdec_ext.decoding.drafters import Draft, Drafter, NoDrafter, Requests
from specdec_ext.decoding.drafters.aggressive import AggressiveDrafter
from specdec_ext.decoding.drafters.lookup import LookupDrafter
from specdec_ext.decoding.drafters.ngram import NgramDrafter
from specdec_ext.decoding.drafters.stacked import StackedDrafter
from specdec_ext.decoding.drafters.uniform import UniformDrafter
from specdec_ext.decoding.generate import Burst, Generated, GenerationError, generate
from specdec_ext.decoding.stats import Statistics
from specdec_ext.decoding.trees import GrownTree, StaticTree, sequoia_tree

__all__ = [
    "AggressiveDrafter",
    "Burst",
    "Draft",
    "Drafter",
    "Generated",
    "GenerationError",
    "GrownTree",
    "LookupDrafter",
    "NgramDrafter",
    "NoDrafter",
    "Requests",
    "StackedDrafter",
    "StaticTree",
    "Statistics",
    "UniformDrafter",
    "generate",
    "sequoia_tree",
]
