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

#include <climits>
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

#ifndef SPECDEC_ON_FIBRES
inline void throw_unless_done(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here: nobody else shall find it
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#endif

template <typename T>
struct AsGiven {
  using Type = T;
};

// Runs kernel(params...) on `blocks` blocks of kThreads threads; no block, no launch. Throws with
// the kernel's name and the CUDA error. `params` are converted to the kernel's own types.
//
// Of an operator's launches the first begins when all is done that was enqueued before. The others
// are chained to the launch before where the device can do that: their blocks may begin as soon as
// all blocks of that one have, and wait for its end themselves, by begin_kernel or what it consists
// of.
template <typename... Params>
void launch(const Gpu& gpu, const char* name, void (*kernel)(Params...), int64_t blocks,
            const typename AsGiven<Params>::Type&... params) {
  if (blocks == 0) return;
  constexpr int64_t kMaxBlocks = 2147483647;  // of gridDim.x
  if (blocks < 0 || blocks > kMaxBlocks) {
    throw std::runtime_error(std::string(name) + ": a launch takes 0 to 2^31 - 1 blocks, got " +
                             std::to_string(blocks));
  }
  const bool chained = gpu.launches++ > 0 && gpu.chip.chains;
#ifdef SPECDEC_ON_FIBRES
  fibres::expect_loaded(name, reinterpret_cast<const void*>(kernel));
  fibres::run_kernel<Params...>(name, kernel, blocks, kThreads, chained, params...);
#else
  const void* arguments[] = {&params..., nullptr};  // no zero-sized array without parameters
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(gpu.stream);
  config.attrs = &attribute;
  config.numAttrs = chained ? 1 : 0;
  throw_unless_done(name, cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel),
                                              const_cast<void**>(arguments)));
#endif
}

// Loads kernels onto the current device.
class Loading {
 public:
  // The architecture, as 90, whose code they consist of, or were made from: the lowest.
  int compiled_for() const { return compiled_for_; }

  template <typename... Params>
  void operator()(void (*kernel)(Params...)) {
    const void* address = reinterpret_cast<const void*>(kernel);
#ifdef SPECDEC_ON_FIBRES
    fibres::load(address);
#else
    cudaFuncAttributes found;
    throw_unless_done("loading the kernels", cudaFuncGetAttributes(&found, address));
    if (found.ptxVersion < compiled_for_) compiled_for_ = found.ptxVersion;
#endif
  }
  template <typename Kernels>
  auto operator()(const Kernels& kernels) -> decltype(kernels.begin(), void()) {
    for (auto* kernel : kernels) (*this)(kernel);
  }
  template <typename First, typename Second, typename... Others>
  void operator()(const First& first, const Second& second, const Others&... others) {
    (*this)(first);
    (*this)(second, others...);
  }

 private:
  int compiled_for_ = INT_MAX;
};

// ---- in a chain of launches ---

// From here on blocks of the next launch may begin on multiprocessors that have room.
__device__ __forceinline__ void let_next_launch_begin() {
#ifdef SPECDEC_ON_FIBRES
  fibres::note_let_begin();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until then a kernel may read what the operator was given, and nothing that an earlier launch of
// the operator writes (but see begin_in_turn); all its threads call this.
__device__ __forceinline__ void wait_for_launch_before() {
#ifdef SPECDEC_ON_FIBRES
  fibres::note_wait();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// How a kernel begins.
__device__ __forceinline__ void begin_kernel() {
  let_next_launch_begin();
  wait_for_launch_before();
}

// The same where the next launch reads, before it waits, what launches before this one have left:
// it begins when they have ended, and whoever waits for it has waited for them.
__device__ __forceinline__ void begin_in_turn() {
  wait_for_launch_before();
  let_next_launch_begin();
}

// For whoever reads what such launches have left, and whoever meets that one at a barrier, before
// they wait: what their multiprocessor has cached of that memory may be older.
__device__ __forceinline__ void see_finished_launches() {
#ifndef SPECDEC_ON_FIBRES
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Adds to a counter of the launch's blocks; gives its old value. What this thread has written or
// seen written before is seen by whoever adds later, and by whoever meets that one at a barrier.
__device__ __forceinline__ uint32_t add_in_order(uint32_t* counter, uint32_t value) {
#ifdef SPECDEC_ON_FIBRES
  return fibres::add_to_counter(counter, value, true);
#else
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(counter), "r"(value)
               : "memory");
  return old;
#endif
}

// The same where nobody asks for the old value: sees nothing of what others wrote.
__device__ __forceinline__ void release_add(uint32_t* counter, uint32_t value) {
#ifdef SPECDEC_ON_FIBRES
  fibres::add_to_counter(counter, value, false);
#else
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" : : "l"(counter), "r"(value) : "memory");
#endif
}

// A counter's value. What was written before it was added to by release_add is seen by this thread,
// and by whoever meets it at a barrier.
__device__ __forceinline__ uint32_t acquire(const uint32_t* counter) {
#ifdef SPECDEC_ON_FIBRES
  return fibres::look_at_counter(counter);
#else
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
#endif
}

// Asks for the line at an address, to be read soon.
__device__ __forceinline__ void prefetch_line(const char* address) {
#ifdef SPECDEC_ON_FIBRES
  fibres::touch(address);
#else
  asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
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
