"""Predict accepted lengths and speed-ups from saved logits, without running the loop.

The file is what ``torch.save`` makes of a dictionary with ``target_logits`` [B, G+1, V],
``draft_tokens`` [B, G] and ``draft_logits`` [B, G, Vd]: B chains as `specdec_ext.verify` takes
them, drawn from the draft under the same temperature and filters. Without ``draft_logits`` the
tokens count as deterministic. Every rule is run on the first gamma columns; coins are integrated
out (`specdec_ext.theory.accepted_length`), so that the only noise is that of the chains. A round
costs gamma c + 1 target calls: "speed" is tokens a call over that, and the "i.i.d." column is what
theorem 8 makes of the mean acceptance rate alone. Rules that are not lossless say so.
"""

from __future__ import annotations

import argparse
import math
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import theory
from ..contract import rule_names
from ..decoding.checks import integer, number_in
from .frame import add_json_argument, check_temperature, command, print_json

#: Rules whose accept_probs coins can be integrated out of. In a race none stand for the noise, and
#: "greedy" is T = 0.
RULES = tuple(rule for rule in rule_names(chains=True, races=False) if rule != "greedy")
NOT_LOSSLESS = rule_names(lossless=False)


class Chains(NamedTuple):
    """What was saved."""

    target_logits: Tensor  # [B, G+1, V]
    draft_tokens: Tensor  # [B, G]
    draft_logits: Tensor | None  # [B, G, Vd]

    def first(self, gamma: int) -> Chains:
        """Give the same chains, cut to their first columns."""
        draft = self.draft_logits
        return Chains(
            self.target_logits[:, : gamma + 1],
            self.draft_tokens[:, :gamma],
            None if draft is None else draft[:, :gamma],
        )


class Prediction(NamedTuple):
    """One rule at one gamma and cost.

    Attributes
    ----------
    rule, gamma, c
        Of what.
    tokens : theory.Estimate
        Tokens a target call, the last one included.
    speed : float
        Tokens a call over gamma c + 1: times faster than plain decoding.
    iid : float or None
        What theorem 8 says at the mean acceptance rate; None without draft logits.
    """

    rule: str
    gamma: int
    c: float
    tokens: theory.Estimate
    speed: float
    iid: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m specdec_ext simulate``."""
    parser.add_argument("file", type=Path, help="what torch.save wrote")
    parser.add_argument(
        "--rule",
        nargs="+",
        choices=RULES,
        default=["block", "token"],
        help="(default: block token)",
    )
    parser.add_argument(
        "--gamma",
        type=int,
        nargs="+",
        help="draft tokens a round (default: 1 to all of the file's)",
    )
    parser.add_argument(
        "--cost", type=float, nargs="+", default=[0.0, 0.05, 0.2],
        help="c, a draft call's time in target calls (default: 0 0.05 0.2)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--lenience", type=float, default=1.0, help="of lenient")
    add_json_argument(parser)


@command("simulate")
def run(args: argparse.Namespace) -> int:
    """Run the simulation."""
    filters = _filters(args)
    chains = load(args.file)
    predictions = simulate(
        chains,
        rules=args.rule,
        gammas=args.gamma or range(1, chains.draft_tokens.shape[1] + 1),
        costs=args.cost,
        lenience=number_in("--lenience", args.lenience, 0, 1),
        **filters,
    )
    if args.json:
        print_json([_plain(p) for p in predictions])
    else:
        print(table(predictions))
    return 0


def _filters(args: argparse.Namespace) -> dict[str, float]:
    """Return the sampling parameters that were given, checked."""
    filters: dict[str, float] = {"temperature": check_temperature(args.temperature)}
    if args.top_k is not None:
        filters["top_k"] = integer("--top-k", args.top_k)
    if args.top_p is not None:
        filters["top_p"] = number_in("--top-p", args.top_p, 0)
    if args.min_p is not None:
        filters["min_p"] = number_in("--min-p", args.min_p, 0, 1)
    return filters


def load(path: Path) -> Chains:
    """Read chains that ``torch.save`` wrote.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Chains

    Raises
    ------
    OSError
        It cannot be opened.
    ValueError
        It is a file of another kind or holds something else, shapes that do not go together, or
        draft tokens that are no ids.
    """
    saved = _read(path)
    needed = ("target_logits", "draft_tokens")
    if not isinstance(saved, dict) or not all(isinstance(saved.get(n), Tensor) for n in needed):
        found = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"{path} must hold a dict with target_logits and draft_tokens, got {found}"
        )
    draft = saved.get("draft_logits")
    if not (draft is None or isinstance(draft, Tensor)):
        raise ValueError(f"{path} must hold draft_logits [B, G, Vd], got {type(draft).__name__}")
    chains = Chains(saved["target_logits"], saved["draft_tokens"], draft)
    _check(path, chains)
    return chains


def _read(path: Path) -> Any:
    """Return what ``torch.save`` wrote."""
    with open(path, "rb") as file:
        begin = file.read(6)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of what it then refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what is no such file brings errors of all kinds
        kind = "an empty file" if not begin else "something else"
        if begin == b"\x93NUMPY" or _is_numpy_archive(path):
            kind = "a NumPy file"
        raise ValueError(
            f"{path} must be a file of tensors that torch.save wrote, got {kind}"
        ) from error


def _is_numpy_archive(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(".npy") for name in archive.namelist())


def _check(path: Path, chains: Chains) -> None:
    """Refuse tensors that are no chains."""
    held = [t for t in chains if t is not None]
    odd = next((t for t in held if t.layout != torch.strided or t.is_meta), None)
    if odd is not None:
        kind = "a meta tensor" if odd.is_meta else str(odd.layout).removeprefix("torch.")
        raise ValueError(f"{path} must hold dense tensors, got {kind}")
    target, tokens, draft = chains
    shapes = [None if t is None else list(t.shape) for t in chains]
    fits = tokens.dim() == 2 and target.dim() == 3 and all(t.numel() for t in held)
    fits = fits and target.shape[:2] == (tokens.shape[0], tokens.shape[1] + 1)
    fits = fits and (draft is None or (draft.dim() == 3 and draft.shape[:2] == tokens.shape))
    if not fits:
        raise ValueError(f"{path} must hold [B, G+1, V], [B, G] and [B, G, Vd], got {shapes}")
    if tokens.dtype not in (torch.int32, torch.int64):
        kind = str(tokens.dtype).removeprefix("torch.")
        raise ValueError(f"{path} must hold draft_tokens of int32 or int64, got {kind}")
    vocabulary = max(target.shape[2], 0 if draft is None else draft.shape[2])
    outside = tokens[(tokens < -1) | (tokens >= vocabulary)]
    if outside.numel():
        raise ValueError(
            f"{path} must hold draft_tokens under {vocabulary}, or -1 behind a draft's end, got "
            f"{outside[0].item()}"
        )


def simulate(
    chains: Chains,
    *,
    rules: Sequence[str] = ("block", "token"),
    gammas: Sequence[int],
    costs: Sequence[float] = (0.0,),
    lenience: float = 1.0,
    **filters: Any,
) -> list[Prediction]:
    """Predict tokens a call and speed-ups.

    Parameters
    ----------
    chains : Chains
        What to run the rules on.
    rules, gammas, costs : sequence
        What to combine.
    lenience : float
        Of the rule "lenient".
    **filters
        Numbers, as for `specdec_ext.verify`.

    Returns
    -------
    list of Prediction

    Raises
    ------
    ValueError
        A gamma that the chains do not have, a negative cost, or what `specdec_ext.verify` raises.

    Examples
    --------
    >>> import torch
    >>> p, q = torch.tensor([0.3, 0.7]).log(), torch.tensor([0.8, 0.2]).log()
    >>> chains = Chains(p.expand(5, 2, 2), torch.tensor([[0]] * 4 + [[1]]), q.expand(5, 1, 2))
    >>> [p] = simulate(chains, rules=["token"], gammas=[1], costs=[0.5])
    >>> round(p.tokens.mean, 4), round(p.speed, 4), round(p.iid, 4)
    (1.5, 1.0, 1.0)
    """
    longest = chains.draft_tokens.shape[1]
    for gamma in gammas:
        if not 1 <= gamma <= longest:
            raise ValueError(f"gamma must be in [1, {longest}], what the chains have; got {gamma}")
    if any(not 0 <= c < math.inf for c in costs):
        raise ValueError(f"costs must be finite and at least 0, got {list(costs)}")
    alpha = None
    if chains.draft_logits is not None:
        first = (chains.target_logits[:, :-1], chains.draft_logits)
        alpha = theory.acceptance_rate([first], **filters).mean
    found = []
    for rule in rules:
        options = {"lenience": lenience} if rule == "lenient" else {}
        for gamma in gammas:
            accepted = theory.accepted_length([chains.first(gamma)], rule, **options, **filters)
            tokens = accepted._replace(mean=1.0 + accepted.mean)
            for c in costs:
                iid = None if alpha is None else theory.walltime_factor(alpha, gamma, c)
                speed = tokens.mean / (gamma * c + 1.0)
                found.append(Prediction(rule, gamma, c, tokens, speed, iid))
    return found


def table(predictions: Sequence[Prediction]) -> str:
    """Format predictions: a line a rule and gamma, a pair of columns a cost."""
    costs = list(dict.fromkeys(p.c for p in predictions))
    lines = [
        f"{'rule':22} {'gamma':>5} {'tokens a call (se)':>19}"
        + "".join(f"{f'speed, c = {c:g}':>16} {'(i.i.d.)':>8}" for c in costs)
    ]
    of: dict[tuple[str, int], dict[float, Prediction]] = {}
    for p in predictions:
        of.setdefault((p.rule, p.gamma), {})[p.c] = p
    for (rule, gamma), by_cost in of.items():
        name = f"{rule} (not lossless)" if rule in NOT_LOSSLESS else rule
        tokens = next(iter(by_cost.values())).tokens
        line = f"{name:22} {gamma:5} {tokens.mean:10.3f} ({tokens.standard_error:.3f})"
        for c in costs:
            iid = by_cost[c].iid
            line += f"{by_cost[c].speed:15.2f}x " + (" " * 8 if iid is None else f"{iid:7.2f}x")
        lines.append(line)
    for c in costs:
        lossless = [p for p in predictions if p.c == c and p.rule not in NOT_LOSSLESS]
        if lossless:
            best = max(lossless, key=lambda p: p.speed)
            lines.append(
                f"c = {c:g}: best lossless is {best.rule}, gamma {best.gamma}: {best.speed:.2f}x"
            )
    return "\n".join(lines)


def _plain(prediction: Prediction) -> dict[str, Any]:
    return prediction._asdict() | {"tokens": prediction.tokens._asdict()}
