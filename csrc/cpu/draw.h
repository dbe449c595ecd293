// The final draws of many requests at once: from a law, or from a residual of two laws.
#pragma once

#include "../core/recursion.h"
#include "law_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

struct DrawTask {
  Row target;
  RowLaw target_law;
  Row draft;  // data == nullptr: no draft law in the residual
  RowLaw draft_law;
  bool residual = false;  // [coefficients.target * p - coefficients.draft * q]+ without `excluded`
  ResidualCoefficients coefficients{1.0, 1.0};
  int64_t excluded = -1;
  double mass = -1.0;  // what the residual sums to; negative: not known yet
  double u = 0.0;
  bool active = false;
  int64_t token = -1;  // the result
};

// Sums of the residuals of `tasks` (all of them residual), in tile order.
void residual_masses(const ThreadPool& pool, const DrawTask* tasks, int64_t n, double* masses);

// Draws the token of every active task whose target law is valid. A residual without mass gives a
// token of the target law.
void draw_tokens(const ThreadPool& pool, DrawTask* tasks, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
