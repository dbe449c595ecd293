// Acceptance tests that are not lossless; each is reached only through its own rule name.
#pragma once

#include <cmath>

#include "platform.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// Lenience (Leviathan et al. 2023, A.5) is the token rule with lenience * q in place of q. At
// temperature 0 it compares with the best token instead: p(x) >= lenience * max p, unfiltered, T =
// 1 (the paper prints this inequality reversed).
SPECDEC_HD bool accepts_lenient_greedy(float logit, float max_logit, double lenience) {
  return exp(static_cast<double>(logit) - max_logit) >= lenience;
}

// Xia et al. 2023, equations 8-10: among the top beta (ties share the better rank), and within tau
// nats of the most likely token. The difference of raw logits is that of log-probabilities.
SPECDEC_HD bool accepts_top_beta(int64_t num_greater, float logit, float max_logit, int64_t beta,
                                 double tau) {
  return 1 + num_greater <= beta && static_cast<double>(max_logit) - logit <= tau;
}

// Typical acceptance (Medusa, Cai et al. 2024, section 3.3): an entropy-scaled threshold, entropy
// in nats.
SPECDEC_HD bool accepts_typical(double p, double entropy, double epsilon, double delta) {
  const double scaled = delta * exp(-entropy);
  return p > (epsilon < scaled ? epsilon : scaled);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
