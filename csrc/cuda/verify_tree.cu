// Tree verification: every node's law, then the recursion of core/tree.h over the nodes.
//
// Launches, each over all requests at once and all on the caller's stream:
//   open    a block a request: topology, and which rows are asked for (tree.cuh)
//   scan    summaries of all tiles (scan.cuh); the block that has the last one of a row finds its
//           law
//   finish  (filters) a block a row: the rows' laws, cutoffs included (cutoff.cuh)
//   race    (coupled rule) a block takes some tiles of a target row; a row's last block compares
//   visit   the recursion: teams of blocks add up residual masses (team.cuh), and each block takes
//           its request from node to node (tree_walk.cuh)
//   draw    (but for the coupled rule) integer sums of the final law; a request's last block
//           searches, unless the row's few entries are listed (shortlist.cuh)
// so 4, whatever the tree, and 5 with filters. raw_logprobs adds 2, a reduced draft vocabulary 2
// that come first (token_map.cuh), and lists of a draft's tokens 1 that comes first and 1 after
// `scan` (token_lists.cuh).
//
// A node waits at most twice for each of its children, for the law that it was drawn from and for
// the residual after it: at most 2 N - 2 sums a request, of which those that do not depend on each
// other are in one round.
//
// Reads 2 or 4 bytes per entry of each row that is asked for, again both rows of a node for each
// sum, and the final law's rows, unless filters keep few entries (shortlist.cuh); and what masks
// and reduced vocabularies cost (tile.cuh). Unlike the CPU's, stepwise rules (all but traversal)
// read the rows off their path too: waiting for a decision would leave the chip idle. Writes O(rows
// x tiles), and for trees of more than kNodesInShared nodes some 200 bytes a node and visiting
// block. Numerics: as verify.cu; sums in tile order, so that it does not matter which block does
// what, or when.
#include "kernels.h"
#include "tree_walk.cuh"
#if SPECDEC_LISTS
#include "token_lists.cuh"
#else
#include "token_map.cuh"
#endif

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- lists ---

#if SPECDEC_LISTS
// The law of row r by the last of its `splits` blocks, if no later launch finds it. Collective over
// the block.
__device__ __forceinline__ void combine_if_last(const RowTask& task, const LawScratch& s, int64_t r,
                                                const Divisor& splits) {
  if (!s.combines() || !is_last_block(s.counters + r, splits)) return;
  if (threadIdx.x >= kWarp) return;
  double unused = 0.0;
  const RowLaw law =
      combine_tiles(task.row, task.filters, false, ExtraTask{}, s.summaries + r * s.tiles, &unused);
  if (threadIdx.x == 0) s.laws[r] = law;
}

// The sums of the draft's rows, which are lists; scan_rows has left them out.
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    scan_lists(const VerifyTreeParams p, const TreeScratch s, Divisor splits) {
  begin_in_turn();
  const Unit unit = this_unit(splits);
  const auto [b, v] = place_in(unit.index, p.nodes);
  const int64_t place = b * s.rows + p.nodes + v;
  const RowTask task = TreeRows{p, s}(place);
  const Row& row = task.row;
  if (row.data == nullptr) return;
  const bool first = unit.split == 0 && threadIdx.x == 0;
  if (s.laws.tasks != nullptr && first) s.laws.tasks[place] = task;
  const Share share = share_of(num_tiles(row.vocab), unit.split, splits);
  scan_list(row, share.first, share.last, s.laws.summaries + place * s.tiles + share.first);
  combine_if_last(task, s.laws, place, splits);
}
#endif

// ---- races ---

__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    race_nodes(const VerifyTreeParams p, const TreeScratch s, Divisor splits) {
  begin_in_turn();
  __shared__ SharedArray<RaceTask, 1> task;
  const Unit unit = this_unit(splits);
  const auto [b, v] = place_in(unit.index, p.nodes);
  if (!is_reachable(s.trees[b], v)) return;
  const LawRow target = Nodes{p, s, b}.target(v);
  if (!target.law.valid || target.law.point_mass) return;
  if (threadIdx.x == 0) task[0] = {target, race_of(p.randomness, b, depth_of(p, b, v))};
  __syncthreads();
  int64_t winner = -1;
  const bool last = run_race(task[0], s.runners + unit.index * s.tiles,
                             s.laws.counters + b * s.rows + v, unit.split, splits, &winner);
  if (last && threadIdx.x == 0) s.winners[unit.index] = winner;
}

// ---- the recursion ---

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    visit_trees(const __grid_constant__ VerifyTreeParams p, const __grid_constant__ TreeScratch s) {
  let_next_launch_begin();  // the walk waits for the launch before
  __shared__ SharedArray<TreeLedger, 1> ledger;
  for_each_request(p.batch, [&](int64_t b) {
    TreeWalk walk(p, s, b, ledger.data());
    work_in_team<kElements>(s.teams, b, &walk);
  });
}

// ---- the extra token ---

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    draw_token(const VerifyTreeParams p, const TreeScratch s, Divisor splits) {
  let_next_launch_begin();
  __shared__ SharedArray<Request, 1> request;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index;
  const Share share = share_of(num_tiles(p.target.vocab), unit.split, splits);
  wait_for_launch_before();
  copy_by_block(request.data(), s.results[b]);
  const DrawTask& task = request[0].draw;
  if (!needs_draw(task)) return;
  const ListedDraw listed = draw_if_listed(s.laws.shortlist(b * s.rows + s.ends[b]), task);
  if (listed.listed) {
    if (unit.split == 0 && listed.is_mine) {
      write_tree_token(p, b, request[0].accepted, listed.drawn.token,
                       law_log_probability(task.target_law, listed.drawn.logit, listed.log_z));
    }
    return;
  }
  Drawn drawn;
  double log_z = 0.0;
  if (draw_in_shares<kElements, true>(task, s.part_sums + b * s.tiles * kWarps,
                                      s.laws.counters + b * s.rows, share, splits, &drawn,
                                      &log_z)) {
    write_tree_token(p, b, request[0].accepted, drawn.token,
                     law_log_probability(task.target_law, drawn.logit, log_z));
  }
}

// ---- raw logprobs ---

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    write_raw_logprobs(const RawRows rows, const LawScratch s) {
  begin_kernel();
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (place >= s.count) return;
  const RowTask task = rows(place);
  const RowLaw law = law_of(task, s, place);
  if (threadIdx.x % kWarp == 0 && law.valid) {
    rows.p.logprobs[place] = target_log_probability({task.row, law}, rows.p.out_tokens[place]);
  }
}

// ---- host ---

// Of a request, at a guess; one under a stepwise rule.
int64_t sums_at_once(const VerifyTreeParams& p) { return p.rule == Rule::kTraversal ? 4 : 1; }

// One a request, or teams where masses may be asked for.
int64_t visiting_blocks(const Gpu& gpu, const VerifyTreeParams& p, const Teams& teams) {
  return teams.sums == 0 ? p.batch : team_blocks(gpu, teams, sums_at_once(p));
}

struct TreeReservation {
  Reserved<int32_t> links;
  Reserved<int64_t> tokens;
  Reserved<double> numbers;
  Reserved<float> log_p;
};

// Memory of trees that have so many nodes together.
TreeReservation reserve_memory(Workspace* workspace, int64_t nodes) {
  return {workspace->reserve<int32_t>(TreeMemory::kLinks * nodes),
          workspace->reserve<int64_t>(TreeMemory::kTokens * nodes),
          workspace->reserve<double>(TreeMemory::kNumbers * nodes),
          workspace->reserve<float>(nodes)};
}

TreeMemory memory_at(const Workspace& workspace, const TreeReservation& reserved) {
  return {workspace.at(reserved.links), workspace.at(reserved.tokens),
          workspace.at(reserved.numbers), workspace.at(reserved.log_p)};
}

// All scratch memory of a call, what the workspace has promised already included.
TreeScratch make_scratch(const VerifyTreeParams& p, const Gpu& gpu, Workspace* workspace) {
  TreeScratch s;
  const bool filters = any_filters(p);
  const bool has_draft = p.draft.data != nullptr && reads_draft_law(p.rule);
  const bool races = runs_races(p.rule);
  const int64_t nodes = p.batch * p.nodes;
  s.rows = has_draft ? 2 * p.nodes : p.nodes;
  s.tiles = num_tiles(has_draft && p.draft.vocab > p.target.vocab ? p.draft.vocab : p.target.vocab);
  const LawsAsked asked{filters, true, !races};
  const auto laws = reserve_laws(workspace, p.batch * s.rows, s.tiles, asked);
  // Without a law of the draft no child is drawn from one.
  s.teams = {p.batch, has_draft ? 2 * p.nodes : 0, s.tiles, nullptr, nullptr, {}};
  const int64_t blocks = visiting_blocks(gpu, p, s.teams);
  plan_rounds(blocks, &s.teams);
  const int64_t own_nodes = is_small(p) ? 0 : blocks * p.nodes;
  const auto memory = reserve_memory(workspace, nodes);
  const auto own = reserve_memory(workspace, own_nodes);
  const auto trees = workspace->reserve<Tree>(p.batch);
  const auto requests = workspace->reserve<Request>(p.batch);
  const auto results = workspace->reserve<Request>(p.batch);
  const auto visits = workspace->reserve<NodeVisit>(own_nodes);
  const auto wants_draft = workspace->reserve<uint8_t>(has_draft ? nodes : 0);
  const auto ends = workspace->reserve<int32_t>(p.batch);
  const auto winners = workspace->reserve<int64_t>(races ? nodes : 0);
  const auto runners = workspace->reserve<Runner>(races ? nodes * s.tiles : 0);
  const auto part_sums = workspace->reserve<uint64_t>(p.batch * s.tiles * kWarps);
  const auto teams = reserve_teams(workspace, s.teams);
  workspace->allocate(gpu);
  s.laws = laws_at(*workspace, laws, p.batch * s.rows, s.tiles, asked);
  s.memory = memory_at(*workspace, memory);
  s.own = memory_at(*workspace, own);
  s.trees = workspace->at(trees);
  s.requests = workspace->at(requests);
  s.results = workspace->at(results);
  s.visits = workspace->at(visits);
  s.wants_draft = has_draft ? workspace->at(wants_draft) : nullptr;
  s.ends = workspace->at(ends);
  s.winners = races ? workspace->at(winners) : nullptr;
  s.runners = workspace->at(runners);
  s.part_sums = workspace->at(part_sums);
  place_teams(*workspace, teams, &s.teams);
  return s;
}

const auto kVisit = by_elements([](auto e) { return visit_trees<decltype(e)::value>; });
const auto kDraw = by_elements([](auto e) { return draw_token<decltype(e)::value>; });

void launch_raw_logprobs(const Gpu& gpu, const VerifyTreeParams& p, const TreeScratch& s) {
  LawScratch raw = s.laws;
  raw.count = p.batch * p.nodes;
  raw.group_max = nullptr;
  raw.tasks = nullptr;
  raw.laws = nullptr;
  launch_scan(gpu, RawRows{p}, raw, false);
  launch(gpu, "write_raw_logprobs", write_raw_logprobs, (raw.count + kWarps - 1) / kWarps,
         RawRows{p}, raw);
}

void run(const VerifyTreeParams& given, const Gpu& gpu) {
  VerifyTreeParams p = given;
  Workspace workspace;
#if SPECDEC_LISTS
  const ListReservation lists = reserve_lists(&workspace, p);
  const TreeScratch s = make_scratch(p, gpu, &workspace);
  launch_lists(gpu, workspace, lists, &p);
  launch(gpu, "open_trees", open_trees, p.batch, p, s);
  launch_scan(gpu, TreeRows{without_lists(p), s}, s.laws, false);
  const int64_t rows = p.batch * p.nodes, shares = splits_for(gpu, rows, s.tiles);
  launch(gpu, "scan_lists", scan_lists, rows * shares, p, s, shares);
  launch_finish(gpu, TreeRows{p, s}, s.laws);
#else
  const MapReservation map = reserve_map(&workspace, p.map);
  const TreeScratch s = make_scratch(p, gpu, &workspace);
  launch_map(gpu, workspace, map, &p.map);
  launch(gpu, "open_trees", open_trees, p.batch, p, s);
  launch_laws(gpu, TreeRows{p, s}, s.laws);
#endif
  if (s.winners != nullptr) {
    const int64_t nodes = p.batch * p.nodes, splits = splits_for(gpu, nodes, s.tiles);
    launch(gpu, "race_nodes", race_nodes, nodes * splits, p, s, splits);
  }
  launch(gpu, "visit_trees", kVisit[elements_of_laws(p)], visiting_blocks(gpu, p, s.teams), p, s);
  if (s.winners == nullptr) {
    const int64_t splits = splits_for(gpu, p.batch, s.tiles, kBlocksAt128Registers);
    launch(gpu, "draw_token", kDraw[elements_of_laws(p)], p.batch * splits, p, s, splits);
  }
  if (p.raw_logprobs) launch_raw_logprobs(gpu, p, s);
}

void load_all(Loading& load) {
  load(open_trees, race_nodes, kVisit, kDraw, write_raw_logprobs);
  load_laws<TreeRows>(load);
  load_scan<RawRows>(load);
}

}  // namespace

#if SPECDEC_LISTS

void verify_tree_lists(const VerifyTreeParams& p, const Gpu& gpu) { run(p, gpu); }

void load_verify_tree_lists(Loading& load) {
  load_all(load);
  load(sort_lists, scan_lists);
}

#else

void verify_tree(const VerifyTreeParams& p, const Gpu& gpu) {
  if (p.batch == 0) return;
  if (p.lists.ids.data != nullptr) return verify_tree_lists(p, gpu);
  run(p, gpu);
}

void load_verify_tree(Loading& load) {
  load_all(load);
  load_map(load);
  load_verify_tree_lists(load);
}

#endif

}  // namespace cuda
}  // namespace specdec
