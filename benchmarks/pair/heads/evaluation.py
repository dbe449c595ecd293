"""What trained heads are worth: tokens a call of the target and time, beside plain decoding.

All ways continue the same texts, one text at a time and by turns, in an order drawn anew for each
text, so that a busy machine is fair to all. Greedy output under lossless rules is compared with
plain decoding; where two texts part, the target is asked again whether its two choices tie.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from bench_generate import PLAIN, by_turns, ratio_error
from contestants import Run, timed
from transformers import AutoModelForCausalLM

import specdec_ext
from pair.heads.sources import SHIPPED, Source, Trial
from specdec_ext.commands import check, fetch
from specdec_ext.commands.pair import Pair, Prompt, find_draft, find_pair
from specdec_ext.decoding import EagleDrafter, HeadsDrafter, StaticTree, Statistics
from specdec_ext.models.draft_llama import DraftLlama
from specdec_ext.models.eagle import EagleHead
from specdec_ext.models.heads import BlockwiseHeads, MedusaHeads

KINDS: dict[str, Any] = {"medusa": MedusaHeads, "blockwise": BlockwiseHeads, "eagle": EagleHead}
WIDTHS = (4, 2, 2)  # of the tree that is tried, as far as there are heads
OWN_GAMMA = 4  # of the shipped pair's draft
LOSSY = "typical"

Way = Callable[[Trial, int], Run]


def trained_heads(folder: Path) -> list[Path]:
    """Return where heads of a target lie that have been trained, ``<kind>-<K>``."""
    return sorted(
        path
        for path in folder.glob("*-*")
        if path.name.partition("-")[0] in KINDS and (path / "config.json").exists()
    )


def ways_of(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return how some heads are used: by name, what `generate` is given."""
    kind, _, length = folder.name.partition("-")
    heads = KINDS[kind].from_pretrained(folder, dtype=dtype).to(device).eval()
    drafter: Any = EagleDrafter(heads) if kind == "eagle" else HeadsDrafter(heads)
    gamma = int(length)
    tree = StaticTree.from_widths(WIDTHS[:gamma], "top_k")
    return {
        f"{folder.name}, chain": {"draft": drafter, "gamma": gamma},
        f"{folder.name}, tree": {"draft": drafter, "tree": tree, "rule": "target_only"},
        f"{folder.name}, {LOSSY}": {"draft": drafter, "gamma": gamma, "rule": LOSSY},
    }


def all_ways(source: Source, folders: Sequence[Path], target: str) -> dict[str, dict[str, Any]]:
    """Return every way to continue a text, plain decoding first."""
    device, dtype = source.target.device, source.target.dtype
    ways: dict[str, dict[str, Any]] = {PLAIN: {"draft": None}}
    if target == SHIPPED:
        draft = AutoModelForCausalLM.from_pretrained(find_pair() / "draft", dtype=torch.float32)
        ways["the pair's draft, chain"] = {"draft": draft.to(device).eval(), "gamma": OWN_GAMMA}
    if target in fetch.MODELS and fetch.MODELS[target].draft:
        draft = DraftLlama.from_pretrained(find_draft(target), dtype=dtype)
        ways["the draft that ships, chain"] = {"draft": draft.to(device).eval(), "gamma": OWN_GAMMA}
    for folder in folders:
        ways.update(ways_of(folder, device, dtype))
    return ways


def contestant(options: Mapping[str, Any], temperature: float, new_tokens: int) -> Way:
    """Continue a text in one of the ways."""
    draft, rest = options["draft"], {name: options[name] for name in options if name != "draft"}

    def run(trial: Trial, seed: int) -> Run:
        found, seconds = timed(
            lambda: specdec_ext.generate(
                trial.target, draft, trial.prompt, max_new_tokens=new_tokens,
                temperature=temperature, seeds=seed, **rest,
            ),
            trial.prompt.device,
        )  # fmt: skip
        new = found.sequences[:, trial.prompt.shape[1] :].tolist()
        return Run(new, seconds, found.statistics)

    return run


def verdicts(runs: Mapping[str, Sequence[Run]], trials: Sequence[Trial]) -> dict[str, list[str]]:
    """Say of each way's greedy texts whether they are plain decoding's."""
    found: dict[str, list[str]] = {}
    for name, own in runs.items():
        found[name] = []
        for trial, expected, run in zip(trials, runs[PLAIN], own, strict=True):
            pair = Pair(trial.target, None, None, [])
            prompt = Prompt(name, "", trial.prompt)
            finding = check.compare_tokens(
                pair, prompt, expected.tokens[0], run.tokens[0], 0.0, 0, name
            )
            found[name].append(finding.verdict)
    return found


def records_of(
    runs: Mapping[str, Sequence[Run]], temperature: float, judged: Mapping[str, list[str]]
) -> list[dict[str, Any]]:
    """Reduce the runs at a temperature to a record a way."""
    records = []
    for name, own in runs.items():
        kept: list[Statistics] = [run.statistics for run in own if run.statistics is not None]
        total = sum(kept[1:], kept[0])
        records.append({
            "draft": name,
            "temperature": temperature,
            "tokens_a_call": total.tokens_per_target_call,
            "accepted_of_tested": None if name == PLAIN else total.accepted_of_tested,
            "by_place": [round(rate, 3) for rate in total.conditional_acceptance[:6]],
            "milliseconds": 1e3 * sum(run.seconds for run in own) / len(own),
            "speed_up": sum(r.seconds for r in runs[PLAIN]) / sum(r.seconds for r in own),
            "standard_error": ratio_error(runs[PLAIN], own),
            "texts": len(own),
            "as_plain": judged[name].count(check.LOSSLESS) if name in judged else None,
            "ties": judged[name].count(check.PRECISION) if name in judged else None,
            "wrong": judged[name].count(check.BUG) if name in judged else None,
        })  # fmt: skip
    return records


def evaluate(source: Source, folders: Sequence[Path], given: Namespace) -> list[dict[str, Any]]:
    """Continue texts in every way, greedily and sampled; a record for each.

    Parameters
    ----------
    source : Source
        The target and its texts.
    folders : sequence of Path
        Of trained heads.
    given : argparse.Namespace
        ``target``, ``texts``, ``new_tokens`` and ``seed``.

    Returns
    -------
    list of dict
        By temperature and way: tokens a target call, share of tested tokens that were accepted,
        acceptance by place given that all before were accepted, milliseconds a text, speed against
        plain decoding with its standard error over the texts and, of greedy lossless ways, how
        many texts are plain decoding's, differ at a tie, or are wrong.
    """
    trials = source.trials(given.texts)
    ways = all_ways(source, folders, given.target)
    records = []
    for temperature in (0.0, 1.0):
        lossy = [name for name in ways if name.endswith(LOSSY)]
        tried = [name for name in ways if temperature > 0 or name not in lossy]
        playing = {name: contestant(ways[name], temperature, given.new_tokens) for name in tried}
        for way in playing.values():  # the first call of a way looks at the models
            way(trials[0], given.seed)
        runs = by_turns(playing, [(trial,) for trial in trials], given.seed)
        records += records_of(runs, temperature, {} if temperature else verdicts(runs, trials))
    return records


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Show the records."""
    header = ["draft", "T", "tokens a call", "accepted of tested", "by place, given those before"]
    header += ["ms a text", "speed-up", "greedy texts as plain, ties, wrong"]
    rows = []
    for record in records:
        accepted, error = record["accepted_of_tested"], record["standard_error"]
        judged = [record[name] for name in ("as_plain", "ties", "wrong")]
        rows.append([
            record["draft"],
            f"{record['temperature']:g}",
            f"{record['tokens_a_call']:.2f}",
            "" if accepted is None else f"{accepted:.2f}",
            " ".join(f"{rate:.2f}" for rate in record["by_place"]),
            f"{record['milliseconds']:.0f}",
            f"{record['speed_up']:.2f}" + ("" if error is None else f" ({error:.2f})"),
            "" if judged[0] is None else ", ".join(map(str, judged)),
        ])  # fmt: skip
    return common.markdown_table(header, rows)
