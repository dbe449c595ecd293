// The nodes of a chain that a block decides: node i is the law after i draft tokens.
//
// Before the launch that found the laws has ended, threads read what the call was given: draft
// token, its logits, coin. Then half a warp finds a row's law, which gives the token's probability.
// Nodes are taken 32 at once. Where the others have nothing else to do, every warp goes down the
// chain by itself, because that takes less time than to be told.
//
// Reads 32 bytes a tile and row, or a row's law where cutoffs were found. Numerics: core/chain.h.
// Included by verify.cu alone, through decide_alone.cuh and decide_block.cuh.
#pragma once

#include "chain.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// What a decision reads of the draft beside its tokens.
enum class Reads {
  kTokens,  // nothing: they are deterministic
  kLaws,    // its law where they are sampled
  kTarget,  // nothing: the rule tests them by the target's law alone
};

// Where the last token falls in a row of which nothing is read but what the scan has left.
struct TilePlace {
  int64_t tile;
  int64_t excluded;  // the token that is left out; -1: none
  double part;       // of the tile's mass, up to the token
  float max;         // the tile's largest logit
};

struct ChainNode {
  LawRow target;
  LawRow draft;   // of a sampled token
  int64_t token;  // of the draft, after the node; -1: none
  int64_t entry;  // the token's in the draft's row; -1: none
  double coin;    // that tests the token or, in the block rule, the node
  double p;       // of the token
  double q;
  double extra;     // what the rule asked for besides (extra_task), but for races
  int64_t winner;   // of the race; -1: there was none
  TilePlace place;  // if the last token is drawn at the node, by tiles (draw_at_once.cuh)
  float logit;      // of the token
  float draft_logit;
  bool known;    // the target has the token
  bool sampled;  // NodeFacts; until laws are known, whether the draft's is asked for
  bool usable;   // NodeFacts
  bool ends;     // NodeFacts
};

struct ChainNodes : SharedArray<ChainNode, kNodesAtOnce> {
  TilePlace place;  // of the node where the last token is drawn, once that one is forgotten
};

// The lowest lane in a ballot, kWarp if there is none.
__device__ int lowest_lane(unsigned ballot) { return ballot != 0 ? __ffs(ballot) - 1 : kWarp; }

// Whether nothing but the want of the draft's law ends the way down at a node. Where the target's
// is missing as well, that one is reported.
__device__ __forceinline__ bool lacks_draft_law(const ChainNode& node) {
  return !node.ends && !node.usable;
}

// A thread with time left: nodes are the first warps' first.
__device__ __forceinline__ bool is_clerk() { return threadIdx.x == kThreads - kWarp; }
__device__ __forceinline__ bool is_in_clerks_warp() { return threadIdx.x >= kThreads - kWarp; }

// ---- what the call was given ---

// What the call says of a node and its target row, or, `of_draft`, of the node's draft row: threads
// do the same for both, so that they wait for memory together.
template <Reads kReads>
__device__ __forceinline__ void look_at_given(const VerifyParams& p, const Request& r, int64_t i,
                                              bool of_draft, ChainNode* node) {
  const bool drafted = i < r.drafted;
  const bool sampled = of_draft && wants_draft_row(p, r, i);
  const Column column = drafted ? column_at(p, r.b, i) : Column{-1, false};
  Row row;
  if (!of_draft) row = target_row(p, r.b, i);
  if (sampled) row = draft_row(p, r.b, i);
  const bool holds = drafted && row.data != nullptr;
  const int64_t entry = holds ? entry_of_token(row, column.token) : -1;
  const float logit = entry >= 0 ? row_value(row, entry) : 0.0f;
  if (of_draft) {
    node->draft.row = row;
    node->sampled = sampled;
    node->entry = entry;
    node->draft_logit = logit;
    return;
  }
  node->target.row = row;
  node->token = column.token;
  node->known = entry >= 0;
  node->logit = logit;
  node->usable =
      kReads != Reads::kTokens || !drafted || r.greedy || proposal_of(column, LawRow{}).usable;
  if constexpr (kReads != Reads::kLaws) node->sampled = false;
  if constexpr (kReads == Reads::kTarget) return;
  node->q = 1.0;
  const bool block_rule = p.rule == Rule::kBlock;
  const bool flips = block_rule ? i > 0 : drafted;
  if (flips && !r.greedy) node->coin = uniform_at(p, r.b, block_rule ? i - 1 : i);
}

// Nodes [base, base + count) as far as the call says. Collective over the block.
template <Reads kReads>
__device__ __forceinline__ void open_nodes(const VerifyParams& p, const Request& r, int64_t base,
                                           int32_t count, ChainNodes* nodes) {
  const int32_t rows = kReads == Reads::kLaws ? 2 * count : count;
#pragma unroll 1
  for (int32_t k = static_cast<int32_t>(threadIdx.x); k < rows; k += kThreads) {
    const bool of_draft = kReads == Reads::kLaws && k >= count;
    const int32_t node = of_draft ? k - count : k;
    look_at_given<kReads>(p, r, base + node, of_draft, nodes->data() + node);
  }
  __syncthreads();
}

// ---- what earlier launches have found ---

// The law of a row, and what its rule asked for besides; none where the row is absent. By a full
// warp, whose halves may have a row each.
__device__ __forceinline__ RowLaw find_law(const Scratch& s, const Row& row, int64_t slot,
                                           const Filters& filters, const ExtraTask& task,
                                           double* extra) {
  if (!s.finished) {
    return combine_tiles(row, filters, false, task, s.summaries + slot * s.tiles, extra);
  }
  *extra = row.data != nullptr ? s.extras[slot] : 0.0;
  return row.data != nullptr ? s.laws[slot] : RowLaw{};
}

// What the law of a node's target row says, or, `of_draft`, that of its draft row: proposal_of. By
// half a warp, one code for both, because instructions are waited for; where it is not `there`, it
// only keeps the other half company.
template <Reads kReads>
__device__ __forceinline__ void find_law_of(const VerifyParams& p, const Scratch& s,
                                            const Request& r, int64_t i, bool of_draft, bool there,
                                            ChainNode* node) {
  const int64_t slot = r.b * s.rows + (of_draft ? p.gamma + 1 : 0) + i;
  there = there && (!of_draft || node->sampled);
  const Row row = !there ? Row{} : of_draft ? node->draft.row : node->target.row;
  ExtraTask task;
  if constexpr (kReads == Reads::kTarget) {
    if (row.data != nullptr) task = extra_task(p, r, i, row);
  }
  double extra = 0.0;
  const RowLaw law =
      find_law(s, row, slot, of_draft ? r.draft_filters : r.target_filters, task, &extra);
  const bool known = of_draft ? node->entry >= 0 : i < r.drafted && node->known;
  const bool tells = law.valid && known;
  const double probability = tells
                                 ? law_probability(law, of_draft ? node->draft_logit : node->logit,
                                                   of_draft ? node->entry : node->token)
                                 : 0.0;
  __syncwarp();  // all lanes have read whether it is sampled
  if (!there || threadIdx.x % kLawLanes != 0) return;
  if (of_draft) {
    node->draft.law = law;
    node->q = probability;
    node->usable = probability > 0.0;
    node->sampled = !tells || !law.point_mass;
    return;
  }
  node->target.law = law;
  node->p = probability;
  node->ends = i >= r.drafted || !law.valid;
  if constexpr (kReads == Reads::kTarget) {
    const bool raced = s.races && !r.greedy && law.valid;
    node->winner = raced ? static_cast<int64_t>(s.extras[slot]) : -1;
    node->extra = extra;
  }
}

// What the laws say of nodes [base, base + count), half a warp a row. Collective over the block,
// whose threads meet at the end.
template <Reads kReads>
__device__ __forceinline__ void find_laws_of(const VerifyParams& p, const Scratch& s,
                                             const Request& r, int64_t base, int32_t count,
                                             ChainNodes* nodes) {
  const int32_t rows = kReads == Reads::kLaws ? 2 * count : count;
  const int32_t half = static_cast<int32_t>(threadIdx.x) / kLawLanes;
#pragma unroll 1
  for (int32_t first = half & ~1; first < rows; first += kThreads / kLawLanes) {
    const int32_t mine = first + half % 2;
    const int32_t k = mine < rows ? mine : first;
    const bool of_draft = kReads == Reads::kLaws && k >= count;
    const int32_t node = of_draft ? k - count : k;
    find_law_of<kReads>(p, s, r, base + node, of_draft, mine < rows, nodes->data() + node);
  }
  __syncthreads();
}

// Writes the log-probabilities of the draft tokens after the first `count` nodes from `base` on.
__device__ __forceinline__ void report_log_probabilities(const VerifyParams& p, const Request& r,
                                                         int64_t base, int32_t count,
                                                         ChainNodes* nodes) {
  if (threadIdx.x % kWarp != 0) return;
#pragma unroll 1
  for (int32_t k = threadIdx.x / kWarp; k < count; k += kWarps) {
    const ChainNode& node = (*nodes)[k];
    if (!node.known) continue;
    p.logprobs[r.b * (p.gamma + 1) + base + k] =
        static_cast<float>(law_log_probability(node.target.law, node.logit));
  }
}

// ---- the way down ---

// What every thread knows of a request on its way down.
struct Descent {
  bool decided = false;  // stepwise rules; then still on its way to report probabilities
  bool goes_on = true;   // behind these nodes
  double inflow = 1.0;   // block rule: of the next node
  int64_t accepted = 0;  // so far
  int64_t leaf = 0;      // block rule: where the draft ends or, if it goes on, the next node
  int reports = 0;       // of these nodes: the first ones report their tokens' log-probabilities
  int draws = -1;        // the one of them where the last token is drawn; -1: none
};

// By one thread: the last token is drawn at this node.
template <Reads kReads>
__device__ __forceinline__ void draw_at(const ChainNode& node, bool from_target, double inflow,
                                        int64_t i, Request* r) {
  r->accepted = i;
  if (from_target) {
    draw_from_target(r, node.target);
    if (kReads == Reads::kTarget) r->draw.token = node.winner;
    return;
  }
  const LawRow draft = node.sampled ? node.draft : LawRow{};
  draw_from_residual(r, node.target, draft, {node.token, node.sampled}, node.sampled, inflow);
}

// The rest of a decision, by the clerk's warp alone: nobody waits for those who still report. What
// is left to draw goes to another launch; nothing if it is `drawn`.
template <Reads kReads>
__device__ __forceinline__ void close_request(const VerifyParams& p, const Scratch& s, Request& r,
                                              bool drawn) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if constexpr (kReads == Reads::kLaws) {
    if (drawn && lane == 0) r.draw.active = false;
  }
  __syncwarp();  // the clerk has written
  if constexpr (kReads == Reads::kLaws) {
    constexpr int kWords = static_cast<int>(sizeof(Request) / sizeof(uint64_t));
    static_assert(sizeof(Request) % sizeof(uint64_t) == 0, "words");
    const auto* from = reinterpret_cast<const uint64_t*>(&r);
    auto* to = reinterpret_cast<uint64_t*>(&s.requests[r.b]);
#pragma unroll
    for (int i = lane; i < kWords; i += kWarp) to[i] = from[i];
  }
  write_accepted(p, r, lane, kWarp);
  if (lane != 0 || drawn) return;
  DrawTask task = r.draw;
  if (knows_token(&task)) write_extra_token(p, r.b, r.accepted, task);
}

// ---- the block rule ---

// Its way through nodes [base, base + kNodesAtOnce), by every warp for itself: sets the leaf and
// whether it goes on; gives the inflow of the lane's node.
template <Reads kReads>
__device__ __forceinline__ double flow_through(const Request& r, int64_t base,
                                               const ChainNode* nodes, Descent* d) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const bool there = base + lane <= r.drafted;
  const bool over = !there || nodes[lane].ends || !nodes[lane].usable;
  const int end = lowest_lane(__ballot_sync(kAllLanes, over));
  double mine = d->inflow;  // the inflow of the lane's node
  if constexpr (kReads == Reads::kLaws) {
#pragma unroll 1
    for (int k = 0; k < end; ++k) {
      const ChainNode& node = nodes[k];
      d->inflow = child_inflow(node_with(d->inflow), node.p, node.q, 1.0, node.sampled);
      mine = lane > k ? d->inflow : mine;
    }
  } else {
    constexpr int kApart = 8;  // tokens whose probabilities are fetched side by side
    const double p_of_lane = there ? nodes[lane].p : 0.0;
#pragma unroll 1
    for (int first = 0; first < end; first += kApart) {
      double p_of[kApart];
#pragma unroll
      for (int k = 0; k < kApart; ++k) p_of[k] = __shfl_sync(kAllLanes, p_of_lane, first + k);
#pragma unroll
      for (int k = 0; k < kApart; ++k) {
        const double next = child_inflow(node_with(d->inflow), p_of[k], 1.0, 1.0, false);
        d->inflow = first + k < end ? next : d->inflow;
        mine = lane > first + k ? d->inflow : mine;
      }
    }
  }
  const int dry = lowest_lane(__ballot_sync(kAllLanes, mine == 0.0 && lane <= end));
  const int leaf = dry < end ? dry : end;
  d->leaf = base + leaf;
  d->goes_on = leaf == kNodesAtOnce;
  return mine;
}

// Flips the coins of these nodes, by the clerk's warp, or by every warp for itself; the deepest
// node that accepts wins. `inflow` and `mass`, that of the residual where it was asked for, are of
// the lane's node.
template <Reads kReads>
__device__ __forceinline__ void flip_coins(const VerifyParams& p, Request* r, int64_t base,
                                           ChainNodes* nodes, double inflow, double mass,
                                           Descent* d) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const ChainNode& node = (*nodes)[lane];
  const int leaf = static_cast<int>(d->leaf - base);
  const int64_t i = base + lane;
  bool accepts = i == 0;
  if (i > 0 && lane <= leaf) {
    const bool sampled = kReads == Reads::kLaws && node.sampled;
    const double acceptance =
        lane == leaf ? inflow : block_acceptance(inflow, sampled, mass, node.p);
    accepts = block_accepts(*r, node.coin, acceptance);
    if (is_in_clerks_warp()) {
      p.accept_probs[r->b * p.gamma + i - 1] = static_cast<float>(acceptance);
    }
  }
  const unsigned accepting = __ballot_sync(kAllLanes, accepts);
  const int winner = 31 - __clz(static_cast<int>(accepting));
  const double inflow_there = __shfl_sync(kAllLanes, inflow, winner < 0 ? 0 : winner);
  if (winner >= 0) d->accepted = base + winner;
  if (is_clerk()) {
    const bool from_target = winner == leaf;
    if (winner >= 0) {
      draw_at<kReads>((*nodes)[winner], from_target, inflow_there, d->accepted, r);
    }
    const bool starves = !d->goes_on && d->inflow != 0.0 && lacks_draft_law((*nodes)[leaf]);
    if (starves) r->status |= kNoDraftLaw;
  }
  // If it goes on behind these nodes, one of them may be the winner all the same: end_flow.
  d->reports = d->goes_on ? leaf : winner;
  d->draws = winner;
}

// Once the leaf is known: where the inflow has run dry nothing is accepted, and what nodes after
// the winner have reported is taken back; the extra token's report may be written after that. The
// block has met since nodes that were not the last ones to be looked at have reported. Collective
// over the block.
__device__ __forceinline__ void end_flow(const VerifyParams& p, const Request& r,
                                         const Descent& d) {
  const bool takes_back = d.leaf >= kNodesAtOnce;  // else there are no such reports
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < r.drafted; i += kThreads) {
    const bool was_reported = i >= d.accepted && i < d.leaf;
    if (takes_back && was_reported) p.logprobs[r.b * (p.gamma + 1) + i] = NAN;
    if (i >= d.leaf && d.inflow == 0.0) p.accept_probs[r.b * p.gamma + i] = 0.0f;
  }
  if (takes_back) __syncthreads();
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
