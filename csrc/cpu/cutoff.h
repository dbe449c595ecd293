// Filters: which logits top-k, top-p and min-p keep.
#pragma once

#include "threads.h"
#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// Whether find_cutoffs wants the maxima of a row's groups: for a small top-k they say where to
// look.
bool uses_group_max(const Filters& filters);

struct CutoffTask {
  const Row* row;
  const Filters* filters;
  const float* group_max;  // [num_groups(row.vocab)] if uses_group_max
  RowLaw* law;             // valid, with scale and max; its cutoff is to be set
  bool found_z;            // the result: whether law->z is known now, as with a small top-k
};

// Finds the cutoffs of many rows at once. Of rows that several ranks hold, group_max is read where
// this rank holds the tile.
void find_cutoffs(const ThreadPool& pool, CutoffTask* tasks, int64_t n);

// The same, where several ranks hold the rows.
void find_cutoffs_over_ranks(const ThreadPool& pool, CutoffTask* tasks, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
