// Filters of one row: which logits top-k, top-p and min-p keep.
#pragma once

#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// Whether apply_filters wants the maxima of the row's groups: for a small top-k they say where to
// look.
bool uses_group_max(const Filters& filters);

// Sets law->cutoff of a valid law with scale and max known. With a small top-k law->z too, and
// returns whether it did. `group_max` holds num_groups(row.vocab) maxima if uses_group_max.
bool apply_filters(const Row& row, const Filters& filters, const float* group_max, RowLaw* law);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
