"""How long a size trains, and its learning rate on the way.

The learning rate is a function of *progress*, the used part of what a size may use, from 0 to 1:
of its steps, of its seconds, or of whichever runs out first. A schedule by progress has its warm-up
and its end in their places however many steps the time allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# The rest is for compiling, saving, loading and measuring.
TRAINING_SHARE = 0.85

# Xia et al. (arXiv 2203.16487), Table 7, warm from 1e-7 up to 5e-4.
FIRST_FACTOR = 1e-7 / 5e-4

Clock = Callable[[], float]


class Budget(NamedTuple):
    """What the training of all sizes of a task may use.

    A CPU's time for a step goes with its tokens, and with few epochs many small steps learn more
    than few large ones. A text that is seen a few times only is not learned by heart, so that
    dropout would cost time and learn nothing; and the larger sizes find out soonest that the source
    says what comes next if they copy first. A GPU runs a step of many tokens in little more time
    than one of few, and it comes to see the text so often that the number of epochs needs a bound.

    Parameters
    ----------
    minutes : float
        Of one machine, for all sizes.
    batch_tokens : int
        Of a step.
    dropout : float
        See `Options`.
    bfloat16 : bool, optional
        Multiply in bfloat16; without it, where the processor has instructions for that.
    epochs : int, optional
        No size sees the text more often.
    copies_first : bool
        Sizes that are large enough copy random tokens first, see `sizes.COPYING`.
    """

    minutes: float
    batch_tokens: int = 512
    dropout: float = 0.0
    bfloat16: bool | None = None
    epochs: int | None = None
    copies_first: bool = True


# `small` is meant for 2 CPU cores, `full` for one H100.
BUDGETS = {
    "small": Budget(100.0),
    "full": Budget(
        40.0, batch_tokens=16_384, dropout=0.1, bfloat16=True, epochs=60, copies_first=False
    ),
}


def budget_of(text: str) -> Budget:
    """Return a preset, or the budget of a number of minutes.

    Raises
    ------
    ValueError
        If it is neither a preset nor a positive number.
    """
    if text in BUDGETS:
        return BUDGETS[text]
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0.0 < minutes < math.inf:
        presets = ", ".join(BUDGETS)
        raise ValueError(f"budget must be {presets} or a positive number, got {text!r}")
    return Budget(minutes)


def seconds_of(minutes: float, shares: Mapping[str, float], jobs: int = 1) -> dict[str, float]:
    """Divide a budget's training time by shares, which are taken relative to their sum.

    With several jobs at a time there is as many times the time to be divided, and none of the
    shares may take longer than the budget.
    """
    seconds = 60.0 * minutes * TRAINING_SHARE
    whole = sum(shares.values())
    return {name: seconds * min(1.0, jobs * share / whole) for name, share in shares.items()}


def lr_factor(progress: float, warmup: float, cooldown: float) -> float:
    """Return the learning rate as a part of its height.

    It rises linearly for the first ``warmup`` of the way, falls with the inverse square root of the
    way from there on (with N steps in all, that is ``sqrt(warmup_steps / step)``), and over the
    last ``cooldown`` of the way also linearly to 0.
    """
    if progress < warmup:
        return FIRST_FACTOR + (1.0 - FIRST_FACTOR) * progress / warmup
    falling = math.sqrt(warmup / progress)
    return falling * min(1.0, (1.0 - progress) / cooldown) if cooldown else falling


@dataclass
class Pace:
    """How far a training has come: by its steps, by the clock, or by the one that is further.

    Parameters
    ----------
    steps : int, optional
        Number of steps after which it ends.
    seconds : float, optional
        Time after which it ends, without that in which it did not run.
    used : float
        Seconds of earlier sessions.
    clock : callable
        Returns seconds.
    """

    steps: int | None = None
    seconds: float | None = None
    used: float = 0.0
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        """Check the limits and start the clock."""
        if self.steps is None and self.seconds is None:
            raise ValueError("a pace needs a number of steps, of seconds, or both; got neither")
        for name in ("steps", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self._begin = self.clock()

    def restart(self) -> None:
        """Start the clock anew: what this session used until now does not count."""
        self._begin = self.clock()

    def seconds_used(self) -> float:
        """Return the seconds of this session and the earlier ones."""
        return self.used + self.clock() - self._begin

    def progress(self, step: int) -> float:
        """Return the used part, in [0, 1], before step number ``step``."""
        by_steps = step / self.steps if self.steps is not None else 0.0
        by_clock = self.seconds_used() / self.seconds if self.seconds is not None else 0.0
        return min(1.0, max(by_steps, by_clock))
