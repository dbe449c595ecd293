"""``python -m specdec_ext <command>``: demo, check, simulate, plot or info."""

from __future__ import annotations

import argparse
import sys
import traceback

from .commands import check, demo, info, plot, simulate

COMMANDS = {
    "demo": (demo, "generate with and without speculation, and compare"),
    "check": (check, "is speculative output that of plain decoding? lossless, tie or bug"),
    "simulate": (simulate, "accepted lengths and speed-ups from saved logits"),
    "info": (info, "versions, backends present and absent, CPU capability chosen"),
    "plot": (plot, "the papers' figures, from formulae and from a recorded run"),
}


def main() -> int:
    """Run the subcommand that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m specdec_ext", description=__doc__)
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
