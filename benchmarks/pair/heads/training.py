"""The training of heads and drafts: resumable, ended by steps or time, last weights averaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pair.seq2seq.schedule import Pace, lr_factor
from pair.seq2seq.training import CHECKPOINTS, Checkpoints, average_weights

Loss = Callable[[Any, Any], tuple[Tensor, Tensor]]
Optimizers = Callable[[Any], list[torch.optim.Optimizer]]


@dataclass(frozen=True)
class Options:
    """What the weights depend on beside the heads, the target and the number of steps."""

    target: str
    kind: str
    seed: int = 0
    batch_tokens: int = 1024
    peak_lr: float = 1e-3
    warmup: float = 0.05
    cooldown: float = 0.5
    clip_norm: float = 1.0
    details: str = ""  # what else the texts and the loss depend on


@dataclass
class Report:
    """How a training went: steps, seconds, and running means of what the loss is made of."""

    steps: int
    seconds: float
    parts: list[float]


def train(
    heads: nn.Module,
    rows: Callable[[int], Any],
    loss_of: Loss,
    pace: Pace,
    options: Options,
    folder: Path,
    on_step: Callable[[int], None] | None = None,
    optimizers: Optimizers | None = None,
) -> Report:
    """Train heads in place, from their last checkpoint where there is one; average the weights.

    A step is a function of the seed and its number alone: with a pace by steps an interrupted
    training ends with the weights of an uninterrupted one.

    Parameters
    ----------
    heads : torch.nn.Module
        Parameters that require no gradient stay as they are.
    rows : callable
        Of a step's number, what the target computes on its texts.
    loss_of : callable
        Of the heads and `Rows`, the loss and the parts of it that are reported.
    pace : Pace
        When it ends. What earlier sessions used of its time is added.
    options : Options
        Everything else.
    folder : Path
        For checkpoints; one of another training is refused with a ValueError.
    on_step : callable, optional
        Called with the number of every step that is done; what it raises ends the session.
    optimizers : callable, optional
        Makes the optimizers, each with its rate at its height. None: AdamW for all.

    Returns
    -------
    Report
        How it went.
    """
    shape = str(sorted(heads.config.to_diff_dict().items()))
    identity = {**asdict(options), "shape": shape, "steps": pace.steps, "seconds": pace.seconds}
    checkpoints = Checkpoints(folder, identity)
    learned = [parameter for parameter in heads.parameters() if parameter.requires_grad]
    if optimizers is None:
        used: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(learned, lr=options.peak_lr, betas=(0.9, 0.95), weight_decay=0.0)
        ]
    else:
        used = optimizers(heads)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in used]
    step, means, before = 0, None, 0.0
    if (state := checkpoints.load(learned[0].device)) is not None:
        heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(used, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, means, before = state["step"], state["means"], state["progress"]
        pace.used += state["seconds"]
    heads.train()
    with tqdm(
        total=CHECKPOINTS, initial=CHECKPOINTS * before, desc=options.kind, mininterval=5.0,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
    ) as bar:  # fmt: skip
        while before < 1.0:
            for optimizer, peak in zip(used, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * lr_factor(
                    before, options.warmup, options.cooldown
                )
            loss, parts = loss_of(heads, rows(step))
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"{options.kind}: the loss of step {step} is {loss}")
            loss.backward()
            nn.utils.clip_grad_norm_(learned, options.clip_norm)
            for optimizer in used:
                optimizer.step()
                optimizer.zero_grad()
            # A text may be too short for the last heads: they keep what they had.
            known = parts if means is None else torch.where(parts.isnan(), means, parts)
            means = known if means is None else torch.where(
                means.isnan(), known, 0.98 * means + 0.02 * known
            )  # fmt: skip
            step += 1
            after = pace.progress(step)
            if int(after * CHECKPOINTS) > int(before * CHECKPOINTS):
                state = {
                    "heads": heads.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in used],
                    "step": step,
                    "means": means,
                    "progress": after,
                    "seconds": pace.seconds_used(),
                }
                checkpoints.save(state, int(after * CHECKPOINTS), state["heads"])
            bar.update(CHECKPOINTS * (after - before))
            bar.set_postfix_str(f"step {step}, loss {loss.item():.3f}", refresh=False)
            before = after
            if on_step is not None:
                on_step(step)
    last = checkpoints.last_weights()
    heads.load_state_dict(average_weights(torch.load(path) for path in last))
    heads.eval()
    assert means is not None
    return Report(step, pace.seconds_used(), [round(mean, 4) for mean in means.tolist()])
