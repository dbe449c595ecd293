// Chain verification.
//
// Launches, each over all requests at once and all on the caller's stream:
//   laws     maximum and sum of exponentials of all tiles of target and draft rows (scan.cuh)
//   finish   (filters) a block a row: cutoffs; the rows' laws; what few entries they keep
//   race     (coupled rule) a block takes some tiles of a target row; a row's last block compares
//   decide   a block a request (decide_alone.cuh); some where masses of residuals decide
//            (decide_block.cuh)
//   draw     (where a draft's law is read) integer sums of the final law, tile by tile; a request's
//            last block searches. Where it can, `decide` has drawn (draw_at_once.cuh)
// so 2 or 3 for any rule without filters, and 1 more with them. raw_logprobs adds 2, a reduced
// draft vocabulary 2 that come first (token_map.cuh), and lists of a draft's tokens 1 that comes
// first and 1 after `laws` (token_lists.cuh).
//
// Reads 2 or 4 bytes per entry of each target and draft row; again both rows of the residuals of
// undecided nodes, and of the final residual, unless few entries are kept (shortlist.cuh), or
// deterministic draft tokens' tiles in the place of that; or each target row again for a race; and
// what masks and reduced vocabularies cost (tile.cuh). Unlike the CPU's, a stepwise rule reads the
// rows after its first failure too: waiting for the decision would leave the chip idle. Writes
// O(rows x tiles). Numerics: core/; float sums in fixed tiles combined in tile order, so that
// neither splits nor the batch change a bit.
#include "cutoff.cuh"
#include "decide_alone.cuh"
#include "decide_block.cuh"
#include "kernels.h"
#if SPECDEC_LISTS
#include "token_lists.cuh"
#else
#include "token_map.cuh"
#endif

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- laws ---

// Asks for the first tiles of this block, which follow from the shapes alone. By all warps but the
// first, which plans them in the meantime.
__device__ __forceinline__ void prefetch_first_tiles(const VerifyParams& p, const Scratch& s) {
  constexpr int kOfTile = static_cast<int>(kTile) / 64;  // threads: a line of 16-bit entries each
  if (threadIdx.x < kWarp) return;
  const int thread = static_cast<int>(threadIdx.x) - kWarp;
  const int64_t k = blockIdx.x + static_cast<int64_t>(thread / kOfTile) * gridDim.x;
  if (k >= s.whole) return;
  const auto [unit, tile] = place_in(k, s.tiles);
  const auto [b, slot] = place_in(unit, s.rows);
  prefetch_tiles(row_of_slot(p, b, slot), {tile, tile + 1}, thread % kOfTile, kOfTile, 2);
}

template <bool kMasked, Elements kElements>
__global__ void __launch_bounds__(kThreads, scan_blocks(kMasked))
    scan_laws(const VerifyParams p, const Scratch s) {
  begin_kernel();
  prefetch_first_tiles(p, s);
  clear_counters(s.counters, p.batch * s.rows);
  const ChainRows rows{p, s.rows};
  scan_all<kMasked, kElements>(RowsToScan<ChainRows, ChainRests>{rows,
                                                                 s.whole,
                                                                 s.tiles,
                                                                 s.summaries,
                                                                 s.group_max,
                                                                 false,
                                                                 s.tasks,
                                                                 {p, s.rows, s.gamma, s.all}});
}

#if SPECDEC_LISTS
// The sums of the draft's rows, which are lists; scan_laws has left them out.
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    scan_lists(const VerifyParams p, const Scratch s, Divisor splits) {
  begin_kernel();
  const Unit unit = this_unit(splits);
  const auto [b, i] = place_in(unit.index, p.gamma);
  const int64_t slot = p.gamma + 1 + i;
  const RowTask task = ChainRows{p, s.rows}(b * s.rows + slot);
  const Row& row = task.row;
  if (row.data == nullptr) return;
  if (s.finished && unit.split == 0 && threadIdx.x == 0) s.tasks[b * s.rows + slot] = task;
  const Share share = share_of(num_tiles(row.vocab), unit.split, splits);
  scan_list(row, share.first, share.last,
            s.summaries + (b * s.rows + slot) * s.tiles + share.first);
}
#endif

template <bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers) finish_laws(const Scratch s) {
  begin_kernel();
  __shared__ SharedArray<RowTask, 1> of_row;  // registers are short where cutoffs are looked for
  const int64_t row = blockIdx.x;
  copy_by_block(of_row.data(), s.tasks[row]);
  const RowTask& task = of_row[0];
  const float* group_max = s.group_max != nullptr ? s.group_max + row * s.groups : nullptr;
  double extra = 0.0;
  const RowLaw law =
      finish_law<kMasked>(task.row, task.filters, false, task.extra, s.summaries + row * s.tiles,
                          group_max, &extra, s.shortlists + row);
  if (threadIdx.x == 0) {
    s.laws[row] = law;
    s.extras[row] = extra;
  }
}

// ---- races ---

#if !SPECDEC_LISTS  // a rule that races reads no law of a draft

__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    race_rows(const VerifyParams p, const Scratch s, Divisor splits) {
  begin_kernel();
  __shared__ SharedArray<RaceTask, 1> task;
  const Unit unit = this_unit(splits);
  const RowTask& of_row = task_of_block(ChainRows{p, s.rows}, unit.index);
  if (of_row.row.data == nullptr || is_greedy(of_row.filters)) return;
  if (threadIdx.x < kWarp) {
    double unused = 0.0;
    const RowLaw law = s.finished ? s.laws[unit.index]
                                  : combine_tiles(of_row.row, of_row.filters, false, of_row.extra,
                                                  s.summaries + unit.index * s.tiles, &unused);
    const auto [b, i] = place_in(unit.index, s.rows);
    if (threadIdx.x == 0) task[0] = {{of_row.row, law}, race_of(p.randomness, b, i)};
  }
  __syncthreads();
  if (!task[0].law.valid) return;
  int64_t winner = -1;
  const bool last = run_race(task[0], s.runners + unit.index * s.tiles, s.counters + unit.index,
                             unit.split, splits, &winner);
  if (last && threadIdx.x == 0) s.extras[unit.index] = static_cast<double>(winner);
}

#endif

// ---- the extra token ---

// With fewer registers a spilled one is read between the loads of two rows, and waits for the
// first.
template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    draw_extra(const VerifyParams p, const Scratch s, Divisor splits) {
  let_next_launch_begin();
  __shared__ SharedArray<Request, 1> request;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index;
  const Share share = share_of(num_tiles(p.target.vocab), unit.split, splits);
  wait_for_launch_before();
  copy_by_block(request.data(), s.requests[b]);
  const DrawTask& task = request[0].draw;
  if (!needs_draw(task)) return;
  Drawn drawn;
  double log_z = 0.0;
  if (draw_in_shares<kElements>(task, s.part_sums + b * s.tiles * kWarps, s.counters + b, share,
                                splits, &drawn, &log_z)) {
    write_extra_token(p, b, request[0].accepted, drawn.token,
                      law_log_probability(task.target_law, drawn.logit, log_z));
  }
}

// ---- raw logprobs ---

// The target rows without filters at T = 1, where a token was emitted.
struct RawRows {
  const VerifyParams& p;

  __device__ __forceinline__ RowTask operator()(int64_t k) const {
    RowTask task;
    const auto [b, i] = place_in(k, p.gamma + 1);
    if (i <= p.num_accepted[b]) task.row = target_row(p, b, i);
    return task;
  }
};

template <bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    scan_raw(const VerifyParams p, const Scratch s) {
  begin_kernel();
  const RawRows rows{p};
  scan_all<kMasked, Elements::kAny>(RowsToScan<RawRows>{
      rows, p.batch * (p.gamma + 1) * s.tiles, s.tiles, s.summaries, nullptr, false, nullptr});
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    write_raw_logprobs(const VerifyParams p, const Scratch s) {
  begin_kernel();
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (place >= p.batch * (p.gamma + 1)) return;
  const RowTask task = RawRows{p}(place);
  double unused = 0.0;
  const RowLaw law = combine_tiles(task.row, task.filters, false, task.extra,
                                   s.summaries + place * s.tiles, &unused);
  if (threadIdx.x % kWarp == 0 && law.valid) {
    p.logprobs[place] = target_log_probability({task.row, law}, p.tokens[place]);
  }
}

// ---- host ---

// All scratch memory of a call, what the workspace has promised already included.
Scratch make_scratch(const VerifyParams& p, const Gpu& gpu, Workspace* workspace) {
  Scratch s;
  const bool filters = any_filters(p);
  const bool has_draft = p.draft.data != nullptr && reads_draft_law(p.rule);
  s.rows = p.gamma + 1 + (has_draft ? p.gamma : 0);
  s.gamma = p.gamma;
  s.tiles = num_tiles(has_draft && p.draft.vocab > p.target.vocab ? p.draft.vocab : p.target.vocab);
  s.groups = s.tiles * num_groups(kTile);
  // Masses of residuals decide in the block rule alone, and there where drafts are sampled; of
  // nodes 1 .. gamma - 1, as the first one always accepts and the last one is a leaf.
  s.sums = has_draft && p.rule == Rule::kBlock && p.gamma > 0 ? p.gamma - 1 : 0;
  s.finished = filters;
  s.races = runs_races(p.rule);
  s.draws = has_draft;
  const int64_t rows = p.batch * s.rows;
  s.whole = rows * s.tiles;
  s.all = s.whole + (reads_draft_law(p.rule) && !has_draft ? p.batch * p.gamma : 0);
  const auto summaries = workspace->reserve<TileSummary>(s.all);
  const auto group_max = workspace->reserve<float>(filters ? rows * s.groups : 0);
  const auto laws = workspace->reserve<RowLaw>(filters ? rows : 0);
  const auto extras = workspace->reserve<double>(filters || s.races ? rows : 0);
  const auto shortlists = workspace->reserve<Shortlist>(filters ? rows : 0);
  const auto tasks = workspace->reserve<RowTask>(filters ? rows : 0);
  const auto runners = workspace->reserve<Runner>(s.races ? rows * s.tiles : 0);
  const auto requests = workspace->reserve<Request>(s.draws ? p.batch : 0);
  const auto part_sums = workspace->reserve<uint64_t>(s.draws ? p.batch * s.tiles * kWarps : 0);
  const auto masses = workspace->reserve<double>(p.batch * s.sums * s.tiles);
  const auto counters = workspace->reserve<uint32_t>(rows);
  workspace->allocate(gpu);
  s.summaries = workspace->at(summaries);
  s.rests = s.summaries + s.whole;
  s.group_max = filters ? workspace->at(group_max) : nullptr;
  s.laws = workspace->at(laws);
  s.extras = workspace->at(extras);
  s.shortlists = workspace->at(shortlists);
  s.tasks = filters ? workspace->at(tasks) : nullptr;
  s.runners = workspace->at(runners);
  s.requests = workspace->at(requests);
  s.part_sums = workspace->at(part_sums);
  s.masses = workspace->at(masses);
  s.counters = workspace->at(counters);
  return s;
}

constexpr Elements kOfMasked = kLists ? Elements::kListed : Elements::kAny;
constexpr auto kScanMasked = scan_laws<true, kOfMasked>;
const auto kScan = by_elements([](auto e) { return scan_laws<false, decltype(e)::value>; });
const auto kDecideBlock = by_elements([](auto e) { return decide_block<decltype(e)::value>; });
const auto kDraw = by_elements([](auto e) { return draw_extra<decltype(e)::value>; });

// Launches kernel(p, s, splits) over units x splits blocks, the tiles of a unit shared out among as
// many blocks as it takes to fill the chip.
void launch_split(const Gpu& gpu, const char* name,
                  void (*kernel)(const VerifyParams, const Scratch, Divisor), int64_t units,
                  int64_t tiles, const VerifyParams& p, const Scratch& s,
                  int64_t held = kBlocksAt64Registers) {
  const int64_t splits = splits_for(gpu, units, tiles, held);
  launch(gpu, name, kernel, units * splits, p, s, splits);
}

void launch_scan(const Gpu& gpu, const VerifyParams& p, const Scratch& s) {
  const bool masked = p.mask.words != nullptr;
  const bool decides_next = !s.finished && !s.races && s.sums == 0;
  const int64_t next = decides_next ? p.batch : 0;
  launch(gpu, "scan_laws", masked ? kScanMasked : kScan[elements_of_rows(p)],
         blocks_to_scan(gpu, s.whole, scan_blocks(masked), next, s.all - s.whole), p, s);
}

void launch_raw_logprobs(const Gpu& gpu, const VerifyParams& p, const Scratch& s) {
  const int64_t nodes = p.batch * (p.gamma + 1);
  const bool masked = p.mask.words != nullptr;
  launch(gpu, "scan_raw", masked ? scan_raw<true> : scan_raw<false>,
         blocks_to_scan(gpu, nodes * s.tiles, kBlocksAt80Registers), p, s);
  launch(gpu, "write_raw_logprobs", write_raw_logprobs, (nodes + kWarps - 1) / kWarps, p, s);
}

void launch_decide(const Gpu& gpu, const VerifyParams& p, const Scratch& s) {
  const bool laws = p.draft.data != nullptr && reads_draft_law(p.rule);
  if (laws && p.rule == Rule::kBlock) {
    return launch_split(gpu, "decide", kDecideBlock[elements_of_laws(p)], p.batch, s.sums * s.tiles,
                        p, s, kBlocksAt128Registers);
  }
  auto kernel = decide_alone<Reads::kLaws>;
#if !SPECDEC_LISTS
  if (!laws) {
    kernel = reads_draft_law(p.rule) ? decide_alone<Reads::kTokens> : decide_alone<Reads::kTarget>;
  }
#endif
  launch(gpu, "decide", kernel, p.batch, p, s);
}

void run(const VerifyParams& given, const Gpu& gpu) {
  VerifyParams p = given;
  Workspace workspace;
#if SPECDEC_LISTS
  const ListReservation lists = reserve_lists(&workspace, p);
  const Scratch s = make_scratch(p, gpu, &workspace);
  launch_lists(gpu, workspace, lists, &p);
  launch_scan(gpu, without_lists(p), s);
  launch_split(gpu, "scan_lists", scan_lists, p.batch * p.gamma, s.tiles, p, s);
#else
  const MapReservation map = reserve_map(&workspace, p.map);
  const Scratch s = make_scratch(p, gpu, &workspace);
  launch_map(gpu, workspace, map, &p.map);
  launch_scan(gpu, p, s);
#endif
  if (s.finished) {
    const bool masked = p.mask.words != nullptr;
    launch(gpu, "finish_laws", masked ? finish_laws<true> : finish_laws<false>, p.batch * s.rows,
           s);
  }
#if !SPECDEC_LISTS
  if (s.races) launch_split(gpu, "race_rows", race_rows, p.batch * s.rows, s.tiles, p, s);
#endif
  launch_decide(gpu, p, s);
  if (s.draws) {
    launch_split(gpu, "draw_extra", kDraw[elements_of_laws(p)], p.batch, s.tiles, p, s,
                 kBlocksAt128Registers);
  }
  if (p.raw_logprobs) launch_raw_logprobs(gpu, p, s);
}

void load_all(Loading& load) {
  load(kScan, kScanMasked, finish_laws<false>, finish_laws<true>, decide_alone<Reads::kLaws>,
       kDecideBlock, kDraw, scan_raw<false>, scan_raw<true>, write_raw_logprobs);
}

}  // namespace

#if SPECDEC_LISTS

void verify_lists(const VerifyParams& p, const Gpu& gpu) { run(p, gpu); }

void load_verify_lists(Loading& load) {
  load_all(load);
  load(sort_lists, scan_lists);
}

#else

void verify(const VerifyParams& p, const Gpu& gpu) {
  if (p.batch == 0) return;
  if (p.lists.ids.data != nullptr && reads_draft_law(p.rule)) return verify_lists(p, gpu);
  run(p, gpu);
}

void load_verify(Loading& load) {
  load_all(load);
  load(race_rows, decide_alone<Reads::kTokens>, decide_alone<Reads::kTarget>);
  load_map(load);
  load_verify_lists(load);
}

#endif

}  // namespace cuda
}  // namespace specdec
