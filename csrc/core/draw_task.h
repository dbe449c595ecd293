// What is drawn at the end of a request: a token of a law, or of the residual of two laws.
#pragma once

#include "recursion.h"
#include "rows.h"

namespace specdec {

struct DrawTask {
  Row target;
  RowLaw target_law;
  Row draft;  // in token order; data == nullptr: no draft law in the residual
  RowLaw draft_law;
  bool residual = false;  // [coefficients.target * p - coefficients.draft * q]+ without `excluded`
  SPECDEC_CPU_ISA::ResidualCoefficients coefficients{1.0, 1.0};
  int64_t excluded = -1;
  TokenList tried;     // trees: excluded as well
  TokenList no_draft;  // trees: the draft law is 0 there
  double u = 0.0;
  bool active = false;
  int64_t token = -1;  // the result; may be known beforehand
};

namespace SPECDEC_CPU_ISA {

// Whether the token takes passes over the vocabulary.
SPECDEC_HD bool needs_draw(const DrawTask& task) {
  return task.active && task.target_law.valid && !task.target_law.point_mass && task.token < 0;
}

// What the weights of a residual's draft law are multiplied by: of probabilities that sum to so
// little that no float32 holds their ratio to the target's weights, 2^100, else 1.
SPECDEC_HD float draft_lift(const RowLaw& law) {
  return law.linear && law.z < 0x1p-64 ? 0x1p100f : 1.0f;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
