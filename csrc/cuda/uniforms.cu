// uniforms: the coins and the final draw that verify takes from seeds and positions.
//
// Grid: a thread a uniform. Writes 8 bytes each.
#include "../core/philox.h"
#include "kernels.h"
#include "launch.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

__global__ void __launch_bounds__(kThreads) write_uniforms(const UniformsParams p) {
  begin_kernel();
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= p.batch * p.n) return;
  const int64_t b = at / p.n;
  const Randomness& r = p.randomness;
  p.uniforms[at] =
      verify_uniform(r.seeds.data[b * r.seeds.stride[0]],
                     r.positions.data[b * r.positions.stride[0]], at % p.n, p.n - 1, r.stream);
}

}  // namespace

void uniforms(const UniformsParams& p, const Gpu& gpu) {
  const int64_t blocks = (p.batch * p.n + kThreads - 1) / kThreads;
  launch(gpu, "write_uniforms", write_uniforms, blocks, p);
}

void load_uniforms(Loading& load) { load(write_uniforms); }

}  // namespace cuda
}  // namespace specdec
