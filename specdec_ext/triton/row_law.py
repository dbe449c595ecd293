"""row_law: the five scalars of every row.

Grid and traffic: law_pass.py, cutoff.py, finish.py. Writes 32 bytes a row.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .launch import batch_of, compute_laws, launch, mask_of, rows_of, sampling_of, tiling
from .laws import INFINITY, NO_LAW, POINT_MASS, filters_at, load_law


@triton.jit
def write_row_laws(sampling, laws, top, scale, cutoff, log_z, argmax, vocab):
    """Write scalars: NaN and -1 without a law or with a parameter out of range. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    law = load_law(laws, row)
    usable = (law.kind != NO_LAW) & (filters_at(sampling, row, vocab).out_of_range == 0)
    point = law.kind == POINT_MASS
    tl.store(top + row, tl.where(usable, law.max, float("nan")))
    tl.store(scale + row, tl.where(usable, tl.where(point, INFINITY, law.scale), float("nan")))
    tl.store(cutoff + row, tl.where(usable, law.cutoff, float("nan")))
    tl.store(log_z + row, tl.where(usable, tl.log(law.z), float("nan")))
    tl.store(argmax + row, tl.where(usable, law.argmax, -1))


def row_law(outputs: tuple[Tensor, ...], call: SimpleNamespace) -> None:
    """Fill the outputs of `specdec_ext.row_law`."""
    rows, vocab = call.logits.shape
    sampling = sampling_of(call)
    batch = batch_of(rows_of(call.logits, mask=mask_of(call.allowed_mask, vocab)), sampling)
    laws: Any = compute_laws(tiling(vocab), batch, rows, want_argmax=True)
    launch(write_row_laws, rows, sampling, laws, *outputs, vocab, num_warps=1)
