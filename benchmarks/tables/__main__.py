"""Make a table or a figure of a paper with the models that were trained here.

    python benchmarks/tables NAME                     # one table; without a name, the list of them
    python benchmarks/tables NAME --sentences 100     # more of the test split
    python benchmarks/tables NAME --quick             # does it run?

Needs models of `python benchmarks/pair/seq2seq`, in ``--task``. Writes .csv, .json, .md and .png to
benchmarks/results/tables, with ``--quick`` only where ``--record`` names the files. Exit code 1
where output of a lossless rule is not plain decoding's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
if not os.environ.get("PYTHONPATH"):
    sys.path.insert(1, str(HERE.parents[1]))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import common  # noqa: E402

from tables import shared  # noqa: E402
from tables.registry import TABLES, maker  # noqa: E402


def positive(text: str) -> int:
    """Read a whole number from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text}")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = "\n".join(f"  {name:14} {entry.shows}" for name, entry in TABLES.items())
    parser = argparse.ArgumentParser(
        prog="benchmarks/tables",
        description=(__doc__ or "").split("\n", 1)[0],
        epilog=f"tables:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(TABLES), metavar="NAME", help="see below")
    parser.add_argument(
        "--task",
        type=Path,
        default=common.ROOT / "build" / "seq2seq" / "translation",
        help="folder of the trained models and their data (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of the task's records, which say where a text is from (default: "
        "build/tasks/TASK)",
    )
    parser.add_argument(
        "--heads",
        type=Path,
        help="folder of the decoding heads that were trained for the target (default: "
        "build/heads/TASK)",
    )
    parser.add_argument(
        "--sentences",
        type=positive,
        help=f"of the test split ({shared.FULL['sentences']} or fewer)",
    )
    parser.add_argument("--tokens", type=positive, help="new tokens a sentence, at most (128)")
    parser.add_argument(
        "--text-tokens",
        type=positive,
        help=f"of the target, on which acceptance is measured ({shared.FULL['text_tokens']:,})",
    )
    parser.add_argument("--repeats", type=positive, default=1, help="timings of each sentence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--record", help="file name, without suffix (default: NAME-DEVICE-DATE)")
    parser.add_argument("--output", type=Path, default=common.RESULTS / "tables", help="folder")
    options = parser.parse_args(arguments)
    options.data = options.data or common.ROOT / "build" / "tasks" / options.task.name
    options.heads = options.heads or common.ROOT / "build" / "heads" / options.task.name
    full = shared.FULL | {"sentences": TABLES[options.name].sentences}
    sizes = shared.QUICK if options.quick else full
    for name, size in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    if not (sys.argv[1:] if arguments is None else arguments):
        arguments = ["--help"]
    options = parse(arguments)
    family = None
    if TABLES[options.name].trained:
        from pair.seq2seq.models import load_family

        family = load_family(options.task)
    bench = shared.Bench(family, options)
    return run(bench, list(sys.argv[1:] if arguments is None else arguments))


def run(bench: shared.Bench, arguments: Sequence[str]) -> int:
    """Make the table that the bench's options name, print and write it; return the exit code."""
    options = bench.options
    facts, load = common.machine_facts(), common.Load()
    facts["command"] = " ".join(["benchmarks/tables", *arguments])
    if bench.family is not None:
        facts["sentences"] = len(bench.sentences)
        facts["models"] = ", ".join(
            f"{name} {model.num_parameters():,}" for name, model in bench.family.models.items()
        )
    begin = time.perf_counter()
    result = maker(options.name)(bench)
    facts["seconds"] = round(time.perf_counter() - begin)
    facts["others_cpu_share"] = load.share()
    print(result.text())
    if options.record or not options.quick:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        name = options.record or f"{options.name}-{bench.device.type}-{date}"
        for path in shared.write_result(options.output / name, facts, result):
            print(f"written: {path}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
