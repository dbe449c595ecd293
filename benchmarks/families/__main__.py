"""Run every model family of the installed transformers in every way, beside an oracle.

    python benchmarks/families                        # all families, all modes
    python benchmarks/families --only gpt_neo,bart    # some; "--only gemma" takes all that match
    python benchmarks/families --modes "chain,tree 1" --jobs 2 --record name

Prints one line a family and a summary; ``--record`` writes Markdown and CSV to benchmarks/results.
Exit code 1 where a text is wrong or something crashed.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
if not os.environ.get("PYTHONPATH"):
    sys.path.insert(1, str(HERE.parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401  (once, before the forks)
from common import RESULTS, commit, machine_facts, write_csv  # noqa: E402

from families import models as tiny  # noqa: E402
from families import modes  # noqa: E402

MARKS = {
    modes.RIGHT: "+", modes.REFUSED: "r", modes.WRONG: "W", modes.CRASH: "X", modes.TIED: "t",
    modes.HOST: "h", modes.ABSENT: ".",
}  # fmt: skip
MEMORY = 6 << 30  # bytes that one family may ask for


def run_family(name: str, wanted: list[str]) -> list[dict[str, Any]]:
    """Return one record a mode, or one that says why there is none."""
    family = tiny.families()[name]
    begin = time.perf_counter()
    try:
        case = modes.case_of(family)
    except Exception as error:  # whatever it is, it happened without this library
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [{"family": name, "mode": "built", "verdict": "not built", "detail": said}]
    records = []
    shown = name if case.encoder else name.removesuffix(":encoded")
    common = {
        "family": shown, "class": type(case.models[0]).__name__,
        "dtype": str(case.dtype).removeprefix("torch."), "tokens": modes.variety(case.batches),
    }  # fmt: skip
    for mode in wanted:
        records.append(common | modes.classify(mode, case)._asdict())
    records[-1]["seconds"] = round(time.perf_counter() - begin, 1)
    return records


def _child(pipe: Any, name: str, wanted: list[str]) -> None:
    """Run one family in a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    pipe.send(run_family(name, wanted))
    pipe.close()


def sweep(
    names: list[str], wanted: list[str], jobs: int, limit: float
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run families side by side, each in a process; one that hangs or dies costs only itself."""
    context = multiprocessing.get_context("fork")
    waiting = collections.deque(names)
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, name, wanted))
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic() + limit
        wait(list(running), timeout=1.0)
        for pipe, (name, process, deadline) in list(running.items()):
            records = None
            if pipe.poll():
                try:
                    records = pipe.recv()
                except EOFError:
                    records = _lost(name, f"its process died with exit code {process.exitcode}")
            elif time.monotonic() > deadline:
                process.kill()
                records = _lost(name, f"not done in {limit:.0f} s")
            if records is not None:
                process.join()
                pipe.close()
                del running[pipe]
                yield name, records


def _lost(name: str, why: str) -> list[dict[str, Any]]:
    return [{"family": name, "mode": "all", "verdict": modes.CRASH, "detail": why}]


def line(name: str, records: list[dict[str, Any]]) -> str:
    """Say in one line what became of a family."""
    if records[0]["verdict"] == "not built" or records[0]["mode"] == "all":
        return f"{name:28} {records[0]['verdict']}: {records[0]['detail']}"
    marks = "".join(MARKS[record["verdict"]] for record in records)
    dull = "  (dull text)" if records[0]["tokens"] < 6 else ""
    return f"{name:28} {marks}  {records[-1]['seconds']:5.1f} s{dull}"


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Count families by their worst verdict."""
    verdicts = collections.defaultdict(collections.Counter)  # type: ignore[var-annotated]
    for record in records:
        verdicts[record["family"]][record["verdict"]] += 1
    count: collections.Counter[str] = collections.Counter()
    for found in verdicts.values():
        if found["not built"]:
            count["not built"] += 1
        elif found[modes.CRASH] or found[modes.WRONG]:
            count["wrong somewhere" if found[modes.WRONG] else "crash somewhere"] += 1
        elif found[modes.REFUSED] == sum(found.values()) - found[modes.ABSENT]:
            count["refused in every mode"] += 1
        elif found[modes.REFUSED]:
            count["right or refused"] += 1
        else:
            count["right in every mode"] += 1
    return dict(count)


def keep_cells(path: Path, records: list[dict[str, Any]]) -> None:
    """Put these families' cells into a file, in place of what it has of them."""
    renewed = {record["family"] for record in records}
    known = json.loads(path.read_text()) if path.exists() else []
    kept = [record for record in known if record["family"] not in renewed]
    path.write_text(json.dumps(kept + records))


def record_sweep(stem: str, records: list[dict[str, Any]], wanted: list[str], took: float) -> None:
    """Write the table for readers, and the cells."""
    facts = machine_facts()
    write_csv(RESULTS / f"{stem}.csv", records)
    by_family = collections.defaultdict(dict)  # type: ignore[var-annotated]
    for record in records:
        by_family[record["family"]][record["mode"]] = record
    text = [
        "# Model families in every way of running", "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, commit "
        f"{facts['commit']}, {facts['time']}, {took:.0f} s. `python benchmarks/families` makes it.",
        "", ", ".join(f"{n} {what}" for what, n in summary(records).items()) + ".", "",
        "`+` right, `r` refused, `W` another text, `X` crash, `t` right up to a tie, `h` the text "
        "of transformers' own cached generate, or a forward pass that depends on later tokens, "
        "`.` not applicable. Columns:", "",
        *(f"{i}. {mode}" for i, mode in enumerate(wanted, 1)), "",
        "| family | " + " | ".join(str(i) for i in range(1, len(wanted) + 1)) + " |",
        "|---|" + "---|" * len(wanted),
    ]  # fmt: skip
    unbuilt = []
    for name, cells in by_family.items():
        if not set(cells) & set(wanted):
            unbuilt.append(f"- {name}: {next(iter(cells.values()))['detail']}")
            continue
        marks = " | ".join(MARKS[cells[mode]["verdict"]] for mode in wanted)
        text.append(f"| {name} | {marks} |")
    text += ["", "Not built small:", "", *unbuilt, "", "What was not right:", ""]
    seen = set()
    for record in records:
        key = (record["family"], record["verdict"], record["detail"].split(",")[0])
        if record["mode"] in wanted and record["verdict"] != modes.RIGHT and key not in seen:
            seen.add(key)
            said = f"{record['family']}, {record['mode']}: {record['verdict']}, {record['detail']}"
            text.append(f"- {said}")
    (RESULTS / f"{stem}.md").write_text("\n".join(text) + "\n")


def main() -> int:
    """Read the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="families, or parts of names, with commas between; -: none")
    parser.add_argument("--modes", help="modes, or the beginnings of their names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=240, help="seconds for one family")
    parser.add_argument("--record", help="file name in benchmarks/results, without suffix")
    parser.add_argument("--verbose", action="store_true", help="print all that was not right")
    parser.add_argument(
        "--cells", type=Path, help="a JSON file of cells: these families' are put in, others' kept"
    )
    given = parser.parse_args()
    known = list(tiny.families())
    names = known
    if given.only:
        asked = [] if given.only == "-" else given.only.split(",")
        exact = [name for name in asked if name in known]
        parts = [part for part in asked if part not in known]
        names = [n for n in known if n in exact or any(part in n for part in parts)]
    wanted = list(modes.MODES)
    if given.modes:
        starts = tuple(given.modes.split(","))
        wanted = [mode for mode in wanted if mode.startswith(starts)]
    if not wanted or not (names or given.only == "-"):
        parser.error(f"no such family or mode; modes: {', '.join(modes.MODES)}")
    torch.set_num_threads(1)
    for i, mode in enumerate(wanted, 1):
        print(f"{i:2} {mode}")
    begin = time.perf_counter()
    records: list[dict[str, Any]] = []
    now = commit()
    for _, found in sweep(names, wanted, given.jobs, given.limit):
        made = {"commit": now, "transformers": transformers.__version__}
        records += [record | made for record in found]
        if given.cells:
            keep_cells(given.cells, records)
        print(line(found[0]["family"], found), flush=True)
        for record in found if given.verbose else []:
            if record["verdict"] not in (modes.RIGHT, "not built"):
                print(f"    {record['mode']}: {record['verdict']}: {record['detail']}", flush=True)
    took = time.perf_counter() - begin
    print(f"\n{len(names)} families, {len(wanted)} modes, {took:.0f} s: {summary(records)}")
    if given.cells:
        records = json.loads(given.cells.read_text())
    order = {name.removesuffix(":encoded"): i for i, name in enumerate(known)}
    records.sort(key=lambda r: order[r["family"].removesuffix(":encoded")])
    if given.record:
        run = {record["mode"] for record in records}
        record_sweep(given.record, records, [mode for mode in modes.MODES if mode in run], took)
    return int(any(record["verdict"] in modes.OURS_AT_FAULT for record in records))


if __name__ == "__main__":
    sys.exit(main())
