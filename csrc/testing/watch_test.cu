// Kernels that are right, and their like with something wrong: what watch.cpp says of them is
// tested by python_tests/backends/test_cuda_watched.py, through ctypes.
#include "../cuda/tile.cuh"
#include "for_ctypes.h"

namespace specdec {
namespace cuda {
namespace {

// What launches share: as many numbers as a test has given.
using Numbers = int64_t*;

// ---- within a block -----------------------------------------------------------------------------

// A thread writes a number that its neighbour of the next warp, or the same one, reads.
enum class Order { kNone, kShuffle, kVote, kWarp, kBlock, kSum };

template <Order kOrder, int kFar>
__global__ void read_neighbour(Numbers out) {
  __shared__ int64_t numbers[kThreads];
  numbers[threadIdx.x] = threadIdx.x;
  if (kOrder == Order::kShuffle) __shfl_sync(kAllLanes, 1, 0);
  if (kOrder == Order::kVote) __any_sync(kAllLanes, 1);
  if (kOrder == Order::kWarp) __syncwarp();
  if (kOrder == Order::kBlock) __syncthreads();
  if (kOrder == Order::kSum) block_sum(1);
  const int64_t read = numbers[threadIdx.x ^ kFar];
  if (threadIdx.x == 0) out[blockIdx.x] = read;
}

// Reads come before the writes that follow them.
template <bool kBarrier>
__global__ void overwrite_what_others_read(Numbers out) {
  __shared__ int64_t number;
  if (threadIdx.x == 0) number = 1;
  __syncthreads();
  const int64_t read = number;
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 1) number = read + 1;
  if (threadIdx.x == 2) out[blockIdx.x] = read;
}

// Bytes side by side, in one word.
template <int kPlaces>
__global__ void write_bytes(Numbers out) {
  __shared__ uint8_t bytes[kThreads];
  bytes[threadIdx.x / (kThreads / kPlaces)] = 1;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = bytes[0];
}

// All threads of a block count, and one of them looks at the count.
template <bool kBarrier, bool kAtomicLook>
__global__ void count_threads(Numbers out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  if (kBarrier) __syncthreads();
  if (threadIdx.x != 0) return;
  if constexpr (kAtomicLook) {
    out[blockIdx.x] = *static_cast<const volatile int*>(&count);
  } else {
    out[blockIdx.x] = count;
  }
}

// The first half of a warp meets; the other half reads as well, or not.
template <bool kAll>
__global__ void meet_half_a_warp(Numbers out) {
  __shared__ int64_t numbers[kWarp];
  if (threadIdx.x >= kWarp) return;
  const int half = threadIdx.x / 16;
  numbers[threadIdx.x] = 1;
  __syncwarp(half == 0 ? 0x0000FFFFu : 0xFFFF0000u);
  if (!kAll && half == 1) return;
  out[blockIdx.x * kWarp + threadIdx.x] = numbers[threadIdx.x % 16 ^ 1];
}

// Words at multiples of so many bytes.
template <int kBytes>
__global__ void read_word(Numbers numbers) {
  const char* at = reinterpret_cast<const char*>(numbers) + kBytes * (1 + blockIdx.x);
  if (threadIdx.x == 0) numbers[16 + blockIdx.x] = *reinterpret_cast<const uint64_t*>(at);
}

template <int kShift>
__global__ void shift(Numbers numbers) {
  const int by = kShift + static_cast<int>(numbers[0]);
  if (threadIdx.x == 0) numbers[1 + blockIdx.x] = 1 << by;
}

template <int kPlace>
__global__ void read_array(Numbers numbers) {
  __shared__ int64_t array[4];
  if (threadIdx.x < 4) array[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) numbers[1 + blockIdx.x] = array[kPlace + numbers[0]];
}

// ---- between blocks -----------------------------------------------------------------------------

constexpr int kBlocks = 5;

// Every block leaves a number, and the last one to arrive reads them all.
struct Arrivals {
  Numbers numbers;  // [kBlocks]
  uint32_t* counter;
};

enum class Arrival { kRight, kRelaxed, kBeforeWriting, kNotMet, kOneThreadSees };

template <Arrival kArrival>
__global__ void read_all_numbers(Arrivals a) {
  __shared__ bool last;
  const auto arrive = [&] {
    if (threadIdx.x != 0) return;
    last = (kArrival == Arrival::kRelaxed ? atomicAdd(a.counter, 1u)
                                          : add_in_order(a.counter, 1)) == kBlocks - 1;
  };
  if (kArrival == Arrival::kBeforeWriting) arrive();
  if (threadIdx.x == 1) a.numbers[blockIdx.x] = 1;
  if (kArrival != Arrival::kNotMet) __syncthreads();
  if (kArrival != Arrival::kBeforeWriting) arrive();
  if (kArrival == Arrival::kOneThreadSees) {
    if (threadIdx.x == 0 && last) a.numbers[kBlocks] = a.numbers[kBlocks - 1];
    if (threadIdx.x != 2) return;  // has not met the one that has acquired
    a.numbers[kBlocks + 1] = a.numbers[blockIdx.x == 0 ? 1 : 0];
    return;
  }
  __syncthreads();
  if (!last || threadIdx.x != 2) return;
  for (int b = 0; b < kBlocks; ++b) a.numbers[kBlocks] += a.numbers[b];
}

// One block tells the others that its number is there.
template <bool kAcquires>
__global__ void wait_for_number(Arrivals a) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    a.numbers[0] = 1;
    release_add(a.counter, 1);
    return;
  }
  const volatile uint32_t* shown = a.counter;
  while ((kAcquires ? acquire(a.counter) : *shown) == 0) __nanosleep(20);
  a.numbers[blockIdx.x] = a.numbers[0];
}

// ---- between launches ---------------------------------------------------------------------------

__global__ void leave(Numbers numbers) {
  begin_kernel();
  if (threadIdx.x == 0) numbers[blockIdx.x] = 1;
}

__global__ void leave_nothing(bool in_turn) {
  if (in_turn) {
    begin_in_turn();
  } else {
    begin_kernel();
  }
}

// Reads or writes what `leave` has written, before it waits or after.
template <bool kWrites, bool kWaitsFirst>
__global__ void meet_what_was_left(Numbers numbers) {
  if (kWaitsFirst) wait_for_launch_before();
  if (threadIdx.x == 0 && kWrites) numbers[blockIdx.x] = 2;
  if (threadIdx.x == 0 && !kWrites) numbers[kBlocks + blockIdx.x] = numbers[blockIdx.x];
  if (!kWaitsFirst) wait_for_launch_before();
}

// A thread that has not waited itself, but has met one that has.
template <bool kMeets>
__global__ void read_after_another_has_waited(Numbers numbers) {
  if (threadIdx.x == 0) wait_for_launch_before();
  if (kMeets) __syncthreads();
  if (threadIdx.x == 1) numbers[kBlocks + blockIdx.x] = numbers[blockIdx.x];
  if (threadIdx.x != 0) wait_for_launch_before();
}

// ---- the cases ----------------------------------------------------------------------------------

template <auto kKernel>
void alone(const Gpu& gpu, Numbers numbers, uint32_t*) {
  launch(gpu, "alone", kKernel, kBlocks, numbers);
}

template <auto kKernel, int kHowMany = kBlocks>
void together(const Gpu& gpu, Numbers numbers, uint32_t* counter) {
  launch(gpu, "together", kKernel, kHowMany, Arrivals{numbers, counter});
}

template <auto kKernel>
void after_one(const Gpu& gpu, Numbers numbers, uint32_t*) {
  launch(gpu, "leave", leave, kBlocks, numbers);
  launch(gpu, "after_one", kKernel, kBlocks, numbers);
}

template <auto kKernel, bool kInTurn>
void after_two(const Gpu& gpu, Numbers numbers, uint32_t*) {
  launch(gpu, "leave", leave, kBlocks, numbers);
  launch(gpu, "leave_nothing", leave_nothing, 1, kInTurn);
  launch(gpu, "after_two", kKernel, kBlocks, numbers);
}

struct Case {
  const char* name;
  const char* said;  // of it, null: nothing
  void (*run)(const Gpu&, Numbers, uint32_t*);
};

constexpr char kRace[] = "nothing orders";

constexpr Case kCases[] = {
    {"a neighbour's number after a barrier", nullptr, alone<read_neighbour<Order::kBlock, 1>>},
    {"after a sum of the block", nullptr, alone<read_neighbour<Order::kSum, 1>>},
    {"after __syncwarp", nullptr, alone<read_neighbour<Order::kWarp, 1>>},
    {"one's own after nothing", nullptr, alone<read_neighbour<Order::kNone, 0>>},
    {"a neighbour's after nothing", kRace, alone<read_neighbour<Order::kNone, 1>>},
    {"after a shuffle", kRace, alone<read_neighbour<Order::kShuffle, 1>>},
    {"after a vote", kRace, alone<read_neighbour<Order::kVote, 1>>},
    {"overwritten after a barrier", nullptr, alone<overwrite_what_others_read<true>>},
    {"overwritten after nothing", kRace, alone<overwrite_what_others_read<false>>},
    {"a byte for each thread", nullptr, alone<write_bytes<kThreads>>},
    {"a byte for two threads", kRace, alone<write_bytes<kThreads / 2>>},
    {"a count after a barrier", nullptr, alone<count_threads<true, false>>},
    {"a count looked at atomically", nullptr, alone<count_threads<false, true>>},
    {"a count looked at", kRace, alone<count_threads<false, false>>},
    {"within the half that met", nullptr, alone<meet_half_a_warp<false>>},
    {"beyond the half that met", kRace, alone<meet_half_a_warp<true>>},
    {"aligned words", nullptr, alone<read_word<8>>},
    {"words that are not aligned", "null, misaligned", alone<read_word<4>>},
    {"a shift", nullptr, alone<shift<31>>},
    {"a shift by too much", "a shift by too much", alone<shift<32>>},
    {"an element", nullptr, alone<read_array<3>>},
    {"an element that is not there", "an index out of bounds", alone<read_array<4>>},
    {"the last block", nullptr, together<read_all_numbers<Arrival::kRight>>},
    {"the last block by a relaxed counter", kRace, together<read_all_numbers<Arrival::kRelaxed>>},
    {"blocks that arrive before they write", kRace,
     together<read_all_numbers<Arrival::kBeforeWriting>>},
    {"blocks that do not meet before they arrive", kRace,
     together<read_all_numbers<Arrival::kNotMet>>},
    {"a thread that does not meet the one that sees", kRace,
     together<read_all_numbers<Arrival::kOneThreadSees>>},
    {"acquired", nullptr, together<wait_for_number<true>, 2>},
    {"seen, but not acquired", kRace, together<wait_for_number<false>, 2>},
    {"read after the wait", nullptr, after_one<meet_what_was_left<false, true>>},
    {"written after the wait", nullptr, after_one<meet_what_was_left<true, true>>},
    {"read before the wait", kRace, after_one<meet_what_was_left<false, false>>},
    {"written before the wait", kRace, after_one<meet_what_was_left<true, false>>},
    {"read after meeting one that has waited", nullptr,
     after_one<read_after_another_has_waited<true>>},
    {"read while another has waited", kRace, after_one<read_after_another_has_waited<false>>},
    {"read before the wait of the third launch, in turn", nullptr,
     after_two<meet_what_was_left<false, false>, true>},
    {"read before the wait of the third launch", kRace,
     after_two<meet_what_was_left<false, false>, false>},
};

}  // namespace
}  // namespace cuda
}  // namespace specdec

// ---- for ctypes ---------------------------------------------------------------------------------

using namespace specdec;
using namespace specdec::cuda;

SPECDEC_TEST void watch_seed(uint64_t seed) { fibres::set_seed(seed); }
SPECDEC_TEST void watch_leave_out(const char* place) { fibres::leave_out(place); }

// A case, null after the last one, and what has to be said of it: null, nothing.
SPECDEC_TEST const char* watch_case(int i, const char** said) {
  constexpr int n = sizeof kCases / sizeof kCases[0];
  if (i >= n) return nullptr;
  *said = kCases[i].said;
  return kCases[i].name;
}

// What its last launch says, or nothing. `numbers` and `counter` are 0.
SPECDEC_TEST void run_watch_case(int i, int64_t* numbers, int64_t bytes, uint32_t* counter,
                                 char* message, int64_t size) {
  const Gpu gpu{{8, true}, nullptr, nullptr, nullptr};
  fibres::set_workspace(numbers, bytes);
  fibres::say_error(message, size, [&] { kCases[i].run(gpu, numbers, counter); });
  fibres::set_workspace(nullptr, 0);
}
