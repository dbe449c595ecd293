"""Wheels of PyPI, fetched by pip and read without installing them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tasks.records import SourceError


def wheel(folder: Path, name: str, version: str) -> Path:
    """Fetch one wheel, without what it depends on.

    Raises
    ------
    SourceError
        Where pip cannot get it: the message has what pip said.
    """
    stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-"

    def kept() -> list[Path]:
        return [path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(stem)]

    if not kept():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary", ":all:", "--ignore-requires-python"),
                *("--dest", str(folder), f"{name}=={version}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not kept():
            said = [line for line in done.stderr.splitlines() if "WARNING" not in line]
            raise SourceError(f"pip could not fetch {name} {version}: {' '.join(said)[-500:]}")
    return kept()[0]


def files_of(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of a wheel's files, those that are wanted, in the order of names."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if wanted(name):
                yield name, archive.read(name)
