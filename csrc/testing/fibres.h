// Runs CUDA kernels on the host: a test harness for machines without a GPU, never a backend.
//
// Every CUDA thread is a fibre with a stack of its own. The threads of a block take turns on one
// processor, each until it has to wait for others, and whose turn it is next is random, too. So a
// missing barrier gives a wrong result under some seed, and a barrier that not all threads reach is
// an error that says where they wait. Blocks begin in a random order, and a few are under way at a
// time: each goes on until it naps or, now and then, until it comes to a memory fence or past an
// atomic operation. So blocks that work for each other meet halfway in many ways. A missing memory
// fence gives no wrong result, since all threads share one processor's view of memory: watch.cpp
// finds those, and missing barriers under any seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace specdec {
namespace fibres {

// Where threads meet: for messages, and because all that meet must be at the same place.
struct Site {
  const char* what;
  const char* file;
  int line;
};

// As a default argument: the place of the call.
constexpr Site here(const char* what, const char* file = __builtin_FILE(),
                    int line = __builtin_LINE()) {
  return {what, file, line};
}

// What the last thread to arrive does for all: `brought` has what each thread brought, in thread
// (lane) order, null for lanes that do not take part.
using Combine = void (*)(void** brought, int n);

// Waits for all threads of the block.
void meet_block(Site site, Combine combine, void* mine);

// Waits for the lanes of the caller's warp that are in `mask`.
void meet_warp(uint32_t mask, Site site, Combine combine, void* mine);

// Lets other blocks go on now and then: before a fence (null), or after an atomic operation on what
// is not the block's own.
void meet_other_blocks(const void* address);

// Lets other blocks go on; an error if that has been in vain too often.
void wait_for_other_blocks();

// An atomic operation on so many bytes, and where in the code.
void note_atomic(const void* address, int64_t bytes, const void* place);

// The same on a counter in global memory. If it releases, whoever acquires from that counter later
// sees what the thread has written or seen written.
void note_counter(const void* counter, int64_t bytes, bool releases, bool acquires,
                  const void* place);

// Ends the launch with an error.
[[noreturn]] void fail(const char* what);

// A kernel's parameter, as it lies in memory.
struct Parameter {
  const void* data;
  int64_t bytes;
};

struct Launch {
  const char* name;      // for messages
  const void* function;  // of the host: its symbol tells which instance of a template it is
  int64_t blocks;
  int64_t threads;  // of a block
  const Parameter* parameters;
  int64_t num_parameters;
  bool chained;  // all its threads wait for the launch before
};

// Runs thread(context) for every thread of every block. Throws std::runtime_error, with the
// kernel's name, for whatever went wrong in it.
void run_grid(const Launch& launch, void (*thread)(const void*), const void* context);

// Runs kernel(params...).
template <typename... Params>
void run_kernel(const char* name, void (*kernel)(Params...), int64_t blocks, int threads,
                bool chained, const Params&... params) {
  const Parameter parameters[] = {{&params, static_cast<int64_t>(sizeof(Params))}...,
                                  {nullptr, 0}};  // no array without elements
  const Launch launch{
      name,   reinterpret_cast<const void*>(kernel), blocks, threads, parameters, sizeof...(Params),
      chained};
  const auto thread = [&] { kernel(params...); };
  using Thread = decltype(thread);
  run_grid(launch, [](const void* t) { (*static_cast<Thread*>(t))(); }, &thread);
}

// A library that loads kernels loads all that it launches.
void load(const void* kernel);
void expect_loaded(const char* name, const void* kernel);
void unload();

// The thread waits for the launch before.
void note_wait();

// The thread lets the next launch begin.
void note_let_begin();

// The memory that the launches of this host thread's call write for each other, from here on; null
// for none. Until some thread of a block has waited for the launch before, that may still be under
// way on a device: the block sees nothing useful there, but for what launches before that one have
// left if all threads of that one let it begin after they had waited. What it writes is lost.
void set_workspace(void* begin, int64_t bytes);

// ---- watching launches --------------------------------------------------------------------------

// When an observer is called. Between, it may read all memory that kernels read.
enum class Moment : int32_t { kLaunchBegins, kBlockBegins, kBlockEnded, kLaunchEnded };

// `block` is -1 where the moment is not about one; `meetings` counts the meetings of all threads of
// the block that has ended.
using Observer = void (*)(const Launch* launch, Moment moment, int64_t block, int64_t meetings);

// From here on, null for none. Under an observer blocks run in their order, one after another, but
// that a block which naps lets the next one begin: so what memory holds when a block begins is what
// a launch of that block alone would see.
void set_observer(Observer observer);

// ---- watching memory ----------------------------------------------------------------------------

// Is told what orders the threads' accesses to memory; this one takes no notice. Blocks that are
// under way have a slot each, from 0 on; the thread is that of threadIdx.
class Watcher {
 public:
  // `in_turn`: the launch before let this one begin only once its own threads had waited.
  virtual void begin_launch(const Launch& /*launch*/, bool /*in_turn*/, const void* /*shared*/,
                            size_t /*shared_bytes*/) {}
  // What is wrong with it, if anything is.
  virtual std::string end_launch() { return {}; }
  virtual void begin_block(size_t /*slot*/, int64_t /*index*/) {}
  // Threads of that block run from here on; no thread of any.
  virtual void enter(size_t /*slot*/) {}
  virtual void leave() {}
  // These threads of the block that runs, first + i for each bit i of a mask, or all, have met
  // where memory is ordered.
  virtual void order(int /*first*/, uint32_t /*mask*/) {}
  virtual void order_all() {}
  virtual void wait_for_launch_before() {}
  // note_atomic and note_counter.
  virtual void use_atomically(const void* /*address*/, int64_t /*bytes*/, const void* /*place*/) {}
  virtual void use_counter(const void* /*counter*/, int64_t /*bytes*/, bool /*releases*/,
                           bool /*acquires*/, const void* /*place*/) {}
};

// From here on.
void set_watcher(Watcher* watcher);

// The lowest address of the stack of the thread that runs, and its bytes.
struct StackRange {
  uintptr_t begin;
  size_t bytes;
};
StackRange stack_of_thread();

// What kernels are told about the device: few multiprocessors, so that blocks take more than one
// tile, unless somebody says otherwise.
void set_multiprocessors(int64_t count);
int64_t multiprocessors();

// The order of blocks and threads from here on.
void set_seed(uint64_t seed);

// In the next launch this thread of every block returns at once: others wait for it in vain.
void lose_thread(int thread);

// From here on threads that meet there, "draw.cuh:57", still meet, but for a watcher nothing is
// ordered by it, as if the barrier were missing.
void leave_out(const std::string& place);

// Launches so far.
int64_t num_launches();

}  // namespace fibres
}  // namespace specdec
