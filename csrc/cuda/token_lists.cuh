// Draft laws that name a few tokens each: their lists, sorted and checked, and the sums of their
// tiles. Included where there is code for lists alone (platform.h).
//
// Launches: sort_lists, a block a list, which reads it once and writes 8
// bytes an entry; then, in the place of a scan of the draft's rows, a kernel of the operator that
// calls scan_list. Numerics: the sums are those that law_pass.cuh takes of the same law as a row
// over the whole vocabulary.
#pragma once

#include "law_pass.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

struct ListReservation {
  Reserved<int32_t> tokens;
  Reserved<float> probs;
  Reserved<int32_t> counts;
};

// The arrays of TokenLists while they are written.
struct ListArrays {
  int32_t* tokens;
  float* probs;
  int32_t* counts;
};

// A token and the bits of its probability; without one, after all tokens.
constexpr uint64_t kNotListed = ~uint64_t{0};

__device__ __forceinline__ uint64_t list_entry(int64_t token, float prob) {
  uint32_t bits;
  memcpy(&bits, &prob, sizeof bits);
  return static_cast<uint64_t>(token) << 32 | bits;
}

// Sorts n entries, a power of two. Collective over the block; `entries` are shared.
__device__ __forceinline__ void sort_entries(uint64_t* entries, int32_t n) {
#pragma unroll 1
  for (int32_t run = 2; run <= n; run *= 2) {
#pragma unroll 1
    for (int32_t stride = run / 2; stride > 0; stride /= 2) {
#pragma unroll 1
      for (int32_t pair = threadIdx.x; pair < n / 2; pair += kThreads) {
        const int32_t low = pair / stride * stride * 2 + pair % stride;
        const uint64_t a = entries[low], b = entries[low + stride];
        const bool ascending = (low & run) == 0;
        if ((a > b) == ascending) {
          entries[low] = b;
          entries[low + stride] = a;
        }
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    sort_lists(const RowBatch draft, const TokenLists lists, const ListArrays arrays) {
  begin_kernel();
  __shared__ uint64_t entries[kMaxListed];
  __shared__ int32_t count, broken;
  const int64_t row = blockIdx.x;
  const auto [b, s] = place_in(row, lists.rows);
  const GivenList list = given_list(draft, lists, b, s);
  const int32_t width = static_cast<int32_t>(lists.width);
  int32_t padded = 1;
#pragma unroll 1
  while (padded < width) padded *= 2;
  if (threadIdx.x == 0) {
    count = 0;
    broken = list.probs.data == nullptr;
  }
  __syncthreads();
#pragma unroll 1
  for (int32_t k = threadIdx.x; k < padded; k += kThreads) {
    entries[k] = kNotListed;
    if (k >= width || list.probs.data == nullptr) continue;
    const int64_t token = load_id(list.ids, 0, k);
    if (token >= 0 && token < draft.vocab) {
      entries[k] = list_entry(token, stored_value(list.probs, k));
    } else if (token != -1) {
      broken = 1;  // by any number of threads: they agree
    }
  }
  __syncthreads();
  sort_entries(entries, padded);
#pragma unroll 1
  for (int32_t k = threadIdx.x; k < width; k += kThreads) {
    const uint64_t entry = entries[k];
    const uint32_t bits = static_cast<uint32_t>(entry);
    arrays.tokens[row * width + k] = static_cast<int32_t>(entry >> 32);
    arrays.probs[row * width + k] = float_from_bits(bits);
    if (entry == kNotListed) continue;
    if (k > 0 && entries[k - 1] >> 32 == entry >> 32) broken = 1;
    if (k + 1 == width || entries[k + 1] == kNotListed) count = k + 1;
  }
  __syncthreads();
  if (threadIdx.x == 0) arrays.counts[row] = broken != 0 ? 0 : count;
}

// Writes out[t - first] for the tiles [first, last) of a list. Collective over the block.
__device__ __forceinline__ void scan_list(const Row& row, int64_t first, int64_t last,
                                          TileSummary* out) {
  __shared__ WarpSummary of_warp[kWaiting][kWarps];
  const ScanTask task(row, Filters{}, false, ExtraTask{});
#pragma unroll 1
  for (int64_t base = first; base < last; base += kWaiting) {
    const int32_t tiles = clamp_to(last - base, 0, kWaiting);
#pragma unroll 1
    for (int32_t k = 0; k < tiles; ++k) {
      WarpSummary s{0.0f, 0, 1, 0.0f, 0.0f};
      const int32_t next = first_listed(row, (base + k) * kTile);
      if (next < row.listed && row.tokens[next] < (base + k + 1) * kTile) {
        RawTile raw;
        float x[kPerThread];
        load_tile<Layout::kStriped, Elements::kListed, true>(row, base + k, &raw);
        widen_tile<Layout::kStriped>(row, base + k, raw, x);
        scan_probabilities(x, &s);
      }
      if (threadIdx.x % kWarp == 0) of_warp[k][threadIdx.x / kWarp] = s;
    }
    __syncthreads();
    write_summaries(tiles, [&](int32_t k, int32_t warp) -> PartOfTile {
      return {task, of_warp[k][warp], out + (base - first) + k};
    });
    __syncthreads();
  }
}

// ---- host ---

template <typename Params>
ListReservation reserve_lists(Workspace* workspace, const Params& p) {
  const int64_t rows = p.batch * p.lists.rows;
  return {workspace->reserve<int32_t>(rows * p.lists.width),
          workspace->reserve<float>(rows * p.lists.width), workspace->reserve<int32_t>(rows)};
}

// Fills in the arrays of a call's lists, for all launches that come after.
template <typename Params>
void launch_lists(const Gpu& gpu, const Workspace& workspace, const ListReservation& reserved,
                  Params* p) {
  const int64_t rows = p->batch * p->lists.rows;
  const ListArrays arrays{workspace.at(reserved.tokens), workspace.at(reserved.probs),
                          workspace.at(reserved.counts)};
  launch(gpu, "sort_lists", sort_lists, rows, p->draft, p->lists, arrays);
  p->lists.tokens = arrays.tokens;
  p->lists.probs = arrays.probs;
  p->lists.counts = arrays.counts;
}

// The call as scans of rows see it: lists have a scan of their own.
template <typename Params>
Params without_lists(Params p) {
  p.draft = RowBatch{};
  return p;
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
