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

// Fills the laws of `tasks`. Reads every row once; again from cache where filters ask
// (cutoff.cpp).
void compute_laws(const ThreadPool& pool, LawTask* tasks, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
