// Runs CUDA kernels on the host: a test harness for machines without a GPU, never a backend.
//
// Every CUDA thread is a fibre with a stack of its own. The threads of a block take turns on one
// processor, each until it has to wait for others, and whose turn it is next is random, too. So a
// missing barrier gives a wrong result under some seed, and a barrier that not all threads reach is
// an error that says where they wait. Blocks begin in a random order, and a few are under way at a
// time: each goes on until it naps or, now and then, until it comes to a memory fence or past an
// atomic operation. So blocks that work for each other meet halfway in many ways. What cannot be
// seen: a missing memory fence, since all threads share one processor's view of memory.
#pragma once

#include <cstdint>

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

// Ends the launch with an error.
[[noreturn]] void fail(const char* what);

// Runs thread(context) for every thread of every block. Throws std::runtime_error, with the
// kernel's name, for whatever went wrong in it; `chained`: also if not all threads have waited for
// the launch before.
void run_grid(const char* kernel, int64_t blocks, int threads, void (*thread)(const void*),
              const void* context, bool chained);

// A library that loads kernels loads all that it launches.
void load(const void* kernel);
void expect_loaded(const char* name, const void* kernel);
void unload();

// The thread waits for the launch before.
void note_wait();

// The order of blocks and threads from here on.
void set_seed(uint64_t seed);

// In the next launch this thread of every block returns at once: others wait for it in vain.
void lose_thread(int thread);

// Launches so far.
int64_t num_launches();

}  // namespace fibres
}  // namespace specdec
