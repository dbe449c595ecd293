// What one instruction after another takes on a GPU, in cycles of a multiprocessor: what
// benchmarks/gpu/model/machine.py believes, measured; what it takes to fetch instructions that a
// launch has not executed yet; and what memory gives to blocks that read side by side, as
// csrc/cuda/scan.cuh does, or a row each.
//
//     nvcc -O3 -std=c++17 -arch=native benchmarks/gpu/latencies.cu -o latencies && ./latencies
//
// Each figure in cycles is of a chain in which an instruction needs the result of the one before,
// in one warp on an idle GPU (a barrier: in blocks of 256 threads); what counts and masks in a
// chain is in it. Of memory, the chain walks through an array in an order without a pattern. Prints
// JSON.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kSteps = 512;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

struct Result {
  long long cycles;
  uint32_t seen;
};

uint32_t* g_seen;  // on the device; nobody reads it

// ---- steps: each takes and gives a number that the next one needs ---

struct Add {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    asm volatile("add.u32 %0, %0, 1;" : "+r"(x));  // or the compiler makes one of them all
    return x;
  }
};
struct MultiplyAdd {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    asm volatile("mad.lo.u32 %0, %0, %0, 1;" : "+r"(x));
    return x;
  }
};
struct MultiplyAddFloat {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    return __float_as_uint(__fmaf_rn(__uint_as_float(x), 0.99f, 1.0f));
  }
};
struct MultiplyAddDouble {  // of the value's high word: a move or two beside it
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    const double value = __hiloint2double(static_cast<int>(x), 0);
    return static_cast<uint32_t>(__double2hiint(__fma_rn(value, 0.99, 1.0)));
  }
};
struct ToDoubleAndBack {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    return __float_as_uint(__double2float_rn(static_cast<double>(__uint_as_float(x))));
  }
};
struct Exponential {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__uint_as_float(x)));
    return __float_as_uint(y);
  }
};
struct DivideFloat {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    return __float_as_uint(__fdiv_rn(1.5f, __uint_as_float(x)));
  }
};
struct DivideInteger {
  __device__ static uint32_t step(uint32_t x, uint32_t*) { return 1000003u / (x | 1); }
};
struct Shuffle {
  __device__ static uint32_t step(uint32_t x, uint32_t*) { return __shfl_xor_sync(~0u, x, 1) + 1; }
};
struct Reduce {
  __device__ static uint32_t step(uint32_t x, uint32_t*) { return __reduce_add_sync(~0u, x) + 1; }
};
struct Vote {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    return __ballot_sync(~0u, x & 1) + threadIdx.x;
  }
};
struct Barrier {
  __device__ static uint32_t step(uint32_t x, uint32_t*) {
    __syncthreads();
    return x + 1;
  }
};
struct Shared {
  __device__ static uint32_t step(uint32_t x, uint32_t* shared) {
    return static_cast<volatile uint32_t*>(shared)[x];
  }
};
struct SharedAtomic {
  // The old value is a count of steps: the shift is 0. Adding 0 would be a load to the compiler.
  __device__ static uint32_t step(uint32_t x, uint32_t* shared) {
    return atomicAdd(shared + (x >> 31), 1);
  }
};

// `zeros`: the compiler must not know that all lanes have the same number.
template <typename Step>
__global__ void chain(uint32_t begin, const uint32_t* zeros, Result* result) {
  __shared__ uint32_t shared[64];
  if (threadIdx.x < 64) shared[threadIdx.x] = 0;
  __syncthreads();
  uint32_t x = begin + zeros[threadIdx.x];
  long long cycles = 0;
  for (int round = 0; round < 2; ++round) {  // the first one meets a cold instruction cache
    __syncthreads();
    const long long start = clock64();
#pragma unroll 16
    for (int k = 0; k < kSteps; ++k) x = Step::step(x, shared);
    cycles = clock64() - start + (x == 0xdeadbeef);
  }
  if (threadIdx.x == 0) *result = {cycles, x};
}

// ---- instructions ---

// Runs kCount instructions twice, of which up to four wait for nothing. What a launch of another
// `kOther` leaves in the caches of instructions is none of these.
template <int kCount, int kOther>
__global__ void straight(uint32_t begin, Result* results) {
  uint32_t x[4] = {begin, begin + 1, begin + 2, begin + kOther};
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const long long start = clock64();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      asm volatile("mad.lo.u32 %0, %0, %0, 1;" : "+r"(x[k % 4]));
    }
    const long long cycles = clock64() - start;
    if (threadIdx.x == 0) results[round] = {cycles, x[0] + x[1] + x[2] + x[3]};
  }
}

// ---- memory ---

constexpr uint64_t kLine = 128 / sizeof(uint32_t);

// A line's first word names the line after it: one round through all 2^bits lines.
__global__ void fill(uint32_t* lines, uint64_t count) {
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t k = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; k < count;
       k += stride) {
    lines[k * kLine] = static_cast<uint32_t>((k * 1664525 + 1013904223) & (count - 1));
  }
}

__global__ void touch(const uint32_t* lines, uint64_t count, uint32_t* seen) {
  uint32_t sum = 0;
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t k = blockIdx.x * static_cast<uint64_t>(blockDim.x) + threadIdx.x; k < count;
       k += stride) {
    sum += __ldcg(lines + k * kLine);
  }
  atomicAdd(seen, sum);
}

template <bool kL1>
__global__ void walk(const uint32_t* lines, uint32_t begin, int rounds, Result* result) {
  uint32_t x = begin;
  long long cycles = 0;
  for (int round = 0; round < rounds; ++round) {
    const long long start = clock64();
#pragma unroll 8
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t* address = lines + x * kLine;
      x = kL1 ? __ldca(address) : __ldcg(address);
    }
    cycles = clock64() - start + (x == 0xdeadbeef);
  }
  *result = {cycles, x};
}

__global__ void global_atomics(uint32_t* zero, Result* result) {
  uint32_t x = 0;
  const long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < kSteps; ++k) x = atomicAdd(zero + (x >> 31), 1);  // as in shared memory
  *result = {clock64() - start + (x == 0xdeadbeef), x};
}

__global__ void ordered_atomics(uint32_t* zero, Result* result) {
  uint32_t x = 0;
  const long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < kSteps; ++k) {
    zero[32 + x] = k;  // what the atomic must make visible first
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 0;"
                 : "=r"(x)
                 : "l"(zero + x)
                 : "memory");
  }
  *result = {clock64() - start + (x == 0xdeadbeef), x};
}

__global__ void fences(uint32_t* zero, Result* result) {
  const long long start = clock64();
#pragma unroll 8
  for (int k = 0; k < kSteps; ++k) {
    zero[32] = k;
    __threadfence();
  }
  *result = {clock64() - start, 0};
}

// ---- reading ---

// Tiles of 8 KB, as of bfloat16 rows: a block reads some, one every `step`, from its own first one
// on, four under way.
__global__ void __launch_bounds__(256)
    read_tiles(const uint4* data, int64_t first_of_block, int64_t step, int tiles, uint32_t* seen) {
  constexpr int kVectors = 8192 / sizeof(uint4);
  const uint4* place = data + blockIdx.x * first_of_block * kVectors + threadIdx.x;
  uint32_t found = 0;
#pragma unroll 4
  for (int t = 0; t < tiles; ++t, place += step * kVectors) {
    const uint4 a = __ldcs(place), b = __ldcs(place + 256);
    found |= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
  }
  if (found == 0xdeadbeef) *seen = found;
}

// GB/s of a row of launches, each on tiles that no cache holds.
double rate_of_reading(const uint4* data, bool side_by_side, int blocks, int tiles) {
  constexpr int kSets = 12;
  const int64_t set = static_cast<int64_t>(blocks) * tiles;
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  std::vector<float> times;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  for (int k = 0; k < 9; ++k) {
    check(cudaEventRecord(begin, stream), "record");
    for (int i = 0; i < kSets; ++i) {
      read_tiles<<<blocks, 256, 0, stream>>>(data + i * set * 512, side_by_side ? 1 : tiles,
                                             side_by_side ? blocks : 1, tiles, g_seen);
    }
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "wait");
    float milliseconds;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "time");
    times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  return kSets * set * 8192.0 / (times[times.size() / 2] * 1e-3) / 1e9;
}

// ---- launches ---

template <bool kChained>
__global__ void empty() {
  if (kChained) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
}

template <bool kChained>
double microseconds_of_a_launch(int blocks) {
  constexpr int kLaunches = 200;
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = kChained ? 1 : 0;
  for (int k = 0; k < kLaunches; ++k) check(cudaLaunchKernelEx(&config, empty<kChained>), "launch");
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamEndCapture(stream, &graph), "end of capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "graph");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int k = 0; k < 20; ++k) {
    check(cudaGraphLaunch(executable, stream), "replay");
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(executable, stream), "replay");
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "wait");
    float milliseconds;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "time");
    times.push_back(milliseconds * 1e3f / kLaunches);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// ---- the list ---

Result* g_result;

double cycles_of_a_step() {
  check(cudaDeviceSynchronize(), "a chain");
  Result found;
  check(cudaMemcpy(&found, g_result, sizeof found, cudaMemcpyDeviceToHost), "its result");
  return static_cast<double>(found.cycles) / kSteps;
}

void print(const char* name, double value) { std::printf(",\n  \"%s\": %.2f", name, value); }

template <typename Step>
void measure(const char* name, const uint32_t* zeros, uint32_t begin, int threads = 32) {
  chain<Step><<<1, threads>>>(begin, zeros, g_result);
  print(name, cycles_of_a_step());
}

template <int kCount>
void measure_straight() {
  straight<8192, 1><<<1056, 32>>>(1, g_result);  // all multiprocessors forget the others
  straight<kCount, 0><<<1, 32>>>(1, g_result);
  check(cudaDeviceSynchronize(), "straight code");
  Result found[2];
  check(cudaMemcpy(found, g_result, sizeof found, cudaMemcpyDeviceToHost), "its results");
  for (const bool again : {false, true}) {
    char name[64];
    std::snprintf(name, sizeof name, "instruction of %d KB, %s", kCount * 16 / 1024,
                  again ? "again" : "the first time");
    print(name, static_cast<double>(found[again].cycles) / kCount);
  }
}

template <bool kL1>
void measure_walk(const char* name, uint32_t* lines, uint64_t bytes, int rounds, bool touched) {
  const uint64_t count = bytes / 128;
  fill<<<1024, 256>>>(lines, count);
  if (touched) touch<<<1024, 256>>>(lines, count, lines + 1);
  walk<kL1><<<1, 1>>>(lines, 12345 & (count - 1), rounds, g_result);
  print(name, cycles_of_a_step());
}

}  // namespace

int main() {
  cudaDeviceProp seen;
  check(cudaGetDeviceProperties(&seen, 0), "properties");
  std::printf("{\n  \"gpu\": \"%s\"", seen.name);
  check(cudaMalloc(&g_result, 2 * sizeof(Result)), "memory");
  check(cudaMalloc(&g_seen, sizeof *g_seen), "memory");
  uint32_t* lines;
  check(cudaMalloc(&lines, uint64_t{4} << 30), "memory");

  check(cudaMemset(lines, 0, 4096), "memory");
  measure<Add>("add", lines, 1);
  measure<MultiplyAdd>("multiply-add", lines, 1);
  measure<MultiplyAddFloat>("multiply-add, float32", lines, 0x3f800000);
  measure<MultiplyAddDouble>("multiply-add, float64", lines, 0x3ff00000);
  measure<ToDoubleAndBack>("to float64 and back", lines, 0x3f800000);
  measure<Exponential>("ex2", lines, 0x3f000000);
  measure<DivideFloat>("division, float32", lines, 0x3f800000);
  measure<DivideInteger>("division, uint32", lines, 7);
  measure<Shuffle>("shuffle and add", lines, 1);
  measure<Reduce>("redux and add", lines, 1);
  measure<Vote>("vote, test and add", lines, 1);
  measure<Barrier>("barrier of 256 threads", lines, 1, 256);
  measure<Barrier>("barrier of 32 threads", lines, 1, 32);
  measure<Shared>("shared", lines, 0);
  measure<SharedAtomic>("shared atomic and shift", lines, 0, 1);
  measure_straight<256>();
  measure_straight<1024>();
  measure_straight<4096>();
  measure_walk<true>("L1", lines, 16 << 10, 3, true);
  measure_walk<false>("L2", lines, 8 << 20, 1, true);
  measure_walk<false>("DRAM, 256 MB", lines, 256 << 20, 1, false);
  measure_walk<false>("DRAM, 4 GB", lines, uint64_t{4} << 30, 1, false);
  check(cudaMemset(lines, 0, 4096), "memory");
  global_atomics<<<1, 1>>>(lines, g_result);
  print("global atomic and shift", cycles_of_a_step());
  check(cudaMemset(lines, 0, 4096), "memory");
  ordered_atomics<<<1, 1>>>(lines, g_result);
  print("store and atom.acq_rel", cycles_of_a_step());
  fences<<<1, 1>>>(lines, g_result);
  print("store and fence", cycles_of_a_step());
  for (const int blocks : {1, 132, 528}) {
    char name[64];
    std::snprintf(name, sizeof name, "us of an empty launch, %d blocks", blocks);
    print(name, microseconds_of_a_launch<false>(blocks));
    std::snprintf(name, sizeof name, "us of an empty chained launch, %d blocks", blocks);
    print(name, microseconds_of_a_launch<true>(blocks));
  }
  for (const int blocks : {352, 528, 1056}) {  // 107, 160 and 107 MB
    const int tiles = blocks == 1056 ? 12 : 37;
    for (const bool side_by_side : {false, true}) {
      char name[64];
      std::snprintf(name, sizeof name, "GB/s, %d blocks of %d tiles, %s", blocks, tiles,
                    side_by_side ? "side by side" : "a row each");
      print(name, rate_of_reading(reinterpret_cast<uint4*>(lines), side_by_side, blocks, tiles));
    }
  }
  std::printf("\n}\n");
  return 0;
}
