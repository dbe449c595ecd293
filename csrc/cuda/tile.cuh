// A tile of a row shared out over a block, and weights of its entries.
//
// A thread holds kPerThread entries of a tile in registers, as vectors of eight. Which ones depends
// on the number of threads alone, never on the row's alignment or type, and so do the sums. Under a
// mask an entry costs 1 bit more, in a reduced vocabulary 4 bytes for its token and a word of the
// mask. Rows in token order are loaded entry by entry: 4 bytes a token to find it, then its own.
#pragma once

#include <type_traits>

#include "../core/fixed_point.h"
#include "../core/request.h"
#include "block.cuh"
#include "vec_load.cuh"

namespace specdec {
namespace cuda {

constexpr int kPerThread = static_cast<int>(kTile) / kThreads;
constexpr int kSteps = kPerThread / kVector;
static_assert(kPerThread % kVector == 0, "a thread takes whole vectors");

// Blocks that a multiprocessor shall hold at once, for __launch_bounds__.
constexpr int kBlocksAt64Registers = 1024 / kThreads;
constexpr int kBlocksAt80Registers = 768 / kThreads;
constexpr int kBlocksAt128Registers = 512 / kThreads;

constexpr int kTileGroups = static_cast<int>(kTile) / kGroup;

// ---- who takes which tiles ---

// The place in an array [_, columns].
struct Place2d {
  int64_t row;
  int64_t column;
};

// Of entry k, for k and columns below 2^32, as blocks of a launch and rows of a call are: dividing
// 64-bit numbers takes several times the code.
__device__ __forceinline__ Place2d place_in(int64_t k, int64_t columns) {
  const uint32_t index = static_cast<uint32_t>(k), width = static_cast<uint32_t>(columns);
  return {index / width, index % width};
}

// A number of 1 to 2^31 that the host knows and a kernel divides by: for numbers below 2^31,
// k / value is k * multiplier >> shift (Granlund and Montgomery 1994, section 4), a few
// instructions in the place of some twenty.
struct Divisor {
  int64_t value;
  uint32_t multiplier;
  uint32_t shift;

  // Not 0, by which nothing is divided: where there are no columns there are no entries.
  __host__ __device__ Divisor(int64_t number = 1) : value(number), shift(31) {
    while (int64_t{1} << (shift - 31) < number) ++shift;
    const uint64_t power = uint64_t{1} << shift;
    const uint64_t divisor = number > 0 ? static_cast<uint64_t>(number) : 1;
    multiplier = static_cast<uint32_t>((power + divisor - 1) / divisor);
  }
  __host__ __device__ operator int64_t() const { return value; }
};

// The same for k below 2^31.
__device__ __forceinline__ Place2d place_in(int64_t k, const Divisor& columns) {
  const uint32_t index = static_cast<uint32_t>(k), width = static_cast<uint32_t>(columns.value);
  const uint32_t row = static_cast<uint32_t>(uint64_t{index} * columns.multiplier >> columns.shift);
  return {row, index - row * width};
}

// Block k of a launch of [units, splits] blocks.
struct Unit {
  int64_t index;
  int64_t split;
};

template <typename Count>  // int64_t or Divisor
__device__ __forceinline__ Unit this_unit(Count splits) {
  const Place2d place = place_in(blockIdx.x, splits);
  return {place.row, place.column};
}

struct Share {
  int64_t first, last;
};

constexpr int64_t kMostSplits = 4096;

// Tiles of block `split` of `splits` that share a row: of fewer than 2^19 tiles
// (csrc/torch/arguments.cpp), by at most kMostSplits. Count: int64_t or Divisor.
template <typename Count>
__device__ __forceinline__ Share share_of(int64_t tiles, int64_t split, Count splits) {
  const uint32_t n = static_cast<uint32_t>(tiles), k = static_cast<uint32_t>(split);
  return {place_in(n * k, splits).row, place_in(n * (k + 1), splits).row};
}

// How many blocks share each of `units` rows of `tiles` tiles: the number that is predicted to end
// soonest. A block takes as long as its tiles, and for its beginning and end as kBeside tiles more;
// up to kTogether on a multiprocessor do not hold each other up, because each waits for memory most
// of the time; further ones do; and those that are not among the `held` of a multiprocessor wait
// for others to end.
inline int64_t splits_for(const Gpu& gpu, int64_t units, int64_t tiles,
                          int64_t held = kBlocksAt64Registers) {
  constexpr int64_t kBeside = 3, kTogether = 3;
  const int64_t chip = gpu.chip.multiprocessors;
  const int64_t resident = chip * held;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t splits = 1; splits <= tiles && splits <= kMostSplits; ++splits) {
    const int64_t blocks = units * splits;
    // Each block for itself, and no multiprocessor ever idle: so long it takes at least.
    if ((units * tiles + kBeside * blocks) / chip >= least) break;
    const int64_t waves = kTogether * ((blocks + resident - 1) / resident);
    const int64_t load = (blocks + chip - 1) / chip;
    const int64_t each = (tiles + splits - 1) / splits + kBeside;
    const int64_t time = each * (waves > load ? waves : load);
    if (time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

// Asks for the tiles [first, last) of a row, `most` lines a thread at most, which are shared out
// over `threads` threads: they come into L2 while the block does other things.
__device__ __forceinline__ void prefetch_tiles(const Row& row, const Share& tiles, int32_t thread,
                                               int32_t threads, int32_t most) {
  constexpr int64_t kLine = 128;  // bytes
  if (row.data == nullptr) return;
  const int64_t bytes = row.element == Element::kFloat32 ? 4 : 2;
  const int64_t last = tiles.last * kTile < row.vocab ? tiles.last * kTile : row.vocab;
  int64_t place = tiles.first * kTile * bytes + thread * kLine;
#pragma unroll 1
  for (int32_t k = 0; k < most && place < last * bytes; ++k, place += threads * kLine) {
    prefetch_line(static_cast<const char*>(row.data) + place);
  }
}

// Whether this is the last of `blocks` blocks to come here: all its threads then see what the
// others wrote before. Leaves the counter at 0 for a replay.
__device__ __forceinline__ bool is_last_block(uint32_t* counter, int64_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (blocks == 1) return true;
  if (threadIdx.x == 0) {
    last = add_in_order(counter, 1) == static_cast<uint32_t>(blocks - 1);
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

// ---- entries of a tile ---

// What the rows of a launch are, which the host knows: plain ones (no mask, no reduced vocabulary)
// of one type, so that a kernel has no code for others; or any; or any, and lists.
enum class Elements { kFloat32, kBFloat16, kFloat16, kAny, kListed };

__host__ __device__ constexpr bool are_plain(Elements elements) {
  return elements < Elements::kAny;
}

// The type of plain rows.
__host__ __device__ constexpr Element element_of(Elements elements) {
  return static_cast<Element>(elements);
}
static_assert(element_of(Elements::kFloat16) == Element::kFloat16, "types are in one order");

// What the rows of two batches are, if they are plain; a batch without data has no rows.
inline Elements elements_of(const RowBatch& target, const RowBatch& draft) {
  if (draft.data != nullptr && draft.element != target.element) return Elements::kAny;
  return static_cast<Elements>(target.element);
}

// What the rows of a verification are, but for masks and maps.
template <typename Params>
Elements elements_of_rows(const Params& p) {
  return elements_of(p.target, reads_draft_law(p.rule) ? p.draft : RowBatch{});
}

// What they are where they are weighed.
template <typename Params>
Elements elements_of_laws(const Params& p) {
  const bool plain = p.mask.words == nullptr && p.map.ids.data == nullptr;
  return plain ? elements_of_rows(p) : Elements::kAny;
}

// A kernel for each kind of rows.
template <typename Kernel>
struct ByElements {
  Kernel kernels[4];
  Kernel operator[](Elements elements) const { return kernels[static_cast<int>(elements)]; }
  const Kernel* begin() const { return kernels; }
  const Kernel* end() const { return kernels + 4; }
};

template <Elements kElements>
using ElementsConstant = std::integral_constant<Elements, kElements>;

// of(ElementsConstant<...>{}) gives a kernel. Where there is code for lists, one for all; no other
// is compiled there.
template <typename Of>
auto by_elements(const Of& of) {
  if constexpr (kLists) {
    const auto kernel = of(ElementsConstant<Elements::kListed>{});
    return ByElements<std::decay_t<decltype(kernel)>>{{kernel, kernel, kernel, kernel}};
  } else {
    using Kernel = decltype(of(ElementsConstant<Elements::kAny>{}));
    return ByElements<Kernel>{
        {of(ElementsConstant<Elements::kFloat32>{}), of(ElementsConstant<Elements::kBFloat16>{}),
         of(ElementsConstant<Elements::kFloat16>{}), of(ElementsConstant<Elements::kAny>{})}};
  }
}

enum class Layout {
  kStriped,  // a warp's loads are contiguous; a vector of 32 lanes is two groups
  kBlocked,  // a thread's entries are contiguous: threads are in the order of entries
};

// Where in its tile vector `step` of this thread begins.
template <Layout kLayout>
__device__ __forceinline__ int32_t vector_offset(int step) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  if (kLayout == Layout::kBlocked) return thread * kPerThread + step * kVector;
  return thread / kWarp * (kWarp * kPerThread) + (step * kWarp + thread % kWarp) * kVector;
}

struct RawTile {
  RawVector step[kSteps];
};

// Whether the tile at the beginning of a span is whole and aligned.
__device__ __forceinline__ bool is_plain_tile(const Span& span) {
  return misalignment(span) == 0 && span.left >= kTile;
}

template <Layout kLayout, int kBytes>
__device__ __forceinline__ void load_plain_tile(const Span& span, RawTile* out) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_aligned<kBytes>(span, vector_offset<kLayout>(s), &out->step[s]);
  }
}

// Any tile at the beginning of a span.
template <Layout kLayout, int kBytes>
__device__ __forceinline__ void load_span(Element element, const Span& span, RawTile* out) {
  if (is_plain_tile(span)) return load_plain_tile<kLayout, kBytes>(span, out);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    load_vector<kBytes>(element, span, vector_offset<kLayout>(s), &out->step[s]);
  }
}

template <Layout kLayout, Elements kElements, bool kMapped, int kBytes>
__device__ __forceinline__ void load_any(const Row& row, int64_t tile, RawTile* out) {
  if constexpr (kElements == Elements::kListed && kMapped && kBytes == 4) {
    if (row.listed > 0) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int64_t first = tile * kTile + vector_offset<kLayout>(s);
        take_words(look_up_listed(row, first), out->step[s].word);
        take_words(look_up_listed(row, first + kVector / 2), out->step[s].word + kVector / 2);
      }
      return;
    }
  }
  if constexpr (kMapped) {
    if (row.by_token) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        look_up_vector<kBytes>(row, tile * kTile + vector_offset<kLayout>(s), &out->step[s]);
      }
      return;
    }
  }
  load_span<kLayout, kBytes>(row.element, span_from<kBytes>(row, tile * kTile), out);
}

// What a mask hides is hidden when a tile is widened. kMapped: the row may be in token order, which
// costs registers.
template <Layout kLayout, Elements kElements = Elements::kAny, bool kMapped = false>
__device__ __forceinline__ void load_tile(const Row& row, int64_t tile, RawTile* out) {
  if constexpr (are_plain(kElements)) {
    constexpr int kBytes = bytes_of(element_of(kElements));
    load_span<kLayout, kBytes>(element_of(kElements), span_from<kBytes>(row, tile * kTile), out);
  } else if (row.element == Element::kFloat32) {
    load_any<kLayout, kElements, kMapped, 4>(row, tile, out);
  } else {
    load_any<kLayout, kElements, kMapped, 2>(row, tile, out);
  }
}

__device__ __forceinline__ void widen_tile(Element element, const RawTile& raw, float* x) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) widen_vector(element, raw.step[s], x + s * kVector);
}

// Bits of this thread's entries of a tile of a masked row that are allowed.
template <Layout kLayout>
__device__ __forceinline__ uint32_t allowed_in_tile(const Row& row, int64_t tile) {
  static_assert(kPerThread <= 32, "the entries of a thread have a bit each");
  uint32_t bits = 0;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    bits |= allowed_in_vector(row, tile * kTile + vector_offset<kLayout>(s)) << (s * kVector);
  }
  return bits;
}

__device__ __forceinline__ void hide_in_tile(uint32_t allowed, float nothing, float* x) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if ((allowed >> j & 1u) == 0) x[j] = nothing;
  }
}

// The entries of a row, of which `raw` is what load_tile loaded. kMasked: any row may have a mask.
template <Layout kLayout, Elements kElements = Elements::kAny, bool kMasked = true>
__device__ __forceinline__ void widen_tile(const Row& row, int64_t tile, const RawTile& raw,
                                           float* x) {
  constexpr bool kPlain = are_plain(kElements);
  widen_tile(kPlain ? element_of(kElements) : row.element, raw, x);
  if (kMasked && !kPlain && row.allowed != nullptr) {
    hide_in_tile(allowed_in_tile<kLayout>(row, tile), nothing(row), x);
  }
}

// Gives `token` the weight 0, if this thread holds it.
template <Layout kLayout>
__device__ __forceinline__ void exclude(const Row& row, int64_t tile, int64_t token, float* x) {
  const int64_t in_tile = token - tile * kTile;
  if (in_tile < 0 || in_tile >= kTile) return;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const int64_t in_vector = in_tile - vector_offset<kLayout>(s);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (in_vector == j) x[s * kVector + j] = nothing(row);
    }
  }
}

template <Layout kLayout>
__device__ __forceinline__ void exclude_all(const Row& row, int64_t tile, const TokenList& list,
                                            float* x) {
#pragma unroll 1
  for (int64_t i = 0; i < list.count; ++i) exclude<kLayout>(row, tile, list.tokens[i], x);
}

// ---- weights ---

// 2^t for t <= 0, 0 below the normal range; exact at 0, relative error 2^-22.
__device__ __forceinline__ float exp2_weight(float t) {
#ifdef __CUDA_ARCH__
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(t));
  return value;
#else
  return exp2f(t);
#endif
}

// Never part of a fused multiply-add: the weights of a tile must come out alike wherever they are
// computed.
__device__ __forceinline__ float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// scale * log2(e), in float: 0 would turn the logit -inf into NaN.
__device__ __forceinline__ float log2_scale(double scale) {
  const float rounded = static_cast<float>(scale * 1.4426950408889634);
  return rounded > 0.0f ? rounded : 1.4e-45f;
}

// Log-weights (base 2) and weights exp(scale * (x - reference)).
struct ExpWeight {
  float reference;
  float scale;
  float threshold;  // -inf without a cutoff: small weights need no mask to become 0

  __device__ __forceinline__ ExpWeight(float reference_logit, double scale_value)
      : reference(reference_logit), scale(log2_scale(scale_value)), threshold(-INFINITY) {}
  __device__ __forceinline__ explicit ExpWeight(const RowLaw& law) : ExpWeight(law.max, law.scale) {
    if (law.cutoff > -INFINITY) threshold = support_threshold(law.cutoff, law.max, law.scale);
  }

  __device__ __forceinline__ float log2_weight(float x) const { return (x - reference) * scale; }
  // 0 below the threshold; a NaN stays one.
  __device__ __forceinline__ float operator()(float x) const {
    return x < threshold ? 0.0f : exp2_weight(log2_weight(x));
  }
};

// The same weights by one multiply-add an entry, 2^(scale * x - product). What the product has lost
// by rounding, every weight has too much: its surplus, a factor near 1 where the product is small.
struct FusedWeight {
  float reference;
  float scale;
  float product;

  __device__ __forceinline__ FusedWeight(float reference_logit, float scale_of_log2)
      : reference(reference_logit), scale(scale_of_log2), product(multiply(reference, scale)) {}
  __device__ __forceinline__ bool is_near() const { return fabsf(product) <= 0x1p22f; }
  __device__ __forceinline__ float surplus() const { return (*this)(reference); }
  __device__ __forceinline__ float operator()(float x) const {
    return exp2_weight(fmaf(x, scale, -product));
  }
};

// floor(weight * unit). Of a law exact, because kLawUnit is a power of two; of a residual as exact
// as the weight, which is rounded to float32, too.
__device__ __forceinline__ uint64_t fixed_weight(float weight,
                                                 float unit = static_cast<float>(kLawUnit)) {
  return static_cast<uint64_t>(multiply(weight, unit));
}

// ---- one value a tile ---

// Tiles whose threads' results wait for one barrier together.
constexpr int kTilesAtOnce = 8;

// Sums over the warps of tiles [0, tiles), in the order of warps. Collective over the block, whose
// threads meet before and after.
template <typename T>
__device__ __forceinline__ void add_warps(const T (&of_warp)[kTilesAtOnce][kWarps], int tiles,
                                          T* out) {
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < tiles) {
    T sum = of_warp[threadIdx.x][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += of_warp[threadIdx.x][w];
    out[threadIdx.x] = sum;
  }
  __syncthreads();
}

// Writes out[t - first] = sum over threads of value(t): within a warp in value's type, from there
// on in T, in the order of warps. Collective over the block, and its threads meet at the end.
template <typename T, typename Value>
__device__ __forceinline__ void sum_each_tile(int64_t first, int64_t last, T* out,
                                              const Value& value) {
  __shared__ T of_warp[kTilesAtOnce][kWarps];
  for (int64_t base = first; base < last; base += kTilesAtOnce) {
    const int tiles = clamp_to(last - base, 0, kTilesAtOnce);
    for (int k = 0; k < tiles; ++k) {
      const T sum = warp_sum(value(base + k));
      if (threadIdx.x % kWarp == 0) of_warp[k][threadIdx.x / kWarp] = sum;
    }
    add_warps(of_warp, tiles, out + (base - first));
  }
}

// The same of floats, by more shared memory and less waiting: a warp adds up several tiles at once.
// The same bits on a device; on the host (csrc/testing) warp_sum adds lanes in another order, so
// what shall agree to the bit goes by one of the two.
template <typename Value>
__device__ __forceinline__ void sum_tiles_together(int64_t first, int64_t last, double* out,
                                                   const Value& value) {
  constexpr int kTogether = 4;
  static_assert(kTilesAtOnce % kTogether == 0, "no tile is left over");
  __shared__ double of_warp[kTilesAtOnce][kWarps];
  __shared__ float of_thread[kTilesAtOnce][kThreads];  // each thread reads its own
  for (int64_t base = first; base < last; base += kTilesAtOnce) {
    const int tiles = clamp_to(last - base, 0, kTilesAtOnce);
    for (int k = 0; k < tiles; ++k) of_thread[k][threadIdx.x] = value(base + k);
    for (int k = 0; k < tiles; k += kTogether) {
      float sum[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum[i] = of_thread[k + i][threadIdx.x];
#pragma unroll
      for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        float other[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          other[i] = __shfl_xor_sync(kAllLanes, sum[i], lanes);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) sum[i] += other[i];
      }
      if (threadIdx.x % kWarp != 0) continue;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) of_warp[k + i][threadIdx.x / kWarp] = sum[i];
    }
    add_warps(of_warp, tiles, out + (base - first));
  }
}

}  // namespace cuda
}  // namespace specdec
