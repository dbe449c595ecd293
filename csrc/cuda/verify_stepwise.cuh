// The decision of the rules that stop at their first failure: all but block.
//
// Grid: (request, split). Every block of a request walks down the chain itself, over facts of up to
// 32 nodes found side by side, then takes its share of the final residual's mass.
#pragma once

#include "chain.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

__global__ void __launch_bounds__(kThreads)
    decide_stepwise(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ SharedArray<Progress, 1> progress;
  __shared__ LawStorage storage;
  __shared__ NodeFacts facts[kNodesAtOnce];
  const Unit unit = this_unit(splits);
  open_in_block(p, unit.index, request.data());
  Request& r = request[0];
  if (unit.split == 0) clear_outputs(p, unit.index, threadIdx.x, kThreads);
  if (threadIdx.x == 0) progress[0] = Progress{};
  const Laws laws = gather_laws(p, s, r, 0, r.drafted, &storage);
  for (int64_t base = 0; base <= r.drafted; base += kNodesAtOnce) {
    look_at_nodes(p, r, laws, base, r.drafted, facts);
    if (threadIdx.x == 0) {
      for (int64_t i = base; i < base + kNodesAtOnce && progress[0].active; ++i) {
        visit(p, &r, progress.data(), i, facts[i - base], target_law_row(p, r, laws, i),
              draft_law_row(p, r, laws, i), unit.split == 0);
      }
    }
    __syncthreads();
    if (!progress[0].active) break;
  }
  close_decision(p, s, &r, unit.split, splits);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
