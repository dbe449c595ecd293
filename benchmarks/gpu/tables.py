"""Tables of what bench.py measured, and the project's targets.

Nothing here needs the package: report.py writes them where it is yet to be built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common

from gpu.peers import Sampling

SAMPLING = {
    "temperature": Sampling(0.8),
    "top_k+top_p": Sampling(0.8, 50, 0.9),
    "none": Sampling(),
}
RULES = ("token", "block")
ALL_RULES = (*RULES, "coupled")
FEATURES = ("masked", "reduced", "tree")
PACKAGES = ("compile", "vllm", "flashinfer")
PEERS = ("eager", "eager sort", "eager topk", *PACKAGES)
SPEED_UP = 3.0  # asked for against the strongest peer


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    drafter: str
    filters: str
    batch: int
    gamma: int
    vocab: int
    acceptance: str = "0.7"

    @property
    def sampling(self) -> Sampling:
        """What its requests ask for."""
        return SAMPLING[self.filters]

    def label(self) -> str:
        """Say it on one line."""
        return (
            f"{self.drafter}, {self.filters}, B={self.batch} gamma={self.gamma} V={self.vocab}, "
            f"acceptance {self.acceptance}"
        )

    def floor_bytes(self, full_share: float) -> float:
        """Count what must be read: with a draft law its rows too, and the last draw's again.

        The last draw reads one row where everything was accepted (`full_share` of the requests),
        else two.
        """
        rows: float = self.gamma + 1
        if self.drafter == "dense":
            rows += self.gamma + 2 - full_share
        return rows * self.batch * self.vocab * 2


def backend_of(contestant: str) -> tuple[str, str, str] | None:
    """Give (backend, rule, feature) of one of ours, None for others."""
    name, _, rest = contestant.partition(" ")
    rule, _, feature = rest.partition(" ")
    known = rule in ALL_RULES and feature in ("", *FEATURES)
    return (name, rule, feature) if known else None


def ok_records(state: Mapping[str, Any]) -> dict[Cell, dict[str, dict[str, Any]]]:
    """Sort what was timed by cell and contestant."""
    found: dict[Cell, dict[str, dict[str, Any]]] = {}
    for record in state["records"]:
        if record["status"] == "ok":
            found.setdefault(Cell(**record["cell"]), {})[record["contestant"]] = record
    return found


def figures(record: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, float]:
    """Derive GB/s, percentages of the ceilings, and microseconds of reading alone."""
    needed = Cell(**record["cell"]).floor_bytes(record["full_share"])
    bandwidth = needed / record["us"] / 1e3
    return {
        "gb_s": bandwidth,
        "copy": 100 * bandwidth / facts["copy_gb_s"],
        "read": 100 * bandwidth / facts["read_gb_s"],
        "floor_us": needed / facts["read_gb_s"] / 1e3,
    }


def line(record: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Say what came of a contestant."""
    head = f"{Cell(**record['cell']).label()}: {record['contestant']}"
    if record["status"] != "ok":
        return f"{head}: {record['status'].upper()}: {record['reason']}"
    found = figures(record, facts)
    return (
        f"{head}: {record['us']:.1f} us, {found['gb_s']:.0f} GB/s, {found['read']:.0f} % of read, "
        f"launches {record['launches']}{'' if record['graph'] else ', no graph'}"
    )


def timing_table(state: Mapping[str, Any]) -> str:
    """Make the table of all contestants."""
    header = ["cell", "contestant", "us", "GB/s", "% copy", "% read", "launches", "graph"]
    rows = []
    for cell, by_name in ok_records(state).items():
        for name, record in by_name.items():
            found = figures(record, state["facts"])
            numbers = [f"{record['us']:.1f}", f"{found['gb_s']:.0f}"]
            numbers += [f"{found['copy']:.0f}", f"{found['read']:.0f}"]
            count = record["launches"]
            others = sum(count.values()) - count.get("kernel", 0)
            launches = str(count.get("kernel", "")) + (f" + {others}" if others else "")
            rows.append(
                [cell.label(), name, *numbers, launches, "yes" if record["graph"] else "no"]
            )
    return common.markdown_table(header, rows)


def kernels_table(state: Mapping[str, Any]) -> str:
    """Make the table of how long each kernel of ours took in the timed replays."""
    rows = []
    for cell, by_name in ok_records(state).items():
        for name, record in by_name.items():
            kernels = record.get("kernels") or {}
            if backend_of(name) is None or not kernels:
                continue
            each = ", ".join(f"{kernel} {us:.2f}" for kernel, us in kernels.items())
            clock = record.get("sm_mhz")
            rows.append([cell.label(), name, each, "" if clock is None else f"{clock:.0f}"])
    header = ["cell", "contestant", "microseconds of each kernel", "MHz"]
    return common.markdown_table(header, rows) if rows else ""


def trees_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Make the table of trees.py."""
    rows = [
        [
            f"{r['rule']}, B={r['batch']} N={r['nodes']} V={r['vocab']}",
            r["backend"],
            f"{r['us']:.1f}",
            f"{r['us'] / r['floor_us']:.2f}",
            ", ".join(f"{kernel} {us:.2f}" for kernel, us in r["kernels"].items()),
            "" if r["sm_mhz"] is None else f"{r['sm_mhz']:.0f}",
        ]
        for r in records
    ]
    header = ["tree", "backend", "us", "of read", "microseconds of each kernel", "MHz"]
    return common.markdown_table(header, rows)


def attention_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Make the table of bench_tree_attention.py."""

    def cell(record: Mapping[str, Any], key: str, form: str) -> str:
        return format(record[key], form) if record.get(key) is not None else "-"

    medians = dict.fromkeys(k for r in records for k in r if k.endswith(" median ms"))
    rows = []
    for r in records:
        wanted = r.get("bar")
        verdict = "-" if wanted is None else "PASS" if r["ratio"] >= wanted else "FAIL"
        times = [cell(r, key, ".3g") for key in medians]
        rows.append([r["setting"], *times, cell(r, "ratio", ".2f"), verdict])
        rows[-1].append(cell(r, "others", ".0%"))
    header = ["setting", *(key.replace(" median", "") for key in medians)]
    return common.markdown_table([*header, "ratio to dense", "bar", "others %"], rows)


def problems_table(state: Mapping[str, Any]) -> str:
    """Make the table of what was not timed."""
    rows = [
        [Cell(**r["cell"]).label(), r["contestant"], r["status"], one_line(r["reason"])]
        for r in state["records"]
        if r["status"] != "ok"
    ]
    return common.markdown_table(["cell", "contestant", "status", "reason"], rows) if rows else ""


def one_line(text: str) -> str:
    """Make text fit a cell of a table."""
    return " ".join(text.replace("|", "/").split())[:300]


def multiple(cell: Cell) -> float | None:
    """Give how many times the plain read of its rows the project allows; None: nothing asked."""
    central = cell.batch == 32 and cell.gamma == 5 and cell.vocab == 151_936
    if not central:
        return None
    return 2.5 if cell.sampling.filtered else 1.5


def targets(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List what the project asks for, with what was seen."""
    found: list[dict[str, Any]] = []

    def add(what: str, cell: Cell, contestant: str, seen: float, bound: float, less: bool) -> None:
        passed = seen <= bound if less else seen >= bound
        found.append(
            {
                "target": what,
                "cell": cell.label(),
                "contestant": contestant,
                "seen": round(seen, 3),
                "bound": bound,
                "mark": "PASS" if passed else "FAIL",
            }
        )

    for cell, by_name in ok_records(state).items():
        theirs = {n: r["us"] for n, r in by_name.items() if n in PEERS}
        for name, record in by_name.items():
            mine = backend_of(name)
            if mine is None or mine[1] not in RULES or mine[2]:
                continue
            asked = multiple(cell)
            if asked is not None:
                floor = figures(record, state["facts"])["floor_us"]
                add("us / reading once", cell, name, record["us"] / floor, asked, True)
            if cell.batch == 1 and cell.gamma == 5 and cell.vocab == 151_936:
                add("us, one request", cell, name, record["us"], 12.0, True)
            if theirs and mine[1] == "token" and cell.filters != "none":
                best = min(theirs, key=lambda peer: theirs[peer])
                ratio = theirs[best] / record["us"]
                add(f"times faster than {best}", cell, name, ratio, SPEED_UP, False)
    return found


def targets_table(state: Mapping[str, Any]) -> str:
    """Make the table of the targets."""
    rows = [
        [t["target"], t["cell"], t["contestant"], f"{t['seen']:.2f}", f"{t['bound']:g}", t["mark"]]
        for t in targets(state)
    ]
    header = ["target", "cell", "contestant", "seen", "bound", "mark"]
    return common.markdown_table(header, rows) if rows else "no target was measured"


def markdown(state: Mapping[str, Any]) -> str:
    """Write the report of what is known so far."""
    facts = state["facts"]
    known = [[name, one_line(str(value))] for name, value in facts.items()]
    parts = ["## Benchmarks", common.markdown_table(["fact", "value"], known)]
    parts += ["### Targets", targets_table(state), "### Timings", timing_table(state)]
    kernels = kernels_table(state)
    if kernels:
        parts += ["### Kernels", kernels]
    problems = problems_table(state)
    if problems:
        parts += ["### Not timed", problems]
    return "\n\n".join(parts) + "\n"
