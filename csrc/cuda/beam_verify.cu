// beam_verify: levels of beam search by the target, as far as the rows of a tree decide them.
//
// Launches: a block a request to begin; scan_rows (scan.cuh) over the rows that a beam can
// reach; then one for each level, with a block for each live beam, which chooses its offers, and of
// which the last one of a request decides the level. A request that is over costs two loads a
// block. Reads 2 or 4 bytes per vocabulary entry, once, and of a live beam's row the groups of 128
// entries that can hold its best once more; writes 4 bytes a group and 48 a beam of a level.
// Numerics: log z by law_pass.cuh; scores in float32, operation by operation those of core/beam.h.
#include "../core/beam.h"
#include "kernels.h"
#include "row_laws.cuh"
#include "shared.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- offers as numbers ---

// 0: no offer. Otherwise the higher one goes before (core/beam.h): the bits of the score in the
// order of integers, then, complemented, the place and the token.
using Key = uint64_t;

constexpr int kTokenBits = 26;
static_assert(kMaxVocab < int64_t{1} << kTokenBits, "a token is a part of an offer's key");
static_assert(kMaxBeams <= int64_t{1} << (32 - kTokenBits), "place and token share 32 bits");

__device__ __forceinline__ Key key_of(const Offer& offer) {
  if (!(offer.score > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(offer.score + 0.0f);  // -0 and 0 are one score
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  const uint32_t index = static_cast<uint32_t>(offer.place << kTokenBits | offer.token);
  return static_cast<Key>(ordered) << 32 | static_cast<uint32_t>(~index);
}

__device__ __forceinline__ Offer offer_of(Key key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered;
  const uint32_t index = ~static_cast<uint32_t>(key);
  return {__uint_as_float(bits), index >> kTokenBits, index & ((1u << kTokenBits) - 1)};
}

// The `wanted` highest of the keys that visit(see) shows to see(key), in order, then 0. Collective
// over the block; out may be in shared memory, and is visible after a barrier.
template <typename Visit>
__device__ __forceinline__ void take_best(const Visit& visit, int64_t wanted, Key* out) {
  Key last = ~Key{0};
  for (int64_t rank = 0; rank < wanted; ++rank) {
    Key best = 0;
    if (last != 0) {
      visit([&](Key key) {
        if (key < last && key > best) best = key;
      });
      best = block_max(best);
    }
    if (threadIdx.x == 0) out[rank] = best;
    last = best;
  }
}

// ---- what lasts from level to level ---

struct Search {
  Beam* beams;         // [B, W]; those of a request that is over are not live
  uint32_t* has_law;   // [B, W], of the beams whose rows are known
  Key* live;           // [B, W, W]: each beam's best offers that do not end
  Key* ends;           // [B, W, E]: those that do
  uint32_t* counters;  // [B], 0 between the launches
};

// What is looked for in a row is what a top-p looks for: the sum over all of it, and maxima of its
// groups, of which the largest hold the best offers.
__device__ __forceinline__ Filters scan_filters() {
  Filters filters;
  filters.top_p = 0.5;
  return filters;
}

struct Rows {
  BeamVerifyParams p;

  __device__ RowTask operator()(int64_t r) const {
    const int64_t b = r / p.nodes, node = r % p.nodes;
    return {is_reached(b, node) ? row_at(p.target, b, node) : Row{}, scan_filters(), {}};
  }
  // Whether there may be a beam; where there is none the row is not read.
  __device__ bool is_reached(int64_t b, int64_t node) const {
    if (node >= p.width) return load_id(p.parents, b, node) >= 0;
    const float score = p.scores.data[b * p.scores.stride[0] + node * p.scores.stride[1]];
    return score > -INFINITY && score < INFINITY;
  }
};

// ---- begin ---

__device__ void clear_outputs(const BeamVerifyParams& p, int64_t b) {
  const int64_t size = p.levels * p.width;
  for (int64_t i = b * size + threadIdx.x; i < (b + 1) * size; i += kThreads) {
    p.out_tokens[i] = p.out_parents[i] = p.out_nodes[i] = -1;
    p.finished_tokens[i] = p.finished_parents[i] = -1;
    p.out_scores[i] = p.finished_scores[i] = -INFINITY;
  }
}

// Grid: requests.
__global__ void __launch_bounds__(kThreads) begin_search(const BeamVerifyParams p, const Search s) {
  begin_kernel();
  const int64_t b = blockIdx.x;
  clear_outputs(p, b);
  int32_t bits = 0;
  for (int64_t v = threadIdx.x; v < p.nodes; v += kThreads) bits |= beam_node_status(p, b, v);
  bool out_of_range = false;
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads) {
    const float score = p.scores.data[b * p.scores.stride[0] + i * p.scores.stride[1]];
    const bool usable = score < INFINITY;
    out_of_range |= !usable;
    s.beams[b * p.width + i] = Beam{usable ? score : -INFINITY, i};
  }
  const bool illegal = block_any((bits & kInvalidTree) != 0);
  const bool unknown = block_any((bits & kInvalidDraftToken) != 0);
  out_of_range = block_any(out_of_range);
  if (threadIdx.x != 0) return;
  p.num_levels[b] = 0;
  p.status[b] = (illegal   ? kInvalidTree
                 : unknown ? kInvalidDraftToken
                           : 0) |
                (out_of_range ? kParameterOutOfRange : 0);
  s.counters[b] = 0;
}

// ---- a beam's offers ---

// A beam whose row is known.
struct Task {
  Row row;
  LogSoftmax law;
  float score;
  int64_t place;
};

__device__ __forceinline__ Key key_at(const Task& task, int64_t token) {
  const float logit = row_value(task.row, token);
  return key_of({offer_score(task.law, logit, task.score), task.place, token});
}

constexpr int kMaxListed = 512;  // offers of one beam that are kept at hand

struct OfferMemory {
  CutoffMemory cutoff;
  Key listed[kMaxListed];
  int32_t count;
};

// Shows see(key) every offer that does not end and whose logit is not below `lowest`. A warp a
// group.
template <typename See>
__device__ __forceinline__ void visit_offers(const BeamVerifyParams& p, const Task& task,
                                             const float* group_max, float lowest, const See& see) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t groups = num_groups(task.row.vocab);
  for (int64_t base = threadIdx.x / kWarp * kWarp; base < groups; base += kThreads) {
    const bool wanted = base + lane < groups && group_max[base + lane] >= lowest;
    for (uint32_t left = __ballot_sync(kAllLanes, wanted); left != 0; left &= left - 1) {
      const int64_t first = (base + __ffs(static_cast<int>(left)) - 1) * kGroup;
      for (int64_t token = first + lane; token < first + kGroup; token += kWarp) {
        if (token >= task.row.vocab || !(row_value(task.row, token) >= lowest)) continue;
        const Key key = key_at(task, token);
        if (key != 0 && !is_eos(p, token)) see(key);
      }
    }
  }
}

// The best offers that do not end. Collective over the block.
__device__ __forceinline__ void choose_live(const BeamVerifyParams& p, const Task& task,
                                            const float* group_max, float max, OfferMemory* memory,
                                            Key* out) {
  if (threadIdx.x == 0) memory->count = 0;
  // So many entries are not below the floor, and of these as many as end leave the others.
  const float floor =
      top_k_floor(&memory->cutoff, group_max, num_groups(task.row.vocab), p.width + p.num_eos, max);
  const float lowest = floor > -INFINITY ? tied_from(task.law, floor, task.score) : floor;
  visit_offers(p, task, group_max, lowest, [&](Key key) {
    const int32_t place = atomicAdd(&memory->count, 1);
    if (place < kMaxListed) memory->listed[place] = key;
  });
  __syncthreads();
  const int32_t count = memory->count;
  if (count > kMaxListed) {  // as of a flat row: they are looked at anew for every offer
    take_best([&](const auto& see) { visit_offers(p, task, group_max, lowest, see); }, p.width,
              out);
    return;
  }
  const auto visit = [&](const auto& see) {
    for (int32_t i = threadIdx.x; i < count; i += kThreads) see(memory->listed[i]);
  };
  take_best(visit, p.width, out);
}

// Collective over the block.
__device__ __forceinline__ void choose_offers(const BeamVerifyParams& p, const LawScratch& laws,
                                              const Search& s, int64_t b, int64_t place,
                                              OfferMemory* memory) {
  const Beam beam = s.beams[b * p.width + place];
  const int64_t at = b * p.width + place;
  const bool known = is_live(beam) && !is_missing(beam);
  RowLaw law;
  if (known) {
    const int64_t r = b * p.nodes + beam.node;
    double unused = 0.0;
    law = combine_tiles(row_at(p.target, b, beam.node), scan_filters(), false, ExtraTask{},
                        laws.summaries + r * laws.tiles, &unused);
    if (threadIdx.x == 0) s.has_law[at] = law.valid;
  }
  if (!law.valid) {
    for (int64_t i = threadIdx.x; i < p.width; i += kThreads) s.live[at * p.width + i] = 0;
    for (int64_t j = threadIdx.x; j < p.num_eos; j += kThreads) s.ends[at * p.num_eos + j] = 0;
    return;
  }
  Task task{row_at(p.target, b, beam.node), {}, beam.score, place};
  if (!p.log_probs) task.law = {law.max, static_cast<float>(log(law.z))};
  choose_live(p, task, group_max_of(laws, b * p.nodes + beam.node), law.max, memory,
              s.live + at * p.width);
  for (int64_t j = threadIdx.x; j < p.num_eos; j += kThreads) {
    s.ends[at * p.num_eos + j] = is_first_eos(p, j) ? key_at(task, load_id(p.eos, j, 0)) : 0;
  }
}

// ---- a level ---

struct LevelMemory {
  Key live[kMaxBeams];
  Key ends[kMaxBeams];
  SharedArray<Beam, kMaxBeams> after;
};

// Writes what a decided level leaves; ranks over the threads.
__device__ __forceinline__ void write_level(const BeamVerifyParams& p, const Search& s, int64_t b,
                                            int64_t level, LevelMemory* memory) {
  const int64_t at = (b * p.levels + level) * p.width;
  Beam* beams = s.beams + b * p.width;
  const bool in_tree = (p.status[b] & kInvalidTree) == 0;
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads) {
    Beam after{-INFINITY, kMissing};
    if (memory->live[i] != 0) {
      const Offer offer = offer_of(memory->live[i]);
      const int64_t from = beams[offer.place].node;
      after = {offer.score, in_tree ? child_of(p, b, from, offer.token) : kMissing};
      p.out_tokens[at + i] = offer.token;
      p.out_parents[at + i] = offer.place;
      p.out_nodes[at + i] = after.node;
      p.out_scores[at + i] = offer.score;
    }
    memory->after[static_cast<int>(i)] = after;
    int64_t before = i;
    for (int64_t j = 0; j < p.width; ++j) before += memory->live[j] > memory->ends[i];
    if (memory->ends[i] == 0 || before >= p.width) continue;
    const Offer end = offer_of(memory->ends[i]);
    p.finished_tokens[at + i] = end.token;
    p.finished_parents[at + i] = end.place;
    p.finished_scores[at + i] = end.score;
  }
  __syncthreads();  // the beams before have been read
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads) {
    beams[i] = memory->after[static_cast<int>(i)];
  }
  if (threadIdx.x == 0) p.num_levels[b] = static_cast<int32_t>(level + 1);
}

// Collective over the block that came last.
__device__ __forceinline__ void decide_level(const BeamVerifyParams& p, const Search& s, int64_t b,
                                             int64_t level, LevelMemory* memory) {
  Beam* beams = s.beams + b * p.width;
  bool lawless = false;
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads) {
    const bool known = is_live(beams[i]) && !is_missing(beams[i]);
    lawless |= known && s.has_law[b * p.width + i] == 0;
  }
  lawless = block_any(lawless);
  const auto best_of = [&](const Key* keys, int64_t count, Key* out) {
    const auto visit = [&](const auto& see) {
      for (int64_t i = threadIdx.x; i < count; i += kThreads) see(keys[i]);
    };
    take_best(visit, p.width, out);
  };
  if (!lawless) {
    best_of(s.live + b * p.width * p.width, p.width * p.width, memory->live);
    best_of(s.ends + b * p.width * p.num_eos, p.width * p.num_eos, memory->ends);
  }
  const float missing = best_missing(beams, p.width);
  __syncthreads();  // all have read the beams, and what is best has been found
  const Key worst = lawless ? 0 : memory->live[p.width - 1];
  const bool decided =
      !lawless && (missing == -INFINITY || (worst != 0 && offer_of(worst).score > missing));
  if (decided) {
    write_level(p, s, b, level, memory);
    return;
  }
  for (int64_t i = threadIdx.x; i < p.width; i += kThreads) beams[i] = Beam{-INFINITY, kMissing};
  if (lawless && threadIdx.x == 0) p.status[b] |= kNoTargetLaw;
}

// Grid: (request, place).
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    search_level(const BeamVerifyParams p, const LawScratch laws, const Search s, int64_t level) {
  begin_kernel();
  __shared__ SharedArray<OfferMemory, 1> offers;
  __shared__ SharedArray<LevelMemory, 1> decision;
  const auto [b, place] = this_unit(p.width);
  if (!may_decide(p, s.beams + b * p.width)) return;  // all blocks of the request find the same
  choose_offers(p, laws, s, b, place, offers.data());
  if (!is_last_block(s.counters + b, p.width)) return;
  decide_level(p, s, b, level, decision.data());
}

}  // namespace

void beam_verify(const BeamVerifyParams& p, const Gpu& gpu) {
  if (p.batch == 0) return;
  Workspace workspace;
  const int64_t rows = p.batch * p.nodes, beams = p.batch * p.width;
  const int64_t tiles = num_tiles(p.target.vocab);
  const LawReservation reserved = reserve_laws(&workspace, rows, tiles, {true});
  const auto live_beams = workspace.reserve<Beam>(beams);
  const auto has_law = workspace.reserve<uint32_t>(beams);
  const auto live = workspace.reserve<Key>(beams * p.width);
  const auto ends = workspace.reserve<Key>(beams * p.num_eos);
  const auto counters = workspace.reserve<uint32_t>(p.batch);
  workspace.allocate(gpu);
  const LawScratch laws = laws_at(workspace, reserved, rows, tiles, {true});
  const Search s{workspace.at(live_beams), workspace.at(has_law), workspace.at(live),
                 workspace.at(ends), workspace.at(counters)};
  launch(gpu, "begin_search", begin_search, p.batch, p, s);
  launch(gpu, "scan_rows", scan_rows<Rows, false>,
         blocks_to_scan(gpu, rows * tiles, scan_blocks(false)), Rows{p}, laws, false);
  for (int64_t level = 0; level < p.levels; ++level) {
    launch(gpu, "search_level", search_level, beams, p, laws, s, level);
  }
}

void load_beam_verify(Loading& load) { load(begin_search, scan_rows<Rows, false>, search_level); }

}  // namespace cuda
}  // namespace specdec
