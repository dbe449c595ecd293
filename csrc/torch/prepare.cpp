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
};

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CompositeExplicitAutograd, m) {
  specdec::implement_operators<specdec::OnlyChecks>(m, "_prepare_");
  specdec::implement_tree_operators<specdec::OnlyChecks>(m, "_prepare_");
}
