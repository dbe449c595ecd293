// A tile of a row, shared out over a block.
#pragma once

#include "../core/rows.h"
#include "block.cuh"

namespace specdec {
namespace cuda {

using namespace SPECDEC_CPU_ISA;

// Blocks that share a row of `tiles` tiles when `rows` rows are looked at in one launch.
inline int64_t num_splits(int64_t rows, int64_t tiles);

// Shared memory for a T that has a constructor, which __shared__ variables may not have:
//     __shared__ Shared<DrawTask> memory;
//     if (threadIdx.x == 0) memory.object() = task;
template <typename T>
struct Shared {
  alignas(T) unsigned char bytes[sizeof(T)];
  __device__ T& object() { return *reinterpret_cast<T*>(bytes); }
};

}  // namespace cuda
}  // namespace specdec
