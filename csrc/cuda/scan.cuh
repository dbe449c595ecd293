// The pass over the vocabulary that begins every operator: it leaves a summary of each tile of each
// row that is asked for.
//
// Grid: as many blocks as the GPU holds at once, or fewer. Of all tiles of all rows, numbered row
// by row, block k of n takes the tiles k, k + n, k + 2n and so on. Thus blocks that run at the same
// time read memory side by side, and each has as many tiles as any other, or one less. A warp takes
// a contiguous part of a tile.
//
// For every kWaiting tiles of a block one warp, a lane a tile, finds out which they are and what to
// look for (TilePlan), and at the end all warps' parts of them are combined: three barriers.
// A tile's loads are issued before the tile before it is worked on. An operator may ask for some
// tiles once more, each without one of its entries (rests): they come after all others.
//
// Reads 2 or 4 bytes per entry (and what a mask costs, tile.cuh), once: maximum, sum of
// exponentials and what a rule wants besides come out of registers. Writes 32 bytes a tile and, for
// rows with a filter, 4 bytes a group of 128 and what the row is, which the next launch need not
// find out again. Numerics: law_pass.cuh; no result depends on which block has a tile.
#pragma once

#include "law_pass.cuh"
#include "shared.cuh"

namespace specdec {
namespace cuda {

// A row, its filters, and what a rule wants from it besides its law.
struct RowTask {
  Row row;  // data == nullptr: nobody asks for this row
  Filters filters;
  ExtraTask extra;
};

// Row r for all threads of a block, which meet.
template <typename Rows>
__device__ __forceinline__ const RowTask& task_of_block(const Rows& rows, int64_t r) {
  __shared__ SharedArray<RowTask, 1> task;
  if (threadIdx.x == 0) task[0] = rows(r);
  __syncthreads();
  return task[0];
}

// The rests that an operator asks for: tiles of rows without a filter, each without one of its
// entries. This one asks for none; others end at tile `end`, and the k-th is that of entry(k) of
// row(k), or of none if entry(k) is negative.
struct NoRests {
  static constexpr bool kAny = false;
};

// Rows of an operator, and where their summaries go. Tasks is a functor: RowTask tasks(r) is row r.
template <typename Tasks, typename Rests = NoRests>
struct RowsToScan {
  const Tasks& tasks;
  int64_t whole;           // tiles of all rows, count x tiles
  Divisor tiles;           // of the widest row: the stride of `summaries`
  TileSummary* summaries;  // [count, tiles], and those of rests behind them
  float* group_max;        // [count, tiles, kTileGroups], or null
  bool want_argmax;
  RowTask* found;  // [count], or null: where what each row is goes, for the next launch
  Rests rests{};

  static constexpr bool kRests = Rests::kAny;

  // All tiles, numbered as their summaries are.
  __device__ __forceinline__ int64_t all_tiles() const {
    if constexpr (kRests) return rests.end;
    return whole;
  }
  // The row of tile k, and the tile's place there or, of a rest, its number.
  __device__ __forceinline__ Place2d place(int64_t k) const {
    if constexpr (kRests) {
      if (k >= whole) return {rests.row(k - whole), k - whole};
    }
    return place_in(k, tiles);
  }
};

static_assert(kWaiting == kWarp, "a lane plans each tile");

// A tile that a block scans.
struct TilePlan {
  RowTask of_row;
  ScanTask scan;
  int64_t row;
  int64_t tile;      // of the row
  int64_t summary;   // where its summary goes
  int64_t without;   // the entry of the row that is left out; -1: none
  float* group_max;  // null: nobody asks for those of this row
  bool is_plain;     // a whole aligned tile of which only the sum of weights is asked for
};

// What is read of a plan before its tile is, by one load.
struct alignas(16) TileInOrder {
  const char* entries;  // where the tile begins
  float scale;          // ScanTask
  int32_t plan;
};

// How many ways there are to scan a tile: each type of entries, plain tiles and others.
template <Elements kElements>
constexpr int kWays = are_plain(kElements) ? 2 : 6;

constexpr int kUnrolled = 2;  // tiles of the loop over plain ones

struct ScanMemory {
  SharedArray<TilePlan, kWaiting> plans;
  TileInOrder order[kWaiting];            // those that are scanned one way follow each other
  int32_t ends[kWays<Elements::kAny>];    // of each way's
  int32_t count;                          // of all
  WarpSummary of_warp[kWaiting][kWarps];  // in their order; of plain tiles only max and sum
};

// Of kernels that scan, for __launch_bounds__: a mask takes registers. Without one there is no
// trace of it in the kernel.
constexpr int scan_blocks(bool masked) {
  return masked ? kBlocksAt80Registers : kBlocksAt64Registers;
}

// How many blocks scan so many tiles: no more than the GPU holds at once, with `together` on a
// multiprocessor, and of these as few as have no more tiles each. `next` blocks of the next launch,
// as large as these, find room beside them and begin in the meantime, if there are few of them. Of
// `rests` tiles that are scanned once more some blocks have one on top: L2 has these.
inline int64_t blocks_to_scan(const Gpu& gpu, int64_t tiles, int64_t together, int64_t next = 0,
                              int64_t rests = 0) {
  if (tiles + rests > INT32_MAX) {  // Divisor
    throw std::runtime_error("at most 2^31 - 1 tiles of rows are scanned at once, came " +
                             std::to_string(tiles + rests));
  }
  const int64_t chip = gpu.chip.multiprocessors;
  const int64_t held = chip * together - (4 * next <= chip ? next : 0);
  const int64_t of_block = tiles > 0 ? (tiles + held - 1) / held : 1;
  const int64_t blocks = (tiles + rests + of_block - 1) / of_block;
  return blocks < held ? blocks : held;
}

// Counters of the launches to come, one for each row. By all threads of all blocks.
__device__ __forceinline__ void clear_counters(uint32_t* counters, int64_t count) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += threads) {
    counters[i] = 0;
  }
}

// ---- plans ---

__device__ __forceinline__ const char* entries_of(const TilePlan& plan) {
  const Row& row = plan.of_row.row;
  return static_cast<const char*>(row.data) + plan.tile * kTile * bytes_of(row.element);
}

// Finishes the plan of a tile that has its place and its row's task. Gives the way to scan it, -1
// if nobody asks for it.
template <Elements kElements, typename Rows>
__device__ __forceinline__ int finish_plan(const Rows& rows, TilePlan* plan) {
  const Row& row = plan->of_row.row;
  const Filters& filters = plan->of_row.filters;
  const int64_t first = plan->tile * kTile;
  if (row.data == nullptr || first >= row.vocab) return -1;
  plan->scan = ScanTask(row, filters, rows.want_argmax, plan->of_row.extra);
  const bool groups = rows.group_max != nullptr && wants_group_max(row, filters);
  plan->group_max =
      groups ? rows.group_max + (plan->row * rows.tiles + plan->tile) * kTileGroups : nullptr;
  const bool only_sum = plan->scan.looks == kSum && !groups;
  const bool is_rest = Rows::kRests && plan->without >= 0;
  if (is_rest && !only_sum) return -1;
  plan->is_plain = row.allowed == nullptr && only_sum && !is_rest &&
                   reinterpret_cast<uintptr_t>(entries_of(*plan)) % kLoad == 0 &&
                   row.vocab - first >= kTile;
  return (are_plain(kElements) ? 0 : 2 * static_cast<int>(row.element)) + (plan->is_plain ? 0 : 1);
}

// Plans the tiles `first`, `first` + blocks, ... of this block, kWaiting at most. By one full warp.
template <Elements kElements, typename Tasks, typename Rests>
__device__ __forceinline__ void plan_tiles(const RowsToScan<Tasks, Rests>& rows, int64_t first,
                                           ScanMemory* memory) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t k = first + static_cast<int64_t>(lane) * gridDim.x;
  TilePlan& plan = memory->plans[lane];
  const bool is_there = k < rows.all_tiles();
  const Place2d place = rows.place(is_there ? k : 0);
  plan.summary = k;
  plan.row = place.row;
  plan.tile = is_there ? place.column : -1;
  plan.without = -1;
  plan.of_row = is_there ? rows.tasks(place.row) : RowTask{};
  __syncwarp();  // what follows reads it again: registers are short
  if constexpr (Rests::kAny) {
    if (plan.tile >= 0 && plan.summary >= rows.whole) {
      plan.without = rows.rests.entry(plan.tile);
      const bool is_asked = plan.without >= 0;
      plan.tile = is_asked ? plan.without / kTile : -1;
      if (!is_asked) plan.of_row.row.data = nullptr;
    }
  }
  if (rows.found != nullptr && plan.tile == 0 && plan.without < 0) {
    copy_by_thread(&rows.found[plan.row], plan.of_row);
  }
  const int way = finish_plan<kElements>(rows, &plan);
  int end = 0;
#pragma unroll
  for (int w = 0; w < kWays<kElements>; ++w) {
    const unsigned same = __ballot_sync(kAllLanes, way == w);
    if (way == w) {
      memory->order[end + __popc(same & ((1u << lane) - 1))] = {entries_of(plan), plan.scan.scale,
                                                                lane};
    }
    end += __popc(same);
    if (lane == 0) memory->ends[w] = end;
  }
  if (lane == 0) memory->count = end;
}

// ---- tiles ---

// Scans the tiles [first, last) in the order of the plans, which are plain. 16-bit entries are
// loaded a tile ahead; 32-bit ones need as many registers as their values, and have twice as many
// loads in flight anyway.
template <Element kElement>
__device__ __forceinline__ void sum_plain_tiles(ScanMemory* memory, int32_t first, int32_t last) {
  if (first >= last) return;
  constexpr int kBytes = bytes_of(kElement);
  const int32_t of_thread = vector_offset<Layout::kStriped>(0);
  const auto load = [&](const char* entries, RawTile* raw) {
    const Span at{entries + of_thread * kBytes, 0, 0, false};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      load_aligned<kBytes>(at, s * kWarp * kVector, &raw->step[s]);
    }
  };
  RawTile raw;
  TileInOrder tile = memory->order[first];
  load(tile.entries, &raw);
#pragma unroll kUnrolled
  for (int32_t k = first; k < last; ++k) {
    float x[kPerThread];
    const float max = warp_max_by_key(max_of_vectors<kElement, kSteps>(raw.step));
    widen_tile(kElement, raw, x);
    const float scale = tile.scale;
    if (k + 1 < last) {
      tile = memory->order[k + 1];
      load(tile.entries, &raw);
    }
    const float sum = sum_weights(scale, x, max);
    if (threadIdx.x % kWarp != 0) continue;
    WarpSummary& mine = memory->of_warp[k][threadIdx.x / kWarp];
    mine.max = max;
    mine.sum = sum;
  }
}

// Scans the tiles [first, last) in the order of the plans, whatever they are.
template <Element kElement, bool kMasked, bool kRests>
__device__ __forceinline__ void scan_any_tiles(ScanMemory* memory, int32_t first, int32_t last) {
  constexpr int kBytes = bytes_of(kElement);
  RawTile raw;
  bool loaded = false;
  for (int32_t k = first; k < last; ++k) {
    const TilePlan& plan = memory->plans[memory->order[k].plan];
    const Row& row = plan.of_row.row;
    float x[kPerThread], step_max[kSteps];
    if (!loaded) {
      load_span<Layout::kStriped, kBytes>(kElement, span_from<kBytes>(row, plan.tile * kTile),
                                          &raw);
    }
    const uint32_t allowed = kMasked ? allowed_in_tile<Layout::kStriped>(row, plan.tile) : 0;
    widen_tile(kElement, raw, x);
    if (kMasked) hide_in_tile(allowed, nothing(row), x);
    if (kRests && plan.without >= 0) {  // as `exclude`, by less code: it is known to be in the tile
      const int32_t at = static_cast<int32_t>(plan.without - plan.tile * kTile);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if (at == vector_offset<Layout::kStriped>(j / kVector) + j % kVector) x[j] = -INFINITY;
      }
    }
    find_step_max(x, step_max);
    loaded = false;
    if (kBytes == 2 && !kMasked && k + 1 < last) {
      const TilePlan& next = memory->plans[memory->order[k + 1].plan];
      const Span span = span_from<kBytes>(next.of_row.row, next.tile * kTile);
      loaded = is_plain_tile(span);
      if (loaded) load_plain_tile<Layout::kStriped, kBytes>(span, &raw);
    }
    const WarpSummary s = scan_warp(plan.scan, x, step_max, plan.group_max);
    if (threadIdx.x % kWarp == 0) memory->of_warp[k][threadIdx.x / kWarp] = s;
  }
}

// Scans the tiles that are planned. Collective over the block, which meets before and after.
template <bool kMasked, Elements kElements, bool kRests>
__device__ __forceinline__ void scan_planned(ScanMemory* memory) {
  const auto scan = [&](auto element, int way) {
    constexpr auto kElement = decltype(element)::value;
    const int32_t plain = way > 0 ? memory->ends[way - 1] : 0;
    const int32_t others = memory->ends[way];
    if (!kMasked) sum_plain_tiles<kElement>(memory, plain, others);
    scan_any_tiles<kElement, kMasked, kRests>(memory, others, memory->ends[way + 1]);
  };
  if constexpr (are_plain(kElements)) {
    scan(std::integral_constant<Element, element_of(kElements)>{}, 0);
  } else {
    const auto of_type = [&](auto element) { scan(element, 2 * static_cast<int>(element.value)); };
    of_type(std::integral_constant<Element, Element::kFloat32>{});
    of_type(std::integral_constant<Element, Element::kBFloat16>{});
    of_type(std::integral_constant<Element, Element::kFloat16>{});
  }
}

// The summaries of the planned tiles. Collective over the block.
__device__ __forceinline__ void write_planned(ScanMemory* memory, TileSummary* summaries) {
  write_summaries(memory->count, [&](int32_t k, int32_t warp) -> PartOfTile {
    const TilePlan& plan = memory->plans[memory->order[k].plan];
    WarpSummary part = memory->of_warp[k][warp];
    if (plan.is_plain) part = {part.max, 0, is_valid_sum(part.max, part.sum), part.sum, 0.0f};
    return {plan.scan, part, summaries + plan.summary};
  });
}

// Scans all tiles of this block (kMasked: all rows have a mask, else none; kElements: what all of
// them hold). done(memory): the block's threads have met, and seen the summaries of these
// tiles. Collective over the block.
template <bool kMasked, Elements kElements, typename Tasks, typename Rests, typename Done>
__device__ __forceinline__ void scan_all(const RowsToScan<Tasks, Rests>& rows, const Done& done) {
  __shared__ SharedArray<ScanMemory, 1> shared;
  ScanMemory* memory = shared.data();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWaiting;
  for (int64_t first = blockIdx.x; first < rows.all_tiles(); first += step) {
    if (threadIdx.x < kWarp) plan_tiles<kElements>(rows, first, memory);
    __syncthreads();
    const bool any = memory->count > 0;
    if (any) scan_planned<kMasked, kElements, Rests::kAny>(memory);
    __syncthreads();
    if (any) write_planned(memory, rows.summaries);
    __syncthreads();
    if (any) done(memory);
  }
}

template <bool kMasked, Elements kElements, typename Tasks, typename Rests>
__device__ __forceinline__ void scan_all(const RowsToScan<Tasks, Rests>& rows) {
  scan_all<kMasked, kElements>(rows, [](ScanMemory*) {});
}

}  // namespace cuda
}  // namespace specdec
