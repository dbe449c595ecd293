// row_law: the five scalars of every row.
//
// Grid and traffic: see law_pass.cpp. Writes 32 bytes a row.
#include "kernels.h"
#include "law_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

void write_law(const RowLawParams& p, int64_t r, const LawTask& task) {
  const bool usable = task.law.valid && !task.filters.out_of_range;
  p.max[r] = usable ? task.law.max : NAN;
  p.scale[r] = usable ? task.law.scale : static_cast<double>(NAN);
  p.cutoff[r] = usable ? task.law.cutoff : NAN;
  p.log_z[r] = usable ? log(task.law.z) : static_cast<double>(NAN);
  p.argmax[r] = usable ? task.law.argmax : -1;
}

}  // namespace

void row_law(const RowLawParams& p, const ThreadPool& pool) {
  Buffer<LawTask> tasks(p.rows);
  for (int64_t r = 0; r < p.rows; ++r) {
    const Filters filters = filters_at(p.sampling, r, p.logits.vocab);
    tasks[r] = LawTask(logits_row(p, r), filters, true);
  }
  compute_laws(pool, tasks.data(), p.rows);
  for (int64_t r = 0; r < p.rows; ++r) write_law(p, r, tasks[r]);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
