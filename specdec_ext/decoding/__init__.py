"""The generation loop: `generate`, its statistics, the drafters and the gamma policies."""

from specdec_ext.decoding.chain_generation import Burst, Generated, GenerationError
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters import Draft, Drafter, NoDrafter, Requests
from specdec_ext.decoding.drafters.aggressive import AggressiveDrafter
from specdec_ext.decoding.drafters.early_exit import EarlyExitDrafter
from specdec_ext.decoding.drafters.hierarchy import HierarchicalDrafter
from specdec_ext.decoding.drafters.lookup import LookupDrafter
from specdec_ext.decoding.drafters.ngram import NgramDrafter
from specdec_ext.decoding.drafters.stacked import StackedDrafter
from specdec_ext.decoding.drafters.uniform import UniformDrafter
from specdec_ext.decoding.generate import generate, stream
from specdec_ext.decoding.policies import (
    ConfidenceStop,
    EntropyBound,
    FixedGamma,
    GammaPolicy,
    GradientAscent,
    HeuristicGamma,
)
from specdec_ext.decoding.renewal import RenewalRule
from specdec_ext.decoding.stats import Statistics
from specdec_ext.decoding.thresholds import MovingThreshold
from specdec_ext.decoding.trees import GrownTree, StaticTree, sequoia_tree

__all__ = [
    "AggressiveDrafter",
    "Burst",
    "ConfidenceStop",
    "Counts",
    "Draft",
    "Drafter",
    "EarlyExitDrafter",
    "EntropyBound",
    "FixedGamma",
    "GammaPolicy",
    "Generated",
    "GenerationError",
    "GradientAscent",
    "GrownTree",
    "HeuristicGamma",
    "HierarchicalDrafter",
    "LookupDrafter",
    "MovingThreshold",
    "NgramDrafter",
    "NoDrafter",
    "RenewalRule",
    "Requests",
    "StackedDrafter",
    "StaticTree",
    "Statistics",
    "UniformDrafter",
    "generate",
    "sequoia_tree",
    "stream",
]
