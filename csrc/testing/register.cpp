// Registers the CUDA kernels, run by fibres, for CPU tensors: schemas and checks are those of
// csrc/library.cpp and csrc/torch.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda/kernels.h"
#include "../torch/operators.h"
#include "../torch/registration.h"
#include "fibres.h"
#include "for_ctypes.h"

namespace specdec {
namespace {

constexpr unsigned char kPoison = 0xFF;  // NaN, -1
constexpr int64_t kFence = 256;

// What operators asked for since the library was loaded.
struct Asked {
  int64_t allocations = 0;
  int64_t bytes = 0;
  void* last = nullptr;  // allocation
  int64_t bytes_of_last = 0;
};

Asked asked;

struct Free {
  void operator()(unsigned char* p) const { free(p); }
};

// Memory that holds nothing useful, with a fence behind it that nobody may write to.
struct Block {
  std::unique_ptr<unsigned char, Free> memory;
  int64_t bytes;

  explicit Block(int64_t n) : bytes(n) {
    const int64_t padded = (n + 2 * kFence - 1) / kFence * kFence;
    memory.reset(static_cast<unsigned char*>(std::aligned_alloc(kFence, padded)));
    if (memory == nullptr) throw std::bad_alloc();
    memset(memory.get(), kPoison, static_cast<size_t>(padded));
  }

  bool intact() const {
    const int64_t padded = (bytes + 2 * kFence - 1) / kFence * kFence;
    for (int64_t i = bytes; i < padded; ++i) {
      if (memory.get()[i] != kPoison) return false;
    }
    return true;
  }
};

struct Scratch {
  std::vector<Block> blocks;

  static void* allocate(void* scratch, int64_t bytes) {
    auto& blocks = static_cast<Scratch*>(scratch)->blocks;
    blocks.emplace_back(bytes);
    void* memory = blocks.back().memory.get();
    fibres::set_workspace(memory, bytes);
    ++asked.allocations;
    asked.bytes += bytes;
    asked.last = memory;
    asked.bytes_of_last = bytes;
    return memory;
  }

  ~Scratch() { fibres::set_workspace(nullptr, 0); }
};

template <auto Kernel, typename Call>
void run(const Call& call) {
  Scratch scratch;
  cuda::Chip chip = cuda::chip_of(0);
  chip.multiprocessors = fibres::multiprocessors();
  Kernel(call.params, cuda::Gpu{chip, nullptr, Scratch::allocate, &scratch});
  for (const Block& block : scratch.blocks) {
    if (block.intact()) continue;
    throw std::runtime_error("kernels wrote past the end of " + std::to_string(block.bytes) +
                             " bytes of workspace");
  }
}

}  // namespace
}  // namespace specdec

SPECDEC_LIBRARY_IMPL(SPECDEC_NAMESPACE, CPU, m) {
  using namespace specdec;
#define SPECDEC_IMPLEMENT(name, Name) \
  m.impl(#name, Operator<check_##name, run<cuda::name, Name##Call>>::boxed);
  SPECDEC_KERNELS(SPECDEC_IMPLEMENT)
#undef SPECDEC_IMPLEMENT
}

// ---- for ctypes ---------------------------------------------------------------------------------

SPECDEC_TEST void fibres_seed(uint64_t seed) { specdec::fibres::set_seed(seed); }
SPECDEC_TEST void fibres_lose_thread(int thread) { specdec::fibres::lose_thread(thread); }
SPECDEC_TEST void fibres_leave_out(const char* place) { specdec::fibres::leave_out(place); }
SPECDEC_TEST void fibres_observe(specdec::fibres::Observer observer) {
  specdec::fibres::set_observer(observer);
}
SPECDEC_TEST void fibres_multiprocessors(int64_t count) {
  specdec::fibres::set_multiprocessors(count);
}
SPECDEC_TEST int64_t fibres_launches() { return specdec::fibres::num_launches(); }
SPECDEC_TEST int64_t fibres_allocations() { return specdec::asked.allocations; }
SPECDEC_TEST int64_t fibres_bytes() { return specdec::asked.bytes; }
// The scratch memory asked for last, for an observer.
SPECDEC_TEST void* fibres_scratch(int64_t* bytes) {
  *bytes = specdec::asked.bytes_of_last;
  return specdec::asked.last;
}
