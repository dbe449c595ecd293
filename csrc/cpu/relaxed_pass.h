// Passes over the vocabulary that only the rules of core/relaxed.h need.
#pragma once

#include "law_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// values[r] = number of logits above the logit of tokens[r] (-1: leave at 0), row by row.
void count_greater(const ThreadPool& pool, const LawTask* tasks, const int64_t* tokens, int64_t n,
                   double* values);

// values[r] = entropy of law r in nats, where active[r].
void entropies(const ThreadPool& pool, const LawTask* tasks, const bool* active, int64_t n,
               double* values);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
