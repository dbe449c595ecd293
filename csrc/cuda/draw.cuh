// Draws by inverse CDF in integers, from a law or from a residual of two laws.
//
// DECLARATIONS FIRST: bodies follow.
#pragma once

#include "../core/draw_task.h"
#include "tile.cuh"

namespace specdec {
namespace cuda {

// All of `task` is const and may lie in shared memory (see Shared in tile.cuh).

// Writes tile_masses[t], the residual's mass in tile t, for t = split, split + splits, ...
// Collective over the block. Nothing unless task.residual and needs_draw(task).
__device__ void residual_mass_tiles(const DrawTask& task, int64_t split, int64_t splits,
                                    double* tile_masses);

// The sum of n tile values in a fixed order. Collective over a full warp, result in every lane.
__device__ double sum_tiles(const double* tile_values, int64_t n);

// The request's draw. Each of its `splits` blocks sums its share of tiles into tile_sums; the last
// one to arrive at `counter` (0 before the launch, 0 again after it) searches. Returns true in every
// thread of that one block, with *token set (a thread's own variable); -1: nothing to draw from.
// `mass`: that of the residual, sum_tiles of its tiles; not read where !task.residual.
__device__ bool draw(const DrawTask& task, double mass, uint64_t* tile_sums, uint32_t* counter,
                     int64_t split, int64_t splits, int64_t* token);

}  // namespace cuda
}  // namespace specdec
