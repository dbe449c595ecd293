// The checks of csrc/torch on their own, on any device: what a backend outside C++ calls first.
#include "operators.h"
#include "registration.h"

namespace specdec {
namespace {

// Leaves the outputs as they were allocated.
template <typename Call>
void run_nothing(const Call&) {}

}  // namespace
}  // namespace specdec

SPECDEC_LIBRARY_IMPL(SPECDEC_NAMESPACE, CompositeExplicitAutograd, m) {
  using namespace specdec;
#define SPECDEC_IMPLEMENT(name, Name) \
  m.impl("_prepare_" #name, Operator<check_##name, run_nothing<Name##Call>>::boxed);
  SPECDEC_OPERATORS(SPECDEC_IMPLEMENT)
#undef SPECDEC_IMPLEMENT
}
