"""Where draft tokens come from: one drafter a file; `Drafter` is what the loop needs of each."""

from .interface import (
    Draft,
    Drafter,
    GoOn,
    NoDrafter,
    Process,
    Requests,
    RevisableDrafter,
    asked_for_some,
    check_draft,
    last_tokens,
    lengthened,
    prefix_or_drawn,
    without_padding,
)
from .model import as_drafter
from .parts import check_distinct

__all__ = [
    "Draft",
    "Drafter",
    "GoOn",
    "NoDrafter",
    "Process",
    "Requests",
    "RevisableDrafter",
    "as_drafter",
    "prefix_or_drawn",
    "check_distinct",
    "check_draft",
    "last_tokens",
    "lengthened",
    "asked_for_some",
    "without_padding",
]
