// The checks of csrc/torch on their own, on any device: what a backend outside C++ calls first.
#include "registration.h"

namespace specdec {
namespace {

// Leaves the outputs as they were allocated.
struct OnlyChecks {
  static void row_law(const RowLawCall&) {}
  static void sample(const SampleCall&) {}
  static void verify(const VerifyCall&) {}
  static void verify_tree(const VerifyTreeCall&) {}
  static void acceptance(const AcceptanceCall&) {}
  static void uniforms(const UniformsCall&) {}
  static void tree_mask(const TreeMaskCall&) {}
  static void compact_kv(const CompactKvCall&) {}
  static void tree_attention(const TreeAttentionCall&) {}
};

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CompositeExplicitAutograd, m) {
  using namespace specdec;
  implement_operators<OnlyChecks>(m, "_prepare_");
  // Has no kernels in C++: see specdec_ext/attention.py and specdec_ext/triton.
  m.impl("_prepare_tree_attention",
         TORCH_BOX((&Operator<check_tree_attention, OnlyChecks::tree_attention>::run)));
}
