// Kernels with known results, and kernels with known mistakes: what the stand-in does with them is
// tested by python_tests/backends/test_cuda_stand_in.py, through ctypes.
#include "../cuda/tile.cuh"
#include "for_ctypes.h"

namespace specdec {
namespace cuda {
namespace {

// ---- right --------------------------------------------------------------------------------------

// Reverses each block's kThreads numbers, the given number of times, through shared memory.
__global__ void reverse(const int64_t* in, int64_t* out, int times) {
  __shared__ int64_t numbers[kThreads];
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  int64_t number = in[place];
  for (int i = 0; i < times; ++i) {
    numbers[threadIdx.x] = number;
    __syncthreads();
    number = numbers[kThreads - 1 - threadIdx.x];
    __syncthreads();
  }
  out[place] = number;
}

// One row of results for each thread: what the collectives make of the thread's number.
__global__ void collect(const int64_t* in, int64_t* out) {
  const int64_t number = in[threadIdx.x];
  uint64_t total;
  int64_t* row = out + 12 * threadIdx.x;
  row[0] = block_sum(number);
  row[1] = block_max(number);
  row[2] = block_min(number);
  row[3] = static_cast<int64_t>(block_exclusive_sum(static_cast<uint64_t>(number), &total));
  row[4] = static_cast<int64_t>(total);
  row[5] = warp_sum(number);
  row[6] = warp_max(number);
  row[7] = warp_min(number);
  row[8] = block_all(number > 0);
  row[9] = block_any(number > 100);
  row[10] = static_cast<int64_t>(block_sum(static_cast<double>(number) * 0.5));
  row[11] = static_cast<int64_t>(block_sum(static_cast<float>(number) * 0.5f));
}

__global__ void shuffle(const int64_t* in, int64_t* out) {
  const int64_t number = in[threadIdx.x];
  const int lane = threadIdx.x % kWarp;
  int64_t* row = out + 10 * threadIdx.x;
  row[0] = __shfl_sync(kAllLanes, number, (lane + 5) % kWarp);
  row[1] = __shfl_up_sync(kAllLanes, number, 3);
  row[2] = __shfl_down_sync(kAllLanes, number, 3);
  row[3] = __shfl_xor_sync(kAllLanes, number, 9);
  row[4] = __shfl_down_sync(kAllLanes, number, 3, 8);
  row[5] = __ballot_sync(kAllLanes, number % 3 == 0);
  row[6] = __any_sync(kAllLanes, number == in[7]);
  row[7] = __all_sync(kAllLanes, number > 0);
  // Two halves of a warp on ways of their own, one with more exchanges than the other.
  int64_t sum = number;
  if (lane < 16) {
    for (int i = 8; i > 0; i /= 2) sum += __shfl_xor_sync(0x0000FFFFu, sum, i);
  } else {
    sum = __shfl_sync(0xFFFF0000u, sum, 16);
  }
  row[8] = sum;
  __syncwarp();
  row[9] = __shfl_sync(kAllLanes, sum, 0) + __syncthreads_or(lane == 3) + __syncthreads_and(1);
}

// Adds each thread's number to one of four cells, which start next to a carry.
__global__ void add(const uint64_t* in, uint64_t* out) {
  __shared__ uint64_t cells[4];
  if (threadIdx.x < 4) cells[threadIdx.x] = 0xFFFFFFFFu - threadIdx.x;
  __syncthreads();
  shared_add(&cells[threadIdx.x % 4], in[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x < 4) out[threadIdx.x] = cells[threadIdx.x];
}

// Each thread's place in an array with so many columns.
__global__ void find_place_in(const int64_t* in, int64_t* out, Divisor columns) {
  const Place2d place = place_in(in[threadIdx.x], columns);
  out[2 * threadIdx.x] = place.row;
  out[2 * threadIdx.x + 1] = place.column;
}

// Each block leaves a partial result; the last one to arrive adds them up.
__global__ void last_block(uint64_t* partial, unsigned* arrived, uint64_t* out) {
  const uint64_t sum = block_sum(static_cast<uint64_t>(blockIdx.x) * threadIdx.x);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
  __threadfence();
  __syncthreads();
  const bool last = block_any(threadIdx.x == 0 && atomicAdd(arrived, 1u) == gridDim.x - 1);
  if (!last) return;
  uint64_t total = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) total += partial[b];
  total = block_sum(total);
  if (threadIdx.x == 0) out[0] += total;
}

// Blocks 0 and 1 add a round each in turn, and write down whose turn it was.
__global__ void take_turns(unsigned* turn, int64_t* who, int rounds) {
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x == 0) {
      const volatile unsigned* shown = turn;
      while (*shown % gridDim.x != blockIdx.x) __nanosleep(100);
      who[*shown] = blockIdx.x;
      __threadfence();
      atomicAdd(turn, 1u);
    }
    __syncthreads();
  }
}

__global__ void order(int64_t* blocks, int64_t* threads, int* count) {
  if (blockIdx.x == 0) threads[atomicAdd(count, 1)] = threadIdx.x;
  if (threadIdx.x == 0) blocks[atomicAdd(count + 1, 1)] = blockIdx.x;
}

// ---- wrong --------------------------------------------------------------------------------------

__global__ void reverse_without_barrier(const int64_t* in, int64_t* out) {
  __shared__ int64_t numbers[kThreads];
  numbers[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = numbers[kThreads - 1 - threadIdx.x];
}

// The first read is behind a barrier, the second write is not.
__global__ void reverse_twice_with_one_barrier(const int64_t* in, int64_t* out) {
  __shared__ int64_t numbers[kThreads];
  int64_t number = in[threadIdx.x];
  for (int i = 0; i < 2; ++i) {
    numbers[threadIdx.x] = number;
    __syncthreads();
    number = numbers[kThreads - 1 - threadIdx.x];
  }
  out[threadIdx.x] = number;
}

__global__ void count_blocks_in_shared_memory(int64_t* out) {
  __shared__ int64_t count;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) count = 0;
    out[0] = ++count;
  }
}

// Blocks overwrite what others counted meanwhile.
__global__ void count_without_atomics(int64_t* count) {
  if (threadIdx.x != 0) return;
  const int64_t before = *count;
  __threadfence();
  *count = before + 1;
}

__global__ void wait_for_nobody() {
  if (threadIdx.x != 0) return;
  for (;;) __nanosleep(100);
}

__global__ void barrier_not_for_all() {
  if (threadIdx.x != 5) __syncthreads();
}

__global__ void different_barriers() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void different_types() {
  if (threadIdx.x % 2 == 0) {
    block_sum(1);
  } else {
    block_sum(1.0);
  }
}

__global__ void exchange_not_for_all() {
  if (threadIdx.x % kWarp != 31) __shfl_down_sync(kAllLanes, 1, 1);
}

__global__ void exchange_with_strangers() {
  if (threadIdx.x % kWarp < 16) __shfl_sync(0x0000FFFFu, 1, 20);
}

__global__ void exchange_outside_mask() { __shfl_sync(0x0000FFFFu, 1, 0); }

__global__ void different_masks() {
  if (threadIdx.x % kWarp == 0) {
    __syncwarp(0x00000003u);
  } else if (threadIdx.x % kWarp == 1) {
    __syncwarp(0x00000007u);
  }
}

struct Mistake {
  const char* name;
  void (*kernel)();
};

constexpr Mistake kMistakes[] = {
    {"barrier_not_for_all", barrier_not_for_all},
    {"different_barriers", different_barriers},
    {"different_types", different_types},
    {"exchange_not_for_all", exchange_not_for_all},
    {"exchange_with_strangers", exchange_with_strangers},
    {"exchange_outside_mask", exchange_outside_mask},
    {"different_masks", different_masks},
    {"wait_for_nobody", wait_for_nobody},
};

// Waits for the launch before in the threads of the block below kThreads * percent / 100, all
// twice.
__global__ void wait_in_share(int percent) {
  if (static_cast<int>(threadIdx.x) * 100 >= kThreads * percent) return;
  wait_for_launch_before();
  wait_for_launch_before();
}

// Each block takes the number that a launch before has left, before its threads wait or after that,
// and leaves one of its own that early.
__global__ void read_what_was_left(int* left, int* taken, bool waits_first) {
  if (waits_first) wait_for_launch_before();
  const int found = *left;
  __syncthreads();
  if (threadIdx.x == 0) taken[blockIdx.x] = found;
  if (threadIdx.x == 0 && !waits_first) *left = -1;
  __syncthreads();
  wait_for_launch_before();
}

__global__ void leave_a_number(int* left) { *left = 5; }

// A launch between those two.
__global__ void come_between(int* other, bool in_turn) {
  if (in_turn) {
    begin_in_turn();
  } else {
    begin_kernel();
  }
  *other = 7;
}

const Gpu kGpu{{8, false}, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace cuda
}  // namespace specdec

// ---- for ctypes ---------------------------------------------------------------------------------

using namespace specdec;
using namespace specdec::cuda;
using fibres::say_error;

SPECDEC_TEST void test_seed(uint64_t seed) { fibres::set_seed(seed); }

SPECDEC_TEST int test_threads() { return kThreads; }

SPECDEC_TEST void test_reverse(const int64_t* in, int64_t* out, int64_t blocks, int times) {
  launch(kGpu, "reverse", reverse, blocks, in, out, times);
}

SPECDEC_TEST void test_collect(const int64_t* in, int64_t* out) {
  launch(kGpu, "collect", collect, 1, in, out);
}

SPECDEC_TEST void test_shuffle(const int64_t* in, int64_t* out) {
  launch(kGpu, "shuffle", shuffle, 1, in, out);
}

SPECDEC_TEST void test_add(const uint64_t* in, uint64_t* out) {
  launch(kGpu, "add", add, 1, in, out);
}

SPECDEC_TEST void test_place_in(const int64_t* in, int64_t* out, int64_t columns) {
  launch(kGpu, "find_place_in", find_place_in, 1, in, out, columns);
}

SPECDEC_TEST void test_last_block(uint64_t* partial, unsigned* arrived, uint64_t* out,
                                  int64_t blocks) {
  launch(kGpu, "last_block", last_block, blocks, partial, arrived, out);
}

SPECDEC_TEST void test_take_turns(unsigned* turn, int64_t* who, int rounds) {
  launch(kGpu, "take_turns", take_turns, 2, turn, who, rounds);
}

SPECDEC_TEST void test_count_without_atomics(int64_t* count, int64_t blocks) {
  launch(kGpu, "count_without_atomics", count_without_atomics, blocks, count);
}

SPECDEC_TEST void test_order(int64_t* blocks, int64_t* threads, int* count, int64_t n) {
  launch(kGpu, "order", order, n, blocks, threads, count);
}

SPECDEC_TEST void test_reverse_without_barrier(const int64_t* in, int64_t* out) {
  launch(kGpu, "reverse_without_barrier", reverse_without_barrier, 1, in, out);
}

SPECDEC_TEST void test_reverse_twice_with_one_barrier(const int64_t* in, int64_t* out) {
  launch(kGpu, "reverse_twice_with_one_barrier", reverse_twice_with_one_barrier, 1, in, out);
}

SPECDEC_TEST void test_count_blocks_in_shared_memory(int64_t* out, int64_t blocks) {
  launch(kGpu, "count_blocks_in_shared_memory", count_blocks_in_shared_memory, blocks, out);
}

// What a chain of two launches says, of which the second one waits in this share of its threads, in
// percent.
SPECDEC_TEST void test_chain(int share, char* message, int64_t size) {
  const Gpu gpu{{8, true}, nullptr, nullptr, nullptr};
  say_error(message, size, [&] {
    launch(gpu, "first", wait_in_share, 2, 0);  // it has nobody to wait for
    launch(gpu, "second", wait_in_share, 2, share);
  });
}

// Two launches, of which the second one's two blocks read what the first one has written.
SPECDEC_TEST void test_early(int waits_first, int* left, int* taken) {
  const Gpu gpu{{8, true}, nullptr, nullptr, nullptr};
  fibres::set_workspace(left, sizeof *left);
  launch(gpu, "first", leave_a_number, 1, left);
  launch(gpu, "second", read_what_was_left, 2, left, taken, waits_first != 0);
  fibres::set_workspace(nullptr, 0);
}

// The same with a launch between them, which writes another number. Three launches: the third one
// reads `left`, or `left + 1`, which the second one writes.
SPECDEC_TEST void test_early_of_third(int in_turn, int of_second, int* left, int* taken) {
  const Gpu gpu{{8, true}, nullptr, nullptr, nullptr};
  fibres::set_workspace(left, 2 * sizeof *left);
  launch(gpu, "first", leave_a_number, 1, left);
  launch(gpu, "second", come_between, 1, left + 1, in_turn != 0);
  launch(gpu, "third", read_what_was_left, 2, left + (of_second != 0 ? 1 : 0), taken, false);
  fibres::set_workspace(nullptr, 0);
}

// What the launch of a kernel says where others were loaded, and it was not.
SPECDEC_TEST void test_not_loaded(char* message, int64_t size) {
  Loading{}(wait_in_share);
  say_error(message, size, [] {
    launch(kGpu, "loaded", wait_in_share, 1, 0);
    launch(kGpu, "not_loaded", wait_for_nobody, 1);
  });
  fibres::unload();
}

// Name of a mistake, null after the last one.
SPECDEC_TEST const char* test_mistake_name(int i) {
  constexpr int n = sizeof kMistakes / sizeof kMistakes[0];
  return i < n ? kMistakes[i].name : nullptr;
}

// What the launch of a mistake says: its error, or nothing.
SPECDEC_TEST void test_mistake(int i, char* message, int64_t size) {
  say_error(message, size, [&] { launch(kGpu, kMistakes[i].name, kMistakes[i].kernel, 2); });
}
