"""Where draft tokens come from: one drafter a file; `Drafter` is what the loop needs of each."""

from .interface import (
    ByChance,
    Draft,
    Drafter,
    FeatureDrafter,
    GoOn,
    MaskNodes,
    NoDrafter,
    Process,
    Requests,
    RevisableDrafter,
    TreeProposer,
    asked_for_some,
    check_draft,
    estimates_chances,
    estimates_some_chances,
    reads_features,
)
from .model import as_drafter
from .parts import check_distinct, modules_of
from .rows import last_tokens, lengthened, prefix_or_drawn, without_padding

__all__ = [
    "ByChance",
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "GoOn",
    "MaskNodes",
    "NoDrafter",
    "Process",
    "Requests",
    "RevisableDrafter",
    "TreeProposer",
    "as_drafter",
    "prefix_or_drawn",
    "check_distinct",
    "check_draft",
    "estimates_chances",
    "estimates_some_chances",
    "last_tokens",
    "modules_of",
    "lengthened",
    "asked_for_some",
    "reads_features",
    "without_padding",
]
