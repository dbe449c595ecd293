#include "fibres.h"

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
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
  State state = State::kReturned;
  uint32_t mask = 0;  // of the warp meeting it waits for
  Site site{"", "", 0};
  Combine combine = nullptr;
  void* mine = nullptr;
  bool waited = false;  // for the launch before
};

// ---- the blocks that are under way --------------------------------------------------------------

// At most so many.
constexpr size_t kResidents = 3;

// One of so many occasions to let other blocks go on is taken.
constexpr uint32_t kSeldom = 4;

// After so many naps in a launch nobody will come.
constexpr int64_t kMostNaps = 100000;

struct Memory {
  void* begin = nullptr;
  size_t bytes = 0;
};

// What the launches of a call write for each other.
struct Workspace {
  Memory memory;
  std::vector<unsigned char> before;  // what was in it when the last launch began
  bool in_turn = false;               // that launch let the next one begin once it had waited
};

// Bytes in memory that holds nothing useful.
constexpr unsigned char kPoison[] = {0xFF, 0x7F, 0xCD, 0x01};

struct Block {
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<int> runnable;          // in no order
  std::vector<uint32_t> at_warp;      // lanes that wait for others of their warp, warp by warp
  std::vector<unsigned char> shared;  // its shared memory while others run, once it has begun
  int64_t index = 0;
  int64_t meetings = 0;  // of all its threads
  int current = 0;
  int at_block = 0;
  int returned = 0;
  bool under_way = false;
  bool waited = false;  // one of its threads, for the launch before
};

struct Machine {
  std::mutex one_launch_at_a_time;
  std::vector<Block> residents;
  Block* block = nullptr;      // the one that runs
  std::vector<void*> brought;  // to the meeting that is about to be held
  Place caller;
  Memory shared;  // all shared variables of this library: its thread-local storage, nothing else
  std::map<std::thread::id, Workspace> workspaces;  // of host threads
  Memory workspace;                                 // of this launch's
  std::vector<unsigned char> early;   // what is seen there before the launch before has ended
  std::vector<unsigned char> hidden;  // what is in it while that is seen
  int threads = 0;
  int64_t left = 0;  // blocks that have not begun
  int64_t naps = 0;
  bool napped = false;     // the block that ran last
  bool suspended = false;  // the block that runs lets others go on
  const Launch* launch = nullptr;
  Observer observer = nullptr;
  int64_t multiprocessors = 8;
  void (*thread)(const void*) = nullptr;
  const void* context = nullptr;
  int lost = -1;
  std::string left_out;
  std::string error;
  uint64_t random = 1;
  int64_t launches = 0;
  int64_t waits = 0;             // threads that have waited for the launch before
  bool in_turn = true;           // none has let the next one begin before that
  std::set<const void*> loaded;  // kernels
};

Machine the_machine;
Watcher nobody;
Watcher* the_watcher = &nobody;

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
  Block* block = m->block;
  Place* from = &block->fibres[block->current]->place;
  const auto n = static_cast<uint32_t>(block->runnable.size());
  if (n == 0 || m->suspended || !m->error.empty()) return change(from, &m->caller);
  const uint32_t pick = random_below(m, n);
  const int next = block->runnable[pick];
  block->runnable[pick] = block->runnable[n - 1];
  block->runnable.pop_back();
  if (next == block->current) return;
  block->current = next;
  threadIdx.x = static_cast<unsigned>(next);
  change(from, &block->fibres[next]->place);
}

// A fibre's life: a thread of a block, and when all have returned, one of the next block.
void live() {
  Machine& m = the_machine;
  Block* const block = m.block;
  const int self = block->current;
  change(&block->fibres[self]->place, &m.caller);
  for (;;) {
    try {
      if (self != m.lost) m.thread(m.context);
    } catch (const std::exception& e) {
      m.error = e.what();
    }
    block->fibres[self]->state = State::kReturned;
    ++block->returned;
    run_another(&m);
  }
}

void start(Machine* m, Block* block, int index) {
  Fibre& fibre = *block->fibres[index];
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack.bottom();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, live, 0);
  m->block = block;
  block->current = index;
  change(&m->caller, &context);
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

bool is_left_out(const Machine& m, const Site& site) {
  if (m.left_out.empty()) return false;
  const std::string path = site.file;
  return m.left_out == path.substr(path.rfind('/') + 1) + ":" + std::to_string(site.line);
}

void wait(Machine* m, State state, Site site, Combine combine, void* mine, uint32_t mask) {
  Fibre& fibre = *m->block->fibres[m->block->current];
  fibre.state = state;
  fibre.site = site;
  fibre.combine = combine;
  fibre.mine = mine;
  fibre.mask = mask;
}

void release(Block* block, int index) {
  block->fibres[index]->state = State::kRunnable;
  block->runnable.push_back(index);
}

size_t slot_of(const Machine& m, const Block& block) {
  return static_cast<size_t>(&block - m.residents.data());
}

// On the threads' own stacks.
void exchange(Machine* m, Combine combine, int n) {
  if (combine == nullptr) return;
  the_watcher->leave();
  combine(m->brought.data(), n);
  the_watcher->enter(slot_of(*m, *m->block));
}

void hold_block_meeting(Machine* m, Combine combine) {
  Block* block = m->block;
  const Fibre& last = *block->fibres[block->current];
  for (int i = 0; i < m->threads; ++i) {
    check_same_place(*block->fibres[i], last);
    m->brought[i] = block->fibres[i]->mine;
  }
  exchange(m, combine, m->threads);
  if (!is_left_out(*m, last.site)) the_watcher->order_all();
  ++block->meetings;
  block->at_block = 0;
  for (int i = 0; i < m->threads; ++i) release(block, i);
}

void hold_warp_meeting(Machine* m, int first, uint32_t mask, Combine combine) {
  Block* block = m->block;
  const Fibre& last = *block->fibres[block->current];
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    m->brought[lane] = nullptr;
    if ((mask >> lane & 1) == 0) continue;
    const Fibre& fibre = *block->fibres[first + lane];
    check_same_place(fibre, last);
    if (fibre.mask != mask) fail("lanes that should meet gave different masks");
    m->brought[lane] = fibre.mine;
  }
  exchange(m, combine, kWarpLanes);
  // A shuffle or a vote orders nothing in memory.
  if (combine == nullptr && !is_left_out(*m, last.site)) the_watcher->order(first, mask);
  block->at_warp[first / kWarpLanes] &= ~mask;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if ((mask >> lane & 1) != 0) release(block, first + lane);
  }
}

// ---- blocks -------------------------------------------------------------------------------------

void tell(const Machine& m, Moment moment, int64_t block = -1, int64_t meetings = 0) {
  if (m.observer != nullptr) m.observer(m.launch, moment, block, meetings);
}

// "31 threads wait: __syncthreads at draw.cuh:57; 1 returned" once nobody can go on.
std::string describe_deadlock(const Block& block) {
  std::ostringstream out;
  out << "threads wait for others that never come: ";
  const int threads = static_cast<int>(block.fibres.size());
  std::vector<bool> told(threads, false);
  for (int i = 0; i < threads; ++i) {
    const Fibre& first = *block.fibres[i];
    if (told[i] || first.state == State::kReturned) continue;
    int count = 0;
    for (int j = i; j < threads; ++j) {
      if (block.fibres[j]->state != first.state || !same_place(first, *block.fibres[j])) continue;
      told[j] = true;
      ++count;
    }
    out << count << " in " << describe(first.site) << "; ";
  }
  out << block.returned << " returned";
  return out.str();
}

thread_local char shared_anchor;

int find_shared_memory(dl_phdr_info* library, size_t, void* result) {
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    if (library->dlpi_phdr[i].p_type != PT_TLS || library->dlpi_tls_data == nullptr) continue;
    const auto begin = reinterpret_cast<uintptr_t>(library->dlpi_tls_data);
    const auto anchor = reinterpret_cast<uintptr_t>(&shared_anchor);
    const size_t bytes = library->dlpi_phdr[i].p_memsz;
    if (anchor < begin || anchor >= begin + bytes) continue;
    *static_cast<Memory*>(result) = {library->dlpi_tls_data, bytes};
    return 1;
  }
  return 0;
}

Memory shared_memory() {
  shared_anchor = 0;  // the storage exists from the first access on
  Memory found;
  dl_iterate_phdr(find_shared_memory, &found);
  if (found.begin == nullptr) throw std::runtime_error("the library's shared memory is not found");
  return found;
}

void begin(Machine* m, Block* block, int64_t index) {
  block->shared.clear();
  block->index = index;
  block->runnable.clear();
  block->at_warp.assign((m->threads + kWarpLanes - 1) / kWarpLanes, 0);
  block->at_block = block->returned = 0;
  block->meetings = 0;
  for (int i = 0; i < m->threads; ++i) {
    block->fibres[static_cast<size_t>(i)]->waited = false;
    release(block, i);
  }
  block->under_way = true;
  block->waited = false;
  the_watcher->begin_block(slot_of(*m, *block), index);
  tell(*m, Moment::kBlockBegins, index);
}

// What a launch sees of its workspace until it waits: what the launches before the last one have
// left if that one let it begin only once they had ended; else, and where the last one has changed
// anything, nothing useful.
void look_early(Machine* m, const Workspace& workspace) {
  const auto* memory = static_cast<const unsigned char*>(workspace.memory.begin);
  const unsigned char poison = kPoison[random_below(m, sizeof kPoison)];
  const bool known = workspace.in_turn && workspace.before.size() == workspace.memory.bytes;
  m->early.assign(workspace.memory.bytes, poison);
  for (size_t i = 0; known && i < workspace.memory.bytes; ++i) {
    if (workspace.before[i] == memory[i]) m->early[i] = memory[i];
  }
}

void hide_workspace(Machine* m) {
  auto* memory = static_cast<unsigned char*>(m->workspace.begin);
  m->hidden.assign(memory, memory + m->workspace.bytes);
  memcpy(memory, m->early.data(), m->early.size());
}

void show_workspace(Machine* m) {
  if (m->hidden.empty()) return;
  memcpy(m->workspace.begin, m->hidden.data(), m->hidden.size());
  m->hidden.clear();
}

// Runs a block until it ends or lets others go on. At its beginning shared memory holds nothing
// useful.
void run_block(Machine* m, Block* block) {
  const Memory& shared = m->shared;
  if (block->shared.empty()) {
    memset(shared.begin, kPoison[random_below(m, sizeof kPoison)], shared.bytes);
  } else {
    memcpy(shared.begin, block->shared.data(), shared.bytes);
  }
  blockIdx.x = static_cast<unsigned>(block->index);
  const uint32_t pick = random_below(m, static_cast<uint32_t>(block->runnable.size()));
  m->block = block;
  m->suspended = false;
  block->current = block->runnable[pick];
  block->runnable[pick] = block->runnable.back();
  block->runnable.pop_back();
  threadIdx.x = static_cast<unsigned>(block->current);
  const bool waits = m->launch->chained && !block->waited && m->workspace.bytes > 0;
  if (waits) hide_workspace(m);
  the_watcher->enter(slot_of(*m, *block));
  change(&m->caller, &block->fibres[block->current]->place);
  the_watcher->leave();
  show_workspace(m);
  if (!m->error.empty()) return;
  if (m->suspended) {
    const auto* memory = static_cast<const unsigned char*>(shared.begin);
    block->shared.assign(memory, memory + shared.bytes);
    return;
  }
  block->under_way = false;
  if (block->returned < m->threads) m->error = describe_deadlock(*block);
  tell(*m, Moment::kBlockEnded, block->index, block->meetings);
}

// Threads that will never go on leave their stacks as they are: kernels own nothing.
[[noreturn]] void give_up(Machine* m, const char* kernel) {
  m->lost = -1;
  const std::string error =
      std::string(kernel) + ", block " + std::to_string(m->block->index) + ": " + m->error;
  m->error.clear();
  m->residents.clear();
  throw std::runtime_error(error);
}

void prepare(Machine* m, int64_t blocks, int threads) {
  m->threads = threads;
  m->brought.resize(threads > kWarpLanes ? threads : kWarpLanes);
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  m->shared = shared_memory();
  m->left = blocks;
  m->naps = 0;
  m->waits = 0;
  m->suspended = false;
  m->residents.resize(kResidents);
  for (Block& block : m->residents) {
    while (static_cast<int>(block.fibres.size()) < threads) {
      block.fibres.push_back(std::make_unique<Fibre>());
      start(m, &block, static_cast<int>(block.fibres.size()) - 1);
    }
  }
}

// Some block that is under way, or one that can begin; null if all have ended.
Block* choose_block(Machine* m) {
  Block* candidates[kResidents];
  uint32_t n = 0;
  bool may_begin = m->left > 0;
  for (Block& block : m->residents) {
    if (!block.under_way && !may_begin) continue;
    may_begin = may_begin && block.under_way;
    candidates[n++] = &block;
  }
  if (n == 0) return nullptr;
  const bool in_order = m->observer != nullptr && !m->napped;
  m->napped = false;
  return candidates[in_order ? 0 : random_below(m, n)];
}

// A stride that visits every block once.
int64_t random_stride(Machine* m, int64_t blocks) {
  int64_t stride = 1 + random_below(m, static_cast<uint32_t>(blocks));
  while (std::gcd(stride, blocks) != 1) ++stride;
  return stride;
}

// The block that runs lets others go on.
void suspend(Machine* m) {
  m->suspended = true;
  release(m->block, m->block->current);
  run_another(m);
}

}  // namespace

void fail(const char* what) { throw std::runtime_error(what); }

void meet_block(Site site, Combine combine, void* mine) {
  Machine& m = the_machine;
  wait(&m, State::kAtBlock, site, combine, mine, 0);
  if (++m.block->at_block == m.threads) hold_block_meeting(&m, combine);
  run_another(&m);
}

void meet_warp(uint32_t mask, Site site, Combine combine, void* mine) {
  Machine& m = the_machine;
  const int lane = m.block->current % kWarpLanes;
  const int first = m.block->current - lane;
  if ((mask >> lane & 1) == 0) fail("a lane is not in the mask that it gives");
  wait(&m, State::kAtWarp, site, combine, mine, mask);
  uint32_t& waiting = m.block->at_warp[first / kWarpLanes];
  waiting |= uint32_t{1} << lane;
  if ((waiting & mask) == mask) hold_warp_meeting(&m, first, mask, combine);
  run_another(&m);
}

void meet_other_blocks(const void* address) {
  Machine& m = the_machine;
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto shared = reinterpret_cast<uintptr_t>(m.shared.begin);
  if (at >= shared && at < shared + m.shared.bytes) return;
  if (m.observer == nullptr && random_below(&m, kSeldom) == 0) suspend(&m);
}

void wait_for_other_blocks() {
  if (++the_machine.naps > kMostNaps) fail("blocks wait for each other in vain");
  the_machine.napped = true;
  suspend(&the_machine);
}

void note_atomic(const void* address, int64_t bytes, const void* place) {
  the_watcher->use_atomically(address, bytes, place);
}

void note_counter(const void* counter, int64_t bytes, bool releases, bool acquires,
                  const void* place) {
  the_watcher->use_counter(counter, bytes, releases, acquires, place);
}

void run_grid(const Launch& launch, void (*thread)(const void*), const void* context) {
  Machine& m = the_machine;
  const std::lock_guard<std::mutex> lock(m.one_launch_at_a_time);
  const int64_t blocks = launch.blocks;
  ++m.launches;
  m.launch = &launch;
  const auto known = m.workspaces.find(std::this_thread::get_id());
  Workspace* workspace = known != m.workspaces.end() ? &known->second : nullptr;
  m.workspace = workspace != nullptr ? workspace->memory : Memory{};
  if (workspace != nullptr) {
    if (launch.chained) look_early(&m, *workspace);
    const auto* memory = static_cast<const unsigned char*>(workspace->memory.begin);
    workspace->before.assign(memory, memory + workspace->memory.bytes);
  }
  m.in_turn = true;
  m.thread = thread;
  m.context = context;
  prepare(&m, blocks, static_cast<int>(launch.threads));
  const bool in_turn = workspace != nullptr && workspace->in_turn;
  the_watcher->begin_launch(launch, in_turn, m.shared.begin, m.shared.bytes);
  tell(m, Moment::kLaunchBegins);
  const bool in_order = m.observer != nullptr;
  const int64_t stride = in_order ? 1 : random_stride(&m, blocks);
  int64_t next = in_order ? 0 : random_below(&m, static_cast<uint32_t>(blocks));
  while (Block* block = choose_block(&m)) {
    if (!block->under_way) {
      begin(&m, block, next);
      next = (next + stride) % blocks;
      --m.left;
    }
    run_block(&m, block);
    if (!m.error.empty()) give_up(&m, launch.name);
  }
  m.lost = -1;
  if (workspace != nullptr) workspace->in_turn = m.in_turn;
  tell(m, Moment::kLaunchEnded);
  const std::string found = the_watcher->end_launch();
  if (!found.empty()) throw std::runtime_error(std::string(launch.name) + ": " + found);
  if (launch.chained && m.waits != blocks * launch.threads) {
    throw std::runtime_error(std::string(launch.name) + ": " + std::to_string(m.waits) + " of " +
                             std::to_string(blocks * launch.threads) +
                             " threads waited for the launch before");
  }
}

void set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.random = seed * 0x9E3779B97F4A7C15u | 1;  // never 0
}

void lose_thread(int thread) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.lost = thread;
}

void leave_out(const std::string& place) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.left_out = place;
}

void load(const void* kernel) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.loaded.insert(kernel);
}

void expect_loaded(const char* name, const void* kernel) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  const std::set<const void*>& loaded = the_machine.loaded;
  if (!loaded.empty() && loaded.count(kernel) == 0) {
    throw std::runtime_error(std::string(name) + " is launched, but was not loaded");
  }
}

void note_wait() {
  Machine& m = the_machine;
  Fibre& fibre = *m.block->fibres[static_cast<size_t>(m.block->current)];
  if (!fibre.waited) ++m.waits;
  fibre.waited = true;
  m.block->waited = true;
  the_watcher->wait_for_launch_before();
  show_workspace(&m);
}

void note_let_begin() {
  Machine& m = the_machine;
  const Fibre& fibre = *m.block->fibres[static_cast<size_t>(m.block->current)];
  if (m.launch->chained && !fibre.waited) m.in_turn = false;
}

void set_workspace(void* begin, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  if (begin != nullptr) {
    const Memory memory{begin, static_cast<size_t>(bytes)};
    the_machine.workspaces[std::this_thread::get_id()] = {memory, {}, false};
  } else {
    the_machine.workspaces.erase(std::this_thread::get_id());
  }
}

void unload() {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.loaded.clear();
}

void set_observer(Observer observer) {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  the_machine.observer = observer;
}

void set_watcher(Watcher* watcher) { the_watcher = watcher; }

StackRange stack_of_thread() {
  const Block& block = *the_machine.block;
  const Stack& stack = block.fibres[static_cast<size_t>(block.current)]->stack;
  return {reinterpret_cast<uintptr_t>(stack.bottom()), kStackBytes};
}

void set_multiprocessors(int64_t count) { the_machine.multiprocessors = count; }

int64_t multiprocessors() { return the_machine.multiprocessors; }

int64_t num_launches() {
  const std::lock_guard<std::mutex> lock(the_machine.one_launch_at_a_time);
  return the_machine.launches;
}

}  // namespace fibres
}  // namespace specdec
