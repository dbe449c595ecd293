"""The trained models of a task, as Hugging Face folders beside the tokens they were trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

from pair.seq2seq.data import Pairs, load_prepared
from pair.seq2seq.sizes import SIZES


@dataclass
class Family:
    """Models of one task that share a tokenizer.

    ``models`` are those of `SIZES` that have been trained, from the smallest to the largest;
    ``distilled`` those that were taught by one of them.
    """

    tokenizer: PreTrainedTokenizerFast
    models: dict[str, T5ForConditionalGeneration]
    distilled: dict[str, T5ForConditionalGeneration]
    splits: dict[str, Pairs]
    facts: dict[str, Any]

    @property
    def largest(self) -> str:
        """The name of the largest model."""
        return list(self.models)[-1]


def layers_of(model: Any) -> str:
    """Return the layers of an encoder and of a decoder as the papers write them: ``12+2``."""
    return f"{model.config.num_layers}+{model.config.num_decoder_layers}"


def model_folder(work_folder: Path, name: str, kind: str = "models") -> Path:
    """Return where a trained model lies, or a trained one of another kind."""
    return work_folder / kind / name


def save_model(
    model: PreTrainedModel,
    work_folder: Path,
    name: str,
    facts: dict[str, Any],
    kind: str = "models",
) -> None:
    """Write a trained model as a Hugging Face folder, and how it was trained as JSON."""
    folder = model_folder(work_folder, name, kind)
    model.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_model(work_folder: Path, name: str) -> T5ForConditionalGeneration:
    """Return a trained model in float32, in evaluation mode, on the CPU."""
    folder = model_folder(work_folder, name)
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def load_family(work_folder: Path) -> Family:
    """Return what `prepare` and `train` have left in a work folder.

    Parameters
    ----------
    work_folder : Path
        For instance ``build/seq2seq/translation``.

    Returns
    -------
    Family
        ``facts`` are those of the data under ``"data"`` and those of each training under the
        model's name.

    Raises
    ------
    FileNotFoundError
        If the data is not prepared or no size is trained.
    """
    tokenizer, splits, facts = load_prepared(work_folder)
    found = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(work_folder.glob("models/*/training.json"))
    }
    models = {name: load_model(work_folder, name) for name in SIZES if name in found}
    if not models:
        raise FileNotFoundError(f"{work_folder / 'models'} has no trained size: run `train` first")
    distilled = {name: load_model(work_folder, name) for name in found if name not in SIZES}
    return Family(tokenizer, models, distilled, splits, {"data": facts, **found})
