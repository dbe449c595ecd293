"""The generation loop: `generate`, its statistics, the drafters and the gamma policies."""

from specdec_ext.decoding.chain_generation import Burst, Generated, GenerationError
from specdec_ext.decoding.drafters import Draft, Drafter, NoDrafter, Requests
from specdec_ext.decoding.generate import generate, stream
from specdec_ext.decoding.policies import (
    ConfidenceStop,
    EntropyBound,
    FixedGamma,
    GammaPolicy,
    GradientAscent,
    HeuristicGamma,
    RenewalRule,
)
from specdec_ext.decoding.stats import Statistics
from specdec_ext.decoding.trees import GrownTree, StaticTree, sequoia_tree

__all__ = [
    "Burst",
    "ConfidenceStop",
    "Draft",
    "Drafter",
    "EntropyBound",
    "FixedGamma",
    "GammaPolicy",
    "Generated",
    "GenerationError",
    "GradientAscent",
    "GrownTree",
    "HeuristicGamma",
    "NoDrafter",
    "RenewalRule",
    "Requests",
    "StaticTree",
    "Statistics",
    "generate",
    "sequoia_tree",
    "stream",
]
