// The operators on CUDA. Each takes checked arguments and enqueues its kernels on the stream.
#pragma once

#include "../core/params.h"
#include "../torch/operators.h"

namespace specdec {
namespace cuda {

// What launches depend on, of a device.
struct Chip {
  int64_t multiprocessors;
  bool chains;  // launches: programmatic dependent launch (sm_90 and later)
};

// Of a device; at its first call for one loads all kernels there, which a capture into a graph may
// not do at their first launch. That device must be the current one.
Chip chip_of(int32_t device);

// What kernels need from torch, for one operator call.
struct Gpu {
  Chip chip;
  void* stream;  // cudaStream_t
  // 256-byte aligned, lives until the operator returns (in stream order), never null.
  void* (*allocate)(void* context, int64_t bytes);
  void* context;
  mutable int64_t launches = 0;  // so far
};

// Each operator, and the loading of its kernels (Loading in launch.cuh).
class Loading;
#define SPECDEC_DECLARE(name, Name)           \
  void name(const Name##Params&, const Gpu&); \
  void load_##name(Loading&);
SPECDEC_KERNELS(SPECDEC_DECLARE)
#undef SPECDEC_DECLARE

// The same where the draft's laws are lists of tokens; what verify and verify_tree call then.
void verify_lists(const VerifyParams&, const Gpu&);
void load_verify_lists(Loading&);
void verify_tree_lists(const VerifyTreeParams&, const Gpu&);
void load_verify_tree_lists(Loading&);

}  // namespace cuda
}  // namespace specdec
