// How kernels reach torch's thread pool without a torch header: a pointer that register.cpp fills
// in.
#pragma once

#include <sched.h>

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

// ---- stages ---

// What the threads of run_stages share; units are numbered through all stages. (No std::atomic: see
// Buffer.)
struct Stages {
  int64_t claimed = 0, done = 0;  // units
  int64_t opened = 0;             // units that may be claimed; kOver: no more will come
  int64_t first = 0;              // the first unit of this stage
  static constexpr int64_t kOver = -1;

  void open(int64_t units) {
    first = opened;
    __atomic_store_n(&opened, units > 0 ? first + units : kOver, __ATOMIC_RELEASE);
  }
  bool claim(int64_t end, int64_t* unit) {
    *unit = __atomic_load_n(&claimed, __ATOMIC_RELAXED);
    return *unit < end && __atomic_compare_exchange_n(&claimed, unit, *unit + 1, false,
                                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  bool finish(int64_t end) { return __atomic_add_fetch(&done, 1, __ATOMIC_ACQ_REL) == end; }
};

// A stage after another, on up to `threads` threads: next() says how many units the next stage has,
// 0 at the end, and unit(i) does one. next() is called when all units before are done, by one
// thread. One parallel region for all of it: each one waits at its end for every thread, one that
// the system has taken off its core for milliseconds included. Here the others do its units.
template <typename Next, typename Unit>
inline void run_stages(const ThreadPool& pool, int64_t threads, const Next& next,
                       const Unit& unit) {
  Stages stages;
  stages.open(next());
  threads = threads < pool.num_threads ? threads : pool.num_threads;
  parallel_for(pool, threads > 1 ? threads : 1, 1, [&](int64_t) {
    for (int64_t idle = 0;;) {
      const int64_t end = __atomic_load_n(&stages.opened, __ATOMIC_ACQUIRE);
      if (end == Stages::kOver) return;
      int64_t i;
      if (!stages.claim(end, &i)) {
        if (++idle % 64 == 0) sched_yield();
        continue;
      }
      unit(i - stages.first);
      if (stages.finish(end)) stages.open(next());
    }
  });
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
