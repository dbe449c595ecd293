// The checks of csrc/torch on their own, on any device: what a backend outside C++ calls first.
#include <torch/csrc/stable/library.h>

#include "arguments.h"
#include "registration.h"

namespace specdec {
namespace {

template <typename Params>
void leave_to_caller(const Params&) {}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CompositeExplicitAutograd, m) {
  using namespace specdec;
  m.impl("_prepare_row_law",
         TORCH_BOX((&Operator<check_row_law, leave_to_caller<RowLawParams>>::run)));
  m.impl("_prepare_sample",
         TORCH_BOX((&Operator<check_sample, leave_to_caller<SampleParams>>::run)));
  m.impl("_prepare_verify",
         TORCH_BOX((&Operator<check_verify, leave_to_caller<VerifyParams>>::run)));
  m.impl("_prepare_acceptance",
         TORCH_BOX((&Operator<check_acceptance, leave_to_caller<AcceptanceParams>>::run)));
  m.impl("_prepare_uniforms",
         TORCH_BOX((&Operator<check_uniforms, leave_to_caller<UniformsParams>>::run)));
}
