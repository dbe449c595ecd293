"""Where the models lie that something is trained for."""

from __future__ import annotations

from pathlib import Path

from specdec_ext.commands.pair import checkpoint


def model_folder(name: str) -> Path:
    """Return a model's folder: a path, or the name of a model that was fetched.

    Raises
    ------
    FileNotFoundError
        There is no such folder.
    """
    folder = checkpoint(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"target must be a model's folder or name, got {name!r}")
    return folder
