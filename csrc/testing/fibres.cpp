#include "fibres.h"

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "stand_in.h"

uint3 threadIdx;
uint3 blockIdx;
uint3 blockDim;
uint3 gridDim;

namespace specdec {
namespace fibres {
namespace {

constexpr int kWarpLanes = 32;
constexpr size_t kStackBytes = size_t{256} << 10;

// ---- fibres -------------------------------------------------------------------------------------

// A stack with an unreadable page below it: overflowing it is a crash, not a wrong result.
class Stack {
 public:
  Stack() : guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    base_ = mmap(nullptr, guard_ + kStackBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (base_ == MAP_FAILED || mprotect(base_, guard_, PROT_NONE) != 0) throw std::bad_alloc();
  }
  ~Stack() { munmap(base_, guard_ + kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  char* bottom() const { return static_cast<char*>(base_) + guard_; }

 private:
  size_t guard_;
  void* base_;
};

// Where a fibre (or the caller of run_grid) goes on: what __builtin_setjmp saves. Unlike
// swapcontext it makes no system call, unlike setjmp it does not mind another stack.
struct Place {
  void* saved[5];
};

// Neither may be inlined: a frame that __builtin_setjmp returns to must still be there, and GCC
// wants the jump in another function.
__attribute__((noinline, noreturn)) void go_to(Place* to) { __builtin_longjmp(to->saved, 1); }

__attribute__((noinline)) void change(Place* from, Place* to) {
  if (__builtin_setjmp(from->saved) == 0) go_to(to);
}

__attribute__((noinline)) void change(Place* from, const ucontext_t* to) {
  if (__builtin_setjmp(from->saved) == 0) setcontext(to);
}

enum class State : int8_t { kRunnable, kAtBlock, kAtWarp, kReturned };

struct Fibre {
  Stack stack;
  Place place;
  bool started = false;
  State state = State::kReturned;
  uint32_t mask = 0;  // of the warp meeting it waits for
  Site site{"", "", 0};
  Combine combine = nullptr;
  void* mine = nullptr;
};

// ---- the block that runs ------------------------------------------------------------------------

struct Machine {
  std::mutex one_launch_at_a_time;
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<int> runnable;      // in no order
  std::vector<void*> brought;     // to the meeting that is about to be held
  std::vector<uint32_t> at_warp;  // lanes that wait for others of their warp, warp by warp
  Place caller;
  int threads = 0;
  int current = 0;
  int at_block = 0;
  int returned = 0;
  void (*thread)(const void*) = nullptr;
  const void* context = nullptr;
  int lost = -1;
  std::string error;
  uint64_t random = 1;
  int64_t launches = 0;
};

Machine the_machine;

// xorshift64*: the high bits are good.
uint32_t random_below(Machine* m, uint32_t n) {
  m->random ^= m->random >> 12;
  m->random ^= m->random << 25;
  m->random ^= m->random >> 27;
  const uint64_t high = m->random * 0x2545F4914F6CDD1Du >> 32;
  return static_cast<uint32_t>(high * n >> 32);
}

// Gives the processor to some runnable thread or, where there is none, back to run_block.
void run_another(Machine* m) {
  Place* from = &m->fibres[m->current]->place;
  const auto n = static_cast<uint32_t>(m->runnable.size());
  if (n == 0 || !m->error.empty()) return change(from, &m->caller);
  const uint32_t pick = random_below(m, n);
  const int next = m->runnable[pick];
  m->runnable[pick] = m->runnable[n - 1];
  m->runnable.pop_back();
  if (next == m->current) return;
  m->current = next;
  threadIdx.x = static_cast<unsigned>(next);
  change(from, &m->fibres[next]->place);
}

// A fibre's life: a thread of a block, and when all have returned, one of the next block.
void live() {
  Machine& m = the_machine;
  const int self = m.current;
  change(&m.fibres[self]->place, &m.caller);
  for (;;) {
    try {
      if (self != m.lost) m.thread(m.context);
    } catch (const std::exception& e) {
      m.error = e.what();
    }
    m.fibres[self]->state = State::kReturned;
    ++m.returned;
    run_another(&m);
  }
}

void start(Machine* m, int index) {
  Fibre& fibre = *m->fibres[index];
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack.bottom();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, live, 0);
  m->current = index;
  change(&m->caller, &context);
  fibre.started = true;
}

// ---- meetings -----------------------------------------------------------------------------------

std::string describe(const Site& site) {
  std::string file = site.file;
  file.erase(0, file.rfind('/') + 1);
  return std::string(site.what) + " at " + file + ":" + std::to_string(site.line);
}

bool same_place(const Fibre& a, const Fibre& b) {
  return a.site.line == b.site.line && a.site.file == b.site.file && a.combine == b.combine;
}

void check_same_place(const Fibre& a, const Fibre& b) {
  if (same_place(a, b)) return;
  throw std::runtime_error("threads that should meet are at different places: " + describe(a.site) +
                           " and " + describe(b.site));
}

void wait(Machine* m, State state, Site site, Combine combine, void* mine, uint32_t mask) {
  Fibre& fibre = *m->fibres[m->current];
  fibre.state = state;
  fibre.site = site;
  fibre.combine = combine;
  fibre.mine = mine;
  fibre.mask = mask;
}

void release(Machine* m, int index) {
  m->fibres[index]->state = State::kRunnable;
  m->runnable.push_back(index);
}

void hold_block_meeting(Machine* m, Combine combine) {
  const Fibre& last = *m->fibres[m->current];
  for (int i = 0; i < m->threads; ++i) {
    check_same_place(*m->fibres[i], last);
    m->brought[i] = m->fibres[i]->mine;
  }
  if (combine != nullptr) combine(m->brought.data(), m->threads);
  m->at_block = 0;
  for (int i = 0; i < m->threads; ++i) release(m, i);
}

void hold_warp_meeting(Machine* m, int first, uint32_t mask, Combine combine) {
  const Fibre& last = *m->fibres[m->current];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    m->brought[lane] = nullptr;
    if ((mask >> lane & 1) == 0) continue;
    const Fibre& fibre = *m->fibres[first + lane];
    check_same_place(fibre, last);
    if (fibre.mask != mask) fail("lanes that should meet gave different masks");
    m->brought[lane] = fibre.mine;
  }
  if (combine != nullptr) combine(m->brought.data(), kWarpLanes);
  m->at_warp[first / kWarpLanes] &= ~mask;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if ((mask >> lane & 1) != 0) release(m, first + lane);
  }
}

// ---- blocks -------------------------------------------------------------------------------------

// "31 threads wait: __syncthreads at draw.cuh:57; 1 returned" once nobody can go on.
std::string describe_deadlock(const Machine& m) {
  std::ostringstream out;
  out << "threads wait for others that never come: ";
  std::vector<bool> told(m.threads, false);
  for (int i = 0; i < m.threads; ++i) {
    if (told[i] || m.fibres[i]->state == State::kReturned) continue;
    int count = 0;
    for (int j = i; j < m.threads; ++j) {
      if (m.fibres[j]->state != m.fibres[i]->state || !same_place(*m.fibres[i], *m.fibres[j]))
        continue;
      told[j] = true;
      ++count;
    }
    out << count << " in " << describe(m.fibres[i]->site) << "; ";
  }
  out << m.returned << " returned";
  return out.str();
}

// All shared variables of this library: its thread-local storage and nothing else.
struct SharedMemory {
  void* begin = nullptr;
  size_t bytes = 0;
};

thread_local char shared_anchor;

int find_shared_memory(dl_phdr_info* library, size_t, void* result) {
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    if (library->dlpi_phdr[i].p_type != PT_TLS || library->dlpi_tls_data == nullptr) continue;
    const auto begin = reinterpret_cast<uintptr_t>(library->dlpi_tls_data);
    const auto anchor = reinterpret_cast<uintptr_t>(&shared_anchor);
    const size_t bytes = library->dlpi_phdr[i].p_memsz;
    if (anchor < begin || anchor >= begin + bytes) continue;
    *static_cast<SharedMemory*>(result) = {library->dlpi_tls_data, bytes};
    return 1;
  }
  return 0;
}

SharedMemory shared_memory() {
  shared_anchor = 0;  // the storage exists from the first access on
  SharedMemory found;
  dl_iterate_phdr(find_shared_memory, &found);
  if (found.begin == nullptr) throw std::runtime_error("the library's shared memory is not found");
  return found;
}

void run_block(Machine* m, int64_t block, const SharedMemory& shared) {
  static constexpr unsigned char kPoison[] = {0xFF, 0x7F, 0xCD, 0x01};
  memset(shared.begin, kPoison[random_below(m, sizeof kPoison)], shared.bytes);
  blockIdx.x = static_cast<unsigned>(block);
  m->runnable.clear();
  m->at_warp.assign((m->threads + kWarpLanes - 1) / kWarpLanes, 0);
  m->at_block = m->returned = 0;
  for (int i = 0; i < m->threads; ++i) release(m, i);
  m->current = static_cast<int>(random_below(m, static_cast<uint32_t>(m->threads)));
  m->runnable[m->current] = m->runnable.back();
  m->runnable.pop_back();
  threadIdx.x = static_cast<unsigned>(m->current);
  change(&m->caller, &m->fibres[m->current]->place);
  if (m->error.empty() && m->returned < m->threads) m->error = describe_deadlock(*m);
}

// Threads that will never go on leave their stacks as they are: kernels own nothing.
[[noreturn]] void give_up(Machine* m, const char* kernel, int64_t block) {
  m->lost = -1;
  const std::string error =
      std::string(kernel) + ", block " + std::to_string(block) + ": " + m->error;
  m->error.clear();
  m->fibres.clear();
  throw std::runtime_error(error);
}

void prepare(Machine* m, int64_t blocks, int threads) {
  m->threads = threads;
  m->brought.resize(threads > kWarpLanes ? threads : kWarpLanes);
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  while (static_cast<int>(m->fibres.size()) < threads) {
    m->fibres.push_back(std::make_unique<Fibre>());
  }
  for (int i = 0; i < threads; ++i) {
    if (!m->fibres[i]->started) start(m, i);
  }
}

// A stride that visits every block once.
int64_t random_stride(Machine* m, int64_t blocks) {
  int64_t stride = 1 + random_below(m, static_cast<uint32_t>(blocks));
  while (std::gcd(stride, blocks) != 1) ++stride;
  return stride;
}

}  // namespace

void fail(const char* what) { throw std::runtime_error(what); }

void meet_block(Site site, Combine combine, void* mine) {
  Machine& m = the_machine;
  wait(&m, State::kAtBlock, site, combine, mine, 0);
  if (++m.at_block == m.threads) hold_block_meeting(&m, combine);
  run_another(&m);
}

void meet_warp(uint32_t mask, Site site, Combine combine, void* mine) {
  Machine& m = the_machine;
  const int lane = m.current % kWarpLanes;
  const int first = m.current - lane;
  if ((mask >> lane & 1) == 0) fail("a lane is not in the mask that it gives");
  wait(&m, State::kAtWarp, site, combine, mine, mask);
  uint32_t& waiting = m.at_warp[first / kWarpLanes];
  waiting |= uint32_t{1} << lane;
  if ((waiting & mask) == mask) hold_warp_meeting(&m, first, mask, combine);
  run_another(&m);
}

void run_grid(const char* kernel, int64_t blocks, int threads, void (*thread)(const void*),
              const void* context) {
  Machine& m = the_machine;
  const std::lock_guard<std::mutex> lock(m.one_launch_at_a_time);
  ++m.launches;
  m.thread = thread;
  m.context = context;
  prepare(&m, blocks, threads);
  const SharedMemory shared = shared_memory();
  const int64_t stride = random_stride(&m, blocks);
  int64_t block = random_below(&m, static_cast<uint32_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i, block = (block + stride) % blocks) {
    run_block(&m, block, shared);
    if (!m.error.empty()) give_up(&m, kernel, block);
  }
  m.lost = -1;
}

void set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.random = seed * 0x9E3779B97F4A7C15u | 1;  // never 0
}

void lose_thread(int thread) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.lost = thread;
}

int64_t num_launches() {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  return the_machine.launches;
}

}  // namespace fibres
}  // namespace specdec
