"""Trees against chains on the pair shipped here: tokens a target call at equal budgets.

    python benchmarks/bench_trees.py             # 512 contexts, T in {0, 0.6, 1}, budgets 8, 28, 64
    python benchmarks/bench_trees.py --quick     # does it run?
    python benchmarks/bench_trees.py --times     # the operator's times instead: tree_times.py

A context is a window of text that neither model has seen, continued by the target at the same
temperature; every context is a unit of its own. On it a tree is drafted, the target runs all nodes,
and the expected number of accepted tokens, given what was drafted, is computed from the operator's
acceptance probabilities: no coin adds noise, and all rules of a shape verify the same drafts. Only
``coupled``, which has no coins, is counted as it comes out. Before it is used, what the operator
says is compared with the float64 reference on the first contexts of every setting.

The shapes that compete at a budget (draft tokens, the root not counted) are searched for on
contexts that are not used again: Sequoia's programme on measured acceptance by rank, with and
without a cap on the depth, the same behind a trunk (delayed branching), and trees grown by value.
*d* is how often the draft is called: the depth.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import specdec_ext
from specdec_ext import ops, reference, theory
from specdec_ext.commands.pair import Pair, load_pair
from specdec_ext.contract import rule_names
from specdec_ext.decoding import GrownTree, StaticTree, sequoia_tree
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters import Requests
from specdec_ext.decoding.drafters.tree import TreeDrafter, tree_view
from specdec_ext.decoding.trees import TreeDraft
from specdec_ext.testing import TreeCase, assert_trees_match, post_order

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402

WINDOW, CONTINUED = 48, 16  # tokens of a context
CHECKED = 2  # contexts of every setting that the reference looks at, too
#: Above every acceptance probability but 1: rejects what can be rejected.
REJECTING = 1 - 2.0**-53
STEPWISE = rule_names(trees=True, takes_coins=True, stepwise=True)

Tree = StaticTree | GrownTree


class Method(NamedTuple):
    """A line of a table."""

    name: str
    tree: Tree
    rule: str = "traversal"

    @property
    def budget(self) -> int:
        """Draft tokens."""
        nodes = self.tree.nodes if isinstance(self.tree, GrownTree) else len(self.tree.parents)
        return nodes - 1


# ---- contexts ------------------------------------------------------------------------------------


def held_out_windows(pair: Pair) -> Tensor:
    """Cut the modules that the models have never seen into windows ``[W, WINDOW]``, shuffled."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / f"{name}.py" for name in pair.held_out]
    ids = [
        pair.tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        for path in paths
        if path.is_file()
    ]
    tokens = torch.tensor([token for text in ids for token in text])
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW).clone()
    windows[:, 0] = pair.tokenizer.bos_token_id
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order]


class Context:
    """Contexts ``[B, P]`` of one length, and the target that has read them."""

    def __init__(self, pair: Pair, windows: Tensor, temperature: float, seed: int) -> None:
        batch = len(windows)
        self.pair, self.temperature = pair, temperature
        self.seeds = seed + torch.arange(batch)
        self.ids = specdec_ext.generate(
            pair.target, pair.draft, windows, max_new_tokens=CONTINUED,
            temperature=temperature, seeds=self.seeds, eos_token_id=(),
        ).sequences  # fmt: skip
        self.positions = torch.full((batch,), self.ids.shape[1])
        self.ends = self.positions + 1024  # no draft reaches it
        self.sampling = {"temperature": torch.full((batch,), temperature)}
        self.target = CachedModel(pair.target, self.ends, room=self.ids.shape[1] + 128)
        self.target.prefill(self.ids[:, :-1], None)

    def draft(self, tree: Tree, *, coupled: bool) -> TreeDraft:
        """Draft a tree on every context."""
        drafter = TreeDrafter(self.pair.draft)
        drafter.start(
            Requests(
                self.ids, None, self.ends, self.ids.shape[1] + 128, self.seeds, self.sampling,
                greedy=self.temperature == 0, needs_law=True, coupled=coupled, tree=tree,
            )
        )  # fmt: skip
        return drafter.propose_tree(self.positions)

    def score(self, draft: TreeDraft) -> Tensor:
        """Run the target on every node, ``[B, N, V]``; its cache stays as it was."""
        batch, nodes = draft.tokens.shape
        seen, depths = tree_view(draft.parents)
        self.target.begin_tree()
        logits = self.target.forward_nodes(draft.tokens, seen, depths)
        self.target.rollback(Counts.full(batch, nodes, logits.device))
        return logits


def contexts(
    pair: Pair, windows: Tensor, temperature: float, options: argparse.Namespace
) -> list[Context]:
    """Continue windows, some at a time."""
    return [
        Context(pair, some, temperature, options.seed + number * options.batch)
        for number, some in enumerate(windows.split(options.batch))
    ]


# ---- expected numbers of accepted tokens ---------------------------------------------------------


def checked(inputs: dict[str, Any]) -> ops.VerifyTreeResult:
    """Call the operator, and compare its first requests with the reference."""
    found = specdec_ext.verify_tree(**inputs)
    case = TreeCase(inputs, "bench_trees").select(range(min(CHECKED, len(inputs["tokens"]))))
    first = ops.VerifyTreeResult(*(output[: case.batch] for output in found))
    assert_trees_match(first, case.run(reference.verify_tree), case)
    return found


def inputs_of(context: Context, draft: TreeDraft, logits: Tensor, rule: str) -> dict[str, Any]:
    """Give the operator's arguments."""
    batch, nodes = draft.tokens.shape
    inputs = dict(
        target_logits=logits, tokens=draft.tokens, parents=draft.parents, kinds=draft.kinds,
        rule=rule, **context.sampling,
    )  # fmt: skip
    if draft.logits is not None:
        inputs |= {"draft_logits": draft.logits, "children_rows": draft.children_rows}
    if rule in rule_names(races=True):
        return inputs | {"seeds": context.seeds, "positions": context.positions}
    return inputs | {"uniforms": torch.full((batch, nodes), 0.5, dtype=torch.float64)}


def traversed(context: Context, draft: TreeDraft, logits: Tensor) -> Tensor:
    """Expected accepted tokens ``[B]`` under traversal: depths of the first coin in post-order."""
    found = checked(inputs_of(context, draft, logits, "traversal"))
    h = found.accept_probs.double().nan_to_num(nan=0.0)
    means = torch.zeros(len(h), dtype=torch.float64)
    rows = draft.parents.tolist()
    all_alike = all(row == rows[0] for row in rows)
    groups = [(rows[0], slice(None))] if all_alike else [(row, [b]) for b, row in enumerate(rows)]
    for parents, which in groups:
        nothing_yet = torch.ones_like(means[which])
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        for v in post_order(parents)[:-1]:  # the root, which is last, accepts nothing
            means[which] += depths[v] * nothing_yet * h[which, v]
            nothing_yet = nothing_yet * (1.0 - h[which, v])
    return means


class Reached(NamedTuple):
    """Probabilities ``[B, N]`` that a stepwise rule comes to each node, and ranks, by node."""

    reached: Tensor
    ranks: list[int]


def reach(
    context: Context, draft: TreeDraft, logits: Tensor, tree: StaticTree, rule: str
) -> Reached:
    """Follow a stepwise rule through all that its coins can decide.

    What happens at a node does not depend on how the rule came there, so every node with children
    is given to the operator as a tree of its own, with coins that reject: then all are seen.
    """
    batch = len(draft.tokens)
    inputs = inputs_of(context, draft, logits, rule)
    accepted = torch.zeros(draft.tokens.shape, dtype=torch.float64)
    by_width: dict[int, list[int]] = {}
    for v in range(len(tree.parents)):
        if width := len(tree.children_of(v)):
            by_width.setdefault(width, []).append(v)
    for width, nodes in by_width.items():
        columns = torch.tensor([[v, *tree.children_of(v)] for v in nodes])
        count = batch * len(nodes)
        star = dict(
            inputs,
            tokens=draft.tokens[:, columns].reshape(count, -1),
            parents=torch.tensor([-1] + [0] * width).expand(count, -1),
            kinds=draft.kinds[:, columns].reshape(count, -1),
            target_logits=logits[:, nodes].reshape(count, 1, -1).expand(-1, 1 + width, -1),
            temperature=context.sampling["temperature"].repeat_interleave(len(nodes)),
            uniforms=torch.full((count, 1 + width), REJECTING, dtype=torch.float64),
        )
        if draft.logits is not None:
            star["draft_logits"] = draft.logits[:, nodes].reshape(count, 1, -1)
            star["children_rows"] = torch.tensor([0] + [-1] * width).expand(count, -1)
        found = checked(star).accept_probs[:, 1:].double().nan_to_num(nan=0.0)
        accepted[:, columns[:, 1:].reshape(-1)] = found.reshape(batch, -1)
    reached = torch.zeros_like(accepted)
    reached[:, 0] = 1.0
    ranks = [0] * len(tree.parents)
    for v in range(len(tree.parents)):
        left = reached[:, v].clone()
        for rank, c in enumerate(tree.children_of(v)):
            ranks[c] = rank
            reached[:, c] = left * accepted[:, c]
            left -= reached[:, c]
    return Reached(reached, ranks)


def expected_accepted(context: Context, methods: Sequence[Method]) -> list[Tensor]:
    """Expected accepted tokens ``[B]`` of each of some methods that share one tree."""
    tree = methods[0].tree
    draft = context.draft(tree, coupled=tree.children == "coupled")
    logits = context.score(draft)
    means = []
    for method in methods:
        if method.rule == "traversal":
            means.append(traversed(context, draft, logits))
        elif method.rule in STEPWISE and isinstance(tree, StaticTree):
            means.append(reach(context, draft, logits, tree, method.rule).reached[:, 1:].sum(1))
        else:
            counted = specdec_ext.verify_tree(**inputs_of(context, draft, logits, method.rule))
            means.append(counted.num_accepted.double())
    return means


def evaluate(some: Sequence[Context], methods: Sequence[Method]) -> dict[Method, Tensor]:
    """Tokens a target call of every method, ``[contexts]`` each."""
    by_tree: dict[Tree, list[Method]] = {}
    for method in methods:
        by_tree.setdefault(method.tree, []).append(method)
    found: dict[Method, list[Tensor]] = {method: [] for method in methods}
    for alike in by_tree.values():
        for context in some:
            for method, mean in zip(alike, expected_accepted(context, alike), strict=True):
                found[method].append(1.0 + mean)
    return {method: torch.cat(parts) for method, parts in found.items()}


def mean_of(tokens: Tensor) -> theory.Estimate:
    """Mean over contexts."""
    return theory.ratio(tokens, torch.ones(len(tokens)))


# ---- shapes --------------------------------------------------------------------------------------


def chain(length: int) -> StaticTree:
    """Give a chain: what the block rule of `specdec_ext.verify` verifies."""
    return StaticTree.from_widths((1,) * length, "iid")


def behind_trunk(trunk: int, tree: StaticTree) -> StaticTree:
    """Put a tree behind a chain: delayed branching."""
    parents = (-1, *range(trunk), *(parent + trunk for parent in tree.parents[1:]))
    return StaticTree(parents, tree.children)


def rates_by_rank(some: Sequence[Context], children: str) -> list[float]:
    """Measure how often each child of a node is the one that a stepwise rule goes on to."""
    tree = StaticTree.from_widths((8, 4, 1, 1), children)
    wins, trials = [0.0] * 8, [0.0] * 8
    for context in some:
        draft = context.draft(tree, coupled=False)
        found = reach(context, draft, context.score(draft), tree, "recursive")
        come = found.reached.sum(0).tolist()
        for v, parent in enumerate(tree.parents):
            if parent >= 0:
                wins[found.ranks[v]] += come[v]
                trials[found.ranks[v]] += come[parent]
    return [w / t if t else 0.0 for w, t in zip(wins, trials, strict=True)]


def candidates(budget: int, rates: Mapping[str, Sequence[float]]) -> Iterator[Method]:
    """List the shapes that compete at a budget."""
    for children, rate in rates.items():
        for cap in (3, 4, 6, 8, 12, None):
            tree = sequoia_tree(rate, budget + 1, cap, children)
            yield Method(f"sequoia, {children}", tree)
        for trunk in (1, 2, 3, 4, 6):
            if trunk < budget - 2:
                tail = sequoia_tree(rate, budget + 1 - trunk, None, children)
                yield Method(f"trunk {trunk} + sequoia, {children}", behind_trunk(trunk, tail))
    for depth in (4, 6, 8, 12):
        if depth <= budget:
            yield Method("grown by value, top_k", GrownTree(budget + 1, depth))


def kinds_at(temperature: float) -> tuple[str, ...]:
    """Which ways of drawing children differ at a temperature."""
    return ("without_replacement", "iid", "rest", "top_k") if temperature else ("top_k",)


def search(
    some: Sequence[Context], budget: int, rates: Mapping[str, Sequence[float]]
) -> list[Method]:
    """Find the best shape of each kind of children, best first."""
    branching = (m for m in candidates(budget, rates) if m.tree.depth < budget)
    distinct = {method.tree: method for method in branching}
    found = evaluate(some, list(distinct.values()))
    ranked = sorted(found, key=lambda method: float(found[method].mean()), reverse=True)
    best: dict[str, Method] = {}
    for method in ranked:
        best.setdefault(method.name.rpartition(", ")[2], method)
    grown = next((m for m in ranked if isinstance(m.tree, GrownTree)), None)
    chosen = [*best.values()]
    return chosen + [grown] * (grown is not None and grown not in chosen)


def fixed_methods(temperature: float) -> list[Method]:
    """One bushy and one delayed shape of depth 4 under every rule, and chains."""
    shapes = {"(4, 2, 1, 1)": (4, 2, 1, 1), "delayed (1, 1, 4, 2)": (1, 1, 4, 2)}
    methods = [Method("chain", chain(n)) for n in (4, 8)]
    for name, widths in shapes.items():
        for children in kinds_at(temperature):
            tree = StaticTree.from_widths(widths, children)
            rules = ("traversal", *STEPWISE) if temperature else ("traversal",)
            methods += [Method(f"{name}, {children}", tree, rule) for rule in rules]
        if temperature:
            tree = StaticTree.from_widths(widths, "coupled")
            methods.append(Method(f"{name}, coupled", tree, "coupled"))
    return methods


# ---- results -------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A method on fresh contexts, beside the chains of its budget and of its depth."""

    temperature: float
    method: Method
    tokens: theory.Estimate
    over_budget: theory.Estimate  # over the chain of as many draft tokens, same contexts
    over_depth: theory.Estimate  # over the chain of as many draft calls

    def record(self) -> dict[str, Any]:
        tree = self.method.tree
        shape = {"nodes": tree.nodes, "beam": tree.beam} if isinstance(tree, GrownTree) else {}
        return {
            "temperature": self.temperature,
            "shape": self.method.name,
            "rule": self.method.rule,
            "draft_tokens": self.method.budget,
            "depth": tree.depth,
            "contexts": self.tokens.units,
            "parents": list(tree.parents) if isinstance(tree, StaticTree) else shape,
            **{
                f"{name}{suffix}": round(value, 4)
                for name, estimate in (
                    ("tokens_per_call", self.tokens),
                    ("over_chain_of_budget", self.over_budget),
                    ("over_chain_of_depth", self.over_depth),
                )
                for suffix, value in (("", estimate.mean), ("_se", estimate.standard_error))
            },
        }


def compare(temperature: float, found: Mapping[Method, Tensor]) -> list[Result]:
    """Put every method beside the chains."""
    chains = {m.budget: tokens for m, tokens in found.items() if m.name == "chain"}
    return [
        Result(
            temperature,
            method,
            mean_of(tokens),
            mean_of(tokens - chains[method.budget]),
            mean_of(tokens - chains[method.tree.depth]),
        )
        for method, tokens in found.items()
    ]


def with_chains(methods: Iterable[Method]) -> list[Method]:
    """Add the chains that the methods are compared with."""
    listed = list(dict.fromkeys(methods))
    lengths = {m.budget for m in listed} | {m.tree.depth for m in listed}
    return list(dict.fromkeys([*(Method("chain", chain(n)) for n in sorted(lengths)), *listed]))


def table(results: Sequence[Result]) -> str:
    """Format results."""

    def signed(estimate: theory.Estimate) -> str:
        return f"{estimate.mean:+.2f} ({estimate.standard_error:.2f})"

    rows = [
        [
            f"{r.temperature:g}",
            r.method.name,
            r.method.rule,
            str(r.method.budget),
            str(r.method.tree.depth),
            f"{r.tokens.mean:.2f} ({r.tokens.standard_error:.2f})",
            signed(r.over_budget),
            signed(r.over_depth),
        ]
        for r in results
    ]
    header = ["T", "shape, children", "rule", "draft tokens", "d", "tokens a call (se)"]
    return common.markdown_table([*header, "- chain of the budget", "- chain of depth d"], rows)


def verdict(results: Sequence[Result], budgets: Sequence[int]) -> list[str]:
    """Say for every budget whether a tree beats the chain, beyond two standard errors."""
    lines = []
    for t in sorted({r.temperature for r in results}):
        for budget in budgets:
            trees = [
                r for r in results
                if r.temperature == t and r.method.budget == budget and r.method.name != "chain"
            ]  # fmt: skip
            if not trees:
                continue
            best = max(trees, key=lambda r: r.tokens.mean)
            gain, error = best.over_budget.mean, best.over_budget.standard_error
            beats = "beats" if gain > 2 * error else "does not beat"
            lines.append(
                f"T {t:g}, {budget} draft tokens: {best.method.name} (depth "
                f"{best.method.tree.depth}) {beats} the chain of {budget}: {best.tokens.mean:.2f} "
                f"against {best.tokens.mean - gain:.2f} tokens a call, {gain:+.2f} ({error:.2f})"
            )
    return lines


# ---- the command line ----------------------------------------------------------------------------


def run_temperature(
    pair: Pair, windows: Tensor, temperature: float, options: argparse.Namespace
) -> list[Result]:
    """Search for shapes, then measure what was found on fresh contexts."""
    begin = time.perf_counter()
    searched = contexts(pair, windows[: options.search], temperature, options)
    rates = {kind: rates_by_rank(searched, kind) for kind in kinds_at(temperature)}
    for kind, rate in rates.items():
        print(f"T {temperature:g}, {kind}: accepted by rank " + " ".join(f"{r:.3f}" for r in rate))
    methods = fixed_methods(temperature)
    for budget in options.budget:
        methods += search(searched, budget, rates)
        print(f"searched budget {budget}, {time.perf_counter() - begin:.0f} s", flush=True)
    del searched
    fresh = windows[options.search : options.search + options.contexts]
    found = evaluate(contexts(pair, fresh, temperature, options), with_chains(methods))
    print(f"T {temperature:g} done, {time.perf_counter() - begin:.0f} s", flush=True)
    return compare(temperature, found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a few contexts: does it run?")
    parser.add_argument("--times", action="store_true", help="the operator's times instead")
    parser.add_argument("--contexts", type=int, default=512)
    parser.add_argument("--search", type=int, default=128, help="contexts to search shapes on")
    parser.add_argument("--batch", type=int, default=64, help="contexts at once")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--budget", type=int, nargs="+", default=[8, 28, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="--times: for each setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=common.RESULTS)
    parser.add_argument("--suffix", default="", help="of the records' names")
    options = parser.parse_args(arguments)
    if options.quick:
        options.contexts, options.search, options.batch = 8, 4, 4
        options.temperature, options.budget, options.seconds = [0.0, 1.0], [8], 0.2
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = parse(arguments)
    facts = common.machine_facts()
    facts["command"] = " ".join(["bench_trees.py", *(arguments or sys.argv[1:])])
    if options.times:
        import tree_times

        return tree_times.run(options, facts)
    begin, load = time.perf_counter(), common.Load()
    for name, value in facts.items():
        print(f"{name}: {value}")
    pair = load_pair()
    windows = held_out_windows(pair)
    if len(windows) < options.search + options.contexts:
        raise ValueError(f"there are {len(windows)} windows of held-out text; ask for fewer")
    with torch.inference_mode():
        results = [
            result
            for temperature in options.temperature
            for result in run_temperature(pair, windows, temperature, options)
        ]
    facts |= {
        "contexts": options.contexts,
        "searched on": options.search,
        "verdict": verdict(results, options.budget),
        "seconds": round(time.perf_counter() - begin, 1),
        "others_cpu_share": load.share(),
    }
    text = "\n".join([table(results), "", *facts["verdict"]])
    print(f"\n{text}")
    name = f"trees-cpu-{time.strftime('%Y-%m-%d', time.gmtime())}"
    stem = options.output / (name + ("-quick" if options.quick else "") + options.suffix)
    records = [result.record() for result in results]
    common.write_json(stem.with_suffix(".json"), {"machine": facts, "records": records})
    flat = [{k: v for k, v in record.items() if k != "parents"} for record in records]
    common.write_csv(stem.with_suffix(".csv"), flat)
    stem.with_suffix(".md").write_text(text + "\n")
    print(f"\nwritten: {stem}.json, .csv, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
