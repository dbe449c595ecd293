"""The models that specdec_ext's demo and tests run: a target and a draft over one tokenizer.

``PAIR`` is their folder: ``target``, ``draft``, ``tokenizer``, and ``pair.json``, which says how
they were made and what was measured of them.
"""

from pathlib import Path

__all__ = ["PAIR"]

PAIR = Path(__file__).parent / "stdlib-pair"
