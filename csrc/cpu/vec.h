// Vectors as wide as the instruction set, in the compiler's own vector extension: the same source
// becomes AVX-512, AVX2 or plain SSE/NEON code.
#pragma once

#include <cstring>

#include "../core/platform.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecH __attribute__((vector_size(2 * kLanes)));
typedef float Quad __attribute__((vector_size(16)));
// Halves, for conversions to 64-bit lanes.
typedef float HalfF __attribute__((vector_size(2 * kLanes)));
typedef double VecD __attribute__((vector_size(4 * kLanes)));
typedef int64_t VecL __attribute__((vector_size(4 * kLanes)));

template <typename V, typename T>
inline V load(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <typename V, typename T>
inline void store(T* p, V v) {
  memcpy(p, &v, sizeof v);
}

inline VecF splat(float x) { return VecF{} + x; }

inline VecF keep_where(VecI mask, VecF v) { return (VecF)((VecI)v & mask); }

inline VecF max_of(VecF a, VecF b) { return a > b ? a : b; }

inline VecF min_of(VecF a, VecF b) { return a < b ? a : b; }

inline VecF positive_part(VecF v) { return v > 0.0f ? v : VecF{}; }

// 2^f for f in [-1/2, 1/2].
inline VecF exp2_fraction(VecF f) {
  VecF poly = splat(0x1.5be7b6p-10f);
  poly = poly * f + 0x1.3ced4ap-7f;
  poly = poly * f + 0x1.c6b7d4p-5f;
  poly = poly * f + 0x1.ebf9b0p-3f;
  poly = poly * f + 0x1.62e426p-1f;
  return poly * f + 1.0f;
}

// 2^t for t in [-126, 127); garbage below, which callers mask out. Relative error 1.5e-7, exact at
// 0.
inline VecF exp2_unchecked(VecF t) {
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves round(t) in the low bits
  const VecF shifted = t + magic;
  return (VecF)((VecU)exp2_fraction(t - (shifted - magic)) + ((VecU)shifted << 23));
}

// The same with NaN for a NaN, whatever its bits: the power of two is a factor, not an addend.
inline VecF exp2_with_nan(VecF t) {
  const VecF magic = splat(12582912.0f + 127.0f);  // the low bits hold an exponent with its bias
  const VecF shifted = t + magic;
  return exp2_fraction(t - (shifted - magic)) * (VecF)((VecU)shifted << 23);
}

inline double sum_lanes(VecF v) {
  float lanes[kLanes];
  store(lanes, v);
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += static_cast<double>(lanes[i]);
  return sum;
}

inline float max_lanes(VecF v) {
  Quad best = load<Quad>(&v);
  for (int i = 1; i < kLanes / 4; ++i) {
    const Quad next = load<Quad>(reinterpret_cast<const float*>(&v) + 4 * i);
    best = next > best ? next : best;
  }
  const float even = best[2] > best[0] ? best[2] : best[0];
  const float odd = best[3] > best[1] ? best[3] : best[1];
  return odd > even ? odd : even;
}

inline bool all_lanes(VecI mask) {
  int32_t lanes[kLanes];
  store(lanes, mask);
  int32_t all = -1;
  for (int i = 0; i < kLanes; ++i) all &= lanes[i];
  return all != 0;
}

// ---- 16-bit floats ---

inline VecF widen_bfloat16(VecH bits) { return (VecF)(__builtin_convertvector(bits, VecU) << 16); }

// As the scalar one of core/rows.h.
inline VecF widen_float16(VecH half) {
  const VecU bits = __builtin_convertvector(half, VecU);
  const VecU magnitude = bits & 0x7FFFu;
  const VecF scaled = (VecF)(magnitude << 13) * 0x1p112f;
  const VecU special = (VecU)(magnitude >= 0x7C00u) & 0x7F800000u;
  return (VecF)((VecU)scaled | special | (bits & 0x8000u) << 16);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
