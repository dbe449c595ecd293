"""Where the package's built files are: beside this file, or in a copy that was installed.

In a checkout's folder Python finds the checkout's package before an installed one. After ``pip
install .`` nothing was built in the checkout, and its package steps aside: code and libraries of
one copy run, never the code of one with the libraries of another.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path

__all__ = ["find_complete"]


def _is_complete(package: Path) -> bool:
    """Whether a copy of the package has its libraries, and for this Python."""
    hosts = (package / f"_host{suffix}" for suffix in EXTENSION_SUFFIXES)
    return (package / "_C.so").exists() and any(host.exists() for host in hosts)


def find_complete(package: Path, version: str) -> Path | None:
    """Give the folder of an installed copy of this version, if the package here was not built.

    Parameters
    ----------
    package : Path
        The folder of the package that was imported.
    version : str
        Its version.

    Returns
    -------
    Path or None
        None: the package here is complete, or no installed copy is.

    Raises
    ------
    ImportError
        The libraries are missing here, and what is installed is another version.
    """
    if _is_complete(package):
        return None
    other_versions = []
    for found in distributions(name="specdec_ext"):
        place = Path(str(found.locate_file("specdec_ext")))
        if place.resolve() == package.resolve() or not _is_complete(place):
            continue
        if found.version == version:
            return place
        other_versions.append(f"{found.version} in {place.parent}")
    if other_versions and not (package / "_C.so").exists():
        raise ImportError(
            f"{package} is version {version} and was not built, and what is installed is "
            f"{', '.join(other_versions)}: build this one with `pip install "
            "--no-build-isolation -e .` in the folder of setup.py, or run elsewhere"
        )
    return None
