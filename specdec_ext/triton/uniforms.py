"""uniforms: the coins and the final draw that verify takes from seeds and positions.

Grid: blocks of slots over all requests. Reads 16 bytes, writes 8 per uniform.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .philox import verify_uniform

BLOCK = 256


@triton.jit(do_not_specialize=["slots", "n"])
def write_uniforms(
    seeds, seeds_stride, positions, positions_stride, uniforms, slots, n, stream,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the uniforms [B, n], flattened to `slots`. Grid: blocks of them."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < slots
    b = place // n
    seed = tl.load(seeds + b * seeds_stride, mask=inside, other=0)
    position = tl.load(positions + b * positions_stride, mask=inside, other=0)
    found = verify_uniform(seed, position, place % n, n - 1, stream)
    tl.store(uniforms + place, found, mask=inside)


def uniforms(output: Tensor, call: SimpleNamespace) -> None:
    """Fill the output of `specdec_ext.uniforms`."""
    launch(
        write_uniforms,
        triton.cdiv(output.numel(), BLOCK),
        *(call.seeds, call.seeds.stride(0), call.positions, call.positions.stride(0)),
        *(output, output.numel(), call.n, call.stream),
        BLOCK=BLOCK,
    )
