// sample: one token per row from its law.
//
// Grid and traffic: law_pass.cpp, then draw.cpp (the row once more, and one tile). Writes 12 bytes
// a row.
#include "../core/philox.h"
#include "draw.h"
#include "kernels.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

double uniform_of(const SampleParams& p, int64_t b, bool* out_of_range) {
  const Randomness& r = p.randomness;
  if (r.uniforms.data != nullptr) {
    return clamp_uniform(r.uniforms.data[b * r.uniforms.stride[0]], out_of_range);
  }
  return counter_uniform(r.seeds.data[b * r.seeds.stride[0]],
                         r.positions.data[b * r.positions.stride[0]], static_cast<Domain>(p.domain),
                         p.draft_index, r.stream);
}

}  // namespace

void sample(const SampleParams& p, const ThreadPool& pool) {
  Buffer<LawTask> tasks(p.batch);
  Buffer<DrawTask> draws(p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Filters filters = filters_at(p.sampling, b, p.logits.vocab);
    tasks[b] = LawTask(row_at(p.logits, b, 0), filters);
  }
  compute_laws(pool, tasks.data(), p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    const LawTask& task = tasks[b];
    bool out_of_range = task.filters.out_of_range;
    draws[b] = DrawTask{};
    draws[b].target = task.row;
    draws[b].target_law = task.law;
    if (task.law.valid && !task.law.point_mass) draws[b].u = uniform_of(p, b, &out_of_range);
    draws[b].active = task.law.valid && !out_of_range;
  }
  draw_tokens(pool, draws.data(), p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t token = draws[b].token;  // -1 where nothing could be drawn
    p.tokens[b] = token;
    p.logprobs[b] =
        token < 0
            ? NAN
            : static_cast<float>(law_log_probability(tasks[b].law, row_value(tasks[b].row, token)));
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
