// The rules of verify on a slice of requests. Each decides `accepted` and `draw` of every request,
// and writes accept_probs and the logprobs of accepted tokens.
#pragma once

#include "../core/chain.h"
#include "draw.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

void verify_stepwise(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n);
void verify_block(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
