"""Verification over a vocabulary that is sharded across ranks, without gathering the logits.

Tensor parallelism leaves each rank with the logits of a part of the vocabulary. `verify_sharded`
takes these parts and returns, on every rank, what `specdec_ext.verify` returns of the whole rows,
to the bit: docs/sharded.md says how, and what is exchanged. Rows on the CPU go through the C++
operator, which calls back for its exchanges, rows on a GPU through triton/sharded.py.
"""

from .parts import TILE, even_bounds
from .sharded import verify_sharded

__all__ = ["TILE", "even_bounds", "verify_sharded"]
