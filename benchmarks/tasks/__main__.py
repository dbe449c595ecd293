"""Fetch the data of the tasks, clean and divide it, and write it with a manifest.

    python benchmarks/tasks                                  # everything, into build/tasks
    python benchmarks/tasks --list                           # the sources, without fetching
    python benchmarks/tasks --only libreoffice-help,django   # some of them; another --out
    python benchmarks/tasks --record tasks-2026-11-23        # and a table into benchmarks/results

Packages are kept in ``downloads`` in the folder given with --out: a second run needs no network.
Nothing is installed. Each task gets ``train.jsonl``, ``valid.jsonl`` and ``test.jsonl``, with one
record a line (``source``, ``target``, ``document``, ``origin``, ``licence``, ``permissive``);
``manifest.json`` says what was read, what was dropped and why, and has hashes of all files.
Exit code 1 where a source cannot be had here, and then nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tasks.clean import cleaned, word_count  # noqa: E402
from tasks.records import TASKS, TRANSLATION, Record, SourceError  # noqa: E402
from tasks.sources import CODESPELL, NEEDS_SENTENCES, SOURCES, Source, Store, misspelt  # noqa: E402
from tasks.split import SPLITS, TRAIN, distinct, divide  # noqa: E402

ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def hash_of(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_used(store: Store) -> dict[str, Any]:
    """Describe what was fetched since the last call: version, bytes and hash of each file."""
    found = {
        name: {"bytes": path.stat().st_size, "sha256": hash_of(path)}
        if isinstance(path, Path)
        else {"where": path}
        for name, path in store.used.items()
    }
    store.used.clear()
    return found


def read_source(
    source: Source, store: Store, sentences: Iterable[Record]
) -> tuple[list[Record], dict[str, Any]]:
    """Return a source's clean records, and what to say about it in the manifest."""
    begin = time.perf_counter()
    read = misspelt(store, sentences) if source.name == CODESPELL else source.records(store)
    dropped: Counter[str] = Counter()
    kept = list(cleaned(source.task, read, dropped))
    used = files_used(store)
    note = {
        "task": source.task,
        "licence": source.licence,
        "read": len(kept) + dropped.total(),
        "dropped": dict(dropped.most_common()),
        "clean": len(kept),
        "files": used,
        "bytes": sum(file.get("bytes", 0) for file in used.values()),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    return kept, note


def summary_of(records: list[Record]) -> dict[str, Any]:
    """Count records, documents and words, and the permissive ones."""
    permissive = [record for record in records if record.permissive]
    return {
        "records": len(records),
        "documents": len({record.document for record in records}),
        "source words": sum(word_count(record.source) for record in records),
        "target words": sum(word_count(record.target) for record in records),
        "4 to 60 words": sum(
            4 <= word_count(r.source) <= 60 and 4 <= word_count(r.target) <= 60 for r in records
        ),
        "permissive": len(permissive),
        "permissive source words": sum(word_count(record.source) for record in permissive),
        "by origin": dict(Counter(record.origin for record in records).most_common()),
    }


def write_split(path: Path, records: list[Record]) -> str:
    """Write records as JSON lines; return the file's hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            line = asdict(record) | {"permissive": record.permissive}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return hash_of(path)


def gather(names: list[str], store: Store) -> tuple[dict[str, list[Record]], dict[str, Any]]:
    """Read and clean the sources; return each task's distinct records and notes on the sources."""
    found: dict[str, list[Record]] = {task: [] for task in TASKS}
    notes: dict[str, Any] = {}
    if CODESPELL in names and all(SOURCES[name].task != TRANSLATION for name in names):
        raise SourceError(NEEDS_SENTENCES)
    for task in TASKS:  # correction last: its sentences are those of translation
        repeated: Counter[str] = Counter()
        records: list[Record] = []
        for name in (name for name in names if SOURCES[name].task == task):
            print(f"{name:24} ", end="", flush=True)
            kept, notes[name] = read_source(SOURCES[name], store, found[TRANSLATION])
            records += kept
            print(_line(notes[name]), flush=True)
        found[task] = list(distinct(records, repeated))
        for origin, count in repeated.items():
            note = notes[origin.partition(":")[0]]
            note["repeated"] = note.get("repeated", 0) + count
    return found, notes


def _line(note: dict[str, Any]) -> str:
    return (
        f"{note['read']:7,} read, {note['clean']:7,} clean, {note['bytes'] / 1e6:6.1f} MB, "
        f"{note['licence']}, {note['seconds']:.0f} s"
    )


def write_tasks(found: dict[str, list[Record]], out: Path) -> dict[str, Any]:
    """Divide and write each task; return what the manifest says of it."""
    tasks: dict[str, Any] = {}
    for task, records in found.items():
        if not records:
            continue
        leaked: Counter[str] = Counter()
        divided = divide(records, leaked)
        tasks[task] = {"also said elsewhere": dict(leaked.most_common())}
        for name in SPLITS:
            digest = write_split(out / task / f"{name}.jsonl", divided[name])
            tasks[task][name] = summary_of(divided[name]) | {"sha256": digest}
            said = tasks[task][name]
            print(
                f"{task:14} {name:5} {said['records']:8,} records, {said['documents']:6,} "
                f"documents, {said['source words']:10,} words, {said['permissive']:8,} permissive"
            )
    return tasks


def table(manifest: dict[str, Any]) -> str:
    """Write the manifest's counts for readers."""
    lines = [
        "| source | task | licence | version | MB | read | clean | repeated | dropped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, note in manifest["sources"].items():
        files = list(note["files"])
        version = ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
        dropped = ", ".join(f"{why} {count:,}" for why, count in note["dropped"].items())
        lines.append(
            f"| {name} | {note['task']} | {note['licence']} | {version} | "
            f"{note['bytes'] / 1e6:.1f} | {note['read']:,} | {note['clean']:,} | "
            f"{note.get('repeated', 0):,} | {dropped} |"
        )
    lines += [
        "",
        "| task | split | records | documents | source words | target words | 4 to 60 words | "
        "permissive | its source words | also said elsewhere, left out |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, splits in manifest["tasks"].items():
        for name in SPLITS:
            said = splits[name]
            leaked = sum(splits["also said elsewhere"].values()) if name != TRAIN else 0
            numbers = [
                *(said["records"], said["documents"], said["source words"], said["target words"]),
                *(said["4 to 60 words"], said["permissive"], said["permissive source words"]),
            ]
            cells = " | ".join(f"{number:,}" for number in numbers)
            last = f"{leaked:,} (both)" if name != TRAIN else ""
            lines.append(f"| {task} | {name} | {cells} | {last} |")
    lines += ["", "Records of each origin, in training, validation and test:", ""]
    lines += ["| task | origin | train | valid | test |", "|---|---|---|---|---|"]
    for task, splits in manifest["tasks"].items():
        for origin in splits[TRAIN]["by origin"]:
            counts = (splits[name]["by origin"].get(origin, 0) for name in SPLITS)
            lines.append(f"| {task} | {origin} | " + " | ".join(f"{c:,}" for c in counts) + " |")
    return "\n".join(lines)


def list_sources() -> str:
    """Return the table of sources."""
    return "\n".join(
        f"{source.name:24} {source.task:14} {source.licence:34} {source.what}"
        for source in SOURCES.values()
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--list", action="store_true", help="print the sources and end")
    add("--only", help="sources, with commas between (all)")
    add("--out", type=Path, default=ROOT / "build" / "tasks", help="folder (build/tasks)")
    add("--suite", default="bookworm", help="release of Debian (bookworm)")
    add("--mirror", default="http://deb.debian.org/debian", help="archive of Debian")
    add("--record", help="name of a Markdown file in benchmarks/results, without suffix")
    given = parser.parse_args(arguments)
    given.names = given.only.split(",") if given.only else list(SOURCES)
    if unknown := [name for name in given.names if name not in SOURCES]:
        parser.error(f"no such source: {', '.join(unknown)}; there are {', '.join(SOURCES)}")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    given = parse_arguments(arguments)
    if given.list:
        print(list_sources())
        return 0
    store = Store(given.out / "downloads", given.suite, given.mirror)
    begin = time.perf_counter()
    try:
        found, notes = gather(given.names, store)
    except SourceError as error:
        print(f"\n{error}\nNothing was written.", file=sys.stderr)
        return 1
    manifest = {
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "suite": given.suite,
        "sources": notes,
        "tasks": write_tasks(found, given.out),
    }
    (given.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{given.out / 'manifest.json'}, {time.perf_counter() - begin:.0f} s")
    if given.record:
        command = "python benchmarks/tasks" + (f" --only {given.only}" if given.only else "")
        text = f"# Data of the tasks\n\n`{command}`, {manifest['made']}.\n\n{table(manifest)}\n"
        (RESULTS / f"{given.record}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
