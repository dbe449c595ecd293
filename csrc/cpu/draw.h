// The final draws of many requests at once: from a law, or from a residual of two laws.
#pragma once

#include "../core/draw_task.h"
#include "law_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// Sums of the residuals of `tasks` (all of them residual), in tile order.
void residual_masses(const ThreadPool& pool, const DrawTask* tasks, int64_t n, double* masses);

// Draws the token of every active task whose target law is valid. An empty residual gives a token
// of the target law.
void draw_tokens(const ThreadPool& pool, DrawTask* tasks, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
