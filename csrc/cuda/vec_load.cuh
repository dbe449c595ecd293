// Loads of eight consecutive entries of a row by one thread, whatever the row's alignment.
//
// 16-byte loads of aligned addresses only: one for 16-bit entries and two for 32-bit ones where the
// row is aligned; otherwise one more, and the bytes between them are cut out by shifts. A vector
// for which that would read outside the row is read entry by entry. Traffic: 2 or 4 bytes an entry
// (the extra load of a misaligned row hits the cache line of its neighbour).
#pragma once

#include "../core/rows.h"
#include "launch.cuh"

namespace specdec {
namespace cuda {

using namespace SPECDEC_CPU_ISA;

constexpr int kVector = 8;  // entries
constexpr int kLoad = 16;   // bytes

// Eight entries as they lie in memory: 4 words if they have 16 bits, else 8.
struct RawVector {
  uint32_t word[kVector];
};

// The entries of a row from one of them on. Offsets from there are small.
struct Span {
  const char* data;
  int32_t before;      // entries of the row before the first, at most kVector
  int32_t count;       // entries of the row from the first on, at most kTile + 2 * kVector
  int32_t misaligned;  // bytes past a multiple of kLoad, of the row's start and each vector's
  uint32_t nothing;    // bits of an entry of weight 0
};

__device__ __forceinline__ int32_t clamp_to(int64_t value, int32_t low, int32_t high) {
  return static_cast<int32_t>(value < low ? low : value > high ? high : value);
}

__device__ __forceinline__ uint32_t nothing_bits(const Row& row) {
  if (row.linear) return 0;
  if (row.element == Element::kFloat32) return 0xFF800000u;
  return row.element == Element::kBFloat16 ? 0xFF80u : 0xFC00u;
}

// `first` is a multiple of kVector, and may lie past the row.
__device__ __forceinline__ Span span_from(const Row& row, int64_t first) {
  const int64_t bytes = row.element == Element::kFloat32 ? 4 : 2;
  const char* data = static_cast<const char*>(row.data);
  return {data + first * bytes, clamp_to(first, 0, kVector),
          clamp_to(row.vocab - first, 0, static_cast<int32_t>(kTile) + 2 * kVector),
          static_cast<int32_t>(reinterpret_cast<uintptr_t>(data) % kLoad), nothing_bits(row)};
}

template <int kParts>
__device__ __forceinline__ void load_parts(const char* address, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const uint4 part = *reinterpret_cast<const uint4*>(address + i * kLoad);
    words[4 * i] = part.x;
    words[4 * i + 1] = part.y;
    words[4 * i + 2] = part.z;
    words[4 * i + 3] = part.w;
  }
}

// The words that begin `bytes` (below 16) into `from`, without an index that is not known to the
// compiler: that would move the words from registers to memory.
template <int kWords>
__device__ __forceinline__ void cut_out(const uint32_t* from, int32_t bytes, uint32_t* to) {
  uint32_t by_word[kWords + 1];
#pragma unroll
  for (int i = 0; i <= kWords; ++i) {
    const uint32_t low = bytes & 4 ? from[i + 1] : from[i];
    const uint32_t high = bytes & 4 ? from[i + 3] : from[i + 2];
    by_word[i] = bytes & 8 ? high : low;
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    to[i] = __funnelshift_r(by_word[i], by_word[i + 1], bytes % 4 * 8);
  }
}

template <int kBytes>
__device__ __forceinline__ void load_entries(const Span& span, int32_t offset, RawVector* out) {
  constexpr int kPerWord = 4 / kBytes;
#pragma unroll
  for (int i = 0; i < kVector / kPerWord; ++i) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int32_t at = offset + i * kPerWord + j;
      uint32_t entry = span.nothing;
      if (at < span.count) {
        if (kBytes == 4) {
          entry = reinterpret_cast<const uint32_t*>(span.data)[at];
        } else {
          entry = reinterpret_cast<const uint16_t*>(span.data)[at];
        }
      }
      word |= entry << (j * 16);
    }
    out->word[i] = word;
  }
}

template <int kBytes>
__device__ __forceinline__ void load_vector_of(const Span& span, int32_t offset, RawVector* out) {
  constexpr int kParts = kVector * kBytes / kLoad;
  const char* address = span.data + offset * kBytes;
  const int32_t lead = span.misaligned / kBytes;
  if (span.misaligned == 0 && offset + kVector <= span.count) {
    load_parts<kParts>(address, out->word);
  } else if (span.misaligned != 0 && offset + span.before >= lead &&
             offset - lead + (kParts + 1) * kLoad / kBytes <= span.count) {
    uint32_t words[4 * kParts + 4];
    load_parts<kParts + 1>(address - span.misaligned, words);
    cut_out<4 * kParts>(words, span.misaligned, out->word);
  } else {
    load_entries<kBytes>(span, offset, out);
  }
}

// The entries [offset, offset + kVector) of a span; those past the row have weight 0.
__device__ __forceinline__ void load_vector(Element element, const Span& span, int32_t offset,
                                            RawVector* out) {
  if (element == Element::kFloat32) {
    load_vector_of<4>(span, offset, out);
  } else {
    load_vector_of<2>(span, offset, out);
  }
}

__device__ __forceinline__ float half_to_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  return value;
#else
  return widen_float16(static_cast<uint16_t>(bits));
#endif
}

__device__ __forceinline__ void widen_vector(Element element, const RawVector& raw, float* out) {
  if (element == Element::kFloat32) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = float_from_bits(raw.word[j]);
  } else if (element == Element::kBFloat16) {
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      out[j] = float_from_bits(raw.word[j / 2] << 16);
      out[j + 1] = float_from_bits(raw.word[j / 2] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      out[j] = half_to_float(raw.word[j / 2] & 0xFFFFu);
      out[j + 1] = half_to_float(raw.word[j / 2] >> 16);
    }
  }
}

}  // namespace cuda
}  // namespace specdec
