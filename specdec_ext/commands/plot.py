"""Plot the papers' figures: curves from `specdec_ext.theory`, and a trace of recorded runs.

leviathan-2 to -5 are figures 2 to 5 of Leviathan et al., arXiv 2211.17192; report-1 and -2 those of
Tulsian, Goyal and Aggarwal. The trace runs a pair of models on this machine's CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .. import theory
from .frame import (
    add_json_argument,
    add_pair_arguments,
    command,
    print_json,
)
from .pair import load_named

__all__ = ["CHARTS", "Call", "Chart", "Curve", "Trace", "add_arguments", "record", "run"]

TRACE = "leviathan-5"
TRACED_GAMMAS = (7, 3, 0)
GAMMAS = (1, 3, 5, 7, 10)
COLOURS = {"target": "tab:purple", "draft": "tab:cyan"}
COSTS = (0.01, 0.02, 0.05, 0.1)
ALPHAS = [i / 200 for i in range(201)]
BELOW_1 = [alpha for alpha in ALPHAS if alpha <= 0.95]  # the best gamma at 1 is infinite


class Curve(NamedTuple):
    """One line of a chart.

    Attributes
    ----------
    label : str
        What the legend calls it.
    x, y : list of float
        Its points.
    dashed : bool
        Drawn so; of the same colour as the curve before it.
    """

    label: str
    x: list[float]
    y: list[float]
    dashed: bool = False


class Chart(NamedTuple):
    """The data behind one figure.

    Attributes
    ----------
    title, x_label, y_label : str
        What is written beside it.
    curves : list of Curve
        The lines.
    """

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]


class Call(NamedTuple):
    """One call of a model in a recorded run.

    Attributes
    ----------
    model : str
        "target" or "draft".
    prefill : bool
        Whether it took in the prompt.
    begin, end : float
        Seconds from the begin of the run's first call.
    """

    model: str
    prefill: bool
    begin: float
    end: float


class Trace(NamedTuple):
    """A recorded run.

    Attributes
    ----------
    gamma : int
        Draft tokens a round; 0: plain decoding.
    tokens : int
        New tokens.
    calls : list of Call
        In order of time.
    """

    gamma: int
    tokens: int
    calls: list[Call]


# --- the data ---------------------------------------------------------------------------------


def _curve(
    label: str, x: list[float], value: Callable[[float], float], dashed: bool = False
) -> Curve:
    return Curve(label, x, [value(point) for point in x], dashed)


def expected_tokens() -> Chart:
    """Plot equation 1 by alpha, for some gamma; none passes the oracle."""
    curves = [
        _curve(f"γ = {gamma}", ALPHAS, partial(theory.expected_tokens, gamma=gamma))
        for gamma in GAMMAS
    ]
    below = [alpha for alpha in ALPHAS if theory.oracle_tokens(alpha) <= 11]
    oracle = _curve("γ = ∞", below, theory.oracle_tokens)
    return Chart("Expected tokens a round", "α", "tokens a round", [*curves, oracle])


def optimal_gamma() -> Chart:
    """Plot the whole gamma of the largest walltime factor by alpha, for some c."""
    curves = [_curve(f"c = {c}", BELOW_1, partial(theory.optimal_gamma, c=c)) for c in COSTS]
    return Chart("Optimal γ", "α", "γ", curves)


def speed_and_operations() -> Chart:
    """Plot walltime and operations by alpha where a draft costs nothing, for some gamma."""
    curves = []
    for gamma in GAMMAS:
        factors = (
            ("speed", partial(theory.walltime_factor, gamma=gamma, c=0.0)),
            ("operations", partial(theory.operations_factor, gamma=gamma)),
        )
        curves += [
            _curve(f"{name}, γ = {gamma}", ALPHAS, value, dashed=name == "operations")
            for name, value in factors
        ]
    return Chart("Speed and operations against plain decoding, c = 0", "α", "factor", curves)


def walltime() -> Chart:
    """Plot the wall-time equation by gamma; alpha and c are ours, the report names none."""
    gammas = [i / 10 for i in range(201)]
    curves = [
        _curve(f"α = {alpha}", gammas, partial(theory.walltime_factor, alpha, c=0.05))
        for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)
    ]
    return Chart("Wall-time improvement, c = 0.05", "γ", "factor", curves)


def optimal_gamma_real() -> Chart:
    """Plot the gamma where gradient ascent ends, a real number, by alpha, for some c."""
    curves = [_curve(f"c = {c}", BELOW_1, partial(theory.optimal_gamma_real, c=c)) for c in COSTS]
    return Chart("Optimal γ over the reals", "α", "γ", curves)


CHARTS: dict[str, Callable[[], Chart]] = {
    "leviathan-2": expected_tokens,
    "leviathan-3": optimal_gamma,
    "leviathan-4": speed_and_operations,
    "report-1": walltime,
    "report-2": optimal_gamma_real,
}


FIGURES = sorted((*CHARTS, TRACE))


def record(target: Any, draft: Any, input_ids: Tensor, gamma: int, tokens: int) -> Trace:
    """Generate greedily and note when each model was called.

    Parameters
    ----------
    target, draft : torch.nn.Module
        As for `specdec_ext.generate`, on the CPU: a device would return from calls early.
    input_ids : Tensor
        ``[1, P]``, the prompt.
    gamma : int
        Draft tokens a round; 0: plain decoding.
    tokens : int
        New tokens.

    Returns
    -------
    Trace
    """
    from ..decoding import generate

    calls: list[Call] = []
    begun = 0.0

    def watch(name: str, model: Any) -> list[Any]:
        def before(*_: Any) -> None:
            nonlocal begun
            begun = time.perf_counter()

        def after(
            *_: Any,
        ) -> None:  # not where a call failed: a generation may try what a model can
            prefill = input_ids.shape[1] > 1 and all(call.model != name for call in calls)
            calls.append(Call(name, prefill, begun, time.perf_counter()))

        return [model.register_forward_pre_hook(before), model.register_forward_hook(after)]

    hooks = watch("target", target) + watch("draft", draft)
    try:
        generate(
            target,
            draft if gamma else None,
            input_ids,
            gamma=gamma,
            max_new_tokens=tokens,
            eos_token_id=(),
        )
    finally:
        for hook in hooks:
            hook.remove()
    start = calls[0].begin
    since = [call._replace(begin=call.begin - start, end=call.end - start) for call in calls]
    return Trace(gamma, tokens, since)


def record_pair(args: argparse.Namespace) -> list[Trace]:
    """Record the pair that the command line names with `TRACED_GAMMAS`, after a run to warm up."""
    pair, prompts = load_named(args)
    models = pair.target, pair.draft, prompts[0].ids
    record(*models, gamma=max(TRACED_GAMMAS), tokens=args.tokens)
    return [record(*models, gamma=gamma, tokens=args.tokens) for gamma in TRACED_GAMMAS]


# --- the pages --------------------------------------------------------------------------------


def draw_chart(axes: Any, chart: Chart) -> None:
    """Draw curves; a dashed one takes the colour of the one before it."""
    colour = None
    for curve in chart.curves:
        if curve.dashed and colour is not None:
            axes.plot(curve.x, curve.y, "--", label=curve.label, color=colour)
        else:
            colour = axes.plot(curve.x, curve.y, label=curve.label)[0].get_color()
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_traces(axes: Any, traces: Sequence[Trace]) -> None:
    """Draw one row a run: a bar for every call, those on the prompt hatched."""
    for row, trace in enumerate(reversed(traces)):
        for model, colour in COLOURS.items():
            for prefill in (True, False):
                bars = [
                    (1e3 * call.begin, 1e3 * (call.end - call.begin))
                    for call in trace.calls
                    if (call.model, call.prefill) == (model, prefill)
                ]
                axes.broken_barh(
                    bars,
                    (row - 0.35, 0.7),
                    facecolor=colour,
                    edgecolor="white",
                    linewidth=0.15,
                    hatch="////" if prefill else None,
                    label=f"{model}{', on the prompt' if prefill else ''}" if row == 0 else None,
                )
    labels = [f"γ = {trace.gamma}" if trace.gamma else "plain" for trace in reversed(traces)]
    axes.set_yticks(range(len(traces)), labels)
    axes.set(title=f"{traces[0].tokens} greedy tokens", xlabel="milliseconds")
    axes.legend(fontsize="small")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m specdec_ext plot``."""
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(FIGURES)} (default: all)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("."), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--format", choices=("png", "svg", "pdf"), default="png", help="(default: %(default)s)"
    )
    add_pair_arguments(parser, purpose="of the trace: ")
    parser.set_defaults(device="cpu", prompt=None)  # a device would return from calls early
    parser.add_argument(
        "--tokens", type=int, default=40, metavar="N", help="of the trace (default: %(default)s)"
    )
    add_json_argument(parser, "print the data behind the figures instead; needs no matplotlib")


@command("plot")
def run(args: argparse.Namespace) -> int:
    """Draw the figures, or print their data."""
    names = args.figures or FIGURES
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise ValueError(f"no figure {unknown[0]}; there are {', '.join(FIGURES)}")
    if args.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {args.tokens}")
    if args.json:
        print_json({name: _plain(_data(name, args)) for name in names}, indent=None)
        return 0
    empty_figure = _figure_class()
    args.output.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = args.output / f"{name}.{args.format}"
        _draw(empty_figure, _data(name, args)).savefig(path, dpi=150)
        print(path)
    return 0


def _data(name: str, args: argparse.Namespace) -> Chart | list[Trace]:
    return record_pair(args) if name == TRACE else CHARTS[name]()


def _plain(data: Any) -> Any:
    """Return named tuples as objects of JSON."""
    if hasattr(data, "_asdict"):
        return {name: _plain(value) for name, value in data._asdict().items()}
    return [_plain(value) for value in data] if isinstance(data, list) else data


def _figure_class() -> Any:
    """Return the class of matplotlib's figures, which needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "needs matplotlib: pip install 'specdec_ext[plot]' (--json does without)"
        ) from error
    return Figure


def _draw(empty_figure: Any, data: Chart | list[Trace]) -> Any:
    """Return a figure of curves or traces."""
    if isinstance(data, Chart):
        figure = empty_figure(figsize=(6.4, 4.4), layout="constrained")
        draw_chart(figure.add_subplot(), data)
    else:
        figure = empty_figure(figsize=(10, 3), layout="constrained")
        draw_traces(figure.add_subplot(), data)
    return figure
