"""The generation loop: `generate`, its statistics, the drafters and the gamma policies."""

from .beam_generation import GeneratedBeams
from .chain_generation import Burst, Generated, GenerationError
from .counts import Counts
from .drafters import Draft, Drafter, FeatureDrafter, NoDrafter, Requests, TreeProposer
from .drafters.aggressive import AggressiveDrafter
from .drafters.bandit import BanditDrafter
from .drafters.block import BlockDrafter
from .drafters.eagle import EagleDrafter
from .drafters.early_exit import EarlyExitDrafter
from .drafters.heads import HeadsDrafter
from .drafters.hierarchy import HierarchicalDrafter
from .drafters.lookup import LookupDrafter
from .drafters.ngram import NgramDrafter
from .drafters.stacked import StackedDrafter
from .drafters.suffix import SuffixDrafter
from .drafters.uniform import UniformDrafter
from .generate import generate, stream
from .grouped_queries import group_queries
from .grown_trees import GrownTree
from .matchers import TokenMatcher
from .packed import pack_linears
from .policies import (
    ConfidenceStop,
    EntropyBound,
    FixedGamma,
    GammaPolicy,
    GradientAscent,
    HeuristicGamma,
)
from .renewal import RenewalRule
from .stats import Statistics
from .thresholds import MovingThreshold
from .tracing import RoundRecord, RoundTrace
from .trees import StaticTree, sequoia_tree

__all__ = [
    "AggressiveDrafter",
    "BanditDrafter",
    "BlockDrafter",
    "Burst",
    "ConfidenceStop",
    "Counts",
    "Draft",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "EntropyBound",
    "FeatureDrafter",
    "FixedGamma",
    "GammaPolicy",
    "Generated",
    "GeneratedBeams",
    "GenerationError",
    "GradientAscent",
    "GrownTree",
    "HeadsDrafter",
    "HeuristicGamma",
    "HierarchicalDrafter",
    "LookupDrafter",
    "MovingThreshold",
    "NgramDrafter",
    "NoDrafter",
    "RenewalRule",
    "Requests",
    "RoundRecord",
    "RoundTrace",
    "StackedDrafter",
    "StaticTree",
    "Statistics",
    "SuffixDrafter",
    "TokenMatcher",
    "TreeProposer",
    "UniformDrafter",
    "generate",
    "group_queries",
    "pack_linears",
    "sequoia_tree",
    "stream",
]
