"""Where the models lie that something is trained for, and what a device multiplies fast."""

from __future__ import annotations

from pathlib import Path

import torch

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


def multiplies_bfloat16(device: torch.device) -> bool:
    """Tell whether bfloat16 pays: CPUs without instructions for it take 7 times as long."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
