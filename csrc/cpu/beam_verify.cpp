// beam_verify: levels of beam search by the target, as far as the rows of a tree decide them.
//
// Grid, level by level: runs of a live beam's tiles over threads for the pass over the vocabulary,
// beams over threads for the choice of their offers; one thread decides for all requests.
// Only rows of live beams are read: 2 or 4 bytes per vocabulary entry, once from memory, and again
// the few groups of 128 entries that hold the best. Writes 48 bytes for each beam of a level.
// Numerics: fp32 exponentials against the tile's maximum, or an entry near it, combined in tile
// order in float64; scores in float32, operation by operation those of core/beam.h.
#include "../core/beam.h"
#include "kernels.h"
#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

constexpr int64_t kTilesOfUnit = 4;
constexpr int64_t kUnitsPerThread = 4;  // below this, a thread is not worth waking
constexpr int64_t kGroupsOfTile = kTile / kGroup;

// How many groups' maxima are ranked; where more are wanted, every entry is looked at.
constexpr int64_t kMaxRank = 2 * kMaxBeams;

// How far a tile's maximum may lie above the reference of its sum: weights of up to 2^8 are off by
// 3e-7 at most, relatively.
constexpr float kMaxBeamLead = static_cast<float>(kMaxLead / 2);

// A known beam whose offers are wanted.
struct Task {
  int64_t place;
  float score;
  bool has_law;
  Row row;
  LogSoftmax law;
  int64_t num_offers;
};

// What a request needs from level to level.
struct Search {
  Beam* beams;  // [W]
  int64_t first_task;
  int64_t num_tasks;
  bool over;
};

struct Scratch {
  Buffer<Search> searches;
  Buffer<Beam> beams;
  Buffer<Task> tasks;
  Buffer<Offer> offers;  // of each task, that do not end: [W]
  Buffer<TileSweep> summaries;
  Buffer<float> group_max;

  Scratch(const BeamVerifyParams& p, int64_t tiles)
      : searches(p.batch),
        beams(p.batch * p.width),
        tasks(p.batch * p.width),
        offers(p.batch * p.width * p.width),
        summaries(p.batch * p.width * tiles),
        group_max(p.batch * p.width * tiles * kGroupsOfTile) {}
};

// ---- rows ---

template <typename Entries>
TileSweep scan_entries(const Entries& entries, int64_t groups, bool log_probs, float* group_max) {
  TileSweep s;
  if (!log_probs && sweep_tile(entries, groups, 1.0, group_max, &s) &&
      s.max - s.reference <= kMaxBeamLead) {
    return s;
  }
  s.sum = 0.0;
  s.valid = tile_max(entries, groups, &s.max, group_max);
  s.reference = s.max;
  if (!log_probs && s.valid && s.max > -INFINITY) {
    const float threshold = support_threshold(-INFINITY, s.max, 1.0);
    s.sum = tile_weight_sum(entries, groups, ExpWeight(s.max, 1.0, threshold));
  }
  return s;
}

TileSweep scan_tile(const Row& row, int64_t tile, bool log_probs, float* group_max) {
  return with_entries(row, tile, [&](const auto& entries, int64_t groups) {
    return scan_entries(entries, groups, log_probs, group_max);
  });
}

void combine_tiles(Task* task, const TileSweep* tiles, int64_t n, bool log_probs) {
  bool valid = true;
  float max = -INFINITY;
  for (int64_t t = 0; t < n; ++t) {
    valid &= tiles[t].valid;
    max = tiles[t].max > max ? tiles[t].max : max;
  }
  task->has_law = valid && max > -INFINITY;
  task->law = LogSoftmax{};
  if (!task->has_law || log_probs) return;
  double z = 0.0;
  for (int64_t t = 0; t < n; ++t) {
    if (tiles[t].sum > 0.0) z += tiles[t].sum * exp(static_cast<double>(tiles[t].reference) - max);
  }
  task->law.max = max;
  task->law.log_z = static_cast<float>(log(z));
}

// ---- offers ---

// The lowest of the `rank` highest maxima of groups: so many entries at least are not below it.
float highest_floor(const float* group_max, int64_t groups, int64_t rank) {
  if (rank > kMaxRank || rank > groups) return -INFINITY;
  float best[kMaxRank] = {};
  int64_t count = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const float value = group_max[g];
    if (count == rank && !(value > best[rank - 1])) continue;
    int64_t i = count < rank ? count++ : rank - 1;
    for (; i > 0 && value > best[i - 1]; --i) best[i] = best[i - 1];
    best[i] = value;
  }
  return best[rank - 1];
}

// The entries of a group of a row, which has neither mask nor list here.
const float* view_group(const Row& row, int64_t begin, int64_t n, float* buffer) {
  if (row.element == Element::kFloat32) return static_cast<const float*>(row.data) + begin;
  const uint16_t* source = static_cast<const uint16_t*>(row.data) + begin;
  if (row.element == Element::kBFloat16) {
    widen_tile<widen_bfloat16>(source, n, buffer);
  } else {
    widen_tile<widen_float16>(source, n, buffer);
  }
  return buffer;
}

// The best offers of a beam that do not end.
void choose_offers(const BeamVerifyParams& p, const float* group_max, Task* task, Offer* offers) {
  const int64_t vocab = task->row.vocab, groups = num_groups(vocab);
  const float floor = highest_floor(group_max, groups, p.width + p.num_eos);
  const float lowest = floor > -INFINITY ? tied_from(task->law, floor, task->score) : floor;
  OfferList best{offers, p.width};
  for (int64_t g = 0; g < groups; ++g) {
    if (group_max[g] < lowest) continue;
    const int64_t begin = g * kGroup, n = vocab - begin < kGroup ? vocab - begin : kGroup;
    float buffer[kGroup];
    const float* logits = view_group(task->row, begin, n, buffer);
    for (int64_t i = 0; i < n; ++i) {
      if (!(logits[i] >= lowest)) continue;
      const Offer offer{offer_score(task->law, logits[i], task->score), task->place, begin + i};
      if (offer.score > -INFINITY && best.takes(offer) && !is_eos(p, offer.token)) best.add(offer);
    }
  }
  task->num_offers = best.count;
}

void add_ends(const BeamVerifyParams& p, const Task& task, OfferList* ends) {
  for (int64_t j = 0; j < p.num_eos; ++j) {
    if (!is_first_eos(p, j)) continue;
    const int64_t token = load_id(p.eos, j, 0);
    const float score = offer_score(task.law, row_value(task.row, token), task.score);
    if (score > -INFINITY) ends->add({score, task.place, token});
  }
}

// ---- levels ---

// A request's known beams become tasks, if there is a level to decide; returns how many.
int64_t add_tasks(const BeamVerifyParams& p, int64_t b, int64_t num_tasks, Scratch* scratch) {
  Search& search = scratch->searches[b];
  search.first_task = num_tasks;
  search.num_tasks = 0;
  search.over = search.over || !may_decide(p, search.beams);
  if (search.over) return 0;
  for (int64_t i = 0; i < p.width; ++i) {
    const Beam& beam = search.beams[i];
    if (!is_live(beam) || is_missing(beam)) continue;
    Task& task = scratch->tasks[num_tasks + search.num_tasks++];
    task = Task{i, beam.score, false, row_at(p.target, b, beam.node), {}, 0};
  }
  return search.num_tasks;
}

int64_t begin_level(const BeamVerifyParams& p, Scratch* scratch) {
  int64_t num_tasks = 0;
  for (int64_t b = 0; b < p.batch; ++b) num_tasks += add_tasks(p, b, num_tasks, scratch);
  return num_tasks;
}

int64_t units_of(int64_t tiles) { return (tiles + kTilesOfUnit - 1) / kTilesOfUnit; }

// Tiles of all tasks, in a row.
void scan_unit(const BeamVerifyParams& p, int64_t unit, int64_t num_tasks, Scratch* scratch) {
  const int64_t tiles = num_tiles(p.target.vocab), begin = unit * kTilesOfUnit;
  for (int64_t i = begin; i < begin + kTilesOfUnit && i < num_tasks * tiles; ++i) {
    scratch->summaries[i] = scan_tile(scratch->tasks[i / tiles].row, i % tiles, p.log_probs,
                                      &scratch->group_max[i * kGroupsOfTile]);
  }
}

void choose_best(const BeamVerifyParams& p, int64_t i, Scratch* scratch) {
  const int64_t tiles = num_tiles(p.target.vocab);
  Task* task = &scratch->tasks[i];
  combine_tiles(task, &scratch->summaries[i * tiles], tiles, p.log_probs);
  if (!task->has_law) return;
  choose_offers(p, &scratch->group_max[i * tiles * kGroupsOfTile], task,
                &scratch->offers[i * p.width]);
}

void write_level(const BeamVerifyParams& p, int64_t b, int64_t level, const OfferList& live,
                 const OfferList& ends, Beam* beams) {
  const int64_t at = (b * p.levels + level) * p.width;
  const bool in_tree = (p.status[b] & kInvalidTree) == 0;
  Beam after[kMaxBeams];
  for (int64_t i = 0; i < p.width; ++i) after[i] = Beam{-INFINITY, kMissing};
  for (int64_t i = 0; i < live.count; ++i) {
    const Offer& offer = live.offers[i];
    const int64_t from = beams[offer.place].node;
    after[i] = {offer.score, in_tree ? child_of(p, b, from, offer.token) : kMissing};
    p.out_tokens[at + i] = offer.token;
    p.out_parents[at + i] = offer.place;
    p.out_nodes[at + i] = after[i].node;
    p.out_scores[at + i] = offer.score;
  }
  const int64_t finished = count_finished(live, ends, p.width);
  for (int64_t i = 0; i < finished; ++i) {
    p.finished_tokens[at + i] = ends.offers[i].token;
    p.finished_parents[at + i] = ends.offers[i].place;
    p.finished_scores[at + i] = ends.offers[i].score;
  }
  for (int64_t i = 0; i < p.width; ++i) beams[i] = after[i];
  p.num_levels[b] = static_cast<int32_t>(level + 1);
}

void decide_request(const BeamVerifyParams& p, int64_t b, int64_t level, Scratch* scratch) {
  Search& search = scratch->searches[b];
  if (search.over) return;
  Offer live_offers[kMaxBeams], end_offers[kMaxBeams];
  OfferList live{live_offers, p.width}, ends{end_offers, p.width};
  for (int64_t i = search.first_task; i < search.first_task + search.num_tasks; ++i) {
    const Task& task = scratch->tasks[i];
    if (!task.has_law) {
      p.status[b] |= kNoTargetLaw;
      search.over = true;
      return;
    }
    const Offer* offers = &scratch->offers[i * p.width];
    for (int64_t k = 0; k < task.num_offers && live.add(offers[k]); ++k) continue;
    add_ends(p, task, &ends);
  }
  search.over = !is_decided(live, best_missing(search.beams, p.width));
  if (!search.over) write_level(p, b, level, live, ends, search.beams);
}

void decide_level(const BeamVerifyParams& p, int64_t level, Scratch* scratch) {
  for (int64_t b = 0; b < p.batch; ++b) decide_request(p, b, level, scratch);
}

// ---- requests ---

void clear_outputs(const BeamVerifyParams& p) {
  for (int64_t i = 0; i < p.batch * p.levels * p.width; ++i) {
    p.out_tokens[i] = p.out_parents[i] = p.out_nodes[i] = -1;
    p.finished_tokens[i] = p.finished_parents[i] = -1;
    p.out_scores[i] = p.finished_scores[i] = -INFINITY;
  }
}

int32_t tree_status(const BeamVerifyParams& p, int64_t b) {
  int32_t status = 0;
  for (int64_t v = 0; v < p.nodes; ++v) status |= beam_node_status(p, b, v);
  return status & kInvalidTree ? kInvalidTree : status;
}

void begin_request(const BeamVerifyParams& p, int64_t b, Scratch* scratch) {
  p.num_levels[b] = 0;
  p.status[b] = tree_status(p, b);
  scratch->searches[b] = Search{&scratch->beams[b * p.width], 0, 0, false};
  for (int64_t i = 0; i < p.width; ++i) {
    float score = p.scores.data[b * p.scores.stride[0] + i * p.scores.stride[1]];
    if (!(score < INFINITY)) {
      p.status[b] |= kParameterOutOfRange;
      score = -INFINITY;
    }
    scratch->searches[b].beams[i] = Beam{score, i};
  }
}

}  // namespace

void beam_verify(const BeamVerifyParams& p, const ThreadPool& pool) {
  const int64_t tiles = num_tiles(p.target.vocab);
  Scratch scratch(p, tiles);
  clear_outputs(p);
  for (int64_t b = 0; b < p.batch; ++b) begin_request(p, b, &scratch);

  // Each level has two stages: rows are scanned, then offers chosen.
  int64_t level = 0, num_tasks = 0;
  bool scanning = false;
  const auto next = [&]() -> int64_t {
    scanning = !scanning;
    if (!scanning) return num_tasks;
    if (num_tasks > 0) decide_level(p, level++, &scratch);
    num_tasks = level < p.levels ? begin_level(p, &scratch) : 0;
    return units_of(num_tasks * tiles);
  };
  run_stages(pool, units_of(p.batch * p.width * tiles) / kUnitsPerThread, next, [&](int64_t i) {
    scanning ? scan_unit(p, i, num_tasks, &scratch) : choose_best(p, i, &scratch);
  });
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
