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

}  // namespace cuda
}  // namespace specdec
