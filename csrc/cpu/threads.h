// How kernels reach torch's thread pool without a torch header: a pointer that register.cpp fills
// in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "../core/platform.h"

namespace specdec {

struct Ranks;

// Calls body(begin, end, context) on disjoint ranges that cover [0, n), of at least `grain` each.
struct ThreadPool {
  void (*run)(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
  int64_t num_threads;
  const Ranks* ranks = nullptr;  // other processes that hold parts of the vocabulary; nullptr: none
};

namespace SPECDEC_CPU_ISA {

// body(i) for every i in [0, n). Nothing in it may throw.
template <typename F>
inline void parallel_for(const ThreadPool& pool, int64_t n, int64_t grain, const F& body) {
  if (n <= 0) return;
  auto range = [](int64_t begin, int64_t end, void* context) {
    const F& f = *static_cast<const F*>(context);
    for (int64_t i = begin; i < end; ++i) f(i);
  };
  if (n <= grain || pool.num_threads == 1) {
    range(0, n, const_cast<F*>(&body));
  } else {
    pool.run(n, grain, range, const_cast<F*>(&body));
  }
}

// Scratch memory of plain values. Not std::vector: its functions, compiled for one instruction set,
// could be picked by the linker for the others (see platform.h).
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : data_(static_cast<T*>(calloc(n > 0 ? n : 1, sizeof(T)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
