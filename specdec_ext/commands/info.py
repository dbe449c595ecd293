"""``python -m specdec_ext info``: what is installed, what it was built with, what runs here."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import torch

from .. import __version__, backend
from .._ops import NAMESPACE
from .frame import command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments: none."""


def describe() -> list[tuple[str, str]]:
    """List what there is to say as (label, value)."""
    from .._host import build_info

    build = build_info()
    cuda = f"CUDA {build['torch_cuda']}" if build["torch_cuda"] else "no CUDA"
    forced = " (SPECDEC_CPU_CAPABILITY)" if "SPECDEC_CPU_CAPABILITY" in os.environ else ""
    rows = [
        ("specdec_ext", __version__),
        ("in", str(Path(__file__).parents[1])),
        ("operators", f"torch.ops.{NAMESPACE}"),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        (
            "built with",
            f"{build['compiler']}, C++{build['cxx_standard']}, {build['build_type']}, "
            f"torch {build['torch']} ({cuda})",
        ),
        (
            "cuda kernels",
            f"built with {build['cuda_compiler']}"
            if build["cuda_compiler"]
            else f"left out: {build['cuda_left_out']} when this was built",
        ),
        ("cpu variants", ", ".join(backend.cpu_variants())),
        ("cpu capability", backend.cpu_capability() + forced),
        ("threads", str(torch.get_num_threads())),
    ]
    for name, reason in backend.absences().items():
        rows.append((f"backend {name}", "present" if reason is None else f"absent: {reason}"))
    return rows


@command("info")
def run(args: argparse.Namespace) -> int:
    """Print `describe` as a table."""
    rows = describe()
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    return 0
