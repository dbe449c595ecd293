// From rows to laws: maxima, sums of exponentials and filter cutoffs of many rows at once.
#pragma once

#include "threads.h"
#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

struct LawTask : LawRow {
  Filters filters;
  bool want_argmax = false;
  ExtraTask want;
  double extra = 0.0;  // the rank or entropy that `want` asks for

  LawTask() = default;
  LawTask(const Row& row, const Filters& filters, bool want_argmax = false)
      : LawRow{row, {}}, filters(filters), want_argmax(want_argmax) {}
};

// A slice's rows are read up to three times; this many bytes of them are likely still in cache.
constexpr int64_t kSliceBytes = int64_t{16} << 20;

// Requests that go together through all passes, each with so many rows like those of `target`.
inline int64_t requests_per_slice(const RowBatch& target, int64_t rows) {
  const int64_t row_bytes = target.vocab * (target.element == Element::kFloat32 ? 4 : 2);
  const int64_t requests = kSliceBytes / (rows * row_bytes);
  return requests > 0 ? requests : 1;
}

// Fills the laws of `tasks`. Reads every row once; again from cache where filters ask
// (cutoff.cpp).
void compute_laws(const ThreadPool& pool, LawTask* tasks, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
