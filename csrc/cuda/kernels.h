// The operators on CUDA. Each takes checked arguments and enqueues its kernels on the stream.
#pragma once

#include "../core/params.h"
#include "../torch/operators.h"

namespace specdec {
namespace cuda {

// What kernels need from torch.
struct Gpu {
  void* stream;  // cudaStream_t
  // 256-byte aligned, lives until the operator returns (in stream order), never null.
  void* (*allocate)(void* context, int64_t bytes);
  void* context;
};

#define SPECDEC_DECLARE(name, Name) void name(const Name##Params&, const Gpu&);
SPECDEC_KERNELS(SPECDEC_DECLARE)
#undef SPECDEC_DECLARE

}  // namespace cuda
}  // namespace specdec
