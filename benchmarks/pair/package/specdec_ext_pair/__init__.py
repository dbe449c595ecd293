"""The models that specdec_ext's demo and tests run, and a draft for a larger model.

``PAIR`` is the folder of a target and a draft over one tokenizer: ``target``, ``draft``,
``tokenizer``, and ``pair.json``, which says how they were made and what was measured of them.
Beside it lies ``smollm2-draft``, a draft for the model that ``python -m specdec_ext fetch smollm2``
gets (`specdec_ext.commands.pair.find_draft`).
"""

from pathlib import Path

__all__ = ["PAIR"]

PAIR = Path(__file__).parent / "stdlib-pair"
