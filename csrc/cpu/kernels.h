// The kernels of one instruction set. register.cpp picks a set at load time.
#pragma once

#include "../core/params.h"
#include "../core/platform.h"
#include "threads.h"

namespace specdec {

struct Kernels {
  void (*row_law)(const RowLawParams&, const ThreadPool&);
  void (*sample)(const SampleParams&, const ThreadPool&);
  void (*verify)(const VerifyParams&, const ThreadPool&);
  void (*verify_tree)(const VerifyTreeParams&, const ThreadPool&);
  void (*acceptance)(const AcceptanceParams&, const ThreadPool&);
  void (*uniforms)(const UniformsParams&, const ThreadPool&);
  void (*tree_mask)(const TreeMaskParams&, const ThreadPool&);
  void (*compact_kv)(const CompactKvParams&, const ThreadPool&);
};

#define SPECDEC_DECLARE_KERNELS(isa)                                       \
  namespace isa {                                                          \
  void row_law(const RowLawParams&, const ThreadPool&);                    \
  void sample(const SampleParams&, const ThreadPool&);                     \
  void verify(const VerifyParams&, const ThreadPool&);                     \
  void verify_tree(const VerifyTreeParams&, const ThreadPool&);            \
  void acceptance(const AcceptanceParams&, const ThreadPool&);             \
  void uniforms(const UniformsParams&, const ThreadPool&);                 \
  void tree_mask(const TreeMaskParams&, const ThreadPool&);                \
  void compact_kv(const CompactKvParams&, const ThreadPool&);              \
  constexpr Kernels kKernels{row_law,    sample,   verify,    verify_tree, \
                             acceptance, uniforms, tree_mask, compact_kv}; \
  }

SPECDEC_DECLARE_KERNELS(baseline)
SPECDEC_DECLARE_KERNELS(avx2)
SPECDEC_DECLARE_KERNELS(avx512)

#undef SPECDEC_DECLARE_KERNELS

}  // namespace specdec
