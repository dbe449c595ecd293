// How kernels get onto the device: the launch, and the memory that lasts for one operator call.
//
// The same .cu files are compiled by nvcc and, for tests on machines without a GPU, by a host
// compiler against csrc/testing/stand_in.h. Hence no <<<>>>: kernels are launched by `launch`.
#pragma once

#ifdef SPECDEC_ON_FIBRES
#include "../testing/stand_in.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"

// Threads of every block: a multiple of 32.
#ifndef SPECDEC_CUDA_THREADS
#define SPECDEC_CUDA_THREADS 256
#endif

namespace specdec {
namespace cuda {

constexpr int kThreads = SPECDEC_CUDA_THREADS;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
static_assert(kThreads % kWarp == 0, "blocks are made of whole warps");

template <typename T>
struct AsGiven {
  using Type = T;
};

// Runs kernel(params...) on `blocks` blocks of kThreads threads; no block, no launch. Throws with
// the kernel's name and the CUDA error. `params` are converted to the kernel's own types.
template <typename... Params>
void launch(const Gpu& gpu, const char* name, void (*kernel)(Params...), int64_t blocks,
            const typename AsGiven<Params>::Type&... params) {
  if (blocks == 0) return;
  constexpr int64_t kMaxBlocks = 2147483647;  // of gridDim.x
  if (blocks < 0 || blocks > kMaxBlocks) {
    throw std::runtime_error(std::string(name) + ": a launch takes 0 to 2^31 - 1 blocks, got " +
                             std::to_string(blocks));
  }
#ifdef SPECDEC_ON_FIBRES
  (void)gpu;
  fibres::run_kernel<Params...>(name, kernel, blocks, kThreads, params...);
#else
  const void* arguments[] = {&params..., nullptr};  // no zero-sized array without parameters
  const cudaError_t error = cudaLaunchKernel(
      reinterpret_cast<const void*>(kernel), static_cast<unsigned>(blocks), kThreads,
      const_cast<void**>(arguments), 0, static_cast<cudaStream_t>(gpu.stream));
  if (error != cudaSuccess) {
    cudaGetLastError();  // reported here: nobody else shall find it
    throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
  }
#endif
}

// Of the current device.
inline int64_t multiprocessors(const Gpu& gpu) {
  (void)gpu;
#ifdef SPECDEC_ON_FIBRES
  return fibres::multiprocessors();
#else
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    throw std::runtime_error(std::string("multiprocessors of the device: ") +
                             cudaGetErrorString(cudaGetLastError()));
  }
  return count;
#endif
}

// Asks for the line at an address, to be read soon.
__device__ __forceinline__ void prefetch_line(const char* address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
#else
  (void)*static_cast<const volatile char*>(address);  // it must be there
#endif
}

// An array that a Workspace has promised.
template <typename T>
struct Reserved {
  int64_t offset;
};

// Scratch memory of one operator call: one allocation cut into arrays. Its content is undefined.
//     Workspace workspace;
//     const auto laws = workspace.reserve<RowLaw>(rows);
//     const auto sums = workspace.reserve<uint64_t>(rows * tiles);
//     workspace.allocate(gpu);
//     launch(gpu, "fill", fill, rows, workspace.at(laws), workspace.at(sums));
class Workspace {
 public:
  template <typename T>
  Reserved<T> reserve(int64_t n) {
    const Reserved<T> array{bytes_};
    const int64_t size = n * static_cast<int64_t>(sizeof(T));
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  void allocate(const Gpu& gpu) {
    if (bytes_ > 0) base_ = static_cast<char*>(gpu.allocate(gpu.context, bytes_));
  }

  // Null where nothing at all was reserved.
  template <typename T>
  T* at(Reserved<T> array) const {
    return base_ != nullptr ? reinterpret_cast<T*>(base_ + array.offset) : nullptr;
  }

 private:
  static constexpr int64_t kAlignment = 256;
  int64_t bytes_ = 0;
  char* base_ = nullptr;
};

}  // namespace cuda
}  // namespace specdec
