// The operators on CUDA. Each takes checked arguments and enqueues its kernels on the stream.
#pragma once

#include "../core/params.h"

namespace specdec {
namespace cuda {

struct Gpu;

void row_law(const RowLawParams&, const Gpu&);
void sample(const SampleParams&, const Gpu&);
void verify(const VerifyParams&, const Gpu&);
void acceptance(const AcceptanceParams&, const Gpu&);
void uniforms(const UniformsParams&, const Gpu&);

}  // namespace cuda
}  // namespace specdec
