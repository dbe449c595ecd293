// uniforms: the coins and the final draw that verify takes from seeds and positions.
//
// Grid: requests over threads. Writes 8 bytes per uniform.
#include "../core/philox.h"
#include "kernels.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

void uniforms(const UniformsParams& p, const ThreadPool& pool) {
  constexpr int64_t kRequestsPerThread = 256;
  const Randomness& r = p.randomness;
  parallel_for(pool, p.batch, kRequestsPerThread, [&](int64_t b) {
    for (int64_t slot = 0; slot < p.n; ++slot) {
      p.uniforms[b * p.n + slot] =
          verify_uniform(r.seeds.data[b * r.seeds.stride[0]],
                         r.positions.data[b * r.positions.stride[0]], slot, p.n - 1, r.stream);
    }
  });
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
