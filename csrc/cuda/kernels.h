// The operators on CUDA. Each takes checked arguments and enqueues its kernels on the stream.
#pragma once

#include "../core/params.h"

namespace specdec {
namespace cuda {

// What kernels need from torch.
struct Gpu {
  void* stream;  // cudaStream_t
  // 256-byte aligned, lives until the operator returns (in stream order), never null.
  void* (*allocate)(void* context, int64_t bytes);
  void* context;
};

void row_law(const RowLawParams&, const Gpu&);
void sample(const SampleParams&, const Gpu&);
void verify(const VerifyParams&, const Gpu&);
void verify_tree(const VerifyTreeParams&, const Gpu&);
void acceptance(const AcceptanceParams&, const Gpu&);
void uniforms(const UniformsParams&, const Gpu&);
void tree_mask(const TreeMaskParams&, const Gpu&);
void compact_kv(const CompactKvParams&, const Gpu&);

}  // namespace cuda
}  // namespace specdec
