// Watches CUDA kernels on fibres: a launch in which something is wrong ends with an error. Part of
// those libraries whose kernels were compiled with -fsanitize=thread,undefined: by that their code
// calls the functions at the end of this file, before every access to memory and wherever something
// undefined happens, as an access that is not aligned. The sanitizers' own runtimes are not linked:
// to them all fibres would be one thread.
//
// Found are data races: two accesses to the same byte, at least one of them a write, not both
// atomic, that nothing orders in CUDA's memory model.
//
// What orders: barriers of a block, __syncwarp (a shuffle or a vote does not), what is acquired
// from a counter after it was released to it, the wait for the launch before; __threadfence, which
// no kernel uses, does not here. Every thread has a
// clock, and knows of every other thread how much of what that did comes before what it does
// itself: the vector clocks of Flanagan and Freund, FastTrack, 2009. So a race is found whatever
// the order in which fibres run, as long as both accesses happen.
//
// Of the accesses to 8 neighbouring bytes only kKnown are remembered, writes before reads: a race
// with one that has been forgotten since is missed.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stand_in.h"

namespace specdec {
namespace fibres {
namespace {

// ---- what threads know of each other ------------------------------------------------------------

// By thread of a block: what it did while its clock showed at most that is known.
using Clocks = std::vector<uint32_t>;

struct Counter;

// What has been acquired: of each counter, so many of the first releases.
using Acquired = std::map<const Counter*, size_t>;
using Known = std::shared_ptr<const Acquired>;  // null: nothing

Known both(const Known& a, const Known& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  auto sum = std::make_shared<Acquired>(*a);
  for (const auto& [counter, releases] : *b) {
    size_t& known = (*sum)[counter];
    known = std::max(known, releases);
  }
  return sum;
}

// A counter, and what has been released to it.
struct Counter {
  size_t releases = 0;
  std::unordered_map<int64_t, std::vector<std::pair<size_t, Clocks>>> by_block;
  Known acquired;  // what those who released had acquired
};

constexpr size_t kWarpLanes = 32;

struct Thread {
  uint32_t clock;  // that it shows
  uint32_t met;    // when the block's threads met last: all of them know of what was before
  uint32_t ended;  // launches before this one have ended
  std::array<uint32_t, kWarpLanes> of_warp;  // what it knows of its own warp
  Known acquired;
};

struct BlockState {
  int64_t index = 0;
  std::vector<Thread> threads;
};

// ---- what has happened to memory ----------------------------------------------------------------

struct Access {
  const void* place;  // in the code
  uint32_t launch;
  uint32_t block;
  uint32_t clock;
  uint16_t thread;
  uint8_t bytes;  // a mask
  bool writes : 1;
  bool atomic : 1;
};

bool conflict(const Access& a, const Access& b) {
  return (a.bytes & b.bytes) != 0 && (a.writes || b.writes) && !(a.atomic && b.atomic);
}

// Whatever would conflict with `a` conflicts with `b`.
bool stands_for(const Access& b, const Access& a) {
  return (a.bytes & ~b.bytes) == 0 && (b.writes || !a.writes) && (a.atomic || !b.atomic);
}

constexpr int kKnown = 4;
constexpr uintptr_t kCellBytes = 8;

struct Cell {
  uint32_t epoch = 0;  // of the memory that this cell is of: what is older is forgotten
  int count = 0;
  Access accesses[kKnown];
};

constexpr uintptr_t kPageBytes = 4096;
using Page = std::array<Cell, kPageBytes / kCellBytes>;

// Of some memory, by addresses.
class History {
 public:
  void forget() {
    constexpr size_t kMostPages = 4096;
    if (pages_.size() > kMostPages) pages_.clear();
    last_ = nullptr;
    ++epoch_;
  }

  Cell& at(uintptr_t address) {
    const uintptr_t number = address / kPageBytes;
    if (last_ == nullptr || number != last_number_) {
      auto& page = pages_[number];
      if (page == nullptr) page = std::make_unique<Page>();
      last_ = page.get();
      last_number_ = number;
    }
    Cell& cell = (*last_)[address % kPageBytes / kCellBytes];
    if (cell.epoch != epoch_) cell.count = 0;
    cell.epoch = epoch_;
    return cell;
  }

 private:
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  Page* last_ = nullptr;
  uintptr_t last_number_ = 0;
  uint32_t epoch_ = 1;
};

// ---- what is said of a race ---------------------------------------------------------------------

// "draw.cuh:57 < verify.cu:80": a line and those that it was inlined into; where it lies in the
// library if there is no addr2line.
std::string describe_place(const void* place) {
  Dl_info library;
  if (dladdr(place, &library) == 0) return "?";
  char offset[32];
  const auto base = reinterpret_cast<uintptr_t>(library.dli_fbase);
  // The return address: the call is before it.
  snprintf(offset, sizeof offset, "0x%zx", reinterpret_cast<uintptr_t>(place) - base - 1);
  const std::string command =
      std::string("addr2line -s -i -e '") + library.dli_fname + "' " + offset + " 2>/dev/null";
  std::string said;
  if (FILE* lines = popen(command.c_str(), "r")) {
    char line[256];
    while (fgets(line, sizeof line, lines) != nullptr) {
      std::string one = line;
      one.erase(std::min(one.find_first_of(" \n"), one.size()));
      said += (said.empty() ? "" : " < ") + one;
    }
    pclose(lines);
  }
  if (!said.empty() && said[0] != '?') return said;
  return std::string(library.dli_fname) + "+" + offset;
}

std::string describe(const Access& access, uint32_t launch) {
  std::string said = access.atomic ? "an atomic operation" : access.writes ? "a write" : "a read";
  said +=
      " by thread " + std::to_string(access.thread) + " of block " + std::to_string(access.block);
  const uint32_t before = launch - access.launch;
  if (before == 1) said += " of the launch before";
  if (before > 1) said += " of the launch " + std::to_string(before) + " before";
  return said + " at " + describe_place(access.place);
}

// ---- the watcher --------------------------------------------------------------------------------

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool has(uintptr_t address) const { return address >= begin && address < end; }
};

class Watch final : public Watcher {
 public:
  Watch() { set_watcher(this); }

  void begin_launch(const Launch& launch, bool in_turn, const void* shared,
                    size_t shared_bytes) override {
    if (!launch.chained) memory_.forget();
    ++launch_;
    // Else no more has ended than when the launch before began.
    if (!launch.chained) ended_ = launch_;
    if (launch.chained && in_turn) ended_ = launch_ - 1;
    counters_.clear();
    races_.clear();
    faults_.clear();
    threads_ = static_cast<size_t>(launch.threads);
    const auto begin = reinterpret_cast<uintptr_t>(shared);
    shared_ = {begin, begin + shared_bytes};
  }

  std::string end_launch() override {
    std::string said;
    for (const auto& [places, accesses] : races_) {
      said += (said.empty() ? "nothing orders " : "; ") + describe(accesses.first, launch_) +
              " and " + describe(accesses.second, launch_);
    }
    for (const std::string& fault : faults_) said += (said.empty() ? "" : "; ") + fault;
    return said;
  }

  void begin_block(size_t slot, int64_t index) override {
    if (slot >= blocks_.size()) blocks_.resize(slot + 1), shared_histories_.resize(slot + 1);
    shared_histories_[slot].forget();
    blocks_[slot].index = index;
    blocks_[slot].threads.assign(threads_, {1, 0, ended_, {}, nullptr});
  }

  void enter(size_t slot) override {
    block_ = &blocks_[slot];
    host_ = pthread_self();
    shared_history_ = &shared_histories_[slot];
  }

  void leave() override { host_ = pthread_t{}; }

  void order(int first, uint32_t mask) override {
    Thread* warp = &block_->threads[static_cast<size_t>(first)];
    std::vector<Thread*> who;
    std::array<uint32_t, kWarpLanes> known{};
    for (size_t lane = 0; lane < kWarpLanes; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      who.push_back(&warp[lane]);
      for (size_t i = 0; i < kWarpLanes; ++i) known[i] = std::max(known[i], warp[lane].of_warp[i]);
      known[lane] = warp[lane].clock;
    }
    share(who);
    for (Thread* thread : who) thread->of_warp = known;
  }

  void order_all() override {
    std::vector<Thread*> who;
    for (Thread& thread : block_->threads) {
      who.push_back(&thread);
      thread.met = thread.clock;
    }
    share(who);
  }

  void wait_for_launch_before() override { self().ended = launch_; }

  void use_atomically(const void* address, int64_t bytes, const void* place) override {
    use(address, static_cast<size_t>(bytes), true, true, place);
  }

  void use_counter(const void* counter, int64_t bytes, bool releases, bool acquires,
                   const void* place) override {
    use(counter, static_cast<size_t>(bytes), releases, true, place);
    Thread& thread = self();
    Counter& used = counters_[counter];
    if (releases) {
      used.by_block[block_->index].emplace_back(used.releases++, known_of_block());
      used.acquired = both(used.acquired, thread.acquired);
      ++thread.clock;
    }
    if (!acquires) return;
    const auto now = std::make_shared<Acquired>(Acquired{{&used, used.releases}});
    thread.acquired = both(both(thread.acquired, used.acquired), now);
  }

  void use(const void* address, size_t bytes, bool writes, bool atomic, const void* place) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    if (!is_watched(begin)) return;
    Access now = access_by_thread(writes, atomic, place);
    History& history = shared_.has(begin) ? *shared_history_ : memory_;
    for (uintptr_t at = begin; at < begin + bytes;) {
      const uintptr_t cell = at / kCellBytes * kCellBytes;
      const uintptr_t end = std::min(begin + bytes, cell + kCellBytes);
      now.bytes = static_cast<uint8_t>(((1u << (end - at)) - 1) << (at - cell));
      add_access(&history.at(cell), now);
      at = end;
    }
  }

  // Something else that the code does, and where.
  void note_fault(const char* what, const std::string& place) {
    if (runs_kernel()) faults_.insert(std::string(what) + " at " + place);
  }

 private:
  Thread& self() { return block_->threads[threadIdx.x]; }

  // Not code of the host, be it another one's thread that prepares a launch meanwhile.
  bool runs_kernel() const { return host_ == pthread_self(); }

  // Not in code of the host, nor of what is a thread's own or nobody's.
  bool is_watched(uintptr_t address) {
    if (!runs_kernel()) return false;
    const StackRange stack = stack_of_thread();
    return !Range{stack.begin, stack.begin + stack.bytes}.has(address) && !is_constant(address);
  }

  Access access_by_thread(bool writes, bool atomic, const void* place) {
    return {place,
            launch_,
            static_cast<uint32_t>(block_->index),
            self().clock,
            static_cast<uint16_t>(threadIdx.x),
            0,
            writes,
            atomic};
  }

  // Those who have met know the same from here on, and what they do next is not known to others.
  static void share(const std::vector<Thread*>& who) {
    Known acquired;
    uint32_t ended = 0;
    for (const Thread* thread : who) {
      acquired = both(acquired, thread->acquired);
      ended = std::max(ended, thread->ended);
    }
    for (Thread* thread : who) {
      thread->acquired = acquired;
      thread->ended = ended;
      ++thread->clock;
    }
  }

  // What the thread knows of its own block, but for what it has acquired.
  uint32_t known_of(size_t other) const {
    const size_t mine = threadIdx.x;
    const Thread& thread = block_->threads[mine];
    if (other == mine) return thread.clock;
    const uint32_t met = block_->threads[other].met;
    if (other / kWarpLanes != mine / kWarpLanes) return met;
    return std::max(met, thread.of_warp[other % kWarpLanes]);
  }

  Clocks known_of_block() const {
    Clocks clocks(threads_);
    for (size_t i = 0; i < threads_; ++i) clocks[i] = known_of(i);
    return clocks;
  }

  bool comes_before(const Access& access) const {
    const Thread& thread = block_->threads[threadIdx.x];
    if (access.launch != launch_) return access.launch < thread.ended;
    if (access.block == block_->index && access.clock <= known_of(access.thread)) return true;
    return thread.acquired != nullptr && is_acquired(access, *thread.acquired);
  }

  static bool is_acquired(const Access& access, const Acquired& acquired) {
    for (const auto& [counter, releases] : acquired) {
      const auto of_block = counter->by_block.find(access.block);
      if (of_block == counter->by_block.end()) continue;
      for (const auto& [place, clocks] : of_block->second) {
        if (place < releases && access.clock <= clocks[access.thread]) return true;
      }
    }
    return false;
  }

  void add_access(Cell* cell, const Access& now) {
    int kept = 0;
    for (int i = 0; i < cell->count; ++i) {
      const Access& one = cell->accesses[i];
      const bool ordered = comes_before(one);
      if (!ordered && conflict(one, now)) note_race(one, now);
      if (!ordered || !stands_for(now, one)) cell->accesses[kept++] = one;
    }
    if (kept < kKnown) {
      cell->accesses[kept++] = now;
    } else {
      cell->accesses[least_missed(*cell)] = now;
    }
    cell->count = kept;
  }

  // A read, if there is one: others may have read the same.
  int least_missed(const Cell& cell) {
    ++turn_;
    for (uint32_t i = 0; i < kKnown; ++i) {
      const uint32_t k = (turn_ + i) % kKnown;
      if (!cell.accesses[k].writes) return static_cast<int>(k);
    }
    return static_cast<int>(turn_ % kKnown);
  }

  void note_race(const Access& one, const Access& now) {
    constexpr size_t kMost = 10;
    if (races_.size() < kMost) races_.try_emplace({one.place, now.place}, one, now);
  }

  // Variables of the library that are not in shared memory: threadIdx and the like.
  bool is_constant(uintptr_t address) {
    if (library_.empty()) {
      const auto add_segments = [](dl_phdr_info* library, size_t, void* found) {
        const auto here = reinterpret_cast<uintptr_t>(&threadIdx);
        std::vector<Range> segments;
        bool is_ours = false;
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const auto& header = library->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          const uintptr_t begin = library->dlpi_addr + header.p_vaddr;
          segments.push_back({begin, begin + header.p_memsz});
          is_ours = is_ours || segments.back().has(here);
        }
        if (is_ours) *static_cast<std::vector<Range>*>(found) = segments;
        return is_ours ? 1 : 0;
      };
      dl_iterate_phdr(add_segments, &library_);
    }
    for (const Range& segment : library_) {
      if (segment.has(address)) return true;
    }
    return false;
  }

  History memory_;
  std::vector<History> shared_histories_;  // by slot
  std::vector<BlockState> blocks_;         // by slot
  BlockState* block_ = nullptr;            // that runs, or was the last to
  std::atomic<pthread_t> host_{};          // whose thread the block's threads run on; 0: none runs
  History* shared_history_ = nullptr;      // of that one
  std::unordered_map<const void*, Counter> counters_;
  std::map<std::pair<const void*, const void*>, std::pair<Access, Access>> races_;
  std::set<std::string> faults_;
  std::vector<Range> library_;
  Range shared_;
  size_t threads_ = 0;
  uint32_t launch_ = 0;
  uint32_t ended_ = 0;  // launches before this one have ended when blocks of this launch begin
  uint32_t turn_ = 0;
};

Watch the_watch;

}  // namespace
}  // namespace fibres
}  // namespace specdec

// ---- called by the kernels' code: before accesses -----------------------------------------------

#define SPECDEC_CALLED extern "C" __attribute__((visibility("default")))
#define SPECDEC_ACCESS(name, bytes, writes, atomic)                                              \
  SPECDEC_CALLED void __tsan_##name##bytes(void* address) {                                      \
    specdec::fibres::the_watch.use(address, bytes, writes, atomic, __builtin_return_address(0)); \
  }
// In CUDA a volatile access is a relaxed atomic one.
#define SPECDEC_ACCESSES(bytes)                       \
  SPECDEC_ACCESS(read, bytes, false, false)           \
  SPECDEC_ACCESS(write, bytes, true, false)           \
  SPECDEC_ACCESS(unaligned_read, bytes, false, false) \
  SPECDEC_ACCESS(unaligned_write, bytes, true, false) \
  SPECDEC_ACCESS(volatile_read, bytes, false, true)   \
  SPECDEC_ACCESS(volatile_write, bytes, true, true)

SPECDEC_ACCESSES(1)
SPECDEC_ACCESSES(2)
SPECDEC_ACCESSES(4)
SPECDEC_ACCESSES(8)
SPECDEC_ACCESSES(16)

SPECDEC_CALLED void __tsan_read_range(void* address, size_t bytes) {
  specdec::fibres::the_watch.use(address, bytes, false, false, __builtin_return_address(0));
}

SPECDEC_CALLED void __tsan_write_range(void* address, size_t bytes) {
  specdec::fibres::the_watch.use(address, bytes, true, false, __builtin_return_address(0));
}

SPECDEC_CALLED void __tsan_init() {}

// Of the host's code.
SPECDEC_CALLED uint8_t __tsan_atomic8_load(const uint8_t* address, int) {
  return __atomic_load_n(address, __ATOMIC_SEQ_CST);
}

// ---- called by the kernels' code: where something is undefined ----------------------------------

// What the data of every such call begin with.
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};

#define SPECDEC_UNDEFINED(handler, what)                                                           \
  SPECDEC_CALLED void __ubsan_handle_##handler(const SourceLocation* at) {                         \
    specdec::fibres::the_watch.note_fault(what,                                                    \
                                          std::string(at->file) + ":" + std::to_string(at->line)); \
  }

SPECDEC_UNDEFINED(type_mismatch_v1, "null, misaligned or too small: memory that is used")
SPECDEC_UNDEFINED(out_of_bounds, "an index out of bounds")
SPECDEC_UNDEFINED(shift_out_of_bounds, "a shift by too much")
SPECDEC_UNDEFINED(add_overflow, "an addition overflows")
SPECDEC_UNDEFINED(sub_overflow, "a subtraction overflows")
SPECDEC_UNDEFINED(mul_overflow, "a multiplication overflows")
SPECDEC_UNDEFINED(negate_overflow, "a negation overflows")
SPECDEC_UNDEFINED(divrem_overflow, "a division by 0, or that overflows")
SPECDEC_UNDEFINED(pointer_overflow, "a pointer overflows")
SPECDEC_UNDEFINED(load_invalid_value, "a bool or an enum of no valid value")
SPECDEC_UNDEFINED(builtin_unreachable, "what shall never be reached")
SPECDEC_UNDEFINED(missing_return, "no return")
