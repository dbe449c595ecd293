"""The trained models of a task, as Hugging Face folders beside the tokens they were trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from pair.seq2seq.data import Pairs, load_prepared


@dataclass
class Family:
    """Models of one task that share a tokenizer, from the smallest to the largest."""

    tokenizer: PreTrainedTokenizerFast
    models: dict[str, T5ForConditionalGeneration]
    splits: dict[str, Pairs]
    facts: dict[str, Any]

    @property
    def largest(self) -> str:
        """The name of the largest model."""
        return list(self.models)[-1]


def model_folder(work_folder: Path, name: str) -> Path:
    """Return where a trained model lies."""
    return work_folder / "models" / name


def save_model(
    model: T5ForConditionalGeneration, work_folder: Path, name: str, facts: dict[str, Any]
) -> None:
    """Write a trained model as a Hugging Face folder, and how it was trained as JSON."""
    folder = model_folder(work_folder, name)
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
        The models that have been trained, by their number of parameters, and the tokens of the
        splits. ``facts`` are those of the data under ``"data"`` and those of each training under
        the model's name.

    Raises
    ------
    FileNotFoundError
        If the data is not prepared or no model is trained.
    """
    tokenizer, splits, facts = load_prepared(work_folder)
    found = [path.parent.name for path in sorted(work_folder.glob("models/*/training.json"))]
    if not found:
        raise FileNotFoundError(f"{work_folder / 'models'} has no trained model: run `train` first")
    models = {name: load_model(work_folder, name) for name in found}
    order = sorted(found, key=lambda name: (models[name].num_parameters(), name))
    trained = {
        name: json.loads((model_folder(work_folder, name) / "training.json").read_text())
        for name in order
    }
    in_order = {name: models[name] for name in order}
    return Family(tokenizer, in_order, splits, {"data": facts, **trained})
