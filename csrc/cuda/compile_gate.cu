// Compile-only check: every function of csrc/core in device code, so that a machine without a GPU
// notices what nvcc would refuse. Nothing here is linked or run; python_tests/test_build.py checks
// that no function is missing.
#include "../core/fixed_point.h"
#include "../core/params.h"
#include "../core/philox.h"
#include "../core/recursion.h"
#include "../core/relaxed.h"
#include "../core/row_law.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

__global__ void fixed_point_gate(double* u, uint64_t* total) {
  bool out_of_range = false;
  u[0] = clamp_uniform(u[0], &out_of_range);
  u[1] = out_of_range ? 1.0 : 0.0;
  total[0] = static_cast<uint64_t>(u[2] * residual_unit(u[3]) + u[4] * kLawUnit);
  total[1] = draw_threshold(u[0], total[0]);
  total[2] = multiply_high(total[0], total[1]);
}

__global__ void philox_gate(UniformsParams p, uint32_t* words) {
  const int64_t b = blockIdx.x;
  const int64_t seed = p.randomness.seeds.data[b];
  const int64_t position = p.randomness.positions.data[b];
  const uint32_t stream = p.randomness.stream;
  words[0] = philox4x32_10(static_cast<uint64_t>(seed), {{0, 1, 2, 3}}).word[0];
  words[1] = counter_words(seed, position, Domain::kAccept, 1, stream).word[1];
  p.uniforms[0] = counter_uniform(seed, position, Domain::kDraft, 0, stream);
  p.uniforms[1] = verify_uniform(seed, position, threadIdx.x, p.n - 1, stream);
}

__global__ void recursion_gate(const double* p, const double* q, double mass, double* h) {
  Node node;
  const double inflow = child_inflow(node, p[0], q[0], 1.0, true);
  const ResidualCoefficients coefficients = residual_after_child(node, 1.0, true);
  node = close_child(node, coefficients, mass);
  h[0] = outflow(inflow, mass) + node.inflow + node.lambda + node.mass;
  h[1] = accepts_token(h[0], p[1], q[1]) ? token_accept_probability(p[1], q[1]) : 0.0;
}

__global__ void relaxed_gate(VerifyParams p, const float* logits, double* accepted) {
  const RelaxedParams& r = p.relaxed;
  accepted[0] = accepts_lenient_greedy(logits[0], logits[1], r.lenience);
  accepted[1] = accepts_top_beta(threadIdx.x, logits[2], logits[1], r.beta, r.tau);
  accepted[2] = accepts_typical(accepted[3], accepted[4], r.epsilon, r.delta);
}

__global__ void row_law_gate(const float* logits, int64_t vocab, double* p, uint64_t* histogram) {
  const Filters filters = clean_filters(p[0], vocab / 2, p[1], p[2], vocab);
  RowLaw law;
  law.point_mass = is_greedy(filters);
  law.max = logits[0];
  law.cutoff = min_p_cutoff(law.max, filters.temperature, filters.min_p);
  RadixSelection selection;
  selection.bound = has_top_k(filters) ? filters.top_k : top_p_bound(filters.top_p, histogram[0]);
  for (int level = 0; level < kRadixLevels; ++level) {
    const uint32_t key = order_key(logits[level]);
    if (radix_matches(selection, key, level)) histogram[radix_digit(key, level)] += 1;
    histogram[key >> radix_shift(level)] += 1;
    radix_descend(&selection, histogram, level);
  }
  if (has_top_p(filters)) law.cutoff = key_value(selection.prefix);
  p[3] = law_probability(law, logits[1], 1);
  p[4] = law_log_probability(law, logits[1]);
  p[5] = support_threshold(law.cutoff, round_up(p[0]), law.scale);
  p[6] = has_min_p(filters) || has_filter(filters);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
