// Chain verification: slices of requests through their rule, then all final draws, then logprobs.
//
// Grid: see verify_stepwise.cpp and verify_block.cpp; draws over (request, tile) units. Scratch is
// O(rows of a slice x tiles). Numerics: laws and residual sums in fp32 tiles combined in float64,
// accept tests and the recursion's scalars in float64, draws in integers.
#include "chain_rules.h"
#include "held_rows.h"
#include "kernels.h"
#include "token_lists.h"
#include "token_map.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// log softmax of the raw rows at T = 1, for everything emitted.
void write_raw_logprobs(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                        int64_t n) {
  Buffer<LawTask> tasks(n * (p.gamma + 1));
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t i = 0; i <= p.gamma; ++i) {
      LawTask& task = tasks[k * (p.gamma + 1) + i];
      task = LawTask();
      if (i <= requests[k].accepted) task.row = target_entries(p, pool, requests[k].b, i);
    }
  }
  compute_laws(pool, tasks.data(), n * (p.gamma + 1));
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t i = 0; i <= requests[k].accepted; ++i) {
      const LawTask& task = tasks[k * (p.gamma + 1) + i];
      const int64_t place = requests[k].b * (p.gamma + 1) + i;
      if (task.law.valid) p.logprobs[place] = target_log_probability(task, p.tokens[place]);
    }
  }
}

void verify_slice(const VerifyParams& p, const ThreadPool& pool, int64_t begin, int64_t n) {
  Buffer<Request> requests(n);
  Buffer<DrawTask> draws(n);
  for (int64_t k = 0; k < n; ++k) {
    clear_outputs(p, begin + k);
    requests[k] = open_request(p, begin + k);
  }
  if (p.rule == Rule::kBlock) {
    verify_block(p, pool, requests.data(), n);
  } else {
    verify_stepwise(p, pool, requests.data(), n);
  }
  for (int64_t k = 0; k < n; ++k) draws[k] = requests[k].draw;
  draw_tokens(pool, draws.data(), n);
  if (pool.ranks != nullptr) show_last_tokens(p, pool, requests.data(), n, draws.data());
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[k];
    write_accepted(p, r);
    if (r.has_target_law) write_extra_token(p, r.b, r.accepted, draws[k]);
  }
  if (p.raw_logprobs) {
    write_raw_logprobs(p, pool, requests.data(), n);
  }
}

// `slice` requests at a time.
void verify_slices(const VerifyParams& p, const ThreadPool& pool, int64_t slice) {
  for (int64_t begin = 0; begin < p.batch; begin += slice) {
    verify_slice(p, pool, begin, begin + slice < p.batch ? slice : p.batch - begin);
  }
}

// A rank holds a share of a slice's rows, and a slice costs it exchanges.
void verify_over_ranks(const VerifyParams& p, const ThreadPool& pool, int64_t slice) {
  Buffer<HeldRow> targets(p.batch * (p.gamma + 1)), drafts(p.batch * p.gamma);
  HeldRows rows{targets.data(), drafts.data()};
  Ranks ranks = *pool.ranks;
  ranks.rows = &rows;
  ThreadPool with_rows = pool;
  with_rows.ranks = &ranks;
  show_draft_tokens(p, with_rows);
  verify_slices(p, with_rows, slice * ranks.count);
}

}  // namespace

void verify(const VerifyParams& given, const ThreadPool& pool) {
  VerifyParams p = given;
  const MapStorage map(&p.map);
  const ListStorage lists(&p.lists, p.draft, p.batch, pool);
  const bool side_by_side = p.rule == Rule::kBlock || pool.ranks != nullptr;
  const int64_t slice = requests_per_slice(p.target, side_by_side ? 2 * p.gamma + 1 : 2);
  if (pool.ranks == nullptr) {
    verify_slices(p, pool, slice);
  } else {
    verify_over_ranks(p, pool, slice);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
