// The vocabulary of CUDA C++ for a host compiler, on top of fibres.h. Only what the kernels use;
// the overloads are CUDA's, so that what compiles here compiles there.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibres.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// One block runs at a time. Thread-local, because that puts all shared variables of a library next
// to each other, where run_grid overwrites them before every block: nothing may rely on what an
// earlier block left there.
#define __shared__ static thread_local

struct uint3 {
  unsigned x, y, z;
};

struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct alignas(8) float2 {
  float x, y;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Set by fibres.cpp at every change of thread.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern uint3 blockDim;
extern uint3 gridDim;
constexpr int warpSize = 32;

// ---- barriers -----------------------------------------------------------------------------------

namespace specdec {
namespace fibres {

struct Vote {
  bool mine;
  bool all;
  bool any;
  unsigned ballot;
};

inline void vote(void** brought, int n) {
  bool all = true, any = false;
  unsigned ballot = 0;
  for (int i = 0; i < n; ++i) {
    if (brought[i] == nullptr) continue;
    const bool one = static_cast<Vote*>(brought[i])->mine;
    all &= one;
    any |= one;
    if (i < 32 && one) ballot |= 1u << i;
  }
  for (int i = 0; i < n; ++i) {
    if (brought[i] != nullptr) *static_cast<Vote*>(brought[i]) = {false, all, any, ballot};
  }
}

inline Vote vote_block(bool mine, Site site) {
  Vote v{mine, false, false, 0};
  meet_block(site, vote, &v);
  return v;
}

inline Vote vote_warp(unsigned mask, bool mine, Site site) {
  Vote v{mine, false, false, 0};
  meet_warp(mask, site, vote, &v);
  return v;
}

}  // namespace fibres
}  // namespace specdec

inline void __syncthreads(specdec::fibres::Site site = specdec::fibres::here("__syncthreads")) {
  specdec::fibres::meet_block(site, nullptr, nullptr);
}

inline int __syncthreads_and(
    int value, specdec::fibres::Site site = specdec::fibres::here("__syncthreads_and")) {
  return specdec::fibres::vote_block(value != 0, site).all;
}

inline int __syncthreads_or(
    int value, specdec::fibres::Site site = specdec::fibres::here("__syncthreads_or")) {
  return specdec::fibres::vote_block(value != 0, site).any;
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu,
                       specdec::fibres::Site site = specdec::fibres::here("__syncwarp")) {
  specdec::fibres::meet_warp(mask, site, nullptr, nullptr);
}

inline int __all_sync(unsigned mask, int value,
                      specdec::fibres::Site site = specdec::fibres::here("__all_sync")) {
  return specdec::fibres::vote_warp(mask, value != 0, site).all;
}

inline int __any_sync(unsigned mask, int value,
                      specdec::fibres::Site site = specdec::fibres::here("__any_sync")) {
  return specdec::fibres::vote_warp(mask, value != 0, site).any;
}

inline unsigned __ballot_sync(unsigned mask, int value,
                              specdec::fibres::Site site = specdec::fibres::here("__ballot_sync")) {
  return specdec::fibres::vote_warp(mask, value != 0, site).ballot;
}

// ---- reductions ---------------------------------------------------------------------------------

namespace specdec {
namespace fibres {

template <typename T>
struct LargerOf {
  T operator()(T a, T b) const { return a > b ? a : b; }
};

template <typename T>
struct SumOf {
  T operator()(T a, T b) const { return a + b; }
};

// Combines what the lanes of a mask have brought.
template <typename T, typename Op>
void combine_all(void** brought, int n) {
  const T* found = nullptr;
  T total{};
  for (int i = 0; i < n; ++i) {
    const T* one = static_cast<T*>(brought[i]);
    if (one == nullptr) continue;
    total = found == nullptr ? *one : Op{}(total, *one);
    found = one;
  }
  for (int i = 0; i < n; ++i) {
    if (brought[i] != nullptr) *static_cast<T*>(brought[i]) = total;
  }
}

}  // namespace fibres
}  // namespace specdec

inline int __reduce_max_sync(
    unsigned mask, int value,
    specdec::fibres::Site site = specdec::fibres::here("__reduce_max_sync")) {
  using namespace specdec::fibres;
  meet_warp(mask, site, combine_all<int, LargerOf<int>>, &value);
  return value;
}

inline unsigned __reduce_add_sync(
    unsigned mask, unsigned value,
    specdec::fibres::Site site = specdec::fibres::here("__reduce_add_sync")) {
  using namespace specdec::fibres;
  meet_warp(mask, site, combine_all<unsigned, SumOf<unsigned>>, &value);
  return value;
}

// ---- shuffles -----------------------------------------------------------------------------------

namespace specdec {
namespace fibres {

template <typename T>
struct Exchange {
  T mine;
  int source;  // lane
  T result;
};

template <typename T>
void exchange_all(void** brought, int n) {
  for (int lane = 0; lane < n; ++lane) {
    auto* to = static_cast<Exchange<T>*>(brought[lane]);
    if (to == nullptr) continue;
    const auto* from = static_cast<const Exchange<T>*>(brought[to->source]);
    if (from == nullptr) fail("a shuffle reads a lane that does not take part");
    to->result = from->mine;
  }
}

template <typename T>
T exchange(unsigned mask, T mine, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
  Exchange<T> e{mine, source, mine};
  meet_warp(mask, site, exchange_all<T>, &e);
  return e.result;
}

inline int lane() { return static_cast<int>(threadIdx.x % 32); }

// The lane itself where `source` lies outside its segment.
inline int within(int source, int width) {
  return source / width == lane() / width && source >= 0 ? source : lane();
}

}  // namespace fibres
}  // namespace specdec

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              specdec::fibres::Site site = specdec::fibres::here("__shfl_sync")) {
  const int segment = specdec::fibres::lane() / width * width;
  return specdec::fibres::exchange(mask, value, segment + (source & (width - 1)), site);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 specdec::fibres::Site site = specdec::fibres::here("__shfl_up_sync")) {
  const int source = specdec::fibres::lane() - static_cast<int>(delta);
  return specdec::fibres::exchange(mask, value, specdec::fibres::within(source, width), site);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   specdec::fibres::Site site = specdec::fibres::here("__shfl_down_sync")) {
  const int source = specdec::fibres::lane() + static_cast<int>(delta);
  return specdec::fibres::exchange(mask, value, specdec::fibres::within(source, width), site);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  specdec::fibres::Site site = specdec::fibres::here("__shfl_xor_sync")) {
  const int source = specdec::fibres::lane() ^ lanes;
  return specdec::fibres::exchange(mask, value, specdec::fibres::within(source, width), site);
}

// ---- atomics: all threads share one processor ---------------------------------------------------

// What only stands for an access, or is told otherwise, is none for csrc/testing/watch.cpp.
#define SPECDEC_UNWATCHED __attribute__((no_sanitize("thread")))

#define SPECDEC_PLACE __builtin_return_address(0)

#define SPECDEC_ATOMIC(name, T, expression)                                \
  SPECDEC_UNWATCHED inline T name(T* address, T value) {                   \
    specdec::fibres::note_atomic(address, sizeof *address, SPECDEC_PLACE); \
    const T old = *address;                                                \
    *address = static_cast<T>(expression);                                 \
    specdec::fibres::meet_other_blocks(address);                           \
    return old;                                                            \
  }
#define SPECDEC_ATOMICS(T)                                                 \
  SPECDEC_ATOMIC(atomicAdd, T, old + value)                                \
  SPECDEC_ATOMIC(atomicMax, T, old < value ? value : old)                  \
  SPECDEC_ATOMIC(atomicMin, T, value < old ? value : old)                  \
  SPECDEC_ATOMIC(atomicExch, T, value)                                     \
  SPECDEC_ATOMIC(atomicOr, T, old | value)                                 \
  SPECDEC_ATOMIC(atomicAnd, T, old& value)                                 \
  SPECDEC_UNWATCHED inline T atomicCAS(T* address, T expected, T value) {  \
    specdec::fibres::note_atomic(address, sizeof *address, SPECDEC_PLACE); \
    const T old = *address;                                                \
    if (old == expected) *address = value;                                 \
    specdec::fibres::meet_other_blocks(address);                           \
    return old;                                                            \
  }

SPECDEC_ATOMICS(int)
SPECDEC_ATOMICS(unsigned)
SPECDEC_ATOMICS(unsigned long long)
SPECDEC_ATOMIC(atomicAdd, float, old + value)
SPECDEC_ATOMIC(atomicAdd, double, old + value)

#undef SPECDEC_ATOMICS
#undef SPECDEC_ATOMIC

namespace specdec {
namespace fibres {

// An addition to a counter, or a look at it, that orders what other memory holds.
template <typename T>
SPECDEC_UNWATCHED T add_to_counter(T* counter, T value, bool acquires) {
  note_counter(counter, sizeof *counter, true, acquires, SPECDEC_PLACE);
  const T old = *counter;
  *counter = old + value;
  meet_other_blocks(counter);
  return old;
}

template <typename T>
SPECDEC_UNWATCHED T look_at_counter(const T* counter) {
  note_counter(counter, sizeof *counter, false, true, SPECDEC_PLACE);
  return *counter;
}

// It must be there.
SPECDEC_UNWATCHED inline void touch(const char* address) {
  (void)*static_cast<const volatile char*>(address);
}

}  // namespace fibres
}  // namespace specdec

inline void __threadfence() { specdec::fibres::meet_other_blocks(nullptr); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { specdec::fibres::wait_for_other_blocks(); }

// ---- loads, bits, arithmetic --------------------------------------------------------------------

template <typename T>
T __ldg(const T* address) {
  return *address;
}

template <typename T>
T __ldcg(const T* address) {
  return *address;
}

template <typename T>
T __ldcs(const T* address) {
  return *address;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31) >> 32);
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }

namespace specdec {
namespace fibres {

template <typename To, typename From>
To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

}  // namespace fibres
}  // namespace specdec

inline float __uint_as_float(unsigned bits) { return specdec::fibres::same_bits<float>(bits); }
inline float __int_as_float(int bits) { return specdec::fibres::same_bits<float>(bits); }
inline int __float_as_int(float value) { return specdec::fibres::same_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return specdec::fibres::same_bits<unsigned>(value); }
inline double __longlong_as_double(long long bits) {
  return specdec::fibres::same_bits<double>(bits);
}
inline long long __double_as_longlong(double value) {
  return specdec::fibres::same_bits<long long>(value);
}
