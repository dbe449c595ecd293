// row_law: the five scalars of every row.
//
// Launches: scan_rows (scan.cuh), then a block a row for the cutoffs (cutoff.cuh). Reads 2 or 4
// bytes per vocabulary entry, with filters some groups or the row again from L2, and what a mask
// costs (tile.cuh); writes 32 bytes a row.
#include "kernels.h"
#include "row_laws.cuh"

namespace specdec {
namespace cuda {
namespace {

struct Rows {
  RowLawParams p;

  __device__ RowTask operator()(int64_t r) const {
    return {logits_row(p, r), filters_at(p.sampling, r, p.logits.vocab), {}};
  }
};

template <bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    write_laws(const Rows rows, const LawScratch s) {
  begin_kernel();
  const RowLawParams& p = rows.p;
  const int64_t r = blockIdx.x;
  const RowTask& task = task_of_block(rows, r);
  double unused = 0.0;
  const RowLaw law = finish_law<kMasked>(task.row, task.filters, true, ExtraTask{},
                                         s.summaries + r * s.tiles, group_max_of(s, r), &unused);
  if (threadIdx.x != 0) return;
  const bool usable = law.valid && !task.filters.out_of_range;
  p.max[r] = usable ? law.max : NAN;
  p.scale[r] = usable ? law.scale : static_cast<double>(NAN);
  p.cutoff[r] = usable ? law.cutoff : NAN;
  p.log_z[r] = usable ? log(law.z) : static_cast<double>(NAN);
  p.argmax[r] = usable ? law.argmax : -1;
}

}  // namespace

void row_law(const RowLawParams& p, const Gpu& gpu) {
  Workspace workspace;
  const int64_t tiles = num_tiles(p.logits.vocab);
  const bool filters = has_filter_arrays(p.sampling);
  const LawReservation reserved = reserve_laws(&workspace, p.rows, tiles, {filters});
  workspace.allocate(gpu);
  const LawScratch s = laws_at(workspace, reserved, p.rows, tiles, {filters});
  launch_scan(gpu, Rows{p}, s, true);
  const auto kernel = p.mask.words != nullptr ? write_laws<true> : write_laws<false>;
  launch(gpu, "write_laws", kernel, p.rows, Rows{p}, s);
}

void load_row_law(Loading& load) {
  load(write_laws<false>, write_laws<true>);
  load_scan<Rows>(load);
}

}  // namespace cuda
}  // namespace specdec
