// Chain verification: slices of requests through their rule, then all final draws, then logprobs.
//
// Grid: see verify_stepwise.cpp and verify_block.cpp; draws over (request, tile) units. Scratch is
// O(rows of a slice x tiles). Numerics: laws and residual sums in fp32 tiles combined in float64,
// accept tests and the recursion's scalars in float64, draws in integers.
#include "chain.h"
#include "kernels.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// A slice's rows are read up to three times; this many bytes of them are likely still in cache.
constexpr int64_t kSliceBytes = int64_t{16} << 20;

int64_t requests_per_slice(const VerifyParams& p) {
  const int64_t row_bytes = p.target.vocab * (p.target.element == Element::kFloat32 ? 4 : 2);
  const int64_t rows = p.rule == Rule::kBlock ? 2 * p.gamma + 1 : 2;
  const int64_t requests = kSliceBytes / (rows * row_bytes);
  return requests > 0 ? requests : 1;
}

void check_uniforms(const VerifyParams& p, Request* r) {
  const Array<double>& uniforms = p.randomness.uniforms;
  if (uniforms.data == nullptr || r->greedy) return;
  bool out_of_range = false;
  for (int64_t slot = 0; slot <= p.gamma; ++slot) {
    if (slot < r->drafted || slot == p.gamma) {
      clamp_uniform(uniforms.data[r->b * uniforms.stride[0] + slot * uniforms.stride[1]],
                    &out_of_range);
    }
  }
  if (out_of_range) r->status |= kParameterOutOfRange;
}

// Columns that are usable by their ids: up to draft_lengths, the first -1 or the first invalid id.
void count_drafted(const VerifyParams& p, Request* r) {
  int64_t length = p.gamma;
  if (p.draft_lengths.data != nullptr) {
    const int64_t given = load_id(p.draft_lengths, r->b, 0);
    length = given < 0 ? 0 : given > p.gamma ? p.gamma : given;
    if (given != length) r->status |= kParameterOutOfRange;
  }
  const int64_t ids = p.draft.vocab > p.target.vocab ? p.draft.vocab : p.target.vocab;
  for (r->drafted = 0; r->drafted < length; ++r->drafted) {
    const int64_t token = column_at(p, r->b, r->drafted).token;
    if (token == -1) break;
    if (token < 0 || token >= ids || !is_known_kind(p, r->b, r->drafted)) {
      r->status |= kInvalidDraftToken;
      break;
    }
  }
}

Request open_request(const VerifyParams& p, int64_t b) {
  Request r;
  r.b = b;
  r.greedy = ignores_sampling(p.rule);
  if (r.greedy) {
    r.target_filters.temperature = 0.0;
  } else {
    r.target_filters = filters_at(p.target_sampling, b, p.target.vocab);
    bool out_of_range = r.target_filters.out_of_range;
    r.greedy = is_greedy(r.target_filters);
    if (p.draft.data != nullptr && !p.draft_is_probs) {
      r.draft_filters = filters_at(p.draft_sampling, b, p.draft.vocab);
      out_of_range |= r.draft_filters.out_of_range;
    }
    if (out_of_range) r.status |= kParameterOutOfRange;
  }
  count_drafted(p, &r);
  check_uniforms(p, &r);
  r.draw.u = r.greedy ? 0.0 : uniform_at(p, b, p.gamma);
  return r;
}

void clear_outputs(const VerifyParams& p) {
  for (int64_t i = 0; i < p.batch * (p.gamma + 1); ++i) {
    p.tokens[i] = -1;
    p.logprobs[i] = NAN;
  }
  for (int64_t i = 0; i < p.batch * p.gamma; ++i) p.accept_probs[i] = NAN;
}

void write_outcome(const VerifyParams& p, const Request& r) {
  const int64_t first = r.b * (p.gamma + 1);
  p.num_accepted[r.b] = static_cast<int32_t>(r.accepted);
  p.status[r.b] = r.status;
  for (int64_t i = 0; i < r.accepted; ++i) p.tokens[first + i] = column_at(p, r.b, i).token;
  if (!r.has_target_law) {
    p.tokens[first + r.accepted] = 0;
    return;
  }
  p.tokens[first + r.accepted] = r.draw.token;
  const LawTask winner{r.draw.target, {}, false, r.draw.target_law};
  p.logprobs[first + r.accepted] = target_log_probability(winner, r.draw.token);
}

// log softmax of the raw rows at T = 1, for everything emitted.
void write_raw_logprobs(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                        int64_t n) {
  Buffer<LawTask> tasks(n * (p.gamma + 1));
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t i = 0; i <= p.gamma; ++i) {
      LawTask& task = tasks[k * (p.gamma + 1) + i];
      task = LawTask{};
      if (i <= requests[k].accepted) task.row = target_row(p, requests[k].b, i);
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
  for (int64_t k = 0; k < n; ++k) requests[k] = open_request(p, begin + k);
  if (p.rule == Rule::kBlock) {
    verify_block(p, pool, requests.data(), n);
  } else {
    verify_stepwise(p, pool, requests.data(), n);
  }
  for (int64_t k = 0; k < n; ++k) draws[k] = requests[k].draw;
  draw_tokens(pool, draws.data(), n);
  for (int64_t k = 0; k < n; ++k) {
    requests[k].draw.token = draws[k].token;
    write_outcome(p, requests[k]);
  }
  if (p.raw_logprobs || p.rule == Rule::kTopBeta) {
    write_raw_logprobs(p, pool, requests.data(), n);
  }
}

}  // namespace

void verify(const VerifyParams& p, const ThreadPool& pool) {
  clear_outputs(p);
  const int64_t slice = requests_per_slice(p);
  for (int64_t begin = 0; begin < p.batch; begin += slice) {
    verify_slice(p, pool, begin, begin + slice < p.batch ? slice : p.batch - begin);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
