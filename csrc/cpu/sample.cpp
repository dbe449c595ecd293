// sample: one token per row from its law.
//
// Grid and traffic: law_pass.cpp, then draw.cpp (the row once more, and one tile). Writes 12 bytes
// a row.
#include "../core/philox.h"
#include "draw.h"
#include "kernels.h"
#include "race.h"
#include "token_map.h"

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

bool is_race(const SampleParams& p) { return p.domain == static_cast<uint32_t>(Domain::kCoupled); }

bool needs_uniform(const SampleParams& p, const RowLaw& law) {
  return law.valid && !law.point_mass && !is_race(p);
}

void run_races(const SampleParams& p, const ThreadPool& pool, const LawTask* tasks,
               DrawTask* draws) {
  Buffer<RaceTask> races(p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    races[b] = RaceTask{tasks[b], race_of(p.randomness, b, p.draft_index), needs_draw(draws[b])};
  }
  run_races(pool, races.data(), p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    if (races[b].active) draws[b].token = races[b].winner;
  }
}

// `entry` is -1 where nothing could be drawn.
void write_sample(const SampleParams& p, int64_t b, const LawRow& law, int64_t entry) {
  p.tokens[b] = entry < 0 ? -1 : token_of_entry(law.row, entry);
  p.logprobs[b] =
      entry < 0 ? NAN : static_cast<float>(law_log_probability(law.law, row_value(law.row, entry)));
}

}  // namespace

void sample(const SampleParams& given, const ThreadPool& pool) {
  SampleParams p = given;
  const MapStorage storage(&p.map, false);
  Buffer<LawTask> tasks(p.batch);
  Buffer<DrawTask> draws(p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Filters filters = filters_at(p.sampling, b, p.logits.vocab);
    tasks[b] = LawTask(logits_row(p, b), filters);
  }
  compute_laws(pool, tasks.data(), p.batch);
  for (int64_t b = 0; b < p.batch; ++b) {
    const LawTask& task = tasks[b];
    bool out_of_range = task.filters.out_of_range;
    draws[b] = DrawTask{};
    draws[b].target = task.row;
    draws[b].target_law = task.law;
    if (needs_uniform(p, task.law)) draws[b].u = uniform_of(p, b, &out_of_range);
    draws[b].active = task.law.valid && !out_of_range;
  }
  if (is_race(p)) run_races(p, pool, tasks.data(), draws.data());
  draw_tokens(pool, draws.data(), p.batch);
  for (int64_t b = 0; b < p.batch; ++b) write_sample(p, b, tasks[b], draws[b].token);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
