// sample: one token per row from its law.
//
// Launches: scan_rows (scan.cuh); with filters a block a row for the cutoffs (cutoff.cuh); the
// draw, where the blocks of a row sum its tiles in integers and the last one searches (draw.cuh),
// or the race (race.cuh). Reads 2 or 4 bytes per vocabulary entry, twice (the second time from L2
// as a rule; once if filters keep few entries, shortlist.cuh), and what a mask costs (tile.cuh);
// writes 12 bytes a row. A reduced vocabulary takes two launches more (token_map.cuh).
#include "../core/philox.h"
#include "kernels.h"
#include "race.cuh"
#include "row_laws.cuh"
#include "shared.cuh"
#include "token_map.cuh"

namespace specdec {
namespace cuda {
namespace {

struct Rows {
  SampleParams p;

  __device__ RowTask operator()(int64_t b) const {
    return {logits_row(p, b), filters_at(p.sampling, b, p.logits.vocab), {}};
  }
};

__host__ __device__ bool is_race(const SampleParams& p) {
  return p.domain == static_cast<uint32_t>(Domain::kCoupled);
}

__device__ double uniform_of(const SampleParams& p, int64_t b, bool* out_of_range) {
  const Randomness& r = p.randomness;
  if (r.uniforms.data != nullptr) {
    return clamp_uniform(r.uniforms.data[b * r.uniforms.stride[0]], out_of_range);
  }
  return counter_uniform(r.seeds.data[b * r.seeds.stride[0]],
                         r.positions.data[b * r.positions.stride[0]], static_cast<Domain>(p.domain),
                         p.draft_index, r.stream);
}

__device__ DrawTask draw_task(const SampleParams& p, int64_t b, const RowTask& task,
                              const RowLaw& law) {
  DrawTask draw;
  bool out_of_range = task.filters.out_of_range;
  draw.target = task.row;
  draw.target_law = law;
  if (law.valid && !law.point_mass && !is_race(p)) draw.u = uniform_of(p, b, &out_of_range);
  draw.active = law.valid && !out_of_range;
  if (draw.active && law.point_mass) draw.token = law.argmax;
  return draw;
}

// Row b's law and its draw, seen by the whole block.
__device__ void open_draw(const Rows& rows, const LawScratch& s, int64_t b, DrawTask* shared) {
  if (threadIdx.x < kWarp) {
    const RowTask task = rows(b);
    const RowLaw law = law_of(task, s, b);
    if (threadIdx.x == 0) *shared = draw_task(rows.p, b, task, law);
  }
  __syncthreads();
}

// By one thread.
__device__ void write_token(const SampleParams& p, int64_t b, const DrawTask& draw,
                            const Drawn& drawn, double log_z) {
  p.tokens[b] = token_of_entry(draw.target, drawn.token);
  p.logprobs[b] = static_cast<float>(law_log_probability(draw.target_law, drawn.logit, log_z));
}

// By one thread. An entry of -1: nothing could be drawn.
__device__ void write_token(const SampleParams& p, int64_t b, const DrawTask& draw, int64_t entry) {
  if (entry >= 0) {
    const float logit = row_value(draw.target, entry);
    return write_token(p, b, draw, {entry, logit}, log(draw.target_law.z));
  }
  p.tokens[b] = -1;
  p.logprobs[b] = NAN;
}

// Grid: (row, split).
template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt64Registers)
    draw_tokens(const Rows rows, const LawScratch s, uint64_t* tile_sums, Divisor splits) {
  begin_kernel();
  __shared__ SharedArray<DrawTask, 1> draw_memory;
  const auto [b, split] = this_unit(splits);
  open_draw(rows, s, b, draw_memory.data());
  DrawTask& task = draw_memory[0];
  bool writes = split == 0 && threadIdx.x == 0;
  if (needs_draw(task)) {
    const ListedDraw listed = draw_if_listed<false>(s.shortlist(b), task);
    if (listed.listed) {
      if (split == 0 && listed.is_mine) write_token(rows.p, b, task, listed.drawn, listed.log_z);
      return;
    }
    const Share share = share_of(num_tiles(task.target.vocab), split, splits);
    writes = draw<kElements, false, false>(task, tile_sums + b * s.tiles, s.counters + b, share,
                                           splits, &task.token);
  }
  if (writes) write_token(rows.p, b, task, task.token);
}

// Grid: (row, split).
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    race_tokens(const Rows rows, const LawScratch s, Runner* found, Divisor splits) {
  begin_kernel();
  __shared__ SharedArray<DrawTask, 1> draw_memory;
  __shared__ SharedArray<RaceTask, 1> race_memory;
  const auto [b, split] = this_unit(splits);
  open_draw(rows, s, b, draw_memory.data());
  const DrawTask& task = draw_memory[0];
  if (threadIdx.x == 0) {
    race_memory[0] = {{task.target, task.target_law},
                      race_of(rows.p.randomness, b, rows.p.draft_index)};
  }
  __syncthreads();
  if (!needs_draw(task)) {
    if (split == 0 && threadIdx.x == 0) write_token(rows.p, b, task, task.token);
    return;
  }
  int64_t winner = -1;
  const bool last =
      run_race(race_memory[0], found + b * splits, s.counters + b, split, splits, &winner);
  if (last && threadIdx.x == 0) write_token(rows.p, b, task, winner);
}

Elements elements_of_laws(const SampleParams& p) {
  return p.mask.words == nullptr ? elements_of(p.logits, {}) : Elements::kAny;
}

const auto kDraw = by_elements([](auto e) { return draw_tokens<decltype(e)::value>; });

}  // namespace

void sample(const SampleParams& given, const Gpu& gpu) {
  if (given.batch == 0) return;
  SampleParams p = given;
  Workspace workspace;
  const int64_t tiles = num_tiles(p.logits.vocab);
  const bool filters = has_filter_arrays(p.sampling);
  const LawsAsked asked{filters, false, !is_race(p)};
  const LawReservation reserved = reserve_laws(&workspace, p.batch, tiles, asked);
  const int64_t splits = splits_for(gpu, p.batch, tiles);
  const auto tile_sums = workspace.reserve<uint64_t>(is_race(p) ? 0 : p.batch * tiles);
  const auto found = workspace.reserve<Runner>(is_race(p) ? p.batch * splits : 0);
  const MapReservation map = reserve_map(&workspace, p.map, false);
  workspace.allocate(gpu);
  launch_map(gpu, workspace, map, &p.map);
  const LawScratch s = laws_at(workspace, reserved, p.batch, tiles, asked);
  launch_laws(gpu, Rows{p}, s);
  if (is_race(p)) {
    launch(gpu, "race_tokens", race_tokens, p.batch * splits, Rows{p}, s, workspace.at(found),
           splits);
  } else {
    launch(gpu, "draw_tokens", kDraw[elements_of_laws(p)], p.batch * splits, Rows{p}, s,
           workspace.at(tile_sums), splits);
  }
}

void load_sample(Loading& load) {
  load(kDraw, race_tokens);
  load_laws<Rows>(load);
  load_map(load);
}

}  // namespace cuda
}  // namespace specdec
