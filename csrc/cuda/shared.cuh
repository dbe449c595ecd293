// Shared memory for types with default member initialisers, which CUDA refuses as __shared__.
#pragma once

#include "launch.cuh"

namespace specdec {
namespace cuda {

// __shared__ SharedArray<Request, 1> request;  request[0] = ...: nothing is constructed.
template <typename T, int kCount>
struct SharedArray {
  alignas(T) unsigned char bytes[sizeof(T) * kCount];

  __device__ __forceinline__ T* data() { return reinterpret_cast<T*>(bytes); }
  __device__ __forceinline__ T& operator[](int i) { return data()[i]; }
};

// Copies a value by one thread, word by word: for those that are short of registers.
template <typename T>
__device__ __forceinline__ void copy_by_thread(T* to, const T& from) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0 && alignof(T) == alignof(uint64_t), "words");
  const auto* words = reinterpret_cast<const uint64_t*>(&from);
#pragma unroll 1
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(uint64_t)); ++i) {
    reinterpret_cast<uint64_t*>(to)[i] = words[i];
  }
}

// Copies a value with all threads of a block, words side by side; they do not meet.
template <typename T>
__device__ __forceinline__ void copy_words(T* to, const T& from) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0 && alignof(T) == alignof(uint64_t), "words");
  const auto* words = reinterpret_cast<const uint64_t*>(&from);
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(T) / sizeof(uint64_t)); i += kThreads) {
    reinterpret_cast<uint64_t*>(to)[i] = words[i];
  }
}

// The same; they meet before and after.
template <typename T>
__device__ __forceinline__ void copy_by_block(T* to, const T& from) {
  __syncthreads();
  copy_words(to, from);
  __syncthreads();
}

}  // namespace cuda
}  // namespace specdec
