// Collectives over a block or a warp.
//
// Contract: all threads of the block (the warp) call them, at the same place; every thread gets the
// result; calls may follow each other directly. Floats are combined in a fixed order, so that a
// result is a function of the threads' values alone. Shared memory written before a block
// collective is visible after it.
//
// csrc/testing/stand_in_block.h has them for the host.
#pragma once

#include "launch.cuh"

#ifdef SPECDEC_ON_FIBRES
#include "../testing/stand_in_block.h"
#else

#include <cub/block/block_scan.cuh>

namespace specdec {
namespace cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

template <int kLanes, typename T, typename Op>
__device__ __forceinline__ T reduce_neighbours(T value, Op op);

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Largest {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

struct Smallest {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

template <typename T, typename Op>
__device__ __forceinline__ T reduce_warp(T value, Op op) {
  return reduce_neighbours<kWarp>(value, op);
}

// Every thread combines the warps' results itself: cub::BlockReduce leaves the result in one
// thread, and sending it round would cost another trip through shared memory. A call: a kernel that
// searches for a cutoff has it in dozens of places.
template <typename T, typename Op>
__device__ __attribute__((noinline)) T reduce_block(T value, Op op) {
  __shared__ T of_warp[kWarps];
  const T partial = reduce_warp(value, op);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = partial;
  __syncthreads();
  T total = of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) total = op(total, of_warp[w]);
  __syncthreads();  // the next call overwrites of_warp
  return total;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  return reduce_warp(value, Sum{});
}

template <typename T>
__device__ __forceinline__ T warp_max(T value) {
  return reduce_warp(value, Largest{});
}

template <typename T>
__device__ __forceinline__ T warp_min(T value) {
  return reduce_warp(value, Smallest{});
}

template <typename T>
__device__ __forceinline__ T block_sum(T value) {
  return reduce_block(value, Sum{});
}

template <typename T>
__device__ __forceinline__ T block_max(T value) {
  return reduce_block(value, Largest{});
}

template <typename T>
__device__ __forceinline__ T block_min(T value) {
  return reduce_block(value, Smallest{});
}

__device__ __forceinline__ bool block_all(bool value) { return __syncthreads_and(value) != 0; }

__device__ __forceinline__ bool block_any(bool value) { return __syncthreads_or(value) != 0; }

// Sum of the values of all threads before this one; `total`: of all threads.
__device__ __forceinline__ uint64_t block_exclusive_sum(uint64_t value, uint64_t* total) {
  using Scan = cub::BlockScan<uint64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage storage;
  uint64_t before;
  Scan(storage).ExclusiveSum(value, before, *total);
  __syncthreads();  // the next call overwrites storage
  return before;
}

}  // namespace cuda
}  // namespace specdec

#endif

namespace specdec {
namespace cuda {

// Combines the values of kLanes neighbouring lanes, by halves: `op` commutes, so that each of them
// gets the same bits.
template <int kLanes, typename T, typename Op>
__device__ __forceinline__ T reduce_neighbours(T value, Op op) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = op(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  return value;
}

// warp_sum of 64-bit numbers: three sums of at most 27 bits a lane, for which there is an
// instruction.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
  constexpr int kBits = 27;
  constexpr uint64_t kPart = (uint64_t{1} << kBits) - 1;
  const auto sum = [](uint64_t part) -> uint64_t {
    return __reduce_add_sync(kAllLanes, static_cast<unsigned>(part));
  };
  return sum(value & kPart) + (sum(value >> kBits & kPart) << kBits) +
         (sum(value >> 2 * kBits) << 2 * kBits);
}

// warp_max of a number, by one integer reduction: keys are in the order of the floats. A NaN of
// positive sign is the largest.
__device__ __forceinline__ float warp_max_by_key(float value) {
  const int bits = __float_as_int(value);
  const int key = __reduce_max_sync(kAllLanes, bits ^ (bits >> 31 & 0x7FFFFFFF));
  return __int_as_float(key ^ (key >> 31 & 0x7FFFFFFF));
}

// Adds to a cell in shared memory, which may be read after a barrier. Exact, and the same whatever
// the order: the carry of each addition to the low word is known from the word's old value. Two
// 32-bit atomics, because 64-bit ones in shared memory are loops of compare-and-swap.
__device__ __forceinline__ void shared_add(uint64_t* cell, uint64_t value) {
  unsigned* words = reinterpret_cast<unsigned*>(cell);  // little-endian
  const unsigned low = static_cast<unsigned>(value);
  const unsigned old = atomicAdd(words, low);
  const unsigned carry = old + low < old ? 1 : 0;
  const unsigned high = static_cast<unsigned>(value >> 32) + carry;
  if (high != 0) atomicAdd(words + 1, high);
}

}  // namespace cuda
}  // namespace specdec
