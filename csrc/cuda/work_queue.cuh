// A queue of sums over the vocabulary that the blocks of one launch fill while they empty it.
//
// A sum is cut into `splits` pieces. Blocks take tickets, in order: the first ones open a request
// each, then ticket `requests + k * splits + i` is for piece i of the k-th sum that was published.
//
// Every launch ends, however few of its blocks run at once: a block waits only when it holds a
// ticket to a sum that is not there yet, and nothing else. Then all earlier tickets are taken; each
// is held by a block that works on it, or by one that waits, too. If all waited, no request would
// have a sum left to wait for, so all would be closed, which ends the waiting.
//
// Memory: what a block wrote before `publish` is seen by whoever holds a ticket to that sum (fence,
// store; load, fence, barrier), and what those wrote before is_last_block by the last of them.
#pragma once

#include "block.cuh"
#include "shared.cuh"

namespace specdec {
namespace cuda {
namespace {

// What is to be summed at a node.
enum class Sum : uint8_t {
  kNone,       // nothing: the request is to be opened
  kMass,       // the residual after the node's child, or in a tree, its sampled children
  kRestMass,   // trees: Pending::kRestMass of core/tree.h
  kFinalMass,  // the residual that the request's token is drawn from
};

struct Work {
  int64_t request;
  int64_t node;
  Sum sum;
};

struct Ticket {
  bool given;  // false: there is no work any more
  Work work;
  int64_t piece;
};

// In one word, which is not 0 for a sum.
using WorkWord = unsigned long long;  // what CUDA has atomics for

__device__ WorkWord packed(const Work& work) {
  return static_cast<WorkWord>(work.request) << 18 | static_cast<WorkWord>(work.node) << 2 |
         static_cast<WorkWord>(work.sum);
}

// A node of a chain or tree has 16 bits (csrc/torch/arguments.cpp).
__device__ Work unpacked(WorkWord word) {
  return {static_cast<int64_t>(word >> 18), static_cast<int64_t>(word >> 2 & 0xFFFF),
          static_cast<Sum>(word & 3)};
}

struct WorkQueue {
  // All 0 before the launch.
  WorkWord* tickets = nullptr;    // taken
  WorkWord* published = nullptr;  // sums
  WorkWord* closed = nullptr;     // requests
  WorkWord* words = nullptr;      // [requests, sums], 0 while a sum is not there
  int64_t requests = 0;
  int64_t sums = 0;  // that a request may ask for; 0: none, and nobody takes tickets
  int64_t splits = 1;
};

// ---- on the host ---

constexpr int64_t kQueueHeads = 3;

// Memory for a queue of this size.
Reserved<WorkWord> reserve_queue(Workspace* workspace, const WorkQueue& queue) {
  return workspace->reserve<WorkWord>(kQueueHeads + queue.requests * queue.sums);
}

void place_queue(const Workspace& workspace, Reserved<WorkWord> reserved, WorkQueue* queue) {
  queue->tickets = workspace.at(reserved);
  queue->published = queue->tickets + 1;
  queue->closed = queue->tickets + 2;
  queue->words = queue->tickets + kQueueHeads;
}

// ---- on the device ---

// An empty queue; a block for each request clears its share.
__device__ void clear_queue(const WorkQueue& queue, int64_t b) {
  for (int64_t i = threadIdx.x; i < queue.sums; i += kThreads) queue.words[b * queue.sums + i] = 0;
  if (b == 0 && threadIdx.x == 0) *queue.tickets = *queue.published = *queue.closed = 0;
}

// By one thread, which has seen to it that nobody else changes what the sum is of.
__device__ void publish(const WorkQueue& queue, const Work& work) {
  const WorkWord place = atomicAdd(queue.published, WorkWord{1});
  __threadfence();
  atomicExch(queue.words + place, packed(work));
}

__device__ Ticket wait_for_work(const WorkQueue& queue) {
  constexpr unsigned kPause = 100;  // nanoseconds
  const int64_t ticket = static_cast<int64_t>(atomicAdd(queue.tickets, WorkWord{1}));
  if (ticket < queue.requests) return {true, {ticket, 0, Sum::kNone}, 0};
  const int64_t place = (ticket - queue.requests) / queue.splits;
  const int64_t piece = (ticket - queue.requests) % queue.splits;
  while (place < queue.requests * queue.sums) {
    const WorkWord word = *static_cast<const volatile WorkWord*>(queue.words + place);
    if (word != 0) {
      __threadfence();
      return {true, unpacked(word), piece};
    }
    const WorkWord closed = *static_cast<const volatile WorkWord*>(queue.closed);
    if (closed == static_cast<WorkWord>(queue.requests)) break;
    __nanosleep(kPause);
  }
  return {false, {}, 0};
}

// Collective over the block.
__device__ Ticket take_ticket(const WorkQueue& queue) {
  __shared__ Ticket ticket;
  __syncthreads();
  if (threadIdx.x == 0) ticket = wait_for_work(queue);
  __syncthreads();
  return ticket;
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
