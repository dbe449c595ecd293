"""Programs that tests run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def output_of(*command: str | Path, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Run a program; give its status and what it wrote, errors among it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout
