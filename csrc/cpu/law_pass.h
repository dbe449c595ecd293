// From rows to laws: maxima, sums of exponentials and filter cutoffs of many rows at once.
#pragma once

#include "../core/params.h"
#include "../core/row_law.h"
#include "threads.h"
#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

struct LawTask {
  Row row;
  Filters filters;
  bool want_argmax = false;
  RowLaw law;  // the result
};

// Fills the laws of `tasks`. Reads every row once; again from cache where filters ask
// (cutoff.cpp).
void compute_laws(const ThreadPool& pool, LawTask* tasks, int64_t n);

// The sampling parameters of request b, cleaned.
inline Filters filters_at(const SamplingParams& p, int64_t b, int64_t vocab) {
  const auto number = [b](const Array<float>& a, double absent) {
    return a.data != nullptr ? static_cast<double>(a.data[b * a.stride[0]]) : absent;
  };
  const int64_t top_k = p.top_k.data != nullptr ? load_id(p.top_k, b, 0) : 0;
  return clean_filters(number(p.temperature, 1.0), top_k, number(p.top_p, 1.0),
                       number(p.min_p, 0.0), vocab);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
