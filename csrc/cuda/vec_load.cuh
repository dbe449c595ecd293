// Loads of eight consecutive entries of a row by one thread, whatever the row's alignment.
//
// 16-byte loads of aligned addresses only, one for each 16 bytes where the row is aligned.
// Otherwise two, and the bytes between them are cut out by shifts: the second hits the cache line
// of the neighbour's first. Where that would read outside the row, entries are read one by one.
// Traffic: 2 or 4 bytes an entry.
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

// The entries of a row from one of them on, whose number is a multiple of kVector.
struct Span {
  const char* data;
  int64_t left;    // entries of the row from there on; may be negative
  int32_t before;  // entries of the row before, at most kVector
  bool linear;
};

__device__ __forceinline__ int32_t clamp_to(int64_t value, int32_t low, int32_t high) {
  return static_cast<int32_t>(value < low ? low : value > high ? high : value);
}

template <int kBytes>
__device__ __forceinline__ Span span_from(const Row& row, int64_t first) {
  return {static_cast<const char*>(row.data) + first * kBytes, row.vocab - first,
          clamp_to(first, 0, kVector), row.linear};
}

__device__ __forceinline__ constexpr int bytes_of(Element element) {
  return element == Element::kFloat32 ? 4 : 2;
}

// Bits of an entry of weight 0.
__device__ __forceinline__ uint32_t nothing_bits(Element element, bool linear) {
  if (linear) return 0;
  if (element == Element::kFloat32) return 0xFF800000u;
  return element == Element::kBFloat16 ? 0xFF80u : 0xFC00u;
}

__device__ __forceinline__ void take_words(const uint4& loaded, uint32_t* words) {
  words[0] = loaded.x;
  words[1] = loaded.y;
  words[2] = loaded.z;
  words[3] = loaded.w;
}

__device__ __forceinline__ void load_words(const char* address, uint32_t* words) {
  take_words(__ldg(reinterpret_cast<const uint4*>(address)), words);
}

// The four words that begin `bytes` (below 16) into eight, without an index that the compiler does
// not know: that would move the words from registers to memory.
__device__ __forceinline__ void cut_out(const uint32_t* from, int32_t bytes, uint32_t* to) {
  uint32_t by_word[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const uint32_t low = bytes & 4 ? from[i + 1] : from[i];
    const uint32_t high = bytes & 4 ? from[i + 3] : from[i + 2];
    by_word[i] = bytes & 8 ? high : low;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = __funnelshift_r(by_word[i], by_word[i + 1], bytes % 4 * 8);
  }
}

// kLoad bytes of entries, of which the row has the first `count`, one by one. A call: it is for the
// ends of rows, and its code is large.
template <int kBytes>
__device__ __attribute__((noinline)) uint4 load_entries(const char* address, int32_t count,
                                                        uint32_t nothing) {
  constexpr int kPerWord = 4 / kBytes;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int at = i * kPerWord + j;
      uint32_t entry = nothing;
      if (at < count) {
        if (kBytes == 4) {
          entry = __ldg(reinterpret_cast<const uint32_t*>(address) + at);
        } else {
          entry = __ldg(reinterpret_cast<const uint16_t*>(address) + at);
        }
      }
      words[i] |= entry << (j * 16);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ int32_t misalignment(const Span& span) {
  return static_cast<int32_t>(reinterpret_cast<uintptr_t>(span.data) % kLoad);
}

// The entries [offset, offset + kVector) of an aligned span, which are known to be there.
template <int kBytes>
__device__ __forceinline__ void load_aligned(const Span& span, int32_t offset, RawVector* out) {
#pragma unroll
  for (int i = 0; i < kVector * kBytes / kLoad; ++i) {
    load_words(span.data + offset * kBytes + i * kLoad, out->word + 4 * i);
  }
}

// The same of any span; entries past the row have weight 0.
template <int kBytes>
__device__ __forceinline__ void load_vector(Element element, const Span& span, int32_t offset,
                                            RawVector* out) {
  constexpr int32_t kEntries = kLoad / kBytes;
  const int32_t misaligned = misalignment(span);
  const int32_t lead = misaligned / kBytes;
#pragma unroll
  for (int i = 0; i < kVector / kEntries; ++i) {
    const int32_t first = offset + i * kEntries;
    const int32_t count = clamp_to(span.left - first, 0, 2 * kEntries);
    const char* address = span.data + first * kBytes;
    uint32_t* words = out->word + 4 * i;
    if (misaligned == 0 && count >= kEntries) {
      load_words(address, words);
    } else if (misaligned != 0 && first + span.before >= lead && count >= 2 * kEntries - lead) {
      uint32_t around[8];
      load_words(address - misaligned, around);
      load_words(address - misaligned + kLoad, around + 4);
      cut_out(around, misaligned, words);
    } else {
      // In the last tile most vectors lie past the row.
      const uint32_t nothing = nothing_bits(element, span.linear);
      uint4 loaded = {nothing, nothing, nothing, nothing};
      if (count > 0) {
        loaded = load_entries<kBytes>(address, count, nothing);
      } else if (kBytes == 2) {
        loaded.x = loaded.y = loaded.z = loaded.w = nothing << 16 | nothing;
      }
      take_words(loaded, words);
    }
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

// ---- maxima of entries as they lie in memory ---

// Of two pairs of 16-bit entries. A NaN gives way to a number.
template <Element kElement>
__device__ __forceinline__ uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  static_assert(kElement != Element::kFloat32, "an entry is half a word");
#ifdef __CUDA_ARCH__
  uint32_t largest;
  if (kElement == Element::kBFloat16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(largest) : "r"(a), "r"(b));
  }
  return largest;
#else
  const auto larger = [](uint32_t x, uint32_t y) {
    const auto widen = kElement == Element::kBFloat16 ? widen_bfloat16 : widen_float16;
    const float u = widen(static_cast<uint16_t>(x)), v = widen(static_cast<uint16_t>(y));
    return (u < v || u != u ? y : x) & 0xFFFFu;
  };
  return larger(a >> 16, b >> 16) << 16 | larger(a, b);
#endif
}

template <Element kElement, int kCount>
__device__ __forceinline__ float max_of_vectors(const RawVector* raw) {
  if constexpr (kElement == Element::kFloat32) {
    float max = float_from_bits(raw[0].word[0]);
#pragma unroll
    for (int j = 1; j < kCount * kVector; ++j) {
      max = fmaxf(max, float_from_bits(raw[j / kVector].word[j % kVector]));
    }
    return max;
  } else {
    constexpr int kWords = kVector / 2;
    uint32_t pair = raw[0].word[0];
#pragma unroll
    for (int j = 1; j < kCount * kWords; ++j) {
      pair = max_of_pairs<kElement>(pair, raw[j / kWords].word[j % kWords]);
    }
    if (kElement == Element::kBFloat16) {
      return fmaxf(float_from_bits(pair << 16), float_from_bits(pair & 0xFFFF0000u));
    }
    return fmaxf(half_to_float(pair & 0xFFFFu), half_to_float(pair >> 16));
  }
}

// ---- what is no plain row ---

// Bits of the entries [first, first + kVector) of a masked row that are allowed. `first` is a
// multiple of kVector: where entries are in the order of tokens, the bits are a byte of the mask.
__device__ __forceinline__ uint32_t allowed_in_vector(const Row& row, int64_t first) {
  static_assert(32 % kVector == 0, "a vector's bits are in one word");
  if (row.tokens == nullptr || row.by_token) {
    const int32_t known = clamp_to(row.num_tokens - first, 0, kVector);
    if (known == 0) return 0;
    const uint32_t word = __ldg(row.allowed + (first >> 5)) >> (first & 31);
    return word & ((1u << known) - 1);
  }
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (first + j < row.vocab && is_allowed(row, row.tokens[first + j])) bits |= 1u << j;
  }
  return bits;
}

// The probabilities of four tokens in a row that is a list, masked or not.
__device__ __forceinline__ uint4 look_up_listed(const Row& row, int64_t first) {
  const auto* probs = static_cast<const uint32_t*>(row.data);
  uint32_t words[4] = {0, 0, 0, 0};
  int32_t k = first_listed(row, first);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (k < row.listed && row.tokens[k] == first + j) words[j] = probs[k++];
  }
  return {words[0], words[1], words[2], words[3]};
}

// The entries [first, first + kVector) of a row in token order, one by one; those that are missing
// or past the row have weight 0.
template <int kBytes>
__device__ __forceinline__ void look_up_vector(const Row& row, int64_t first, RawVector* out) {
  constexpr int kPerWord = 4 / kBytes;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int32_t place = first + j < row.vocab ? row.entries[first + j] : -1;
    uint32_t entry = nothing_bits(row.element, row.linear);
    if (place >= 0) {
      if (kBytes == 4) {
        entry = static_cast<const uint32_t*>(row.data)[place];
      } else {
        entry = static_cast<const uint16_t*>(row.data)[place];
      }
    }
    uint32_t& word = out->word[j / kPerWord];
    word = (j % kPerWord == 0 ? 0 : word) | entry << (j % kPerWord * 16);
  }
}

}  // namespace cuda
}  // namespace specdec
